"""How a span's keys and values lie in memory, as far as a kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.codecs.affine import Affine
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.turbo import STEPS, Turbo, padded
from penstock.kv.columns import Side

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)
"""Numbers of a head that the kernels are made for."""
BITS = (2, 3, 4, 8)
"""Widths of codes that they read."""
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
LEAST_NUMBERS = 8
"""Numbers of the smallest array that they read: MLX has shorter ones in another address space."""
MOST_COLUMNS = 2**30
"""Columns of all heads of an array, and numbers of a head: indices are 32 bits wide."""


@dataclass(frozen=True, slots=True)
class SideForm:
    """Keys or values of a span: as the model has them, or in codes."""

    dim: int
    """Numbers of a column, those added by a codec included."""
    bits: int = 0
    """Bits of a code; 0 for numbers as the model has them."""
    group: int = 0
    """Neighbors with a scale and an offset in common; 0: one scale a column."""

    @property
    def arrays(self) -> int:
        """Arrays that hold it: numbers; codes and scales; or codes, scales and offsets."""
        return 1 + (self.bits > 0) + (self.group > 0)

    @property
    def step(self) -> float:
        """Distance of two levels, where a column has one scale."""
        return STEPS[self.bits] if self.bits and not self.group else 1.0

    @property
    def name(self) -> str:
        """A word for it in the names of kernels."""
        return f"{self.bits}g{self.group}" if self.bits else "raw"

    @classmethod
    def of(cls, side: Side) -> SideForm | None:
        """Return that of a layer's side; None if no kernel reads it."""
        if isinstance(side, Coded):
            form = _coded(side)
        elif isinstance(side, mx.array) and side.dtype in DTYPES:
            form = cls(side.shape[-1])
        else:
            return None
        arrays = col.arrays(side)
        short = any(array.size < LEAST_NUMBERS for array in arrays)
        _, heads, columns, _ = arrays[0].shape
        long = arrays[0].shape[0] * heads * columns > MOST_COLUMNS
        return None if form is None or form.dim not in HEAD_SIZES or short or long else form


@dataclass(frozen=True, slots=True)
class SpanForm:
    """Keys and values of a span."""

    keys: SideForm
    values: SideForm
    dtype: mx.Dtype
    """Type of numbers that are as the model has them."""

    @property
    def arrays(self) -> int:
        """Arrays of a span."""
        return self.keys.arrays + self.values.arrays

    @property
    def name(self) -> str:
        """A word for it in the names of kernels."""
        return f"{self.keys.name}_{self.values.name}"


def form_of(sides: Sequence[Side], dtype: mx.Dtype) -> SpanForm | None:
    """Return the form of keys and values; None if no kernel reads it."""
    keys, values = map(SideForm.of, sides)
    if keys is None or values is None:
        return None
    if any(isinstance(side, mx.array) and side.dtype != dtype for side in sides):
        return None
    return SpanForm(keys, values, dtype)


def _coded(side: Coded) -> SideForm | None:
    codec, dim = side.codec, side.dim
    if isinstance(codec, Turbo) and not codec.half:
        form = SideForm(padded(dim), codec.bits)
    elif isinstance(codec, Affine):
        form = SideForm(dim, codec.bits, codec.group_size)
    else:
        return None
    return form if form.bits in BITS else None
