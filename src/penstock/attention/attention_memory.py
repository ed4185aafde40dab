"""Properties of a device, and the memory that attention needs on it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

SCORE_BUFFERS = 8
"""Number of float32 arrays alive at once while scores become weights: 7.7 at most, measured."""
HALF_SCORE_BUFFERS = 10
"""Number of such arrays for half-precision keys, dequantized and rounded: 9.5 at most, measured."""
FUSED_DIMS = (64, 80, 128)
"""Head sizes for which MLX's attention of a chunk is a single GPU kernel. For others it
materializes all scores (MLX 0.32, Metal)."""
STREAMED_TOKENS = 640
"""Tokens per piece of a streamed long prompt: two records of a tier, aligned with them."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a kind of device, besides attention."""

    on_heap: bool = False
    """Whether arrays are allocated on the process's heap, in memory that the system counts as its
    own."""
    slow_half: bool = False
    """Whether MLX's quantized and half-precision products are slow, so that float32 is
    worthwhile."""
    own_memory: bool = False
    """Whether the device has dedicated memory, so that freeing it does not help other programs."""
    fuses_attention: bool = True
    """Whether MLX's attention of a chunk can be a fused kernel, which does not materialize
    scores."""


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

        Covers all lanes, for consecutive products with up to `numbers` codes each. MLX needs a
        float32 scale and offset per group of at least 32.
        """
        return 2 * mx.float32.size * -(-numbers // 32)
