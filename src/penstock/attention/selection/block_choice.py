"""Choice of blocks by the key index in MLX's operations, the reference; nothing is evaluated.

Scores are sums of integers (`KeyIndex.products`), so a choice does not depend on the rows scored
together. A segment that several rows read is scored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS, LEAST_SHARE
from penstock.attention.selection.rotations import Rotation
from penstock.attention.selection.selection import Selection
from penstock.kv.codecs.coded import Coded

Tables = dict[tuple[int, int], mx.array]
"""Rotations of blocks shared by the layers of a step, by `id` of the rotation and stop."""


@dataclass(slots=True)
class _IndexRead:
    """Columns of one index, and the rows that read some of them."""

    index: Coded
    rows: list[int]
    start: int
    stop: int

    def add(self, row: int, start: int, stop: int) -> None:
        self.rows.append(row)
        self.start, self.stop = min(self.start, start), max(self.stop, stop)

    def products(
        self, selection: Selection, whole: mx.array, ops: AttentionOps
    ) -> dict[int, mx.array]:
        """Score the columns for all rows at once; return the scores by row, (kv_heads, m, n).

        A slice would be a copy, so the index is read in full unless most of it is not needed.
        """
        b, m = whole.shape[0], whole.shape[2]
        index = self.index
        if 2 * (self.stop - self.start) < index.tokens:
            index = index.take(self.start, self.stop)
        else:
            self.start = 0
        if self.rows == list(range(b)):
            stacked = whole.swapaxes(0, 1).flatten(1, 2) if b > 1 else whole.squeeze(0)
        else:
            stacked = mx.concatenate([whole[row] for row in self.rows], axis=1)
        products = selection.index.products(stacked, index, ops)
        if len(self.rows) == 1:
            return {self.rows[0]: products}
        return {row: products[:, i * m : (i + 1) * m] for i, row in enumerate(self.rows)}


def block_scores(
    selection: Selection,
    rows: Sequence[DecodeRow],
    queries: mx.array,
    scale: float,
    layer: int,
    ops: AttentionOps,
    tables: Tables | None = None,
) -> list[mx.array]:
    """Return each row's scores of the blocks before the recent ones, (kv_heads, m, blocks).

    The score of a block is that of its best token.

    Args:
        rows: rows with selective attention.
        queries: queries of the rows, (rows, kv_heads, m, dim), float32.
        scale: factor of the scores in base e.
        tables: rotations of blocks computed earlier in this step; new ones are added.
    """
    whole, worth = selection.index.whole_queries(queries, scale)
    parts = [list(selection.indexed(row, layer)) for row in rows]
    reads: dict[int, _IndexRead] = {}
    for number, pieces in enumerate(parts):
        for index, start, stop in pieces:
            reads.setdefault(id(index), _IndexRead(index, [], start, stop)).add(number, start, stop)
    products = {
        key: (read.products(selection, whole, ops), read.start) for key, read in reads.items()
    }
    scores = []
    for number, row in enumerate(rows):
        columns = []
        for index, start, stop in parts[number]:
            of_rows, first = products[id(index)]
            columns.append(of_rows[number][..., start - first : stop - first])
        of_tokens = columns[0] if len(columns) == 1 else mx.concatenate(columns, axis=-1)
        best = mx.unflatten(of_tokens, -1, (-1, BLOCK_TOKENS)).max(axis=-1)
        score = best * _of_row(worth, number)
        factors = _center_factors(selection, row, _of_row(queries, number), layer, tables)
        scores.append(score if factors is None else mx.addmm(score, *factors, alpha=scale))
    return scores


def center_scores(
    selection: Selection,
    row: DecodeRow,
    queries: mx.array,
    layer: int,
    tables: Tables | None = None,
) -> mx.array | None:
    """Return the part of the selectable blocks' scores due to the key centers, (kv_heads, m, n).

    None if the layer has no centers.

    Args:
        queries: queries of the row, (kv_heads, m, dim), scaled.
    """
    factors = _center_factors(selection, row, queries, layer, tables)
    return None if factors is None else (factors[0] @ factors[1])[..., FIRST_BLOCKS:]


def _center_factors(
    selection: Selection, row: DecodeRow, queries: mx.array, layer: int, tables: Tables | None
) -> tuple[mx.array, mx.array] | None:
    """Return two matrices whose product is the scores of the blocks' centers for a row's queries.

    One row at a time, because rounding depends on the shape of a product and could change the
    choice.
    """
    centers = selection.index.centers.get(layer)
    if centers is None:
        return None
    stop = selection.recent_start(row.position) // BLOCK_TOKENS
    table = _table(centers.rotation, stop, {} if tables is None else tables)
    return queries @ centers.factors, table


def best_blocks(
    selection: Selection,
    rows: Sequence[DecodeRow],
    queries: mx.array,
    scale: float,
    layer: int,
    ops: AttentionOps,
    tables: Tables | None = None,
) -> list[mx.array]:
    """Return the blocks selected by each row, (kv_heads, blocks), best first; see `block_scores`.

    Numbers are relative to `FIRST_BLOCKS`, the first block that may be selected: 0 is that block.
    Ties go to the earlier block.
    """
    scores = block_scores(selection, rows, queries, scale, layer, ops, tables)
    return [
        mx.argsort(_lacks(of_row), axis=-1)[:, : selection.blocks(row.position)]
        for row, of_row in zip(rows, scores, strict=True)
    ]


def _lacks(scores: mx.array) -> mx.array:
    """Return -LEAST_SHARE minus selectable blocks' shares summed over queries: (kv_heads, blocks).

    Shares are the softmax over all blocks with scores.
    """
    shares = mx.softmax(scores, axis=-1)
    shares = shares.squeeze(1) if shares.shape[1] == 1 else shares.sum(axis=1)
    return -LEAST_SHARE - shares[:, FIRST_BLOCKS:]


def _of_row(x: mx.array, number: int) -> mx.array:
    return x.squeeze(0) if len(x) == 1 else x[number]


def _table(rotation: Rotation, stop: int, tables: Tables) -> mx.array:
    key = id(rotation), stop
    if key not in tables:
        tables[key] = rotation.table(0, stop)
    return tables[key]
