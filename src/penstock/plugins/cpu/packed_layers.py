"""Decoder layers over quantized weights as two graphs, before and after attention.

mlx-lm's layers are recognized by their class and computed like its code does. RoPE, the cache and
attention run between the graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.attention.reads import DecodeReads, MaskRequest, Reads
from penstock.plugins.cpu.compiled import has_numba
from penstock.plugins.cpu.onnx_graph import Array, Graph, RowSession
from penstock.plugins.cpu.ordered_attention import attend_buffer, decode_rows, in_order
from penstock.plugins.cpu.packed_products import (
    Floats,
    PackedCodes,
    PackedModule,
    add_products,
    add_split,
    packed_codes,
    rows_of,
    run_rows,
)
from penstock.plugins.cpu.packed_rope import RotaryPositions

ATTENTION = "scaled_dot_product_attention"
O_PROJ, DOWN = "o_proj", "down_proj"
NORMS = ("q_norm", "k_norm")
EXACT_SIDES = (4,)
"""Bit widths for which queries, keys and values are always computed from float32 rows.

Rounding costs most there: the KL divergence of SmolLM2's next token is 0.0026 without it, 0.0040
with it. The operator has no fast float32 path for 8 bits.
"""


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """Structure of mlx-lm's decoder layers of a class."""

    before: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Linear layers before attention; a single name is a fused layer."""
    raising: tuple[str, ...] = ("gate_proj", "up_proj")
    """Linear layers of gate and up projection; a single name is a fused layer."""
    activation: str = "silu"
    """Activation of the gate: `silu`, or approximate `gelu`."""
    mlp_norm: str = "post_attention_layernorm"
    """Norm before the MLP."""
    mixed_norm: str | None = None
    """Norm of the attention output; None without one."""
    lowered_norm: str | None = None
    """Norm of the MLP output; None without one."""
    from_one: bool = False
    """Whether norms multiply by 1 + weight."""


GEMMA = DecoderForm(
    activation="gelu",
    mlp_norm="pre_feedforward_layernorm",
    mixed_norm="post_attention_layernorm",
    lowered_norm="post_feedforward_layernorm",
    from_one=True,
)
FORMS = {
    "mlx_lm.models.llama.TransformerBlock": DecoderForm(),  # and mistral's, smollm3's
    "mlx_lm.models.qwen2.TransformerBlock": DecoderForm(),
    "mlx_lm.models.qwen3.TransformerBlock": DecoderForm(),
    "mlx_lm.models.granite.TransformerBlock": DecoderForm(),
    "mlx_lm.models.phi3.TransformerBlock": DecoderForm(
        before=("qkv_proj",), raising=("gate_up_proj",)
    ),
    "mlx_lm.models.gemma2.TransformerBlock": GEMMA,
    "mlx_lm.models.gemma3_text.TransformerBlock": GEMMA,
}
"""Structures of layers, by class."""


@dataclass(frozen=True, slots=True)
class PackedProjection:
    """Quantized weights and bias of a linear layer."""

    matrix: PackedCodes
    bias: Array | None

    @classmethod
    def of(cls, module: nn.Module) -> PackedProjection | None:
        """Return the weights of an MLX module; None if they cannot be packed."""
        matrix = packed_codes(module)
        if matrix is None:
            return None
        bias = module.get("bias")
        return cls(matrix, None if bias is None else np.array(bias.astype(mx.float32)))


def form_of(module: nn.Module) -> DecoderForm | None:
    """Return the structure of a decoder layer; None if its class is unknown."""
    return FORMS.get(f"{type(module).__module__}.{type(module).__name__}")


def packed_layer(layer: nn.Module, *, exact: bool) -> PackedDecoderLayer | None:
    """Return the packed replacement of a decoder layer; None if unknown or not quantized.

    It takes over the layer's attention, without the weights.
    """
    form = form_of(layer)
    if form is None:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    modules = [attention[name] for name in (*form.before, O_PROJ)]
    modules += [mlp[name] for name in (*form.raising, DOWN)]
    projections = [projection for x in modules if (projection := PackedProjection.of(x))]
    if len(projections) < len(modules):
        return None
    return PackedDecoderLayer(layer, form, projections, exact=exact)


class PackedDecoderLayer(PackedModule):
    """Decoder layer whose parts before and after attention are computed when called."""

    def __init__(
        self,
        layer: nn.Module,
        form: DecoderForm,
        projections: Sequence[PackedProjection],
        *,
        exact: bool,
    ) -> None:
        """Build the graphs.

        Args:
            layer: layer of mlx-lm.
            form: structure of the layer.
            projections: those before attention, of its output, of gate and up, and down.
            exact: whether activations stay in float32.
        """
        super().__init__([projection.matrix for projection in projections], exact=exact)
        for name, value in vars(layer).items():  # such as `use_sliding`, which the model reads
            if not name.startswith("_"):
                setattr(self, name, value)
        attention = layer.self_attn
        self._attention_module = sys.modules[type(attention).__module__]
        self._heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
        self._soft_cap = float(getattr(attention, "attn_logit_softcapping", 0))
        self._rotation = RotaryPositions.of(attention.rope)
        parts = len(form.before)
        graphs = LayerGraphs(layer, form, exact=exact)
        self._before = graphs.before(projections[:parts], self._heads)
        self._behind = graphs.behind(
            projections[parts], projections[parts + 1 : -1], projections[-1]
        )
        self.packed_bytes = self._before.weight_bytes + self._behind.weight_bytes

        for name in [key for key in attention if key in (*form.before, O_PROJ, *NORMS)]:
            attention.pop(name)
        self.self_attn = attention

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Compute the layer of (b, n, width) like mlx-lm's layer."""
        b, n, _ = x.shape
        rows = rows_of(x)
        offset = 0 if cache is None else cache.offset
        sides = [
            side.reshape(b * n, heads, -1)
            for side, heads in zip(run_rows(self._before, rows), self._heads, strict=True)
        ]
        rotation = self._rotation
        if rotation is not None:
            positions = (np.asarray(offset).reshape(-1, 1) + np.arange(n)).ravel()
            if len(positions) < b * n:
                positions = np.tile(positions, b)
            sides[:2] = rotation.rotated(sides[:2], positions)
            mixed = self._decoded(sides, mask, cache)
            if mixed is not None:
                return self._finished(mixed, rows, x)
        queries, keys, values = (
            mx.array(side).reshape(b, n, *side.shape[1:]).transpose(0, 2, 1, 3) for side in sides
        )
        if rotation is None:
            queries, keys = (self.self_attn.rope(side, offset=offset) for side in (queries, keys))
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
            if getattr(cache, "last", False):  # nothing behind is read
                return x
        result = self._attend(queries, keys, values, mask, cache)
        return self._finished(rows_of(result.transpose(0, 2, 1, 3)), rows, x)

    def _finished(self, mixed: Floats, rows: Floats, x: mx.array) -> mx.array:
        """Compute the part after attention, from its output and the layer's input."""
        (result,) = run_rows(self._behind, mixed.reshape(len(rows), -1), rows)
        return mx.array(result).reshape(x.shape)

    def _decoded(self, sides: Sequence[Floats], mask: Any, cache: Any) -> Floats | None:
        """Append and attend on the step's own memory; None if MLX arrays are needed."""
        if not isinstance(cache, DecodeReads) or not isinstance(mask, MaskRequest):
            return None
        if not has_numba() or self._soft_cap:
            return None
        window = cache.attention_window.within(mask.window)
        return decode_rows(cache.step, cache.layer, window, sides, self.self_attn.scale)

    def _attend(self, queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> mx.array:
        """Attend with a fixed summation order, so that results do not depend on batch or chunk."""
        scale, soft_cap = self.self_attn.scale, self._soft_cap
        mixed: mx.array | None = None
        if isinstance(keys, mx.array) and not isinstance(cache, Reads):
            if _is_causal(mask, queries.shape[2], keys.shape[2]):
                mixed = attend_buffer(queries, keys, values, scale, soft_cap=soft_cap)
            if mixed is None and soft_cap:
                return _attend_capped(queries, keys, values, scale, mask, soft_cap)
        if mixed is None:
            # The name as it is bound now, by `layer_seams.attach`, too.
            attend = getattr(self._attention_module, ATTENTION)
            with in_order():
                mixed = attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
        return mixed


def _is_causal(mask: Any, n: int, m: int) -> bool:
    """Return whether a mask is causal for the last n of m columns."""
    if mask is None or isinstance(mask, str):
        return n == 1 or mask is not None
    if mask.dtype != mx.bool_ or mask.size != n * m:
        return False
    return np.array_equal(np.asarray(mask).reshape(n, m), np.tri(n, m, m - n, bool))


def _attend_capped(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, soft_cap: float
) -> mx.array:
    """Attend with logit soft-capping as in Gemma 2, (b, heads, n, d)."""
    b, heads, n, dim = queries.shape
    grouped = (queries * scale).reshape(b, keys.shape[1], -1, n, dim)
    keys, values = mx.expand_dims(keys, 2), mx.expand_dims(values, 2)
    scores = soft_cap * mx.tanh(grouped @ keys.swapaxes(-1, -2) / soft_cap)
    if mask is not None:
        if mask.ndim == 4:
            mask = mx.expand_dims(mask, 2)
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    mixed = mx.softmax(scores, precise=True, axis=-1) @ values
    return mixed.reshape(b, heads, n, -1)


class LayerGraphs:
    """Builder of the two graphs of a decoder layer."""

    def __init__(self, layer: nn.Module, form: DecoderForm, *, exact: bool) -> None:
        self._layer = layer
        self._form = form
        self._exact = exact

    def before(self, projections: Sequence[PackedProjection], heads: Sequence[int]) -> RowSession:
        """Return the graph before attention: norm, and projections to queries, keys and values."""
        graph, attention = Graph(), self._layer.self_attn
        width = projections[0].matrix.columns
        normed = self._norm(graph, "x", self._layer.input_layernorm)
        exact = self._exact or all(x.matrix.bits in EXACT_SIDES for x in projections)
        sides = add_projections(graph, normed, {}, projections, exact=exact)
        widths = [projection.matrix.rows for projection in projections]
        if len(sides) == 1:
            dim = widths[0] // sum(heads)
            widths = [dim * count for count in heads]
            sides = add_split(graph, sides[0], widths)
        for number, name in enumerate(NORMS):
            if name in attention:
                sides[number] = self._norm_heads(
                    graph, sides[number], heads[number], attention[name]
                )
        return graph.session({"x": width}, dict(zip(sides, widths, strict=True)))

    def behind(
        self,
        output: PackedProjection,
        raising: Sequence[PackedProjection],
        down: PackedProjection,
    ) -> RowSession:
        """Return the graph after attention, from its output and the layer's input."""
        graph, layer, form, exact = Graph(), self._layer, self._form, self._exact
        width, hidden_width = down.matrix.rows, down.matrix.columns
        (mixed,) = add_projections(graph, "mixed", {}, (output,), exact=exact)
        residual = self._add(graph, "x", mixed, form.mixed_norm)
        normed = self._norm(graph, residual, layer[form.mlp_norm])
        raised = add_projections(graph, normed, {}, raising, exact=exact)
        if len(raised) == 1:
            raised = add_split(graph, raised[0], [hidden_width, hidden_width])
        hidden = graph.node("Mul", _activated(graph, raised[0], form.activation), raised[1])
        (lowered,) = add_projections(graph, hidden, {}, (down,), exact=exact)
        result = self._add(graph, residual, lowered, form.lowered_norm)
        inputs = {"mixed": output.matrix.columns, "x": width}
        return graph.session(inputs, {result: width})

    def _add(self, graph: Graph, x: str, y: str, norm: str | None) -> str:
        """Add the output `y` of attention or of the MLP to the residual stream `x`."""
        if norm is not None:
            y = self._norm(graph, y, self._layer[norm])
        factor = getattr(self._layer, "residual_multiplier", 1.0)
        if factor != 1.0:
            y = graph.node("Mul", y, graph.weight(np.array([factor], np.float32)))
        return str(graph.node("Add", x, y))

    def _norm(self, graph: Graph, x: str, norm: nn.Module) -> str:
        weight = np.array(norm.weight.astype(mx.float32)) + np.float32(self._form.from_one)
        normed: str = graph.node(
            "SimplifiedLayerNormalization",
            x,
            graph.weight(weight),
            axis=-1,
            epsilon=float(norm.eps),
        )
        return normed

    def _norm_heads(self, graph: Graph, x: str, heads: int, norm: nn.Module) -> str:
        """Add a norm over each head of rows."""
        apart = graph.weight(np.array([0, heads, norm.weight.size], np.int64))
        normed = self._norm(graph, graph.node("Reshape", x, apart), norm)
        together = graph.weight(np.array([0, heads * norm.weight.size], np.int64))
        return str(graph.node("Reshape", normed, together))


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


def _activated(graph: Graph, x: str, activation: str) -> str:
    if activation == "gelu":
        return str(graph.node("Gelu", x, approximate="tanh"))
    return str(graph.node("Mul", x, graph.node("Sigmoid", x)))
