"""Measure the processor time of tests, with their processes, for `tests/support/quick.py`.

    python tools/measure_tests.py -n 2 --dist loadfile tests

Arguments go to pytest. As a plugin of pytest it notes the time of each test in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest

COSTS = Path(__file__).parent.parent / "tests" / "quick_costs.txt"
NOTES = "PENSTOCK_TEST_COSTS"
"""Name of the environment variable with the file that the plugin writes to."""
SHOWN_SECONDS = 0.25
"""All cases of a test that take less are no line of the file."""


def used_seconds() -> float:
    """Return the processor time of this process and of its children, those that live as well."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note the time of a test, with its fixtures."""
    before = used_seconds()
    done = yield
    note = json.dumps((item.nodeid.partition("[")[0], used_seconds() - before))
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(f"{note}\n")
    return done


def main() -> None:
    """Run tests under the plugin, and write down the measured times; other lines stay."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        given = {**os.environ, NOTES: str(notes), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, *sys.argv[1:]]
        subprocess.run(command, env=given, check=False)
        cases: dict[str, list[float]] = defaultdict(list)
        for line in notes.read_text().splitlines():
            name, seconds = json.loads(line)
            cases[name].append(seconds)
    write({name: (mean(seconds), sum(seconds)) for name, seconds in cases.items()})


def write(measured: dict[str, tuple[float, float]]) -> None:
    """Write lines with the time of one case of a test, in order of their names."""
    lines = dict(reversed(line.split()) for line in COSTS.read_text().splitlines())
    for name, (each, total) in measured.items():
        lines.pop(name, None)
        if total >= SHOWN_SECONDS and each >= 0.01:
            lines[name] = f"{each:.2f}"
    COSTS.write_text("".join(f"{seconds} {name}\n" for name, seconds in sorted(lines.items())))


if __name__ == "__main__":
    main()
