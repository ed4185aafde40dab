"""Decoder layers as two graphs, before and behind attention, over weights in codes.

The layers are mlx-lm's; they are recognized by their class, and computed as its code computes them.
Rope, the cache and attention between the graphs are the model's and the engine's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.attention.reads import Reads
from penstock.plugins.cpu.onnx_graph import Array, Graph
from penstock.plugins.cpu.ordered_attention import attend_buffer, in_order
from penstock.plugins.cpu.packed_products import (
    PackedCodes,
    PackedModule,
    add_products,
    packed_codes,
    rows_of,
    run_rows,
)

ATTENTION = "scaled_dot_product_attention"
FORMS = frozenset(
    {
        "mlx_lm.models.llama.TransformerBlock",  # and mistral's, smollm3's
        "mlx_lm.models.qwen2.TransformerBlock",
        "mlx_lm.models.qwen3.TransformerBlock",
    }
)
"""Classes of layers with one norm in front of attention and one in front of a gated silu."""
BEFORE = ("q_proj", "k_proj", "v_proj")
NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class PackedProjection:
    """Weights in codes and bias of a linear layer."""

    matrix: PackedCodes
    bias: Array | None

    @classmethod
    def of(cls, module: nn.Module) -> PackedProjection | None:
        """Return those of a module of MLX; None if it has no codes that are packed."""
        matrix = packed_codes(module)
        if matrix is None:
            return None
        bias = module.get("bias")
        return cls(matrix, None if bias is None else np.array(bias.astype(mx.float32)))


def is_known(module: nn.Module) -> bool:
    """Tell whether a module is a decoder layer of a known form."""
    return f"{type(module).__module__}.{type(module).__name__}" in FORMS


def packed_layer(layer: nn.Module, *, exact: bool) -> PackedDecoderLayer | None:
    """Return the packed replacement of a decoder layer; None if its form is unknown or not coded.

    It takes over the layer's attention, without the weights.
    """
    if not is_known(layer):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    names = ((attention, BEFORE), (attention, ("o_proj",)), (mlp, ("gate_proj", "up_proj")))
    modules = [module[name] for module, part in names for name in part] + [mlp.down_proj]
    projections = [projection for x in modules if (projection := PackedProjection.of(x))]
    if len(projections) < len(modules):
        return None
    return PackedDecoderLayer(layer, projections, exact=exact)


class PackedDecoderLayer(PackedModule):
    """A decoder layer; what is in front of its attention and behind it is computed when called."""

    def __init__(
        self, layer: nn.Module, projections: Sequence[PackedProjection], *, exact: bool
    ) -> None:
        """Make the graphs.

        Args:
            layer: of mlx-lm.
            projections: those of queries, keys, values, output, gate, up and down.
            exact: whether rows stay in float32.
        """
        super().__init__([projection.matrix for projection in projections], exact=exact)
        for name, value in vars(layer).items():  # such as `use_sliding`, which the model reads
            if not name.startswith("_"):
                setattr(self, name, value)
        attention = layer.self_attn
        self._attention_module = sys.modules[type(attention).__module__]
        queries, keys, values, output, gate, up, down = projections
        heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
        width = down.matrix.rows
        self._heads = heads

        graph, sums = Graph(), dict[int, str]()
        normed = _rms_norm(graph, "x", layer.input_layernorm)
        parts = add_projections(graph, normed, sums, (queries, keys, values), exact=exact)
        for number, name in enumerate(NORMS):
            if name in attention:
                parts[number] = _norm_heads(graph, parts[number], heads[number], attention[name])
        sides = [projection.matrix.rows for projection in (queries, keys, values)]
        self._before = graph.session({"x": width}, dict(zip(parts, sides, strict=True)))

        graph = Graph()
        (mixed,) = add_projections(graph, "mixed", {}, (output,), exact=exact)
        residual = graph.node("Add", "x", mixed)
        normed = _rms_norm(graph, residual, layer.post_attention_layernorm)
        gated, raised = add_projections(graph, normed, {}, (gate, up), exact=exact)
        silu = graph.node("Mul", gated, graph.node("Sigmoid", gated))
        hidden = graph.node("Mul", silu, raised)
        (lowered,) = add_projections(graph, hidden, {}, (down,), exact=exact)
        result = graph.node("Add", residual, lowered)
        self._behind = graph.session({"mixed": output.matrix.columns, "x": width}, {result: width})

        self.packed_bytes = self._before.weight_bytes + self._behind.weight_bytes

        for name in [key for key in attention if key in (*BEFORE, "o_proj", *NORMS)]:
            attention.pop(name)
        self.self_attn = attention

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Compute the layer of (b, n, width), as the layer of mlx-lm does."""
        b, n, width = x.shape
        rows = rows_of(x)
        queries, keys, values = (
            mx.array(side).reshape(b, n, heads, -1).transpose(0, 2, 1, 3)
            for side, heads in zip(run_rows(self._before, rows), self._heads, strict=True)
        )
        attention = self.self_attn
        offset = 0 if cache is None else cache.offset
        queries, keys = (attention.rope(side, offset=offset) for side in (queries, keys))
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
            if getattr(cache, "last", False):  # nothing behind is read
                return x
        mixed = self._attend(queries, keys, values, mask, cache)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(b * n, -1)
        (result,) = run_rows(self._behind, rows_of(mixed), rows)
        return mx.array(result).reshape(b, n, width)

    def _attend(self, queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> mx.array:
        """Attend in order, so that rounded rows have the same bits in any batch and chunk."""
        scale = self.self_attn.scale
        mixed: mx.array | None = None
        is_causal = queries.shape[2] == 1 if mask is None else isinstance(mask, str)
        if is_causal and isinstance(keys, mx.array) and not isinstance(cache, Reads):
            mixed = attend_buffer(queries, keys, values, scale)
        if mixed is None:
            # The name as it is bound now, by `layer_seams.attach`, too.
            attend = getattr(self._attention_module, ATTENTION)
            with in_order():
                mixed = attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
        return mixed


# ---- nodes of graphs


def add_projections(
    graph: Graph,
    x: str,
    sums: dict[int, str],
    projections: Sequence[PackedProjection],
    *,
    exact: bool,
) -> list[str]:
    """Add linear layers of the same rows to a graph; return the names of their results."""
    matrices = [projection.matrix for projection in projections]
    products = add_products(graph, x, sums, matrices, exact=exact)
    return [
        product if bias is None else str(graph.node("Add", product, graph.weight(bias)))
        for product, bias in zip(products, (x.bias for x in projections), strict=True)
    ]


def _rms_norm(graph: Graph, x: str, norm: nn.Module) -> str:
    weight = np.array(norm.weight.astype(mx.float32))
    normed: str = graph.node(
        "SimplifiedLayerNormalization", x, graph.weight(weight), axis=-1, epsilon=float(norm.eps)
    )
    return normed


def _norm_heads(graph: Graph, x: str, heads: int, norm: nn.Module) -> str:
    """Add a norm over each head of rows."""
    apart = graph.weight(np.array([0, heads, norm.weight.size], np.int64))
    normed = _rms_norm(graph, graph.node("Reshape", x, apart), norm)
    together = graph.weight(np.array([0, heads * norm.weight.size], np.int64))
    return str(graph.node("Reshape", normed, together))
