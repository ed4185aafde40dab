"""Argument validation: return the valid value, or raise an error that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from penstock.errors import SettingError, WrongType


def whole(name: str, value: object, least: int) -> int:
    """Return `value` as an int of at least `least`; errors name the argument `name`.

    Raises:
        WrongType: it is not an integer.
        SettingError: it is less than `least`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise WrongType(f"{name} must be an integer, not {value!r}") from None
    if number < least:
        raise SettingError(f"{name} must be at least {least}, not {number}")
    return number


def loaded_model(where: str, model: object) -> None:
    """Raise SettingError if `model` is None, a name or path, or the tuple that `load` returns."""
    if isinstance(model, str | Path):
        remedy = f"model, tokenizer = penstock.load({str(model)!r})"
    elif isinstance(model, tuple):
        remedy = "model, tokenizer = penstock.load(...) takes apart what it returns"
    elif model is None:
        remedy = "model, tokenizer = penstock.load(...)"
    else:
        return
    raise SettingError(
        f"{where} takes a loaded model, not a {type(model).__name__}; load it: {remedy}"
    )


def positive(name: str, value: object) -> int:
    return whole(name, value, 1)


def one_of(name: str, value: object, known: tuple[int, ...]) -> int:
    if not isinstance(value, int) or value not in known:
        raise SettingError(f"{name} must be one of {known}, not {value!r}")
    return value


def window(max_size: object, keep: object) -> tuple[int, int]:
    """Return the window size and the number of kept tokens, validated: 0 <= keep < max_size."""
    size, kept = positive("max_size", max_size), whole("keep", keep, 0)
    if kept >= size:
        raise SettingError(f"keep must lie in 0..{size - 1} for max_size {size}, not {kept}")
    return size, kept


def ints(values: Any) -> list[int]:
    """Convert an array or sequence of integers to a list."""
    listed: Any = values.tolist() if isinstance(values, mx.array) else values
    return list(listed)


def counts(name: str, values: Any) -> list[int]:
    if not isinstance(values, Iterable):
        raise WrongType(f"{name} must be a sequence of integers, not {values!r}")
    return [whole(f"{name}[{i}]", value, 0) for i, value in enumerate(ints(values))]


def chosen_rows(indices: Any, count: int) -> list[int]:
    """Return `batch_indices`, the indices of the batch rows to keep, as a validated list.

    Raises:
        WrongType: `indices` is not a sequence of integers.
        SettingError: it is empty, or an index is negative or not below `count`.
    """
    rows = counts("batch_indices", indices)
    if not rows:
        raise SettingError("batch_indices is empty; delete the cache instead of its last row")
    if max(rows) >= count:
        raise SettingError(f"batch_indices has row {max(rows)}; the batch has {count}")
    return rows
