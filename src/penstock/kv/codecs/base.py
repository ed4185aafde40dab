"""A codec holds one side of a layer, its keys or its values, in fewer bits than the model's.

What is encoded is read as it lies: `score` and `mix` are the two products of attention, made of
the codes by `mx.quantized_matmul` wherever the form allows it, so that no back end needs a kernel
of its own. Scales are float16 whatever the model's type: they are most of what a float32 model
would pay otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import mlx.core as mx

TOKEN_AXIS = 2
GROUP_SIZES = (128, 64, 32)
"""Neighbours that can share a scale in `mx.quantized_matmul`."""
Scales: TypeAlias = tuple[bytes, ...]
"""Of the channels of each head of keys, see `codecs.scales`; none at all: 1 everywhere."""


class Codec(ABC):
    """How numbers are held. Two that are equal encode a vector to the same bits."""

    span: ClassVar[int] = 1
    """Tokens that are encoded together; a run of tokens that is encoded, or cut, is a multiple."""

    in_place: ClassVar[bool] = True
    """Whether it is read as it lies, and not widened first."""

    buffers: ClassVar[int] = 8
    """Arrays of float32 that are alive together, at most, while something is encoded or widened;
    measured."""

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

    @abstractmethod
    def widen(self, coded: Coded) -> mx.array:
        """Return what is read, (batch, heads, tokens, dim) float32: what `encode` was given, but
        for its error."""

    @abstractmethod
    def score(self, queries: mx.array, coded: Coded) -> mx.array:
        """Multiply queries (heads, m, dim) with one sequence's keys: (heads, m, tokens)."""

    @abstractmethod
    def mix(self, weights: mx.array, coded: Coded) -> mx.array:
        """Mix one sequence's values by weights (heads, m, tokens): (heads, m, dim)."""


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

    def is_finite(self) -> bool:
        """Tell whether all scales are numbers: what is too large for float16 is not."""
        scales = [part for part in self.parts if part.dtype == mx.float16]
        return bool(mx.all(mx.stack([mx.isfinite(part).all() for part in scales])))

    def widen(self) -> mx.array:
        """See `Codec.widen`."""
        return self.codec.widen(self)

    def score(self, queries: mx.array) -> mx.array:
        """See `Codec.score`."""
        return self.codec.score(queries, self)

    def mix(self, weights: mx.array) -> mx.array:
        """See `Codec.mix`."""
        return self.codec.mix(weights, self)


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

    MLX quantises float32 quicker than float16: 2.2 ns a number on a CPU, and 3.7. At 8 bits, where
    steps are so small that the rounding of scales counts (an eighth of the squared error), it is to
    know of that.
    """
    x = x.astype(mx.float16 if bits == 8 else mx.float32)
    codes, scales, offsets = mx.quantize(x, group_size=group_size, bits=bits)
    return codes, scales.astype(mx.float16), offsets.astype(mx.float16)


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

    On the CPU that is float32 only: 60 to 150 times quicker than float16 (MLX 0.32.4).
    """
    dtype = mx.float32 if mx.default_device() == mx.cpu else x.dtype
    return mx.quantized_matmul(
        x.astype(dtype),
        codes,
        scales.astype(dtype),
        biases.astype(dtype),
        transpose=transpose,
        group_size=group_size,
        bits=bits,
    )


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
