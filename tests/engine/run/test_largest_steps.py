"""Settings with oversized steps are refused before memory is allocated."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from penstock.cli.engines import make_engine
from penstock.engine.fixed_memory import SizedTrial
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.errors import SettingError
from penstock.ledger import Kind, Ledger
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

LIMIT = 200_000_000
LARGE = [
    {"max_batch_size": 4_096},
    {"max_batch_size": 100_000},
    {"max_batch_size": 1_000_000_000},
    {"prefill_chunk": 20_000},
    {"prefill_chunk": 1_000_000},
    {"prefill_chunk": 1_000_000_000},
    {"block_size": 1_000_000},
]


def taken(make: Any) -> int:
    """Return the peak of MLX's memory while a call ran or was refused."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    make()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("power", [1, 2])
def test_step_bytes_extrapolate_from_smaller_steps(power: int) -> None:
    """Linear and quadratic, as the scores of a chunk are."""

    def run(size: int) -> None:
        mx.eval(mx.zeros((size**power, 16_384)))

    trial = SizedTrial(
        run, 4 * 16_384, partial(Ledger(LIMIT).reserve, Kind.BUFFERS), ProcessGroup()
    )
    needed = trial.needed(4, 16, LIMIT)
    assert needed == pytest.approx(4 * 16_384 * 16**power, rel=0.1)


@pytest.mark.parametrize("settings", LARGE, ids=str)
def test_oversized_steps_are_refused_before_allocation(settings: dict[str, int]) -> None:
    loaded = load_all(str(MODEL_PATH))
    name = next(iter(settings))

    def refused() -> None:
        with pytest.raises(SettingError) as told:
            make_engine(loaded, memory_limit=LIMIT, **settings)
        flag = f"--{name.replace('_', '-')}"
        assert re.search(rf"{flag}\) of [\d,]+ needs about [\d.,]+ .B", str(told.value))
        assert "limit of 200.0 MB leaves" in str(told.value) and f"Lower {flag}" in str(told.value)

    began = time.process_time()
    assert taken(refused) < LIMIT // 2
    assert time.process_time() - began < 20.0, "it took 60 silent seconds"


def test_fitting_settings_are_accepted() -> None:
    """Large batches or long chunks of a small model fit."""
    loaded = load_all(str(MODEL_PATH))
    for settings in ({"max_batch_size": 64}, {"max_batch_size": 1_024}, {"prefill_chunk": 2_048}):
        with make_engine(loaded, memory_limit=LIMIT, **settings) as engine:
            assert engine.stats().used_bytes < LIMIT
