"""Decode attention of several rows on the CPU, with NumPy views of MLX arrays.

The parts that rows do not share are small. MLX needs about thirty operations per part and layer,
whose dispatch took more than half of a step with eight rows; NumPy needs ten.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from penstock.attention.span_attention import MASKED
from penstock.blas import multiplies_unpacked
from penstock.kv.numpy_arrays import Booleans, Floats
from penstock.plugins.cpu.cpu_softmax import exp2_in_place

ColumnArrays: TypeAlias = tuple[Floats, Floats]
"""Keys and values of consecutive columns, (..., n, dim) each."""

_QUIET = np.errstate(all="ignore")  # a model may produce infinities and NaN
FEW_QUERIES, MANY_KEYS = 32, 64
"""Maximum number of queries, and minimum number of keys, for which queries as the right factor are
up to 6 times faster in NumPy; 64 queries take twice as long."""
UNPACKED_PRODUCTS = 10**6
"""Maximum number of multiplications for which OpenBLAS avoids copies, if it has such kernels."""
DIVIDED_FROM = 2**15
"""Minimum number of scores for which a helper thread computes half of them."""


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Columns that adjacent rows read under one softmax."""

    rows: slice
    """Slice of axis m of the stacked queries (kv_heads, m, d)."""
    pieces: Sequence[ColumnArrays]
    """Keys and values of the pieces, (kv_heads, n_i, dim) each."""
    seen: Booleans | None
    """Mask that broadcasts to (kv_heads, rows, sum n_i); None if all columns are visible."""

    @property
    def columns(self) -> int:
        """Number of columns."""
        return sum(keys.shape[-2] for keys, _ in self.pieces)

    @property
    def scores(self) -> int:
        """Number of scores per KV head."""
        return int(self.rows.stop - self.rows.start) * self.columns


@dataclass(frozen=True, slots=True)
class Sums:
    """Unnormalized attention over some columns: `span_attention.Partial` with NumPy arrays."""

    top: Floats
    total: Floats
    mixed: Floats

    @_QUIET
    def add(self, rows: slice, other: Sums) -> None:
        """Add sums of some rows over other columns, in place."""
        top, total, mixed = self.top[:, rows], self.total[:, rows], self.mixed[:, rows]
        both = np.maximum(top, other.top)
        share, more = np.exp2(top - both), np.exp2(other.top - both)
        top[...] = both
        total *= share
        total += more * other.total
        mixed *= share
        mixed += more * other.mixed

    @_QUIET
    def result(self, sinks: Floats | None) -> Floats:
        """Return the normalized attention; sinks are as for `span_attention.merged`."""
        if sinks is None:
            return self.mixed / self.total
        top = np.maximum(self.top, sinks)
        share = np.exp2(self.top - top)
        return self.mixed * share / (self.total * share + np.exp2(sinks - top))


_Task: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]"


