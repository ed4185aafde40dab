"""Per-channel quantization of keys: `SPAN` tokens of a channel share scale and offset (KIVI).

A channel that is large, or far from zero, in all tokens costs no precision: the codes only describe
how it varies over tokens (Liu et al. 2024, "KIVI"). Spans are laid out (dim, tokens), so that
`mx.quantized_matmul` reads them directly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx

from penstock.kv.codecs.affine import BITS
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded, quantized

SPAN = 64
_NAME = re.compile(r"kivi([2-8])")


@dataclass(frozen=True, slots=True)
class Kivi(Codec):
    """Codec with bits + 0.5 bits per value. Parts: codes (dim, words), scales (dim,), offsets."""

    FORMS: ClassVar[str] = "kivi2 to kivi6, kivi8"
    span: ClassVar[int] = SPAN
    buffers: ClassVar[float] = 4

    bits: int

    @classmethod
    def parse(cls, word: str, *, keys: bool) -> Self | None:
        """See `Codec.parse`; raises ValueError for values, which have no large channels."""
        match = _NAME.fullmatch(word)
        if match is None or int(match[1]) not in BITS:
            return None
        if not keys:
            raise ValueError(f"{word} is for keys only; use affine or turbo for values")
        return cls(int(match[1]))

    @property
    def of_values(self) -> str:
        return f"affine{self.bits}"

    @property
    def name(self) -> str:
        return f"kivi{self.bits}"

    def token_bits(self, dim: int) -> int:
        if dim % 2:
            raise ValueError(f"{self.name}: a head of {dim} numbers makes no whole bits a token")
        return dim * self.bits + dim * 32 // SPAN

    def encode(self, x: mx.array, ops: CodeOps) -> Coded:
        batch, heads, tokens, dim = x.shape
        if tokens % SPAN:
            raise ValueError(f"{self.name} encodes {SPAN} tokens together, not {tokens}")
        spans = x.reshape(batch, heads, tokens // SPAN, SPAN, dim)
        by_channel = mx.contiguous(spans.swapaxes(-1, -2))
        codes, scales, offsets = quantized(by_channel, SPAN, self.bits, ops)
        return Coded(self, (codes, scales.squeeze(-1), offsets.squeeze(-1)), dim)

    def dequantize(self, coded: Coded, ops: CodeOps) -> mx.array:
        codes, scales, offsets = coded.parts
        spans = ops.dequantize_codes(
            codes, scales[..., None], offsets[..., None], group_size=SPAN, bits=self.bits
        )
        batch, heads, count = spans.shape[:3]
        return spans.swapaxes(-1, -2).reshape(batch, heads, count * SPAN, coded.dim)

    def score(self, queries: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        scores = self._product(
            mx.expand_dims(queries, 1), coded, ops, transpose=False
        )  # (heads, spans, m, SPAN)
        heads, count, rows, _ = scores.shape
        return scores.swapaxes(1, 2).reshape(heads, rows, count * SPAN)

    def mix(self, weights: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        heads, rows, tokens = weights.shape
        spans = weights.reshape(heads, rows, tokens // SPAN, SPAN).swapaxes(1, 2)
        return self._product(spans, coded, ops, transpose=True).sum(axis=1)

    def _product(self, x: mx.array, coded: Coded, ops: CodeOps, *, transpose: bool) -> mx.array:
        codes, scales, offsets = (part.squeeze(0) for part in coded.parts)
        return ops.multiply_codes(
            mx.broadcast_to(x, (codes.shape[0], codes.shape[1], *x.shape[2:])),
            codes,
            mx.expand_dims(scales, -1),  # takes half as long as indexing with None
            mx.expand_dims(offsets, -1),
            transpose=transpose,
            group_size=SPAN,
            bits=self.bits,
        )
