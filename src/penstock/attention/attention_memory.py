"""Facts of a device, and the bytes that attention takes on it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from penstock.kv.codecs import wide_codes
from penstock.kv.codecs.code_ops import SIGNS_AT_ONCE

SCORE_BUFFERS = 8
"""Arrays of float32 that are alive together while scores become weights: 7.7 at most, measured."""
HALF_SCORE_BUFFERS = 10
"""The same where keys are of half precision, dequantized and narrowed again: 9.5 at most."""
FUSED_DIMS = (64, 80, 128)
"""Sizes of a head for which MLX's attention to a chunk is one kernel on a GPU. For others it
holds all scores (MLX 0.32, Metal)."""
STREAMED_TOKENS = 640
"""Tokens of a piece of a long prompt that is read piece by piece: those of two records of a tier,
which begin where it does."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is decided by the kind of a device beside attention."""

    on_heap: bool = False
    """Whether arrays lie on the heap of the process, in memory that the system counts as its."""
    slow_half: bool = False
    """Whether MLX multiplies codes and half-precision weights slowly, so that float32 pays."""
    own_memory: bool = False
    """Whether the device has memory of its own: to give it up helps no other program."""
    fuses_attention: bool = True
    """Whether MLX's own attention to a chunk can be one kernel, which holds no scores."""


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Bytes that attention takes, by MLX's operations on a GPU."""

    scores_at_once: int
    """Scores that are computed at a time, at most."""
    lanes: int = 1

    @property
    def chunk_scores(self) -> int:
        """Scores that a prefill chunk computes at a time, at most."""
        return self.scores_at_once

    def chunk_score_bytes(self, dtype: mx.Dtype) -> int:
        """Return the working memory of one of those, in bytes, for keys of this type."""
        return self.score_bytes(dtype)

    def score_bytes(self, dtype: mx.Dtype) -> int:
        """Return the working memory of one score, in bytes, for keys of this type."""
        return 4 * (SCORE_BUFFERS if dtype == mx.float32 else HALF_SCORE_BUFFERS)

    def holds_all_scores(self, key_dim: int, value_dim: int) -> bool:
        """Tell whether a prefill chunk materializes all its scores, for heads of this size."""
        return key_dim != value_dim or key_dim not in FUSED_DIMS

    @property
    def sign_bytes(self) -> int:
        """Bytes that `multiply_signs` takes beside its result, at most."""
        return mx.float32.size * self.lanes * wide_codes.BUFFERS * SIGNS_AT_ONCE

    def code_bytes(self, numbers: int) -> int:
        """Return an upper bound of the bytes `multiply_codes` takes beside its result.

        Counts all lanes together, for runs of up to so many codes, one run after the other. MLX
        takes a scale and an offset in float32 for each group, of 32 at least.
        """
        return 2 * mx.float32.size * -(-numbers // 32)
