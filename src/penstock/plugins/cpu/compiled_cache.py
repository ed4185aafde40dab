"""Cache of machine code of compiled functions in the user's cache folder.

Compiling a decoder layer takes some seconds, loading its machine code a few milliseconds. Numba's
own cache does not support functions with generated LLVM IR, as in `tile_products`. Keys include the
plug-in's sources, versions and the processor. Damaged files are ignored, as are files in a folder
to which other users can write.

Machine code is loaded with llvmlite only, because Numba takes 130 MB of memory. 50 MB of llvmlite
are its own code, whose pages are released after each function.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.heap import give_back_code
from penstock.regular_files import open_regular
from penstock.user_cache import is_private, user_cache, write_private

logger = logging.getLogger(__name__)

MOST_FILE_BYTES = 4 << 20
"""Maximum size of a cached file."""
DIGEST_BYTES = 32

FAILURES = frozenset(
    {
        "numba_do_raise",
        "numba_gil_ensure",
        "numba_gil_release",
        "numba_runtime_build_excinfo_struct",
        "numba_unpickle",
        "NRT_Free",
        "NRT_MemInfo_call_dtor",
    }
)
"""Numba functions that compiled code calls after an error or to free an array.
Without Numba they are replaced by `abort`; code that allocates calls others, and needs Numba."""

_KEPT: list[Any] = []
"""Functions and engines whose addresses are in use."""


def function_address(name: str, compiled: Callable[[], Any]) -> int:
    """Return the address of a compiled function.

    Args:
        name: name of the function, including all parameters that its code depends on.
        compiled: imports Numba and compiles the function with `numba.cfunc`. The code must not
            contain addresses of this process. Called only if the function is not cached.
    """
    key = _key(name)
    address = None if key is None else _read(key)
    if address is None:
        function = compiled()
        _KEPT.append(function)
        address = int(function.address)
        if key is not None:
            _write(key, function)
    give_back_code("llvmlite")
    return address


def _key(name: str) -> bytes | None:
    """Return the hash that names a function's file; None if a version is unknown."""
    try:
        return sha256(f"{name}\n{_identity()}".encode()).digest()
    except Exception as error:  # noqa: BLE001 - such as a package without metadata
        logger.debug("not caching compiled code: %s: %s", type(error).__name__, error)
        return None


def _read(key: bytes) -> int | None:
    """Load a cached function and return its address; None without a valid file."""
    try:
        file = _file(key)
        if not is_private(file.parent):
            return None
        with open_regular(file, MOST_FILE_BYTES) as stream:
            checksum, content = stream.read(DIGEST_BYTES), stream.read()
        if sha256(key + content).digest() != checksum:
            raise ValueError("wrong checksum")
        symbol, needed, code = content.split(b"\n", 2)
        return _load(symbol.decode(), needed.decode().split(), code)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - internals of Numba may change: compile again
        logger.debug("recompiling; cannot load cached code: %s: %s", type(error).__name__, error)
        return None


def _load(symbol: str, needed: list[str], code: bytes) -> int:
    """Load an object file, which needs the given symbols; return the address of `symbol`.

    LLVM ends the process if a needed symbol is undefined.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    names = sorted(FAILURES.intersection(needed))
    module = llvm.parse_assembly("\n".join(f"declare void @{name}()" for name in names))
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(module, machine)
    if all(name in FAILURES or llvm.address_of_symbol(name) for name in needed):
        for name in names:
            if not llvm.address_of_symbol(name):
                engine.add_global_mapping(module.get_function(name), library_function("abort"))
    else:
        _define_symbols_of_numba()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(symbol))
    if not address:
        raise ValueError("the function is missing")
    _KEPT.append(engine)
    return address


def library_function(name: str) -> int:
    """Return the address of a function of the C library; 0 if it has none."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def _define_symbols_of_numba() -> None:
    from numba.core.registry import cpu_target
    from numba.core.runtime import rtsys

    context = cpu_target.target_context
    rtsys.initialize(context)
    context.refresh()


def _write(key: bytes, function: Any) -> None:
    """Cache a function in a file that only its owner can read, if the folder is private."""
    try:
        _, _, (code, _) = function._library.serialize_using_object_code()
        needed = " ".join(_declarations(function._library._final_module))
        content = f"{function._wrapper_name}\n{needed}\n".encode() + code
        if DIGEST_BYTES + len(content) > MOST_FILE_BYTES:
            raise ValueError(f"more than {MOST_FILE_BYTES:,} bytes")
    except Exception as error:  # noqa: BLE001 - internals of Numba may change
        logger.debug("not caching compiled code: %s: %s", type(error).__name__, error)
        return
    with suppress(RuntimeError):  # no home folder
        write_private(_file(key), sha256(key + content).digest() + content)


def _declarations(module: Any) -> list[str]:
    """Return the names that an LLVM module uses and does not define."""
    values = [*module.functions, *module.global_variables]
    names = {value.name for value in values if value.is_declaration}
    return sorted(name for name in names if not name.startswith("llvm."))


def _file(key: bytes) -> Path:
    """Return the path of a cached function. Raises RuntimeError without a home folder."""
    return user_cache() / "loops" / key.hex()


@cache
def _identity() -> str:
    """Return what all compiled code depends on: sources, versions, processor and settings."""
    import llvmlite.binding as llvm

    sources = sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(file.read_bytes())
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    processor = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    versions = [platform.python_version()]
    versions += [version(name) for name in ("numba", "llvmlite", "numpy")]
    return "\n".join(
        [sources.hexdigest(), *versions, *processor, json.dumps(settings, sort_keys=True)]
    )
