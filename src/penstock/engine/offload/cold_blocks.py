"""Spilled blocks of keys and values: their places, a cache, and verified reads.

    hold ───> in the cache? ──no──> one request for the others: parts of records, in the order of
              their bytes, neighbors merged ──> checksums
         ───> damaged, missing or late: the next tier, or `SpilledLost`
    fetch ──> the same without the cache, for blocks that are read once

A place is the index of a block of `BLOCK_TOKENS` tokens, counted over all spilled records.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.engine.offload.engine_tier import EngineTier
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.stats import SpillCounts
from penstock.errors import LedgerFull, SpilledLost
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec
from penstock.kv.codecs.spilled import (
    AT_REST,
    BLOCK_TOKENS,
    PIECE_TOKENS,
    BlockCache,
    BlockList,
    BlockPairs,
    Checksums,
    HeldPairs,
    Numbers,
    RawBlocks,
)
from penstock.kv.quantization import QuantizationRule
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind, Ledger
from penstock.tiers.record import ArrayPart
from penstock.tiers.store import Store

logger = logging.getLogger(__name__)

LATE_SECONDS = 10.0
"""Timeout of a tier's read of blocks."""
RECORD_BYTES = 400
"""Python overhead of one spilled record, in bytes."""
STREAMED_COPIES = 6
"""Copies of a streamed piece: as read, reordered, and in MLX; for two pieces at a time."""
SIDES = ("keys", "values")
Wanted: TypeAlias = dict[bytes, list[ArrayPart]]
Parts: TypeAlias = dict[bytes, list[RawBlocks]]


