"""Forward passes through all packed layers in one job, without Python between layers.

A model calls its layers one after another. Each layer records what it must read; the last one
computes all of them, one compiled part after another. Cached keys and values are not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from penstock.attention.chunk_reads import ChunkReads, MixedReads
from penstock.attention.reads import DecodeReads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.plugins.cpu.choice_jobs import CHOICE_WORDS, ChoiceTable, choice_job, query_factor
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.layer_loops import PartTable
from penstock.plugins.cpu.ordered_attention import (
    OrderedReads,
    chunk_plan,
    seen_columns,
    step_plan,
    tail_addresses,
)
from penstock.plugins.cpu.ordered_loops import (
    AttendTable,
    attend_tables,
    ordered_loop,
    space_floats,
)
from penstock.plugins.cpu.packed_products import Job
from penstock.plugins.cpu.packed_rope import RotaryPositions
from penstock.plugins.cpu.step_choices import ChoiceBuffers, StepChoice
from penstock.plugins.cpu.step_loops import (
    APPEND_WORDS,
    PROGRAM_WORDS,
    AppendTable,
    ProgramTable,
    append_loop,
    program_loop,
)
from penstock.plugins.cpu.tile_products import BLOCK

JOBS_OF_KEEPING = 2
"""Number of a layer's jobs before attention, the only ones needed if its output is not read."""
ALIGNED_FLOATS = 16


class CompiledParts(Protocol):
    """Compiled code of a layer before and after attention; see `packed_layers.LayerParts`."""

    before_job: Job
    behind_job: Job
    rotation: RotaryPositions | None
    width: int
    hidden: int
    heads: tuple[int, int, int]
    dims: tuple[int, int]
    """Number of values of a key and of a value vector."""
    widths: list[int]
    """Number of columns of queries, keys and values in the result of the first part."""


@dataclass(slots=True)
class _Noted:
    """Layers of a forward pass that were called and are not yet computed."""

    x: mx.array
    layers: list[list[_LayerReads]] = field(default_factory=list)
    """Reads of each layer: of the decode step, if any, then of each chunk."""


@dataclass(frozen=True, slots=True)
class _LayerReads:
    """Reads of a layer for some rows of a forward pass."""

    reads: DecodeReads | ChunkReads
    plan: OrderedReads
    rows: int
    choice: StepChoice | None = None
    """Selected tokens; None to read all."""


@dataclass(frozen=True, slots=True)
class _NewTokens:
    """Memory to which keys and values of new tokens are written."""

    firsts: Integers
    """Addresses of the first key and value of each sequence's buffers, (layers, sequences, 2)."""
    head_bytes: Integers
    """Bytes between heads, of keys and of values, (layers, 1, 2)."""
    token_bytes: Integers
    columns: Integers
    """Columns of each sequence's first new token, (sequences,)."""


@dataclass(frozen=True, slots=True)
class _PartRead:
    """Addresses that some rows of a forward pass read and write."""

    width: int
    """Number of rows per sequence."""
    seen: Mapping[AttentionWindow, Integers]
    """Number of visible columns of each row, by window."""
    spans: Integers
    """Spans that are read, (layers, spans, 6); see `AttendTable`."""
    new_places: Integers
    """Places of new keys and values, (layers, rows, 4); see `AppendTable`."""


