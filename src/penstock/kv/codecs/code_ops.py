"""Operations on codes: reference implementation in MLX operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx


class CodeOps:
    """Operations used by codecs, in MLX operations; devices may override them."""

    lanes: int = 1

    def lane(self, number: int | None) -> AbstractContextManager[None]:
        """Run the computations of a `with` block on a lane, by index; None for no lane."""
        return nullcontext()

    def settle(self, number: int) -> None:
        with self.lane(number):
            mx.synchronize()

    def extremes(self, groups: mx.array) -> tuple[mx.array, mx.array]:
        """Return the float32 minimum and maximum over the last axis; NaN propagates."""
        return groups.min(axis=-1).astype(mx.float32), groups.max(axis=-1).astype(mx.float32)

    def as_float32(self, x: mx.array) -> mx.array:
        """Return x as float32; non-finite values may become finite."""
        return x.astype(mx.float32)

    def dequantize_codes(
        self, codes: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
    ) -> mx.array:
        """Dequantize codes (..., rows, words) to float32, like `mx.dequantize`."""
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)

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
        """Multiply by codes like `mx.quantized_matmul`, in the fastest precision."""
        return mx.quantized_matmul(
            x,
            codes,
            scales.astype(x.dtype),
            biases.astype(x.dtype),
            transpose=transpose,
            group_size=group_size,
            bits=bits,
        )
