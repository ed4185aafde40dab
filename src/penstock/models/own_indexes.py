"""Indexes that models bring of their own, and how decode steps of the engine choose by them.

A model with sparse attention scores the tokens of the past by small index keys, and picks those
that its layer reads. For a step of the engine the model's module hands its queries to the cache,
which scores each part of a sequence where it lies.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.choosing_reads import ChoosingReads
from penstock.attention.chosen_tokens import IndexPart
from penstock.attention.pooled_reads import SeenInputs, attend_with_rows

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


@dataclass(frozen=True, slots=True)
class GatedIndex:
    """Index of GLM 5 Next: weighted positive scores of all index heads with gated sums of keys."""

    module: Any
    queries: mx.array
    """Queries of the new tokens, (b, n, heads, dim)."""
    weights: mx.array
    """Weights of the heads, (b, n, heads)."""

    negates = True

    @property
    def block(self) -> int:
        return int(self.module.index_kpool)

    def budget(self, count: int) -> int:
        return int(self.module.index_topk) // self.block * self.block + count % self.block

    def scores(self, row: int, token: int, part: IndexPart) -> mx.array:
        """See `OwnIndex`."""
        pools = self.module._compress_pools(part.keys, part.values).squeeze(0).astype(mx.float32)
        products = self.queries[row, token].astype(mx.float32) @ pools.swapaxes(-1, -2)
        weights = self.weights[row, token] * self.module.softmax_scale
        scores: mx.array = (mx.maximum(products, 0) * weights[:, None]).sum(axis=0)
        return scores


def _by_gated_pools(kind: Any) -> Any:
    class GatedChooser(kind):  # type: ignore[misc]
        def __call__(
            self,
            x: mx.array,
            qr: mx.array,
            mask: Any = None,
            cache: Any = None,
            pool_cache: Any = None,
            offset: Any = 0,
        ) -> Any:
            if not isinstance(pool_cache, ChoosingReads):
                return super().__call__(x, qr, mask, cache, pool_cache, offset)
            if not self.always_select_tail:
                raise TypeError("this model does not read the tokens behind its pools")
            b, s, _ = x.shape
            cache.append(mx.ones((b, 1, s, 1), mx.uint8))
            keys, gates = (side[:, None] for side in self._project_keys(x))
            index = GatedIndex(self, *self._project_queries(x, qr))
            pool_cache.choose(index, keys, gates.astype(keys.dtype))
            return mx.zeros((b, s, 0), mx.int32)  # later layers require an array

    return GatedChooser


def _to_chosen_latents(kind: Any) -> Any:
    class LatentChooser(kind):  # type: ignore[misc]
        def _attend(
            self, q: mx.array, latent: Any, new: Any, topk: Any, kv_cache: Any, *more: Any
        ) -> Any:
            if not isinstance(kv_cache, ChoosingReads):
                return super()._attend(q, latent, new, topk, kv_cache, *more)
            mixed = kv_cache.attend(self.embed_q(q), latent, latent, self.scale, None)
            b, _, n, _ = q.shape
            return self.unembed_out(mixed).swapaxes(1, 2).reshape(b, n, -1), topk

    return LatentChooser


@dataclass(frozen=True, slots=True)
class BestTokenIndex:
    """Index of MiniMax M3: the best score of a block's tokens."""

    queries: mx.array
    """Queries of the new tokens, (b, heads, n, dim)."""
    block: int
    blocks: int
    """Number of blocks to choose, with a last one that is not whole."""
    first: int
    """Number of first blocks that are read in any case."""
    last: int
    """The same of the last ones, at least 1."""
    by_head: bool
    """Whether each index head chooses for one KV head; else the best head counts."""

    negates = True

    def budget(self, count: int) -> int:
        return self.blocks * self.block - -count % self.block

    def scores(self, row: int, token: int, part: IndexPart) -> mx.array:
        """See `OwnIndex`."""
        queries = self.queries[row, :, token].astype(mx.float32)
        products = queries @ part.keys.squeeze(0).astype(mx.float32).swapaxes(-1, -2)
        scores = mx.unflatten(products, -1, (-1, self.block)).max(axis=-1)
        if not self.by_head:
            scores = scores.max(axis=0)
        blocks = part.start // self.block + mx.arange(scores.shape[-1])
        now = (part.count - 1) // self.block
        scores = mx.where(blocks > now - self.last, FORCED, scores)
        return mx.where(blocks < self.first, 2 * FORCED, scores)


