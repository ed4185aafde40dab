"""What a model is handed as its caches for one step: it writes to tails, and reads parts.

One object a layer, alive for one forward pass. It speaks mlx-lm's cache protocol as far as a
model's attention needs it (`offset`, `update_and_fetch`, `make_mask`); what `update_and_fetch`
returns are the new tokens' keys and values alone, and `attend` reads all others where they lie.
A model whose attention does not go through `attend` is handed the joined ones: a copy, of one
layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import mlx.core as mx

from penstock.kv import attention, backend
from penstock.kv import columns as col
from penstock.kv.attention import MASKED, AttentionWindow, Partial
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.scales import Squares
from penstock.kv.columns import Side
from penstock.kv.segment import Segment, dequantized
from penstock.kv.tails import Tails

KVData: TypeAlias = mx.array | Coded
"""Keys or values of consecutive columns of one sequence: (kv_heads, n, dim), or coded."""
APART = 2_048
"""Columns by which the ends of two rows in a segment may differ, if both read it together."""


@dataclass(frozen=True, slots=True)
class KVSpan:
    """The first `columns` columns of a segment, which begin at position `start`."""

    segment: Segment
    start: int
    columns: int

    @property
    def end(self) -> int:
        """Position behind the last column."""
        return self.start + self.columns


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence of a decode step: what it reads, and where its new token goes.

    The parts cover the positions in front of the tail; the tail's `tail` tokens end in front of
    `position`, which is the new token's.
    """

    parts: tuple[KVSpan, ...]
    position: int
    slot: int
    tail: int


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """What a model gets for a mask: it hands it on to attention, which knows what is seen.

    A model that does anything else with it fails at once, and is then served joined KV.
    """

    window: int | None


ColumnRange = tuple[Segment, int, int]
"""Columns start..stop-1 of a segment."""


@dataclass(frozen=True, slots=True)
class SharedRead:
    """Consecutive pieces that the rows first..last-1 read together, and which of them is seen."""

    first: int
    last: int
    pieces: tuple[ColumnRange, ...]
    seen: mx.array | None
    """(rows, columns) booleans; None if every row sees all of it."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of a step read their parts, for one sight: the same in all of its layers."""

    levels: tuple[tuple[SharedRead, ...], ...]
    """Units of a level are in order and have no row in common."""
    tail_seen: mx.array | None
    """(b, 1, 1, columns) booleans; None if every row sees all columns."""
    tail_columns: int


def in_order(rows: Sequence[DecodeRow]) -> list[int]:
    """Return the rows' indices in an order in which those that share parts are neighbours.

    Beyond that they are in the order of their slots, which often makes one slice of them.
    """
    by_slot = sorted(range(len(rows)), key=lambda i: rows[i].slot)
    rank: dict[tuple[int, int], int] = {}
    for i in by_slot:
        for part in rows[i].parts:
            rank.setdefault(_key(part), len(rank))
    return sorted(by_slot, key=lambda i: [rank[_key(part)] for part in rows[i].parts])


def plan_attention(rows: Sequence[DecodeRow], attention_window: AttentionWindow) -> AttentionPlan:
    """Group what rows in order (see `in_order`) read, so that a shared part is read once."""
    levels: list[list[SharedRead]] = []
    _descend(rows, 0, len(rows), 0, 0, attention_window, levels)
    columns = max(row.tail for row in rows) + 1
    return AttentionPlan(
        tuple(map(tuple, levels)), _tail_seen(rows, columns, attention_window), columns
    )


def _descend(
    rows: Sequence[DecodeRow],
    first: int,
    last: int,
    depth: int,
    level: int,
    attention_window: AttentionWindow,
    levels: list[list[SharedRead]],
) -> None:
    """Lay out the rows first..last-1, which share their first `depth` parts, from `level` on.

    Not a function within a function: one that calls itself keeps what it refers to, here the
    segments, until the garbage collector comes by.
    """
    start = first
    for _, group in groupby(range(first, last), lambda i: _key_at(rows[i], depth)):
        stop = start + len(list(group))
        if len(rows[start].parts) > depth:
            # As far as all of these rows go on alike, the parts are read together.
            end = depth + 1
            while (key := _key_at(rows[start], end)) is not None and key == _key_at(
                rows[stop - 1], end
            ):
                end += 1
            unit = _unit(rows, start, stop, depth, end, attention_window)
            if unit is not None:
                if level == len(levels):
                    levels.append([])
                levels[level].append(unit)
            _descend(rows, start, stop, end, level + (unit is not None), attention_window, levels)
        start = stop


