"""Attention of one layer in a decode step with MLX's operations: the reference for all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.attention_plan import AttentionPlan, DecodeRow, SharedRead, plan_attention
from penstock.attention.chosen_tokens import ChosenTokens, gathered, read_with_tail, visible_pieces
from penstock.attention.joined_reads import read_sides
from penstock.attention.selection.selected_reads import ChoiceReader, choose
from penstock.attention.selection.spilled_reads import whole
from penstock.attention.span_attention import MASKED, AttentionWindow, KVData, Partial
from penstock.attention.streamed_reads import attend_streamed
from penstock.kv.segment import ColumnRange


@dataclass(frozen=True, slots=True)
class LayerDecode:
    """Attention of one layer in a decode step: rows attend to their spans and tails."""

    device: AttentionBackend
    step: DecodeStep
    layer: int
    window: AttentionWindow

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        step = self.step
        choosing = step.choosing(self.layer, self.window)
        by_row = bool(choosing) or step.has_apart(self.layer)
        if not by_row:
            done = step.ways.attend(step, self.layer, self.window, queries, scale, sinks)
            if done is not None:
                return done
        sunk = None if sinks is None else sinks.astype(mx.float32) * span_attention.LOG2_E
        in_base_2 = span_attention.in_base_2(queries, scale)
        if by_row:
            chosen = self._chosen(queries, scale, choosing, sinks)
            result = self._by_row(in_base_2, chosen, sunk)
        elif self.device.reads_together(*step.size):
            result = self.together(in_base_2, step.layout(self.window), sunk)
        else:
            result = self._alone(in_base_2, step.rows[0], step.layout(self.window), sunk)
        return result if result.dtype == queries.dtype else result.astype(queries.dtype)

    def attend_chosen(
        self,
        queries: mx.array,
        scale: float,
        chosen: Mapping[int, ChosenTokens],
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend like `attend`; the new tokens in `chosen` read these tokens only."""
        if not chosen:
            return self.attend(queries, scale, sinks)
        sunk = None if sinks is None else sinks.astype(mx.float32) * span_attention.LOG2_E
        in_base_2 = span_attention.in_base_2(queries, scale)
        mx.async_eval([choice.columns for choice in chosen.values()])  # type: ignore[no-untyped-call]
        outputs, rows = dict[int, mx.array](), self.step.new_tokens
        for number, choice in chosen.items():
            row, token = divmod(number, self.step.width)
            own = in_base_2[row : row + 1, :, token : token + 1]
            outputs[number] = self._attend_to(own, rows[number], choice, sunk)
        result = self._by_row(in_base_2, outputs, sunk)
        return result if result.dtype == queries.dtype else result.astype(queries.dtype)

    def _attend_to(
        self, queries: mx.array, row: DecodeRow, choice: ChosenTokens, sinks: mx.array | None
    ) -> mx.array:
        """Attend to the chosen tokens of a row, which are copied together."""
        sides = read_with_tail(self.step, self.layer, row, visible_pieces(row, self.window))
        keys, values = self._of_tails(*(gathered(side, choice.columns) for side in sides))
        heads, kv_heads = queries.shape[1], values.shape[0]
        stacked = span_attention.grouped(queries, kv_heads)
        part = self.device.attend_decode(stacked, [keys], [values], choice.seen)
        sunk = None if sinks is None else _sunk(sinks, kv_heads, 1, 1)
        return span_attention.ungrouped(span_attention.merged([part], sunk), 1, heads)

    def _chosen(
        self, queries: mx.array, scale: float, numbers: Sequence[int], sinks: mx.array | None
    ) -> dict[int, mx.array]:
        """Attend for the new tokens with selective attention; return their outputs by index."""
        if not numbers:
            return {}
        step = self.step
        reader = self._choice_reader()
        if step.width > 1:
            queries = queries.swapaxes(1, 2).reshape(-1, queries.shape[1], 1, queries.shape[3])
        arguments = reader, step.new_tokens, numbers, queries, scale
        return choose(*arguments, self.layer, step.tails, sinks, step.memory)

    def _choice_reader(self) -> ChoiceReader:
        step, shape = self.step, self.step.tails.shapes[self.layer]
        return self.device.choice_reader(step.selection, shape.key_dim, shape.value_dim)

    def _by_row(
        self, queries: mx.array, chosen: Mapping[int, mx.array], sinks: mx.array | None
    ) -> mx.array:
        """Process each row separately, with selective attention or in full.

        Args:
            queries: queries of all rows, scaled for base 2.
            chosen: outputs of new tokens with selective attention, by index.
            sinks: attention sinks in base 2.
        """
        step, width = self.step, self.step.width
        results = []
        for number, row in enumerate(step.rows):
            mine, first = queries[number : number + 1], number * width
            if chosen.keys().isdisjoint(range(first, first + width)):
                results.append(self._whole(mine, row, sinks))
                continue
            tokens = [
                chosen[first + i]
                if first + i in chosen
                else self._whole(mine[:, :, i : i + 1], row.ahead(i), sinks)
                for i in range(min(width, 1 + row.proposed))
            ]
            tokens += [mx.zeros_like(tokens[0])] * (width - len(tokens))  # ignored columns
            results.append(tokens[0] if width == 1 else mx.concatenate(tokens, axis=2))
        return results[0] if len(results) == 1 else mx.concatenate(results)

    def _whole(
        self,
        queries: mx.array,
        row: DecodeRow,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend to all parts of one row, which may be spilled."""
        apart = self.step.is_apart(row, self.layer)
        if apart and self.step.streams(row, self.window):
            tail = self.step.tails.read_block(self.layer, row.slot, 1, row.tail + queries.shape[2])
            return attend_streamed(queries, tail, row.parts, self.layer, self.device, sinks)
        if apart and self.window.sees_all(row.position):
            row = whole(row, self.layer)
        layout = plan_attention([row], self.window, queries.shape[2])
        result = self._alone(queries, row, layout, sinks)
        if apart:  # frees the spilled KV that was read
            mx.eval(result)
        return result

    def _alone(
        self,
        queries: mx.array,
        row: DecodeRow,
        layout: AttentionPlan,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend to all parts of a single row and to its tail."""
        columns = layout.tail_columns
        shared_reads = [shared for level in layout.levels for shared in level]
        pieces = [piece for shared in shared_reads for piece in shared.pieces]
        seen = _seen_alone(shared_reads, layout, columns, queries.shape[2])
        return self._parts(queries, row, self._read(pieces), columns, seen, sinks)

    def _read(self, pieces: Sequence[ColumnRange]) -> tuple[Sequence[KVData], Sequence[KVData]]:
        """Return the keys and values of column ranges, as attention reads them."""
        return read_sides(pieces, self.layer, self.device)

    def _of_tails(self, keys: mx.array, values: mx.array) -> tuple[KVData, mx.array]:
        """Return the keys and values of tails, as attention reads them."""
        return keys, values

    def _parts(
        self,
        queries: mx.array,
        row: DecodeRow,
        sides: tuple[Sequence[KVData], Sequence[KVData]],
        columns: int,
        seen: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend to parts and tail of a row under one softmax."""
        keys, values = sides
        heads, width = queries.shape[1:3]
        tail = self.step.tails.read_block(self.layer, row.slot, 1, columns)
        own_keys, own_values = self._of_tails(*(side.squeeze(0) for side in tail))
        stacked = span_attention.grouped(queries, tail[0].shape[1])
        if seen is not None and width > 1:
            seen = mx.tile(seen, (stacked.shape[1] // width, 1))
        # One row is faster with all threads of BLAS, but products with codes do not use BLAS.
        with self.device.lane(None if span_attention.mostly_coded(keys) else 0):
            part = self.device.attend_decode(
                stacked, [*keys, own_keys], [*values, own_values], seen
            )
        sunk = None if sinks is None else _sunk(sinks, stacked.shape[0], 1, width)
        return span_attention.ungrouped(span_attention.merged([part], sunk), 1, heads)

    def together(
        self, queries: mx.array, layout: AttentionPlan, sinks: mx.array | None
    ) -> mx.array:
        """Attend to each shared part once, and to all tails in one product."""
        b, heads = queries.shape[:2]
        tails, columns = self.step.tails, layout.tail_columns
        if self.step.neighbors:
            tail_keys, tail_values = tails.read_block(
                self.layer, self.step.rows[0].slot, b, columns
            )
        else:
            tail_keys, tail_values = tails.read(self.layer, self.step.slots, columns)
        kv_heads = tail_keys.shape[1]
        own_keys, own_values = self._of_tails(tail_keys, tail_values)
        r = heads // kv_heads * self.step.width
        stacked = span_attention.grouped(queries, kv_heads)
        partials = [self._tail_partial(queries, own_keys, own_values, layout)]
        before = [partials[0].mixed] * self.device.lanes
        """Last result of each lane; the codes of its next read are decoded only after it."""
        for level in layout.levels:
            parts_read: list[Partial] = []
            row = 0
            for number, shared in enumerate(level):
                if shared.first > row:
                    parts_read.append(_nothing(stacked, (shared.first - row) * r, own_values))
                place = number % self.device.lanes
                with self.device.lane(number if len(level) > 1 else None):
                    parts_read.append(self._shared_partial(stacked, shared, r, before[place]))
                if len(level) > 1:
                    before[place] = parts_read[-1].mixed
                else:  # it may have used all lanes
                    before = [parts_read[-1].mixed] * self.device.lanes
                row = shared.last
            if row < b:
                parts_read.append(_nothing(stacked, (b - row) * r, own_values))
            partials.append(_side_by_side(parts_read))
        sunk = None if sinks is None else _sunk(sinks, kv_heads, b, self.step.width)
        return span_attention.ungrouped(span_attention.merged(partials, sunk), b, heads)

    def _shared_partial(
        self, stacked: mx.array, shared: SharedRead, r: int, after: mx.array
    ) -> Partial:
        keys, values = self._read(shared.pieces)
        seen = None if shared.seen is None else _for_stacked(shared.seen, r)
        rows = stacked
        if stacked.shape[1] != (shared.last - shared.first) * r:
            rows = stacked[:, shared.first * r : shared.last * r]
        return self.device.attend_decode(rows, keys, values, seen, after)

    def _tail_partial(
        self, queries: mx.array, keys: KVData, values: mx.array, layout: AttentionPlan
    ) -> Partial:
        b, heads, n, d = queries.shape
        kv_heads = values.shape[1]
        r = heads // kv_heads * n
        scores = span_attention.score(queries.reshape(b, kv_heads, r, d), [keys], self.device)
        if layout.tail_seen is not None:
            seen = _for_stacked(layout.tail_seen, r).reshape(b, 1, r, -1)
            scores = mx.where(seen, scores, MASKED)
        top, weights, total = span_attention.weigh(scores, self.device)

        def rows_last(x: mx.array) -> mx.array:
            return x.swapaxes(0, 1).reshape(kv_heads, b * r, x.shape[-1])

        mixed = span_attention.mix(weights, total, [values], self.device)
        return Partial(rows_last(top), rows_last(total), rows_last(mixed))


def _seen_alone(
    shared_reads: Sequence[SharedRead], layout: AttentionPlan, tail: int, width: int
) -> mx.array | None:
    """Return a (width, columns) mask of the parts and the tail; None if all columns are visible."""
    if layout.tail_seen is None and all(shared.seen is None for shared in shared_reads):
        return None
    masks = []
    for shared in shared_reads:
        count = sum(stop - start for _, start, stop in shared.pieces)
        masks.append(mx.ones((width, count), mx.bool_) if shared.seen is None else shared.seen[0])
    tail_mask = layout.tail_seen
    masks.append(mx.ones((width, tail), mx.bool_) if tail_mask is None else tail_mask[0])
    return mx.concatenate(masks, axis=-1)


def _for_stacked(seen: mx.array, r: int) -> mx.array:
    """Expand row masks (b, width, columns) to stacked queries, (1, b * r, columns).

    The r stacked queries of a row are its query heads of one KV head, each with all new tokens.
    """
    b, width, columns = seen.shape
    expanded = mx.broadcast_to(seen[:, None], (b, r // width, width, columns))
    return expanded.reshape(1, b * r, columns)


def _sunk(sinks: mx.array, kv_heads: int, b: int, width: int) -> mx.array:
    """Expand the sinks of all heads to stacked queries, (kv_heads, rows, 1)."""
    by_head = sinks.reshape(kv_heads, 1, -1, 1)
    expanded = mx.broadcast_to(by_head, (kv_heads, b, by_head.shape[2], width))
    return expanded.reshape(kv_heads, -1, 1)


def _nothing(stacked: mx.array, rows: int, values: mx.array) -> Partial:
    """Return the partial result of rows that read nothing."""
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