def _best_token_index(
    module: Any,
    x: mx.array,
    rope: Any,
    offset: Any,
    sizes: tuple[int, int, int, int],
    *,
    by_head: bool,
) -> tuple[BestTokenIndex, mx.array]:
    """Return the index of a step, and the index keys of its tokens, (b, 1, n, dim)."""
    b, s, _ = x.shape
    queries, keys = (
        rope(norm(project(x).reshape(b, s, -1, norm.weight.shape[0])).swapaxes(1, 2), offset=offset)
        for project, norm in (
            (module.index_q_proj, module.index_q_norm),
            (module.index_k_proj, module.index_k_norm),
        )
    )
    index = BestTokenIndex(queries, *sizes, by_head)
    if index.last < 1 or (by_head and queries.shape[1] != module.num_key_value_heads):
        raise TypeError("this model's index chooses blocks in an unknown way")
    return index, keys


def _by_best_tokens(kind: Any) -> Any:
    class BlockChooser(kind):  # type: ignore[misc]
        def __call__(
            self, x: mx.array, mask: Any = None, cache: Any = None, position_ids: Any = None
        ) -> Any:
            index = cache.index if isinstance(cache, ChoosingReads) else None
            if index is not None:
                if self.sparse_score_type != "max":
                    raise TypeError("this model's index scores blocks in an unknown way")
                offset = cache.offset if position_ids is None else position_ids[:, 0]
                blocks = self.sparse_topk_blocks, self.sparse_init_blocks, self.sparse_local_blocks
                parts = _best_token_index(
                    self, x, self.rope, offset, (self.sparse_block_size, *blocks), by_head=False
                )
                index.choose(*parts)
            return super().__call__(x, mask, cache, position_ids)

    return BlockChooser


