"""Parts of models that draft from another model's hidden states: attention, MLP, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.memory.heads import TOKEN_OFFSETS, DrafterSizes, drafter_tensor
from penstock.models.hidden_states import text_model


class DrafterAttention(nn.Module):
    """Attention whose keys and values can be written without attending.

    Args:
        inputs: number of values of an input vector.
        norms: whether queries and keys are normed.
        bias: whether the projections of queries, keys and values have a bias.
    """

    def __init__(
        self,
        inputs: int,
        sizes: DrafterSizes,
        rope: nn.Module,
        *,
        norms: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self._heads, self._kv_heads, self._scale = heads, kv_heads, dim**-0.5
        self.q_proj = nn.Linear(inputs, heads * dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, sizes.width, bias=False)
        self._norms = norms
        if norms:
            self.q_norm = nn.RMSNorm(dim, eps=sizes.eps)
            self.k_norm = nn.RMSNorm(dim, eps=sizes.eps)
        self.rope = rope

    def keep(self, x: mx.array, kv: Any) -> None:
        """Write the keys and values of tokens to their cache."""
        kv.update_and_fetch(*self._keys_and_values(x, kv.offset))

    def __call__(self, x: mx.array, kv: Any) -> mx.array:
        """Attend to the cached tokens and to `x`, as far as `kv.attend` lets them see each other.

        Returns (b, n, width).
        """
        offset, queries = kv.offset, _by_head(self.q_proj(x), self._heads)
        if self._norms:
            queries = self.q_norm(queries)
        queries = self.rope(queries.swapaxes(1, 2), offset=offset)
        keys, values = kv.update_and_fetch(*self._keys_and_values(x, offset))
        mixed = kv.attend(queries, keys, values, self._scale, kv.make_mask(x.shape[1]))
        y: mx.array = self.o_proj(mixed.swapaxes(1, 2).flatten(2))
        return y

    def _keys_and_values(self, x: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        keys = _by_head(self.k_proj(x), self._kv_heads)
        if self._norms:
            keys = self.k_norm(keys)
        values = _by_head(self.v_proj(x), self._kv_heads)
        return self.rope(keys.swapaxes(1, 2), offset=offset), values.swapaxes(1, 2)


class GatedMLP(nn.Module):
    def __init__(self, sizes: DrafterSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, inner = sizes.width, sizes.mlp_width
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def check_model(model: Any, width: int, read_layers: Callable[[int], Sequence[int]]) -> None:
    """Raise ModelError unless a model has hidden states as a drafter reads them.

    Args:
        width: length of a hidden state.
        read_layers: returns the numbers of the layers whose outputs are read of a model with so
            many.
    """
    text = text_model(model)
    inner: Any = getattr(text, "model", {})
    layers, args = getattr(inner, "layers", None), getattr(text, "args", None)
    kind = str(getattr(args, "model_type", type(model).__bases__[0].__module__.rpartition(".")[2]))
    own_width = getattr(args, "hidden_size", None)
    if not isinstance(layers, list) or own_width is None:
        layers = []
    if not layers or "embed_tokens" not in inner or kind.startswith("gemma"):
        raise ModelError(f"drafters that read hidden states are not supported with {kind}")
    read = read_layers(len(layers))
    if own_width != width or not all(0 <= number < len(layers) for number in read):
        raise ModelError(
            f"the drafter is one of another model: it reads the outputs of layers "
            f"{', '.join(map(str, read))} (the first is 0), vectors of {width:,} numbers; the "
            f"model has {len(layers)} layers, vectors of {own_width:,}"
        )


def drafter_weights(
    weights: Mapping[str, mx.array], of_model: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return weights of a drafter's folder under the names of a model with it.

    Floats get the dtype of the model's, as products of two kinds of halves would be in float32.
    """
    norms = (w.dtype for name, w in of_model.items() if name.endswith("norm.weight"))
    dtype = next((kind for kind in norms if mx.issubdtype(kind, mx.floating)), mx.float32)
    named = ((drafter_tensor(name), weight) for name, weight in weights.items())
    return {name: _as_loaded(name, weight, dtype) for name, weight in named if name is not None}


def _as_loaded(name: str, weight: mx.array, dtype: mx.Dtype) -> mx.array:
    if name.endswith(TOKEN_OFFSETS):
        return weight.astype(mx.int32)
    return weight.astype(dtype) if mx.issubdtype(weight.dtype, mx.floating) else weight


def _by_head(x: mx.array, heads: int) -> mx.array:
    return mx.unflatten(x, -1, (heads, -1))
