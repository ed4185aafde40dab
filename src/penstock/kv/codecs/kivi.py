"""Keys by channel: `SPAN` tokens of one channel share a scale and an offset (KIVI).

A channel that is large, or far from zero, in all tokens costs nothing: the codes tell apart how
it changes along them (Liu et al. 2024, "KIVI"). Spans are laid out (dim, tokens), so that
`mx.quantized_matmul` reads them as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from penstock.kv import backend
from penstock.kv.codecs.coded import Codec, Coded, quantized

SPAN = 64


@dataclass(frozen=True, slots=True)
class Kivi(Codec):
    """bits + 32 / 64 bits a number. Parts by span: codes (dim, words), scales (dim,), offsets."""

    span: ClassVar[int] = SPAN
    buffers: ClassVar[float] = 4

    bits: int

    @property
    def name(self) -> str:
        """As `kivi4`."""
        return f"kivi{self.bits}"

    def token_bits(self, dim: int) -> int:
        """See `Codec`."""
        if dim % 2:
            raise ValueError(f"{self.name}: a head of {dim} numbers makes no whole bits a token")
        return dim * self.bits + dim * 32 // SPAN

    def encode(self, x: mx.array) -> Coded:
        """See `Codec`."""
        batch, heads, tokens, dim = x.shape
        if tokens % SPAN:
            raise ValueError(f"{self.name} encodes {SPAN} tokens together, not {tokens}")
        spans = x.reshape(batch, heads, tokens // SPAN, SPAN, dim)
        by_channel = mx.contiguous(spans.swapaxes(-1, -2))
        codes, scales, offsets = quantized(by_channel, SPAN, self.bits)
        return Coded(self, (codes, scales.squeeze(-1), offsets.squeeze(-1)), dim)

    def dequantize(self, coded: Coded) -> mx.array:
        """See `Codec`."""
        codes, scales, offsets = coded.parts
        spans = backend.current().dequantize_codes(
            codes, scales[..., None], offsets[..., None], group_size=SPAN, bits=self.bits
        )
        batch, heads, count = spans.shape[:3]
        return spans.swapaxes(-1, -2).reshape(batch, heads, count * SPAN, coded.dim)

    def score(self, queries: mx.array, coded: Coded) -> mx.array:
        """See `Codec`."""
        scores = self._product(
            mx.expand_dims(queries, 1), coded, transpose=False
        )  # (heads, spans, m, SPAN)
        heads, count, rows, _ = scores.shape
        return scores.swapaxes(1, 2).reshape(heads, rows, count * SPAN)

    def mix(self, weights: mx.array, coded: Coded) -> mx.array:
        """See `Codec`."""
        heads, rows, tokens = weights.shape
        spans = weights.reshape(heads, rows, tokens // SPAN, SPAN).swapaxes(1, 2)
        return self._product(spans, coded, transpose=True).sum(axis=1)

    def _product(self, x: mx.array, coded: Coded, *, transpose: bool) -> mx.array:
        codes, scales, offsets = (part.squeeze(0) for part in coded.parts)
        return backend.current().multiply_codes(
            mx.broadcast_to(x, (codes.shape[0], codes.shape[1], *x.shape[2:])),
            codes,
            mx.expand_dims(scales, -1),  # half as long as an index of None
            mx.expand_dims(offsets, -1),
            transpose=transpose,
            group_size=SPAN,
            bits=self.bits,
        )
