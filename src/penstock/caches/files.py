"""Prompt caches on disk, in mlx-lm 0.32.2's safetensors layout.

Files of mlx-lm 0.32.2 can be loaded. mlx-lm can load files that contain only classes it has.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from penstock.caches.base import LayerCache
from penstock.errors import CacheFileError


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: Sequence[Any], metadata: dict[str, str] | None = None
) -> None:
    """Write the caches of all layers to a `.safetensors` file, readable only by its owner.

    An existing file is replaced atomically.

    Raises:
        CacheFileError: a cache's state contains a value that is not an array, number, string or
            None, or `metadata` one that is not a string.
        OSError: the folder does not exist or cannot be written to.
    """
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise CacheFileError(f"metadata must be strings, not {key!r}: {value!r}")
    path = Path(file_name)
    if path.suffix != ".safetensors":
        path = path.with_name(path.name + ".safetensors")
    scalars: list[Any] = [""]  # `tree_flatten` would omit an empty list

    def stored(key: str, leaf: Any) -> mx.array:
        if isinstance(leaf, mx.array):
            return leaf
        for kind, known in _KINDS.items():
            if isinstance(leaf, known):
                scalars.append((key, kind))
                return mx.array(_NUMBERS[kind](leaf))
        raise CacheFileError(f"a {type(leaf).__name__} in a cache's state cannot be saved")

    flat: Any = tree_flatten([c.state for c in cache])
    arrays = {key: stored(key, leaf) for key, leaf in flat}
    kinds = [type(c).__name__ for c in cache]
    header = dict(tree_flatten([metadata or {}, kinds, scalars]))
    # Created with mode 0600, under a unique name, in the target folder.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=path.suffix, delete=False) as file:
        aside = Path(file.name)
    try:
        mx.save_safetensors(str(aside), arrays, header)
        with aside.open("rb+") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


_KINDS: dict[str, Any] = {"scalar": (int, float), "string": str, "none": type(None)}
_NUMBERS: dict[str, Any] = {
    "scalar": lambda number: number,
    "string": lambda text: [ord(letter) for letter in text],
    "none": lambda _: [],
}
_VALUES: dict[str, Any] = {
    "scalar": lambda array: array.item(),
    "string": lambda array: "".join(chr(int(code)) for code in array.tolist()),
    "none": lambda _: None,
}


def load_prompt_cache(file_name: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """Load the caches of all layers; return a list, or with `return_metadata` (list, metadata).

    Raises:
        CacheFileError: the file does not exist, is not a prompt cache, or contains a cache of an
            unknown class.
    """
    if not Path(file_name).exists():
        raise CacheFileError(f"there is no file {file_name}")
    try:
        loaded: Any = mx.load(str(file_name), format="safetensors", return_metadata=True)
        arrays, header = loaded
        mx.eval(arrays)
        described: Any = tree_unflatten(list(header.items()))
        metadata, kinds, scalars = described
        for key, kind in scalars[1:]:
            arrays[key] = _VALUES[kind](arrays[key])
        states: Any = tree_unflatten(list(arrays.items()))
        cache = [_revived(kind, state) for kind, state in zip(kinds, states, strict=True)]
    except CacheFileError:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CacheFileError(
            f"{file_name} is not a readable prompt cache (as of mlx-lm 0.32.2): {error}"
        ) from error
    return (cache, metadata or {}) if return_metadata else cache


def _revived(name: str, state: Any) -> Any:
    """Create a cache of a class of penstock, or of mlx-lm if that was imported."""
    if name in LayerCache.kinds:
        return LayerCache.kinds[name].from_state(state)
    theirs: Any = getattr(sys.modules.get("mlx_lm.models.cache"), name, None)
    if not hasattr(theirs, "from_state"):
        raise CacheFileError(
            f"the file holds a cache of class {name}, which is not penstock's; "
            f"if it is mlx-lm's, load the model first"
        )
    if name == "CacheList":  # mlx-lm's `from_state` does not know penstock's classes
        return theirs(*(_revived(kind, part) for part, kind in state))
    return theirs.from_state(state)
