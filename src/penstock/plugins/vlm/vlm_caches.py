"""Decomposition of mlx-vlm's caches into parts that the engine can manage.

A part is a cache of mlx-lm: keys and values, index keys with which a layer selects tokens, or the
inputs that a layer pools. In a step the model gets an object with the interface of its own cache
that combines the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from penstock.attention.choosing_reads import ChoosingReads
from penstock.models.mlx_lm import chunked_cache, plain_cache, rotating_cache

NGRAM = 3
"""Place of the last tokens among the states of a layer of Qwen4 with n-grams."""


@dataclass(frozen=True, slots=True)
class CacheParts:
    caches: tuple[Any, ...]
    rebuild: Callable[..., Any]
    """Function that creates an object with the interface of the model's cache from the parts."""
    drops: bool = True
    """Whether the layer may drop tokens outside its window."""


class IndexedReads:
    """Cache of one layer with index keys, for one step of a sequence."""

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
        """Append index keys, (b, heads, n, dim), and return all index keys."""
        every: mx.array = self._index.update_and_fetch(keys, mx.zeros((*keys.shape[:3], 0)))[0]
        return every


class MiniMaxM3Reads(IndexedReads):
    @property
    def index_offset(self) -> Any:
        return self._index.offset

    def update_index_and_fetch(self, keys: mx.array) -> mx.array:
        return self._index_keys(keys)


class QSAReads(IndexedReads):
    """Cache of one layer of Qwen4, which recomputes block keys from all index keys in each step."""

    index_block_keys: mx.array | None = None
    index_block_ratio: int | None = None

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """Append index keys, (b, n, dim); return all index keys, and their positions."""
        every = self._index_keys(keys[:, None])[:, 0]
        positions = mx.arange(every.shape[1], dtype=position_ids.dtype)
        return every, mx.broadcast_to(positions, (*position_ids.shape[:-1], every.shape[1]))


class SteppedReads:
    """Cache of a layer that appends the tokens of a step one by one."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._new: tuple[mx.array, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of the step appended so far."""
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
    """Cache of a layer whose `state` later layers read as keys and values."""

    def __init__(self, plain: Any) -> None:
        super().__init__(plain, None)

    @property
    def state(self) -> Any:
        return self._plain.keys_and_values()


class ChunkedReads:
    """Cache of a layer with chunked attention, without `make_mask`: the model makes its masks."""

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
    """Cache of a layer that pools every `ratio` tokens into a row, for one step of a sequence.

    All rows are pooled again in every step, so that they do not depend on the chunks of a prompt.
    """

    def __init__(self, ratio: int, inputs: Any) -> None:
        self.ratio = ratio
        self.offset = 0
        self._inputs = SteppedReads(inputs)

    def accumulate_windows(
        self, kv: mx.array, gate: mx.array, offset: Any
    ) -> tuple[mx.array, mx.array, int]:
        """Append inputs, (b, n, dim); return the inputs of all complete rows, and position 0."""
        sides = self._inputs.update_and_fetch(kv[:, None], gate[:, None])
        whole = sides[0].shape[2] // self.ratio * self.ratio
        return sides[0][:, 0, :whole], sides[1][:, 0, :whole], 0

    def update_and_fetch(self, rows: mx.array) -> mx.array:
        self.offset = rows.shape[1]
        return rows

    def make_mask(self, n: int = 1, offset: int = 0) -> mx.array | None:
        """Return a mask of the rows that each token sees, (n, rows); None if all are visible."""
        if n == 1 or not self.offset:
            return None
        ends = mx.arange(offset + 1, offset + n + 1)
        return mx.arange(self.offset) < ends[:, None] // self.ratio


