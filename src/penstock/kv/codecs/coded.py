"""Interface of codecs, which store the keys or values of a layer in fewer bits.

Attention reads codes without dequantizing them. Its two products, `score` and `mix`, use
`mx.quantized_matmul` where the format allows it, so that devices need no custom kernels. Scales are
float16 for any dtype of the model, as float32 scales would be larger than the codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

import mlx.core as mx

from penstock.kv.codecs.code_ops import CodeOps

TOKEN_AXIS = 2
GROUP_SIZES = (128, 64, 32)
"""Group sizes that `mx.quantized_matmul` supports."""
ROUNDING = 2.0**-11
"""Maximum relative rounding error of float16."""
SMALLEST = 2.0**-24
"""Smallest positive float16 number."""
INFINITY = 0x7C00
"""Bits of infinity in float16, without the sign."""
Cut: TypeAlias = tuple[slice, slice]
"""Range of heads, and range of tokens."""
Put: TypeAlias = Callable[[int, mx.array, int, int], None]
"""Callback that stores a piece of a part: index of the part, array, first head, first column."""
Scales: TypeAlias = tuple[bytes, ...]
"""Scales of the key channels of each head, see `codecs.scales`; empty means 1 everywhere."""


class Codec(ABC):
    """A quantized format of KV. Equal codecs encode a vector to the same bits."""

    span: ClassVar[int] = 1
    """Number of tokens encoded together; ranges to encode or slice are multiples of it."""

    buffers: ClassVar[float] = 8
    """Maximum number of float32 arrays alive while encoding or dequantizing; measured."""

    FORMS: ClassVar[str] = ""

    @classmethod
    def parse(cls, word: str, *, keys: bool) -> Self | None:
        """Return the codec that a setting names, for keys or values; None for other names."""
        return None

    @property
    def of_values(self) -> str | None:
        """Name of the codec for values where a setting names this one alone; None for this one."""
        return None

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def token_bits(self, dim: int) -> int:
        """Return the bits per token and head; raises ValueError for unsupported head sizes."""

    @property
    def takes_scales(self) -> bool:
        """Whether channel scales make its codes of keys more accurate."""
        return False

    def scaled(self, scales: Scales) -> Codec:
        """Return this codec with channel scales for keys, if it uses them."""
        return self

    def of_heads(self, start: int, stop: int) -> Codec:
        """Return this codec for the heads `start..stop - 1` only."""
        return self

    @property
    def form(self) -> Codec | None:
        """Codec that determines the values read; None if they are exactly those computed."""
        return self

    def at_rest(self, coded: Coded, codec: Codec) -> Coded:
        """Return `coded`, marked to be read as if quantized by `codec` if it was spilled raw.

        Other sides are returned unchanged.
        """
        return coded

    @abstractmethod
    def encode(self, x: mx.array, ops: CodeOps) -> Coded:
        """Encode an array (batch, heads, tokens, dim) of any float dtype."""

    def encode_by(self, cuts: Sequence[Cut], x: mx.array, put: Put, ops: CodeOps) -> Iterator[None]:
        """Encode parts of an array one by one, lazily, to the same bits as `encode`.

        Args:
            cuts: ranges of heads and tokens; each iteration encodes one.
            x: array (batch, heads, tokens, dim).
            put: stores the codes of a range.
            ops: operations of the device.
        """
        for heads, tokens in cuts:
            coded = self.of_heads(heads.start, heads.stop).encode(x[:, heads, tokens], ops)
            for number, part in enumerate(coded.parts):
                put(number, part, heads.start, tokens.start // self.span)
            del coded, part  # not kept alive during the yield
            yield

    @abstractmethod
    def dequantize(self, coded: Coded, ops: CodeOps) -> mx.array:
        """Decode to an array (batch, heads, tokens, dim), float32 unless the codec is lossless."""

    def transform_query(self, queries: mx.array) -> mx.array:
        """Transform queries (heads, m, dim) for products with the codes of keys."""
        return queries

    def inverse_transform(self, mixed: mx.array, dim: int) -> mx.array:
        """Transform a result of `mix` back to values, (heads, m, dim)."""
        return mixed

    @abstractmethod
    def score(self, queries: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        """Multiply transformed queries with one sequence's keys: (heads, m, tokens)."""

    @abstractmethod
    def mix(self, weights: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        """Sum one sequence's values with weights (heads, m, tokens); see `inverse_transform`."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Encoded keys or values; axis 2 of every part is tokens, or spans of tokens."""

    codec: Codec
    parts: tuple[mx.array, ...]
    dim: int

    @property
    def tokens(self) -> int:
        return self.parts[0].shape[TOKEN_AXIS] * self.codec.span

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def take(self, start: int, stop: int) -> Coded:
        """Return a view of the tokens `start..stop - 1`, both multiples of the codec's span."""
        span = self.codec.span
        if start % span or stop % span:
            raise ValueError(f"{self.codec.name} is cut every {span} tokens, not at {start, stop}")
        parts = tuple(part[:, :, start // span : stop // span] for part in self.parts)
        return Coded(self.codec, parts, self.dim)

    def of_heads(self, start: int, stop: int) -> Coded:
        parts = tuple(part[:, start:stop] for part in self.parts)
        return Coded(self.codec.of_heads(start, stop), parts, self.dim)

    def join(self, *others: Coded) -> Coded:
        runs = zip(self.parts, *(other.parts for other in others), strict=True)
        return Coded(
            self.codec,
            tuple(mx.concatenate(list(run), axis=TOKEN_AXIS) for run in runs),
            self.dim,
        )

    def after(self, earlier: mx.array) -> Coded:
        """Return this side, to be evaluated only after `earlier`."""
        codes, *others = self.parts
        return Coded(self.codec, (*mx.depends([codes], [earlier]), *others), self.dim)

    def is_finite(self) -> mx.array:
        """Return whether all scales are finite, as a bool array; False if float16 overflowed.

        Compares them as integers, where infinity and NaN exceed all finite values, which needs no
        memory.
        """
        finite = mx.array(True)
        for part in self.parts:
            if part.dtype == mx.float16 and part.size:
                finite = finite & (part.view(mx.int16).max() < INFINITY)
                finite = finite & (part.view(mx.uint16).max() < INFINITY + 2**15)
        return finite

    def dequantize(self, ops: CodeOps) -> mx.array:
        return self.codec.dequantize(self, ops)

    def score(self, queries: mx.array, ops: CodeOps) -> mx.array:
        """Multiply queries (heads, m, dim) with one sequence's keys: (heads, m, tokens)."""
        return self.codec.score(self.codec.transform_query(queries), self, ops)

    def mix(self, weights: mx.array, ops: CodeOps) -> mx.array:
        """Sum one sequence's values with weights (heads, m, tokens): (heads, m, dim)."""
        return self.codec.inverse_transform(self.codec.mix(weights, self, ops), self.dim)


def largest_group(dim: int) -> int:
    """Return the largest supported group size for a head size; raises ValueError if none fits."""
    for size in GROUP_SIZES:
        if dim % size == 0:
            return size
    raise ValueError(f"a head of {dim} numbers is not a multiple of 32, the smallest group")


def quantized(
    x: mx.array, group_size: int, bits: int, ops: CodeOps
) -> tuple[mx.array, mx.array, mx.array]:
    """Quantize an array (..., n); return codes, and float16 scales and offsets.

    Converts to float32 first, which MLX quantizes faster on a CPU. With 8 bits, rounding the scales
    would add an eighth of the squared error, so the codes are computed for the rounded scales.
    """
    if bits == 8:
        return _bytes(x, group_size, ops)
    codes, scales, offsets = mx.quantize(x.astype(mx.float32), group_size=group_size, bits=bits)
    return codes, scales.astype(mx.float16), offsets.astype(mx.float16)


def _bytes(x: mx.array, group_size: int, ops: CodeOps) -> tuple[mx.array, mx.array, mx.array]:
    """Quantize (..., n) to 8 bits, three times faster than `mx.quantize` on a CPU."""
    scales, offsets, grid = Grid.of(x, group_size, ops)
    return grid.codes(x, ops), scales, offsets


@dataclass(frozen=True, slots=True)
class Grid:
    """Rounded scales and offsets with which 8-bit codes are computed, (..., n / group) float32."""

    per_step: mx.array
    zero: mx.array
    """Code of zero, plus 0.5 so that truncating rounds."""

    @classmethod
    def of(cls, x: mx.array, group_size: int, ops: CodeOps) -> tuple[mx.array, mx.array, Grid]:
        """Return the float16 scales and offsets of x, and the grid to compute its codes."""
        *rows, n = x.shape
        smallest, largest = ops.extremes(x.reshape(*rows, n // group_size, group_size))
        offsets = (smallest - mx.abs(smallest) * (1.01 * ROUNDING) - SMALLEST).astype(mx.float16)
        rounded = offsets.astype(mx.float32)
        scales = ((largest - rounded) * ((1 + 2 * ROUNDING) / 255) + SMALLEST).astype(mx.float16)
        per_step = 1 / scales.astype(mx.float32)
        return scales, offsets, cls(per_step, 0.5 - rounded * per_step)

    def part(self, heads: slice, tokens: slice) -> Grid:
        return Grid(self.per_step[:, heads, tokens], self.zero[:, heads, tokens])

    def codes(self, x: mx.array, ops: CodeOps) -> mx.array:
        """Return the packed codes of x, (..., n / 4) uint32."""
        groups = ops.as_float32(x).reshape(*self.zero.shape, -1)
        steps = groups * mx.expand_dims(self.per_step, -1) + mx.expand_dims(self.zero, -1)
        return steps.astype(mx.uint8).reshape(x.shape).view(mx.uint32)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes (..., n) below 2^bits as `mx.quantize` does: (..., n * bits / 32) uint32."""
    *rows, n = codes.shape
    codes = codes.astype(mx.uint32).reshape(*rows, n // 32, 32)
    words = []
    for word in range(bits):
        first, last = 32 * word // bits, (32 * word + 31) // bits
        packed = None
        for number in range(first, last + 1):
            shift = number * bits - 32 * word
            code = codes[..., number]
            moved = code << shift if shift >= 0 else code >> -shift
            packed = moved if packed is None else packed | moved
        assert packed is not None
        words.append(packed)
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
