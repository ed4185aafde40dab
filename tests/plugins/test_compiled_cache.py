"""Machine code in the user's cache folder: written, loaded, and verified."""

from __future__ import annotations

import ctypes
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="functions are compiled by Numba")

from penstock.plugins.cpu import compiled_cache
from penstock.plugins.cpu.compiled_cache import function_address


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of machine code, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "penstock" / "loops"
    compiled_cache._identity.cache_clear()


class Compilation:
    """Compiles `3 x - 1`, and counts the compilations."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        from numba import cfunc, types

        self.count += 1
        return cfunc(types.int64(types.int64))(lambda x: 3 * x - 1)

    def result(self, name: str = "line") -> int:
        address = function_address(name, self)
        return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(5))


def test_machine_code_is_cached_and_loaded(loops: Path) -> None:
    compilation = Compilation()
    assert [compilation.result() for _ in range(3)] == [14] * 3
    assert compilation.count == 1
    (file,) = loops.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert compilation.result("another") == 14
    assert compilation.count == 2
    assert len(list(loops.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "moved"])
def test_damaged_machine_code_is_compiled_again(damage: str, loops: Path) -> None:
    compilation = Compilation()
    assert compilation.result() == 14
    (file,) = loops.iterdir()
    content = file.read_bytes()
    if damage == "moved":  # the code of another name
        assert compilation.result("another") == 14
        (other,) = set(loops.iterdir()) - {file}
        compilation.count = 1
        content = other.read_bytes()
    changes = {"cut": content[:-1], "empty": b"", "changed": content[:-1] + b"\1"}
    file.write_bytes(changes.get(damage, content))
    assert compilation.result() == 14
    assert compilation.count == 2


def test_folder_writable_by_others_is_not_used(loops: Path) -> None:
    compilation = Compilation()
    assert compilation.result() == 14
    loops.chmod(0o777)
    assert compilation.result() == 14
    assert compilation.count == 2
    (file,) = loops.iterdir()
    file.unlink()
    assert compilation.result() == 14
    assert not list(loops.iterdir())


def test_unwritable_cache_folder_disables_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation = Compilation()
    assert [compilation.result(), compilation.result()] == [14, 14]
    assert compilation.count == 2


def test_machine_code_of_other_python_is_not_used(
    loops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = Compilation()
    assert compilation.result() == 14
    compiled_cache._identity.cache_clear()
    monkeypatch.setattr(platform, "python_version", lambda: "3.999.0")
    assert compilation.result() == 14
    assert compilation.count == 2


def test_packages_without_metadata_disable_cache(
    loops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compiled_cache, "version", unknown)
    compiled_cache._identity.cache_clear()
    compilation = Compilation()
    assert [compilation.result(), compilation.result()] == [14, 14]
    assert compilation.count == 2
    assert not loops.exists()


def test_machine_code_above_read_limit_is_not_cached(
    loops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = Compilation()
    assert compilation.result() == 14
    (file,) = loops.iterdir()
    size = file.stat().st_size
    # Numba numbers its functions: the symbol's name may have some digits more.
    for most, files in ((size + 32, 2), (size - 32, 2)):
        monkeypatch.setattr(compiled_cache, "MOST_FILE_BYTES", most)
        assert compilation.result(f"under {most:09}") == 14
        assert len(list(loops.iterdir())) == files


def test_processes_share_machine_code(loops: Path) -> None:
    """Two compile and write at the same time; this one only reads."""
    script = "\n".join(
        [
            "from numba import cfunc, types",
            "from penstock.plugins.cpu.compiled_cache import function_address",
            "def compile():",
            "    return cfunc(types.int64(types.int64))(lambda x: 3 * x - 1)",
            "import ctypes",
            "function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)",
            "print(function(function_address('line', compile))(5))",
        ]
    )
    command = [sys.executable, "-c", script]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate()[0].strip() for process in both} == {"14"}
    assert len(list(loops.iterdir())) == 1
    compilation = Compilation()
    assert compilation.result() == 14
    assert compilation.count == 0


QUOTIENTS = """
import ctypes, sys
import numpy as np
from penstock.plugins.cpu.compiled_cache import function_address

def compiled(function):
    from numba import cfunc, types
    return cfunc(types.int64(types.int64))(function)

def allocating(x):
    numbers = np.empty(x, np.int64)
    numbers[:] = x
    return numbers.sum()

FUNCTIONS = {"quotient": lambda x: 100 // x, "allocating": allocating}

def result(name, x):
    address = function_address(name, lambda: compiled(FUNCTIONS[name]))
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(x)
"""


def printed(program: str) -> str:
    command = [sys.executable, "-c", QUOTIENTS + program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_cached_machine_code_runs_without_numba(loops: Path) -> None:
    program = "print(result('quotient', 8), 'numba' in sys.modules)"
    assert printed(program) == "12 True\n"
    assert printed(program) == "12 False\n"


def test_cached_machine_code_that_allocates_imports_numba(loops: Path) -> None:
    program = "print(result('allocating', 8), 'numba' in sys.modules)"
    assert [printed(program), printed(program)] == ["64 True\n"] * 2


@pytest.mark.parametrize("first", ["", "import numba"])
def test_numba_compiles_before_and_after_loading_cached_code(first: str, loops: Path) -> None:
    printed("result('quotient', 8)")
    program = (
        f"{first}\n"
        "print(result('quotient', 8), 'numba' in sys.modules)\n"
        "print(result('allocating', 8), result('quotient', 0), result('quotient', 7))\n"
        "print(compiled(FUNCTIONS['quotient']).ctypes(0))\n"
    )
    expected = f"12 {bool(first)}\n64 0 14\n0\n"
    if first:
        assert printed(program) == expected
    else:  # the function was loaded without Numba, and an error ends the process
        assert printed(program.replace("result('quotient', 0)", "0")) == expected


def test_exception_in_cached_code_aborts_process_without_numba(loops: Path) -> None:
    printed("result('quotient', 8)")
    with pytest.raises(subprocess.CalledProcessError) as error:
        printed("result('quotient', 0)")
    assert error.value.returncode == -signal.SIGABRT
