"""Properties of a device, and the memory that attention needs on it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

SCORE_BUFFERS = 8
"""Number of score-sized float32 arrays alive during the softmax; measured maximum 7.7."""
HALF_SCORE_BUFFERS = 10
"""Number of these arrays for half-precision keys, with conversions; measured maximum 9.5."""
FUSED_DIMS = (64, 80, 128)
"""Head sizes for which MLX's prefill attention is a fused kernel. For others it materializes all
scores (MLX 0.32, Metal)."""
STREAMED_TOKENS = 640
"""Tokens per piece of a long prompt read piece by piece: two tier records, aligned with them."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a kind of device that matter outside attention."""

    on_heap: bool = False
    """Whether arrays are allocated on the process's heap and count towards its resident memory."""
    slow_half: bool = False
    """Whether MLX's quantized and half-precision products are slower than float32 ones."""
    own_memory: bool = False
    """Whether the device has dedicated memory, so that freeing it does not help other programs."""
    fuses_attention: bool = True
    """Whether MLX's prefill attention can be a fused kernel, which does not materialize scores."""


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Working memory of attention with MLX's operations on a GPU, in bytes."""

    scores_at_once: int
    """Maximum number of scores computed at a time."""
    lanes: int = 1

    @property
    def chunk_scores(self) -> int:
        """Maximum number of scores that a prefill chunk computes at a time."""
        return self.scores_at_once

    def chunk_score_bytes(self, dtype: mx.Dtype) -> int:
        """Return the working memory per score of a prefill chunk, for keys of this dtype."""
        return self.score_bytes(dtype)

    def score_bytes(self, dtype: mx.Dtype) -> int:
        """Return the working memory per score, for keys of this dtype."""
        return 4 * (SCORE_BUFFERS if dtype == mx.float32 else HALF_SCORE_BUFFERS)

    def holds_all_scores(self, key_dim: int, value_dim: int) -> bool:
        """Return whether a prefill chunk materializes all its scores, for heads of this size."""
        return key_dim != value_dim or key_dim not in FUSED_DIMS

    def code_bytes(self, numbers: int) -> int:
        """Return an upper bound of the bytes that `multiply_codes` needs besides its result.

        Covers consecutive products with up to `numbers` codes each, on all lanes. MLX needs a
        float32 scale and offset per group of at least 32 codes.
        """
        return 2 * mx.float32.size * -(-numbers // 32)
