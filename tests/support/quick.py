"""Selection of tests that `make test` leaves to `make test-all` to end within ten minutes.

A test has `SECONDS` of processor time: so many of its cases run, the first always, and the same
ones every time. A test of which one case takes more than `LONGEST`, or that has the mark `slow`,
does not run, unless nothing of its file would, or it is in `ALWAYS`. CI runs all.

What a case takes is in `tests/quick_costs.txt`, which `make test-costs` measures. A test that is
not in it is cheap, or new: all of it runs.

A run with `--quick` leaves in pytest's cache which tests passed, and `--rest` runs all others. With
`--until`, tests that begin after a time are skipped: CI ends on a slow machine, too, and says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SECONDS = 0.25
LONGEST = 1.0
ALWAYS = (
    "test_engine_matches_model",
    "test_engine_matches_model_with_disk_faults",
    "test_tree_matches_dict_of_prefixes",
    "test_token_budget_above_length_matches_full_attention",
    "test_selected_blocks_are_read_exactly",
    "test_state_machine_of_many_sequences_keeps_tree_and_ledger_exact",
    "test_memory_stays_within_limit",
    "test_sigterm_drains_open_requests",
    "test_only_ray_plugin_imports_ray",
)
"""Tests that see most: of each the first case runs, whatever it takes."""
COSTS = Path(__file__).parents[1] / "quick_costs.txt"
LATE = "no time was left: `make test-rest` runs it"
PASSED = "penstock/passed"
"""Key in pytest's cache."""


class PassedTests:
    """Plugin that records which tests passed."""

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache, self._passed = cache, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._cache.set(PASSED, sorted(self._passed))


def read_costs() -> dict[str, float]:
    """Return the processor seconds of one case by file and test name."""
    lines = (line.split() for line in COSTS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def left_out(items: Iterable[pytest.Item], costs: dict[str, float]) -> list[pytest.Item]:
    """Return the tests that only `make test-all` runs."""
    files: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        files.setdefault(item.path, {}).setdefault(name, []).append(item)
    return [item for tests in files.values() for item in _left_out(tests, costs)]


def _left_out(
    tests: dict[str, list[pytest.Item]], costs: dict[str, float]
) -> Iterator[pytest.Item]:
    """Yield the left-out tests of one file."""
    quick = {
        name: cases
        for name, cases in tests.items()
        if name.rpartition("::")[2] in ALWAYS
        or (costs.get(name, 0.0) <= LONGEST and not cases[0].get_closest_marker("slow"))
    }
    if not quick:
        name = min(tests, key=lambda name: costs.get(name, LONGEST))
        quick = {name: tests[name]}
    for name, cases in tests.items():
        if name not in quick:
            yield from cases
        elif name in costs:
            others = cases[1:]
            # By a checksum: every so many would always be the same value of some parameter.
            others.sort(key=lambda item: zlib.crc32(item.name.encode()))
            yield from others[max(1, int(SECONDS / costs[name])) - 1 :]
