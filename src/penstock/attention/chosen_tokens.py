"""Tokens that rows of a decode step read in a layer, chosen by an index of the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import mlx.core as mx
import numpy as np

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow, plan_attention
from penstock.attention.joined_reads import read_sides
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.codecs.coded import Coded
from penstock.kv.segment import ColumnRange

LAZY_PARTS = 4
"""Maximum number of parts that chosen tokens are copied from without evaluating the choice: each
part then gives as many rows as there are chosen tokens."""

SCORED_AT_ONCE = 4_096
"""Approximate number of tokens whose index keys are scored at a time; some indexes pool them."""


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Index keys of whole blocks of consecutive tokens that a new token sees."""

    keys: mx.array
    """Shape (1, n, dim)."""
    values: mx.array
    """Numbers that an index keeps beside its keys, (1, n, value_dim)."""
    start: int
    """Column of the first token, among all that the new token sees."""
    count: int
    """Number of all tokens that the new token sees, with itself."""


class OwnIndex(Protocol):
    """Index of a model's own for one decode step, by which a layer chooses tokens to read."""

    @property
    def block(self) -> int:
        """Number of consecutive tokens that are chosen together."""

    @property
    def negates(self) -> bool:
        """Whether the model partitions negated scores, and so picks others of equal ones."""

    def budget(self, count: int) -> int:
        """Return how many of `count` tokens a new token reads, if there are more.

        The tokens behind the last whole block are always read, and counted.
        """

    def scores(self, row: int, token: int, part: IndexPart) -> mx.array:
        """Return the scores of consecutive blocks for a new token: (blocks,), or one row a KV head.

        Args:
            row: index of the row in the step.
            token: index of the new token in the row.
            part: index keys of the blocks.
        """


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Tokens that a row reads in a layer."""

    columns: mx.array
    """Their columns, ascending, among all that the row sees: its spans', then its tail's. Shape
    (k,), or (kv_heads, k)."""
    seen: mx.array | None
    """Mask of the visible ones, (..., 1, k) bool; None if all are."""


def choose_tokens(
    step: DecodeStep, layer: int, window: AttentionWindow, index: OwnIndex
) -> dict[int, ChosenTokens]:
    """Choose by the index keys of a layer, which are already in the tails; nothing is evaluated.

    Returns what new tokens read, by index in `DecodeStep.new_tokens`. A token that sees no more
    than the budget has no entry, and reads all.
    """
    chosen = {}
    for number, row in enumerate(step.new_tokens):
        pieces = visible_pieces(row, window)
        count = sum(stop - start for _, start, stop in pieces) + row.tail + 1
        budget = index.budget(count)
        if budget >= count:
            continue
        sides = zip(*read_with_tail(step, layer, row, pieces), strict=True)
        results, start = list[mx.array](), 0
        for keys, values in whole_blocks(sides, index.block):
            if results:  # what the last one computed is then freed
                keys, values = mx.depends([keys, values], results[-1:])
            part = IndexPart(keys, values, start, count)
            results.append(index.scores(*divmod(number, step.width), part))
            start += keys.shape[1]
        scores = mx.concatenate(results, axis=-1)
        seen = seen_columns(row, count, window)
        if seen is not None:
            whole = mx.unflatten(seen[: count - count % index.block], 0, (-1, index.block))
            scores = mx.where(whole.any(axis=-1), scores, -mx.inf)
        best = _best(scores, budget // index.block, negated=index.negates)
        columns = _columns(best, index.block, count)
        visible = None if seen is None else seen[columns][..., None, :]
        chosen[number] = ChosenTokens(columns, visible)
    return chosen


def whole_blocks(
    parts: Iterator[tuple[mx.array, mx.array]], block: int
) -> Iterator[tuple[mx.array, mx.array]]:
    """Divide parts (1, n_i, dim) anew, at whole blocks; less than a block at the end is left out.

    Only blocks across two parts are copied.
    """
    size = -(-SCORED_AT_ONCE // block) * block
    left: tuple[mx.array, ...] = ()
    for sides in parts:
        held = left[0].shape[1] if left else 0
        tokens, first = sides[0].shape[1], 0
        if held:
            first = min(tokens, block - held)
            joined = [
                mx.concatenate([old, side[:, :first]], axis=1)
                for old, side in zip(left, sides, strict=True)
            ]
            if held + first < block:
                left = tuple(joined)
                continue
            yield joined[0], joined[1]
        last = tokens - (tokens - first) % block
        for start in range(first, last, size):
            stop = min(last, start + size)
            yield sides[0][:, start:stop], sides[1][:, start:stop]
        left = tuple(side[:, last:] for side in sides) if last < tokens else ()


def _best(scores: mx.array, blocks: int, *, negated: bool) -> mx.array:
    """Return the indices of the highest scores, ascending."""
    if not blocks:
        best = mx.zeros((*scores.shape[:-1], 0), mx.uint32)
    elif negated:
        best = mx.argpartition(-scores, kth=blocks - 1, axis=-1)[..., :blocks]
    else:
        best = mx.argpartition(scores, kth=-blocks, axis=-1)[..., -blocks:]
    return mx.sort(best, axis=-1)


def _columns(best: mx.array, block: int, count: int) -> mx.array:
    """Return the columns of blocks, and of the tokens behind the last whole block."""
    if block == 1:
        return best
    columns = (best[..., None] * block + mx.arange(block, dtype=mx.uint32)).flatten(-2)
    rest = mx.arange(count - count % block, count, dtype=mx.uint32)
    return mx.concatenate([columns, mx.broadcast_to(rest, (*best.shape[:-1], len(rest)))], axis=-1)


def seen_columns(row: DecodeRow, count: int, window: AttentionWindow) -> mx.array | None:
    """Return which of the columns a row sees, (count,) bool; None if it sees all."""
    begins = row.position - row.tail
    if window.starts_at(row.position) <= max(begins, window.keep):
        return None
    own = mx.arange(begins, row.position + 1)
    seen = window.mask(mx.array([row.position]), own)[0]
    return mx.concatenate([mx.ones(count - row.tail - 1, mx.bool_), seen])


def visible_pieces(row: DecodeRow, window: AttentionWindow) -> list[ColumnRange]:
    """Return the columns of a row's spans that its new token sees, in order."""
    levels = plan_attention([row], window).levels
    return [piece for level in levels for shared in level for piece in shared.pieces]