def cores() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SecondThread:
    """Daemon thread that computes tasks, until the object is deleted.

    Python does not wait for it on exit, unlike threads of `concurrent.futures`.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        name = "penstock-attention"
        threading.Thread(target=_compute, args=(self._tasks,), name=name, daemon=True).start()

    def __del__(self) -> None:
        self._tasks.put(None)

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call a function in the thread, which keeps no reference to the arguments afterwards."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, args))
        return future


def _compute(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, args = task
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  `Future.result` raises it
            future.set_exception(error)
        del task, future, function, args


@_QUIET
def sums(queries: Floats, pieces: Sequence[ColumnArrays], seen: Booleans | None) -> Sums:
    """Attend with queries (..., m, d), in base 2, to all columns of pieces."""
    columns = sum(keys.shape[-2] for keys, _ in pieces)
    scores = np.empty((*queries.shape[:-1], columns), np.float32)
    start = 0
    for keys, _ in pieces:
        stop = start + keys.shape[-2]
        _score(queries, keys, scores[..., start:stop])
        start = stop
    if seen is not None:
        np.copyto(scores, MASKED, where=~seen)
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    exp2_in_place(scores)
    mixed, start = None, 0
    for _, values in pieces:
        stop = start + values.shape[-2]
        product = scores[..., start:stop] @ values
        mixed = product if mixed is None else np.add(mixed, product, out=mixed)
        start = stop
    assert mixed is not None
    return Sums(top, scores.sum(axis=-1, keepdims=True), mixed)


def _score(queries: Floats, keys: Floats, scores: Floats) -> None:
    """Write the products (..., m, n) of queries and keys, with few queries as the right factor.

    With AVX-512, OpenBLAS does not copy factors if the right one is small and contiguous: four
    queries and 2,016 keys take a quarter of the time. Other kernels do not benefit.
    """
    (m, d), n = queries.shape[-2:], keys.shape[-2]
    if m == 1 or m > FEW_QUERIES or n < MANY_KEYS or not multiplies_unpacked():
        np.matmul(queries, keys.swapaxes(-1, -2), out=scores)
        return
    turned = np.ascontiguousarray(queries.swapaxes(-1, -2))
    step = max(MANY_KEYS, UNPACKED_PRODUCTS // (m * d))
    for start in range(0, n, step):
        product = keys[..., start : start + step, :] @ turned
        scores[..., start : start + step] = product.swapaxes(-1, -2)


def add_parts(
    into: Sums, queries: Floats, parts: Sequence[RowsPart], other: SecondThread | None
) -> None:
    """Add the attention of rows to parts to their sums so far.

    Args:
        into: sums, (kv_heads, m, ...), modified in place.
        queries: (kv_heads, m, d), in base 2.
        parts: parts of the rows.
        other: helper thread, which computes half if there are at least `DIVIDED_FROM` scores.
    """
    mine, theirs = (list(parts), []) if other is None else _divided(parts, queries.shape[0])
    task = other.submit(_sums_of_all, queries, theirs) if other is not None and theirs else None
    for part in mine:
        into.add(part.rows, sums(queries[:, part.rows], part.pieces, part.seen))
    if task is not None:
        for part, summed in zip(theirs, task.result(), strict=True):
            into.add(part.rows, summed)


def _sums_of_all(queries: Floats, parts: Sequence[RowsPart]) -> list[Sums]:
    return [sums(queries[:, part.rows], part.pieces, part.seen) for part in parts]


def _divided(parts: Sequence[RowsPart], kv_heads: int) -> tuple[list[RowsPart], list[RowsPart]]:
    """Split parts into two lists of about equal work; the second is empty if there is little."""
    scores = [kv_heads * part.scores for part in parts]
    if sum(scores) < DIVIDED_FROM:
        return list(parts), []
    half, done = sum(scores) / 2, 0
    lists: tuple[list[RowsPart], list[RowsPart]] = ([], [])
    for part, count in zip(parts, scores, strict=True):
        columns = part.columns
        # The part that contains the middle of all work is cut there, unless a rest is too small.
        cut = min(columns, max(0, round((half - done) / count * columns)))
        if 0 < cut < columns and min(cut, columns - cut) * count < DIVIDED_FROM // 4 * columns:
            cut = 0 if 2 * cut < columns else columns
        done += count
        for one, piece in zip(lists, _cut(part, cut), strict=True):
            if piece is not None:
                one.append(piece)
    return lists


def _cut(part: RowsPart, at: int) -> tuple[RowsPart | None, RowsPart | None]:
    """Return the first `at` columns of a part and the remaining ones; None if empty."""
    if at in (0, part.columns):
        return (None, part) if at == 0 else (part, None)
    pieces: tuple[list[ColumnArrays], list[ColumnArrays]] = ([], [])
    start = 0
    for keys, values in part.pieces:
        cut = min(max(0, at - start), keys.shape[-2])
        start += keys.shape[-2]
        for side, columns in zip(pieces, (slice(0, cut), slice(cut, None)), strict=True):
            if keys[..., columns, :].shape[-2]:
                side.append((keys[..., columns, :], values[..., columns, :]))
    seen = (None, None) if part.seen is None else (part.seen[..., :at], part.seen[..., at:])
    return RowsPart(part.rows, pieces[0], seen[0]), RowsPart(part.rows, pieces[1], seen[1])