def _by_best_tokens_of_heads(kind: Any) -> Any:
    class HeadBlockChooser(kind):  # type: ignore[misc]
        def _block_mask(self, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
            if not isinstance(cache, ChoosingReads):
                return super()._block_mask(x, mask, offset, cache)
            sizes = self.index_block_size, self.index_topk_blocks, 0, self.index_local_blocks
            parts = _best_token_index(self, x, self.index_rope, offset, sizes, by_head=True)
            cache.choose(*parts)
            return mask

    return HeadBlockChooser


def _over_inputs_in_place(kind: Any) -> Any:
    class InPlaceCompressor(kind):  # type: ignore[misc]
        def append(self, x: mx.array, cache: ChoosingReads) -> list[SeenInputs]:
            """Append the inputs of the pools; return what each new token reads of them."""
            cache.append(self.wkv(x)[:, None], self.wgate(x)[:, None])
            return [SeenInputs(cache, row) for row in cache.step.new_tokens]

        def __call__(self, x: mx.array, pool_cache: Any, offset: Any) -> Any:
            if not isinstance(pool_cache, SeenInputs):
                return super().__call__(x, pool_cache, offset)
            rows = pool_cache.pooled(self.pool, self.compress_ratio, overlaps=self.overlap)
            return mx.zeros((1, 0, self.head_dim), x.dtype) if rows is None else rows

        def pool(self, keys: mx.array, gates: mx.array, start: mx.array | int) -> mx.array:
            """See `pooled_reads.Pool`."""
            module = sys.modules[kind.__module__]
            compress = module._overlap_compress_kv if self.overlap else module._simple_compress_kv
            sides = (mx.unflatten(side, 1, (-1, self.compress_ratio)) for side in (keys, gates))
            rows = self.norm(compress(*sides, self.ape, self.head_dim))
            pooled: mx.array = self.rope(rows[:, None], offset=start).squeeze(1)
            return pooled

    return InPlaceCompressor


def _beside_pooled_rows(kind: Any) -> Any:
    class RowAttention(kind):  # type: ignore[misc]
        def __call__(
            self,
            x: mx.array,
            mask: Any = None,
            cache: Any = None,
            position_offset: Any = None,
            causal: bool = False,
        ) -> Any:
            window = cache[0] if self.compress_ratio and cache is not None else cache
            if isinstance(window, ChoosingReads):
                mask, causal = None, False  # all new tokens are appended at once
            return super().__call__(x, mask, cache, position_offset, causal)

        def _attend(
            self,
            x: mx.array,
            q: mx.array,
            kv: mx.array,
            q_residual: mx.array,
            mask: Any,
            cache: Any,
            offset: Any,
        ) -> Any:
            window, *pools = (*cache,) if self.compress_ratio and cache is not None else (cache,)
            if not isinstance(window, ChoosingReads):
                return super()._attend(x, q, kv, q_residual, mask, cache, offset)
            window.append(kv)
            rows = [None] * len(window.step.new_tokens)
            if pools:
                rows = self._rows(x, q_residual, pools, offset)
            sinks = self.attn_sink.astype(q.dtype)
            return attend_with_rows(window, q, self.scale, rows, sinks)

        def _rows(self, x: mx.array, q_residual: mx.array, pools: Any, offset: Any) -> Any:
            """Return the rows that each new token reads."""
            every = [self.compressor.append(x, pools[0])]
            if len(pools) > 1:
                every.append(self.indexer.compressor.append(x, pools[1]))
            rows, width = [], x.shape[1]
            for number, (reads, *index) in enumerate(zip(*every, strict=True)):
                row, token = divmod(number, width)
                new = (slice(row, row + 1), slice(token, token + 1))
                count = (reads.row.position + 1) // self.compress_ratio
                if not index or count <= self.indexer.index_topk:
                    rows.append(self.compressor(x[new], reads, 0))
                    continue
                position = (offset if isinstance(offset, int) else offset[row]) + token
                best = self.indexer(x[new], q_residual[new], self.rope, *index, position)
                numbers = mx.sort(best.reshape(-1).astype(mx.int32))
                rows.append(reads.chosen(self.compressor.pool, self.compress_ratio, numbers))
            return rows

    return RowAttention


_Form: TypeAlias = Callable[[Any], Any]
FORMS: dict[tuple[str, str], _Form] = {
    ("mlx_lm.models.deepseek_v32", "Indexer"): _by_head_sum,
    ("mlx_vlm.models.deepseek_v32.language", "Indexer"): _by_head_sum,
    ("mlx_vlm.models.hy_v4.indexer", "HyV4Indexer"): _by_head_sum,
    ("mlx_vlm.models.longcat_flash_sparse.language", "Indexer"): _by_head_sum,
    ("mlx_vlm.models.qwen4_exp.language", "Qwen4ExpQSAIndexer"): _by_pooled_keys,
    ("mlx_vlm.models.deepseek_v4.language", "Compressor"): _over_inputs_in_place,
    ("mlx_vlm.models.deepseek_v4.language", "LocalAttention"): _beside_pooled_rows,
    ("mlx_vlm.models.deepseek_v4.language", "CompressedAttention"): _beside_pooled_rows,
    ("mlx_vlm.models.deepseek_v4.language", "SparseCompressedAttention"): _beside_pooled_rows,
    ("mlx_vlm.models.glm5_next.language", "Glm5NextIndexer"): _by_gated_pools,
    ("mlx_vlm.models.glm5_next.language", "Glm5NextAttention"): _to_chosen_latents,
    ("mlx_vlm.models.minimax_m3_vl.language", "MiniMaxAttention"): _by_best_tokens,
    ("mlx_lm.models.minimax_m3_vl", "Attention"): _by_best_tokens_of_heads,
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
