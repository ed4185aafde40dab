"""One forward pass: the model, how it reads what is held, and what a step of it takes.

Lives in the thread that owns the arrays; nothing here knows requests, trees or limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from penstock.errors import ModelError
from penstock.kv.attention import Sight
from penstock.kv.reads import ChunkReads, DecodeStep, JoinedReads, Part, Row
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape, Tails, token_bytes
from penstock.models import mlx_lm as seam

Way = Literal["shared", "joined"]
PROBE = (3, 1, 4, 1, 5, 2)
"""Tokens that a model reads both ways before it is trusted; every vocabulary has them."""
TOLERANCE = {mx.float32: 1e-3}
HALF_TOLERANCE = 6e-2
"""Largest difference of two logits, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """How a model reads KV that lies in parts, and why that way."""

    way: Way
    """`shared`: part by part where they lie. `joined`: one layer at a time, copied together."""
    why: str
    modules: tuple[str, ...]
    """Modules of mlx-lm in which the seam was put."""


class Runner:
    """A model and the ways to run it on parts and tails.

    Args:
        model: mlx-lm's; its weights are evaluated here.
        max_kv_size: tokens a sequence sees at most, the kept ones among them.
        keep: first tokens that are always seen.

    Raises:
        ModelError: the model has layers that are not made of keys and values, or computes
            something else on parts than on its own caches.
    """

    def __init__(self, model: Any, *, max_kv_size: int, keep: int) -> None:
        self.model = model
        mx.eval(model.parameters())
        layers = seam.sights(model)
        modules = seam.attach(model)
        self.heads = seam.query_heads(model)
        self.shapes: tuple[LayerShape, ...] = ()
        self.vocabulary_size = 0
        self.sights = layers  # unbounded while the model is tried
        self.fitness = self._try(modules)
        bound = Sight(max_kv_size - keep, keep)
        self.sights = [
            bound if sight.window is None else sight.within(max_kv_size) for sight in layers
        ]
        self.distinct_sights = list(dict.fromkeys(self.sights))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return token_bytes(self.shapes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token's KV in the largest layer."""
        return max(shape.nbytes for shape in self.shapes)

    def nearest(self, position: int) -> int:
        """Return the first position beyond the kept ones that any layer sees from `position`."""
        return min(sight.starts_at(position) for sight in self.distinct_sights)

    def decode(self, tokens: Sequence[int], rows: Sequence[Row], tails: Tails) -> mx.array:
        """Read one token a row; return the logits (b, vocabulary), not computed yet.

        The rows' order is `reads.in_order`'s. The tails' buffers must be evaluated with the
        logits.
        """
        tails.ready()
        if self.fitness.way == "joined":
            return mx.concatenate(
                [self._decode_joined(t, row, tails) for t, row in zip(tokens, rows, strict=True)]
            )
        step = DecodeStep.of(rows, tails)
        return self._run([[token] for token in tokens], step.caches(self.sights))

    def prefill(self, tokens: Sequence[int], parts: Sequence[Part], position: int) -> Segment:
        """Read tokens of one sequence behind its parts; return their KV, evaluated."""
        caches = self._chunk_caches(parts, position, self.fitness.way)
        self.model(mx.array([list(tokens)]), cache=caches)
        return _segment(caches)

    def read(
        self, tokens: Sequence[int], parts: Sequence[Part], position: int
    ) -> tuple[mx.array, Segment]:
        """Read tokens of one sequence behind its parts; return the logits after each of them,
        (n, vocabulary), and their KV, evaluated."""
        caches = self._chunk_caches(parts, position, self.fitness.way)
        logits: mx.array = self.model(mx.array([list(tokens)]), cache=caches)[0]
        mx.eval(logits)
        return logits, _segment(caches)

    def _chunk_caches(
        self, parts: Sequence[Part], position: int, way: Way
    ) -> list[ChunkReads] | list[JoinedReads]:
        if way == "joined":
            return [JoinedReads(i, s, parts, position) for i, s in enumerate(self.sights)]
        last = len(self.sights) - 1
        return [
            ChunkReads(i, s, parts, position, last=i == last) for i, s in enumerate(self.sights)
        ]

    def _decode_joined(self, token: int, row: Row, tails: Tails) -> mx.array:
        tail = (tails, row.slot, row.tail)
        caches = [
            JoinedReads(i, sight, row.parts, row.position, tail)
            for i, sight in enumerate(self.sights)
        ]
        return self._run([[token]], caches)

    def _run(self, tokens: list[list[int]], caches: list[Any]) -> mx.array:
        """Return the logits of the last tokens, (b, vocabulary)."""
        logits: mx.array = self.model(mx.array(tokens), cache=caches)[:, -1]
        return logits

    # ---- trying the model

    def _try(self, modules: tuple[str, ...]) -> Fitness:
        """Find a way on which the model computes what it computes on its own caches."""
        expected = self._plain_logits()
        self.vocabulary_size = expected.shape[-1]
        if not modules:
            why = "its attention does not go through mlx-lm's common function"
        else:
            why = self._difference("shared", expected)
            if not why:
                return Fitness("shared", "its attention goes through mlx-lm's function", modules)
        wrong = self._difference("joined", expected)
        if wrong:
            raise ModelError(f"the engine cannot run this model: {why}; joined, {wrong}")
        return Fitness("joined", why, modules)

    def _plain_logits(self) -> mx.array:
        """Return the logits of the last two tokens of the probe, on mlx-lm's caches."""
        caches = seam.plain_caches(self.model)
        *first, before, last = PROBE
        self.model(mx.array([first]), cache=caches)
        logits = [self._run([[token]], caches) for token in (before, last)]
        both = mx.concatenate(logits).astype(mx.float32)
        mx.eval(both)
        return both

    def _difference(self, way: Way, expected: mx.array) -> str:
        """Return what is wrong with reading the probe this way; nothing if it is right."""
        try:
            found, dtype = self._probe(way)
        # A boundary: a model's own code is handed caches it was not written for, and may do
        # anything with them; whatever it raises, the other way is tried.
        except Exception as error:  # noqa: BLE001
            text = str(error).strip() or type(error).__name__
            return f"{type(error).__name__}: {text.splitlines()[0]}"
        difference = float(mx.abs(found - expected).max())
        off = difference / max(1e-6, float(mx.abs(expected).max()))
        if not off <= TOLERANCE.get(dtype, HALF_TOLERANCE):
            return f"its logits differ by {off:.1%} from those on mlx-lm's own caches"
        return ""

    def _probe(self, way: Way) -> tuple[mx.array, mx.Dtype]:
        """Read the probe as two rows that share a part, one a token ahead of the other."""
        *first, before, last = PROBE
        half = len(first) // 2
        caches = self._chunk_caches([], 0, way)
        self.model(mx.array([first[:half]]), cache=caches)
        shared = Part(_segment(caches), 0, half)
        self.shapes = tuple(
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
            for keys, values in shared.segment.layers
            if isinstance(keys, mx.array) and isinstance(values, mx.array)
        )
        ends = []
        for rest in (first[half:], [*first[half:], before]):
            caches = self._chunk_caches([shared], half, way)
            self.model(mx.array([rest]), cache=caches)
            ends.append(Part(_segment(caches), half, len(rest)))
        tails = Tails(2, 2, self.shapes)
        tails.ready()
        rows = [Row((shared, end), end.end, slot, 0) for slot, end in enumerate(ends)]
        if way == "joined":
            logits = [
                self._decode_joined(token, row, tails)
                for token, row in zip((before, last), rows, strict=True)
            ]
            found = mx.concatenate(logits)
        else:
            step = DecodeStep.of(rows, tails)
            found = self._run([[before], [last]], step.caches(self.sights))
        found = found.astype(mx.float32)
        mx.eval(found)
        return found, self.shapes[0].dtype


def _segment(caches: Sequence[ChunkReads] | Sequence[JoinedReads]) -> Segment:
    """Return what a chunk has computed as a segment, evaluated."""
    layers = []
    for cache in caches:
        if cache.keys is None or cache.values is None:
            raise ModelError(f"layer {cache.layer} did not cache anything")
        layers.append((cache.keys, cache.values))
    mx.eval(layers)
    return Segment(tuple(layers))
