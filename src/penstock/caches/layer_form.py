"""Descriptions of layer caches, from which caches of the same class can be created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from penstock.caches.base import LayerCache
from penstock.kv import columns as col
from penstock.kv.code_pieces import placed
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.columns import Side
from penstock.kv.states import Place
from penstock.plurals import counted


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Class, settings, dtypes and shapes of one layer's cache, penstock's or mlx-lm's.

    The state of such caches is (keys, values, offset, settings...). In rings, keep, max_size and
    the ring column precede the other settings.
    """

    kind: type[Any]
    settings: tuple[Any, ...]
    max_size: int | None
    dtypes: tuple[mx.Dtype, ...]
    """Dtypes of the arrays that store keys, then of those that store values."""
    heads: tuple[tuple[int, int], ...]
    """Number of heads and head dimension of each of those arrays."""

    @staticmethod
    def parts(keys: Side | None, values: Side | None) -> tuple[Any, Any]:
        arrays = col.arrays(keys, values)
        return tuple(part.dtype for part in arrays), tuple(part.shape[1::2] for part in arrays)

    @classmethod
    def of(cls, cache: Any) -> LayerForm | str:
        """Return the form of a cache, or an error message if its tokens cannot be extracted."""
        name = type(cache).__name__
        if not hasattr(cache, "keys_and_values") or hasattr(cache, "start_position"):
            return f"{name} does not hold one token per column"
        if not isinstance(cache.offset, int):
            return f"{name} holds a batch; extract its rows first"
        max_size = getattr(cache, "max_size", None)
        parts = cls.parts(cache.keys, cache.values)
        if cache.empty():
            return cls(type(cache), tuple(cache.state[3:]), max_size, *parts)
        if max_size is not None and cache.offset > max_size:
            window = counted(max_size, "token")
            return f"the window of {window} has wrapped around; its first tokens are gone"
        if wrong := _miscounted(cache):
            return wrong
        if max_size is None:
            return cls(type(cache), tuple(cache.state[3:]), max_size, *parts)
        keep, size, _, *rest = cache.state[3:]
        return cls(type(cache), (keep, size, None, *rest), max_size, *parts)

    def described(self) -> str:
        heads = ", ".join(f"{heads} heads of {width}" for heads, width in dict.fromkeys(self.heads))
        dtypes = ", ".join(str(dtype) for dtype in dict.fromkeys(self.dtypes))
        settings = "" if self.max_size is None else f" with a window of {self.max_size}"
        return f"a {self.kind.__name__}{settings} ({heads}; {dtypes})"

    def revive(
        self, keys: Sequence[Side], values: Sequence[Side], tokens: int, room: int, ops: CodeOps
    ) -> Any:
        """Create a cache of `room` columns with dequantized copies of consecutive parts."""
        settings = self.settings
        if self.max_size is not None:
            keep, size, _, *rest = settings
            settings, room = (keep, size, tokens, *rest), min(room, size)
        sides = (
            placed(keys, room, self.dtypes[0], ops),
            placed(values, room, self.dtypes[-1], ops),
        )
        cache = self.kind.from_state((*sides, tokens, *settings))
        if isinstance(cache, LayerCache):
            cache.allocated(room)
        return cache


def _miscounted(cache: Any) -> str | None:
    """Describe a mismatch between a cache's offset and its arrays; None if there is none."""
    sides = cache.keys, cache.values
    columns = min(map(col.columns, sides))
    if not 0 <= cache.offset <= columns:
        return (
            f"{type(cache).__name__} has an offset of "
            f"{counted(cache.offset, 'token')} but "
            f"buffers of {columns:,}; do not change a cache's offset before storing it"
        )
    rows = {part.shape[0] for part in col.arrays(*sides)}
    if rows != {1}:
        return (
            f"{type(cache).__name__} holds {max(rows)} rows; store each sequence in a cache of "
            f"one row"
        )
    return None


@dataclass(frozen=True, slots=True)
class CachesForm:
    forms: list[LayerForm]
    states: list[type[Any]]
    places: tuple[Place, ...]


def difference(stored: CachesForm, offered: CachesForm) -> str:
    what = "the caches differ in class, size or dtype from those stored before"
    if len(stored.forms) != len(offered.forms):
        return f"{what}: {len(offered.forms)} layers with keys and values, not {len(stored.forms)}"
    for number, (old, new) in enumerate(zip(stored.forms, offered.forms, strict=True)):
        if old != new:
            return f"{what}: layer {number} is {new.described()}, not {old.described()}"
    return what
