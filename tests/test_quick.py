"""What `make test` leaves out, and which kernels the CPUs of the tests have."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import quick

TESTS = Path(__file__).parent
CPUS = runpy.run_path(str(TESTS.parent / "tools" / "cpus.py"))


def test_what_is_named_is_there() -> None:
    """A file or a test that was renamed would come back into `make test`."""
    files = {path.name: path for path in TESTS.rglob("test_*.py")}
    assert set(quick.THINNED) <= files.keys()
    defined = set(
        re.findall(r"^def (test_\w+)", "\n".join(map(Path.read_text, files.values())), re.M)
    )
    assert set(quick.SLOW) <= defined


class Item:
    """As much of a test as a choice is made by."""

    def __init__(self, file: str, name: str, slow: bool = False) -> None:
        self.path, self.name, self.slow = Path(file), name, slow
        self.originalname = name.partition("[")[0]

    def get_closest_marker(self, _: str) -> bool:
        return self.slow


def test_of_many_cases_a_sixth_runs_and_always_the_first() -> None:
    many = [Item(quick.THINNED[0], f"test_it[{i}]") for i in range(300)]
    few = [Item(quick.THINNED[0], f"test_few[{i}]") for i in range(quick.MANY - 1)]
    others = [Item("test_else.py", f"test_it[{i}]") for i in range(300)]
    slow = [Item("test_else.py", "test_long", slow=True), Item("test_else.py", quick.SLOW[0])]
    out = quick.left_out([*many, *few, *others, *slow])  # type: ignore[list-item]
    assert all(item in out for item in slow)
    assert not any(item in out for item in [many[0], *few, *others])
    assert 230 < sum(item in out for item in many) < 270
    assert out == quick.left_out([*many, *few, *others, *slow])  # type: ignore[list-item]


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
def test_only_what_a_cpu_executes_is_tried(flags: str, cores: list[str]) -> None:
    assert CPUS["executable"](flags.split()) == cores