@dataclass(slots=True)
class _AttendJobs:
    """Jobs of a pass between those that append and those after attention."""

    jobs: list[tuple[Integers, Integers]] = field(default_factory=list)
    """Addresses of each layer's job, and its table."""
    buffers: list[ChoiceBuffers] = field(default_factory=list)

    def add_choice(
        self,
        part: Sequence[_LayerReads],
        sizes: Sequence[CompiledParts],
        attend: Integers,
        append: Integers,
        row: int,
        factors: Floats,
    ) -> None:
        """Add the selection of some rows; the tables `attend` then read what it selects.

        Args:
            part: what each layer reads for the rows.
            sizes: parts of each layer.
            attend: `AttendTable` of each layer.
            append: `AppendTable` of each layer.
            row: number of the first row.
            factors: see `query_factor`, (layers,).
        """
        tables = np.zeros((len(part), CHOICE_WORDS), np.int64)
        strides, nbytes = append[:, AppendTable.STRIDE], int(append[0, AppendTable.NUMBER_BYTES])
        tables[:, ChoiceTable.MODEL_QUERIES] = append[:, AppendTable.SIDES] + 4 * row * strides
        tables[:, ChoiceTable.STRIDE] = strides
        tables[:, ChoiceTable.FACTOR] = _addresses(factors[: len(part), None])
        functions = np.array([choice_job(layer.dims[0]) for layer in sizes[: len(part)]])
        buffers: dict[int, ChoiceBuffers] = {}
        for of_layer, layer, table, of_attend in zip(part, sizes, tables, attend, strict=False):
            choice, kv_heads = of_layer.choice, layer.heads[1]
            if choice is not None:
                if kv_heads not in buffers:
                    buffers[kv_heads] = ChoiceBuffers.of(choice, kv_heads)
                number = of_layer.reads.layer
                buffers[kv_heads].set_table(table, choice, number, of_attend, layer.dims, nbytes)
        self.buffers += buffers.values()
        self.jobs.append((functions, tables))


