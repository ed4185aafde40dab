"""Keys or values that are in a cold tier; memory has only a checksum and a place per block.

A spilled side is split, joined and shared like codes. Its reader fetches the blocks and verifies
their checksums, so only the original bytes are ever used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard

import mlx.core as mx
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded

AT_REST = 1 << 30
"""Flag in a block's place: the tier stores raw values, to be read as if quantized by a codec."""
BLOCK_TOKENS = 16
"""Number of tokens read, verified and selected together."""
ENTRY_BYTES = 300
"""Python overhead of one requested block, in bytes."""
PIECE_TOKENS = 640
"""Maximum number of tokens of a side read at once if all tokens are read."""
Numbers = NDArray[np.int32]
Checksums = NDArray[np.uint64]
RawBlocks = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class BlockList:
    """Spilled blocks of the keys or values of one layer, in any order."""

    layer: int
    side: int
    """0 for keys, 1 for values."""
    heads: Numbers
    """KV head of each block, (blocks,)."""
    places: Numbers
    """Place of each block in the cold tier, (blocks,); may have the flag `AT_REST`."""
    checksums: Checksums
    """Checksum of each block, (blocks,)."""

    @classmethod
    def joined(cls, lists: Sequence[BlockList]) -> BlockList:
        if len(lists) == 1:
            return lists[0]
        columns = ("heads", "places", "checksums")
        joined = (np.concatenate([getattr(of, name) for of in lists]) for name in columns)
        return cls(lists[0].layer, lists[0].side, *joined)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Key blocks of one layer and the value blocks of the same tokens, in any order."""

    layer: int
    heads: Numbers
    """KV head of each pair, (pairs,)."""
    places: Numbers
    """Place of each pair in the cold tier, (pairs,)."""
    checksums: Checksums
    """Checksums of the key block and the value block of each pair, (pairs, 2)."""

    @classmethod
    def of(cls, keys: BlockList, values: BlockList) -> BlockPairs:
        checksums = np.stack([keys.checksums, values.checksums], axis=1)
        return cls(keys.layer, keys.heads, keys.places, checksums)

    @classmethod
    def joined(cls, parts: Sequence[BlockPairs]) -> BlockPairs:
        if len(parts) == 1:
            return parts[0]
        heads, places = (
            np.concatenate([getattr(p, n) for p in parts]) for n in ("heads", "places")
        )
        return cls(parts[0].layer, heads, places, np.concatenate([p.checksums for p in parts]))

    def subset(self, numbers: NDArray[np.int64]) -> BlockPairs:
        heads, places = self.heads[numbers], self.places[numbers]
        return BlockPairs(self.layer, heads, places, self.checksums[numbers])

    def side(self, side: int) -> BlockList:
        return BlockList(self.layer, side, self.heads, self.places, self.checksums[:, side])


@dataclass(frozen=True, slots=True, eq=False)
class HeldPairs:
    """Key and value blocks in memory, from `BlockCache.hold`; valid until it is called again.

    A pair is a key block and the value block of the same tokens; see `BlockPairs`.
    """

    memory: Sequence[RawBlocks]
    """Arrays (rows, bytes); a row has the bytes of a pair's keys, then of its values."""
    rows: Sequence[NDArray[np.int64]]
    """Row of each pair, (pairs,) per list; rows are numbered across all arrays of `memory`."""
    key_bytes: int
    """Bytes of a pair's key block; the other bytes of its row are the value block."""

    def addresses(self, number: int) -> NDArray[np.int64]:
        """Return the memory addresses of the keys and values of a list's pairs, (pairs, 2)."""
        rows, first = self.rows[number], 0
        keys = np.empty(len(rows), np.int64)
        for part in self.memory:
            inside = (rows >= first) & (rows < first + len(part))
            start = part.__array_interface__["data"][0] - first * part.strides[0]
            keys[inside] = start + rows[inside] * part.strides[0]
            first += len(part)
        return np.stack([keys, keys + self.key_bytes], axis=1)

    def copied(self, number: int) -> tuple[RawBlocks, RawBlocks]:
        """Copy the bytes of the keys and of the values of a list's pairs, (pairs, bytes) each."""
        rows, first = self.rows[number], 0
        copies = np.empty((len(rows), self.memory[0].shape[1]), np.uint8)
        for part in self.memory:
            inside = (rows >= first) & (rows < first + len(part))
            copies[inside] = part[rows[inside] - first]
            first += len(part)
        return copies[:, : self.key_bytes], copies[:, self.key_bytes :]


class BlockReader(ABC):
    @abstractmethod
    def fetch(self, lists: Sequence[BlockList]) -> list[RawBlocks]:
        """Read the blocks of each list, (blocks, bytes) uint8 each.

        Raises:
            SpilledLost: a block cannot be read.
        """


