"""Caches that a model gets for one step: they write to tails, and read spans.

There is one object a layer, alive for one forward pass. It speaks mlx-lm's cache protocol as far as
a model's attention needs it (`offset`, `update_and_fetch`, `make_mask`). `update_and_fetch` returns
the new tokens' keys and values alone, and `attend` reads all others where they lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from penstock.kv import attention, backend, selected_reads, spilled_reads
from penstock.kv.attention import MASKED, AttentionWindow, Partial
from penstock.kv.attention_plan import (
    AttentionPlan,
    DecodeRow,
    SharedRead,
    plan_attention,
)
from penstock.kv.backend_base import RowsRead, RowTails
from penstock.kv.codecs import Coded
from penstock.kv.joined_reads import SideData, read_sides
from penstock.kv.selection import Selection
from penstock.kv.streamed_reads import attend_streamed
from penstock.kv.tails import Tails

if TYPE_CHECKING:
    from penstock.kv.kernels.dispatches import Dispatch
    from penstock.kv.kernels.ways import Ways


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Stand-in for a mask: the model hands it on to attention, which knows the visible tokens.

    A model that does anything else with it fails at once, and is then served joined KV.
    """

    window: int | None


@dataclass(slots=True)
class DecodeStep:
    """One decode step over rows in order: the data that all its layers share."""

    rows: Sequence[DecodeRow]
    width: int
    """New tokens of each row."""
    tails: Tails
    slots: mx.array
    columns: mx.array
    """Columns of the rows' first new tokens in their slots, (b,)."""
    offset: mx.array | int
    aligned: bool
    """Whether all rows write to the same column of neighboring slots: one block."""
    neighbors: bool
    """Whether the rows' slots are one slice of the pool."""
    divided: bool
    """Whether lanes share the step; see `Backend.divides`."""
    ahead: bool
    """Whether a layer is computed while Python still builds the next ones."""
    layouts: dict[AttentionWindow, AttentionPlan]
    ways: Ways | None
    """Choice between kernels, fused attention and plain operations; None: the last alone."""
    kernel_plans: dict[Hashable, list[Dispatch]]
    selection: Selection | None
    """Choice of the tokens that long rows read; None to read all."""
    choosers: dict[AttentionWindow, list[int]]
    """Numbers of the rows that choose, which all layers of a window that have an index share."""
    most_joined: int | None
    """Most tokens that a row reads at once of which some may be in a tier; None: none is there."""
    memory: selected_reads.StepMemory = field(default_factory=selected_reads.StepMemory)
    """Copies, and places of tokens, that all layers share for rows that choose."""

    @classmethod
    def of(
        cls,
        rows: Sequence[DecodeRow],
        tails: Tails,
        width: int = 1,
        ways: Ways | None = None,
        selection: Selection | None = None,
        most_joined: int | None = None,
    ) -> DecodeStep:
        """Prepare a step of `width` new tokens a row; nothing is computed yet."""
        positions, device = [row.position for row in rows], backend.current()
        size = len(rows), width, rows[0].held_tokens
        neighbors = all(row.slot == rows[0].slot + i for i, row in enumerate(rows))
        return cls(
            rows,
            width,
            tails,
            mx.array([row.slot for row in rows]),
            mx.array([row.tail for row in rows]),
            positions[0] if len(rows) == 1 else mx.array(positions),
            neighbors and all(row.tail == rows[0].tail for row in rows),
            neighbors,
            device.divides(*size),
            device.computes_ahead(*size),
            {},
            ways,
            {},
            selection,
            {},
            most_joined,
        )

    def layout(self, attention_window: AttentionWindow) -> AttentionPlan:
        """Return how the rows read under this window."""
        if attention_window not in self.layouts:
            plan = plan_attention(self.rows, attention_window, self.width)
            self.layouts[attention_window] = plan
        return self.layouts[attention_window]

    def choosing(self, layer: int, attention_window: AttentionWindow) -> list[int]:
        """Return the rows that read a choice of their tokens in a layer."""
        selection = self.selection
        if selection is None or layer not in selection.index.layers:
            return []
        if attention_window not in self.choosers:
            self.choosers[attention_window] = [
                number
                for number, row in enumerate(self.rows)
                if attention_window.sees_all(row.position) and selection.applies(row)
            ]
        return self.choosers[attention_window]

    def has_apart(self, layer: int) -> bool:
        """Tell whether some row is apart, see `is_apart`; never where nothing is in a tier."""
        return self.most_joined is not None and any(self.is_apart(r, layer) for r in self.rows)

    def is_apart(self, row: DecodeRow, layer: int) -> bool:
        """Tell whether a row that does not choose must be computed before others read.

        The KV that it reads is in a tier, or may be.
        """
        if self.most_joined is None or self.selection is None or not row.parts:
            return False
        if layer not in self.selection.index.layers:
            return False
        return row.parts[-1].end > self.most_joined or any(
            isinstance(part.segment.layers[layer][0], Coded) for part in row.parts
        )

    def streams(self, row: DecodeRow, attention_window: AttentionWindow) -> bool:
        """Tell whether a row that is read apart has too many tokens to be read at once."""
        assert self.most_joined is not None
        return attention_window.sees_all(row.position) and row.parts[-1].end > self.most_joined

    def caches(self, attention_windows: Sequence[AttentionWindow]) -> list[DecodeReads]:
        """Return the model's caches, one a layer."""
        return [
            DecodeReads(self, layer, attention_window)
            for layer, attention_window in enumerate(attention_windows)
        ]


