"""Implementations of decode attention on a GPU, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import mlx.core as mx

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import AttentionPlan, DecodeRow
from penstock.attention.joined_reads import join_parts
from penstock.attention.span_attention import LOG2_E, AttentionWindow
from penstock.kv.codecs.coded import Coded
from penstock.plugins.kernels.attend import KernelAttention, LayerStep
from penstock.plugins.kernels.dispatches import StepReading, partial_bytes, segments_of

LEAST_PART = 64
"""Minimum average tokens per part. Steps with shorter parts use plain operations, because the
memory estimate does not cover so many partial results."""
JOINED = 2
"""Number of copies of a layer's KV while it is concatenated: raw, and dequantized."""
logger = logging.getLogger(__name__)


class AttentionWay(Enum):
    """Implementation of decode attention."""

    PLAIN = "plain"
    """MLX's operations on the parts in place."""
    KERNEL = "kernel"
    FUSED = "fused"
    """MLX's fused attention on concatenated parts."""


class Situation(Enum):
    """Kinds of decode steps for which the fastest implementation may differ."""

    ONE_PART = "one row, one part"
    PARTS = "one row, many parts"
    SHARED = "shared prefix"
    RAGGED = "rows of their own"

    @property
    def is_alone(self) -> bool:
        return self in (Situation.ONE_PART, Situation.PARTS)

    @classmethod
    def of(cls, rows: int, layout: AttentionPlan) -> Situation:
        reads = [read for level in layout.levels for read in level]
        if rows == 1:
            return cls.ONE_PART if sum(len(read.pieces) for read in reads) < 2 else cls.PARTS
        return cls.SHARED if any(read.last - read.first > 1 for read in reads) else cls.RAGGED


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Numbers of heads, head sizes and dtype of a layer's attention."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        sizes = f"{self.key_dim}"
        if self.key_dim != self.value_dim:
            sizes += f"/{self.value_dim}"
        dtype = str(self.dtype).rpartition(".")[2]
        return f"{self.heads} heads on {self.kv_heads} of {sizes}, {dtype}"


StepForm: TypeAlias = tuple[AttentionForm, Situation, bool]
"""Attention shape of a layer, situation of the step, and whether its KV is quantized."""


@dataclass(slots=True)
class Ways:
    """The implementation for each kind of step; plain operations unless another is faster."""

    kernels: KernelAttention | None = None
    table: Mapping[StepForm, AttentionWay] = field(default_factory=dict)
    always: AttentionWay | None = None
    """Implementation to use for all steps, in a self-test."""

    def nbytes(self, tokens: int, width: int) -> int:
        largest = 0
        for (layer, *_), way in self.table.items():
            dim = max(layer.key_dim, layer.value_dim)
            if way is AttentionWay.KERNEL:
                needed = _kernel_bytes(layer.heads, dim, width, tokens)
            else:
                columns = layer.kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.size
                needed = JOINED * (tokens + width) * columns
            largest = max(largest, needed)
        return largest

    def attend(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        if not self.table and self.always is None:
            return None
        keys, values = step.tails.layer(layer)
        form = AttentionForm(
            queries.shape[1], keys.shape[1], keys.shape[3], values.shape[3], queries.dtype
        )
        layout = step.layout(window)
        read = form, Situation.of(len(step.rows), layout), reads_codes(layout, layer)
        way = self.always or self.table.get(read)
        if way is AttentionWay.FUSED:
            return _fused(step, layer, window, queries, scale, sinks)
        if way is not AttentionWay.KERNEL or self.kernels is None:
            return None
        repeats = form.heads // form.kv_heads
        reading = StepReading(step.rows, window, step.width, form.kv_heads, repeats)
        if sinks is not None:
            sinks = sinks.astype(mx.float32) * LOG2_E
        try:
            of = LayerStep(queries, reading, layout, layer, (keys, values), scale, sinks)
            most_bytes = None if self.always else _counted_bytes(form, reading)
            return self.kernels.attend(of, step.kernel_plans, most_bytes)
        # A boundary: a driver compiles and runs the kernel. Plain operations compute the same
        # result, so that no error of a driver fails a request.
        except Exception as error:
            if self.always is not None:
                raise
            logger.warning(
                "an attention kernel failed; falling back to plain operations: %s", error
            )
            self.kernels = None
            return None


def _kernel_bytes(heads: int, dim: int, width: int, tokens: int) -> int:
    """Return the bytes that the memory estimate includes for a row with kernels."""
    parts = -(-tokens // LEAST_PART) + 1
    return partial_bytes(heads, dim, width, tokens, parts)


def _counted_bytes(form: AttentionForm, reading: StepReading) -> int:
    """Return a lower bound of the bytes that the memory estimate includes for a step."""
    dim, window = max(form.key_dim, form.value_dim), reading.window
    total = 0
    for row in reading.rows:
        seen = row.position + reading.width
        if window.window is not None:
            seen = min(seen, window.window + window.keep)
        total += _kernel_bytes(form.heads, dim, reading.width, seen)
    return total


def reads_codes(layout: AttentionPlan, layer: int) -> bool:
    sides = (side for segment in segments_of(layout) for side in segment.layers[layer])
    return any(isinstance(side, Coded) for side in sides)


def _fused(
    step: DecodeStep,
    layer: int,
    window: AttentionWindow,
    queries: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Concatenate the columns visible to each row, and call MLX's fused attention."""
    done = []
    for i, row in enumerate(step.rows):
        keys, values, columns = join_parts(
            row.parts,
            layer,
            window,
            row.position,
            _tail(step, layer, row),
            step.device,
            lazily=True,
        )
        done.append(
            step.device.prefill(
                queries[i : i + 1],
                keys,
                values,
                columns=columns,
                start=row.position,
                scale=scale,
                attention_window=window,
                sinks=sinks,
            )
        )
    return (done[0] if len(done) == 1 else mx.concatenate(done)).astype(queries.dtype)


def _tail(step: DecodeStep, layer: int, row: DecodeRow) -> tuple[mx.array, mx.array]:
    return step.tails.read_block(layer, row.slot, 1, row.tail + step.width)
