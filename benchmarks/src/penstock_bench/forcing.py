"""Reading a text block by block in several settings, side by side: what each expects next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.kv.attention_plan import KVSpan
from penstock.kv.codecs import Scheme
from penstock_bench.eval_load import KVSetting
from penstock_bench.eval_texts import Piece


@dataclass(frozen=True, slots=True)
class Way:
    """How a text is read in a setting."""

    setting: KVSetting
    runner: Runner
    limits: EngineSettings
    scheme: Scheme
    """The setting's, as the engine scales it for this model."""


class Reading:
    """One text, read block after block; what was read is held as the engine holds it."""

    def __init__(self, way: Way) -> None:
        size = way.limits.block_size
        self._runner = way.runner
        self._scheme = way.scheme
        self._first = -(-way.limits.raw_first_tokens // size) * size
        self._size = size
        self.parts: list[KVSpan] = []

    @property
    def position(self) -> int:
        """How many tokens were read."""
        return self.parts[-1].end if self.parts else 0

    @property
    def coded(self) -> tuple[int, int]:
        """Bytes and tokens of what is coded, or would be if there were a codec."""
        coded = [p for p in self.parts if p.start >= self._first and p.columns == self._size]
        return sum(p.segment.nbytes for p in coded), sum(p.columns for p in coded)

    def read(self, tokens: Sequence[int]) -> mx.array:
        """Read a block, or the rest behind the last one.

        Returns:
            Log-probabilities of the token that follows each token: (n, vocabulary) float32.
        """
        start = self.position
        logits, chunk = self._runner.read(tokens, self.parts, start)
        segment = chunk.segment
        if start >= self._first and len(tokens) == self._size:
            segment = segment.encoded(self._scheme)
        self.parts.append(KVSpan(segment, start, len(tokens)))
        wide = logits.astype(mx.float32)
        return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


@dataclass(slots=True)
class Forced:
    """Of one setting, token by token, piece by piece."""

    losses: list[list[float]] = field(default_factory=list)
    """Negative log-likelihood, nats."""
    kl: list[list[float]] = field(default_factory=list)
    same: list[list[float]] = field(default_factory=list)
    nbytes: int = 0
    tokens: int = 0


def force(
    ways: Sequence[Way],
    text: Sequence[Piece],
    block_size: int,
    step: Callable[[], None],
) -> list[Forced]:
    """Read a text in all ways side by side, block by block; the first way is raw.

    In this order the distributions of raw need not be kept. `step` is called before each piece.
    """
    forced = [Forced() for _ in ways]
    for piece in text:
        step()
        readings = [Reading(way) for way in ways]
        for one in forced:
            one.losses.append([])
            one.kl.append([])
            one.same.append([])
        for start in range(0, len(piece.tokens), block_size):
            stop = min(start + block_size, len(piece.tokens))
            counted = [
                i for i in range(start, min(stop, len(piece.tokens) - 1)) if piece.counts[i + 1]
            ]
            rows = mx.array([i - start for i in counted], mx.int32)
            after = mx.array([piece.tokens[i + 1] for i in counted], mx.int32)
            raw: mx.array | None = None
            for reading, one in zip(readings, forced, strict=True):
                logs = reading.read(piece.tokens[start:stop])[rows]
                raw = logs if raw is None else raw
                if counted:
                    _note(one, logs, raw, after)
        for reading, one in zip(readings, forced, strict=True):
            nbytes, tokens = reading.coded
            one.nbytes, one.tokens = one.nbytes + nbytes, one.tokens + tokens
    return forced


def _note(one: Forced, logs: mx.array, raw: mx.array, after: mx.array) -> None:
    losses = -mx.take_along_axis(logs, after[:, None], axis=-1)[:, 0]
    kl = (mx.exp(raw) * (raw - logs)).sum(axis=-1)
    same = mx.argmax(logs, axis=-1) == mx.argmax(raw, axis=-1)
    mx.eval(losses, kl, same)
    for kept, new in ((one.losses, losses), (one.kl, kl), (one.same, same.astype(mx.float32))):
        kept[-1].extend(new.tolist())  # type: ignore[arg-type]
