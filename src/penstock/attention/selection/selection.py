"""Choice of tokens that a decode step reads of a long sequence: first, recent, best blocks.

Each key head reads its own blocks. An index of the keys (`key_index`) scores every token between
the first and the recent ones. A block counts as its best token, after a softmax over the blocks,
for that query of the key head that wants it most. The blocks chosen are copied together and read
exactly, beside the first and the recent tokens, which are read where they lie.

The choice is a function of the tokens and the position alone. It does not depend on where segments
begin, on the cache, or on the other rows of a step.
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
"""First tokens, which are always read: many heads rest on them."""
LEAST_TOKENS = 128
"""Fewest tokens to read: the first, the recent ones, and a few blocks."""
LEAST_RECENT_TOKENS = 33
"""Fewest recent tokens, which are always read: the longest tail and the new token."""
RECENT_SHARE = 4
"""The recent tokens are this part of all that are read."""
Numbers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Selection:
    """How many tokens a decode step reads, and in which layers."""

    tokens: int
    """Tokens that each key head reads, all parts together; at least `LEAST_TOKENS`."""
    index: KeyIndex
    """Rule of the index; its layers are those that read a choice."""
    compiled: bool = True
    """Whether compiled loops choose and read where there are any."""

    @property
    def layers(self) -> frozenset[int]:
        """Numbers of the layers that read a choice."""
        return self.index.layers

    def recent_start(self, position: int) -> int:
        """Return the first of the recent tokens of a query at `position`."""
        recent = max(LEAST_RECENT_TOKENS, self.tokens // RECENT_SHARE)
        return max(0, position + 1 - recent) // BLOCK_TOKENS * BLOCK_TOKENS

    def blocks(self, position: int) -> int:
        """Return how many blocks are chosen for a query at `position`."""
        recent = position + 1 - self.recent_start(position)
        return (self.tokens - FIRST_TOKENS - recent) // BLOCK_TOKENS

    def applies(self, row: DecodeRow) -> bool:
        """Tell whether a row reads a choice of its tokens in layers with an index, not all of them.

        It reads all if it is to, if they are no more than `tokens`, or if some have no index.
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
        """Return each row's scores of the blocks to choose from, (kv_heads, m, blocks).

        A block has the score of its best token; it is not finite if a key of it is too large for
        the index.
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
            own = sides[0] if len(sides) == 1 else np.concatenate(sides, axis=-1)
            beside = self.center_scores(rows[number], queries[number], layer)
            scores.append(own if beside is None else own + beside)
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
        """Return what the index leaves out of the scores of some key heads; see `KeyIndex`."""
        blocks = FIRST_BLOCKS, self.recent_start(row.position) // BLOCK_TOKENS
        return self.index.center_scores(layer, query[heads], heads, *blocks, loop=loop)

    def indexed(self, row: DecodeRow, layer: int) -> Iterator[tuple[Coded, int, int]]:
        """Yield the index of the tokens to choose from, and its columns, in order."""
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
    """Pieces of the first tokens."""
    recent: list[ColumnRange]
    """Pieces of the recent tokens in front of the tail."""
    keys: mx.array
    """Keys of the blocks chosen, (kv_heads, tokens, dim)."""
    values: mx.array
    rest: Partial | None = None
    """Attention to what was not chosen, if that is read."""


def _common(rows: Sequence[Sequence[tuple[Coded, int, int]]]) -> int:
    """Return how many first pieces, whole blocks together, all of several rows have in common.

    With signs each query's scores are sums of its own integers, and do not depend on other queries.
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
    """Return slices that divide `count` heads in two halves; one slice for a single head."""
    cut = count // 2
    return [slice(0, cut), slice(cut, count)] if cut else [slice(0, count)]


def pieces(parts: Sequence[KVSpan], start: int, stop: int) -> list[ColumnRange]:
    """Return the columns of the positions start..stop-1."""
    cuts = ((part, max(start, part.start), min(stop, part.end)) for part in parts)
    return [(p.segment, a - p.start, b - p.start) for p, a, b in cuts if a < b]


def best_blocks(
    selection: Selection,
    rows: Sequence[DecodeRow],
    queries: Sequence[Scores],
    layer: int,
    ops: AttentionOps,
) -> list[Numbers]:
    """Choose blocks for rows to read in a layer: their numbers, in order, (kv_heads, blocks).

    Args:
        selection: how much is read.
        rows: those to which it applies.
        queries: of each row, (kv_heads, m, dim), scaled so that e^score is a weight.
        layer: number of the layer.
        ops: score the index.
    """
    best = []
    for row, scores in zip(rows, selection.score_blocks(rows, queries, layer, ops), strict=True):
        worth, count = _wanted(scores), selection.blocks(row.position)
        order = np.argpartition(-worth, count - 1, axis=-1)[:, :count]
        best.append(np.sort(order, axis=-1).astype(np.int64) + FIRST_BLOCKS)
    return best


def _wanted(scores: Scores) -> Scores:
    """Return how much each block is wanted, (kv_heads, blocks), by its scores."""
    best = np.where(np.isfinite(scores), scores, np.float32(CHOSEN))
    top = best.max(axis=-1, keepdims=True)
    total = np.log(np.exp(best - top).sum(axis=-1, keepdims=True))
    wanted: Scores = (best - (top + total)).max(axis=1)
    return wanted


def gather(
    selection: Selection, row: DecodeRow, blocks: Numbers, layer: int, ops: AttentionOps
) -> SelectedKV:
    """Gather the blocks that a row reads in one layer; they are not copied yet."""
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
    """Copy each key head's blocks together, (kv_heads, tokens, dim).

    Rows are as many tokens as divide the blocks, and the places at which segments begin.
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
    """Return the grains of one segment that are wanted, head by head, (rows, grain * dim)."""
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
    """Yield the wanted grains of each head, dequantized."""
    span = side.codec.span
    for head in range(grains.shape[0]):
        wanted = (grains[head, inside[head]] * grain - start)[:, None] + np.arange(grain)
        if not wanted.size:
            continue
        runs, at = np.unique(wanted // span, return_inverse=True)
        parts = tuple(part[:, head : head + 1][:, :, mx.array(runs)] for part in side.parts)
        codec = side.codec.of_heads(head, head + 1)
        wide = Coded(codec, parts, side.dim).dequantize(ops).reshape(len(runs) * span, side.dim)
        columns = at.reshape(wanted.shape) * span + wanted % span
        yield wide[mx.array(columns.reshape(-1))].reshape(wanted.shape[0], -1)
