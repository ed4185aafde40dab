"""A codec holds one side of a layer, its keys or its values, in fewer bits than the model's.

What is encoded is read as it lies: `score` and `mix` are the two products of attention, made of
the codes by `mx.quantized_matmul` wherever the form allows it, so that no back end needs a kernel
of its own. Scales are float16 whatever the model's type: they are most of what a float32 model
would pay otherwise.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, TypeAlias

import mlx.core as mx

from penstock.kv.lanes import LANES

TOKEN_AXIS = 2
GROUP_SIZES = (128, 64, 32)
"""Neighbours that can share a scale in `mx.quantized_matmul`."""
ALONG_FROM = {2: 3, 3: 3, 4: 2, 5: 4, 6: 3, 8: 1}
"""Rows from which a product along codes of so many bits is quicker with floats, on a CPU."""
ACROSS_FROM = {2: 3, 3: 3, 4: 5, 5: 3, 6: 5, 8: 5}
"""The same of a product across them."""
ROUNDING = 2.0**-11
"""What a number is off by in float16, as a share of it, at most,"""
SMALLEST = 2.0**-24
"""and the smallest that there is."""
INFINITY = 0x7C00
"""The bits of float16's; with the sign in front, of the other."""
INTEGERS = {2: (mx.int16, mx.uint16), 4: (mx.int32, mx.uint32)}
"""By the bytes of a number."""
HAS_FLOAT16 = platform.machine() in ("arm64", "aarch64")
"""Whether MLX computes with it on this processor; on others it takes it for two bytes."""
WIDE_AT_ONCE = 2**18
"""Codes that become floats together: 1 MiB."""
WIDE_ALIVE = 5
"""How many times as many are there, while MLX works on some operations ahead; 4.4 measured."""
Cut: TypeAlias = tuple[slice, slice]
"""Heads, and which of their tokens."""
Put: TypeAlias = Callable[[int, mx.array, int, int], None]
"""Takes the number of a part, an array of it, and its first head and first column there."""
Scales: TypeAlias = tuple[bytes, ...]
"""Of the channels of each head of keys, see `codecs.scales`; none at all: 1 everywhere."""


