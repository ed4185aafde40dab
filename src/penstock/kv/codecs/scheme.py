"""Quantization schemes: a codec for keys and one for values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from penstock.kv.codecs.coded import Codec, Scales


@dataclass(frozen=True, slots=True)
class Scheme:
    """Codec of the keys and codec of the values; None leaves that side unquantized."""

    name: str
    keys: Codec | None
    values: Codec | None
    scales: tuple[Scales, ...] = ()
    """Scales of the key channels by layer; empty means 1 everywhere."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(codec for codec in (self.keys, self.values) if codec is not None)

    def scaled(self, measure: Callable[[], tuple[Scales, ...]]) -> Scheme:
        """Return this scheme with the channel scales that `measure` returns, if it uses them."""
        if self.keys is None or not self.keys.takes_scales:
            return self
        scales = measure()
        return replace(self, scales=scales if any(scales) else ())

    def of_layer(self, number: int) -> Scheme:
        if self.keys is None or not self.scales:
            return self
        return replace(self, keys=self.keys.scaled(self.scales[number]), scales=())

    def token_bits(self, key_dim: int, value_dim: int, dtype_bits: int) -> int:
        """Return the bits per token and head, keys and values; see `Codec.token_bits`."""
        sides = ((self.keys, key_dim), (self.values, value_dim))
        return sum(
            dim * dtype_bits if codec is None else codec.token_bits(dim) for codec, dim in sides
        )

    def ratio(self, key_dim: int, value_dim: int, dtype_bits: int = 16) -> float:
        """Return the compression ratio over raw values of `dtype_bits` bits."""
        raw_bits = (key_dim + value_dim) * dtype_bits
        return float(Fraction(raw_bits, self.token_bits(key_dim, value_dim, dtype_bits)))
