"""Decoder layers with quantized weights as two compiled parts, before and after attention.

mlx-lm's layers are recognized by class, and computed as its code computes them. The first part
ends with the rotated queries and keys; the cache and attention run between the parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.attention.reads import MaskRequest, Reads
from penstock.plugins.cpu.layer_loops import PartTable, part_loops
from penstock.plugins.cpu.ordered_attention import attend_buffer, in_order
from penstock.plugins.cpu.packed_output import OutputParts
from penstock.plugins.cpu.packed_products import (
    EXACT,
    ROUNDED,
    Floats,
    Job,
    PackedMatrix,
    PackedModule,
    can_multiply,
    packed_matrix,
    padded_bias,
    rows_address,
    rows_of,
)
from penstock.plugins.cpu.packed_rope import RotaryPositions
from penstock.plugins.cpu.packed_steps import LayersTogether, share_angles
from penstock.plugins.cpu.tile_products import TILE_ROWS

ATTENTION = "scaled_dot_product_attention"
O_PROJ, DOWN = "o_proj", "down_proj"
NORMS = ("q_norm", "k_norm")
FUSED_BEFORE, FUSED_RAISING = "qkv_proj", "gate_up_proj"
CODES = ("weight", "scales", "biases")


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """Structure of a class of mlx-lm's decoder layers."""

    before: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of the linear layers before attention; a single name is a fused layer."""
    raising: tuple[str, ...] = ("gate_proj", "up_proj")
    """Names of the gate and up projections; a single name is a fused layer."""
    activation: str = "silu"
    """Activation of the gate: `silu` or `gelu` (approximated)."""
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
        before=(FUSED_BEFORE,), raising=(FUSED_RAISING,)
    ),
    "mlx_lm.models.gemma2.TransformerBlock": GEMMA,
    "mlx_lm.models.gemma3_text.TransformerBlock": GEMMA,
}
"""Structures of supported layers, by qualified class name."""


@dataclass(frozen=True, slots=True)
class PackedProjection:
    """Quantized weights and bias of a linear layer."""

    matrix: PackedMatrix
    bias: Floats | None

    @classmethod
    def of(cls, module: nn.Module, rows: slice) -> PackedProjection:
        """Pack some rows of an MLX module, for which `can_multiply` must be true."""
        matrix, bias = packed_matrix(module, rows), module.get("bias")
        return cls(matrix, None if bias is None else padded_bias(bias[rows]))


def form_of(module: nn.Module) -> DecoderForm | None:
    """Return the structure of a decoder layer; None if its class is unknown."""
    return FORMS.get(f"{type(module).__module__}.{type(module).__name__}")


def packed_layer(
    layer: nn.Module, *, exact: bool, read: Callable[[str], None]
) -> PackedDecoderLayer | None:
    """Return a packed replacement of a decoder layer; None if it is unknown or not quantized.

    The replacement takes the layer's attention module, and the weights are removed one by one.

    Args:
        layer: layer of mlx-lm.
        exact: whether activations have 24 bits, not 16.
        read: see `WeightPacker`; takes names within the layer.
    """
    form = form_of(layer)
    if form is None:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    linears = {f"self_attn.{name}": attention[name] for name in (*form.before, O_PROJ)}
    linears |= {f"mlp.{name}": mlp[name] for name in (*form.raising, DOWN)}
    if not all(map(can_multiply, linears.values())):
        return None
    fused = {FUSED_BEFORE: (heads, kv_heads, kv_heads), FUSED_RAISING: (1, 1)}
    projections = []
    for name, module in linears.items():
        read(name)
        parts = _rows_of_parts(module, fused.get(name.rpartition(".")[2], (1,)))
        projections += [PackedProjection.of(module, rows) for rows in parts]
        for key in CODES:
            module.pop(key, None)
    return PackedDecoderLayer(layer, form, projections, exact=exact)


def _rows_of_parts(module: Any, sizes: Sequence[int]) -> list[slice]:
    """Return the rows of each part of a layer, split in proportion to `sizes`."""
    if len(sizes) == 1:
        return [slice(None)]
    ends = [0, *np.cumsum(sizes) * (len(module.weight) // sum(sizes))]
    return [slice(int(i), int(j)) for i, j in pairwise(ends)]


class PackedDecoderLayer(PackedModule):
    """Decoder layer computed by compiled code, immediately, unlike MLX's lazy arrays."""

    def __init__(
        self,
        layer: nn.Module,
        form: DecoderForm,
        projections: Sequence[PackedProjection],
        *,
        exact: bool,
    ) -> None:
        """Replace a layer, whose attention module loses its weights.

        Args:
            layer: decoder layer of mlx-lm.
            form: structure of the layer.
            projections: weights of queries, keys, values, attention output, gate, up and down.
            exact: whether activations have 24 bits instead of 16.
        """
        attention = layer.self_attn
        rotation = RotaryPositions.of(attention.rope)
        parts = LayerParts(layer, form, projections, rotation, exact=exact)
        super().__init__(
            [projection.matrix for projection in projections],
            exact=exact,
            vectors=parts.vectors,
            settings=(form, parts.constants.tolist()),
        )
        for name, value in vars(layer).items():  # the model may read them, such as `use_sliding`
            if not name.startswith("_"):
                setattr(self, name, value)
        self._attention_module = sys.modules[type(attention).__module__]
        self._soft_cap = float(getattr(attention, "attn_logit_softcapping", 0))
        self._parts = parts
        self.form = form
        self.exact = exact
        self._together: tuple[LayersTogether, int] | None = None
        for name in [key for key in attention if key in (*form.before, O_PROJ, *NORMS)]:
            attention.pop(name)
        self.self_attn = attention

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Compute the layer of (b, n, width) like mlx-lm's layer."""
        if self._together is not None and isinstance(mask, MaskRequest):
            together, place = self._together
            x, done = together.compute(place, x, cache, cache.attention_window.within(mask.window))
            if done:
                return x
        b, n, _ = x.shape
        rows = rows_of(x)
        offset = 0 if cache is None else cache.offset
        rotation, angles = self._parts.rotation, None
        if rotation is not None:
            positions = (np.asarray(offset).reshape(-1, 1) + np.arange(n)).ravel()
            if len(positions) < b * n:
                positions = np.tile(positions, b)
            angles = rotation.angles(positions)
        sides = self._parts.before(rows, angles)
        queries, keys, values = (
            mx.array(side).reshape(b, n, *side.shape[1:]).transpose(0, 2, 1, 3) for side in sides
        )
        if rotation is None:
            queries, keys = (self.self_attn.rope(side, offset=offset) for side in (queries, keys))
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
            if getattr(cache, "last", False):  # the output is not read
                return x
        mixed = rows_of(self._attend(queries, keys, values, mask, cache).transpose(0, 2, 1, 3))
        return mx.array(self._parts.behind(mixed, rows)).reshape(x.shape)

    @property
    def parts(self) -> LayerParts:
        """The compiled code before and after attention, for computing several layers at once."""
        return self._parts

    @property
    def attends_together(self) -> bool:
        """Whether the layer can be computed in one job with other layers."""
        return self._parts.rotation is not None and not self._soft_cap

    def join(self, together: LayersTogether, place: int) -> None:
        """Have `together` compute steps of all layers in one job; this is layer `place` of it."""
        self._together = together, place

    def _attend(self, queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> mx.array:
        """Attend with a fixed summation order, so that results do not depend on batch or chunk."""
        scale, soft_cap = self.self_attn.scale, self._soft_cap
        mixed: mx.array | None = None
        if isinstance(keys, mx.array) and not isinstance(cache, Reads):
            if hasattr(cache, "attend") and not soft_cap:  # the cache may read only a part
                mixed = cache.attend(queries, keys, values, scale, mask)
            if mixed is None and _is_causal(mask, queries.shape[2], keys.shape[2]):
                mixed = attend_buffer(queries, keys, values, scale, soft_cap=soft_cap)
            if mixed is None and soft_cap:
                return _attend_capped(queries, keys, values, scale, mask, soft_cap)
        if mixed is None:
            # Looked up on each call, because `layer_seams.attach` replaces it.
            attend = getattr(self._attention_module, ATTENTION)
            with in_order():
                mixed = attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
        return mixed


def compute_together(
    layers: Sequence[PackedDecoderLayer], output: OutputParts | None = None
) -> LayersTogether:
    """Let the layers of a model compute a decode step or prefill chunk in one job.

    In decode steps, the job includes the final norm and the output layer, if given.
    """
    share_angles([layer.parts for layer in layers])
    together = LayersTogether(
        [layer.parts for layer in layers], [layer.self_attn.scale for layer in layers]
    )
    together.output = output
    for place, layer in enumerate(layers):
        layer.join(together, place)
    return together


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


class LayerParts:
    """Compiled code of a decoder layer before and after attention."""

    def __init__(
        self,
        layer: nn.Module,
        form: DecoderForm,
        projections: Sequence[PackedProjection],
        rotation: RotaryPositions | None,
        *,
        exact: bool,
    ) -> None:
        """Prepare the jobs; arguments as for `PackedDecoderLayer`, `rotation` None for no RoPE."""
        attention = layer.self_attn
        digits = EXACT if exact else ROUNDED
        self._projections = projections
        self.heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
        queries, keys, values, output, gate, _, down = (x.matrix for x in projections)
        self.width = down.rows
        self.widths = [len(side.tiles) * TILE_ROWS for side in (queries, keys, values)]
        self.dims = (queries.rows // attention.n_heads, values.rows // attention.n_kv_heads)
        self.rotation = rotation
        self.hidden = gate.rows
        self._output_columns = output.columns
        self._pairs = 0 if rotation is None else rotation.pairs
        norms = [attention.get(name) for name in NORMS]
        epsilon = next((float(norm.eps) for norm in norms if norm is not None), 0.0)
        factor = float(getattr(layer, "residual_multiplier", 1.0))
        self.constants: Floats = np.array([layer.input_layernorm.eps, epsilon, factor], np.float32)
        self.vectors: dict[str, Floats | None] = {
            f"bias {number}": projection.bias for number, projection in enumerate(projections)
        }
        """Biases, and the factors of norms, by name; None if missing."""
        shared = {PartTable.WIDTH: self.width, PartTable.CONSTANTS: self.constants.ctypes.data}
        one = int(form.from_one)
        linears = [x.matrix.linear(digits, x.bias) for x in projections]
        _, before, behind = part_loops()
        self.before_job = Job(
            before, linears[:3], digits, self.width,
            {
                **shared,
                PartTable.NORM: self._norm("input", layer.input_layernorm, one),
                PartTable.STRIDE: sum(self.widths),
                PartTable.LINEARS: 3,
                PartTable.Q_NORM: self._norm(NORMS[0], norms[0], one),
                PartTable.K_NORM: self._norm(NORMS[1], norms[1], one),
                PartTable.HEADS: attention.n_heads,
                PartTable.KV_HEADS: attention.n_kv_heads,
                PartTable.DIM: self.dims[0],
                PartTable.KEYS: self.widths[0],
                PartTable.PAIRS: self._pairs,
                PartTable.NEIGHBORS: int(rotation is not None and rotation.neighbors),
            },
        )  # fmt: skip
        columns = max(output.columns, self.width, down.columns)
        self.behind_job = Job(
            behind, linears[3:], digits, columns,
            {
                **shared,
                PartTable.NORM: self._norm("mlp", layer[form.mlp_norm], one),
                PartTable.MIXED_NORM: self._norm("mixed", layer.get(form.mixed_norm), one),
                PartTable.LOWERED_NORM: self._norm("lowered", layer.get(form.lowered_norm), one),
                PartTable.GELU: int(form.activation == "gelu"),
            },
        )  # fmt: skip

    def before(self, x: Floats, angles: Floats | None) -> list[Floats]:
        """Return the queries, keys and values, (n, heads, dim) each.

        Args:
            x: the layer's input, (n, width).
            angles: cosines and sines of the rows' positions, (2, n, 1, pairs); None for no RoPE.
        """
        n = len(x)
        result = np.empty((n, sum(self.widths)), np.float32)
        places = {PartTable.X: rows_address(x, self.width), PartTable.RESULT: result.ctypes.data}
        if angles is not None and angles.size:
            by_row = angles.reshape(2 * n, angles.shape[-1])
            places[PartTable.ANGLES] = rows_address(by_row, self._pairs)
        self.before_job.run(n, self.width, places)
        sides: list[Floats] = []
        start = 0
        for heads, width in zip(self.heads, self.widths, strict=True):
            side = result[:, start : start + width]
            dim = self._projections[len(sides)].matrix.rows // heads
            sides.append(side[:, : heads * dim].reshape(n, heads, dim))
            start += width
        return sides

    def behind(self, mixed: Floats, x: Floats) -> Floats:
        """Return the layer's output, (n, width).

        Args:
            mixed: output of attention, (n, heads x dim) or (n, heads, dim).
            x: the layer's input, (n, width).
        """
        result = np.empty((len(x), self.width), np.float32)
        mixed = np.ascontiguousarray(mixed).reshape(len(x), -1)
        places = {
            PartTable.X: rows_address(x, self.width),
            PartTable.MIXED: rows_address(mixed, self._output_columns),
            PartTable.RESULT: result.ctypes.data,
        }
        self.behind_job.run(len(x), self.width, places, self.width + 2 * self.hidden)
        return result

    def _norm(self, name: str, norm: Any, one: int) -> int:
        """Store a norm's weights plus `one`; return their address, 0 if there is no norm."""
        if norm is None:
            return 0
        weights = np.asarray(norm.weight.astype(mx.float32)) + np.float32(one)
        self.vectors[name] = weights = np.ascontiguousarray(weights)
        return int(weights.ctypes.data)
