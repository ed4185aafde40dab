"""What `make test` skips, and which kernels the test CPUs have."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import quick

from penstock.blas import load_blas

TESTS = Path(__file__).parent
CPUS = runpy.run_path(str(TESTS.parent / "tools" / "cpus.py"))


def test_tests_with_costs_exist() -> None:
    """A renamed test would run in full in `make test`."""
    for name in quick.read_costs():
        file, defined, *_ = name.split("::")
        source = (TESTS.parent / file).read_text()
        assert re.search(rf"^(async )?(def|class) {defined}\b|^{defined} = ", source, re.M), name


def test_tests_listed_as_always_run_exist() -> None:
    sources = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert set(quick.ALWAYS) <= set(re.findall(r"^ *def (test_\w+)", sources, re.M))


class Item:
    """The fields of a test item that the selection reads."""

    def __init__(self, file: str, name: str, slow: bool = False) -> None:
        self.path, self.name, self.slow = Path(file), name, slow
        self.nodeid = f"{file}::{name}"

    def get_closest_marker(self, _: str) -> bool:
        return self.slow


def out(items: list[Item], costs: dict[str, float]) -> list[Any]:
    return quick.left_out(items, costs)  # type: ignore[arg-type]


def test_number_of_test_cases_follows_measured_cost() -> None:
    many = [Item("a.py", f"test_many[{i}]") for i in range(300)]
    dear = [Item("a.py", f"test_dear[{i}]") for i in range(3)]
    new = [Item("a.py", f"test_new[{i}]") for i in range(300)]
    costs = {"a.py::test_many": quick.SECONDS / 20, "a.py::test_dear": quick.LONGEST}
    left = out([*many, *dear, *new], costs)
    assert len(left) == 280 + 2
    assert not any(item in left for item in [many[0], dear[0], *new])
    assert left == out([*many, *dear, *new], costs)
    kept = [i for i, item in enumerate(many) if item not in left]
    assert len({i % 4 for i in kept}) == 4, "not every so many"


def test_tests_that_begin_too_late_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text("import time\ndef test_one(): time.sleep(1.5)\ndef test_other(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    command += ["-c", str(TESTS.parent / "pyproject.toml"), "--confcutdir", str(tmp_path)]
    plugin = {**os.environ, "PYTHONPATH": f"{TESTS / 'support'}:{TESTS}:{os.getenv('PYTHONPATH')}"}

    def summary(*more: str) -> str:
        run = subprocess.run(
            [*command, "-p", "conftest", *more], env=plugin, capture_output=True, text=True
        )
        return run.stdout

    assert "2 passed" in summary()
    late = summary("--until", str(time.time() + 60)), summary("--until", "1")
    assert "2 passed" in late[0]
    assert "2 skipped" in late[1] and quick.LATE in late[1]


def test_longest_tests_run_only_if_single_in_file() -> None:
    longest = {"a.py::test_long": quick.LONGEST + 1, "a.py::test_longer": quick.LONGEST + 2}
    names = ("test_longer[a]", "test_long[a]", "test_long[b]")
    longer, long, more = (Item("a.py", name) for name in names)
    short, slow = Item("a.py", "test_short"), Item("a.py", "test_slow", slow=True)
    assert out([longer, long, more, short, slow], longest) == [longer, long, more, slow]
    assert out([longer, long, more], longest) == [longer, more]
    always = [Item("a.py", f"{quick.ALWAYS[0]}[{i}]") for i in range(3)]
    costs = {**longest, f"a.py::{quick.ALWAYS[0]}": quick.LONGEST + 3}
    left = out([*always, longer, short], costs)
    assert [item for item in [*always, longer, short] if item not in left] == [always[0], short]


@pytest.mark.parametrize(
    ("flags", "cores"),
    [
        ("", [""]),
        ("sse4_2 avx", ["", "Sandybridge"]),
        ("avx avx2 fma", ["", "Sandybridge", "Haswell", "Zen"]),
        ("avx avx2 fma avx512f", ["", "Sandybridge", "Haswell", "Zen"]),
        ("avx avx2 fma avx512f avx512cd avx512bw avx512dq avx512vl", list(CPUS["CORES"])),
    ],
)
def test_only_executable_cpu_types_are_tried(flags: str, cores: list[str]) -> None:
    assert CPUS["executable"](flags.split()) == cores


@pytest.mark.skipif("/libopenblas" not in load_blas().name, reason="OpenBLAS is not loaded")
def test_only_cpu_types_that_openblas_was_built_with_are_tried() -> None:
    """Builds differ: OpenBLAS takes other kernels in place of those that it lacks."""
    assert CPUS["built_in"](["", "unbuilt"]) == [""]
    used = CPUS["in_use"]("")
    assert CPUS["built_in"]([used, "unbuilt"]) == [used]


def test_ci_draws_every_core_type_with_one_and_two_threads() -> None:
    drawn = {CPUS["draw"](seed, ["", "Zen"]) for seed in range(40)}
    assert drawn == {(threads, core) for threads in (1, 2) for core in ("", "Zen")}
