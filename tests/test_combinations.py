"""Reduced parameter products cover all values, and all pairs with `pairs`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from combinations import each, pairs

AXES: list[list[Sequence[Any]]] = [
    ["ab", range(3)],
    ["ab", range(3), [None, 5]],
    ["abcde", [0, 4], [10, 100], [5, 32, 50, 2_048]],
    ["abcde"],
    [[{}, []], "ab", "xy"],
]
axes = pytest.mark.parametrize("axes", AXES, ids=[str([len(a) for a in axes]) for axes in AXES])


def missing(rows: list[tuple[Any, ...]], axes: list[Sequence[Any]], together: int) -> list[Any]:
    """Return the combinations of so many axes that the rows lack."""
    return [
        (at, wanted)
        for at in itertools.combinations(range(len(axes)), together)
        for wanted in itertools.product(*(axes[axis] for axis in at))
        if not any([row[axis] for axis in at] == list(wanted) for row in rows)
    ]


@axes
def test_pairs_cover_any_two_values(axes: list[Sequence[Any]]) -> None:
    rows = pairs(*axes, whole=False)
    assert missing(rows, axes, min(2, len(axes))) == []
    # One row less, and something is missing: none is there for nothing.
    for at in range(len(rows)):
        assert missing(rows[:at] + rows[at + 1 :], axes, min(2, len(axes))) != []


@axes
def test_singles_cover_every_value(axes: list[Sequence[Any]]) -> None:
    rows = each(*axes, whole=False)
    assert missing(rows, axes, 1) == []
    assert len(rows) == max(map(len, axes))


@axes
@pytest.mark.parametrize("choose", [pairs, each])
def test_whole_option_gives_cartesian_product(
    choose: Callable[..., Any], axes: list[Sequence[Any]]
) -> None:
    assert choose(*axes, whole=True) == list(itertools.product(*axes))


def test_pairs_are_far_fewer_than_product() -> None:
    assert len(pairs(*AXES[2], whole=False)) == 20  # of 80; five times four must be there
