"""Process-wide state, restored after each test file so that none depends on another."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

SEED = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _environment() -> dict[str, str]:
    """Return all variables except pytest's own, which change per test."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}


def _set_environment(before: dict[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _limit(change: Callable[[int], int]) -> int:
    """Return one of MLX's limits, which are readable only by setting them."""
    limit = change(0)
    change(limit)
    return limit


def _filters() -> dict[str, list[Any]]:
    """Return the filters of all loggers, since `penstock serve` adds some."""
    named = {name: logging.getLogger(name) for name in list(logging.root.manager.loggerDict)}
    return {name: list(logger.filters) for name, logger in named.items()}


def _set_filters(before: dict[str, list[Any]]) -> None:
    for name in _filters():
        logging.getLogger(name).filters[:] = before.get(name, [])


def _signals() -> list[Any]:
    return [signal.getsignal(one) for one in SIGNALS]


def _set_signals(before: list[Any]) -> None:
    for one, handler in zip(SIGNALS, before, strict=True):
        if signal.getsignal(one) is not handler:
            signal.signal(one, handler)


STATES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_environment, _set_environment),
    (os.getcwd, os.chdir),
    (lambda: _limit(mx.set_cache_limit), mx.set_cache_limit),
    (lambda: _limit(mx.set_memory_limit), mx.set_memory_limit),
    (mx.default_device, mx.set_default_device),
    (_filters, _set_filters),
    (_signals, _set_signals),
)
"""How each is read and written."""


@contextmanager
def own_state() -> Iterator[None]:
    """Seed random numbers equally in each file, and restore changed state."""
    random.seed(SEED)
    np.random.seed(SEED)
    mx.random.seed(SEED)
    before = [read() for read, _ in STATES]
    try:
        yield
    finally:
        for (_, write), state in zip(STATES, before, strict=True):
            write(state)