def read_with_tail(
    step: DecodeStep, layer: int, row: DecodeRow, pieces: Sequence[ColumnRange]
) -> tuple[list[mx.array], list[mx.array]]:
    """Return the keys and values of column ranges and a row's tail, (kv_heads, columns, dim)."""
    keys, values = read_arrays(step, layer, pieces)
    tail = step.tails.read_block(layer, row.slot, 1, row.tail + 1)
    return [*keys, tail[0].squeeze(0)], [*values, tail[1].squeeze(0)]


def read_arrays(
    step: DecodeStep, layer: int, pieces: Sequence[ColumnRange]
) -> tuple[list[mx.array], list[mx.array]]:
    """Return the keys and values of column ranges as arrays, (kv_heads, columns, dim) each."""
    dtype = step.tails.shapes[layer].dtype
    keys, values = (
        [
            side.dequantize(step.device).squeeze(0).astype(dtype)
            if isinstance(side, Coded)
            else side.astype(dtype)
            for side in sides
        ]
        for sides in read_sides(pieces, layer, step.device)
    )
    return keys, values


def gathered(parts: Sequence[mx.array], columns: mx.array) -> mx.array:
    """Copy ascending columns of consecutive parts, (kv_heads, n_i, dim) each: (kv_heads, k, dim).

    Args:
        parts: keys or values.
        columns: see `ChosenTokens.columns`.
    """
    if not parts[0].shape[-1]:
        return mx.zeros((parts[0].shape[0], columns.shape[-1], 0), parts[0].dtype)
    if columns.ndim > 1:
        heads = zip(*(mx.split(part, len(part)) for part in parts), columns, strict=False)
        return mx.concatenate([gathered(head[:-1], head[-1]) for head in heads])
    starts = [0, *np.cumsum([part.shape[1] for part in parts]).tolist()]
    if len(parts) > LAZY_PARTS:
        numbers = np.asarray(columns).astype(np.int64)
        cuts = np.searchsorted(numbers, starts)
        taken = [
            mx.take(part, mx.array(numbers[first:last] - start), axis=1)
            for part, start, (first, last) in zip(parts, starts, pairwise(cuts), strict=False)
            if first < last
        ]
        return taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=1)
    result: mx.array | None = None
    for part, start in zip(parts, starts, strict=False):
        places = columns.astype(mx.int32) - start
        rows = mx.take(part, mx.clip(places, 0, part.shape[1] - 1), axis=1)
        if result is not None:
            rows = mx.where((places >= 0)[None, :, None], rows, result)
        result = rows
    assert result is not None
    return result
