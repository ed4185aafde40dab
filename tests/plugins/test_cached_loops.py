"""Compiled loops over arrays, with their machine code in the user's cache folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="functions are compiled by Numba")

from penstock.plugins.cpu import compiled_cache
from penstock.plugins.cpu.cached_loops import CachedLoop


@pytest.fixture(autouse=True)
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of machine code, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "penstock" / "loops"
    compiled_cache._identity.cache_clear()


class Weighing:
    """Compiles `out[i, j] = factor * values[i, j] * weights[j]`, and counts the compilations."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        from numba import njit

        self.count += 1

        @njit(nogil=True)
        def weigh(values, weights, factor, out):  # type: ignore[no-untyped-def]
            for i in range(values.shape[0]):
                for j in range(values.shape[1]):
                    out[i, j] = factor * values[i, j] * weights[j]

        return weigh

    def loop(self) -> CachedLoop:
        return CachedLoop("weigh", "f2 i1 i f2", self)


def test_machine_code_is_shared_by_processes(loops: Path) -> None:
    weighing = Weighing()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    weights = np.array([1, 10, 100])
    for _ in range(2):  # a new one, as a new process makes
        out = np.zeros((2, 3), np.float32)
        loop = weighing.loop()
        assert not loop.is_compiled
        loop(values, weights, 2, out)
        assert loop.is_compiled
        assert np.array_equal(out, 2 * values * weights)
    assert weighing.count == 1
    assert len(list(loops.iterdir())) == 1


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 3), np.float64),
        np.zeros(6, np.float32),
        np.zeros((3, 2), np.float32).T,
    ],
)
def test_other_arrays_are_refused(values: Any) -> None:
    with pytest.raises(TypeError, match="float32, 2-d, contiguous: not"):
        Weighing().loop()(values, np.zeros(3, np.int64), 1, np.zeros((2, 3), np.float32))


def test_missing_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        Weighing().loop()(np.zeros((2, 3), np.float32))