class Reads:
    """One layer of one step, read where it lies; the seam recognizes it by its class."""

    offset: mx.array | int
    keys: mx.array | None = None
    """Keys of the new tokens. A model whose next layers are on another process replaces them by an
    equal array, so that the array it sends is computed with them."""

    def __init__(self, layer: int, attention_window: AttentionWindow) -> None:
        self.layer = layer
        self.attention_window = attention_window
        self._given: tuple[Any, Any] | None = None

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> MaskRequest:
        """Return the stand-in for a mask that `attend` takes."""
        if return_array:
            raise TypeError("this model computes with masks; it needs joined keys and values")
        return MaskRequest(window_size)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as the model's own attention would: (b, heads, n, d) -> (b, heads, n, dim).

        Raises:
            TypeError: keys, values or mask did not come from this object.
        """
        raise NotImplementedError

    def check_given(self, keys: object, values: object, mask: object) -> AttentionWindow:
        """Raise TypeError unless keys, values and mask came from this object."""
        if self._given is None or keys is not self._given[0] or values is not self._given[1]:
            raise TypeError("this model changes keys or values after they were cached")
        if not isinstance(mask, MaskRequest):
            raise TypeError("this model makes its own masks")
        return self.attention_window.within(mask.window)


class DecodeReads(Reads):
    """One layer of a decode step: every row adds tokens to its tail, most often one."""

    def __init__(self, step: DecodeStep, layer: int, attention_window: AttentionWindow) -> None:
        super().__init__(layer, attention_window)
        self.step = step
        self.offset = step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows' tokens, (b, kv_heads, width, dim), behind their tails; return them."""
        step = self.step
        if step.aligned:
            first = step.rows[0]
            step.tails.write_block(self.layer, first.slot, first.tail, keys, values)
        else:
            step.tails.write(self.layer, step.slots, step.columns, keys, values)
        self._given = keys, values
        self.keys = keys
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as the model's own attention would: (b, heads, n, d) -> (b, heads, n, dim)."""
        window = self.check_given(keys, values, mask)
        choosing = self.step.choosing(self.layer, window)
        by_row = bool(choosing) or self.step.has_apart(self.layer)
        if self.step.ways is not None and not by_row:
            done = self.step.ways.attend(self.step, self.layer, window, queries, scale, sinks)
            if done is not None:
                return done
        sunk = None if sinks is None else sinks.astype(mx.float32) * attention.LOG2_E
        in_base_2 = attention.in_base_2(queries, scale)
        if by_row:
            asked = queries.astype(mx.float32) * scale
            result = self._attend_by_row(in_base_2, asked, choosing, window, sunk)
        elif not self.step.divided:
            layout = self.step.layout(window)
            result = self._attend_alone(in_base_2, self.step.rows[0], layout, sunk)
        else:
            result = self._attend_together(in_base_2, self.step.layout(window), sunk)
        if result.dtype != queries.dtype:
            result = result.astype(queries.dtype)
        if self.step.ahead:
            mx.async_eval(result)  # type: ignore[no-untyped-call]
        return result

    def _attend_by_row(
        self,
        queries: mx.array,
        asked: mx.array,
        numbers: Sequence[int],
        window: AttentionWindow,
        sinks: mx.array | None,
    ) -> mx.array:
        """Let each row read by itself: its choice, or all of its parts.

        Args:
            queries: of all rows, in base 2.
            asked: the same in base e, float32.
            numbers: rows that choose.
            window: of the layer.
            sinks: in base 2.
        """
        step, chosen = self.step, {}
        if numbers:
            assert step.selection is not None
            chosen = selected_reads.choose(
                *(step.selection, step.rows, numbers, asked),
                *(self.layer, step.tails, sinks, step.memory),
            )
        results = []
        for number, row in enumerate(self.step.rows):
            choice, own = chosen.get(number), queries[number : number + 1]
            if isinstance(choice, mx.array):
                results.append(choice)
            elif choice is None:
                results.append(self._attend_whole(own, row, window, sinks))
            else:
                first, recent = (read_sides(p, self.layer) for p in (choice.first, choice.recent))
                keys, values = (
                    [*first[side], held, *recent[side]]
                    for side, held in enumerate((choice.keys, choice.values))
                )
                sides = keys, values
                results.append(
                    self._attend_parts(own, row, sides, row.tail + 1, None, sinks, choice.rest)
                )
        return results[0] if len(results) == 1 else mx.concatenate(results)

    def _attend_whole(
        self,
        queries: mx.array,
        row: DecodeRow,
        window: AttentionWindow,
        sinks: mx.array | None,
    ) -> mx.array:
        """Read all parts of a row beside rows that choose, or from a tier."""
        apart = self.step.is_apart(row, self.layer)
        if apart and self.step.streams(row, window):
            own = self.step.tails.read_block(self.layer, row.slot, 1, row.tail + 1)
            return attend_streamed(queries, own, row.parts, self.layer, sinks)
        if apart and window.sees_all(row.position):
            row = spilled_reads.whole(row, self.layer)
        layout = plan_attention([row], window, self.step.width)
        result = self._attend_alone(queries, row, layout, sinks)
        if apart:  # what was read for it is let go
            mx.eval(result)
        return result

    def _attend_alone(
        self,
        queries: mx.array,
        row: DecodeRow,
        layout: AttentionPlan,
        sinks: mx.array | None,
    ) -> mx.array:
        """Read all parts of a row and its tail."""
        columns = layout.tail_columns
        shared_reads = [shared for level in layout.levels for shared in level]
        pieces = [piece for shared in shared_reads for piece in shared.pieces]
        seen = _seen_alone(shared_reads, layout, columns, self.step.width)
        sides = read_sides(pieces, self.layer)
        return self._attend_parts(queries, row, sides, columns, seen, sinks)

    def _attend_parts(
        self,
        queries: mx.array,
        row: DecodeRow,
        sides: tuple[list[SideData], list[SideData]],
        columns: int,
        seen: mx.array | None,
        sinks: mx.array | None,
        rest: Partial | None = None,
    ) -> mx.array:
        """Read parts and the tail of a row under one softmax, with the rest of its tokens."""
        keys, values = sides
        heads = queries.shape[1]
        tail = self.step.tails.read_block(self.layer, row.slot, 1, columns)
        stacked = attention.grouped(queries, tail[0].shape[1])
        if seen is not None and self.step.width > 1:
            seen = mx.tile(seen, (stacked.shape[1] // self.step.width, 1))
        # One row multiplies better with all threads of BLAS, which codes are not multiplied by.
        device = backend.current()
        with device.lane(None if attention.mostly_coded(keys) else 0):
            part = device.attend_decode(
                stacked, [*keys, tail[0].squeeze(0)], [*values, tail[1].squeeze(0)], seen
            )
        sunk = None if sinks is None else _sunk(sinks, stacked.shape[0], 1, self.step.width)
        parts = [part] if rest is None else [part, rest]
        return attention.ungrouped(attention.merged(parts, sunk), 1, heads)

    def _attend_together(
        self, queries: mx.array, layout: AttentionPlan, sinks: mx.array | None
    ) -> mx.array:
        """Read shared parts once, own ones row by row, and all tails in one product."""
        b, heads = queries.shape[:2]
        tails, columns = self.step.tails, layout.tail_columns
        reads = self._uncoded(layout)
        if reads is not None:
            slots = [row.slot for row in self.step.rows]
            own = RowTails(*tails.layer(self.layer), slots, columns, layout.tail_seen)
            done = backend.current().attend_rows(queries, reads, own, sinks)
            if done is not None:
                return done
        if self.step.neighbors:
            tail_keys, tail_values = tails.read_block(
                self.layer, self.step.rows[0].slot, b, columns
            )
        else:
            tail_keys, tail_values = tails.read(self.layer, self.step.slots, columns)
        kv_heads = tail_keys.shape[1]
        r = heads // kv_heads * self.step.width
        stacked = attention.grouped(queries, kv_heads)
        partials = [self._tail_partial(queries, tail_keys, tail_values, layout)]
        device = backend.current()
        before = [partials[0].mixed] * device.lanes
        """Last result of each lane by now; codes of the next read are read after it."""
        for level in layout.levels:
            parts_read: list[Partial] = []
            row = 0
            for number, shared in enumerate(level):
                if shared.first > row:
                    parts_read.append(_nothing(stacked, (shared.first - row) * r, tail_values))
                place = number % device.lanes
                with device.lane(number if len(level) > 1 else None):
                    parts_read.append(self._shared_partial(stacked, shared, r, before[place]))
                if len(level) > 1:
                    before[place] = parts_read[-1].mixed
                else:  # it may have had all lanes
                    before = [parts_read[-1].mixed] * device.lanes
                row = shared.last
            if row < b:
                parts_read.append(_nothing(stacked, (b - row) * r, tail_values))
            partials.append(_side_by_side(parts_read))
        sunk = None if sinks is None else _sunk(sinks, kv_heads, b, self.step.width)
        return attention.ungrouped(attention.merged(partials, sunk), b, heads)

    def _uncoded(self, layout: AttentionPlan) -> list[RowsRead] | None:
        """Return all reads of a plan in this layer; None if some of them are in codes."""
        reads = []
        for shared in (shared for level in layout.levels for shared in level):
            pieces = []
            for segment, start, stop in shared.pieces:
                if segment.missing:
                    start, stop = segment.columns(self.layer, start, stop)
                keys, values = segment.layers[self.layer]
                if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
                    return None
                pieces.append((keys, values, start, stop))
            reads.append(RowsRead(shared.first, shared.last, pieces, shared.seen))
        return reads

    def _shared_partial(
        self, stacked: mx.array, shared: SharedRead, r: int, after: mx.array
    ) -> Partial:
        keys, values = read_sides(shared.pieces, self.layer)
        seen = None if shared.seen is None else _for_stacked(shared.seen, r)
        rows = stacked
        if stacked.shape[1] != (shared.last - shared.first) * r:
            rows = stacked[:, shared.first * r : shared.last * r]
        return backend.current().attend_decode(rows, keys, values, seen, after)

    def _tail_partial(
        self, queries: mx.array, keys: mx.array, values: mx.array, layout: AttentionPlan
    ) -> Partial:
        b, heads, n, d = queries.shape
        kv_heads = keys.shape[1]
        r = heads // kv_heads * n
        device = backend.current()
        scores = attention.score(queries.reshape(b, kv_heads, r, d), [keys], device)
        if layout.tail_seen is not None:
            seen = _for_stacked(layout.tail_seen, r).reshape(b, 1, r, -1)
            scores = mx.where(seen, scores, MASKED)
        top, weights, total = attention.weigh(scores, device)

        def rows_last(x: mx.array) -> mx.array:
            return x.swapaxes(0, 1).reshape(kv_heads, b * r, x.shape[-1])

        mixed = attention.mix(weights, total, [values])
        return Partial(rows_last(top), rows_last(total), rows_last(mixed))


def _seen_alone(
    shared_reads: Sequence[SharedRead], layout: AttentionPlan, tail: int, width: int
) -> mx.array | None:
    """Return (width, columns) booleans over the columns read and the tail's, if any is hidden."""
    if layout.tail_seen is None and all(shared.seen is None for shared in shared_reads):
        return None
    masks = []
    for shared in shared_reads:
        count = sum(stop - start for _, start, stop in shared.pieces)
        masks.append(mx.ones((width, count), mx.bool_) if shared.seen is None else shared.seen[0])
    own = layout.tail_seen
    masks.append(mx.ones((width, tail), mx.bool_) if own is None else own[0])
    return mx.concatenate(masks, axis=-1)


def _for_stacked(seen: mx.array, r: int) -> mx.array:
    """Return booleans of rows (b, width, columns) as those of stacked queries, (1, b*r, columns).

    The r stacked queries of a row are its heads of one key head, each with all new tokens.
    """
    b, width, columns = seen.shape
    wide = mx.broadcast_to(seen[:, None], (b, r // width, width, columns))
    return wide.reshape(1, b * r, columns)


def _sunk(sinks: mx.array, kv_heads: int, b: int, width: int) -> mx.array:
    """Return the sinks of all heads as those of stacked queries, (kv_heads, rows, 1)."""
    by_head = sinks.reshape(kv_heads, 1, -1, 1)
    wide = mx.broadcast_to(by_head, (kv_heads, b, by_head.shape[2], width))
    return wide.reshape(kv_heads, -1, 1)


def _nothing(stacked: mx.array, rows: int, values: mx.array) -> Partial:
    """Return the contribution of rows that read nothing."""
    kv_heads = stacked.shape[0]
    top = mx.full((kv_heads, rows, 1), MASKED, mx.float32)
    zero = mx.zeros((kv_heads, rows, 1))
    return Partial(top, zero, mx.zeros((kv_heads, rows, values.shape[-1])))


def _side_by_side(partials: Sequence[Partial]) -> Partial:
    if len(partials) == 1:
        return partials[0]
    return Partial(
        mx.concatenate([part.top for part in partials], axis=1),
        mx.concatenate([part.total for part in partials], axis=1),
        mx.concatenate([part.mixed for part in partials], axis=1),
    )
