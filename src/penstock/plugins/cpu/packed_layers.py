"""Decoder layers over quantized weights as two compiled parts, before and after attention.

mlx-lm's layers are recognized by their class and computed like its code does. The first part ends
with rotated queries and keys; the cache and attention run between the parts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from penstock.attention.reads import MaskRequest, Reads
from penstock.plugins.cpu.layer_loops import PartTable, part_loops
from penstock.plugins.cpu.ordered_attention import attend_buffer, in_order
from penstock.plugins.cpu.packed_products import (
    EXACT,
    ROUNDED,
    Floats,
    Job,
    PackedMatrix,
    PackedModule,
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

    matrix: PackedMatrix
    bias: Floats | None

    @classmethod
    def of(cls, module: nn.Module, rows: slice) -> PackedProjection | None:
        """Return some rows of an MLX module; None if they cannot be packed."""
        matrix = packed_matrix(module, rows)
        if matrix is None:
            return None
        bias = module.get("bias")
        return cls(matrix, None if bias is None else padded_bias(bias[rows]))


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
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    before = _rows_of_parts([attention[name] for name in form.before], (heads, kv_heads, kv_heads))
    behind = [(attention[O_PROJ], slice(None))]
    behind += _rows_of_parts([mlp[name] for name in form.raising], (1, 1))
    behind.append((mlp[DOWN], slice(None)))
    projections = []
    for module, rows in (*before, *behind):
        projection = PackedProjection.of(module, rows)
        if projection is None:
            return None
        projections.append(projection)
    return PackedDecoderLayer(layer, form, projections, exact=exact)


def _rows_of_parts(modules: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, slice]]:
    """Return the module and the rows of each part; a fused layer has parts of these sizes."""
    if len(modules) > 1:
        return [(module, slice(None)) for module in modules]
    (module,) = modules
    ends = [0, *np.cumsum(sizes) * (len(module.weight) // sum(sizes))]
    return [(module, slice(int(i), int(j))) for i, j in pairwise(ends)]


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
        """Take over the layer.

        Args:
            layer: layer of mlx-lm.
            form: structure of the layer.
            projections: queries, keys, values, output of attention, gate, up, and down.
            exact: whether activations have 24 bits, not 16.
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
        for name, value in vars(layer).items():  # such as `use_sliding`, which the model reads
            if not name.startswith("_"):
                setattr(self, name, value)
        self._attention_module = sys.modules[type(attention).__module__]
        self._soft_cap = float(getattr(attention, "attn_logit_softcapping", 0))
        self._parts = parts
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
            if getattr(cache, "last", False):  # nothing behind is read
                return x
        mixed = rows_of(self._attend(queries, keys, values, mask, cache).transpose(0, 2, 1, 3))
        return mx.array(self._parts.behind(mixed, rows)).reshape(x.shape)

    @property
    def parts(self) -> LayerParts:
        """The compiled parts of the layer."""
        return self._parts

    @property
    def attends_together(self) -> bool:
        """Whether a step can be computed together with other layers."""
        return self._parts.rotation is not None and not self._soft_cap

    def join(self, together: LayersTogether, place: int) -> None:
        """Compute steps together with other layers; this is the `place`-th."""
        self._together = together, place

    def _attend(self, queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> mx.array:
        """Attend with a fixed summation order, so that results do not depend on batch or chunk."""
        scale, soft_cap = self.self_attn.scale, self._soft_cap
        mixed: mx.array | None = None
        if isinstance(keys, mx.array) and not isinstance(cache, Reads):
            if hasattr(cache, "attend") and not soft_cap:  # it may read a part
                mixed = cache.attend(queries, keys, values, scale, mask)
            if mixed is None and _is_causal(mask, queries.shape[2], keys.shape[2]):
                mixed = attend_buffer(queries, keys, values, scale, soft_cap=soft_cap)
            if mixed is None and soft_cap:
                return _attend_capped(queries, keys, values, scale, mask, soft_cap)
        if mixed is None:
            # The name as it is bound now, by `layer_seams.attach`, too.
            attend = getattr(self._attention_module, ATTENTION)
            with in_order():
                mixed = attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
        return mixed


def compute_together(layers: Sequence[PackedDecoderLayer]) -> None:
    """Let layers, which a model calls in turn, compute a step or a prefill chunk in one job."""
    share_angles([layer.parts for layer in layers])
    together = LayersTogether(
        [layer.parts for layer in layers], [layer.self_attn.scale for layer in layers]
    )
    for place, layer in enumerate(layers):
        layer.join(together, place)


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
    """The two compiled parts of a decoder layer."""

    def __init__(
        self,
        layer: nn.Module,
        form: DecoderForm,
        projections: Sequence[PackedProjection],
        rotation: RotaryPositions | None,
        *,
        exact: bool,
    ) -> None:
        """See `PackedDecoderLayer`; without a `rotation`, queries and keys are not rotated."""
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
        """Biases, and the norms' weights as they are multiplied, by name; None if missing."""
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
        """Return queries, keys and values (n, heads, dim) of rows (n, width).

        Args:
            x: the layer's input.
            angles: cosines and sines of the rows' positions, (2, n, 1, pairs); None to rotate none.
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
        """Keep a norm's weights, to which `one` is added; return their address, 0 without any."""
        if norm is None:
            return 0
        weights = np.asarray(norm.weight.astype(mx.float32)) + np.float32(one)
        self.vectors[name] = weights = np.ascontiguousarray(weights)
        return int(weights.ctypes.data)