class BlockCache(BlockReader):
    """Block reader that caches blocks for the next steps."""

    @abstractmethod
    def hold(self, lists: Sequence[BlockPairs]) -> HeldPairs:
        """Load the pairs of all lists in one request.

        Args:
            lists: pairs of one layer, such as a list per sequence.

        Raises:
            SpilledLost: a block cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Spilled(Codec):
    """Codec of a side in a cold tier. Parts: checksums and places of the blocks."""

    reader: BlockReader
    layer: int
    side: int
    dtype: mx.Dtype
    first_head: int = 0
    rest: Codec | None = None
    """Codec that determines the values read; None if they are exactly those computed."""

    span: ClassVar[int] = BLOCK_TOKENS
    block_bytes: ClassVar[int] = 12
    """Bytes of a block's checksum and place, per head."""
    buffers: ClassVar[float] = 1.6
    """Chosen so that `PIECE_TOKENS` tokens are read at once; not a number of arrays."""

    @property
    def name(self) -> str:
        return "spilled"

    def token_bits(self, dim: int) -> int:
        return self.block_bytes * 8 // BLOCK_TOKENS

    def of_heads(self, start: int, stop: int) -> Codec:
        return replace(self, first_head=self.first_head + start)

    @property
    def form(self) -> Codec | None:
        return self.rest

    def at_rest(self, coded: Coded, codec: Codec) -> Coded:
        if self.rest is not None:
            return coded
        checksums, places = coded.parts
        resting = places | AT_REST
        mx.eval(resting)
        return Coded(replace(self, rest=codec), (checksums, resting), coded.dim)

    def encode(self, x: mx.array, ops: CodeOps) -> Coded:
        raise ValueError("spilling needs the places of the blocks: use `spilled`")

    def spilled(self, x: mx.array, places: Numbers) -> Coded:
        """Return the spilled form of an array (1, heads, tokens, dim), evaluated.

        `tokens` is a multiple of `BLOCK_TOKENS`; `places` has the place of each block, (blocks,).
        """
        _, heads, tokens, dim = x.shape
        blocks = tokens // BLOCK_TOKENS
        raw = np.asarray(mx.contiguous(x).reshape(heads, blocks, -1).view(mx.uint8))
        checksums = [[xxhash.xxh3_64_intdigest(block) for block in head] for head in raw]
        parts = (
            mx.array(np.array(checksums, np.uint64)[None]),
            # Not broadcast, because MLX would store one head while `nbytes` counts all.
            mx.array(np.tile(places.astype(np.int32), (1, heads, 1))),
        )
        mx.eval(parts)
        return Coded(self, parts, dim)

    @property
    def cache(self) -> BlockCache:
        """The reader, which is the block cache shared by all segments of a tree."""
        assert isinstance(self.reader, BlockCache)
        return self.reader

    def blocks(self, coded: Coded, heads: Numbers, columns: Numbers) -> BlockList:
        checksums, places = (np.asarray(part)[0, heads, columns] for part in coded.parts)
        first = np.int32(self.first_head)
        return BlockList(self.layer, self.side, heads + first, places, checksums)

    def all_blocks(self, coded: Coded) -> BlockList:
        return self.run(coded, 0, coded.tokens)

    def run(self, coded: Coded, start: int, stop: int) -> BlockList:
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        shape = coded.parts[0].shape[1], last - first
        heads, columns = np.indices(shape, np.int32).reshape(2, -1)
        return self.blocks(coded, heads, columns + np.int32(first))

    def numbers(self, coded: Coded, raw: RawBlocks) -> NDArray[np.float32] | mx.array:
        """Convert bytes of consecutive blocks to (heads, tokens, dim); a NumPy array if float32."""
        heads = coded.parts[0].shape[1]
        if self.dtype == mx.float32:
            return raw.view(np.float32).reshape(heads, -1, coded.dim)
        return mx.array(raw.reshape(-1)).view(self.dtype).reshape(heads, -1, coded.dim)

    def as_array(self, coded: Coded, raw: RawBlocks) -> mx.array:
        """Convert the bytes of all blocks to an array (1, heads, tokens, dim)."""
        return mx.array(self.numbers(coded, raw))[None]

    def dequantize(self, coded: Coded, ops: CodeOps) -> mx.array:
        (raw,) = self.reader.fetch([self.all_blocks(coded)])
        return self.as_array(coded, raw)

    def score(self, queries: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        return queries @ coded.dequantize(ops).squeeze(0).swapaxes(-1, -2)

    def mix(self, weights: mx.array, coded: Coded, ops: CodeOps) -> mx.array:
        return weights @ coded.dequantize(ops).squeeze(0).astype(mx.float32)


def is_spilled(side: object) -> TypeGuard[Coded]:
    return isinstance(side, Coded) and isinstance(side.codec, Spilled)
