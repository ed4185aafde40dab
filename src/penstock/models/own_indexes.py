"""Indexes that models bring of their own, and how decode steps of the engine choose by them.

A model with sparse attention has a module that scores the tokens of the past by small index keys,
and picks those that its layer reads. For a step of the engine the module hands its queries to the
cache, which scores each part of a sequence where it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.latent_reads import LatentReads


@dataclass(frozen=True, slots=True)
class HeadSumIndex:
    """Index of DeepSeek V3.2: a weighted sum of the positive scores of all index heads."""

    queries: mx.array
    """Queries of the new tokens, (b, heads, n, dim)."""
    weights: mx.array
    """Weights of the heads, (b, heads, n, 1)."""
    budget: int

    def scores(self, row: int, token: int, keys: mx.array) -> mx.array:
        """Return the scores (n,) of index keys (1, n, dim) for a new token."""
        place = slice(row, row + 1), slice(None), slice(token, token + 1)
        products = mx.maximum(self.queries[place] @ keys[None].swapaxes(-1, -2), 0)
        return (products * self.weights[place]).sum(axis=1).reshape(-1)


def _deepseek(
    module: Any, x: mx.array, qr: mx.array, cache: LatentReads
) -> tuple[HeadSumIndex, mx.array]:
    """Return the index of a step, and the index keys of its tokens, (b, 1, n, dim)."""
    b, s, _ = x.shape
    queries = module.wq_b(qr).reshape(b, s, module.n_heads, module.head_dim).swapaxes(1, 2)
    keys = module.k_norm(module.wk(x)).reshape(b, 1, s, module.head_dim)
    queries = module.rope(queries, offset=cache.offset)
    keys = module.rope(keys, offset=cache.offset)
    weights = module.weights_proj(x) * (module.n_heads**-0.5 * module.softmax_scale)
    weights = weights.swapaxes(-1, -2)[..., None]
    return HeadSumIndex(queries, weights, module.index_topk), keys


_Form = Callable[[Any, mx.array, mx.array, LatentReads], tuple[HeadSumIndex, mx.array]]
FORMS: dict[tuple[str, str], _Form] = {
    ("mlx_lm.models.deepseek_v32", "Indexer"): _deepseek,
    ("mlx_vlm.models.deepseek_v32.language", "Indexer"): _deepseek,
}
"""Function that reads each class of indexes, by its module and name."""


def has_index(model: nn.Module) -> bool:
    """Return whether layers of an attached model choose by an index of their own."""
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    return any(chooser(base) for part in modules for base in type(part).__mro__)


def shares_choice(model: nn.Module) -> bool:
    """Return whether layers without an index take the choice of an earlier layer, as in GLM 5.2.

    Such a model hands the chosen tokens on itself, and a `Chooser` returns none.
    """
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    return any(getattr(part, "indexer", part) is None for part in modules)


@functools.cache
def chooser(kind: Any) -> type[nn.Module] | None:
    """Return a subclass of an index that chooses by `LatentReads`; None for other classes."""
    known = FORMS.get((kind.__module__, kind.__name__))
    if known is None:
        return None
    form: _Form = known

    class Chooser(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
            if not isinstance(cache, LatentReads):
                return super().__call__(x, qr, mask, cache)
            cache.choose(*form(self, x, qr, cache))
            return None  # the layer's cache has the choice

    return Chooser
