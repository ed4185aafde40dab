"""The back end of Metal and CUDA; it runs on a CPU, too, with the same numbers to rounding."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from penstock.kv import attention
from penstock.kv.attention import AttentionWindow
from penstock.kv.backend_base import Backend, KernelCaller

FUSED_DIMS = (64, 80, 128)
"""Sizes of a head for which MLX's attention to a chunk is one kernel on a GPU. For others it
holds all scores (MLX 0.32, Metal)."""


@dataclass(frozen=True)
class GPUBackend(Backend):
    """Metal and CUDA: MLX's own kernels, which fuse attention and read codes as they lie."""

    uses_numpy = False
    slow_half = False
    independent_products = False
    own_memory: bool = False
    kernel_language: str | None = None
    call_kernel: KernelCaller | None = None

    def attend_prefill(
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
        """See `Backend`; nothing is computed yet."""
        n, m = queries.shape[2], keys.shape[2]
        mask: mx.array | str = "causal"
        if columns is not None or not attention_window.sees_all(start + n - 1):
            mask = attention.seen_by_chunk(attention_window, start, n, m, columns)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def multiply_codes(
        self,
        x: mx.array,
        codes: mx.array,
        scales: mx.array,
        biases: mx.array,
        *,
        transpose: bool,
        group_size: int,
        bits: int,
    ) -> mx.array:
        """See `Backend`: in the precision of x."""
        return mx.quantized_matmul(
            x,
            codes,
            scales.astype(x.dtype),
            biases.astype(x.dtype),
            transpose=transpose,
            group_size=group_size,
            bits=bits,
        )

    def holds_all_scores(self, key_dim: int, value_dim: int) -> bool:
        """See `Backend`: if there is no kernel for it."""
        return key_dim != value_dim or key_dim not in FUSED_DIMS

    def code_bytes(self, numbers: int) -> int:
        """See `Backend`: a scale and an offset in float32 for each group, of 32 at least."""
        return 2 * mx.float32.size * -(-numbers // 32)