class LayersTogether:
    """Packed decoder layers that a model calls one after another, computed in one job."""

    def __init__(self, parts: Sequence[CompiledParts], scales: Sequence[float]) -> None:
        """Prepare the tables.

        Args:
            parts: parts of each layer, sharing a rotation where angles are equal.
            scales: scale of the attention scores of each layer.
        """
        self._parts = parts
        self._scales = np.array(scales, np.float32)
        self._choice_factors = np.array(
            [query_factor(part.dims[0], scale) for part, scale in zip(parts, scales, strict=True)]
        )
        jobs = [(part.before_job, part.behind_job) for part in parts]
        self._functions = [(before.function, behind.function) for before, behind in jobs]
        self._before, self._behind = (
            np.stack([job.table for job in side]) for side in zip(*jobs, strict=True)
        )
        self._columns = max(job.columns for both in jobs for job in both)
        self._digits = jobs[0][0].digits
        self._width = parts[0].width
        self._hidden = max(part.hidden for part in parts)
        self._stride = max(sum(part.widths) for part in parts)
        self._append = self._append_tables()
        dims = {part.dims for part in parts}
        self._mixed = max(part.heads[0] * part.dims[1] for part in parts)
        self._query_floats = max(part.heads[0] * part.dims[0] for part in parts)
        self._dims = dims

    def compute(
        self, place: int, x: mx.array, reads: Any, window: AttentionWindow
    ) -> tuple[mx.array, bool]:
        """Record a call of a layer; the last layer computes all of them.

        Args:
            place: index of the layer.
            x: input of the first layer, (b, width, dim); for others, what the previous call
                returned.
            reads: the layer's cache.
            window: attention window of the layer.

        Returns:
            `x` or the output of the last layer, and True; or the layer's input and False if the
            caller must compute the layer.
        """
        if not isinstance(reads, DecodeReads | ChunkReads | MixedReads):
            return x, False
        shared = reads.plans
        if place == 0:
            shared[self] = _Noted(x)
        noted = shared.get(self)
        if noted is None or len(noted.layers) != place:
            return x, False
        layer = _planned(reads, x.shape[0] * x.shape[1], window)
        if layer:
            noted.layers.append(layer)
        if layer and place < len(self._parts) - 1:
            return x, True
        del shared[self]
        return (self._run(noted) if noted.layers else x), bool(layer)

    def _run(self, noted: _Noted) -> mx.array:
        """Compute the recorded layers."""
        x, count = noted.x, len(noted.layers)
        rows, threads = x.shape[0] * x.shape[1], team()
        sizes = self._space_sizes(rows, threads.threads)
        ends = np.cumsum([0, *sizes.values()])
        floats = int(ends[-1]) + ALIGNED_FLOATS
        parts = list(zip(*noted.layers, strict=True))
        has_chunk = isinstance(parts[-1][0].reads, ChunkReads)
        space = np.empty(floats, np.float32) if has_chunk else threads.space(floats)
        skipped = -space.ctypes.data % (4 * ALIGNED_FLOATS) // 4
        start = space.ctypes.data + 4 * skipped
        places = {name: start + 4 * int(end) for name, end in zip(sizes, ends, strict=False)}
        into = space[skipped : skipped + rows * self._width].reshape(rows, self._width)
        into[:] = np.asarray(x).reshape(rows, self._width)

        positions = [position for part in parts for position in part[0].plan.positions]
        angles = self._angles(np.array(positions), count)
        read = [self._read_of(part) for part in parts]
        new_places = np.concatenate([part.new_places for part in read], axis=1)
        dtype = _kv_dtype(parts[0][0].reads)
        before, behind = self._part_tables(count, rows, places, angles)
        append = self._append[:count].copy()
        append[:, AppendTable.ROWS] = rows
        append[:, AppendTable.SIDES] = places["sides"]
        append[:, AppendTable.QUERIES] = places["queries"]
        append[:, AppendTable.PLACES] = _addresses(new_places)
        append[:, AppendTable.NUMBER_BYTES] = dtype.size
        attend = self._attend_jobs(parts, read, append, places)
        first, last = np.array(self._functions[:count]).T
        appending = np.full(count, append_loop())

        by_layer = [(first, before), (appending, append), *attend.jobs, (last, behind)]
        jobs = np.empty((count, len(by_layer), 2), np.int64)
        for number, (functions, table) in enumerate(by_layer):
            threads.prepare(table)
            jobs[:, number, 0], jobs[:, number, 1] = functions, _addresses(table)
        program = np.zeros(PROGRAM_WORDS, np.int64)
        program[ProgramTable.JOBS] = jobs.ctypes.data
        program[ProgramTable.COUNT] = count * len(by_layer)
        if all(_is_unread(part[-1].reads) for part in parts):
            program[ProgramTable.COUNT] += JOBS_OF_KEEPING - len(by_layer)
        threads.run(program_loop(), program)
        return mx.array(into).reshape(x.shape)

    def _read_of(self, part: Sequence[_LayerReads]) -> _PartRead:
        """Return the addresses that some rows read and write in each layer."""
        plan, buffers = part[0].plan, self._buffers(part)
        windows = {of_layer.plan.window for of_layer in part}
        seen = {window: seen_columns(plan.positions, window) for window in windows}
        width = part[0].rows // (len(plan.firsts) - 1)
        return _PartRead(width, seen, *_spans_and_places(part, buffers, width))

    def _attend_jobs(
        self,
        parts: Sequence[Sequence[_LayerReads]],
        read: Sequence[_PartRead],
        append: Integers,
        places: Mapping[str, int],
    ) -> _AttendJobs:
        """Return the jobs that attend for each part, with their tables of all layers."""
        jobs, row = _AttendJobs(), 0
        heads, dims = append[:, AppendTable.HEADS], append[:, AppendTable.KEY_DIM]
        value_dims = append[:, AppendTable.VALUE_DIM]
        nbytes = int(append[0, AppendTable.NUMBER_BYTES])
        loops = [ordered_loop(*part.dims, nbytes=nbytes) for part in self._parts[: len(append)]]
        for part, of_part in zip(parts, read, strict=True):
            plan, rows = part[0].plan, part[0].rows
            table = attend_tables(of_part.spans, plan.firsts, rows, of_part.width)
            table[:, AttendTable.QUERIES] = places["queries"] + 4 * row * heads * dims
            table[:, AttendTable.MIXED] = places["mixed"] + 4 * row * heads * value_dims
            table[:, AttendTable.HEADS] = heads
            table[:, AttendTable.KV_HEADS] = append[:, AppendTable.KV_HEADS]
            windows = [of_layer.plan.window for of_layer in part]
            table[:, AttendTable.SEEN] = [of_part.seen[x].ctypes.data for x in windows]
            table[:, AttendTable.KEPT] = [window.keep for window in windows]
            table[:, AttendTable.SPACE] = places["attention"]
            if _is_unread(part[-1].reads):
                table[-1, AttendTable.SEQUENCES] = 0
            if any(of_layer.choice for of_layer in part):
                jobs.add_choice(part, self._parts, table, append, row, self._choice_factors)
            jobs.jobs.append((np.array(loops), table))
            row += rows
        return jobs

    def _buffers(self, part: Sequence[_LayerReads]) -> _NewTokens:
        """Return where new tokens are written: to tails if decoding, else to new arrays."""
        if isinstance(part[0].reads, DecodeReads):
            return _tail_buffers(part)
        width, dtype = part[0].rows, _kv_dtype(part[0].reads)
        sides: list[list[mx.array]] = []
        for of_layer, parts in zip(part, self._parts, strict=False):
            reads = of_layer.reads
            assert isinstance(reads, ChunkReads)
            shapes = [(1, parts.heads[1], width, dim) for dim in parts.dims]
            sides.append([mx.zeros(shape, dtype) for shape in shapes])
            reads.keys, reads.values = sides[-1]
        mx.eval(sides)
        firsts = [
            [np.asarray(side).__array_interface__["data"][0] for side in layer] for layer in sides
        ]
        dims = np.array([[side.shape[3] for side in layer] for layer in sides])
        token_bytes = dtype.size * dims[:, None]
        return _NewTokens(
            np.array(firsts)[:, None], width * token_bytes, token_bytes, np.zeros(1, np.int64)
        )

    def _part_tables(
        self, count: int, rows: int, places: Mapping[str, int], angles: Sequence[Floats | None]
    ) -> tuple[Integers, Integers]:
        """Return the tables of the jobs before and after attention."""
        before, behind = self._before[:count].copy(), self._behind[:count].copy()
        for table in (before, behind):
            table[:, PartTable.ROWS] = rows
            table[:, PartTable.X] = places["x"]
            table[:, PartTable.NORMED] = places["normed"]
            table[:, PartTable.SCALES] = places["scales"]
            table[:, PartTable.ROUNDED] = places["rounded"]
        before[:, PartTable.RESULT] = places["sides"]
        before[:, PartTable.ANGLES] = [0 if x is None else x.ctypes.data for x in angles]
        behind[:, PartTable.RESULT] = places["x"]
        behind[:, PartTable.MIXED] = places["mixed"]
        behind[:, PartTable.RESIDUAL] = places["residual"]
        behind[:, PartTable.HIDDEN] = places["hidden"]
        return before, behind

    def _append_tables(self) -> Integers:
        """Return the tables of `append_loop`, with the entries that never change."""
        tables = np.zeros((len(self._parts), APPEND_WORDS), np.int64)
        for table, part in zip(tables, self._parts, strict=True):
            widths = part.widths
            table[AppendTable.STRIDE] = sum(widths)
            table[AppendTable.KEYS], table[AppendTable.VALUES] = widths[0], sum(widths[:2])
            table[AppendTable.HEADS], table[AppendTable.KV_HEADS] = part.heads[:2]
            table[AppendTable.KEY_DIM], table[AppendTable.VALUE_DIM] = part.dims
        tables[:, AppendTable.SCALE] = _addresses(self._scales[:, None])
        return tables

    def _space_sizes(self, rows: int, threads: int) -> dict[str, int]:
        """Return the number of floats of each buffer, rounded up to whole cache lines."""
        floats = {
            "x": rows * self._width,
            "sides": rows * self._stride,
            "queries": rows * self._query_floats,
            "mixed": rows * self._mixed,
            "residual": rows * self._width,
            "hidden": 2 * rows * self._hidden,
            "normed": threads * self._width,
            "scales": 2 * rows * self._columns // BLOCK,
            "rounded": rows * self._digits * self._columns // 4,
            "attention": max(space_floats(*dims, threads) for dims in self._dims),
        }
        return {name: -(-size // ALIGNED_FLOATS) * ALIGNED_FLOATS for name, size in floats.items()}

    def _angles(self, positions: Integers, count: int) -> list[Floats | None]:
        """Return the angles of each layer; None for layers without RoPE."""
        known: dict[Any, Floats | None] = {}
        for part in self._parts[:count]:
            rotation = part.rotation
            if rotation not in known:
                angles = None if rotation is None else rotation.angles(positions)
                known[rotation] = angles if angles is not None and angles.size else None
        return [known[part.rotation] for part in self._parts[:count]]


def _kv_dtype(reads: DecodeReads | ChunkReads) -> mx.Dtype:
    """Return the dtype in which a layer's new keys and values are stored."""
    if isinstance(reads, DecodeReads):
        return reads.step.tails.shapes[reads.layer].dtype
    return reads.dtype or mx.float32


def _is_unread(reads: DecodeReads | ChunkReads) -> bool:
    """Return whether the output of a layer is not read."""
    return isinstance(reads, ChunkReads) and reads.last


def _planned(
    reads: DecodeReads | ChunkReads | MixedReads, rows: int, window: AttentionWindow
) -> list[_LayerReads]:
    """Return a layer's reads for the rows of a pass; none if ordered attention cannot read it."""
    if isinstance(reads, MixedReads):
        pairs = zip(reads.parts, reads.sizes, strict=True)
        planned = [_planned(part, count * width, window) for part, (count, width) in pairs]
        return [layer for part in planned for layer in part] if all(planned) else []
    if isinstance(reads, ChunkReads):
        plan = chunk_plan(reads, rows, window)
        return [] if plan is None else [_LayerReads(reads, plan, rows)]
    in_step = step_plan(reads.step, reads.layer, window)
    return [] if in_step is None else [_LayerReads(reads, in_step[0], rows, in_step[1])]


def _tail_buffers(part: Sequence[_LayerReads]) -> _NewTokens:
    """Return the addresses of the tails of a decode step."""
    reads = part[0].reads
    assert isinstance(reads, DecodeReads)
    layers = [of_layer.reads.layer for of_layer in part]
    tails = reads.step.tails.derived(tail_addresses)[layers]
    slots, columns = np.array([(row.slot, row.tail) for row in reads.step.rows]).T
    firsts = tails[:, None, :, 0] + slots[:, None] * tails[:, None, :, 1]
    return _NewTokens(firsts, tails[:, None, :, 2], tails[:, None, :, 3], columns)


def _spans_and_places(
    part: Sequence[_LayerReads], buffers: _NewTokens, width: int
) -> tuple[Integers, Integers]:
    """Return the spans that layers read, and the places to which new tokens are written.

    Shapes are (layers, spans, 6), see `AttendTable`, and (layers, rows, 4), see `AppendTable`.
    """
    plan = part[0].plan
    spans = plan.of_layers([of_layer.reads.layer for of_layer in part])
    lasts = plan.firsts[1:] - 1
    spans[:, lasts, 0:4:2] = buffers.firsts
    spans[:, lasts, 1:4:2] = buffers.head_bytes
    new_columns = (buffers.columns[:, None] + np.arange(width)).ravel()
    places = np.empty((len(spans), len(new_columns), 4), np.int64)
    places[..., 0::2] = np.repeat(buffers.firsts, width, axis=1)
    places[..., 0::2] += new_columns[:, None] * buffers.token_bytes
    places[..., 1::2] = buffers.head_bytes
    return spans, places


def share_angles(parts: Sequence[CompiledParts]) -> None:
    """Let layers whose rotations have the same angles share a rotation."""
    rotations: list[RotaryPositions] = []
    for part in parts:
        rotation = part.rotation
        if rotation is None:
            continue
        known = next((other for other in rotations if other.equals(rotation)), None)
        if known is None:
            rotations.append(rotation)
        else:
            part.rotation = known


def _addresses(rows: Any) -> Integers:
    """Return the addresses of an array's rows, (n,)."""
    addresses: Integers = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    return addresses
