"""Machine code of compiled functions in the user's cache folder, for the next start.

Compiling a decoder layer takes some seconds, loading its machine code a few milliseconds. Numba's
own cache does not hold functions with instructions of their own, as `tile_products` has. A file
belongs to these sources, versions and this processor. One that is damaged is a miss, as is one in a
folder to which other users can write.
"""

from __future__ import annotations

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

from penstock.regular_files import open_regular
from penstock.user_cache import is_private, user_cache, write_private

logger = logging.getLogger(__name__)

MOST_FILE_BYTES = 4 << 20
"""Maximum size of a file that is written, or read."""
DIGEST_BYTES = 32

_KEPT: list[Any] = []
"""Functions and libraries whose addresses are in use."""


def function_address(name: str, compiled: Callable[[], Any]) -> int:
    """Return the address of a compiled function.

    Args:
        name: name of the function with all that its code depends on, besides the plug-in's sources.
        compiled: compiles it, as an object of `numba.cfunc` without addresses of this process.
    """
    key = _key(name)
    address = None if key is None else _read(key)
    if address is None:
        function = compiled()
        _KEPT.append(function)
        address = int(function.address)
        if key is not None:
            _write(key, function)
    return address


def _key(name: str) -> bytes | None:
    """Return the hash that names a function's file; None if the versions are unknown."""
    try:
        return sha256(f"{name}\n{_identity()}".encode()).digest()
    except Exception as error:  # noqa: BLE001 - such as no metadata of a package
        logger.debug("keep no machine code: %s: %s", type(error).__name__, error)
        return None


def _read(key: bytes) -> int | None:
    """Return the address of a function whose code was kept; None without a valid file."""
    try:
        file = _file(key)
        if not is_private(file.parent):
            return None
        with open_regular(file, MOST_FILE_BYTES) as stream:
            checksum, content = stream.read(DIGEST_BYTES), stream.read()
        if sha256(key + content).digest() != checksum:
            raise ValueError("its checksum is wrong")
        symbol, _, code = content.partition(b"\n")
        return _load(symbol.decode(), code)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - parts of Numba that may change: compile again
        logger.debug("cannot use kept machine code: %s: %s", type(error).__name__, error)
        return None


def _load(symbol: str, code: bytes) -> int:
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target
    from numba.core.runtime import rtsys

    context = cpu_target.target_context
    rtsys.initialize(context)  # symbols that the code may refer to
    context.refresh()
    # Numba takes the names of what the code defines from a second module.
    names = llvm.parse_assembly(f'define void @"{symbol}"() {{ ret void }}').as_bitcode()
    library = context.codegen().unserialize_library((symbol, "object", (code, names)))
    address = int(library.get_pointer_to_function(symbol))
    if not address:
        raise ValueError("it does not have the function")
    _KEPT.append(library)
    return address


def _write(key: bytes, function: Any) -> None:
    """Write a file that only its owner can read; without a private folder, do nothing."""
    try:
        _, _, (code, _) = function._library.serialize_using_object_code()
        content = f"{function._wrapper_name}\n".encode() + code
        if DIGEST_BYTES + len(content) > MOST_FILE_BYTES:
            raise ValueError(f"more than {MOST_FILE_BYTES:,} bytes")
    except Exception as error:  # noqa: BLE001 - parts of Numba that may change
        logger.debug("cannot keep machine code: %s: %s", type(error).__name__, error)
        return
    with suppress(RuntimeError):  # no home folder
        write_private(_file(key), sha256(key + content).digest() + content)


def _file(key: bytes) -> Path:
    """Return the path of a file. Raises RuntimeError without a home folder."""
    return user_cache() / "loops" / key.hex()


@cache
def _identity() -> str:
    """Return the identity of the plug-in's sources, Python, the compilers, and the processor."""
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
