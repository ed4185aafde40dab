"""Machine code in the user's cache folder: kept, read, and not trusted blindly."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="functions are compiled by Numba")

from penstock.plugins.cpu.compiled_cache import function_address


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of machine code, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "loops"


class Compilation:
    """Compiles `3 x - 1`, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        from numba import cfunc, types

        self.count += 1
        return cfunc(types.int64(types.int64))(lambda x: 3 * x - 1)

    def result(self, name: str = "line") -> int:
        address = function_address(name, self)
        return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(5))


def test_machine_code_is_kept_and_read(loops: Path) -> None:
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


def test_unwritable_cache_folder_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation = Compilation()
    assert [compilation.result(), compilation.result()] == [14, 14]
    assert compilation.count == 2
