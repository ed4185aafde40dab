"""Forward passes through all packed layers in one job, without Python between layers.

A model calls its layers one after another. Each layer records what it must read; the last one
computes all of them, one compiled part after another. Cached keys and values are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chunk_reads import ChunkReads, MixedReads
from penstock.attention.reads import DecodeReads
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.kv.tails import Tails
from penstock.models.layer_seams import skips_logits
from penstock.plugins.cpu.choice_jobs import CHOICE_WORDS, ChoiceTable, choice_job, query_factor
from penstock.plugins.cpu.compiled_jobs import Team, team
from penstock.plugins.cpu.layer_loops import PartTable, norm_job
from penstock.plugins.cpu.ordered_attention import LatestPlan, seen_columns, tail_number_bytes
from penstock.plugins.cpu.ordered_loops import (
    AttendTable,
    attend_tables,
    ordered_loop,
    space_floats,
)
from penstock.plugins.cpu.packed_output import OutputParts, PassOutput
from penstock.plugins.cpu.packed_products import Job, rows_of
from penstock.plugins.cpu.packed_reads import (
    LayerReads,
    NewTokens,
    PartRead,
    is_unread,
    kv_dtype,
    planned,
    planned_step,
    spans_and_places,
    tail_buffers,
    tail_columns,
)
from penstock.plugins.cpu.packed_rope import RotaryPositions
from penstock.plugins.cpu.step_choices import ChoiceBuffers, StepChoice
from penstock.plugins.cpu.step_loops import AppendTable, ProgramTable, append_loop, program_loop
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
    layers: list[list[LayerReads]] = field(default_factory=list)
    """Reads of each layer: of the decode step, if any, then of each chunk."""
    output: mx.array | None = None
    """Output of the last layer if all layers were computed when the first was called."""


@dataclass(slots=True)
class _PassTables:
    """Tables of a forward pass; the next decode step that reads the same spans uses them again."""

    program: Integers
    """Table of the program, see `ProgramTable`."""
    into: Floats
    """Input of the first layer, and then output of the last one, (rows, width)."""
    facts: tuple[object, ...] | None
    """See `LayersTogether._facts`; equal in steps that can use the tables."""
    windows: Sequence[AttentionWindow]
    """`OrderedReads.window` of each layer."""
    spans: Sequence[Integers]
    """`OrderedReads.spans` of each layer; the same arrays in steps that can use the tables."""
    firsts: Integers
    """Number of the first span of each sequence, and of all spans, (sequences + 1,)."""
    new: NewTokens
    read: PartRead
    angles: Mapping[RotaryPositions | None, Floats]
    new_places: Integers
    """Places of all new keys and values, (layers, rows, 4)."""
    choices: Sequence[StepChoice | None]
    """Choice of each layer."""
    jobs: Sequence[Integers]
    """Tables of the program's jobs."""
    end: Sequence[Integers]
    """Tables of the final norm and of the output layer; empty if the pass ends with the layers."""
    kept: list[Any]
    """Other arrays whose addresses are in the tables."""

    def is_for(self, facts: tuple[object, ...], part: Sequence[LayerReads]) -> bool:
        """Return whether a decode step can use the tables."""
        return facts == self.facts and all(
            of_layer.plan.spans is spans and _fits(of_layer.choice, choice)
            for of_layer, spans, choice in zip(part, self.spans, self.choices, strict=True)
        )

    def renew(
        self,
        positions: Sequence[int],
        tails: Integers,
        choices: Iterable[tuple[StepChoice, Integers]],
    ) -> None:
        """Set what differs in the next decode step.

        Args:
            positions: position of each row.
            tails: columns of each sequence's first new token, (sequences,).
            choices: choices of the tables, with `StepChoice.choices` of this step.
        """
        moved = tails - self.new.columns
        self.new.columns[:] = tails
        for rotation, angles in self.angles.items():
            assert rotation is not None
            angles[:] = rotation.angles(np.array(positions))
        for window, seen in self.read.seen.items():
            seen[:] = seen_columns(positions, window)
        self.read.spans[:, self.firsts[1:] - 1, 4] += moved
        by_row = np.repeat(moved, self.read.width)[:, None]
        self.new_places[..., 0::2] += by_row * self.new.token_bytes
        for choice, by_row in choices:
            choice.choices[:] = by_row

    def choices_ahead(
        self, positions: Sequence[int], selection: Selection
    ) -> list[tuple[StepChoice, Integers]] | None:
        """Return the argument `choices` of `renew` for the next positions of the same rows.

        None if tables would change.
        """
        own = {id(choice): choice for choice in self.choices if choice is not None}
        if not own and selection.layers and max(positions) >= selection.tokens:
            return None
        ahead = []
        for choice in own.values():
            by_row = choice.ahead(positions)
            if by_row is None:
                return None
            ahead.append((choice, by_row))
        return ahead


