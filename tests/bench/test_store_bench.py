"""The bench of storing and fetching prompt caches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from penstock_bench import prefix_store as store
from penstock_bench.report import publish
from penstock_bench.vllm_mlx import is_installed

SMALL = store.StoreLoad(layers=4, heads=2, tokens=1_024, rounds=2)


@pytest.fixture(scope="module")
def found() -> Any:
    return store.measure(SMALL)


def test_nbytes_match_codec(found: Any) -> None:
    numbers = 2 * 4 * 2 * 1_024 * 64
    assert found.penstock["stored_bytes"] == numbers * 8.5 / 8
    assert found.penstock["store_peak_bytes"] >= found.penstock["stored_bytes"]
    assert found.penstock["fetch_peak_bytes"] >= 2 * numbers
    assert found.penstock["store_ms"] > 0 < found.penstock["fetch_ms"]


def test_missing_rival_is_reported(
    found: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    publish(found, as_json=False, save=tmp_path)
    printed = capsys.readouterr().out
    assert is_installed() == (found.ratio["store_speed"] is not None)
    assert is_installed() == ("not installed" not in printed)
    publish(found, as_json=True, save=None)
    assert json.loads(capsys.readouterr().out)["ratio"] == found.ratio


def test_check_detects_lost_entries() -> None:
    class Forgets(store.StoreOurs):
        def store(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
            return super().store(tokens[: len(tokens) // 2], caches)

    with pytest.raises(AssertionError, match="not found"):
        store.run_side(lambda: Forgets(SMALL), SMALL.tokens, store._caches(SMALL))


def test_temporary_copy_raises_measured_peak(found: Any) -> None:
    class Copies(store.StoreOurs):
        def store(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
            copies = [part + 0 for cache in caches for part in cache.state]
            mx.eval(copies)
            return super().store(tokens, caches)

    run = store.run_side(lambda: Copies(SMALL), SMALL.tokens, store._caches(SMALL))
    assert run.store_peak_bytes > found.penstock["store_peak_bytes"] + SMALL.raw_bytes // 2
