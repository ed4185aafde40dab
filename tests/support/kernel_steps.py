"""Random decode steps for the kernels, with NaN wherever they must not read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
from attention_reference import Numbers, attention, numbers

from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow, in_order, plan_attention
from penstock.attention.span_attention import LOG2_E, AttentionWindow
from penstock.kv import columns as col
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.columns import Side
from penstock.kv.segment import KVSpan, Segment
from penstock.plugins.kernels.attend import KernelAttention, LayerStep, Run
from penstock.plugins.kernels.dispatches import Dispatch, StepReading

EPS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
BLOCK = 64
"""A multiple of the span of every codec."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer and its step."""

    dtype: mx.Dtype = mx.float32
    dim: int = 64
    value_dim: int = 0
    kv_heads: int = 2
    repeats: int = 2
    width: int = 1
    scheme: str = "raw"
    window: AttentionWindow = field(default_factory=AttentionWindow)
    sinks: bool = False
    rows: int = 2
    shared: tuple[int, ...] = (300,)
    """Tokens of the segments that all rows read, one behind the other."""
    own: tuple[int, ...] = (70,)
    """Tokens of each row's own segments; ends are ragged."""
    tail: int = 6
    sharp: float = 1.5
    """Standard deviation of the scores; of 60, all but one column have no weight."""
    threadgroups: int = 512
    """With 1, tasks are as long as can be, and staged in several tiles."""


