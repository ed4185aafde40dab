"""Checks of arguments: each returns the value it found right, or raises an error that names it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import mlx.core as mx


def whole(name: str, value: object, least: int) -> int:
    """Return `value` as an int of at least `least`; NumPy's integers count, bools do not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def positive(name: str, value: object) -> int:
    """Return `value` as an integer of at least 1."""
    return whole(name, value, 1)


def window(max_size: object, keep: object) -> tuple[int, int]:
    """Return the two sizes of a bounded window: 0 <= keep < max_size."""
    size, kept = positive("max_size", max_size), whole("keep", keep, 0)
    if kept >= size:
        raise ValueError(f"keep must lie in 0..{size - 1} for max_size {size}, not {kept}")
    return size, kept


def ints(values: Any) -> list[int]:
    """Return whole numbers, given as an array or a sequence, as a list."""
    listed: Any = values.tolist() if isinstance(values, mx.array) else values
    return list(listed)


def counts(name: str, values: Any) -> list[int]:
    """Return a list of integers of at least 0."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, not {values!r}")
    return [whole(f"{name}[{i}]", value, 0) for i, value in enumerate(ints(values))]


def chosen_rows(indices: Any, count: int) -> list[int]:
    """Return the rows to keep of `count`: at least one, each there."""
    rows = counts("batch_indices", indices)
    if not rows:
        raise ValueError("batch_indices is empty; drop the cache in place of its last row")
    if max(rows) >= count:
        raise ValueError(f"batch_indices has row {max(rows)}; the batch has {count}")
    return rows
