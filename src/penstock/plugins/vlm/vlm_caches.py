"""Caches of mlx-vlm's models in parts that the engine keeps.

A part is a cache of mlx-lm: keys and values of each token, index keys by which a layer chooses
tokens, or what it pools rows from. In a step the model gets an object with the interface of its own
cache, which joins the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from penstock.models.mlx_lm import chunked_cache, plain_cache, rotating_cache


@dataclass(frozen=True, slots=True)
class CacheParts:
    caches: tuple[Any, ...]
    rebuild: Callable[..., Any]
    """Makes an object with the interface of the whole from readers of the parts."""
    drops: bool = True
    """Whether the layer may lose tokens that are behind a window."""


class IndexedReads:
    """Keys, values and index keys of one layer in one step of a sequence."""

    def __init__(self, plain: Any, index: Any) -> None:
        self._plain = plain
        self._index = index

    @property
    def offset(self) -> Any:
        return self._plain.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._plain.update_and_fetch(keys, values)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain.make_mask(*args, **kwargs)

    def _index_keys(self, keys: mx.array) -> mx.array:
        """Append index keys, (b, heads, n, dim), and return all."""
        every: mx.array = self._index.update_and_fetch(keys, mx.zeros((*keys.shape[:3], 0)))[0]
        return every


class MiniMaxM3Reads(IndexedReads):
    @property
    def index_offset(self) -> Any:
        return self._index.offset

    def update_index_and_fetch(self, keys: mx.array) -> mx.array:
        return self._index_keys(keys)


class QSAReads(IndexedReads):
    """One layer of Qwen4; its block keys are computed from all index keys in every step."""

    index_block_keys: mx.array | None = None
    index_block_ratio: int | None = None

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """Append index keys, (b, n, dim), and return all, with the positions of a text."""
        every = self._index_keys(keys[:, None])[:, 0]
        positions = mx.arange(every.shape[1], dtype=position_ids.dtype)
        return every, mx.broadcast_to(positions, (*position_ids.shape[:-1], every.shape[1]))


class SteppedReads:
    """One layer that appends the tokens of a step one by one."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._new: tuple[mx.array, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of the step's tokens that were appended."""
        return self._new[0].shape[2] if self._new else 0

    @property
    def offset(self) -> Any:
        return self._plain.offset + self.tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        new = zip(self._new or ((),) * 2, (keys, values), strict=True)
        self._new = tuple(mx.concatenate([*_given(old), side], axis=2) for old, side in new)
        return self._plain.update_and_fetch(*self._new)

    def make_mask(self, n: int, **kwargs: Any) -> Any:
        mask = self._plain.make_mask(self.tokens + n, **kwargs)
        return mask[..., -n:, :] if isinstance(mask, mx.array) else mask


def _given(old: Any) -> tuple[mx.array, ...]:
    return (old,) if isinstance(old, mx.array) else ()


class StatedReads(IndexedReads):
    """One layer whose keys and values later layers read as its state."""

    def __init__(self, plain: Any) -> None:
        super().__init__(plain, None)

    @property
    def state(self) -> Any:
        return self._plain.keys_and_values()


class ChunkedReads:
    """One layer with chunked attention, whose masks the model makes: it looks for no others."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.maybe_trim_front = plain.maybe_trim_front

    @property
    def offset(self) -> Any:
        return self._plain.offset

    @property
    def start_position(self) -> Any:
        return self._plain.start_position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._plain.update_and_fetch(keys, values)


class PoolReads:
    """What one layer pools rows from, in one step of a sequence; a row every `ratio` tokens.

    All rows are pooled again in every step. So they do not depend on where a prompt was cut.
    """

    def __init__(self, ratio: int, inputs: Any) -> None:
        self.ratio = ratio
        self.offset = 0
        self._inputs = SteppedReads(inputs)

    def accumulate_windows(
        self, kv: mx.array, gate: mx.array, offset: Any
    ) -> tuple[mx.array, mx.array, int]:
        """Append inputs, (b, n, dim), and return those of all whole windows, from position 0."""
        sides = self._inputs.update_and_fetch(kv[:, None], gate[:, None])
        whole = sides[0].shape[2] // self.ratio * self.ratio
        return sides[0][:, 0, :whole], sides[1][:, 0, :whole], 0

    def update_and_fetch(self, rows: mx.array) -> mx.array:
        self.offset = rows.shape[1]
        return rows

    def make_mask(self, n: int = 1, offset: int = 0) -> mx.array | None:
        """Return which rows each token sees, (n, rows); None if all see all."""
        if n == 1 or not self.offset:
            return None
        ends = mx.arange(offset + 1, offset + n + 1)
        return mx.arange(self.offset) < ends[:, None] // self.ratio


class FlagReads:
    """Flags of the tokens of one layer, kept as bytes."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    @property
    def offset(self) -> Any:
        return self._plain.offset

    def update_and_fetch(self, flags: mx.array, nothing: mx.array) -> tuple[mx.array, mx.array]:
        sides = self._plain.update_and_fetch(flags.astype(mx.uint8), nothing.astype(mx.uint8))
        return sides[0].astype(mx.bool_), sides[1].astype(mx.bool_)


