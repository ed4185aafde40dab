"""Formats of a span's keys and values that the kernels support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.codecs.affine import Affine
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.kivi import Kivi
from penstock.kv.codecs.turbo import Turbo, padded
from penstock.kv.columns import Side

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)
BITS = (2, 3, 4, 5, 6, 8)
"""Supported numbers of bits per code."""
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
LEAST_NUMBERS = 8
"""Minimum size of arrays for kernels, because MLX puts smaller ones in another address space."""
MOST_COLUMNS = 2**30
"""Maximum number of columns of an array over all heads, because indices have 32 bits."""
MOST_NUMBERS = 2**31 - 1
"""Maximum number of values per head of an array, for the same reason."""
TILE_COLUMNS = 32
"""Minimum columns of a tile for per-channel codecs, so that each channel has whole words."""
MOST_TILE_BYTES = 24_576
"""Maximum threadgroup memory of such a tile in bytes; Metal allows 32 KiB."""


class ArrayKind(Enum):
    OWN = "the model's"
    CODES = "32 bits of codes"
    HALF = "float16"


@dataclass(frozen=True, slots=True)
class HeldArray:
    suffix: str
    """Suffix of the name of the kernel argument."""
    kind: ArrayKind
    count: int
    """Number of values per head and group of columns encoded together."""

    def nbytes(self, dtype: mx.Dtype) -> int:
        sizes = {
            ArrayKind.OWN: dtype.size,
            ArrayKind.CODES: mx.uint32.size,
            ArrayKind.HALF: mx.float16.size,
        }
        return self.count * sizes[self.kind]


@dataclass(frozen=True, slots=True)
class SideForm:
    dim: int
    """Head size, including padding by a codec."""
    bits: int = 0
    """Bits per code; 0 for raw values."""
    group: int = 0
    """Group size of scales and offsets; 0 for one scale per column."""
    half: bool = False
    """Whether the first half of a column has one more bit."""
    span: int = 1
    """Number of columns encoded together; if more than one, scales and offsets are per channel."""

    @property
    def arrays(self) -> tuple[HeldArray, ...]:
        if not self.bits:
            return (HeldArray("", ArrayKind.OWN, self.dim),)
        scales, offsets = HeldArray("s", ArrayKind.HALF, 1), HeldArray("o", ArrayKind.HALF, 1)
        if self.half:
            finer, coarser = (self.dim // 2 * bits // 32 for bits in (self.bits + 1, self.bits))
            return (
                HeldArray("", ArrayKind.CODES, finer),
                HeldArray("c", ArrayKind.CODES, coarser),
                scales,
            )
        codes = HeldArray("", ArrayKind.CODES, self.span * self.dim * self.bits // 32)
        if not self.group and self.span == 1:
            return codes, scales
        count = self.dim if self.span > 1 else self.dim // self.group
        return codes, replace(scales, count=count), replace(offsets, count=count)

    @property
    def name(self) -> str:
        if not self.bits:
            return "raw"
        if self.span > 1:
            return f"{self.bits}c"
        return f"{self.bits}h" if self.half else f"{self.bits}g{self.group}"

    def column_bytes(self, dtype: mx.Dtype) -> int:
        return -(-sum(array.nbytes(dtype) for array in self.arrays) // self.span)

    @classmethod
    def of(cls, side: Side) -> SideForm | None:
        if isinstance(side, Coded):
            form = _coded(side)
        elif isinstance(side, mx.array) and side.dtype in DTYPES:
            form = cls(side.shape[-1])
        else:
            return None
        arrays = col.arrays(side)
        short = any(array.size < LEAST_NUMBERS for array in arrays)
        rows, heads = arrays[0].shape[:2]
        if form is None or form.dim not in HEAD_SIZES or short:
            return None
        columns = col.columns(side)
        long = rows * heads * columns > MOST_COLUMNS or columns * form.dim > MOST_NUMBERS
        return None if long else form


@dataclass(frozen=True, slots=True)
class SpanForm:
    keys: SideForm
    values: SideForm
    dtype: mx.Dtype
    """Dtype of raw values."""

    @property
    def arrays(self) -> int:
        return len(self.keys.arrays) + len(self.values.arrays)

    @property
    def span(self) -> int:
        return max(self.keys.span, self.values.span)

    @property
    def column_bytes(self) -> int:
        return self.keys.column_bytes(self.dtype) + self.values.column_bytes(self.dtype)

    @property
    def name(self) -> str:
        return f"{self.keys.name}_{self.values.name}"


def form_of(sides: Sequence[Side], dtype: mx.Dtype) -> SpanForm | None:
    """Return the format of keys and values; None if no kernel supports it."""
    keys, values = map(SideForm.of, sides)
    if keys is None or values is None:
        return None
    if any(isinstance(side, mx.array) and side.dtype != dtype for side in sides):
        return None
    form = SpanForm(keys, values, dtype)
    large = form.span > 1 and TILE_COLUMNS * form.column_bytes > MOST_TILE_BYTES
    return None if large else form


def _coded(side: Coded) -> SideForm | None:
    codec, dim = side.codec, side.dim
    if isinstance(codec, Turbo):
        form = SideForm(padded(dim), codec.bits, half=codec.half)
    elif isinstance(codec, Kivi):
        form = SideForm(dim, codec.bits, span=codec.span)
    elif isinstance(codec, Affine):
        form = SideForm(dim, codec.bits, codec.group_size)
    else:
        return None
    return form if form.bits in BITS else None