class ColdBlocks(BlockCache):
    """Reads spilled blocks. Not thread-safe: owned by the engine's thread.

    Reserves memory for a cache of `cached_tokens`, for places and for read buffers; raises
    LedgerFull or NeverFits.
    """

    def __init__(
        self,
        tiers: TierGroup,
        shapes: Sequence[LayerShape],
        *,
        record_tokens: int,
        ledger: Ledger,
        cached_tokens: int,
        layers: Collection[int],
        rule: QuantizationRule,
        ops: CodeOps,
    ) -> None:
        self.ops = ops
        self._codecs = _codecs(rule, layers)
        self.counts = SpillCounts()
        self.record_blocks = record_tokens // BLOCK_TOKENS
        self._tiers = tiers
        self._shapes = shapes
        pairs = {n: cached_tokens // BLOCK_TOKENS * shapes[n].kv_heads for n in layers}
        streamed = STREAMED_COPIES * PIECE_TOKENS * max(shapes[n].nbytes for n in layers)
        self.cache_bytes = sum(
            count * (sum(self._sizes(n)) + SLOT_BYTES) for n, count in pairs.items()
        )
        self._fixed_bytes = self.cache_bytes + streamed + self._decoding_bytes()
        self._reserved = ledger.reserve(Kind.BUFFERS, self._fixed_bytes)
        self._caches = {n: PairCache(count, sum(self._sizes(n))) for n, count in pairs.items()}
        self._numbers: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self._reserved.nbytes

    @property
    def records(self) -> int:
        return len(self._keys)

    def _sizes(self, layer: int) -> tuple[int, int]:
        shape = self._shapes[layer]
        token_bytes = BLOCK_TOKENS * shape.dtype.size
        return shape.key_dim * token_bytes, shape.value_dim * token_bytes

    def _decoding_bytes(self) -> int:
        """Return the bytes of the buffers in which a codec decodes a piece of one head."""
        return max(
            (
                int(codec.buffers * PIECE_TOKENS * mx.float32.size * dim)
                for layer, codecs in self._codecs.items()
                for codec, dim in zip(codecs, self._dims(layer), strict=True)
                if codec is not None
            ),
            default=0,
        )

    def _dims(self, layer: int) -> tuple[int, int]:
        return self._shapes[layer].key_dim, self._shapes[layer].value_dim

    # ---- places

    def place(self, key: bytes) -> int | None:
        """Return the place of a record's first block, assigned if new; None if out of memory.

        A place is the number of a spilled block; the blocks of a record have consecutive ones.
        """
        number = self._numbers.get(key)
        if number is None:
            try:
                self._reserved.resize(self._reserved.nbytes + RECORD_BYTES)
            except LedgerFull:
                return None
            number = self._next
            self._next += 1
            self._numbers[key], self._keys[number] = number, key
        return number * self.record_blocks

    def retain(self, places: Collection[int]) -> None:
        kept = {self._record(place) for place in places}
        for number in [number for number in self._keys if number not in kept]:
            key = self._keys.pop(number)
            if self._numbers.get(key) == number:  # unless it was lost and then spilled again
                del self._numbers[key]
        self._reserved.resize(self._fixed_bytes + RECORD_BYTES * len(self._keys))

    def forget(self, places: Collection[int]) -> None:
        """Forget the records of the blocks at `places`: the next spill looks them up again."""
        for number in set(map(self._record, places)):
            key = self._keys.get(number)
            if key is not None:
                self._numbers.pop(key, None)

    def drop(self, places: Collection[int]) -> None:
        """Have the tiers drop, as damaged, the records of the blocks at `places`."""
        keys = {self._keys[number] for number in map(self._record, places)}
        self.forget(places)
        for tier in self._tiers:
            for key in keys:
                tier.tier.call(partial(_drop_damaged, key=key), None)

    def _record(self, place: int) -> int:
        return (place & ~AT_REST) // self.record_blocks

    def stored(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the keys of records that have a place or are in a tier; one lookup per tier."""
        present, none = {key for key in keys if key in self._numbers}, list[bytes]()
        for tier in self._tiers:
            missing = [key for key in keys if key not in present]
            if not missing:
                break
            with suppress(TimeoutError):
                present.update(
                    tier.tier.call(partial(_held, keys=missing), none).result(LATE_SECONDS)
                )
        return present

    def release(self) -> None:
        self._reserved.release()

    # ---- reading

    def hold(self, lists: Sequence[BlockPairs]) -> HeldPairs:
        pairs = BlockPairs.joined(lists)
        cache, split = self._caches[pairs.layer], self._sizes(pairs.layer)[0]
        # A quantized block has the checksum of its raw record, but other values.
        names = pairs.checksums ^ ((pairs.places & AT_REST) != 0).astype(np.uint64)[:, None]
        rows, memory, new = cache.find(names), [cache.room], 0
        lacking = np.flatnonzero(rows < 0)
        if len(lacking):
            records, offsets = np.divmod(pairs.places[lacking] & ~AT_REST, self.record_blocks)
            lacking = lacking[np.lexsort((offsets, pairs.heads[lacking], records))]
            numbers: dict[tuple[int, ...], int] = {}
            same = [
                numbers.setdefault(pair, len(numbers))
                for pair in map(tuple, names[lacking].tolist())
            ]
            _, firsts = np.unique(same, return_index=True)
            missing_pairs, new = pairs.subset(lacking[firsts]), len(numbers)
            slots = cache.make_room(new)
            raw = self._read([missing_pairs.side(0), missing_pairs.side(1)])
            memory.append(np.concatenate([part[len(slots) :] for part in raw], axis=1))
            cache.keep(slots, names[lacking[firsts]][: len(slots)], raw)
            beside = np.arange(len(cache.room), len(cache.room) + len(memory[1]))
            rows[lacking] = np.concatenate([slots, beside])[same]
        self.counts.cached_blocks += 2 * (len(rows) - new)
        self.counts.read_blocks += 2 * new
        ends = np.cumsum([len(of.places) for of in lists])
        return HeldPairs(memory, np.split(rows, ends[:-1]), split)

    def fetch(self, lists: Sequence[BlockList]) -> list[RawBlocks]:
        raw = self._read(lists)
        self.counts.streamed_blocks += sum(map(len, raw))
        return raw

    def as_recorded(self, layer: int, side: int, places: Numbers) -> mx.array:
        """Return the values of all heads from the tiers, unverified, or raise SpilledLost."""
        shape = self._shapes[layer]
        heads = np.repeat(np.arange(shape.kv_heads, dtype=np.int32), len(places))
        every = np.tile(places, shape.kv_heads)
        (raw,) = self._read([BlockList(layer, side, heads, every, np.zeros(0, np.uint64))])
        numbers = mx.array(raw.reshape(-1)).view(shape.dtype)
        return numbers.reshape(1, shape.kv_heads, -1, self._dims(layer)[side])

    def forget_cached(self) -> None:
        for cache in self._caches.values():
            cache.clear()

    def _read(self, lists: Sequence[BlockList]) -> list[RawBlocks]:
        """Read blocks, (blocks, bytes) each, from the nearest tiers, or raise SpilledLost."""
        raw: dict[int, RawBlocks] = {}
        missing: list[_Slice] = []
        ends = dict.fromkeys((of.side for of in lists), 0)
        places = []
        for side in ends:  # all lists of a side together, to merge neighbors
            blocks = BlockList.joined([of for of in lists if of.side == side])
            raw[side] = np.empty((len(blocks.places), self._sizes(blocks.layer)[side]), np.uint8)
            missing += self._slices(blocks, raw[side])
        for of in lists:
            start = ends[of.side]
            ends[of.side] += len(of.places)
            places.append((of.side, slice(start, ends[of.side])))
        for tier in self._tiers:
            if not missing:
                break
            by_record: dict[bytes, list[_Slice]] = {}
            for part in missing:
                by_record.setdefault(part.key, []).append(part)
            missing = self._read_from(tier, by_record)
        if missing:
            lost = {place for part in missing for place in part.places}
            self.counts.lost_blocks += sum(len(part.rows) for part in missing)
            raise SpilledLost(tuple(lost))
        read = [raw[side][rows] for side, rows in places]
        for of, block_bytes in zip(lists, read, strict=True):
            self._rest(of, block_bytes)
        return read

    def _rest(self, of: BlockList, raw: RawBlocks) -> None:
        """Quantize and dequantize blocks that were spilled quantized, in place.

        Blocks with values too large for the codec's scales stay as computed.
        """
        resting = (of.places & AT_REST) != 0
        codec = self._codecs[of.layer][of.side] if resting.any() else None
        if codec is None:
            return
        dtype, piece_blocks = self._shapes[of.layer].dtype, PIECE_TOKENS // BLOCK_TOKENS
        for head in np.unique(of.heads[resting]).tolist():
            rows = np.flatnonzero(resting & (of.heads == head))
            coder = codec.of_heads(head, head + 1)
            for first in range(0, len(rows), piece_blocks):
                piece = rows[first : first + piece_blocks]
                numbers = mx.array(raw[piece].reshape(-1)).view(dtype)
                numbers = numbers.reshape(1, 1, -1, self._dims(of.layer)[of.side])
                decoded = coder.encode(numbers, self.ops).dequantize(self.ops).astype(dtype)
                if mx.isfinite(decoded).all():  # else the codec's scales overflow
                    raw[piece] = np.asarray(decoded.reshape(-1).view(mx.uint8)).reshape(
                        len(piece), -1
                    )

    def _read_from(self, tier: EngineTier, by_record: dict[bytes, list[_Slice]]) -> list[_Slice]:
        for slices in by_record.values():
            slices.sort(key=lambda part: part.part)
        self.counts.requests += 1
        read = self._asked(
            tier, {key: [part.part for part in slices] for key, slices in by_record.items()}
        )
        missing = []
        for key, slices in by_record.items():
            parts = read.get(key)
            if parts is None:
                missing += slices
                continue
            wrong = [part for part, data in zip(slices, parts, strict=True) if not part.takes(data)]
            if wrong:
                tier.tier.call(partial(_drop_damaged, key=key), None)
            missing += wrong
            self.counts.read_bytes += sum(part.part.nbytes for part in slices)
        return missing

    def _slices(self, of: BlockList, raw: RawBlocks) -> Iterator[_Slice]:
        numbers, offsets = np.divmod(of.places & ~AT_REST, self.record_blocks)
        starts = of.heads * self.record_blocks + offsets
        order = np.lexsort((starts, numbers))
        numbers, starts = numbers[order], starts[order]
        ends = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(starts) != 1)) + 1
        firsts = np.concatenate([[0], ends])
        name, nbytes = f"{of.layer}.{SIDES[of.side]}", raw.shape[1]
        places = (of.places[order] & ~AT_REST).tolist()
        checksums = of.checksums[order].tolist() if len(of.checksums) else []
        records = (self._keys[number] for number in numbers[firsts].tolist())
        begin = starts[firsts].tolist()
        runs = pairwise([*firsts.tolist(), len(starts)])
        for (first, last), start, key in zip(runs, begin, records, strict=True):
            part = ArrayPart(name, start * nbytes, (last - first) * nbytes)
            span = slice(first, last)
            yield _Slice(key, part, places[span], checksums[span], raw, order[span])

    def _asked(self, tier: EngineTier, parts: Wanted) -> Parts:
        answer = tier.tier.read_parts(parts)
        try:
            return answer.result(LATE_SECONDS)
        # After an error of the store, the blocks count as lost.
        except Exception as error:
            error.__traceback__ = None  # its frames would keep the step's arrays alive
            answer.cancel()
            name = type(error).__name__
            logger.warning("could not read spilled blocks (records: %d): %s", len(parts), name)
            logger.debug("traceback of the failed read", exc_info=error)
            return {}


def _codecs(
    rule: QuantizationRule, layers: Collection[int]
) -> dict[int, tuple[Codec | None, Codec | None]]:
    schemes = {n: rule.scheme.of_layer(n) for n in layers if n not in rule.raw_layers}
    return {n: (scheme.keys, scheme.values) for n, scheme in schemes.items()}


def _held(store: Store, keys: Sequence[bytes]) -> list[bytes]:
    return [key for key in keys if store.holds(key)]


def _drop_damaged(store: Store, key: bytes) -> None:
    store.drop_damaged(key)


class _Slice(NamedTuple):
    key: bytes
    part: ArrayPart
    places: list[int]
    checksums: list[int]
    """Checksums of the blocks; empty to skip the verification."""
    raw: RawBlocks
    rows: NDArray[np.int64]

    def takes(self, data: RawBlocks) -> bool:
        """Copy the bytes to their rows; return False if a checksum is wrong."""
        blocks = data.reshape(len(self.rows), -1)
        if (
            self.checksums
            and [xxhash.xxh3_64_intdigest(block.data) for block in blocks] != self.checksums
        ):
            return False
        self.raw[self.rows] = blocks
        return True


Slots: TypeAlias = NDArray[np.int64]
SLOT_BYTES = 64
"""Bytes of a pair in addition to its keys and values: checksums, last request, name and order."""
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Odd factor of the second checksum in a pair's name."""
FREE = -1


class PairCache:
    """LRU cache of one layer's `count` spilled key/value block pairs of `nbytes` each.

    Pairs are identified only by their checksums, whatever their sequence, head or place. All memory
    is allocated at the start. Not thread-safe.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.room = np.empty((count, nbytes), np.uint8)
        self._checksums = np.zeros((count, 2), np.uint64)
        self._requests = np.full(count, FREE, np.int64)
        """Number of the last request for each pair."""
        self._request = 0
        self._order = np.arange(count)
        self._names = np.zeros(count, np.uint64)

    def __len__(self) -> int:
        return len(self.held_checksums())

    def held_checksums(self) -> Checksums:
        cached: Checksums = self._checksums[self._requests != FREE]
        return cached

    def find(self, checksums: Checksums) -> Slots:
        """Start a request: return the slots of pairs, -1 for missing ones.

        `checksums` are those of keys and values, (pairs, 2).
        """
        self._request += 1
        indices = np.searchsorted(self._names, _names(checksums))
        slots = self._order[np.minimum(indices, len(self._order) - 1)]
        equal = (self._checksums[slots] == checksums).all(axis=1)
        cached = equal & (self._requests[slots] != FREE)
        self._requests[slots[cached]] = self._request
        return np.where(cached, slots, -1)

    def make_room(self, count: int) -> Slots:
        """Free up to `count` slots of the least recently requested pairs, except this request's."""
        oldest = np.argsort(self._requests, kind="stable")[:count]
        slots = oldest[self._requests[oldest] < self._request]
        self._forget(slots)
        return slots

    def keep(self, slots: Slots, checksums: Checksums, raw: Sequence[RawBlocks]) -> None:
        """Copy pairs to slots; `raw` has keys and values, (pairs or more, bytes) each."""
        start = 0
        for side in raw:
            self.room[slots, start : start + side.shape[1]] = side[: len(slots)]
            start += side.shape[1]
        self._checksums[slots] = checksums
        self._requests[slots] = self._request
        names = _names(self._checksums)
        self._order = np.argsort(names, kind="stable")
        self._names = names[self._order]

    def clear(self) -> None:
        self._forget(slice(None))

    def _forget(self, slots: Slots | slice) -> None:
        self._requests[slots] = FREE
        self._checksums[slots] = 0  # an old name in `_names` must not match


def _names(checksums: Checksums) -> NDArray[np.uint64]:
    """Return a hash of each pair's checksums, which distinguish pairs with the same hash."""
    names: NDArray[np.uint64] = checksums[:, 0] + MIXER * checksums[:, 1]
    return names
