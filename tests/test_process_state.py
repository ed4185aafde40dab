"""Process state is restored after each test file."""

from __future__ import annotations

import logging
import os
import random
import signal
from pathlib import Path

import mlx.core as mx
import numpy as np
from process_state import SIGNALS, STATES, own_state

from penstock.cli import main


def drawn() -> list[float]:
    """Draw a number from each global random generator."""
    return [random.random(), float(np.random.random()), float(mx.random.uniform())]


def change_process_state(folder: Path) -> None:
    os.environ["PENSTOCK_OFFLINE"] = "1"
    os.environ.pop("PATH")
    os.chdir(folder)
    mx.set_cache_limit(12_345)
    mx.set_memory_limit(12_345)
    mx.set_default_device(mx.Device(mx.cpu, 0))
    logging.getLogger("uvicorn.error").addFilter(lambda record: False)
    logging.getLogger("never named before").addFilter(lambda record: False)
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)


def read() -> list[object]:
    states = [of() for of, _ in STATES]
    states[-2] = {name: filters for name, filters in states[-2].items() if filters}
    return states


def test_process_state_is_restored_after_file(tmp_path: Path) -> None:
    with own_state():
        before = read()
        with own_state():
            change_process_state(tmp_path)
            changed = read()
        assert read() == before
    same = [now == then for now, then in zip(changed, before, strict=True)]
    on_cpu = mx.default_device() == mx.cpu
    assert same == [False, False, False, False, on_cpu, False, False], "nothing was changed"


def test_each_file_draws_equal_random_numbers() -> None:
    with own_state():
        first = drawn()
    drawn()
    with own_state():
        assert drawn() == first
        assert drawn() != first


def test_offline_command_does_not_affect_later_ones() -> None:
    before = os.environ.get("PENSTOCK_OFFLINE")
    with own_state():
        assert main(["--offline", "plan", "--help"]) == 0
        assert os.environ["PENSTOCK_OFFLINE"] == "1"
    assert os.environ.get("PENSTOCK_OFFLINE") == before
