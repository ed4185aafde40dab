"""Blocks of keys and values that lie in a cold tier alone: their places, a cache, checked reads.

    fetch ──> in the cache? ──no──> parts of records, in the order of their bytes ──> checksums
          ──> damaged, missing or late: the next tier, or `SpilledLost`

A place is the number of a block of `BLOCK_TOKENS` in the records that were spilled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.engine.offload.engine_tier import EngineTier
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.stats import SpillCounts
from penstock.errors import LedgerFull, SpilledLost
from penstock.kv.codecs.spilled import BLOCK_TOKENS, PIECE_TOKENS, Checksums, Numbers
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind, Ledger
from penstock.tiers.record_parts import ArrayPart
from penstock.tiers.store import Store

LATE_SECONDS = 10.0
"""Longest wait for blocks of a tier."""
RECORD_BYTES = 400
"""Python overhead of one record that was spilled."""
ENTRY_BYTES = 250
"""Python overhead of one block in the cache."""
STREAMED_COPIES = 6
"""Copies of a piece that is read whole: as read, in order, and as MLX has it; in two lanes."""
SIDES = ("keys", "values")
Block: TypeAlias = tuple[int, int, int, int]
"""Layer, side, head and place."""
Wanted: TypeAlias = dict[bytes, list[ArrayPart]]
Parts: TypeAlias = dict[bytes, list[NDArray[np.uint8]]]


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
        """Return the place of a record's first block.

        Returns:
            None if no tier has the record, or there is no room for its place.
        """
        number = self._numbers.get(key)
        if number is None:
            if not self._is_held(key):
                return None
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

    def _is_held(self, key: bytes) -> bool:
        """Tell whether a tier has a whole record."""
        for tier in self._tiers:
            with suppress(TimeoutError):
                if tier.tier.call(lambda store: store.holds(key), False).result(LATE_SECONDS):
                    return True
        return False

    def release(self) -> None:
        """Give back the bytes that were set aside."""
        self._reserved.release()

    # ---- reading

    def fetch(
        self,
        layer: int,
        side: int,
        first_head: int,
        places: Numbers,
        checksums: Checksums,
        *,
        chosen: bool,
    ) -> NDArray[np.uint8]:
        """Return the bytes of blocks, (heads, blocks, bytes); see `BlockReader`."""
        heads, blocks = places.shape
        nbytes = self._block_bytes(layer, side)
        raw = np.empty((heads, blocks, nbytes), np.uint8)
        missing: dict[tuple[int, int], Block] = {}
        for head in range(heads):
            for column, place in enumerate(places[head].tolist()):
                block = (layer, side, first_head + head, place)
                slot = self._cache.get(block)
                if slot is None:
                    missing[head, column] = block
                else:
                    self._cache.move_to_end(block)
                    raw[head, column] = self._room[slot, :nbytes]
        self._read(dict(missing), checksums, raw)
        if not chosen:  # read once, for a chunk: they would drive out what is chosen
            self.counts.streamed_blocks += len(missing)
            return raw
        self.counts.cached_blocks += places.size - len(missing)
        self.counts.read_blocks += len(missing)
        for at, block in missing.items():
            self._keep(block, raw[at])
        return raw

    def _keep(self, block: Block, raw: NDArray[np.uint8]) -> None:
        """Cache a block, in place of the one that was used longest ago."""
        full = len(self._cache) >= self._most
        slot = self._cache.popitem(last=False)[1] if full else len(self._cache)
        self._room[slot, : len(raw)] = raw
        self._cache[block] = slot

    def _read(
        self, missing: dict[tuple[int, int], Block], checksums: Checksums, raw: NDArray[np.uint8]
    ) -> None:
        """Read blocks into their places of `raw`, from the nearest tier that has them unharmed.

        Raises:
            SpilledLost: no tier has all of them.
        """
        for tier in self._tiers:
            if not missing:
                return
            runs = list(self._runs(missing))
            wanted = {
                key: [run.part for run in of_record]
                for key, of_record in groupby(runs, lambda run: run.key)
            }
            read = self._asked(tier, wanted)
            damaged = set()
            for key, of_record in groupby(runs, lambda run: run.key):
                for run, data in zip(of_record, read.get(key, ()), strict=False):
                    for at, block in zip(run.at, data.reshape(len(run.at), -1), strict=True):
                        if xxhash.xxh3_64_intdigest(block.data) != int(checksums[at]):
                            damaged.add(key)
                            continue
                        raw[at] = block
                        del missing[at]
                        self.counts.read_bytes += block.nbytes
            for key in damaged:
                tier.tier.call(partial(_drop_damaged, key=key), None)
        if missing:
            self.counts.lost_blocks += len(missing)
            raise SpilledLost(tuple({block[3] for block in missing.values()}))

    def _asked(self, tier: EngineTier, wanted: Wanted) -> Parts:
        """Return the parts that a tier has in time."""
        none: Parts = {}
        answer = tier.tier.call(lambda store: store.read_parts(wanted), none)
        try:
            return answer.result(LATE_SECONDS)
        # A boundary: what a store raises is as good as no answer.
        except Exception:  # noqa: BLE001
            answer.cancel()
            return none

    def _runs(self, missing: dict[tuple[int, int], Block]) -> Iterator[_Run]:
        """Yield the parts of records to read, neighbors together, by record and their bytes."""
        order = sorted(missing, key=lambda at: (self._number(missing[at]), missing[at]))
        run: list[tuple[int, int]] = []
        for at in order:
            if run and not self._is_next(missing[run[-1]], missing[at]):
                yield self._run(run, missing[run[0]])
                run = []
            run.append(at)
        if run:
            yield self._run(run, missing[run[0]])

    def _number(self, block: Block) -> int:
        return block[3] // self.record_blocks

    def _is_next(self, block: Block, following: Block) -> bool:
        """Tell whether a block lies behind another in the same array of the same record."""
        same = block[:3] == following[:3] and self._number(block) == self._number(following)
        return same and following[3] == block[3] + 1

    def _run(self, at: list[tuple[int, int]], first: Block) -> _Run:
        layer, side, head, place = first
        number, inside = divmod(place, self.record_blocks)
        nbytes = self._block_bytes(layer, side)
        start = (head * self.record_blocks + inside) * nbytes
        part = ArrayPart(f"{layer}.{SIDES[side]}", start, len(at) * nbytes)
        return _Run(self._keys[number], part, tuple(at))


def _drop_damaged(store: Store, key: bytes) -> None:
    store.drop_damaged(key)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one array of a record."""

    key: bytes
    part: ArrayPart
    at: tuple[tuple[int, int], ...]
    """Head and column of each block in the result."""
