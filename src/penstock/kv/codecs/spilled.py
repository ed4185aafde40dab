"""Keys or values that lie in a cold tier: of each block a checksum and its place are in memory.

A spilled side is cut, joined and shared as codes are. A reader gets the numbers that were
computed, to the bit: a reader fetches the blocks, and compares each with its checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import mlx.core as mx
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.kv.codecs.coded import Codec, Coded

BLOCK_TOKENS = 16
"""Tokens that are read, and checked, together: those that are chosen together."""
ENTRY_BYTES = 300
"""Python overhead of one block that is asked for, or that a cache holds."""
PIECE_TOKENS = 640
"""Most tokens of a side that are read together where all of them are."""
Numbers = NDArray[np.int32]
Checksums = NDArray[np.uint64]
RawBlocks = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class BlockList:
    """Blocks of one side of a layer, in any order."""

    layer: int
    side: int
    """0 for keys, 1 for values."""
    heads: Numbers
    """Number of the head of each block, (blocks,)."""
    places: Numbers
    """Place of each block, (blocks,)."""
    checksums: Checksums
    """Checksum of each block's bytes, (blocks,)."""

    def part(self, start: int, stop: int) -> BlockList:
        """Return the blocks start..stop-1."""
        own = slice(start, stop)
        return replace(
            self,
            heads=self.heads[own],
            places=self.places[own],
            checksums=self.checksums[own],
        )


class BlockReader(Protocol):
    """Fetches blocks, wherever they lie."""

    def fetch(self, wanted: Sequence[BlockList], *, chosen: bool) -> list[RawBlocks]:
        """Return the bytes of blocks, (blocks, bytes) for each list, in one request.

        Args:
            wanted: the blocks; some may be in several lists.
            chosen: whether the next step may want them again.

        Raises:
            SpilledLost: not all of them can be had, unharmed and in time.
        """


@dataclass(frozen=True, slots=True)
class Spilled(Codec):
    """How a side of a layer is held that lies in a tier: its checksums, and the blocks' places."""

    reader: BlockReader
    layer: int
    side: int
    """0 for keys, 1 for values."""
    dtype: mx.Dtype
    first_head: int = 0

    span: ClassVar[int] = BLOCK_TOKENS
    block_bytes: ClassVar[int] = 12
    """Bytes of a block's checksum and place, for each head."""
    buffers: ClassVar[float] = 1.6
    """Size that lets `PIECE_TOKENS` be dequantized together; it counts no array."""

    @property
    def name(self) -> str:
        return "spilled"

    def token_bits(self, dim: int) -> int:
        return self.block_bytes * 8 // BLOCK_TOKENS

    def of_heads(self, start: int, stop: int) -> Codec:
        return replace(self, first_head=self.first_head + start)

    def encode(self, x: mx.array) -> Coded:
        raise ValueError("keys and values are spilled with the places of their blocks")

    def spilled(self, x: mx.array, places: Numbers) -> Coded:
        """Return the part of (1, heads, tokens, dim) that stays in memory, evaluated.

        Args:
            x: the keys or values; tokens are a multiple of `BLOCK_TOKENS`.
            places: of their blocks, (blocks,).
        """
        _, heads, tokens, dim = x.shape
        blocks = tokens // BLOCK_TOKENS
        raw = np.asarray(mx.contiguous(x).reshape(heads, blocks, -1).view(mx.uint8))
        checksums = [[xxhash.xxh3_64_intdigest(block) for block in head] for head in raw]
        parts = (
            mx.array(np.array(checksums, np.uint64)[None]),
            # Not broadcast: MLX would hold one head's, where all of them are counted.
            mx.array(np.tile(places.astype(np.int32), (1, heads, 1))),
        )
        mx.eval(parts)
        return Coded(self, parts, dim)

    def blocks(self, coded: Coded, heads: Numbers, columns: Numbers) -> BlockList:
        """List blocks of a side by their heads and columns, (blocks,) each."""
        checksums, places = (np.asarray(part)[0, heads, columns] for part in coded.parts)
        first = np.int32(self.first_head)
        return BlockList(self.layer, self.side, heads + first, places, checksums)

    def all_blocks(self, coded: Coded) -> BlockList:
        """List all blocks of a side, head by head."""
        heads, columns = np.indices(coded.parts[0].shape[1:], np.int32)
        return self.blocks(coded, heads.reshape(-1), columns.reshape(-1))

    def wide(self, coded: Coded, raw: RawBlocks) -> mx.array:
        """Return the numbers of all blocks, (1, heads, tokens, dim), by their bytes."""
        numbers = mx.array(raw.reshape(-1)).view(self.dtype)
        return numbers.reshape(1, coded.parts[0].shape[1], coded.tokens, coded.dim)

    def dequantize(self, coded: Coded) -> mx.array:
        """Return the keys or values as they were computed, (1, heads, tokens, dim)."""
        (raw,) = self.reader.fetch([self.all_blocks(coded)], chosen=False)
        return self.wide(coded, raw)

    def score(self, queries: mx.array, coded: Coded) -> mx.array:
        return queries @ coded.dequantize().squeeze(0).swapaxes(-1, -2)

    def mix(self, weights: mx.array, coded: Coded) -> mx.array:
        return weights @ coded.dequantize().squeeze(0).astype(mx.float32)
