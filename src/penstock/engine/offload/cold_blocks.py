"""Blocks of keys and values that lie in a cold tier alone: their places, a cache, checked reads.

    fetch ──> in the cache? ──no──> all others in one request: parts of records, in the order of
              their bytes, neighbors together ──> checksums
          ──> damaged, missing or late: the next tier, or `SpilledLost`

A place is the number of a block of `BLOCK_TOKENS` in the records that were spilled.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TypeAlias

import numpy as np
import xxhash

from penstock.engine.offload.engine_tier import EngineTier
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.stats import SpillCounts
from penstock.errors import LedgerFull, SpilledLost
from penstock.kv.codecs.spilled import (
    BLOCK_TOKENS,
    ENTRY_BYTES,
    PIECE_TOKENS,
    BlockList,
    RawBlocks,
)
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind, Ledger
from penstock.tiers.record_parts import ArrayPart
from penstock.tiers.store import Store

logger = logging.getLogger(__name__)

LATE_SECONDS = 10.0
"""Longest wait for blocks of a tier."""
RECORD_BYTES = 400
"""Python overhead of one record that was spilled."""
STREAMED_COPIES = 6
"""Copies of a piece that is read whole: as read, in order, and as MLX has it; in two lanes."""
SIDES = ("keys", "values")
Block: TypeAlias = tuple[int, int, int, int, int]
"""Layer, side, head, place and checksum."""
Missing: TypeAlias = dict[Block, list[RawBlocks]]
"""Rows of bytes that each block is copied to."""
Wanted: TypeAlias = dict[bytes, list[ArrayPart]]
Parts: TypeAlias = dict[bytes, list[RawBlocks]]


class ColdBlocks:
    """Reads spilled blocks; a `BlockReader`. Not thread-safe: the engine's thread.

    Args:
        tiers: of the engine.
        shapes: of one token in each layer.
        record_tokens: tokens of a whole record.
        ledger: counts the cache, the places, and the buffers of reads.
        cached_tokens: tokens whose blocks the cache has room for, all layers and heads.
        layers: numbers of the layers that are spilled.

    Raises:
        LedgerFull, NeverFits: there is no room for the cache.
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
    ) -> None:
        self.counts = SpillCounts()
        self.record_blocks = record_tokens // BLOCK_TOKENS
        self._tiers = tiers
        self._shapes = shapes
        own = [shapes[layer] for layer in layers]
        sides = sum(2 * shape.kv_heads for shape in own)
        self._most = cached_tokens // BLOCK_TOKENS * sides
        largest = max(max(self._block_bytes(n, side) for side in (0, 1)) for n in layers)
        streamed = STREAMED_COPIES * PIECE_TOKENS * max(shape.nbytes for shape in own)
        self._fixed_bytes = self._most * (largest + ENTRY_BYTES) + streamed
        self._reserved = ledger.reserve(Kind.BUFFERS, self._fixed_bytes)
        self._cache: OrderedDict[Block, int] = OrderedDict()
        self._room = np.empty((self._most, largest), np.uint8)
        self._numbers: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._next = 0

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes set aside for the cache, the places and the buffers of reads."""
        return self._reserved.nbytes

    @property
    def records(self) -> int:
        """Records with a place."""
        return len(self._keys)

    def _block_bytes(self, layer: int, side: int) -> int:
        shape = self._shapes[layer]
        dim = (shape.key_dim, shape.value_dim)[side]
        return int(BLOCK_TOKENS * dim * shape.dtype.size)

    # ---- places

    def place(self, key: bytes) -> int | None:
        """Return the place of the first block of a record in a tier; None without room for it."""
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
        """Forget the records that have none of the given places."""
        kept = {place // self.record_blocks for place in places}
        for number in [number for number in self._keys if number not in kept]:
            key = self._keys.pop(number)
            if self._numbers.get(key) == number:  # not lost, and perhaps spilled again
                del self._numbers[key]
        self._reserved.resize(self._fixed_bytes + RECORD_BYTES * len(self._keys))

    def forget(self, places: Collection[int]) -> None:
        """Forget records that were lost: the next spill of them asks the tiers anew."""
        for number in {place // self.record_blocks for place in places}:
            key = self._keys.get(number)
            if key is not None:
                self._numbers.pop(key, None)

    def held(self, keys: Collection[bytes]) -> set[bytes]:
        """Return those of some records that are in a tier: a question to each for all of them.

        Those with a place are.
        """
        held, none = {key for key in keys if key in self._numbers}, list[bytes]()
        for tier in self._tiers:
            missing = [key for key in keys if key not in held]
            if not missing:
                break
            with suppress(TimeoutError):
                held.update(tier.tier.call(partial(_held, keys=missing), none).result(LATE_SECONDS))
        return held

    def release(self) -> None:
        """Give back the bytes that were set aside."""
        self._reserved.release()

    # ---- reading

    def fetch(self, wanted: Sequence[BlockList], *, chosen: bool) -> list[RawBlocks]:
        """Return the bytes of blocks, (blocks, bytes) for each list; see `BlockReader`."""
        sizes = [self._block_bytes(of.layer, of.side) for of in wanted]
        raw = [np.empty((len(of.places), n), np.uint8) for of, n in zip(wanted, sizes, strict=True)]
        if not chosen:  # read once, for a chunk: they would drive out what is chosen
            self._stream(wanted, raw)
            return raw
        missing: Missing = {}
        for of, rows in zip(wanted, raw, strict=True):
            for block, row in zip(_listed(of), rows, strict=True):
                slot = self._cache.get(block)
                if slot is None:
                    missing.setdefault(block, []).append(row)
                else:
                    self._cache.move_to_end(block)
                    row[:] = self._room[slot, : len(row)]
        self._read(dict(missing), self._tiers)
        self.counts.cached_blocks += sum(map(len, raw)) - len(missing)
        self.counts.read_blocks += len(missing)
        for block, (row, *_) in missing.items():
            self._keep(block, row)
        return raw

    def _stream(self, wanted: Sequence[BlockList], raw: Sequence[RawBlocks]) -> None:
        """Read blocks past the cache: neighbors in a list are neighbors in a record, most often.

        Raises:
            SpilledLost: no tier has all of them.
        """
        by_record: dict[bytes, list[_Slice]] = {}
        for of, rows in zip(wanted, raw, strict=True):
            for one in self._slices(of, rows):
                by_record.setdefault(one.key, []).append(one)
        for own in by_record.values():
            own.sort(key=lambda one: one.part)
        self.counts.streamed_blocks += sum(map(len, raw))
        self.counts.requests += 1
        tier, *others = self._tiers
        parts = {key: [one.part for one in own] for key, own in by_record.items()}
        missing: Missing = {}
        read = self._asked(tier, parts)
        for key, own in by_record.items():
            for one in self._wrong(tier, own, read.get(key)):
                for block, row in zip(_listed(one.blocks), one.raw, strict=True):
                    missing.setdefault(block, []).append(row)
        self._read(missing, others)

    def _wrong(
        self, tier: EngineTier, slices: list[_Slice], read: Sequence[RawBlocks] | None
    ) -> list[_Slice]:
        """Copy a record that a tier has read; return the slices that are not as written."""
        if read is None:
            return slices
        wrong = [one for one, data in zip(slices, read, strict=True) if not one.takes(data)]
        if wrong:
            tier.tier.call(partial(_drop_damaged, key=slices[0].key), None)
        self.counts.read_bytes += sum(one.raw.nbytes for one in slices)
        return wrong

    def _slices(self, of: BlockList, raw: RawBlocks) -> Iterator[_Slice]:
        """Yield the blocks of a list, those together that lie behind each other in a record."""
        numbers, at = np.divmod(of.places, self.record_blocks)
        starts = of.heads * self.record_blocks + at
        ends = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(starts) != 1)) + 1
        name, nbytes = f"{of.layer}.{SIDES[of.side]}", raw.shape[1]
        for first, last in pairwise([0, *ends.tolist(), len(starts)]):
            part = ArrayPart(name, int(starts[first]) * nbytes, (last - first) * nbytes)
            key = self._keys[int(numbers[first])]
            yield _Slice(key, part, of.part(first, last), raw[first:last])

    def _keep(self, block: Block, raw: RawBlocks) -> None:
        """Cache a block, in place of the one that was used longest ago."""
        full = len(self._cache) >= self._most
        slot = self._cache.popitem(last=False)[1] if full else len(self._cache)
        self._room[slot, : len(raw)] = raw
        self._cache[block] = slot

    def _read(self, missing: Missing, tiers: Iterable[EngineTier]) -> None:
        """Read blocks to where they belong, from the nearest tier that has them unharmed.

        Raises:
            SpilledLost: no tier has all of them.
        """
        for tier in tiers:
            if not missing:
                return
            by_record = {
                key: list(runs) for key, runs in groupby(self._runs(missing), lambda run: run.key)
            }
            wanted = {key: [run.part for run in runs] for key, runs in by_record.items()}
            self.counts.requests += 1
            for key, parts in self._asked(tier, wanted).items():
                if not self._take(missing, by_record[key], parts):
                    tier.tier.call(partial(_drop_damaged, key=key), None)
        if missing:
            self.counts.lost_blocks += len(missing)
            raise SpilledLost(tuple({block[3] for block in missing}))

    def _take(self, missing: Missing, runs: Sequence[_Run], parts: Sequence[RawBlocks]) -> bool:
        """Copy blocks that were read and are as they were written; tell whether all of them are."""
        whole = True
        for run, data in zip(runs, parts, strict=True):
            for block, raw in zip(run.blocks, data.reshape(len(run.blocks), -1), strict=True):
                if xxhash.xxh3_64_intdigest(raw.data) != block[4]:
                    whole = False
                    continue
                for row in missing.pop(block):
                    row[:] = raw
                self.counts.read_bytes += raw.nbytes
        return whole

    def _asked(self, tier: EngineTier, wanted: Wanted) -> Parts:
        """Return the parts that a tier has in time."""
        none: Parts = {}
        answer = tier.tier.call(lambda store: store.read_parts(wanted), none)
        try:
            return answer.result(LATE_SECONDS)
        # A boundary: an error of a store is as good as no answer; the blocks count as lost.
        except Exception as error:
            error.__traceback__ = None  # the answer keeps it, and its frames the step's arrays
            answer.cancel()
            logger.warning("no blocks of %s records came: %s", len(wanted), type(error).__name__)
            logger.debug("its error", exc_info=error)
            return none

    def _runs(self, missing: Missing) -> Iterator[_Run]:
        """Yield the parts of records to read, neighbors together, by record and their bytes."""
        run: list[Block] = []
        for block in sorted(missing, key=lambda block: (self._keys[self._number(block)], block)):
            if run and not self._is_next(run[-1], block):
                yield self._run(run)
                run = []
            run.append(block)
        if run:
            yield self._run(run)

    def _number(self, block: Block) -> int:
        return block[3] // self.record_blocks

    def _start(self, block: Block) -> int:
        """Return the number of a block in its array."""
        return block[2] * self.record_blocks + block[3] % self.record_blocks

    def _is_next(self, block: Block, following: Block) -> bool:
        """Tell whether a block lies behind another in the same array of the same record."""
        same = block[:2] == following[:2] and self._number(block) == self._number(following)
        return same and self._start(following) == self._start(block) + 1

    def _run(self, blocks: Sequence[Block]) -> _Run:
        layer, side = blocks[0][:2]
        nbytes = self._block_bytes(layer, side)
        name, start = f"{layer}.{SIDES[side]}", self._start(blocks[0])
        part = ArrayPart(name, start * nbytes, len(blocks) * nbytes)
        return _Run(self._keys[self._number(blocks[0])], part, tuple(blocks))


def _listed(of: BlockList) -> Iterator[Block]:
    """Yield the blocks of a list."""
    columns = of.heads.tolist(), of.places.tolist(), of.checksums.tolist()
    yield from ((of.layer, of.side, *block) for block in zip(*columns, strict=True))


def _held(store: Store, keys: Sequence[bytes]) -> list[bytes]:
    return [key for key in keys if store.holds(key)]


def _drop_damaged(store: Store, key: bytes) -> None:
    store.drop_damaged(key)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Consecutive blocks of a list that are consecutive in an array of a record, too."""

    key: bytes
    part: ArrayPart
    blocks: BlockList
    raw: RawBlocks
    """Rows that the bytes are copied to, (blocks, bytes)."""

    def takes(self, data: RawBlocks) -> bool:
        """Copy bytes that were read to where they belong; tell whether they are as written."""
        np.copyto(self.raw.reshape(-1), data)
        checksums = [xxhash.xxh3_64_intdigest(block.data) for block in self.raw]
        return bool(checksums == self.blocks.checksums.tolist())


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one array of a record."""

    key: bytes
    part: ArrayPart
    blocks: tuple[Block, ...]
