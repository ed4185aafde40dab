"""Attention of several rows' decode step on the CPU, by NumPy, where MLX's arrays lie.

Each row reads parts of its own, which are small. MLX takes some thirty operations a part and
layer for them, and their dispatch was more than half of a step of eight rows; NumPy takes ten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kv.attention import MASKED
from penstock.kv.sign_products import Floats

Booleans: TypeAlias = npt.NDArray[np.bool_]
Piece: TypeAlias = tuple[Floats, Floats]
"""Keys and values of consecutive columns, (..., n, dim) each."""

_QUIET = np.errstate(all="ignore")  # what a model makes of numbers that are not finite is its own
DIVIDED_FROM = 2**16
"""Scores of a part from which a second thread takes half of its columns."""


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Columns that neighboring rows read under one softmax."""

    rows: slice
    """Rows of the stacked queries (kv_heads, m, d)."""
    pieces: Sequence[Piece]
    """(kv_heads, n_i, dim) each."""
    seen: Booleans | None
    """Visible columns, broadcastable to (kv_heads, rows, sum n_i); None sees everything."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Attention over some of the columns, unnormalized: `attention.Partial` in NumPy's arrays."""

    top: Floats
    total: Floats
    mixed: Floats

    @_QUIET
    def add(self, rows: slice, other: Sums) -> None:
        """Add the sums of these rows, (kv_heads, m, ...), over other columns."""
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
        """Return the normalized attention; sinks as `attention.merged` takes them."""
        if sinks is None:
            return self.mixed / self.total
        top = np.maximum(self.top, sinks)
        share = np.exp2(self.top - top)
        return self.mixed * share / (self.total * share + np.exp2(sinks - top))


_Task: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]"


class SecondThread:
    """A thread that computes beside its owner, until the owner lets it go.

    A daemon, unlike those of `concurrent.futures`: Python does not wait for it at its end.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        name = "penstock-attention"
        threading.Thread(target=_compute, args=(self._tasks,), name=name, daemon=True).start()

    def __del__(self) -> None:
        self._tasks.put(None)

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Let the thread call a function; nothing of the call is held behind its result."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, args))
        return future


def _compute(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, args = task
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  the owner raises it
            future.set_exception(error)
        del task, future, function, args


@_QUIET
def sums(queries: Floats, pieces: Sequence[Piece], seen: Booleans | None) -> Sums:
    """Let queries (..., m, d), in base 2, read pieces under one softmax."""
    columns = sum(keys.shape[-2] for keys, _ in pieces)
    scores = np.empty((*queries.shape[:-1], columns), np.float32)
    start = 0
    for keys, _ in pieces:
        stop = start + keys.shape[-2]
        np.matmul(queries, keys.swapaxes(-1, -2), out=scores[..., start:stop])
        start = stop
    if seen is not None:
        np.copyto(scores, MASKED, where=~seen)
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    np.exp2(scores, out=scores)
    mixed, start = None, 0
    for _, values in pieces:
        stop = start + values.shape[-2]
        product = scores[..., start:stop] @ values
        mixed = product if mixed is None else np.add(mixed, product, out=mixed)
        start = stop
    assert mixed is not None
    return Sums(top, scores.sum(axis=-1, keepdims=True), mixed)


def add_parts(
    into: Sums, queries: Floats, parts: Sequence[RowsPart], other: SecondThread | None
) -> None:
    """Add what the rows of stacked queries read of the parts to sums over their tails.

    Args:
        into: (kv_heads, m, ...), written to.
        queries: (kv_heads, m, d), in base 2.
        parts: of the rows.
        other: a second thread, for half of each large part.
    """
    divided = []
    mine = []
    for part in parts:
        heads, rows = queries.shape[0], part.rows.stop - part.rows.start
        columns = sum(keys.shape[-2] for keys, _ in part.pieces)
        if other is None or min(columns - 1, 1) * heads * rows * columns < DIVIDED_FROM:
            mine.append(part)
            continue
        first, second = _halves(part, columns // 2)
        mine.append(first)
        task = other.submit(sums, queries[:, part.rows], second.pieces, second.seen)
        divided.append((part.rows, task))
    for part in mine:
        into.add(part.rows, sums(queries[:, part.rows], part.pieces, part.seen))
    for rows, task in divided:
        into.add(rows, task.result())


def _halves(part: RowsPart, half: int) -> tuple[RowsPart, RowsPart]:
    """Return the first `half` columns of a part, and the others."""
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    start = 0
    for keys, values in part.pieces:
        cut = min(max(0, half - start), keys.shape[-2])
        start += keys.shape[-2]
        for side, columns in zip(pieces, (slice(0, cut), slice(cut, None)), strict=True):
            if keys[..., columns, :].shape[-2]:
                side.append((keys[..., columns, :], values[..., columns, :]))
    seen = (None, None) if part.seen is None else (part.seen[..., :half], part.seen[..., half:])
    return RowsPart(part.rows, pieces[0], seen[0]), RowsPart(part.rows, pieces[1], seen[1])