def _key(part: KVSpan) -> tuple[int, int]:
    """Return a key that is equal for parts read together: one segment, ends close by.

    Rows that see less are scored against all columns the others see.
    """
    return id(part.segment), (part.columns - 1) // APART


def _key_at(row: DecodeRow, depth: int) -> tuple[int, int] | None:
    return _key(row.parts[depth]) if depth < len(row.parts) else None


def _unit(
    rows: Sequence[DecodeRow],
    first: int,
    last: int,
    depth: int,
    end: int,
    attention_window: AttentionWindow,
) -> SharedRead | None:
    """Return what these rows read of their parts depth..end-1; None if they see none of it."""
    members = rows[first:last]
    nearest = min(attention_window.starts_at(row.position) for row in members)
    pieces: list[ColumnRange] = []
    columns: list[tuple[int, int]] = []
    for depth_at in range(depth, end):
        part = max((row.parts[depth_at] for row in members), key=lambda part: part.columns)
        for start, stop in _pieces(part, nearest, attention_window.keep):
            pieces.append((part.segment, start - part.start, stop - part.start))
            columns.append((start, stop))
    if not pieces:
        return None
    ends = [row.parts[end - 1].end for row in members]
    furthest = max(attention_window.starts_at(row.position) for row in members)
    whole = min(ends) == max(ends) and all(
        start >= furthest or stop <= attention_window.keep for start, stop in columns
    )
    seen = None
    if not whole:
        at = mx.concatenate([mx.arange(start, stop) for start, stop in columns])
        seen = attention_window.mask(mx.array([row.position for row in members]), at)
        seen = seen & (at[None] < mx.array(ends)[:, None])
    return SharedRead(first, last, tuple(pieces), seen)


def _pieces(part: KVSpan, nearest: int, keep: int) -> list[tuple[int, int]]:
    """Return the positions of a part that are seen by a window from `nearest` on and a keep."""
    if nearest <= max(keep, part.start):
        return [(part.start, part.end)]
    spans = [(part.start, min(part.end, keep)), (max(part.start, nearest), part.end)]
    return [(start, stop) for start, stop in spans if start < stop]


def _tail_seen(
    rows: Sequence[DecodeRow], columns: int, attention_window: AttentionWindow
) -> mx.array | None:
    if all(
        row.tail + 1 == columns
        and max(attention_window.starts_at(row.position), 0)
        <= max(row.position - row.tail, attention_window.keep)
        for row in rows
    ):
        return None
    positions = mx.array([row.position for row in rows])[:, None]
    at = positions - mx.array([row.tail for row in rows])[:, None] + mx.arange(columns)[None]
    seen = at <= positions
    if attention_window.window is not None:
        seen = seen & ((at > positions - attention_window.window) | (at < attention_window.keep))
    return seen[:, None, None]


@dataclass(slots=True)
class DecodeStep:
    """One decode step over rows in order: what all layers of it have in common."""

    rows: Sequence[DecodeRow]
    tails: Tails
    slots: mx.array
    columns: mx.array
    offset: mx.array | int
    aligned: bool
    """Whether all rows write to the same column of neighbouring slots: one block."""
    neighbours: bool
    """Whether the rows' slots are one slice of the pool."""
    ahead: bool
    """Whether a layer is computed while Python still builds the next ones."""
    layouts: dict[AttentionWindow, AttentionPlan]

    @classmethod
    def of(cls, rows: Sequence[DecodeRow], tails: Tails) -> DecodeStep:
        """Prepare a step; nothing is computed yet."""
        positions = [row.position for row in rows]
        neighbours = all(row.slot == rows[0].slot + i for i, row in enumerate(rows))
        return cls(
            rows,
            tails,
            mx.array([row.slot for row in rows]),
            mx.array([row.tail for row in rows]),
            positions[0] if len(rows) == 1 else mx.array(positions),
            neighbours and all(row.tail == rows[0].tail for row in rows),
            neighbours,
            backend.current().computes_ahead(len(rows)),
            {},
        )

    def layout(self, attention_window: AttentionWindow) -> AttentionPlan:
        """Return how the rows read under this sight."""
        if attention_window not in self.layouts:
            self.layouts[attention_window] = plan_attention(self.rows, attention_window)
        return self.layouts[attention_window]

    def caches(self, attention_windows: Sequence[AttentionWindow]) -> list[DecodeReads]:
        """Return what the model is handed, one a layer."""
        return [
            DecodeReads(self, layer, attention_window)
            for layer, attention_window in enumerate(attention_windows)
        ]


