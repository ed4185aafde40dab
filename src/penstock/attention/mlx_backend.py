"""Attention with MLX's operations: the backend for GPUs, and the reference for all devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.attention_memory import AttentionMemory, DeviceFacts
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.piece_reads import PieceReads
from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow


class MLXBackend(AttentionBackend):
    """Attention with MLX's operations, reading spans in place."""

    @property
    def memory(self) -> AttentionMemory:
        return AttentionMemory(self.scores_at_once)

    def decode(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        return LayerDecode(self, step, layer, window).attend(queries, scale, sinks)

    def prefill(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        columns: mx.array | None,
        start: int,
        scale: float,
        attention_window: AttentionWindow,
        sinks: mx.array | None = None,
        eager: bool = False,
    ) -> mx.array:
        """See `AttentionBackend.prefill`; nothing is evaluated, even if `eager`."""
        n, m = queries.shape[2], keys.shape[2]
        mask: mx.array | str = "causal"
        if columns is not None or not attention_window.sees_all(start + n - 1):
            mask = span_attention.seen_by_chunk(attention_window, start, n, m, columns)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def piece_reads(self, stacked: Sequence[mx.array]) -> AbstractContextManager[PieceReads]:
        return nullcontext(PieceReads(self, stacked))

    def choice_reader(self, selection: Selection, key_dim: int, value_dim: int) -> ChoiceReader:
        return ChoiceReader(selection, self, self.facts)

    def multiply_weights(self, x: mx.array, weights: mx.array) -> mx.array:
        return x @ weights.T

    def decoding(self, rows: int, width: int, tokens: int) -> AbstractContextManager[None]:
        """Return an empty context: no preparation is needed."""
        return nullcontext()

    def reads_together(self, rows: int, width: int, tokens: int) -> bool:
        """Return whether there is more than one row."""
        return rows > 1


class KernelCaller(Protocol):
    """Callable that runs kernels in place of the GPU, in tests."""

    @property
    def target(self) -> str:
        """Kernel language that it accepts."""

    def __call__(self, call: Any, /) -> Sequence[mx.array]:
        """Run one `kernels.attend.KernelCall`."""


@dataclass(frozen=True)
class GPUBackend(MLXBackend):
    """Backend of Metal and CUDA, with MLX's fused attention and quantized kernels."""

    facts: DeviceFacts = field(default_factory=DeviceFacts)
    kernel_language: str | None = None
    """Kernel language of this device, "metal" or "cuda"; None if kernels cannot be compiled."""
    call_kernel: KernelCaller | None = None
    """Runs kernels in place of the GPU, in tests."""