class Uncached:
    """A cache that is always empty: what it would hold is computed from another one."""

    def size(self) -> int:
        return -1


def _plain(cache: Any) -> Any:
    return plain_cache()


def _indexed(kind: Callable[[Any, Any], Any]) -> Callable[[Any], CacheParts]:
    return lambda cache: CacheParts((plain_cache(), plain_cache()), kind, drops=False)


def _chunked(cache: Any) -> CacheParts:
    return CacheParts((chunked_cache(cache.chunk_size),), ChunkedReads)


def _pooled(cache: Any) -> CacheParts:
    return CacheParts((plain_cache(),), partial(PoolReads, cache.ratio), drops=False)


def _listed(cache: Any) -> CacheParts:
    parts = [split(inner) for inner in cache.caches]
    return CacheParts(tuple(parts), type(cache), all(map(drops, parts)))


def _stepped(cache: Any) -> Any:
    """Return the parts of a cache of DeepSeek 4."""
    if type(cache).__name__ == "CacheList":
        parts = [_stepped(inner) for inner in cache.caches]
        return CacheParts(tuple(parts), type(cache), drops=False)
    if type(cache).__name__ == "RotatingKVCache":
        return CacheParts((split(cache),), SteppedReads, drops=False)
    return split(cache)


def _kept(cache: Any) -> CacheParts:
    """Return the part of a layer whose masks the model makes from the number of tokens."""
    return CacheParts((split(cache),), lambda reads: reads, drops=False)


def _unprojected(cache: Any) -> Any:
    """Return the parts of a cache of GLM 5 Next.

    A list has latents, then flags and inputs of pools where the layer has an index, and products of
    the latents last, which are computed instead.
    """
    if type(cache).__name__ != "CacheList":
        return split(cache)
    kind, (latents, *index, _) = type(cache), cache.caches
    parts = [split(latents)]
    if index:
        parts += [CacheParts((split(index[0]),), FlagReads), split(index[1])]
    return CacheParts(tuple(parts), lambda *reads: kind(*reads, Uncached()), drops=False)


SPLITS: dict[str, Callable[[Any], Any]] = {
    "cache.KVCache": _plain,
    "cache.RotatingKVCache": lambda cache: rotating_cache(cache.max_size, cache.keep),
    "cache.ChunkedKVCache": _chunked,
    "cache.CacheList": _listed,
    "cache.PoolingCache": _pooled,
    "hy_v4.cache.HyV4KVCache": _plain,
    "minimax_m3_vl.language.MiniMaxM3KVCache": _indexed(MiniMaxM3Reads),
    "qwen4_exp.language.QSAKVCache": _indexed(QSAReads),
}
"""Function that splits a cache, by its class's name below `mlx_vlm.models`, so that no other
model's module is imported."""
MODEL_SPLITS: dict[str, Callable[[Any], Any]] = {
    "afm7.language.LanguageModel": lambda cache: CacheParts((split(cache),), StatedReads),
    "deepseek_v4.language.LanguageModel": _stepped,
    "glm5_next.language.LanguageModel": _unprojected,
    "limite.language.LanguageModel": _kept,
}
"""The same for all caches of a model, by the name of its class."""


def split(cache: Any) -> Any:
    """Return a cache of mlx-lm, or parts, for one of mlx-vlm; an unknown one as it is."""
    function = SPLITS.get(_name(cache))
    return cache if function is None else function(cache)


def split_all(language_model: Any, caches: Sequence[Any]) -> list[Any]:
    """Return the parts of all caches of a model."""
    function = MODEL_SPLITS.get(_name(language_model), split)
    return [function(cache) for cache in caches]


def drops(cache: Any) -> bool:
    """Return whether a layer may lose tokens that are behind a window."""
    return getattr(cache, "drops", True)


def _name(instance: Any) -> str:
    kind = type(instance)
    return f"{kind.__module__.removeprefix('mlx_vlm.models.')}.{kind.__qualname__}"