class Reads:
    """One layer of one step, read where it lies: what the seam recognizes."""

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
        """Return what `attend` takes for a mask."""
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
            TypeError: keys, values or mask are not what this object gave out.
        """
        raise NotImplementedError

    def check_given(self, keys: object, values: object, mask: object) -> AttentionWindow:
        """Raise TypeError unless keys, values and mask are what this object gave out."""
        if self._given is None or keys is not self._given[0] or values is not self._given[1]:
            raise TypeError("this model changes keys or values after they were cached")
        if not isinstance(mask, MaskRequest):
            raise TypeError("this model makes its own masks")
        return self.attention_window.within(mask.window)


class DecodeReads(Reads):
    """One layer of a decode step: every row adds one token to its tail."""

    def __init__(self, step: DecodeStep, layer: int, attention_window: AttentionWindow) -> None:
        super().__init__(layer, attention_window)
        self.step = step
        self.offset = step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows' tokens, (b, kv_heads, 1, dim), behind their tails; return them."""
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
        """Attend as the model's own attention would: (b, heads, 1, d) -> (b, heads, 1, dim)."""
        layout = self.step.layout(self.check_given(keys, values, mask))
        queries = attention.in_base_2(queries, scale)
        if sinks is not None:
            sinks = sinks.astype(mx.float32) * attention.LOG2_E
        attend = self._attend_alone if len(self.step.rows) == 1 else self._attend_together
        result = attend(queries, layout, sinks)
        if result.dtype != queries.dtype:
            result = result.astype(queries.dtype)
        if self.step.ahead:
            mx.async_eval(result)  # type: ignore[no-untyped-call]
        return result

    def _attend_alone(
        self, queries: mx.array, layout: AttentionPlan, sinks: mx.array | None
    ) -> mx.array:
        """Read all parts and the tail under one softmax."""
        row = self.step.rows[0]
        heads = queries.shape[1]
        tail = self.step.tails.read_block(self.layer, row.slot, 1, row.tail + 1)
        units = [unit for level in layout.levels for unit in level]
        pieces = [piece for unit in units for piece in unit.pieces]
        keys, values = _sides(pieces, self.layer)
        seen = _seen_alone(units, layout, row.tail + 1)
        stacked = attention.grouped(queries, tail[0].shape[1])
        # One row multiplies better with all threads of BLAS, which codes are not multiplied by.
        device = backend.current()
        with device.lane(None if attention.mostly_coded(keys) else 0):
            part = device.attend_decode(
                stacked, [*keys, tail[0].squeeze(0)], [*values, tail[1].squeeze(0)], seen
            )
        sunk = None if sinks is None else sinks.reshape(*stacked.shape[:2], 1)
        return attention.ungrouped(attention.merged([part], sunk), 1, heads)

    def _attend_together(
        self, queries: mx.array, layout: AttentionPlan, sinks: mx.array | None
    ) -> mx.array:
        """Read shared parts once, own ones row by row, and all tails in one product."""
        b, heads = queries.shape[:2]
        tails, columns = self.step.tails, layout.tail_columns
        if self.step.neighbours:
            tail_keys, tail_values = tails.read_block(
                self.layer, self.step.rows[0].slot, b, columns
            )
        else:
            tail_keys, tail_values = tails.read(self.layer, self.step.slots, columns)
        kv_heads = tail_keys.shape[1]
        r = heads // kv_heads
        stacked = attention.grouped(queries, kv_heads)
        partials = [self._tail_partial(queries, tail_keys, tail_values, layout)]
        device = backend.current()
        before = [partials[0].mixed] * device.lanes
        """What each lane computes last, by now: codes of the next unit are read after that."""
        for level in layout.levels:
            parts_read: list[Partial] = []
            row = 0
            for number, unit in enumerate(level):
                if unit.first > row:
                    parts_read.append(_nothing(stacked, (unit.first - row) * r, tail_values))
                place = number % device.lanes
                with device.lane(number if len(level) > 1 else None):
                    parts_read.append(self._unit_partial(stacked, unit, r, before[place]))
                if len(level) > 1:
                    before[place] = parts_read[-1].mixed
                else:  # it may have had all lanes
                    before = [parts_read[-1].mixed] * device.lanes
                row = unit.last
            if row < b:
                parts_read.append(_nothing(stacked, (b - row) * r, tail_values))
            partials.append(_side_by_side(parts_read))
        sunk = None
        if sinks is not None:
            row_sinks = mx.broadcast_to(sinks.reshape(kv_heads, 1, r), (kv_heads, b, r))
            sunk = row_sinks.reshape(kv_heads, b * r, 1)
        return attention.ungrouped(attention.merged(partials, sunk), b, heads)

    def _unit_partial(
        self, stacked: mx.array, unit: SharedRead, r: int, after: mx.array
    ) -> Partial:
        keys, values = _sides(unit.pieces, self.layer)
        seen = None if unit.seen is None else mx.repeat(unit.seen, r, axis=0)[None]
        rows = stacked
        if stacked.shape[1] != (unit.last - unit.first) * r:
            rows = stacked[:, unit.first * r : unit.last * r]
        return backend.current().attend_decode(rows, keys, values, seen, after)

    def _tail_partial(
        self, queries: mx.array, keys: mx.array, values: mx.array, layout: AttentionPlan
    ) -> Partial:
        b, heads, _, d = queries.shape
        kv_heads = keys.shape[1]
        r = heads // kv_heads
        scores = attention.score(queries.reshape(b, kv_heads, r, d), [keys])
        if layout.tail_seen is not None:
            scores = mx.where(layout.tail_seen, scores, MASKED)
        top, weights, total = attention.weigh(scores, backend.current().exp2)

        def rows_last(x: mx.array) -> mx.array:
            return x.swapaxes(0, 1).reshape(kv_heads, b * r, x.shape[-1])

        mixed = attention.mix(weights, total, [values])
        return Partial(rows_last(top), rows_last(total), rows_last(mixed))


