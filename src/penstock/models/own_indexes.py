"""Indexes that models bring of their own, and how decode steps of the engine choose by them.

A model with sparse attention scores the tokens of the past by small index keys, and picks those
that its layer reads. For a step of the engine the model's module hands its queries to the cache,
which scores each part of a sequence where it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.choosing_reads import ChoosingReads
from penstock.attention.chosen_tokens import IndexPart

FORCED = 1e29
"""Score of tokens that are read in any case; finite, as all others' scores."""


@dataclass(frozen=True, slots=True)
class HeadSumIndex:
    """Index of DeepSeek V3.2: a weighted sum of the positive scores of all index heads."""

    queries: mx.array
    """Queries of the new tokens, (b, heads, n, dim)."""
    weights: mx.array
    """Weights of the heads, (b, heads, n, 1)."""
    tokens: int
    """Number of tokens to choose."""
    first: int = 0
    """Number of first tokens that are read in any case."""
    last: int = 0
    """The same of the last ones, with the new token."""

    block = 1
    negates = False

    def budget(self, count: int) -> int:
        return self.tokens

    def scores(self, row: int, token: int, part: IndexPart) -> mx.array:
        """See `OwnIndex`."""
        scores = self._weighted(row, token, part.keys)
        if not (self.first or self.last):
            return scores
        columns = part.start + mx.arange(len(scores))
        forced = (columns < self.first) | (columns >= part.count - self.last)
        return mx.where(forced, FORCED, scores)

    def _weighted(self, row: int, token: int, keys: mx.array) -> mx.array:
        place = slice(row, row + 1), slice(None), slice(token, token + 1)
        products = mx.maximum(self.queries[place] @ keys[None].swapaxes(-1, -2), 0)
        return (products * self.weights[place]).sum(axis=1).reshape(-1)


def head_sum_index(
    module: Any, x: mx.array, qr: mx.array, offset: Any
) -> tuple[HeadSumIndex, mx.array]:
    """Return the index of a step, and the index keys of its tokens, (b, 1, n, dim)."""
    b, s, _ = x.shape
    queries = module.wq_b(qr).reshape(b, s, module.n_heads, module.head_dim).swapaxes(1, 2)
    keys = module.k_norm(module.wk(x)).reshape(b, 1, s, module.head_dim)
    queries, keys = (module.rope(side, offset=offset) for side in (queries, keys))
    weights = module.weights_proj(x) * (module.n_heads**-0.5 * module.softmax_scale)
    forced = (getattr(module, f"index_{name}_tokens", 0) for name in ("init", "local"))
    weights = weights.swapaxes(-1, -2)[..., None]
    return HeadSumIndex(queries, weights, module.index_topk, *forced), keys


def _by_head_sum(kind: Any) -> Any:
    class HeadSumChooser(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
            if not isinstance(cache, ChoosingReads):
                return super().__call__(x, qr, mask, cache)
            cache.choose(*head_sum_index(self, x, qr, cache.offset))
            return None  # the layer's cache has the choice

    return HeadSumChooser


@dataclass(frozen=True, slots=True)
class PooledIndex:
    """Index of Qwen4: positive scores of all index heads with the mean key of each block."""

    module: Any
    queries: mx.array
    """Rotated queries of the new tokens, (b, heads, n, dim)."""

    negates = False

    @property
    def block(self) -> int:
        return int(self.module.compress_ratio)

    def budget(self, count: int) -> int:
        return int(self.module.block_topk) * self.block + count % self.block

    def scores(self, row: int, token: int, part: IndexPart) -> mx.array:
        """See `OwnIndex`."""
        module, keys = self.module, part.keys
        blocks = mx.unflatten(keys.astype(mx.float32), 1, (-1, self.block))
        pooled = module.k_layernorm(mx.mean(blocks, axis=2).astype(keys.dtype))
        positions = part.start + self.block * mx.arange(pooled.shape[1], dtype=mx.int32)
        pooled = module._apply_rope(pooled[:, None], positions[None]).astype(mx.float32)
        queries = self.queries[row, :, token : token + 1].astype(mx.float32)
        products = mx.maximum(queries @ pooled.squeeze(0).swapaxes(-1, -2), 0)
        scores: mx.array = products.sum(axis=0).reshape(-1) / sqrt(module.head_dim)
        return scores


def _by_pooled_keys(kind: Any) -> Any:
    class PooledChooser(kind):  # type: ignore[misc]
        def select_from_projected(self, qk: mx.array, cache: Any, position_ids: Any) -> Any:
            if not isinstance(cache, ChoosingReads):
                return super().select_from_projected(qk, cache, position_ids)
            assert cache.index is not None
            b, s, _ = qk.shape
            if position_ids is None:
                position_ids = self._default_position_ids(b, cache.offset, s)
            heads = qk.reshape(b, s, -1, self.head_dim).swapaxes(1, 2)
            queries = self.q_layernorm(heads[:, : self.n_heads])
            queries = self._apply_rope(queries, position_ids)
            cache.index.choose(PooledIndex(self, queries), heads[:, self.n_heads :])
            return None

    return PooledChooser


_Form: TypeAlias = Callable[[Any], Any]
FORMS: dict[tuple[str, str], _Form] = {
    ("mlx_lm.models.deepseek_v32", "Indexer"): _by_head_sum,
    ("mlx_vlm.models.deepseek_v32.language", "Indexer"): _by_head_sum,
    ("mlx_vlm.models.hy_v4.indexer", "HyV4Indexer"): _by_head_sum,
    ("mlx_vlm.models.longcat_flash_sparse.language", "Indexer"): _by_head_sum,
    ("mlx_vlm.models.qwen4_exp.language", "Qwen4ExpQSAIndexer"): _by_pooled_keys,
}
"""Function that subclasses each class of indexes, by its module and name."""
HELPERS = {
    "mlx_vlm.models.qwen4_exp.language": ("mlx_vlm.models.qwen3_5.speculative_verifier",),
}
"""Modules without layers that compute the attention of those in a module."""


def has_index(model: nn.Module) -> bool:
    """Return whether layers of an attached model choose by an index of their own."""
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    return any(chooser(base) for part in modules for base in type(part).__mro__)


@functools.cache
def chooser(kind: Any) -> type[nn.Module] | None:
    """Return a subclass of an index that chooses by `ChoosingReads`; None for other classes."""
    form = FORMS.get((kind.__module__, kind.__name__))
    subclass: type[nn.Module] | None = None if form is None else form(kind)
    return subclass
