"""Selective attention: the first, the recent and the best-scoring blocks of long sequences.

Each KV head selects its own blocks. An index of the keys (`key_index`) scores every token between
the first and the recent ones. A block's score is that of its best token, after a softmax over the
blocks, for the query of the KV head that scores it highest. The selected blocks are gathered and
read exactly, together with the first and the recent tokens, which are read in place.

The selection depends only on the tokens and the position, not on segment boundaries, cache hits or
other rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.ops import AttentionOps
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, CHOSEN, FIRST_BLOCKS
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import CenterLoop
from penstock.attention.span_attention import ALL_TOKENS, Partial
from penstock.kv.codecs.coded import Coded
from penstock.kv.columns import Side
from penstock.kv.segment import ColumnRange, KVSpan

FIRST_TOKENS = FIRST_BLOCKS * BLOCK_TOKENS
"""Number of leading tokens that are always read, because many heads attend to them."""
LEAST_TOKENS = 128
"""Minimum number of tokens to read: the first, the recent ones, and a few blocks."""
LEAST_RECENT_TOKENS = 33
"""Minimum number of recent tokens, which are always read: the longest tail and the new token."""
RECENT_SHARE = 4
"""Divisor of all tokens to read that gives the number of recent ones."""
Numbers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Selection:
    """Number of tokens that a decode step reads, and the layers with selective attention."""

    tokens: int
    """Number of tokens that each KV head reads in total; at least `LEAST_TOKENS`."""
    index: KeyIndex
    """Key index; its layers use selective attention."""
    compiled: bool = True
    """Whether to use compiled loops for selection and reading, where available."""

    @property
    def layers(self) -> frozenset[int]:
        return self.index.layers

    def recent_start(self, position: int) -> int:
        """Return the position of the first recent token for a query at `position`."""
        recent = max(LEAST_RECENT_TOKENS, self.tokens // RECENT_SHARE)
        return max(0, position + 1 - recent) // BLOCK_TOKENS * BLOCK_TOKENS

    def blocks(self, position: int) -> int:
        """Return the number of blocks to select for a query at `position`."""
        recent = position + 1 - self.recent_start(position)
        return (self.tokens - FIRST_TOKENS - recent) // BLOCK_TOKENS

    def applies(self, row: DecodeRow) -> bool:
        """Return whether a row uses selective attention in indexed layers.

        A row reads all tokens if it is marked `whole`, has at most `tokens`, or lacks index parts.
        """
        if row.whole or row.position < self.tokens:
            return False
        stop = self.recent_start(row.position)
        spans = [span for span in row.parts if span.start < stop]
        return bool(spans) and spans[-1].end >= stop and all(map(self._is_whole, spans))

    def score_blocks(
        self,
        rows: Sequence[DecodeRow],
        queries: Sequence[Scores],
        layer: int,
        ops: AttentionOps,
    ) -> list[Scores]:
        """Return each row's scores of the selectable blocks, (kv_heads, m, blocks).

        A block has the score of its best token; not finite if one of its keys is too large for the
        index.
        """
        parts = [list(self.indexed(row, layer)) for row in rows]
        count = _common(parts) if ops.independent_products else 0
        shared = parts[0][:count]
        transformed = [self.index.transform_query(query) for query in queries]
        together: list[Scores] = []
        if shared:
            stacked = self.index.best_by_block(
                np.concatenate(transformed, axis=1), shared, BLOCK_TOKENS, ops
            )
            together = np.split(stacked, len(rows), axis=1)
        scores = []
        for number, query in enumerate(transformed):
            sides, rest = together[number : number + 1], parts[number][count:]
            if rest:
                sides.append(self.index.best_by_block(query, rest, BLOCK_TOKENS, ops))
            row_scores = sides[0] if len(sides) == 1 else np.concatenate(sides, axis=-1)
            beside = self.center_scores(rows[number], queries[number], layer)
            scores.append(row_scores if beside is None else row_scores + beside)
        return scores

    def center_scores(
        self,
        row: DecodeRow,
        query: Scores,
        layer: int,
        heads: slice = slice(None),
        *,
        loop: CenterLoop | None = None,
    ) -> Scores | None:
        """Return the part of the scores that the index leaves out; see `KeyIndex`."""
        blocks = FIRST_BLOCKS, self.recent_start(row.position) // BLOCK_TOKENS
        return self.index.center_scores(layer, query[heads], heads, *blocks, loop=loop)

    def indexed(self, row: DecodeRow, layer: int) -> Iterator[tuple[Coded, int, int]]:
        """Yield the index of the selectable tokens and its columns, in order."""
        for segment, start, stop in pieces(
            row.parts, FIRST_TOKENS, self.recent_start(row.position)
        ):
            index = segment.index[layer]
            assert index is not None
            yield index, start, stop

    def _is_whole(self, span: KVSpan) -> bool:
        missing = span.segment.missing  # of layers with windows, whose KV was evicted
        gone = bool(missing) and any(missing[layer] for layer in self.index.layers)
        return not gone and self.index.complete(span.segment)


READ_ALL = Selection(ALL_TOKENS, KeyIndex(frozenset()))
"""Selection of all tokens, in all layers."""


@dataclass(frozen=True, slots=True)
class SelectedKV:
    """Blocks that one row reads in one layer."""

    first: list[ColumnRange]
    """Column ranges of the first tokens."""
    recent: list[ColumnRange]
    """Column ranges of the recent tokens before the tail."""
    keys: mx.array
    """Keys of the selected blocks, (kv_heads, tokens, dim)."""
    values: mx.array
    rest: Partial | None = None
    """Attention to the tokens that were not selected; None if those are ignored."""


def _common(rows: Sequence[Sequence[tuple[Coded, int, int]]]) -> int:
    """Return the number of leading pieces, in whole blocks, that all of several rows share.

    With signs, scores are sums of integers and do not depend on other stacked queries.
    """
    count, tokens, whole = 0, 0, 0
    for same in zip(*rows, strict=False) if len(rows) > 1 else ():
        index, start, stop = same[0]
        if any(other[0] is not index or other[1:] != (start, stop) for other in same):
            break
        count, tokens = count + 1, tokens + stop - start
        whole = count if tokens % BLOCK_TOKENS == 0 else whole
    return whole


def halves(count: int) -> list[slice]:
    """Split `count` heads into two slices; one slice for a single head."""
    cut = count // 2
    return [slice(0, cut), slice(cut, count)] if cut else [slice(0, count)]


def pieces(parts: Sequence[KVSpan], start: int, stop: int) -> list[ColumnRange]:
    """Return the columns of the positions `start..stop - 1`."""
    cuts = ((part, max(start, part.start), min(stop, part.end)) for part in parts)
    return [(p.segment, a - p.start, b - p.start) for p, a, b in cuts if a < b]


def best_blocks(
    selection: Selection,
    rows: Sequence[DecodeRow],
    queries: Sequence[Scores],
    layer: int,
    ops: AttentionOps,
) -> list[Numbers]:
    """Select the blocks that rows read in a layer; return sorted indices, (kv_heads, blocks).

    Args:
        rows: rows with selective attention.
        queries: queries of each row, (kv_heads, m, dim), scaled so that e^score is a weight.
    """
    best = []
    for row, scores in zip(rows, selection.score_blocks(rows, queries, layer, ops), strict=True):
        worth, count = _wanted(scores), selection.blocks(row.position)
        order = np.argpartition(-worth, count - 1, axis=-1)[:, :count]
        best.append(np.sort(order, axis=-1).astype(np.int64) + FIRST_BLOCKS)
    return best


def _wanted(scores: Scores) -> Scores:
    """Return the priority of each block, (kv_heads, blocks), from its scores."""
    best = np.where(np.isfinite(scores), scores, np.float32(CHOSEN))
    top = best.max(axis=-1, keepdims=True)
    total = np.log(np.exp(best - top).sum(axis=-1, keepdims=True))
    priority: Scores = (best - (top + total)).max(axis=1)
    return priority


def gather(
    selection: Selection, row: DecodeRow, blocks: Numbers, layer: int, ops: AttentionOps
) -> SelectedKV:
    """Gather the blocks that a row reads in one layer; not evaluated yet."""
    stop = selection.recent_start(row.position)
    first = pieces(row.parts, 0, FIRST_TOKENS)
    recent = pieces(row.parts, stop, row.position - row.tail)
    spans = [span for span in row.parts if span.start < stop]
    keys, values = (
        _gather([(span, span.segment.layers[layer][side]) for span in spans], blocks, ops)
        for side in (0, 1)
    )
    return SelectedKV(first, recent, keys, values)


def _gather(sides: Sequence[tuple[KVSpan, Side]], blocks: Numbers, ops: AttentionOps) -> mx.array:
    """Gather the blocks of each KV head, (kv_heads, tokens, dim).

    The granularity is the largest number of tokens that divides blocks and segment boundaries.
    """
    heads = blocks.shape[0]
    grain = gcd(BLOCK_TOKENS, *(span.start for span, _ in sides))
    per_block = BLOCK_TOKENS // grain
    grains = (blocks[..., None] * per_block + np.arange(per_block)).reshape(heads, -1)
    gathered, places = [], []
    for span, side in sides:
        inside = (grains >= span.start // grain) & (grains < span.end // grain)
        if inside.any():
            gathered.append(_rows(side, grains, inside, span.start, grain, ops))
            places.append(np.flatnonzero(inside))
    rows = gathered[0] if len(gathered) == 1 else _in_order(gathered, places)
    return rows.reshape(heads, grains.shape[1] * grain, -1)


def _in_order(gathered: Sequence[mx.array], places: Sequence[Numbers]) -> mx.array:
    order = np.argsort(np.concatenate(places), kind="stable")
    return mx.concatenate(list(gathered))[mx.array(order)]


def _rows(
    side: Side,
    grains: Numbers,
    inside: npt.NDArray[np.bool_],
    start: int,
    grain: int,
    ops: AttentionOps,
) -> mx.array:
    """Return the selected grains of one segment, head by head, (rows, grain * dim)."""
    if isinstance(side, Coded):
        return mx.concatenate(list(_dequantized(side, grains, inside, start, grain, ops)))
    assert isinstance(side, mx.array)
    _, heads, tokens, dim = side.shape
    per_head = tokens // grain
    numbers = grains - start // grain + np.arange(heads)[:, None] * per_head
    whole = side if tokens % grain == 0 else side[:, :, : per_head * grain]
    return whole.reshape(heads * per_head, grain * dim)[mx.array(numbers[inside])]


def _dequantized(
    side: Coded,
    grains: Numbers,
    inside: npt.NDArray[np.bool_],
    start: int,
    grain: int,
    ops: AttentionOps,
) -> Iterator[mx.array]:
    """Yield the selected grains of each head, dequantized."""
    span = side.codec.span
    for head in range(grains.shape[0]):
        selected = (grains[head, inside[head]] * grain - start)[:, None] + np.arange(grain)
        if not selected.size:
            continue
        runs, places = np.unique(selected // span, return_inverse=True)
        parts = tuple(part[:, head : head + 1][:, :, mx.array(runs)] for part in side.parts)
        codec = side.codec.of_heads(head, head + 1)
        numbers = Coded(codec, parts, side.dim).dequantize(ops).reshape(len(runs) * span, side.dim)
        columns = places.reshape(selected.shape) * span + selected % span
        yield numbers[mx.array(columns.reshape(-1))].reshape(selected.shape[0], -1)