@dataclass(slots=True)
class _AttendJobs:
    """Jobs of a pass between those that append and those after attention."""

    jobs: list[tuple[Integers, Integers]] = field(default_factory=list)
    """Addresses of each layer's job, and its table."""
    buffers: list[ChoiceBuffers] = field(default_factory=list)

    def add_choice(
        self,
        part: Sequence[LayerReads],
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
                layer_number = of_layer.layer
                buffers[kv_heads].set_table(
                    table, choice, layer_number, of_attend, layer.dims, nbytes
                )
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
        self.output: OutputParts | None = None
        """What follows the layers, and is computed in the same job in decode steps."""
        self.embed: Callable[[Integers], Floats] | None = None
        """Function that returns the input of the first layer for tokens (n,), if known."""
        self._latest: _PassTables | None = None
        """Tables of the latest decode step."""
        self._decoded: list[tuple[int, ...]] = []
        """`_places` of the rows of the latest forward pass, if it used these tables."""

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
        shared, last = reads.plans, len(self._parts) - 1
        if place == 0:
            self._decoded = []
            shared[self] = self._noted(x, reads)
        noted = shared.get(self)
        if noted is not None and noted.output is not None:
            if place == last:
                del shared[self]
            return noted.output, True
        if noted is None or len(noted.layers) != place:
            return x, False
        layer = planned(reads, x.shape[0] * x.shape[1], window)
        if layer:
            noted.layers.append(layer)
            if type(reads) is DecodeReads:
                reads.step.tails.derived(self._known_layers)[place] = reads.layer, window
        if layer and place < last:
            return x, True
        del shared[self]
        return (self._run(noted.x, noted.layers) if noted.layers else x), bool(layer)

    def _known_layers(self, _: Tails) -> dict[int, tuple[int, AttentionWindow]]:
        """Return the cache and the window of each layer, recorded in the first decode step.

        A model calls its layers with the same ones in all decode steps of an engine.
        """
        return {}

    def _noted(self, x: mx.array, reads: DecodeReads | ChunkReads | MixedReads) -> _Noted:
        """Begin a forward pass; compute all layers if they are known."""
        noted = _Noted(x)
        if type(reads) is not DecodeReads:  # subclasses attend in another way
            return noted
        known = reads.step.tails.derived(self._known_layers)
        if len(known) == len(self._parts):
            layers = planned_step(reads, known, x.shape[0] * x.shape[1])
            if layers:
                noted.output = self._run(x, [[layer] for layer in layers])
        return noted

    def _run(self, x: mx.array, layers: Sequence[Sequence[LayerReads]]) -> mx.array:
        """Compute layers."""
        threads, rows, tables = team(), x.shape[0] * x.shape[1], self._latest
        parts = list(zip(*layers, strict=True))
        facts = self._facts(parts, rows, threads)
        if facts is not None and tables is not None and tables.is_for(facts, parts[0]):
            pairs = zip(tables.choices, (of_layer.choice for of_layer in parts[0]), strict=True)
            choices = [(choice, new.choices) for choice, new in pairs if choice and new]
            tables.renew(parts[0][0].plan.positions, tail_columns(parts[0][0].reads), choices)
        else:
            tables = self._tables(parts, rows, threads, facts)
            if facts is not None:
                self._latest = tables
        tables.into[:] = rows_of(x)
        output = self.output
        if output is None or not tables.end:
            self._run_program(tables, threads)
            return mx.array(tables.into.reshape(x.shape))
        normed, logits = self._run_to_logits(tables, output, threads)
        reads = parts[0][0].reads
        if isinstance(reads, DecodeReads) and reads.step.width == 1:
            self._decoded = _places(reads.step.tails, reads.step.rows)
        return PassOutput(tables.into.reshape(x.shape), output, normed, logits)

    def decode_again(
        self,
        tokens: Sequence[int],
        rows: Sequence[DecodeRow],
        tails: Tails,
        selection: Selection,
        *,
        new_step: bool = False,
    ) -> Floats | None:
        """Repeat the latest decode step with the next tokens; see `Runner.decode_again`."""
        tables, output, threads = self._latest, self.output, team()
        before = [(*place[:2], place[2] - 1, place[3] - 1) for place in _places(tails, rows)]
        if tables is None or output is None or self.embed is None or before != self._decoded:
            return None
        if new_step and not self._reads_same_spans(tables, rows, tails):
            return None
        positions = [row.position for row in rows]
        choices = tables.choices_ahead(positions, selection)
        if choices is None or not self._sees_alike(tables, tails, max(positions)):
            return None
        floats = self._space_sizes(len(rows), threads.threads)[1]
        if tables.facts is None or tables.facts[2] != threads.space(floats).ctypes.data:
            return None
        tables.renew(positions, np.array([row.tail for row in rows]), choices)
        tables.into[:] = self.embed(np.array(tokens))
        _, logits = self._run_to_logits(tables, output, threads)
        self._decoded = _places(tails, rows)
        return logits

    def _reads_same_spans(
        self, tables: _PassTables, rows: Sequence[DecodeRow], tails: Tails
    ) -> bool:
        """Return whether the tables have the addresses of the spans that rows read now."""
        (layer, _), *_ = tails.derived(self._known_layers).values()
        nbytes = tails.derived(tail_number_bytes)[layer]
        plan = tails.derived(LatestPlan).plan(rows, 1, nbytes)
        same = plan is not None and all(spans is plan.spans for spans in tables.spans)
        return same and not any(row.whole for row in rows)

    def _sees_alike(self, tables: _PassTables, tails: Tails, position: int) -> bool:
        """Return whether the layers that see all tokens are those of the tables."""
        known = tails.derived(self._known_layers).values()
        pairs = {
            (window, of_plan) for (_, window), of_plan in zip(known, tables.windows, strict=True)
        }
        every = AttentionWindow()
        return all(window.sees_all(position) == (of_plan == every) for window, of_plan in pairs)

    def _run_program(self, tables: _PassTables, threads: Team) -> None:
        for table in tables.jobs:
            threads.prepare(table)
        threads.run(program_loop(), tables.program)

    def _run_to_logits(
        self, tables: _PassTables, output: OutputParts, threads: Team
    ) -> tuple[Floats, Floats]:
        """Compute layers, norm and output layer; return the results of the last two."""
        normed = np.empty((len(tables.into), self._width), np.float32)
        logits = np.empty((len(tables.into), output.product.stride), np.float32)
        norm, head = tables.end
        norm[PartTable.RESULT] = head[PartTable.X] = normed.ctypes.data
        head[PartTable.RESULT] = logits.ctypes.data
        self._run_program(tables, threads)
        return normed, logits[:, : output.product.matrix.rows]

    def _facts(
        self, parts: Sequence[Sequence[LayerReads]], rows: int, threads: Team
    ) -> tuple[object, ...] | None:
        """Return what tables depend on besides spans; None if they are used once."""
        reads = parts[0][0].reads
        if len(parts) > 1 or not isinstance(reads, DecodeReads):
            return None
        windows = [(of_layer.layer, of_layer.plan.window) for of_layer in parts[0]]
        floats = self._space_sizes(rows, threads.threads)[1]
        space = threads.space(floats).ctypes.data
        return rows, windows, space, threads.threads, skips_logits()

    def _tables(
        self,
        parts: Sequence[Sequence[LayerReads]],
        rows: int,
        threads: Team,
        facts: tuple[object, ...] | None,
    ) -> _PassTables:
        """Return the tables of a pass."""
        count = len(parts[0])
        sizes, floats = self._space_sizes(rows, threads.threads)
        space = np.empty(floats, np.float32) if facts is None else threads.space(floats)
        skipped = -space.ctypes.data % (4 * ALIGNED_FLOATS) // 4
        start, ends = space.ctypes.data + 4 * skipped, np.cumsum([0, *sizes.values()])
        places = {name: start + 4 * int(end) for name, end in zip(sizes, ends, strict=False)}
        into = space[skipped : skipped + rows * self._width].reshape(rows, self._width)

        positions = [position for part in parts for position in part[0].plan.positions]
        by_rotation = self._angles(np.array(positions), count)
        angles = [by_rotation.get(part.rotation) for part in self._parts[:count]]
        new = [self._buffers(part) for part in parts]
        read = [self._read_of(part, buffers) for part, buffers in zip(parts, new, strict=True)]
        new_places = np.concatenate([part.new_places for part in read], axis=1)
        dtype = kv_dtype(parts[0][0])
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
        end: list[Integers] = []
        is_whole = facts is not None and count == len(self._parts)
        if is_whole and self.output is not None and not skips_logits():
            end = self._end_tables(self.output, rows, places)
        jobs = np.empty((count * len(by_layer) + len(end), 2), np.int64)
        of_layers = jobs[: count * len(by_layer)].reshape(count, len(by_layer), 2)
        for number, (functions, table) in enumerate(by_layer):
            of_layers[:, number, 0], of_layers[:, number, 1] = functions, _addresses(table)
        if end and self.output is not None:
            jobs[len(of_layers) * len(by_layer) :] = [
                [norm_job(), end[0].ctypes.data],
                [self.output.product.function, end[1].ctypes.data],
            ]
        program = np.zeros(len(ProgramTable), np.int64)
        program[ProgramTable.JOBS] = jobs.ctypes.data
        program[ProgramTable.COUNT] = len(jobs)
        if all(is_unread(part[-1].reads) for part in parts):
            program[ProgramTable.COUNT] += JOBS_OF_KEEPING - len(by_layer)
        return _PassTables(
            program,
            into,
            facts,
            [of_layer.plan.window for of_layer in parts[0]],
            [of_layer.plan.spans for of_layer in parts[0]],
            parts[0][0].plan.firsts,
            new[0],
            read[0],
            by_rotation,
            new_places,
            [of_layer.choice for of_layer in parts[0]],
            [*(table for _, table in by_layer), *end],
            end,
            [read, new, attend, [part[0].plan.firsts for part in parts], jobs, space],
        )

    def _read_of(self, part: Sequence[LayerReads], buffers: NewTokens) -> PartRead:
        """Return the addresses that some rows read and write in each layer."""
        plan = part[0].plan
        windows = {of_layer.plan.window for of_layer in part}
        seen = {window: seen_columns(plan.positions, window) for window in windows}
        width = part[0].rows // (len(plan.firsts) - 1)
        return PartRead(width, seen, *spans_and_places(part, buffers, width))

    def _attend_jobs(
        self,
        parts: Sequence[Sequence[LayerReads]],
        read: Sequence[PartRead],
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
            if is_unread(part[-1].reads):
                table[-1, AttendTable.SEQUENCES] = 0
            if any(of_layer.choice for of_layer in part):
                jobs.add_choice(part, self._parts, table, append, row, self._choice_factors)
            jobs.jobs.append((np.array(loops), table))
            row += rows
        return jobs

    def _buffers(self, part: Sequence[LayerReads]) -> NewTokens:
        """Return where new tokens are written: to tails if decoding, else to new arrays."""
        if isinstance(part[0].reads, DecodeReads):
            return tail_buffers(part)
        width, dtype = part[0].rows, kv_dtype(part[0])
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
        return NewTokens(
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

    def _end_tables(
        self, output: OutputParts, rows: int, places: Mapping[str, int]
    ) -> list[Integers]:
        """Return the tables of the final norm and of the output layer, without results."""
        buffers = {
            PartTable.SCALES: places["scales"],
            PartTable.ROUNDED: places["rounded"],
        }
        return [output.norm_table(rows, places["x"], 0), output.product.table(rows, buffers)]

    def _append_tables(self) -> Integers:
        """Return the tables of `append_loop`, with the entries that never change."""
        tables = np.zeros((len(self._parts), len(AppendTable)), np.int64)
        for table, part in zip(tables, self._parts, strict=True):
            widths = part.widths
            table[AppendTable.STRIDE] = sum(widths)
            table[AppendTable.KEYS], table[AppendTable.VALUES] = widths[0], sum(widths[:2])
            table[AppendTable.HEADS], table[AppendTable.KV_HEADS] = part.heads[:2]
            table[AppendTable.KEY_DIM], table[AppendTable.VALUE_DIM] = part.dims
        tables[:, AppendTable.SCALE] = _addresses(self._scales[:, None])
        return tables

    def _space_sizes(self, rows: int, threads: int) -> tuple[dict[str, int], int]:
        """Return the number of floats of each buffer, whole cache lines, and of all of them."""
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
        of = ALIGNED_FLOATS
        rounded = {name: -(-size // of) * of for name, size in floats.items()}
        return rounded, sum(rounded.values()) + of

    def _angles(self, positions: Integers, count: int) -> dict[RotaryPositions | None, Floats]:
        """Return the angles of each rotation that rotates."""
        rotations = {part.rotation for part in self._parts[:count]}
        return {x: x.angles(positions) for x in rotations if x is not None and x.pairs}


def _places(tails: Tails, rows: Sequence[DecodeRow]) -> list[tuple[int, ...]]:
    """Return what identifies the rows of a step among those of consecutive steps."""
    return [(id(tails), row.slot, row.position, row.tail) for row in rows]


def _fits(choice: StepChoice | None, other: StepChoice | None) -> bool:
    if choice is None or other is None:
        return choice is other
    return choice.fits(other)


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
