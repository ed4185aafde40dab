"""Prompt caches on disk, in mlx-lm 0.32.2's safetensors layout.

Files of mlx-lm 0.32.2 are read; mlx-lm reads ours as far as it knows the classes by name.
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
    """Write the caches of all layers to a `.safetensors` file, readable by its owner alone.

    The file is written aside, synced and renamed: an interrupted call leaves the old one.

    Raises:
        CacheFileError: a cache holds something that is no array, number, string or None, or
            `metadata` something that is no string.
        OSError: the folder does not exist or cannot be written to.
    """
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise CacheFileError(f"metadata must be strings, not {key!r}: {value!r}")
    path = Path(file_name)
    if path.suffix != ".safetensors":
        path = path.with_name(path.name + ".safetensors")
    scalars: list[Any] = [""]  # an empty list would vanish when flattened

    def stored(key: str, leaf: Any) -> mx.array:
        if isinstance(leaf, mx.array):
            return leaf
        for kind, known in _KINDS.items():
            if isinstance(leaf, known):
                scalars.append((key, kind))
                return mx.array(_NUMBERS[kind](leaf))
        raise CacheFileError(f"a cache's state holds a {type(leaf).__name__}, which no file can")

    flat: Any = tree_flatten([c.state for c in cache])
    arrays = {key: stored(key, leaf) for key, leaf in flat}
    kinds = [type(c).__name__ for c in cache]
    header = dict(tree_flatten([metadata or {}, kinds, scalars]))
    # Made with mode 0600, under a name of its own, in the folder that it stays in.
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
    """Read the caches of all layers: a list, or with `return_metadata` (list, metadata).

    Raises:
        CacheFileError: no such file, not a prompt cache, or an unknown class of cache.
    """
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
    """Make a cache of the class of that name: penstock's, or one of mlx-lm's if it is loaded."""
    if name in LayerCache.kinds:
        return LayerCache.kinds[name].from_state(state)
    theirs: Any = getattr(sys.modules.get("mlx_lm.models.cache"), name, None)
    if not hasattr(theirs, "from_state"):
        raise CacheFileError(
            f"the file holds a cache of class {name}, which is not penstock's; "
            f"if it is mlx-lm's, load the model first"
        )
    if name == "CacheList":  # it would revive its parts as mlx-lm's own classes
        return theirs(*(_revived(kind, part) for part, kind in state))
    return theirs.from_state(state)
