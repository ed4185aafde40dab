"""Channel scales: keys are divided by them before encoding, and queries multiplied.

This does not change scores, only their quantization error.

A rotation spreads the error over all channels. With root mean squares k of keys and q of queries in
a channel of scale s, the squared error of a score grows with the sum of k^2 / s^2 over the
channels, times the sum of s^2 q^2. The product is minimal for s^2 = k / q (Cauchy-Schwarz).

Only channels that are large in every token get a scale; small differences may only reflect the
measured tokens, and scaling all channels lost accuracy. Scales are powers of two, so scaling is
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.kv.codecs.coded import Codec, Scales

FROM = 2
"""Minimum exponent of a scale, 2^2, which keys about 16 times as large as others have."""
MOST = 16
LEAST = 1e-30
"""Minimum sum of squares of a channel to be scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(Codec):
    """A codec with optional channel scales for keys, which are part of its identity."""

    scales: Scales = field(default=(), repr=False)

    @property
    def takes_scales(self) -> bool:
        return True

    def scaled(self, scales: Scales) -> Self:
        return replace(self, scales=scales)

    def of_heads(self, start: int, stop: int) -> Self:
        return replace(self, scales=self.scales[start:stop]) if self.scales else self


def divided(x: mx.array, scales: Scales) -> mx.array:
    """Divide keys (batch, heads, tokens, dim) by their scales, in float32."""
    return x.astype(mx.float32) / _factors(scales) if scales else x


def multiplied(x: mx.array, scales: Scales) -> mx.array:
    """Multiply queries (heads, m, dim) or keys (batch, heads, tokens, dim) by the keys' scales."""
    return x.astype(mx.float32) * _factors(scales) if scales else x


def _factors(scales: Scales) -> mx.array:
    return mx.array(_powers(scales))  # not cached: an array belongs to the thread that created it


@lru_cache(maxsize=256)
def _powers(scales: Scales) -> npt.NDArray[np.float32]:
    exponents = np.frombuffer(b"".join(scales), np.int8).reshape(len(scales), 1, -1)
    return np.ldexp(np.float32(1), exponents)


class Squares:
    """Accumulators of the squares of keys and queries, by head and channel."""

    def __init__(self) -> None:
        self._keys: mx.array | None = None
        self._queries: mx.array | None = None

    def add(self, keys: mx.array, queries: mx.array) -> None:
        """Add squares of keys (1, kv_heads, n, dim) and queries (1, heads, n, dim); evaluates."""
        kv_heads, dim = keys.shape[1], keys.shape[3]
        sums = []
        for before, new in ((self._keys, keys), (self._queries, queries)):
            rows = new.astype(mx.float32).reshape(kv_heads, -1, dim)
            squares = (rows * rows).sum(axis=1)
            sums.append(squares if before is None else before + squares)
        mx.eval(sums)
        self._keys, self._queries = sums

    def scales(self) -> Scales:
        """Return scales for the channels that are large compared to the median of their head."""
        if self._keys is None or self._queries is None:
            return ()
        keys, queries = (np.array(sums, np.float64) for sums in (self._keys, self._queries))
        known = (keys > LEAST) & (queries > LEAST) & np.isfinite(keys) & np.isfinite(queries)
        logs = np.log2(np.where(known, keys, 1.0) / np.where(known, queries, 1.0)) / 4
        middles = [
            np.median(head[seen]) if seen.any() else 0.0
            for head, seen in zip(logs, known, strict=True)
        ]
        best = np.rint(logs - np.array(middles)[:, None])
        exponents = np.where(known & (best >= FROM), np.minimum(best, MOST), 0).astype(np.int8)
        return tuple(head.tobytes() for head in exponents) if exponents.any() else ()


def digest(layers: Sequence[Scales]) -> str:
    hashed = xxhash.xxh3_128()
    for scales in layers:
        for head in (len(scales).to_bytes(8, "little"), *scales):
            hashed.update(len(head).to_bytes(8, "little"))
            hashed.update(head)
    return hashed.hexdigest()
