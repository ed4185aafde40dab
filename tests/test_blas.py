"""Which BLAS is loaded: each case in a process of its own, since a library stays loaded."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.blas import (
    INSTALL_COMMANDS,
    WHEEL_COMMAND,
    install_hint,
    installed,
    load_blas,
    uses_cuda,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or uses_cuda(), reason="MLX needs no BLAS of ours here"
)

SHOW = """
import dataclasses, json, penstock.blas
print(json.dumps(dataclasses.asdict(penstock.blas.load_blas())))
"""
SPEED = """
import time, penstock, mlx.core as mx
a = mx.random.normal((512, 512)); mx.eval(a @ a)
best = 1e9
for _ in range(5):
    start = time.perf_counter(); mx.eval(a @ a); best = min(best, time.perf_counter() - start)
print(best)
"""


def run(code: str, blas: str | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_BLAS"}
    if blas is not None:
        environment["PENSTOCK_BLAS"] = blas
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def loaded(blas: str | None = None, before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(before + SHOW, blas))
    return found


needs_blas = pytest.mark.skipif(
    not loaded()["is_fast"], reason="no fast BLAS is installed on this machine"
)


def test_the_answer_stays_the_same() -> None:
    assert load_blas() is load_blas()


def test_none_loads_nothing_and_asks_for_nothing() -> None:
    assert loaded("none") == {
        "is_fast": False,
        "name": "reference BLAS",
        "why": "PENSTOCK_BLAS=none",
        "advice": None,
    }


@needs_blas
def test_the_named_library_is_used() -> None:
    name = loaded()["name"]
    assert loaded(name)["name"] == name
    assert loaded(name)["why"] == "named by PENSTOCK_BLAS"


@pytest.mark.parametrize(
    ("name", "complaint"), [("/nowhere/libblas.so", "cannot open"), ("libm.so.6", "no cblas_sgemm")]
)
def test_a_wrong_name_is_said_in_one_line(name: str, complaint: str) -> None:
    advice = loaded(name)["advice"]
    assert advice.startswith(f"PENSTOCK_BLAS={name} is not used: ")
    assert complaint in advice
    assert "\n" not in advice


def test_a_missing_blas_says_what_to_install() -> None:
    hide = "import penstock.blas as b; b._SONAMES = (); b._WHEEL = ('none', '*')\n"
    hide += "b.load_blas.cache_clear()\n"
    found = loaded(before=hide)
    assert not found["is_fast"]
    assert found["advice"].endswith(install_hint())
    there = [word for word in INSTALL_COMMANDS if shutil.which(word)]
    assert all(INSTALL_COMMANDS[word] in found["advice"] for word in there[:1])
    assert (WHEEL_COMMAND in found["advice"]) == (platform.machine() == "x86_64")
    assert "\n" not in found["advice"]


@pytest.mark.parametrize("manager", [*INSTALL_COMMANDS, None])
def test_the_command_is_that_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str | None
) -> None:
    if manager is not None:
        (tmp_path / manager).write_text("#!/bin/sh\n")
        (tmp_path / manager).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = "" if manager is None else INSTALL_COMMANDS[manager]
    assert install_hint().startswith(wanted)
    assert sum(command in install_hint() for command in INSTALL_COMMANDS.values()) == bool(wanted)


def test_a_library_of_a_wheel_is_found_where_pip_has_put_it(tmp_path: Path) -> None:
    """A distribution laid out as mkl's wheel: a record, and the library beside site-packages."""
    site = tmp_path / "lib" / "site-packages"
    about = site / "mkl-2025.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mkl\nVersion: 2025.0\n")
    (about / "RECORD").write_text("../libmkl_rt.so.3,,\n../libmkl_core.so.3,,\n")
    library = tmp_path / "lib" / "libmkl_rt.so.3"
    library.write_text("no library at all")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import penstock.blas as b; print(b._in_wheel())"
    )
    assert run(code) == f"{[str(library)]}\n"


@pytest.mark.skipif(not installed("mkl"), reason="the wheel of mkl is not installed here")
def test_float32_gets_faster_by_the_wheel() -> None:
    hide = "import penstock.blas as b; b._SONAMES = (); b.load_blas.cache_clear()\n"
    assert loaded(before=hide)["why"] == "from the wheel of mkl"
    assert float(run(SPEED, "none")) > 2 * float(run(hide + SPEED))


def test_mlx_before_penstock_is_said() -> None:
    found = loaded(before="import mlx.core; ")
    assert not found["is_fast"]
    assert "import penstock first" in found["advice"]


@needs_blas
def test_float32_gets_faster() -> None:
    # 20 times and more where it was measured; 2 leaves room for a busy machine.
    assert float(run(SPEED, "none")) > 2 * float(run(SPEED))


CORE = """
import penstock.blas
print(penstock.blas.multiplies_unpacked())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 kernels")
@pytest.mark.skipif("openblas" not in load_blas().name, reason="OpenBLAS alone names its kernels")
def test_kernels_that_copy_nothing_are_known_by_name() -> None:
    found = {}
    for core in ("Haswell", "Sandybridge"):
        command = [sys.executable, "-c", CORE]
        environment = {**os.environ, "OPENBLAS_CORETYPE": core}
        found[core] = subprocess.check_output(command, env=environment, text=True).strip()
    assert found == {"Haswell": "False", "Sandybridge": "False"}
    if "avx512vl" in Path("/proc/cpuinfo").read_text():
        environment = {**os.environ, "OPENBLAS_CORETYPE": "SkylakeX"}
        command = [sys.executable, "-c", CORE]
        assert subprocess.check_output(command, env=environment, text=True).strip() == "True"
