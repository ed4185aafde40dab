"""Keys or values in a cold tier; memory has only a checksum and a place per block.

A spilled side is split, joined and shared like codes. Its reader fetches the blocks and verifies
their checksums, so that it gets exactly the original bytes.
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
"""Flag in a block's place if the tier stores other values than are read: the originals of values
that a codec at rest decodes."""
BLOCK_TOKENS = 16
"""Number of tokens read, verified and selected together."""
ENTRY_BYTES = 300
"""Python overhead of one requested block, in bytes."""
PIECE_TOKENS = 640
"""Maximum tokens of a side read at once if all of them are read."""
Numbers = NDArray[np.int32]
Checksums = NDArray[np.uint64]
RawBlocks = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class BlockList:
    layer: int
    side: int
    heads: Numbers
    places: Numbers
    checksums: Checksums

    @classmethod
    def joined(cls, lists: Sequence[BlockList]) -> BlockList:
        if len(lists) == 1:
            return lists[0]
        columns = ("heads", "places", "checksums")
        joined = (np.concatenate([getattr(of, name) for of in lists]) for name in columns)
        return cls(lists[0].layer, lists[0].side, *joined)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Blocks of keys, and of values of the same tokens, of one layer, in any order."""

    layer: int
    heads: Numbers
    places: Numbers
    checksums: Checksums
    """Checksums of each pair's keys and values, (pairs, 2)."""

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
    """Locations of pairs of blocks in memory, valid until the next request."""

    memory: Sequence[RawBlocks]
    """Bytes of each pair's keys and then values, (rows, bytes)."""
    rows: Sequence[NDArray[np.int64]]
    """Row of each pair, (pairs,) per list; rows are numbered over all of the memory."""
    key_bytes: int

    def addresses(self, number: int) -> NDArray[np.int64]:
        """Return the addresses of keys and values of a list's pairs, (pairs, 2)."""
        rows, first = self.rows[number], 0
        keys = np.empty(len(rows), np.int64)
        for part in self.memory:
            inside = (rows >= first) & (rows < first + len(part))
            start = part.__array_interface__["data"][0] - first * part.strides[0]
            keys[inside] = start + rows[inside] * part.strides[0]
            first += len(part)
        return np.stack([keys, keys + self.key_bytes], axis=1)

    def copied(self, number: int) -> tuple[RawBlocks, RawBlocks]:
        """Return copies of the bytes of a list's keys and values, (pairs, bytes) each."""
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
        """Return the bytes of blocks, (blocks, bytes) for each list, or raise SpilledLost."""


class BlockCache(BlockReader):
    """Reads blocks, and caches those that the next step may need again."""

    @abstractmethod
    def hold(self, lists: Sequence[BlockPairs]) -> HeldPairs:
        """Load the blocks of all lists of one layer in a single request, or raise SpilledLost."""


@dataclass(frozen=True, slots=True)
class Spilled(Codec):
    """Codec of a side in a cold tier: its checksums, and the places of the blocks."""

    reader: BlockReader
    layer: int
    side: int
    dtype: mx.Dtype
    first_head: int = 0
    rest: Codec | None = None
    """Codec at rest whose decoded values are read; None for values as computed."""

    span: ClassVar[int] = BLOCK_TOKENS
    block_bytes: ClassVar[int] = 12
    """Bytes of a block's checksum and place, per head."""
    buffers: ClassVar[float] = 1.6
    """Value chosen so that `PIECE_TOKENS` are dequantized together; does not count arrays."""

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
        raise ValueError("keys and values are spilled with the places of their blocks")

    def spilled(self, x: mx.array, places: Numbers) -> Coded:
        """Return the part of (1, heads, tokens, dim) that stays in memory, evaluated.

        `tokens` is a multiple of `BLOCK_TOKENS`; `places` has the place of each block, (blocks,).
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

    @property
    def cache(self) -> BlockCache:
        """The reader as the block cache that all segments of a tree share."""
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
        """Return the values of a run of blocks, (heads, tokens, dim); a NumPy array if float32."""
        heads = coded.parts[0].shape[1]
        if self.dtype == mx.float32:
            return raw.view(np.float32).reshape(heads, -1, coded.dim)
        return mx.array(raw.reshape(-1)).view(self.dtype).reshape(heads, -1, coded.dim)

    def as_array(self, coded: Coded, raw: RawBlocks) -> mx.array:
        """Return the values of all blocks, (1, heads, tokens, dim), from their bytes."""
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
