"""Choice of blocks by the key index in MLX's operations: nothing is evaluated, on any device.

This is the reference. Scores are sums of whole numbers (`KeyIndex.products`), so a choice does not
depend on the rows scored together. Segments that several rows read are scored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.rotations import Rotation
from penstock.attention.selection.selection import Selection
from penstock.kv.codecs.coded import Coded

Tables = dict[tuple[int, int, int], mx.array]
"""Rotations of blocks that the layers of a step share, by `id` of the rotation, first block and
stop."""


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
        """Score the columns for all rows at once; return those of each row, (kv_heads, m, n).

        An index is read whole, because its part would be copied, unless most of it is not needed.
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
    """Return each row's scores of the blocks that it may choose, (kv_heads, m, blocks).

    A block has the score of its best token.

    Args:
        rows: rows with selective attention.
        queries: queries of the rows, (rows, kv_heads, m, dim), float32.
        scale: scale of the model's scores, for base e.
        tables: rotations of blocks used before in this step.
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
    """Return the part of a row's block scores that the index leaves out, (kv_heads, m, blocks).

    Args:
        queries: queries of the row, (kv_heads, m, dim), scaled.
    """
    factors = _center_factors(selection, row, queries, layer, tables)
    return None if factors is None else factors[0] @ factors[1]


def _center_factors(
    selection: Selection, row: DecodeRow, queries: mx.array, layer: int, tables: Tables | None
) -> tuple[mx.array, mx.array] | None:
    """Return two matrices whose product is that of a row's queries with the blocks' centers.

    Of one row at a time, because rounding depends on the shape of a product and could change the
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
    """Return the best blocks of each row, (kv_heads, blocks), the best first; see `block_scores`.

    They are numbered from the first that may be chosen on, `FIRST_BLOCKS`. Of equal blocks the
    earlier ones are chosen.
    """
    scores = block_scores(selection, rows, queries, scale, layer, ops, tables)
    return [
        mx.argsort(_lacks(of_row), axis=-1)[:, : selection.blocks(row.position)]
        for row, of_row in zip(rows, scores, strict=True)
    ]


def _lacks(scores: mx.array) -> mx.array:
    """Return what each block lacks to be the only one, (kv_heads, blocks); the least is chosen."""
    lacks = mx.logsumexp(scores, axis=-1, keepdims=True) - scores
    return lacks.squeeze(1) if lacks.shape[1] == 1 else lacks.min(axis=1)


def _of_row(x: mx.array, number: int) -> mx.array:
    return x.squeeze(0) if len(x) == 1 else x[number]


def _table(rotation: Rotation, stop: int, tables: Tables) -> mx.array:
    key = id(rotation), FIRST_BLOCKS, stop
    if key not in tables:
        tables[key] = rotation.table(FIRST_BLOCKS, stop)
    return tables[key]