class Codec(ABC):
    """How numbers are held. Two that are equal encode a vector to the same bits."""

    span: ClassVar[int] = 1
    """Tokens that are encoded together; a run of tokens that is encoded, or cut, is a multiple."""

    in_place: ClassVar[bool] = True
    """Whether it is read as it lies, and not dequantized first."""

    buffers: ClassVar[float] = 8
    """Arrays of float32 that are alive together, at most, while something is encoded or
    dequantized; measured."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in settings; with the head size it is all of its identity."""

    @abstractmethod
    def token_bits(self, dim: int) -> int:
        """Return the bits that one token of one head takes, all parts together.

        Raises:
            ValueError: heads of this size cannot be held so; says why.
        """

    @property
    def takes_scales(self) -> bool:
        """Whether it holds keys better if their channels have scales."""
        return False

    def scaled(self, scales: Scales) -> Codec:
        """Return it for keys of such scales; itself if it takes none."""
        return self

    def of_heads(self, start: int, stop: int) -> Codec:
        """Return what reads the heads start..stop-1."""
        return self

    @abstractmethod
    def encode(self, x: mx.array) -> Coded:
        """Encode (batch, heads, tokens, dim), in any floating type."""

    def encode_by(self, cuts: Sequence[Cut], x: mx.array, put: Put) -> Iterator[None]:
        """Encode some heads' tokens at a time, to the bits of `encode`, and put them where they
        belong, one cut before each time it yields; not computed yet."""
        for heads, tokens in cuts:
            found = self.of_heads(heads.start, heads.stop).encode(x[:, heads, tokens])
            for number, part in enumerate(found.parts):
                put(number, part, heads.start, tokens.start // self.span)
            del found, part  # what was put is not held meanwhile
            yield

    @abstractmethod
    def dequantize(self, coded: Coded) -> mx.array:
        """Return what is read, (batch, heads, tokens, dim) float32: what `encode` was given, but
        for its error."""

    def transform_query(self, queries: mx.array) -> mx.array:
        """Return queries (heads, m, dim) as they meet the codes of keys."""
        return queries

    def inverse_transform(self, mixed: mx.array, dim: int) -> mx.array:
        """Return what was mixed of codes, or the sum of several, as values (heads, m, dim)."""
        return mixed

    @abstractmethod
    def score(self, transform_query: mx.array, coded: Coded) -> mx.array:
        """Multiply queries, turned, with one sequence's keys: (heads, m, tokens)."""

    @abstractmethod
    def mix(self, weights: mx.array, coded: Coded) -> mx.array:
        """Mix one sequence's values by weights (heads, m, tokens), to be turned back."""


@dataclass(frozen=True, slots=True)
class Coded:
    """One side of some tokens, encoded.

    Every part has tokens, or spans of them, on axis 2: (batch, heads, tokens / span, ...).
    """

    codec: Codec
    parts: tuple[mx.array, ...]
    dim: int
    """Numbers of a head."""

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.parts[0].shape[TOKEN_AXIS] * self.codec.span

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts)

    def take(self, start: int, stop: int) -> Coded:
        """Return the tokens start..stop-1 as a view; both are multiples of the codec's span."""
        span = self.codec.span
        if start % span or stop % span:
            raise ValueError(f"{self.codec.name} is cut every {span} tokens, not at {start, stop}")
        parts = tuple(part[:, :, start // span : stop // span] for part in self.parts)
        return Coded(self.codec, parts, self.dim)

    def of_heads(self, start: int, stop: int) -> Coded:
        """Return the heads start..stop-1 as a view."""
        parts = tuple(part[:, start:stop] for part in self.parts)
        return Coded(self.codec.of_heads(start, stop), parts, self.dim)

    def join(self, *others: Coded) -> Coded:
        """Return a copy of this one's tokens and then the others', which have the same codec."""
        runs = zip(self.parts, *(other.parts for other in others), strict=True)
        return Coded(
            self.codec,
            tuple(mx.concatenate(list(run), axis=TOKEN_AXIS) for run in runs),
            self.dim,
        )

    def after(self, earlier: mx.array) -> Coded:
        """Return the same, not read before `earlier` is computed: of what is read one after the
        other, little is dequantized at the same time."""
        codes, *others = self.parts
        return Coded(self.codec, (*mx.depends([codes], [earlier]), *others), self.dim)

    def is_finite(self) -> mx.array:
        """Tell whether all scales are numbers, a boolean: what is too large for float16 is not.

        Nothing is allocated for it: read as integers, what is no number is beyond all others.
        """
        found = mx.array(True)
        for part in self.parts:
            if part.dtype == mx.float16 and part.size:
                found = found & (part.view(mx.int16).max() < INFINITY)
                found = found & (part.view(mx.uint16).max() < INFINITY + 2**15)
        return found

    def dequantize(self) -> mx.array:
        """See `Codec.dequantize`."""
        return self.codec.dequantize(self)

    def score(self, queries: mx.array) -> mx.array:
        """Multiply queries (heads, m, dim) with one sequence's keys: (heads, m, tokens)."""
        return self.codec.score(self.codec.transform_query(queries), self)

    def mix(self, weights: mx.array) -> mx.array:
        """Mix one sequence's values by weights (heads, m, tokens): (heads, m, dim)."""
        return self.codec.inverse_transform(self.codec.mix(weights, self), self.dim)


def largest_group(dim: int) -> int:
    """Return how many neighbours share a scale if as many do as can.

    Raises:
        ValueError: no group divides the head.
    """
    for size in GROUP_SIZES:
        if dim % size == 0:
            return size
    raise ValueError(f"a head of {dim} numbers is not a multiple of 32, the smallest group")


def quantized(x: mx.array, group_size: int, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return codes, and scales and offsets as float16, of (..., n) in any floating type.

    MLX quantizes float32 quicker than float16 on a CPU. At 8 bits steps are so small that the
    rounding of scales counts, an eighth of the squared error: codes are made for the scales as
    they are rounded, on every device.
    """
    if bits == 8:
        return _bytes(x, group_size)
    codes, scales, offsets = mx.quantize(x.astype(mx.float32), group_size=group_size, bits=bits)
    return codes, scales.astype(mx.float16), offsets.astype(mx.float16)


def _bytes(x: mx.array, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return (..., n) in codes of 8 bits, three times as quickly as `mx.quantize` on a CPU."""
    scales, offsets, grid = Grid.of(x, group_size)
    return grid.codes(x), scales, offsets


@dataclass(frozen=True, slots=True)
class Grid:
    """What makes codes of 8 bits of numbers (..., n) in groups: (..., n / group), float32 each."""

    per_step: mx.array
    zero: mx.array
    """Where zero lies, and half a step: codes are cut, not rounded."""

    @classmethod
    def of(cls, x: mx.array, group_size: int) -> tuple[mx.array, mx.array, Grid]:
        """Return scales and offsets, float16, and what makes the codes that count them.

        Offsets are rounded down and scales up, so that no code is out of its range and none need
        be cut to it.
        """
        *rows, n = x.shape
        least, most = _extremes(x.reshape(*rows, n // group_size, group_size))
        offsets = (least - mx.abs(least) * (1.01 * ROUNDING) - SMALLEST).astype(mx.float16)
        wide = offsets.astype(mx.float32)
        scales = ((most - wide) * ((1 + 2 * ROUNDING) / 255) + SMALLEST).astype(mx.float16)
        per_step = 1 / scales.astype(mx.float32)
        return scales, offsets, cls(per_step, 0.5 - wide * per_step)

    def part(self, heads: slice, tokens: slice) -> Grid:
        """Return that of some of (batch, heads, tokens, dim)."""
        return Grid(self.per_step[:, heads, tokens], self.zero[:, heads, tokens])

    def codes(self, x: mx.array) -> mx.array:
        """Return the numbers' codes, (..., n / 4) uint32."""
        groups = _as_float32(x).reshape(*self.zero.shape, -1)
        found = groups * mx.expand_dims(self.per_step, -1) + mx.expand_dims(self.zero, -1)
        return found.astype(mx.uint8).reshape(x.shape).view(mx.uint32)


def _extremes(groups: mx.array) -> tuple[mx.array, mx.array]:
    """Return the least and the largest of the last axis, (...) float32; no numbers where one is
    none.

    On a CPU of the bits, read as integers, whose extremes MLX finds four times as quickly. They
    are in the order of the numbers as long as those are positive, and in the opposite one if they
    are negative, behind all others where no sign is looked at.
    """
    if mx.default_device() != mx.cpu or groups.dtype.size not in INTEGERS:
        return groups.min(axis=-1).astype(mx.float32), groups.max(axis=-1).astype(mx.float32)
    signed, unsigned = INTEGERS[groups.dtype.size]
    bits = groups.view(signed)
    low, high = bits.min(axis=-1), bits.max(axis=-1)
    furthest = groups.view(unsigned).max(axis=-1).view(signed)
    least, most = mx.where(low < 0, furthest, low), mx.where(high < 0, low, high)
    dtype = groups.dtype
    return least.view(dtype).astype(mx.float32), most.view(dtype).astype(mx.float32)


def _as_float32(x: mx.array) -> mx.array:
    """Return x as float32; what is no finite number may become one.

    A processor without float16 takes its bits apart three times as quickly as MLX does: sign and
    exponent move to where float32 has them, which counts exponents from 112 more.
    """
    if x.dtype != mx.float16 or mx.default_device() != mx.cpu or HAS_FLOAT16:
        return x.astype(mx.float32)
    bits = (x.view(mx.int16).astype(mx.int32) << 13) & ~(0b111 << 28)
    return bits.view(mx.float32) * 2.0**112


def multiply(
    x: mx.array,
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    transpose: bool,
    group_size: int,
    bits: int,
) -> mx.array:
    """Multiply by codes as `mx.quantized_matmul` does, in a precision that is quick.

    On the CPU that is float32 only: 60 to 150 times quicker than float16 (MLX 0.32.4). There MLX
    also reads every code again for each row of x; of several rows codes become floats once, which
    BLAS multiplies: 3 to 8 times quicker for 32 rows.
    """
    if mx.default_device() != mx.cpu:
        return mx.quantized_matmul(
            x,
            codes,
            scales.astype(x.dtype),
            biases.astype(x.dtype),
            transpose=transpose,
            group_size=group_size,
            bits=bits,
        )
    x, scales, biases = (part.astype(mx.float32) for part in (x, scales, biases))
    if x.shape[-2] < (ALONG_FROM if transpose else ACROSS_FROM)[bits]:
        return mx.quantized_matmul(
            x, codes, scales, biases, transpose=transpose, group_size=group_size, bits=bits
        )
    biases = biases + scales * 2 ** (bits - 1)  # of codes about zero, see `_Wide`
    found: list[mx.array] = []
    each = codes.ndim > 3  # tokens are in spans, with a product each
    count = codes.shape[1]
    step = max(1, WIDE_AT_ONCE * bits * count // max(1, 32 * codes.size))
    for start in range(0, max(1, count), step):
        some = slice(start, start + step)
        now = codes[:, some]
        if found:  # one after the other, so that few of them are floats at the same time
            now = mx.depends([now], [found[-1]])[0]
        held = _Wide(now, scales[:, some], biases[:, some], bits)
        if transpose:
            found.append(held.along(x[:, some] if each else x))
        else:
            found.append(held.across(x[:, some] if each else x[..., some]))
    if len(found) == 1:
        return found[0]
    if each or transpose:
        return mx.concatenate(found, axis=1 if each else -1)
    return sum(found[1:], start=found[0])


def wide_bytes(numbers: int) -> int:
    """Return what floats take, at most, while products are made of runs of up to so many codes,
    one run after the other in each lane."""
    return mx.float32.size * LANES * WIDE_ALIVE * min(numbers, WIDE_AT_ONCE)


def dequantized(
    codes: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """Return what codes (..., rows, words) stand for, float32, as `mx.dequantize` does; on a CPU
    2 to 13 times quicker."""
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    if mx.default_device() != mx.cpu:
        return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)
    planes = _planes(codes, bits)
    whole = planes[0] if len(planes) == 1 else mx.stack(planes, axis=-1)
    groups = whole.reshape(*scales.shape, group_size).astype(mx.float32)
    return (groups * scales[..., None] + biases[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class _Wide:
    """Codes whose products are made of floats: scales and offsets come behind, to what is small.

    Half their range is taken off all codes: in the sum of a product and an offset of about its
    size, but the other way, digits would be lost.
    """

    codes: mx.array
    """(..., rows, words)"""
    scales: mx.array
    """(..., rows, groups), as the offsets."""
    biases: mx.array
    bits: int

    def along(self, x: mx.array) -> mx.array:
        """Return x (..., m, n) times the rows: (..., m, rows)."""
        found, groups = None, self.scales.shape[-1]
        width = x.shape[-1] // groups
        for group in range(groups):
            part = x[..., group * width : (group + 1) * width]
            planes = self._floats(group)
            products = [
                part[..., number :: len(planes)] @ plane.swapaxes(-1, -2)
                for number, plane in enumerate(planes)
            ]
            scaled = sum(products[1:], start=products[0]) * self.scales[..., None, :, group]
            scaled = scaled + part.sum(axis=-1, keepdims=True) * self.biases[..., None, :, group]
            found = scaled if found is None else found + scaled
        assert found is not None
        return found

    def across(self, x: mx.array) -> mx.array:
        """Return the rows' sum, weighed by x (..., m, rows): (..., m, n)."""
        found = []
        for group in range(self.scales.shape[-1]):
            weights = x * self.scales[..., None, :, group]
            columns = mx.stack([weights @ plane for plane in self._floats(group)], axis=-1)
            offset = x @ self.biases[..., group : group + 1]
            found.append(columns.flatten(-2) + offset)
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)

    def _floats(self, group: int) -> list[mx.array]:
        """Return the planes of one group, about zero."""
        width = self.codes.shape[-1] // self.scales.shape[-1]
        codes = self.codes[..., group * width : (group + 1) * width]
        half = 2 ** (self.bits - 1)
        return [
            (plane - half).view(mx.int8).astype(mx.float32) for plane in _planes(codes, self.bits)
        ]


def _planes(codes: mx.array, bits: int) -> list[mx.array]:
    """Return codes (..., words) as uint8, (..., codes): number i of k has the codes i, i + k, ...

    They lie as `pack` lays them, the lowest bits first, in two bytes at most.
    """
    raw = codes.view(mx.uint8)
    common = gcd(8, bits)
    found = []
    for number in range(8 // common):
        first, shift = divmod(number * bits, 8)
        code = raw[..., first :: bits // common]
        if shift:
            code = code >> shift
        if shift + bits > 8:
            code = code | (raw[..., first + 1 :: bits // common] << (8 - shift))
        if shift + bits != 8:
            code = code & (2**bits - 1)
        found.append(code)
    return found


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes (..., n) below 2^bits as `mx.quantize` does: (..., n * bits / 32) uint32.

    One stream of bits, the lowest first; n is a multiple of 32.
    """
    *rows, n = codes.shape
    codes = codes.astype(mx.uint32).reshape(*rows, n // 32, 32)
    words = []
    for word in range(bits):
        first, last = 32 * word // bits, (32 * word + 31) // bits
        found = None
        for number in range(first, last + 1):
            shift = number * bits - 32 * word
            code = codes[..., number]
            moved = code << shift if shift >= 0 else code >> -shift
            found = moved if found is None else found | moved
        assert found is not None
        words.append(found)
    return mx.stack(words, axis=-1).reshape(*rows, n * bits // 32)


def unpack(packed: mx.array, bits: int) -> mx.array:
    """Undo `pack`: (..., words) -> (..., words * 32 / bits) uint32."""
    *rows, words = packed.shape
    packed = packed.reshape(*rows, words // bits, bits)
    codes = []
    for number in range(32):
        word, shift = divmod(number * bits, 32)
        code = packed[..., word] >> shift
        if shift + bits > 32:
            code = code | (packed[..., word + 1] << (32 - shift))
        codes.append(code & (2**bits - 1))
    return mx.stack(codes, axis=-1).reshape(*rows, words * 32 // bits)
