"""Teacher forcing of a text in several settings side by side.

Every block attends to the blocks before it as the engine stores them, and to itself unquantized, as
a decode step does. Several blocks are computed in one pass of the model: a layer quantizes the KV
of all of them, and each block attends to the quantized earlier blocks. Figures equal those of one
pass per block, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from penstock.attention import devices
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.span_attention import AttentionWindow
from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats
from penstock.kv.segment import KVSpan, Layer, Segment
from penstock.kv.states import RecurrentState
from penstock_bench.eval_load import KVSetting
from penstock_bench.eval_texts import EvalPiece

PASS_TOKENS = 512
"""Maximum tokens of a pass of the model."""


@dataclass(frozen=True, slots=True)
class Way:
    """Setting, with the model's runner, limits and codecs."""

    setting: KVSetting
    runner: Runner
    limits: EngineSettings
    scheme: Scheme
    """Codecs of the setting, calibrated by the engine for this model."""


class BlockReads(ChunkReads):
    """Attention of one layer over several blocks: earlier blocks quantized, its own unquantized."""

    def __init__(
        self,
        layer: int,
        attention_window: AttentionWindow,
        parts: Sequence[KVSpan],
        position: int,
        scheme: Scheme,
        block_size: int,
    ) -> None:
        super().__init__(layer, attention_window, parts, position, devices.current())
        self._scheme = scheme.of_layer(layer)
        self._block_size = block_size
        self.coded: Layer | None = None
        """Keys and values of the whole blocks as stored; set by `attend`."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as `ChunkReads` does, block by block."""
        window = self.check_given(keys, values, mask)
        *joined_sides, columns = self.joined(window)
        n, size = keys.shape[2], self._block_size
        before = joined_sides[0].shape[2] - n
        whole = Segment.views(((keys, values),), 0, n - n % size).encoded(
            self._scheme, devices.current()
        )
        self.coded = whole.layers[0]
        coded_before = [
            mx.concatenate([joined[:, :, :before], _dequantized(side, joined.dtype)], axis=2)
            for joined, side in zip(joined_sides, self.coded, strict=True)
        ]
        results = []
        for start in range(0, n, size):
            first, last = before + start, before + min(start + size, n)
            seen = [
                mx.concatenate([codes[:, :, :first], joined[:, :, first:last]], axis=2)
                for codes, joined in zip(coded_before, joined_sides, strict=True)
            ]
            results.append(
                devices.current().prefill(
                    queries[:, :, start : start + size],
                    *seen,
                    columns=None if columns is None else columns[:last],
                    start=self.offset + start,
                    scale=scale,
                    attention_window=window,
                    sinks=sinks,
                    eager=True,
                )
            )
        return mx.concatenate(results, axis=2)


def _dequantized(side: Side, dtype: mx.Dtype) -> mx.array:
    return (
        side.dequantize(devices.current()) if isinstance(side, Coded) else mx.array(side)
    ).astype(dtype)


