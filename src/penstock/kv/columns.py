"""Operations along the token axis of a layer's KV: allocate, write, slice, join.

A *side* is the keys of a layer, or its values. It is one array (batch, kv_heads, columns,
head_dim), or the (codes, scales, biases) triple of `mx.quantize` with the same first three axes. In
segments it may also be encoded by a codec (`Coded`). These functions accept all three forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import mlx.core as mx

from penstock.kv.codecs.coded import Coded

Side: TypeAlias = "mx.array | tuple[mx.array, ...] | Coded"
TOKEN_AXIS = 2


def map_arrays(function: Callable[..., mx.array], *sides: Side) -> Side:
    """Apply `function` to the arrays of each side, component by component."""
    first = sides[0]
    if isinstance(first, mx.array):
        return function(*sides)
    if isinstance(first, Coded):
        runs = zip(*(arrays(side) for side in sides), strict=True)
        return Coded(first.codec, tuple(function(*parts) for parts in runs), first.dim)
    return tuple(function(*parts) for parts in zip(*sides, strict=True))


def arrays(*sides: Side | None) -> list[mx.array]:
    flat: list[mx.array] = []
    for side in sides:
        if isinstance(side, mx.array):
            flat.append(side)
        elif side is not None:
            flat.extend(side.parts if isinstance(side, Coded) else side)
    return flat


def columns(side: Side | None) -> int:
    if side is None:
        return 0
    if isinstance(side, Coded):
        return side.tokens
    return (side if isinstance(side, mx.array) else side[0]).shape[TOKEN_AXIS]


def nbytes(*sides: Side | None) -> int:
    return sum(part.nbytes for part in arrays(*sides))


def take(side: Side, start: int, stop: int) -> Side:
    """Return a view of columns `start..stop - 1`; it keeps the whole buffer alive."""
    if isinstance(side, mx.array):
        return side[:, :, start:stop]  # a third quicker than side[..., start:stop, :]
    if isinstance(side, Coded):
        return side.take(start, stop)
    return tuple(part[:, :, start:stop] for part in side)


def join(*sides: Side) -> Side:
    return map_arrays(lambda *parts: mx.concatenate(list(parts), axis=TOKEN_AXIS), *sides)


def copied(side: Side) -> Side:
    """Copy a side into buffers of exact size, which `mx.contiguous` does not guarantee."""
    # Given only one array, `concatenate` would return it without a copy.
    return map_arrays(lambda part: mx.concatenate([part, part[:, :, :0]], axis=TOKEN_AXIS), side)


def blank(like: Side, count: int, rows: int | None = None) -> Side:
    """Return `count` columns of zeros with the heads, widths and dtypes of `like`."""
    columns_each = like.codec.span if isinstance(like, Coded) else 1

    def zeros(part: mx.array) -> mx.array:
        batch, heads, _, *width = part.shape
        return mx.zeros((rows or batch, heads, count // columns_each, *width), part.dtype)

    return map_arrays(zeros, like)


def write(side: Side, column: int, new: Side, row: int | None = None, head: int = 0) -> Side:
    """Write `new` at `column`, `row` and `head`, in place if possible; return the new side."""
    if isinstance(side, Coded):
        column //= side.codec.span
    if not isinstance(side, mx.array):
        return map_arrays(lambda part, add: write(part, column, add, row, head), side, new)  # type: ignore[arg-type, return-value]
    assert isinstance(new, mx.array)
    stop = column + new.shape[TOKEN_AXIS]
    if column == 0 and new.shape == side.shape:
        # Assigning to a whole array would replace its buffer with `new`, which may be a view of
        # a larger one.
        return mx.slice_update(side, new, mx.array([0]), (TOKEN_AXIS,))
    heads = slice(head, head + new.shape[1])
    if row is None:
        side[:, heads, column:stop] = new
    else:
        side[row : row + new.shape[0], heads, column:stop] = new
    return side


def scatter(side: Side, slots: Sequence[int], new: Side) -> Side:
    """Write row i of `new`, one column, at column `slots[i]`, in place if possible."""
    rows, where = mx.arange(len(slots)), mx.array(list(slots))

    def put(part: mx.array, add: mx.array) -> mx.array:
        part[rows, :, where] = add[:, :, 0]
        return part

    return map_arrays(put, side, new)


def resized(side: Side, count: int, used: int) -> Side:
    """Copy the first `used` columns into a new buffer of `count` columns.

    Evaluated, so that the old buffer can be freed before the next layer is resized.
    """
    fresh = blank(side, count)
    if used:
        fresh = write(fresh, 0, take(side, 0, used))
    mx.eval(arrays(fresh))
    return fresh


def rows_of(side: Side, start: int, stop: int) -> Side:
    return map_arrays(lambda part: part[start:stop], side)


def picked(side: Side, rows: Sequence[int], start: int, stop: int) -> Side:
    """Copy columns `start..stop - 1` of the given rows, in that order; evaluated."""
    chosen = mx.array(list(rows))
    fresh = map_arrays(lambda part: part[chosen], take(side, start, stop))
    mx.eval(arrays(fresh))
    return fresh


def laid(parts: Sequence[tuple[int, int, Side]], rows: int, count: int) -> Side:
    """Copy parts, each (row, column, side), into a new buffer of rows x count; evaluated."""
    fresh = blank(parts[0][2], count, rows)
    for row, column, part in parts:
        fresh = write(fresh, column, part, row)
    mx.eval(arrays(fresh))
    return fresh


def spread(column: int, parts: Sequence[Side]) -> list[tuple[int, Side]]:
    """Pair consecutive parts with their start columns; the first starts at `column`."""
    placed = []
    for part in parts:
        placed.append((column, part))
        column += columns(part)
    return placed


def between(parts: Sequence[Side], start: int, stop: int) -> Side:
    """Return columns `start..stop - 1` of consecutive parts, as a view if they are in one."""
    ranges = [
        take(part, max(start - column, 0), min(stop - column, columns(part)))
        for column, part in spread(0, parts)
        if column < stop and start < column + columns(part)
    ]
    return ranges[0] if len(ranges) == 1 else join(*ranges)


def rolled(side: Side, shifts: Sequence[int]) -> Side:
    """Return a copy in which the columns of row i are rolled right by `shifts[i]`."""
    count = columns(side)
    source = (mx.arange(count)[None, :] - mx.array(list(shifts))[:, None]) % count

    def gather(part: mx.array) -> mx.array:
        return mx.take_along_axis(part, source[:, None, :, None], axis=TOKEN_AXIS)

    return map_arrays(gather, side)
