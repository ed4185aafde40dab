"""Plan of a decode step's kernel calls, as integer arrays that the kernels read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from penstock.attention.attention_plan import AttentionPlan, DecodeRow, SharedRead
from penstock.attention.span_attention import AttentionWindow
from penstock.kv import columns as col
from penstock.kv.codecs.turbo import padded
from penstock.kv.columns import Side
from penstock.kv.segment import Segment
from penstock.plugins.kernels.kernel_text import most_spans
from penstock.plugins.kernels.span_forms import LEAST_NUMBERS, SpanForm, form_of

FAR = 2**30
"""Number larger than any column, for "no limit"."""
SPLITS = (32, 64, 128, 256, 512, 1_024)
"""Numbers of columns per task to choose from."""
SIMDGROUPS = 8
"""Maximum number of simdgroups per threadgroup: a lane needs up to 168 registers on an H100, and a
multiprocessor has 65,536."""
THREADGROUPS = 512
"""Number of threadgroups that keeps a GPU busy; spans are split to get at least as many."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Division of a task's rows between lanes and simdgroups."""

    rows: int
    """Number of rows per simdgroup, whose queries and results are in registers."""
    lanes: int
    """Number of lanes that share a column."""
    simdgroups: int
    """Number of simdgroups per threadgroup; if more than one, columns are staged."""

    @classmethod
    def of(cls, form: SpanForm, stacked: int) -> Geometry:
        dim = max(form.keys.dim, form.values.dim)
        lanes = min(32, _power_of_two(dim // 8))
        rows = min(4 if dim <= 8 * lanes else 2, _power_of_two(stacked))
        return cls(rows, lanes, min(SIMDGROUPS, _power_of_two(-(-stacked // rows))))

    @property
    def at_once(self) -> int:
        return self.rows * self.simdgroups


@dataclass(frozen=True, slots=True)
class Limits:
    """Columns c visible to a row's first new token: c < end, c < last, and c < keep or c >= low.

    `last` and `low` increase by one for each further new token.
    """

    end: int
    last: int
    low: int
    keep: int


@dataclass(frozen=True, slots=True)
class Range:
    """Columns `first..stop - 1` of a span, read by the rows from `row` on with these limits."""

    span: int
    base: int
    """Index of column 0 of head 0 in the arrays, in units of columns."""
    head_stride: int
    """Distance between heads, in units of columns."""
    first: int
    stop: int
    row: int
    limits: tuple[Limits, ...]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One kernel call over spans of one format, and the merge after it."""

    form: SpanForm
    segments: tuple[Segment | None, ...]
    """Segment of each span; None for the tails."""
    geometry: Geometry
    plan: mx.array
    lists: mx.array
    tasks: int
    partials: int
    """Number of partial results per KV head: rows summed over all tasks."""
    most_stacked: int

    @property
    def tiles(self) -> int:
        return -(-self.most_stacked // self.geometry.at_once)

    def sides(self, layer: int, tails: tuple[Side, Side]) -> list[tuple[Side, Side]]:
        return [tails if segment is None else segment.layers[layer] for segment in self.segments]

    def nbytes(self, kv_heads: int) -> int:
        return self.partials * kv_heads * (self.form.values.dim + 2) * mx.float32.size


@dataclass(frozen=True, slots=True)
class StepReading:
    rows: Sequence[DecodeRow]
    window: AttentionWindow
    width: int
    kv_heads: int
    repeats: int

    @property
    def per_row(self) -> int:
        return self.repeats * self.width

    def result_bytes(self, planned: Sequence[Dispatch]) -> int:
        stacked = len(self.rows) * self.per_row * self.kv_heads
        merged = sum(
            stacked * (dispatch.form.values.dim + 2) * mx.float32.size for dispatch in planned
        )
        return merged + sum(dispatch.nbytes(self.kv_heads) for dispatch in planned)


def partial_bytes(heads: int, dim: int, width: int, tokens: int, parts: int) -> int:
    """Return an upper bound of the bytes of a row's partial and merged results.

    Args:
        width: number of new tokens.
        tokens: total number of columns of all spans.
        parts: number of spans.
    """
    tasks = -(-tokens // SPLITS[0]) + 2 * parts
    return heads * width * (tasks + parts) * (padded(dim) + 2) * mx.float32.size


def limits_of(row: DecodeRow, start: int, end: int, window: AttentionWindow) -> Limits:
    """Return the limits of a row in a span at position `start` with `end` columns."""
    low = -FAR if window.window is None else row.position - window.window + 1 - start
    keep = window.keep - start if window.window is not None else 0
    return Limits(end, row.position + 1 - start, max(low, -FAR), keep)


def signature(layout: AttentionPlan, layer: int, dtype: mx.Dtype) -> Hashable:
    """Return a key that is equal for layers with the same plan; None if a format is unsupported."""
    parts = []
    for segment in segments_of(layout):
        form = form_of(segment.layers[layer], dtype)
        if form is None:
            return None
        keys = segment.layers[layer][0]
        parts.append((form, col.columns(keys), segment.missing[layer] if segment.missing else 0))
    return tuple(parts)


def segments_of(layout: AttentionPlan) -> Iterator[Segment]:
    for level in layout.levels:
        for shared in level:
            for segment, _, _ in shared.pieces:
                yield segment


def dispatches(
    reading: StepReading,
    layout: AttentionPlan,
    layer: int,
    tails: tuple[SpanForm, int],
    threadgroups: int = THREADGROUPS,
) -> list[Dispatch]:
    """Plan the kernel calls of a layer: one per format and up to `most_spans` spans."""
    by_form: dict[SpanForm, dict[int, list[Range]]] = {}
    segments: dict[int, Segment] = {}
    for level in layout.levels:
        for shared in level:
            for segment, ranged in _ranges(reading, shared, layer):
                form = form_of(segment.layers[layer], tails[0].dtype)
                assert form is not None
                segments[id(segment)] = segment
                by_form.setdefault(form, {}).setdefault(id(segment), []).append(ranged)
    tail_ranges = [_tail_range(reading, i, tails[1]) for i in range(len(reading.rows))]
    by_form.setdefault(tails[0], {})[0] = tail_ranges
    calls = []
    for form, spans in by_form.items():
        limit, names = most_spans(form), list(spans)
        for first in range(0, len(names), limit):
            chosen = names[first : first + limit]
            ranges = [
                (number, ranged) for number, name in enumerate(chosen) for ranged in spans[name]
            ]
            chosen_segments = [segments.get(name) for name in chosen]
            calls.append(_dispatch(reading, form, chosen_segments, ranges, threadgroups))
    return calls


def _ranges(
    reading: StepReading, shared: SharedRead, layer: int
) -> Iterator[tuple[Segment, Range]]:
    members = reading.rows[shared.first : shared.last]
    for segment, start, stop in shared.pieces:
        parts = [next(part for part in row.parts if part.segment is segment) for row in members]
        gone = segment.missing[layer] if segment.missing else 0
        limits = tuple(
            limits_of(row, part.start + gone, part.columns - gone, reading.window)
            for row, part in zip(members, parts, strict=True)
        )
        head_stride = col.columns(segment.layers[layer][0])
        first, stop = segment.columns(layer, start, stop)
        yield segment, Range(0, 0, head_stride, first, stop, shared.first, limits)


def _tail_range(reading: StepReading, number: int, columns: int) -> Range:
    row = reading.rows[number]
    stop = row.tail + reading.width
    limits = limits_of(row, row.position - row.tail, stop, reading.window)
    base = row.slot * reading.kv_heads * columns
    return Range(0, base, columns, 0, stop, number, (limits,))


def _dispatch(
    reading: StepReading,
    form: SpanForm,
    segments: Sequence[Segment | None],
    ranges: Sequence[tuple[int, Range]],
    threadgroups: int,
) -> Dispatch:
    stacked = [len(ranged.limits) * reading.per_row for _, ranged in ranges]
    geometry = Geometry.of(form, max(stacked))
    split = _split(form, ranges, reading.kv_heads, threadgroups)
    tasks: list[int] = []
    limits: list[int] = []
    lists: list[list[int]] = [[] for _ in reading.rows]
    out = count = 0
    for (span, ranged), rows in zip(ranges, stacked, strict=True):
        first_limit = len(limits)
        for limit in ranged.limits:
            limits += [limit.end, limit.last, limit.low, limit.keep]
        for begin in range(ranged.first // form.span * form.span, ranged.stop, split):
            first = max(begin, ranged.first)
            columns = min(begin + split, ranged.stop) - first
            tasks += [span, ranged.base, ranged.head_stride, first, columns]
            tasks += [ranged.row, len(ranged.limits), out, first_limit]
            for i in range(len(ranged.limits)):
                lists[ranged.row + i].append(out + i * reading.per_row)
            out += rows
            count += 1
    header = [reading.repeats, reading.width, reading.kv_heads, out]
    header.append(len(reading.rows) * reading.per_row)
    places = np.array([*header, *tasks, *limits], np.int32)
    places[len(header) + 8 : len(header) + len(tasks) : 9] += len(header) + len(tasks)
    return Dispatch(
        form,
        tuple(segments),
        geometry,
        mx.array(places),
        mx.array(_flat(lists)),
        count,
        out,
        max(stacked),
    )


def _split(
    form: SpanForm, ranges: Sequence[tuple[int, Range]], kv_heads: int, threadgroups: int
) -> int:
    """Return the maximum number of columns per task that gives enough threadgroups."""
    splits = [split for split in SPLITS if split % form.span == 0]
    for split in reversed(splits):
        count = sum(-(-(ranged.stop - ranged.first) // split) for _, ranged in ranges)
        if count * kv_heads >= threadgroups:
            return split
    return splits[0]


def _flat(lists: Sequence[Sequence[int]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the offset of each row's list, the end of the last list, and all lists."""
    ends = len(lists) + 1 + np.cumsum([0, *map(len, lists)])
    items = [item for entries in lists for item in entries]
    padding = [0] * LEAST_NUMBERS  # MLX puts smaller arrays in another address space
    return np.array([*ends, *items, *padding], np.int32)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