class FlagReads:
    """Cache of one boolean flag per token, stored as bytes."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    @property
    def offset(self) -> Any:
        return self._plain.offset

    def update_and_fetch(self, flags: mx.array, nothing: mx.array) -> tuple[mx.array, mx.array]:
        sides = self._plain.update_and_fetch(flags.astype(mx.uint8), nothing.astype(mx.uint8))
        return sides[0].astype(mx.bool_), sides[1].astype(mx.bool_)


class Uncached:
    """A cache that is always empty, because its content is computed from another cache."""

    def size(self) -> int:
        return -1


def _plain(cache: Any) -> Any:
    return plain_cache()


def _indexed(kind: Callable[[Any, Any], Any]) -> Callable[[Any], CacheParts]:
    def rebuild(plain: Any, index: Any) -> Any:
        if not isinstance(plain, ChoosingReads):
            return kind(plain, index)
        plain.index = index
        return plain

    return lambda cache: CacheParts((plain_cache(), plain_cache()), rebuild, drops=False)


def _chunked(cache: Any) -> CacheParts:
    return CacheParts((chunked_cache(cache.chunk_size),), ChunkedReads)


def _unless_chosen(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda reads: reads if isinstance(reads, ChoosingReads) else kind(reads)


def _pooled(cache: Any) -> CacheParts:
    rebuild = _unless_chosen(partial(PoolReads, cache.ratio))
    return CacheParts((plain_cache(),), rebuild, drops=False)


def _listed(cache: Any) -> CacheParts:
    parts = [split(inner) for inner in cache.caches]
    return CacheParts(tuple(parts), type(cache), all(map(drops, parts)))


def _stepped(cache: Any) -> Any:
    """Return the parts of a cache of DeepSeek 4."""
    if type(cache).__name__ == "CacheList":
        parts = [_stepped(inner) for inner in cache.caches]
        return CacheParts(tuple(parts), type(cache), drops=False)
    if type(cache).__name__ == "RotatingKVCache":
        return CacheParts((split(cache),), _unless_chosen(SteppedReads), drops=False)
    return split(cache)


def _kept(cache: Any) -> CacheParts:
    """Return the part of a layer that must not drop tokens, because the model makes its masks."""
    return CacheParts((split(cache),), lambda reads: reads, drops=False)


def _unprojected(cache: Any) -> Any:
    """Return the parts of a cache of GLM 5 Next.

    Its list contains latents, flags and inputs of pools if the layer has an index, and products of
    the latents, which are recomputed instead of cached.
    """
    if type(cache).__name__ != "CacheList":
        return split(cache)
    kind, (latents, *index, _) = type(cache), cache.caches
    parts = [split(latents)]
    if index:
        parts += [CacheParts((split(index[0]),), _unless_chosen(FlagReads)), split(index[1])]
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
"""Functions that split a cache by the name of its class, relative to `mlx_vlm.models`. Names avoid
importing the modules of other models."""
MODEL_SPLITS: dict[str, Callable[[Any], Any]] = {
    "afm7.language.LanguageModel": lambda cache: CacheParts((split(cache),), StatedReads),
    "deepseek_v4.language.LanguageModel": _stepped,
    "glm5_next.language.LanguageModel": _unprojected,
    "limite.language.LanguageModel": _kept,
}
"""Functions that split all caches of a model, by the name of the model's class."""


@functools.cache
def _ngram_states(kind: Any, token: int) -> Any:
    """Return a class of states in which the tokens before a text are `token`."""

    class NgramStates(kind):  # type: ignore[misc]
        starts: ClassVar = {NGRAM: token}

    return NgramStates


def split(cache: Any) -> Any:
    """Convert a cache of mlx-vlm to one of mlx-lm or to parts; return unknown ones unchanged."""
    function = SPLITS.get(_name(cache))
    return cache if function is None else function(cache)


def split_all(language_model: Any, caches: Sequence[Any]) -> list[Any]:
    """Return the parts of all caches of a model."""
    function = MODEL_SPLITS.get(_name(language_model), split)
    parts = [function(cache) for cache in caches]
    for part, layer in zip(parts, language_model.layers, strict=False):
        if "ple" in layer:  # a layer of Qwen4 with n-grams
            kind: Any = type(part)
            part.__class__ = _ngram_states(kind, layer.ple.ple_embedding.eos_token_id)
    return parts


def drops(cache: Any) -> bool:
    """Return whether a layer may drop tokens outside its window."""
    return getattr(cache, "drops", True)


def _name(instance: Any) -> str:
    kind = type(instance)
    return f"{kind.__module__.removeprefix('mlx_vlm.models.')}.{kind.__qualname__}"