def _sides(pieces: Sequence[ColumnRange], layer: int) -> tuple[list[KVData], list[KVData]]:
    """Return keys and values of the pieces, (kv_heads, columns, dim) each, or coded."""
    sides: tuple[list[KVData], list[KVData]] = ([], [])
    for segment, start, stop in pieces:
        if segment.missing:
            start, stop = segment.columns(layer, start, stop)
        keys, values = segment.layers[layer]
        sides[0].append(_held(keys, start, stop))
        sides[1].append(_held(values, start, stop))
    return sides


def _held(side: Side, start: int, stop: int) -> KVData:
    """Return columns of a segment's side as attention reads them."""
    if isinstance(side, Coded):
        if start == 0 and stop == side.tokens:
            return side
        span = side.codec.span
        if start % span == 0 and stop % span == 0:
            return side.take(start, stop)
        first, last = start // span * span, -(-stop // span) * span
        return side.take(first, last).dequantize().squeeze(0)[:, start - first : stop - first]
    assert isinstance(side, mx.array)
    # squeeze makes a view where an index of 0 would copy
    whole = start == 0 and stop == side.shape[2]
    return (side if whole else side[:, :, start:stop]).squeeze(0)


def _wide(sides: Sequence[KVData], dtype: mx.Dtype) -> list[mx.array]:
    """Return the side as arrays (1, kv_heads, columns, dim)."""
    return [
        (side.dequantize() if isinstance(side, Coded) else side[None]).astype(dtype)
        for side in sides
    ]


