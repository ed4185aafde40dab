"""The engine's state machine with spilled KV of running sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from cold_machine import ColdMachine
from core_parts import cached_nodes, evict_all, retention_of
from engine_machine import ROOMS, Wish, picks, wishes
from engine_reference import Kind, spilling_kinds
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from penstock.attention.selection.spilled_reads import LoadedBlocks
from penstock.engine.offload.cold_blocks import RECORD_BYTES, ColdBlocks
from penstock.engine.retention.spilling import Spilling, places_of
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import (
    BlockList,
    BlockPairs,
    BlockReader,
    HeldPairs,
    Numbers,
    RawBlocks,
    Spilled,
)

Fetch: TypeAlias = Callable[..., list[RawBlocks]]
Hold: TypeAlias = Callable[..., HeldPairs]
ROOM = 4
"""Times the room of other machines: prompts are as much longer."""


class SpillMachine(ColdMachine):
    """An engine with drawn settings, most of which spill old KV."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[tuple[int, int, int, int, int], bytes] = {}
        """Blocks that have left memory, by layer, side, head, place and checksum."""
        self.patch.setattr(Spilled, "spilled", self.noting(Spilled.spilled))
        self.patch.setattr(ColdBlocks, "fetch", self.comparing(ColdBlocks.fetch))
        self.patch.setattr(LoadedBlocks, "fetch", self.comparing(LoadedBlocks.fetch))
        self.patch.setattr(ColdBlocks, "hold", self.comparing_held(ColdBlocks.hold))

    def noting(self, spilled: Callable[..., Coded]) -> Callable[..., Coded]:
        """Record what is spilled."""

        def notes(codec: Spilled, x: mx.array, places: Numbers) -> Coded:
            coded = spilled(codec, x, places)
            raw = np.array(x).reshape(x.shape[1], len(places), -1)
            checksums = np.array(coded.parts[0])[0]
            for head, column in np.ndindex(raw.shape[:2]):
                at = codec.layer, codec.side, codec.first_head + head, int(places[column])
                self.left[*at, int(checksums[head, column])] = raw[head, column].tobytes()
            return coded

        return notes

    def comparing(self, fetch: Fetch) -> Fetch:
        """Check that restored blocks equal the spilled ones."""

        def compares(blocks: BlockReader, wanted: Sequence[BlockList]) -> list[RawBlocks]:
            raw = fetch(blocks, wanted)
            for of, rows in zip(wanted, raw, strict=True):
                self.compare(of, rows)
            return raw

        return compares

    def comparing_held(self, hold: Hold) -> Hold:
        """Check that cached blocks equal the spilled ones."""

        def compares(blocks: ColdBlocks, wanted: Sequence[BlockPairs]) -> HeldPairs:
            held = hold(blocks, wanted)
            for number, pairs in enumerate(wanted):
                addresses = held.addresses(number)
                for side, rows in enumerate(held.copied(number)):
                    self.compare(pairs.side(side), rows)
                    for address, row in zip(addresses[:, side].tolist(), rows, strict=True):
                        assert ctypes.string_at(address, len(row)) == row.tobytes()
            return held

        return compares

    def compare(self, of: BlockList, rows: RawBlocks) -> None:
        """Compare restored blocks with the spilled ones."""
        lists = (of.heads.tolist(), of.places.tolist(), of.checksums.tolist())
        for row, block in zip(rows, zip(*lists, strict=True), strict=True):
            left = self.left[of.layer, of.side, *block]
            assert row.tobytes() == left, "another block than the one that left"

    @property
    def spilling(self) -> Spilling | None:
        return retention_of(self.core, Spilling)

    @property
    def gone(self) -> int:
        """Number of evicted nodes, and of blocks that the disk lost."""
        spilling = self.spilling
        return super().gone + (0 if spilling is None else spilling.blocks.counts.lost_blocks)

    @property
    def fixed(self) -> int:
        """Bytes that are always reserved, including spill locations."""
        spilling = self.spilling
        places = 0 if spilling is None else RECORD_BYTES * spilling.blocks.records
        return self.opened_bytes + places

    @initialize(
        kind=spilling_kinds,
        room=st.sampled_from([*ROOMS, None, None]),
        wishes=st.lists(wishes, min_size=2, max_size=4),
    )
    def begin(self, kind: Kind, room: int | None, wishes: list[Wish]) -> None:
        """Open the engine, and start some requests."""
        self.start(kind, room, wishes)

    @rule(room=st.sampled_from([*ROOMS, None]))
    def set_limit(self, room: int | None) -> None:
        super().set_limit(None if room is None else ROOM * room)

    @rule(
        chosen=st.lists(picks, max_size=3),
        how=st.sampled_from(["flip", "signs", "cut", "gone"]),
        seed=st.integers(0, 99),
        times=st.integers(1, 6),
    )
    def lose(self, chosen: list[int], how: str, seed: int, times: int) -> None:
        """Damage spilled blocks that are not cached in memory, and continue."""
        if self.spilling is not None:
            self.spilling.blocks.forget_cached()
        for pick in chosen:
            self._damage(pick, how, seed)
        for _ in range(times):
            self.run_step()

    @invariant()
    def what_has_left_memory_can_be_found(self) -> None:
        spilling = self.spilling
        if spilling is None:
            return
        blocks = spilling.blocks
        places = RECORD_BYTES * blocks.records
        assert blocks.nbytes == blocks._fixed_bytes + places, "places that are not counted"
        caches = list(blocks._caches.values())
        room = sum(cache.room.nbytes for cache in caches)
        assert blocks.nbytes > blocks.cache_bytes + places > room, "a cache that is not counted"
        for cache in caches:
            pairs = [tuple(pair) for pair in cache.held_checksums().tolist()]
            assert len(set(pairs)) == len(pairs) == len(cache), "a pair in two places of the cache"
        for node in cached_nodes(self.core):
            numbers = {place // blocks.record_blocks for place in places_of(node.segment)}
            assert numbers <= set(blocks._keys), "blocks without a place"

    def close_core(self) -> None:
        """Close the core and check that all bytes and locations are released."""
        evict_all(self.core)
        if self.spilling is not None:
            self.spilling.blocks.retain(())
            assert self.spilling.blocks.records == 0
        super().close_core()
