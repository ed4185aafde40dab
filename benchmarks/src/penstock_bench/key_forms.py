"""Model transformations that keep its function, with keys that are harder to quantize.

Two properties of real models' keys break codecs: a few channels that are large in every token, and
a constant offset. Both can be added to a llama without changing its function, so any additional
loss comes from the keys alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock_bench.bench_settings import OUTLIER_SCALE

OUTLIER_PAIRS = 2
"""Pairs of outlier channels in each key head."""
BIAS_SCALE = 30.0
"""Size of the constant over the root mean square of keys that `k_proj` makes of a normed input."""
BIAS_PAIRS = 4


class KeyForm(StrEnum):
    """Kind of keys that a model computes."""

    PLAIN = "plain"
    OUTLIERS = "outliers"
    BIASED = "biased"


def reform(model: Any, form: KeyForm, outlier_scale: float = OUTLIER_SCALE) -> None:
    """Transform a model in place so that its keys change but not its function.

    outliers: the rows of `k_proj` for some channels are multiplied by `outlier_scale`, and the same
        rows
    of `q_proj` divided by it. RoPE rotates channel i with channel i + head_dim / 2, so both
    channels of a pair get the same scale, and every product of a query and a key is unchanged;
    bitwise, if the scale is a power of two.

    biased: a constant is added to the keys of a head *after* RoPE. It adds the same number to all
        scores
    of a query, which softmax ignores. Before RoPE it would be rotated by each key's position, and
    not cancel.

    Raises:
        ModelError: the layers differ from llama's.
    """
    if form is KeyForm.PLAIN:
        return
    for number, layer in enumerate(model.layers):
        attention = getattr(layer, "self_attn", None)
        _check(attention)
        if form is KeyForm.OUTLIERS:
            _scale(attention, number, outlier_scale)
        else:
            _bias(attention, number)
    mx.eval(model.parameters())


def _check(attention: Any) -> None:
    parts = [getattr(attention, name, None) for name in ("q_proj", "k_proj")]
    rope = getattr(attention, "rope", None)
    plain = isinstance(rope, nn.RoPE) and not rope.traditional and rope.dims == attention.head_dim
    if not plain or any(type(part) is not nn.Linear or "bias" in part for part in parts):
        raise ModelError("--form needs a llama model in full precision, with plain RoPE")


def _pairs(dim: int, count: int, layer: int) -> list[int]:
    """Return the first channels of `count` RoPE pairs, spread over all frequencies."""
    half = dim // 2
    return [(half * (2 * i + 1) // (2 * count) + layer) % half for i in range(count)]


def _scale(attention: Any, layer: int, scale: float) -> None:
    dim = attention.head_dim
    large = mx.ones((dim,))
    for first in _pairs(dim, OUTLIER_PAIRS, layer):
        large[first] = large[first + dim // 2] = scale
    keys, queries = attention.k_proj, attention.q_proj
    keys.weight = keys.weight * mx.tile(large, attention.n_kv_heads)[:, None]
    queries.weight = queries.weight / mx.tile(large, attention.n_heads)[:, None]


def _bias(attention: Any, layer: int) -> None:
    if attention.n_heads == attention.n_kv_heads:
        raise ModelError(
            "keys and queries cannot be told apart, because this model has as many "
            "KV heads as query heads"
        )
    dim = attention.head_dim
    signs = mx.zeros((dim,))
    for number, first in enumerate(_pairs(dim, BIAS_PAIRS, layer)):
        signs[first], signs[first + dim // 2] = (-1.0) ** number, (-1.0) ** (number + 1)
    # The norm before it makes inputs with a root mean square of about 1.
    size = mx.sqrt(mx.mean(attention.k_proj.weight**2) * attention.k_proj.weight.shape[1])
    bias = BIAS_SCALE * size * mx.broadcast_to(signs, (attention.n_kv_heads, 1, dim))
    attention.rope = BiasedRoPE(attention.rope, bias)


class BiasedRoPE(nn.Module):
    """RoPE, with a constant added to arrays that have the number of key heads.

    Args:
        rope: RoPE of the layer.
        bias: (kv_heads, 1, dim).
    """

    def __init__(self, rope: nn.RoPE, bias: mx.array) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope
        self.bias = bias

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate (batch, heads, tokens, dim); add the constant to keys."""
        transform_query: mx.array = self.rope(x, offset=offset)
        return transform_query + self.bias if x.shape[1] == self.bias.shape[0] else transform_query
