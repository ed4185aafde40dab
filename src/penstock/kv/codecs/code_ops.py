"""Operations that codecs use, which devices may override."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx


class CodeOps:
    """Reference implementation, in MLX's operations, of the operations that codecs use."""

    lanes: int = 1

    def lane(self, number: int | None) -> AbstractContextManager[None]:
        """Return a context whose operations run on a lane (stream); None for the default one."""
        return nullcontext()

    def settle(self, number: int) -> None:
        with self.lane(number):
            mx.synchronize()

    def extremes(self, groups: mx.array) -> tuple[mx.array, mx.array]:
        """Return the float32 minimum and maximum over the last axis; NaN propagates."""
        return groups.min(axis=-1).astype(mx.float32), groups.max(axis=-1).astype(mx.float32)

    def as_float32(self, x: mx.array) -> mx.array:
        """Convert x to float32; non-finite values may become finite."""
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
        """Multiply x by codes like `mx.quantized_matmul`, in the dtype that is fastest here."""
        return mx.quantized_matmul(
            x,
            codes,
            scales.astype(x.dtype),
            biases.astype(x.dtype),
            transpose=transpose,
            group_size=group_size,
            bits=bits,
        )
