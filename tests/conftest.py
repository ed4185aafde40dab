"""Loaded before any test module: the BLAS must be there before one of them imports mlx."""

import gc
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

if hasattr(os, "SCHED_BATCH"):
    # MLX's thread wakes for each operation, and would take the core from the thread that enqueues
    # the next: a sixth of the time of tests of engines. Threads and processes inherit this.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import penstock  # noqa: F401 - the import is what loads it

import mlx.core as mx  # isort: skip
import httpx
import pytest
from crashed_workers import pytest_xdist_make_scheduler  # noqa: F401 - a hook
from hypothesis import HealthCheck, settings
from patience import SOON, patient, reads_all, whole_chunks  # noqa: F401 - fixtures
from process_state import own_state
from quick import LATE, PASSED, PassedTests, left_out, read_costs
from threads_left import (  # noqa: F401 - hooks and a fixture
    no_thread_left,
    pytest_sessionstart,
    pytest_unconfigure,
)

from penstock.engine.model import step_peaks

LAZY = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
COMMON = {"deadline": None, "suppress_health_check": LAZY, "print_blob": True}
"""A loaded machine is slow by seconds."""

# What is drawn is the same in every run, whichever files run with it; `soak` draws at random.
settings.register_profile(
    "default", max_examples=25, stateful_step_count=30, derandomize=True, database=None, **COMMON
)
settings.register_profile("soak", max_examples=600, stateful_step_count=60, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell: what tests start would not hear Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every process of tests measures: peaks of another one, written there, would hide a change.
step_peaks.REMEMBERED_SECONDS = math.inf

# httpx waits 5 seconds by itself: too few where fifty processes want the same core. The object is
# the default of all its functions, and there is no setting for it.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, SOON)

FIRST = "test_step_peaks.py"
"""Opens most engines: it comes first, in a process that holds nothing of other tests yet."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options used by `make test` and `make test-rest`; see `quick`."""
    parser.addoption("--quick", action="store_true", help="leave out what takes long")
    parser.addoption("--rest", action="store_true", help="leave out what passed with --quick")
    parser.addoption(
        "--until", type=float, metavar="SECONDS", help="begin no test after this time (Unix epoch)"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins too late."""
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(LATE)


def pytest_configure(config: pytest.Config) -> None:
    """Record the passed tests of a quick run."""
    if config.getoption("quick") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(PassedTests(config.cache))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for, and begin with the files that take longest: with files dealt
    out one by one, as `make test` does, processes end at about the same time."""
    costs = read_costs()
    out = left_out(items, costs) if config.getoption("quick") else []
    if config.getoption("rest"):
        passed = set(config.cache.get(PASSED, []))
        out = [item for item in items if item.nodeid in passed]
    if out:
        config.hook.pytest_deselected(items=out)
        names = {item.nodeid for item in out}
        items[:] = [item for item in items if item.nodeid not in names]
    seconds = dict.fromkeys((item.path for item in items), 0.0)
    for item in items:
        seconds[item.path] += costs.get(item.nodeid.partition("[")[0], 0.0)
    items.sort(key=lambda item: (item.path.name != FIRST, -seconds[item.path]))


@pytest.fixture(scope="module", autouse=True)
def clean_memory_start() -> Iterator[None]:
    """Let each file count MLX's bytes from a clean start: a freed buffer that MLX keeps is handed
    out again though it is larger than what is asked for. No collection looks again at what is
    there by then, above all the imported modules: that took 80 ms each."""
    gc.collect()
    gc.freeze()
    mx.clear_cache()
    with own_state():
        yield