@dataclass
class Step:
    """All inputs of one layer's decode step."""

    shape: Shape
    rows: list[DecodeRow]
    tails: tuple[mx.array, mx.array]
    queries: mx.array
    sinks: mx.array | None
    scale: float

    @classmethod
    def random(cls, shape: Shape, seed: int = 0) -> Step:
        rng = np.random.default_rng(seed)
        value_dim = shape.value_dim or shape.dim

        def normal(
            *size: int, nan_from: int | None = None, dtype: mx.Dtype = shape.dtype
        ) -> mx.array:
            values = rng.standard_normal(size).astype(np.float32)
            if nan_from is not None:
                values[:, :, nan_from:] = np.nan
            return mx.array(values).astype(dtype)

        def segment(tokens: int) -> Segment:
            """Return a segment with NaN after its tokens."""
            held = -(-(tokens + int(rng.integers(0, BLOCK))) // BLOCK) * BLOCK
            raw, dims = shape.scheme == "raw", (shape.dim, value_dim)
            size, behind = (1, shape.kv_heads, held), tokens if raw else None
            keys, values = (normal(*size, dim, nan_from=behind) for dim in dims)
            if raw:
                return Segment(((keys, values),))
            made = Segment(((keys, values),)).encoded(parse_scheme(shape.scheme), devices.current())
            coded = [_poisoned(side, tokens) for side in made.layers[0]]
            return Segment(((coded[0], coded[1]),))

        common, start = [], 0
        for tokens in shape.shared:
            common.append(KVSpan(segment(tokens), start, tokens))
            start += tokens
        slots = rng.permutation(shape.rows + 2)[: shape.rows]
        rows = []
        for i in range(shape.rows):
            spans, at = list(common), start
            for tokens in shape.own:
                count = max(1, tokens - int(rng.integers(0, 9)))
                spans.append(KVSpan(segment(count), at, count))
                at += count
            if common and not shape.own and i % 2:  # rows that leave the last shared one earlier
                last = spans[-1]
                count = max(1, last.columns - int(rng.integers(0, 40)))
                spans[-1], at = KVSpan(last.segment, last.start, count), last.start + count
            used = int(rng.integers(0, shape.tail)) if shape.tail else 0
            rows.append(DecodeRow(tuple(spans), at + used, int(slots[i]), used))
        rows = [rows[i] for i in in_order(rows)]
        columns = shape.tail + shape.width + 3
        tails = []
        for d in (shape.dim, value_dim):
            buffer = np.full((shape.rows + 2, shape.kv_heads, columns, d), np.nan, np.float32)
            for row in rows:
                stop = row.tail + shape.width
                buffer[row.slot, :, :stop] = rng.standard_normal((shape.kv_heads, stop, d))
            tails.append(mx.array(buffer).astype(shape.dtype))
        heads = shape.kv_heads * shape.repeats
        queries = normal(shape.rows, heads, shape.width, shape.dim)
        sinks = normal(heads, dtype=mx.float32) if shape.sinks else None
        return cls(shape, rows, (tails[0], tails[1]), queries, sinks, shape.sharp * shape.dim**-0.5)

    def attend(self, run: Run, target: str = "lockstep") -> mx.array:
        shape = self.shape
        layout = plan_attention(self.rows, shape.window, shape.width)
        reading = StepReading(self.rows, shape.window, shape.width, shape.kv_heads, shape.repeats)
        sinks = None if self.sinks is None else self.sinks * LOG2_E
        plans: dict[object, list[Dispatch]] = {}
        of = LayerStep(self.queries, reading, layout, 0, self.tails, self.scale, sinks)
        kernels = KernelAttention(run, target)
        kernels.threadgroups = shape.threadgroups
        result = kernels.attend(of, plans)
        assert result is not None
        return result

    def joined(self, row: DecodeRow) -> tuple[Numbers, Numbers, list[int]]:
        """Return a row's keys and values, and their positions."""
        sides: list[list[Numbers]] = [[], []]
        at: list[int] = []
        for part in row.parts:
            at += range(part.start, part.end)
            for number, side in enumerate(part.segment.layers[0]):
                wide = side.dequantize(devices.current()) if isinstance(side, Coded) else side
                assert isinstance(wide, mx.array)
                sides[number].append(numbers(wide)[0, :, : part.columns])
        stop = row.tail + self.shape.width
        at += range(row.position - row.tail, row.position + self.shape.width)
        for number, tail in enumerate(self.tails):
            sides[number].append(numbers(tail)[row.slot, :, :stop])
        return np.concatenate(sides[0], axis=1), np.concatenate(sides[1], axis=1), at

    def expected(self) -> Numbers:
        found = []
        for i, row in enumerate(self.rows):
            keys, values, at = self.joined(row)
            found.append(
                attention(
                    numbers(self.queries)[i],
                    keys,
                    values,
                    queries_at=range(row.position, row.position + self.shape.width),
                    columns_at=at,
                    attention_window=self.shape.window,
                    scale=self.scale,
                    sinks=None if self.sinks is None else numbers(self.sinks),
                )
            )
        return np.stack(found)

    def allowed(self) -> float:
        """Return by how much sums in float32 may differ, rounded to the type at the end.

        A score that is off by some roundings of its size moves its weight by as much.
        """
        scores = values = 0.0
        for i, row in enumerate(self.rows):
            keys, mixed, _ = self.joined(row)
            products = np.abs(numbers(self.queries)[i]).max() * np.abs(keys).sum(axis=-1).max()
            scores = max(scores, float(self.scale * products))
            values = max(values, float(np.abs(mixed).max()))
        return (2 * scores * EPS[mx.float32] + EPS[self.shape.dtype]) * values


def error(step: Step, run: Run) -> float:
    """Return the largest difference relative to the allowed one; NaN counts as infinite."""
    off = np.abs(numbers(step.attend(run)) - step.expected()).max()
    return float("inf") if np.isnan(off) else float(off) / step.allowed()


def _poisoned(side: Side, tokens: int) -> Side:
    """Return codes with all bits set after the tokens, and NaN scales."""
    if not isinstance(side, Coded):
        return col.map_arrays(lambda part: _nan_from(part, tokens), side)
    behind = -(-tokens // side.codec.span)
    return replace(side, parts=tuple(_nan_from(part, behind) for part in side.parts))


def _nan_from(part: mx.array, tokens: int) -> mx.array:
    columns = mx.arange(part.shape[2]).reshape(1, 1, -1, *[1] * (part.ndim - 3))
    bad = (
        mx.array(2**32 - 1, mx.uint32)
        if part.dtype == mx.uint32
        else mx.array(float("nan"), part.dtype)
    )
    return mx.contiguous(mx.where(columns < tokens, part, bad))
