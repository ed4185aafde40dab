"""Combinations of parameters: few by default, and all of them in `make soak`.

A fault that only a combination of three values shows is rare; one that a value or a pair of values
shows is what most tests are for.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

SOAK = "PENSTOCK_WHOLE_MATRIX" in os.environ
"""Whether every combination is wanted."""


def pairs(*axes: Sequence[Any], whole: bool = SOAK) -> list[tuple[Any, ...]]:
    """Return combinations, one value of each axis, in which each two values of two axes meet.

    Greedy: the one that has most pairs that are still missing is next, and of several the first.

    Args:
        axes: the values of each parameter.
        whole: all combinations instead.
    """
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = places if whole else []
    missing = {pair for row in places for pair in _pairs_of(row)}
    while not whole and missing:
        best = max(places, key=lambda row: len(missing & _pairs_of(row)))
        missing -= _pairs_of(best)
        chosen.append(best)
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in chosen]


def _pairs_of(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Return the pairs of (axis, value) in a combination; of one axis, its value alone."""
    return set(itertools.combinations(enumerate(row), min(2, len(row))))


def each(*axes: Sequence[Any], whole: bool = SOAK) -> list[tuple[Any, ...]]:
    """Return as many combinations as the longest axis has values: each value is in one at least.

    For what is dear, and whose parameters have little to do with each other.

    Args:
        axes: the values of each parameter.
        whole: all combinations instead.
    """
    if whole:
        return list(itertools.product(*axes))
    count = max(map(len, axes))
    return [tuple(axis[at % len(axis)] for axis in axes) for at in range(count)]