class Reading:
    """One text, read pass by pass; its KV is stored as in the engine.

    Args:
        way: model and setting.
        pass_tokens: maximum tokens of a pass. The engine computes one block per pass, as does a
            model that implements attention itself.
    """

    def __init__(self, way: Way, pass_tokens: int = PASS_TOKENS) -> None:
        self._way = way
        self._size = way.limits.block_size
        self._first = -(-way.limits.raw_first_tokens // self._size) * self._size
        joined = way.runner.fitness.way != "shared"
        self._blocks = 1 if joined else max(1, pass_tokens // self._size)
        self._parts: list[KVSpan] = []
        self._state: RecurrentState | None = None
        self.position = 0
        """Number of tokens read so far."""
        self.coded = (0, 0)
        """Bytes and tokens of the blocks that are quantized, or would be with a codec."""

    def read(self, tokens: Sequence[int]) -> Floats:
        """Read whole blocks, or the rest after the last one.

        Returns:
            Log-probabilities of the token that follows each token: (n, vocabulary).
        """
        logs = []
        while tokens:
            n = self._blocks * self._size
            if self.position < self._first:
                n = min(n, self._first - self.position)
            logs.append(self._pass(tokens[:n]))
            tokens = tokens[n:]
        return logs[0] if len(logs) == 1 else np.concatenate(logs)

    def _pass(self, tokens: Sequence[int]) -> Floats:
        n, runner, scheme = len(tokens), self._way.runner, self._way.scheme
        whole = n - n % self._size if self.position >= self._first else 0
        reads = self._block_reads() if scheme.codecs and whole and self._blocks > 1 else None
        logits, output = runner.read(tokens, self._parts, self.position, self._state, reads)
        segment = output.segment
        if reads is not None:
            segment = Segment(tuple(read.coded for read in reads if read.coded), length=whole)
        elif whole == n:
            segment = segment.encoded(scheme, devices.current())
        if whole:
            nbytes, coded = self.coded
            self.coded = nbytes + segment.kv_nbytes, coded + segment.tokens
        self._parts.append(KVSpan(segment, self.position, segment.tokens))
        self._state = RecurrentState(output.states, exclusive=True)
        self.position += n
        return log_probabilities(logits)

    def _block_reads(self) -> list[BlockReads]:
        way = self._way
        return [
            BlockReads(i, window, self._parts, self.position, way.scheme, self._size)
            for i, window in enumerate(way.runner.attention_windows)
        ]


def log_probabilities(logits: mx.array) -> Floats:
    """Return the log-softmax over the last axis.

    NumPy's exponential takes a tenth of the time of MLX's on a CPU.
    """
    float32_logits: Floats = np.asarray(logits.astype(mx.float32))
    logs: Floats = float32_logits - float32_logits.max(axis=-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    return logs


@dataclass(slots=True)
class Forced:
    """Figures of one setting by piece and token."""

    losses: list[list[float]] = field(default_factory=list)
    """Negative log-likelihood, in nats."""
    kl: list[list[float]] = field(default_factory=list)
    same: list[list[float]] = field(default_factory=list)
    nbytes: int = 0
    tokens: int = 0

    def add(self, figures: PieceFigures, coded: tuple[int, int]) -> None:
        """Add a piece, with the bytes and tokens of its quantized blocks."""
        self.losses.append(figures.losses)
        self.kl.append(figures.kl)
        self.same.append(figures.same)
        self.nbytes, self.tokens = self.nbytes + coded[0], self.tokens + coded[1]


@dataclass(slots=True)
class PieceFigures:
    """Figures of one setting on one piece, by token."""

    losses: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def note(self, logs: Floats, raw: Floats, weights: Floats, after: Sequence[int]) -> None:
        """Add the figures of some positions.

        Args:
            logs: log-probabilities, (n, vocabulary).
            raw: the same with raw KV.
            weights: the probabilities of `raw`.
            after: the next tokens.
        """
        self.losses += (-logs[np.arange(len(after)), after]).tolist()
        self.kl += np.einsum("nv,nv->n", weights, raw - logs).tolist()
        self.same += (logs.argmax(-1) == raw.argmax(-1)).astype(np.float32).tolist()


def force(
    ways: Sequence[Way],
    text: Sequence[EvalPiece],
    block_size: int,
    step: Callable[[], None],
) -> list[Forced]:
    """Read a text in all ways side by side, pass by pass; the first way is raw KV.

    This order avoids storing the distributions of raw KV. `step` is called before each pass.
    An interrupt ends the reading; the figures then cover the completed pieces.
    """
    forced = [Forced() for _ in ways]
    for number, piece in enumerate(text):
        readings = [Reading(way) for way in ways]
        try:
            figures = _force_piece(readings, piece, block_size, step)
        except KeyboardInterrupt:
            if not number:
                raise
            break
        for total, reading, added in zip(forced, readings, figures, strict=True):
            total.add(added, reading.coded)
    return forced


def _force_piece(
    readings: Sequence[Reading], piece: EvalPiece, block_size: int, step: Callable[[], None]
) -> list[PieceFigures]:
    figures = [PieceFigures() for _ in readings]
    for start, stop in passes(piece, block_size):
        counted = [i for i in range(start, min(stop, len(piece.tokens) - 1)) if piece.counts[i + 1]]
        rows = [i - start for i in counted]
        after = [piece.tokens[i + 1] for i in counted]
        raw = weights = np.zeros((0, 0), np.float32)
        for number, (reading, piece_figures) in enumerate(zip(readings, figures, strict=True)):
            step()
            logs = reading.read(piece.tokens[start:stop])
            logs = logs if len(rows) == len(logs) else logs[rows]
            if number == 0:
                raw, weights = logs, np.exp(logs)
            piece_figures.note(logs, raw, weights, after)
    return figures


def passes(piece: EvalPiece, block_size: int) -> list[tuple[int, int]]:
    """Return the start and end of each pass over a piece."""
    size, n = max(1, PASS_TOKENS // block_size) * block_size, len(piece.tokens)
    return [(start, min(start + size, n)) for start in range(0, n, size)]