def _seen_alone(units: Sequence[SharedRead], layout: AttentionPlan, tail: int) -> mx.array | None:
    """Return (1, columns) booleans over the units' columns and the tail's, if any is hidden."""
    if layout.tail_seen is None and all(unit.seen is None for unit in units):
        return None
    masks = []
    for unit in units:
        count = sum(stop - start for _, start, stop in unit.pieces)
        masks.append(mx.ones((1, count), mx.bool_) if unit.seen is None else unit.seen)
    own = layout.tail_seen
    masks.append(mx.ones((1, tail), mx.bool_) if own is None else own[0, 0])
    return mx.concatenate(masks, axis=-1)


def _nothing(stacked: mx.array, rows: int, values: mx.array) -> Partial:
    """Return what rows that read nothing contribute."""
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


class ChunkReads(Reads):
    """One layer of a prefill chunk of one sequence, behind the parts it reads.

    The chunk's own keys and values are kept here, in buffers of just their size, and become a
    segment when the step is done.
    """

    def __init__(
        self,
        layer: int,
        attention_window: AttentionWindow,
        parts: Sequence[KVSpan],
        position: int,
        *,
        last: bool = False,
    ) -> None:
        """`last`: the output of the layer's attention is never read, so it is never computed."""
        super().__init__(layer, attention_window)
        self.parts = parts
        self.last = last
        self.offset: int = position
        self.values: mx.array | None = None
        self.squares: Squares | None = None
        """Takes in what is read, if it is to be known how large that is."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep the chunk's tokens, (1, kv_heads, n, dim), and return them."""
        self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)
        # All of the layers before is computed with them: what they had joined is let go.
        mx.eval(self.keys, self.values)
        self._given = keys, values
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
        """Attend as the model's own attention would: (1, heads, n, d) -> (1, heads, n, dim)."""
        attention_window = self.check_given(keys, values, mask)
        if self.squares is not None:
            self.squares.add(keys, queries)
        all_keys, all_values, columns = self.joined(attention_window)
        return backend.current().attend_prefill(
            queries,
            all_keys,
            all_values,
            columns=columns,
            start=self.offset,
            scale=scale,
            attention_window=attention_window,
            sinks=sinks,
            eager=not self.last,
        )

    def joined(
        self, attention_window: AttentionWindow
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Join what is seen of the parts with the chunk: one layer, for as long as it is read.

        Returns:
            Keys, values (1, kv_heads, m, dim), and the positions (m,) of the columns, None if
            they are 0 .. m - 1.
        """
        assert self.keys is not None and self.values is not None
        own = self.keys, self.values
        return join_parts(
            self.parts, self.layer, attention_window, self.offset, own, lazily=self.last
        )


def join_parts(
    parts: Sequence[KVSpan],
    layer: int,
    attention_window: AttentionWindow,
    position: int,
    own: tuple[mx.array, mx.array],
    *,
    lazily: bool = False,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Join what a query at `position` sees of the parts with `own` columns behind them.

    Codes are dequantized some tokens at a time, evaluated, so that little more is taken than is
    made; or `lazily`, all at once if it is read at all.
    """
    nearest = attention_window.starts_at(position)
    pieces: list[ColumnRange] = []
    spans: list[tuple[int, int]] = []
    for part in parts:
        for start, stop in _pieces(part, nearest, attention_window.keep):
            pieces += _aligned(part.segment, layer, start - part.start, stop - part.start)
            spans.append((start, stop))
    keys, values = own
    if not pieces:
        begins = parts[-1].end if parts else position
        return keys, values, _positions([(begins, begins + keys.shape[2])])
    behind = parts[-1].end
    spans.append((behind, behind + keys.shape[2]))
    before = _sides(pieces, layer)
    joined = [_join(*sides, lazily=lazily) for sides in zip(before, own, strict=True)]
    return joined[0], joined[1], _positions(spans)


def _aligned(segment: Segment, layer: int, start: int, stop: int) -> list[ColumnRange]:
    """Return the columns as pieces of which the longest begins and ends where codes can be cut."""
    coded = (side for side in segment.layers[layer] if isinstance(side, Coded))
    span = max((side.codec.span for side in coded), default=1)
    first = min(stop, -(-start // span) * span)
    last = max(first, stop // span * span)
    cuts = ((start, first), (first, last), (last, stop))
    return [(segment, begin, end) for begin, end in cuts if begin < end]


def _join(before: Sequence[KVData], own: mx.array, *, lazily: bool) -> mx.array:
    """Join the cached columns with `own`, (1, kv_heads, columns, dim)."""
    if lazily or not any(isinstance(side, Coded) for side in before):
        return mx.concatenate([*_wide(before, own.dtype), own], axis=2)
    wide = (s if isinstance(s, Coded) else s[None].astype(own.dtype) for s in before)
    sides = [*wide, own]
    placed = [(0, at, side) for at, side in col.spread(0, sides)]
    return dequantized(placed, 1, sum(map(col.columns, sides)), own.dtype)


def _positions(spans: Sequence[tuple[int, int]]) -> mx.array | None:
    """Return the positions of the spans' columns, None if they are 0 .. m - 1."""
    if spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans)):
        return None
    return mx.concatenate([mx.arange(start, stop) for start, stop in spans])


class JoinedReads:
    """One layer of one sequence's step, joined: for models that need contiguous KV.

    The protocol of mlx-lm's plain cache; masks are arrays or "causal", as mlx-lm's are. Models
    with sparse attention also read and replace `keys` and `values`, here the new tokens' alone,
    to have them computed.
    """

    def __init__(
        self,
        layer: int,
        attention_window: AttentionWindow,
        parts: Sequence[KVSpan],
        position: int,
        tail: tuple[Tails, int, int] | None = None,
    ) -> None:
        """`tail` is (tails, slot, tokens in it) in a decode step, None in a prefill chunk."""
        self.layer = layer
        self.attention_window = attention_window
        self.parts = parts
        self.offset = position
        self.tail = tail
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep the new tokens and return all that is seen, they included."""
        if self.tail is None:
            self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)
            mx.eval(self.keys, self.values)  # as in ChunkReads: one layer at a time
        else:
            tails, slot, used = self.tail
            tails.write_block(self.layer, slot, used, keys, values)
            self.keys, self.values = keys, values
        return self.keys_and_values()

    @property
    def start_position(self) -> int:
        """Position of the first column, as models with chunked attention ask for it."""
        used = 0 if self.tail is None else self.tail[2]
        return min(
            self.attention_window.starts_at(self.offset), self.offset - used
        )  # a tail is read whole

    def maybe_trim_front(self) -> None:
        """Drop nothing: columns that are not visible are not joined."""

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what `update_and_fetch` returned; later layers of some models read it."""
        if self.tail is not None:
            tails, slot, used = self.tail
            own = tails.read_block(self.layer, slot, 1, used + 1)
        else:
            assert self.keys is not None and self.values is not None
            own = self.keys, self.values
        # Lazily: a layer whose output is unread is never computed, and rows are computed together.
        return join_parts(
            self.parts, self.layer, self.attention_window, self.offset, own, lazily=True
        )[:2]

    @property
    def state(self) -> tuple[mx.array, mx.array, int]:
        """Keys, values and offset, as of mlx-lm's plain cache."""
        return (*self.keys_and_values(), self.offset)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return what the new tokens see of the columns that `update_and_fetch` will return."""
        attention_window = self.attention_window.within(window_size)
        used = 0 if self.tail is None else self.tail[2]
        begins = self.offset - used
        as_array = return_array and (n > 1 or window_size is not None)  # as mlx-lm's caches do
        if not as_array and attention_window.sees_all(self.offset + n - 1):
            return None if n == 1 else "causal"
        tail_seen = attention_window.starts_at(self.offset) <= max(begins, attention_window.keep)
        if not as_array and n == 1 and attention_window == self.attention_window and tail_seen:
            return None  # the parts were joined as far as they are seen
        nearest = self.attention_window.starts_at(self.offset)
        spans = [
            s for part in self.parts for s in _pieces(part, nearest, self.attention_window.keep)
        ]
        spans.append((begins, self.offset + n))
        at = mx.concatenate([mx.arange(start, stop) for start, stop in spans])
        return attention_window.mask(mx.arange(self.offset, self.offset + n), at)

    def empty(self) -> bool:
        """Tell whether nothing is in front of the new tokens."""
        return self.offset == 0
