"""Batch-invariant attention: results do not depend on the batch or on segment boundaries.

Each row attends to the blocks of its visible columns in order, with the same compiled loop in any
batch, in prefill and decode, for shared spans and single buffers. In BLAS the order of summation
depends on shapes, and rounding of activations would amplify a difference in the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.columns import Side
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import Tails
from penstock.plugins.cpu.choice_jobs import CHOICE_WORDS, ChoiceTable, choice_job, query_factor
from penstock.plugins.cpu.choice_loops import bytes_of, side_addresses
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.ordered_loops import (
    AttendTable,
    attend_tables,
    ordered_loop,
    space_floats,
)
from penstock.plugins.cpu.step_choices import ChoiceBuffers, StepChoice, index_of

_Value = TypeVar("_Value")
NUMBER_BYTES = 4
"""Index in `plain_addresses` of the bytes per element."""


@dataclass(frozen=True, slots=True)
class OrderedReads:
    """Plan of what the rows of a step read."""

    spans: Integers
    """Spans, (layers, spans, 6), or (1, spans, 6) if equal for all layers; see `AttendTable`.

    A row's last span is its tail or the tokens of a chunk, without addresses."""
    firsts: Integers
    """Index of each row's first span, and the end."""
    positions: list[int]
    """Positions of all new tokens."""
    window: AttentionWindow
    """Attention window of a layer; the default if its rows see all tokens."""
    begins: Integers | None = None
    """First column that each row has in each layer, (layers, rows); None if all layers have all."""
    values: dict[object, Any] = field(default_factory=dict)
    """Results of `derived`."""

    def derived(self, key: object, compute: Callable[[], _Value]) -> _Value:
        """Return `compute()`, cached while steps read the same spans."""
        if key not in self.values:
            self.values[key] = compute()
        value: _Value = self.values[key]
        return value

    def has_visible(self, layer: int) -> bool:
        """Return whether a layer has all columns that its rows see through the window."""
        if self.begins is None:
            return True
        begins = self.begins[layer]
        first = self.positions[:: len(self.positions) // len(begins)]
        starts = [0 if self.window.keep else self.window.starts_at(place) for place in first]
        return bool((begins <= starts).all())

    def of_layers(self, layers: Sequence[int]) -> Integers:
        """Return a copy of the spans of layers, (n, spans, 6)."""
        if len(self.spans) == 1:
            return np.repeat(self.spans, len(layers), axis=0)
        return self.spans[list(layers)]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Selection of the rows of a step in one layer that is computed by itself."""

    choice: StepChoice
    layer: int
    queries: Floats
    """Queries of the model, (rows, heads, key_dim)."""
    dims: tuple[int, int]
    """Sizes of a key and of a value."""
    nbytes: int
    """Bytes of a number of the keys and values."""
    scale: float
    """Scale of the scores."""

    def run(self, attend: Integers) -> ChoiceBuffers:
        """Select, and let the job of the table `attend` read what is selected.

        Returns:
            The buffers that this job reads; the caller keeps them until it has run.
        """
        table, factor = np.zeros(CHOICE_WORDS, np.int64), query_factor(self.dims[0], self.scale)
        factors = np.array([factor])
        table[ChoiceTable.MODEL_QUERIES] = self.queries.ctypes.data
        table[ChoiceTable.STRIDE] = self.queries[0].size
        table[ChoiceTable.FACTOR] = factors.ctypes.data
        buffers = ChoiceBuffers.of(self.choice, int(attend[AttendTable.KV_HEADS]))
        buffers.set_table(table, self.choice, self.layer, attend, self.dims, self.nbytes)
        team().run(choice_job(self.dims[0]), table)
        return buffers


class _Order(threading.local):
    kept = False


_order = _Order()


@contextmanager
def in_order() -> Iterator[None]:
    """Make the CPU back end use ordered attention in this thread, in a `with` block."""
    _order.kept = True
    try:
        yield
    finally:
        _order.kept = False


def keeps_order() -> bool:
    """Return whether the calling thread is in an `in_order` block."""
    return _order.kept


def attend_buffer(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    first: int = 0,
    kept: int = 0,
    window: AttentionWindow = AttentionWindow(),  # noqa: B008
    soft_cap: float = 0.0,
) -> mx.array | None:
    """Attend causally to one buffer; None if the dtype is not supported, see `bytes_of`.

    Args:
        queries: (b, heads, n, d), of the last n columns.
        keys: (b, kv_heads, m, d).
        values: (b, kv_heads, m, value_dim).
        scale: scale of the scores.
        first: position of the first column after the `kept` ones.
        kept: number of first columns, which have the positions from 0 on.
        window: attention window.
        soft_cap: logit soft-capping; 0 for none.
    """
    nbytes = bytes_of((keys, values))
    if queries.dtype != mx.float32 or not nbytes:
        return None
    rows = _rows(queries, scale)
    b, _, n, _ = queries.shape
    sides = [_with_whole_heads(np.asarray(side)) for side in (keys, values)]
    columns = keys.shape[2] - kept
    spans = []
    for row in range(b):
        addresses = [*side_addresses(sides[0][row]), *side_addresses(sides[1][row])]
        spans.append([*addresses, kept, 0])
        for place, side in zip((0, 2), sides, strict=True):
            addresses[place] += kept * side.strides[2]
        spans.append([*addresses, columns, first])
    end = first + columns
    seen = np.tile(seen_columns(range(end - n, end), window), (b, 1))
    loop = ordered_loop(keys.shape[-1], values.shape[-1], soft_cap, nbytes)
    firsts, dim = np.arange(0, 2 * b + 1, 2), values.shape[-1]
    by_row = np.array(spans, np.int64)
    mixed = _attend(rows, keys.shape[1], by_row, firsts, seen, window.keep, n, dim, loop)
    return _as_queries(mixed, queries)


def attend_step(
    step: DecodeStep, layer: int, window: AttentionWindow, queries: mx.array, scale: float
) -> mx.array | None:
    """Attend like `AttentionBackend.decode`; None if the layer is not read in order."""
    planned = None if queries.dtype != mx.float32 else step_plan(step, layer, window)
    if planned is None:
        return None
    plan, choice = planned
    rows = _rows(queries, scale)
    mx.eval(step.tails.layer(layer))
    tails = _tails(step, layer)
    chosen = None
    if choice is not None:
        dims = tails[0].shape[-1], tails[1].shape[-1]
        chosen = LayerChoice(choice, layer, _rows(queries, 1.0), dims, tails[0].itemsize, scale)
    return _as_queries(_attend_tails(step, layer, plan, rows, tails, chosen), queries)


def step_plan(
    step: DecodeStep, layer: int, window: AttentionWindow
) -> tuple[OrderedReads, StepChoice | None] | None:
    """Return the plan of a layer's ordered reads, and what is selected of it.

    None if the layer is not read in order; no choice if all tokens are read.
    """
    nbytes = 0 if step.has_apart(layer) else step.tails.derived(tail_number_bytes)[layer]
    if not nbytes:
        return None
    key = step_plan, window, nbytes, layer in step.selection.layers
    if key not in step.kernel_plans:  # the same for most layers
        step.kernel_plans[key] = _step_plan(step, layer, window, nbytes)
    planned: tuple[OrderedReads, StepChoice | None] | None = step.kernel_plans[key]
    return planned if planned is not None and planned[0].has_visible(layer) else None


def _step_plan(
    step: DecodeStep, layer: int, window: AttentionWindow, nbytes: int
) -> tuple[OrderedReads, StepChoice | None] | None:
    if step_plan not in step.kernel_plans:
        latest = step.tails.derived(LatestPlan)
        step.kernel_plans[step_plan] = latest.plan(step.rows, step.width, nbytes)
    plan = _within(step.kernel_plans[step_plan], window)
    if plan is None or not step.choosing(layer, window):
        return None if plan is None else (plan, None)
    choice = step_choice(step, layer, window, plan)
    # Beside rows that select, others may see only a window.
    return None if choice is None or plan.window != AttentionWindow() else (plan, choice)


def step_choice(
    step: DecodeStep, layer: int, window: AttentionWindow, plan: OrderedReads
) -> StepChoice | None:
    """Return what a step selects in a layer; None if its index has values, which are read, too."""
    if step.selection.index.with_values:
        return None
    key = step_choice, window
    if key not in step.kernel_plans:
        numbers = step.choosing(layer, window)
        index = plan.derived(index_of, lambda: index_of(step))
        step.kernel_plans[key] = StepChoice.of(step, plan.firsts, index, numbers)
    choice: StepChoice = step.kernel_plans[key]
    return choice


def chunk_plan(reads: ChunkReads, tokens: int, window: AttentionWindow) -> OrderedReads | None:
    """Return a layer's reads in a prefill chunk of `tokens` tokens.

    Returns None if ordered attention cannot read the layer, or during calibration.
    """
    if reads.squares is not None or reads.chooses(window, tokens):
        return None
    if chunk_plan not in reads.plans:
        nbytes = (reads.dtype or mx.float32).size
        reads.plans[chunk_plan] = _plan([(reads.parts, reads.offset, 0)], tokens, nbytes)
    plan = _within(reads.plans[chunk_plan], window)
    return plan if plan is not None and plan.has_visible(reads.layer) else None


def _within(plan: OrderedReads | None, window: AttentionWindow) -> OrderedReads | None:
    """Return a plan with the window of a layer; None for None."""
    if plan is None or window.sees_all(max(plan.positions)):
        return plan
    return replace(plan, window=window)


def tail_addresses(tails: Tails) -> Integers:
    """Return the layout of the buffers of all layers' keys and values, (layers, 2, 4).

    A row is the address, and the bytes between slots, between heads, and between tokens; zeros in
    layers whose dtype the loops cannot read.
    """
    layout = np.zeros((len(tails.shapes), 2, 4), np.int64)
    for layer, nbytes in enumerate(tails.derived(tail_number_bytes)):
        for side, buffer in enumerate(tails.layer(layer) if nbytes else ()):
            array = np.asarray(buffer)
            layout[layer, side] = array.__array_interface__["data"][0], *array.strides[:3]
    return layout


def tail_number_bytes(tails: Tails) -> list[int]:
    """Return the bytes of an element of each layer's keys and values; see `bytes_of`."""
    return [bytes_of(tails.layer(layer)) for layer in range(len(tails.shapes))]


def _tails(step: DecodeStep, layer: int) -> list[Floats]:
    """Return views of the tails' buffers, (slots, kv_heads, columns, dim)."""
    return [np.asarray(side) for side in step.tails.layer(layer)]


def _attend_tails(
    step: DecodeStep,
    layer: int,
    plan: OrderedReads,
    rows: Floats,
    tails: Sequence[Floats],
    choice: LayerChoice | None,
) -> Floats:
    """Attend to spans and tails with scaled queries."""
    spans = plan.of_layers([layer])[0]
    spans[plan.firsts[1:] - 1, :4] = [
        [*side_addresses(tails[0][row.slot]), *side_addresses(tails[1][row.slot])]
        for row in step.rows
    ]
    seen, dim = seen_columns(plan.positions, plan.window), tails[1].shape[-1]
    loop = ordered_loop(tails[0].shape[-1], dim, nbytes=tails[0].itemsize)
    heads, kept = tails[0].shape[1], plan.window.keep
    return _attend(rows, heads, spans, plan.firsts, seen, kept, step.width, dim, loop, choice)


def seen_columns(positions: Sequence[int], window: AttentionWindow) -> Integers:
    """Return the first and the end of the columns visible from positions, (n, 2)."""
    return np.array([(window.starts_at(position), position + 1) for position in positions])


class LatestPlan:
    """Plan of the latest step, whose arrays the next step uses again if it reads the same spans."""

    def __init__(self, _: Tails) -> None:
        self._key: object = None
        self._addresses: list[Integers] = []
        """Addresses of all parts, kept so that others cannot have their ids."""
        self._plan: OrderedReads | None = None

    def plan(self, rows: Sequence[DecodeRow], width: int, nbytes: int) -> OrderedReads | None:
        """Return the plan of a step; see `_plan`."""
        parts = [part for row in rows for part in row.parts]
        addresses = [part.segment.derived(plain_addresses) for part in parts]
        key = (
            width,
            nbytes,
            [(len(row.parts), row.slot, row.position - row.tail) for row in rows],
            [(part.columns, part.start, part.segment.missing) for part in parts],
            [*map(id, addresses)],
        )
        if key != self._key:
            by_row = [(row.parts, row.position, row.tail) for row in rows]
            self._key, self._addresses = key, addresses
            self._plan = _plan(by_row, width, nbytes)
            return self._plan
        if self._plan is None:
            return None
        self._plan.spans[:, self._plan.firsts[1:] - 1, 4] = [row.tail + width for row in rows]
        starts = [row.position for row in rows]
        positions = [place for start in starts for place in range(start, start + width)]
        return replace(self._plan, positions=positions)


def _plan(
    rows: Sequence[tuple[Sequence[KVSpan], int, int]], width: int, nbytes: int
) -> OrderedReads | None:
    """Plan reads without a window; None if a span is compressed or spilled.

    Args:
        rows: spans of each row, position of its first new token, and number of tokens of its tail
            before that.
        width: number of new tokens per row.
        nbytes: bytes of an element of the keys and values.
    """
    layers = max((len(part.segment.layers) for parts, *_ in rows for part in parts), default=1)
    spans = np.zeros((layers, sum(len(parts) + 1 for parts, *_ in rows), 6), np.int64)
    begins = np.zeros((layers, len(rows)), np.int64)
    number, firsts, positions = 0, [0], list[int]()
    for row, (parts, position, tail) in enumerate(rows):
        for part in parts:
            segment = part.segment
            if segment.derived(_number_bytes) != nbytes:
                return None
            spans[:, number, :4] = segment.derived(plain_addresses)[:, :NUMBER_BYTES]
            spans[:, number, 4:] = part.columns, part.start
            if segment.missing:  # evicted behind a window
                gone = np.minimum(segment.missing, part.columns)
                spans[:, number, 4] -= gone
                spans[:, number, 5] += gone
                begins[:, row] = np.where(gone > 0, part.start + gone, begins[:, row])
            number += 1
        spans[:, number, 4:] = tail + width, position - tail
        number += 1
        firsts.append(number)
        positions += range(position, position + width)
    window, incomplete = AttentionWindow(), begins.any()
    return OrderedReads(spans, np.array(firsts), positions, window, begins if incomplete else None)


def plain_addresses(segment: Segment) -> Integers:
    """Return the addresses of each layer's uncompressed keys and values, (layers, 5).

    A row has the address of the keys and the stride of their heads in bytes, the same for the
    values, and the bytes per element; zeros if not readable. The addresses are valid while the
    segment exists.
    """
    return np.array([_plain_layer(*layer) for layer in segment.layers], np.int64).reshape(-1, 5)


def _number_bytes(segment: Segment) -> int:
    """Return the bytes per element of all layers; 0 if they differ or are not readable."""
    sizes = set(segment.derived(plain_addresses)[:, NUMBER_BYTES].tolist())
    return sizes.pop() if len(sizes) == 1 else 0


def _plain_layer(keys: Side, values: Side) -> list[int]:
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
        return [0] * 5
    nbytes = bytes_of((keys, values))
    sides = [np.asarray(side)[0] if nbytes else None for side in (keys, values)]
    return [*side_addresses(sides[0]), *side_addresses(sides[1]), nbytes]


def _rows(queries: mx.array, scale: float) -> Floats:
    """Return queries (b, heads, n, d) as scaled rows (b * n, heads, d)."""
    by_row = (queries * scale).transpose(0, 2, 1, 3)
    rows: Floats = np.ascontiguousarray(np.asarray(by_row))
    return rows.reshape(-1, *rows.shape[2:])


def _as_queries(mixed: Floats, queries: mx.array) -> mx.array:
    b, heads, n, _ = queries.shape
    return mx.array(mixed).reshape(b, n, heads, -1).transpose(0, 2, 1, 3)


def _with_whole_heads(side: Floats) -> Floats:
    """Return (b, heads, m, d) with each head contiguous, copied if needed."""
    gapless = (side.shape[-1] * side.itemsize, side.itemsize)
    return side if side.strides[-2:] == gapless else np.ascontiguousarray(side)


def _attend(
    queries: Floats,
    kv_heads: int,
    spans: Integers,
    firsts: Integers,
    seen: Integers,
    kept: int,
    width: int,
    value_dim: int,
    loop: int,
    choice: LayerChoice | None = None,
) -> Floats:
    """Run a loop on all threads; arrays must be contiguous."""
    rows, heads, dim = queries.shape
    threads = team()
    mixed = np.empty((rows, heads, value_dim), np.float32)
    space = threads.space(space_floats(dim, value_dim, threads.threads))
    (table,) = attend_tables(spans[None], firsts, rows, width)
    table[AttendTable.QUERIES] = queries.ctypes.data
    table[AttendTable.HEADS], table[AttendTable.KV_HEADS] = heads, kv_heads
    table[AttendTable.SEEN], table[AttendTable.KEPT] = seen.ctypes.data, kept
    table[AttendTable.MIXED], table[AttendTable.SPACE] = mixed.ctypes.data, space.ctypes.data
    buffers = None if choice is None else choice.run(table)
    threads.run(loop, table)
    del buffers  # whose addresses are in the table
    return mixed
