"""Spilling of full-attention layers: older KV of a sequence moves from memory to a cold tier.

    commit ──> blocks are written to a tier ──> outside the active tokens of all readers?
           ──> `spill`: the node keeps its index, and checksums and places of its KV
        lost   ──> `drop_lost`: the nodes are evicted, and their tokens recomputed

A node is spilled as a whole, once the records of all of its tokens are in a tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from penstock.attention.selection.selection import Selection
from penstock.engine.offload.cold_blocks import ColdBlocks
from penstock.engine.offload.engine_tier import LOOK_SECONDS
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.retention import Retention, RunningPath
from penstock.engine.stats import SpillStats
from penstock.errors import SpilledLost
from penstock.kv import columns as col
from penstock.kv.block_spans import Spans
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import AT_REST, BLOCK_TOKENS, PIECE_TOKENS, Numbers, Spilled
from penstock.kv.columns import Side
from penstock.kv.segment import Layer, Segment
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes

WRITE_SECONDS = 30.0
"""Maximum wait for a tier to write KV to spill, in seconds."""
PAUSE_SECONDS = 30.0
"""Seconds after a loss during which KV is spilled only if memory is needed."""
RETAIN_FROM = 64
"""Minimum number of records before unused ones are removed."""


class Spilling(Retention):
    """Spills nodes to cold tiers. Not thread-safe: owned by the engine's thread.

    Args:
        active_tokens: number of last tokens of a sequence that stay in memory.
    """

    def __init__(
        self,
        blocks: ColdBlocks,
        prefixes: Prefixes[Segment],
        tiers: TierGroup,
        *,
        selection: Selection,
        spans: Spans,
        active_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.blocks = blocks
        self.active_tokens = active_tokens
        self._prefixes = prefixes
        self._tiers = tiers
        self._layers = selection.index.layers
        self._is_indexed = selection.index.complete
        self._spans = spans
        self._clock = clock
        self._paused_until = -np.inf
        self._records = 0

    @property
    def nbytes(self) -> int:
        """Reserved bytes; see `ColdBlocks`."""
        return self.blocks.nbytes

    @property
    def spilled_tokens(self) -> int:
        """Number of tokens of the tree whose KV is only in a tier. O(nodes)."""
        return sum(len(node.tokens) for node in self._prefixes.tree if is_spilled(node.segment))

    def stats(self) -> SpillStats:
        spilled = self.spilled_tokens
        counts = replace(self.blocks.counts)
        return SpillStats(self._prefixes.tree.tokens - spilled, spilled, counts)

    @property
    def spills(self) -> bool:
        return True

    def spill(self, readers: Iterable[RunningPath], *, wait: bool = False) -> None:
        """Spill written nodes outside all readers' active tokens; `wait` writes the rest first."""
        if wait:
            self.wait(readers)
        else:
            self.work(readers)

    def work(self, readers: Iterable[RunningPath], *, urgent: bool = False) -> bool:
        """Spill written nodes outside their readers' active tokens; return whether nodes remain."""
        if not urgent and self._clock() < self._paused_until:
            return False
        paths = [path for path in readers if path.pin is not None]
        able = [
            [node for node in path.pin.path if self._can_leave(node)]
            for path in paths
            if path.pin is not None
        ]
        ends: dict[int, int] = {}
        for path, nodes in zip(paths, able, strict=True):
            end = path.num_cached_tokens - self.active_tokens
            for node in nodes:
                ends[node.id] = min(end, ends.get(node.id, end))
        due = [
            (node, self._records_of(node, path.block_hashes))
            for path, nodes in zip(paths, able, strict=True)
            for node in nodes
            if node.end <= ends[node.id]
        ]
        known = self.blocks.stored({key for _, records in due for key in records.values()})
        waiting, lost_blocks = False, set[int]()
        for node, records in due:
            if self._can_leave(node):  # not already spilled for another path
                ready = bool(records) and known.issuperset(records.values())
                try:
                    waiting = not (ready and self._spill(node, records)) or waiting
                except SpilledLost as error:  # records differ: write them again
                    lost_blocks.update(error.places)
        if lost_blocks:
            waiting = True
            self.blocks.drop(lost_blocks)
            for path in paths:
                self._note_again(path)
        self._retain()
        return waiting

    def wait(self, readers: Iterable[RunningPath]) -> bool:
        """Wait until the tiers have written the KV to spill, then spill it; False on timeout."""
        paths = list(readers)
        until = time.monotonic() + WRITE_SECONDS
        for attempt in ("noted", "noted again"):
            while any(not tier.is_written for tier in self._tiers) and time.monotonic() < until:
                for tier in self._tiers:
                    tier.writer.offer_next()
                    tier.tier.wait(LOOK_SECONDS)
            if not self.work(paths, urgent=True):
                return True
            if attempt == "noted":  # writes were dropped, or blocks evicted
                for path in paths:
                    self._note_again(path)
        return False

    def drop_lost(self, places: Collection[int]) -> None:
        self._paused_until = self._clock() + PAUSE_SECONDS
        self.blocks.forget(places)
        for node in self.lost_nodes(places):
            if node in self._prefixes.tree:
                self._prefixes.drop(node)

    def lost_nodes(self, places: Collection[int]) -> list[Node[Segment]]:
        lost = set(places)
        return [n for n in self._prefixes.tree if not lost.isdisjoint(places_of(n.segment))]

    def release(self) -> None:
        self.blocks.release()

    def _note_again(self, path: RunningPath) -> None:
        """Queue the cached blocks of a path after the first spilled ones to be written again."""
        nodes = path.pin.path if path.pin is not None else ()
        start = next((node.start for node in nodes if not is_spilled(node.segment)), None)
        if start is not None:
            first = start // self._prefixes.block_size
            begins_record = self._spans.start(first) == first
            path.note_again(first if begins_record else self._spans.end(first))

    def _can_leave(self, node: Node[Segment]) -> bool:
        segment = node.segment
        return not (node.partial or is_spilled(segment)) and self._is_indexed(segment)

    def _spill(self, node: Node[Segment], records: Mapping[int, bytes]) -> bool:
        """Spill a node whose blocks are in a tier; False if out of memory; raises SpilledLost."""
        places = self._places(node, records)
        if places is None:
            return False
        sides = [side for n in self._layers for side in node.segment.layers[n]]
        heads = sum(col.arrays(side)[0].shape[1] for side in sides)
        # Codes are compared piece by piece, and the pieces are joined.
        nbytes = heads * len(places) * Spilled.block_bytes * (1 + any(map(_is_coded, sides)))
        return self._prefixes.exchange(node, lambda segment: self._spilled(segment, places), nbytes)

    def _records_of(self, node: Node[Segment], block_hashes: Sequence[bytes]) -> dict[int, bytes]:
        """Return the records that contain a node's blocks, by the first block of each."""
        size, records = self._prefixes.block_size, {}
        first, stop = node.start // size, node.end // size
        while first < stop:
            end = self._spans.end(first)
            if end > len(block_hashes):
                return {}
            records[first] = block_hashes[end - 1]
            first = end
        return records

    def _places(self, node: Node[Segment], records: Mapping[int, bytes]) -> Numbers | None:
        """Return the places of a node's blocks; None if out of memory."""
        size, places = self._prefixes.block_size, []
        for first, key in records.items():
            place = self.blocks.place(key)
            if place is None:
                return None
            begin = self._spans.start(first)
            last = min(self._spans.end(first), node.end // size)
            inside = np.arange((first - begin) * size, (last - begin) * size, BLOCK_TOKENS)
            places.append(place + inside // BLOCK_TOKENS)
        return np.concatenate(places).astype(np.int32)

    def _spilled(self, segment: Segment, places: Numbers) -> Segment:
        """Return a segment whose selected layers keep only checksums and places in memory."""
        layers: list[Layer] = list(segment.layers)
        for number in self._layers:
            keys, values = segment.layers[number]
            layers[number] = (
                self._side(keys, number, 0, places),
                self._side(values, number, 1, places),
            )
        return replace(segment, layers=tuple(layers))

    def _side(self, values: Side, layer: int, side: int, places: Numbers) -> Coded:
        if isinstance(values, mx.array):
            return Spilled(self.blocks, layer, side, values.dtype).spilled(values, places)
        assert isinstance(values, Coded)
        parts = []
        for start in range(0, values.tokens, PIECE_TOKENS):
            stop = min(start + PIECE_TOKENS, values.tokens)
            piece_places = places[start // BLOCK_TOKENS : stop // BLOCK_TOKENS]
            parts.append(self._resting(values.take(start, stop), layer, side, piece_places))
        return parts[0].join(*parts[1:]) if len(parts) > 1 else parts[0]

    def _resting(self, coded: Coded, layer: int, side: int, places: Numbers) -> Coded:
        """Spill codes if records match them, as computed or dequantized; else SpilledLost."""
        there, ops = self.blocks.as_recorded(layer, side, places), self.blocks.ops
        encoded = coded.codec.encode(there, ops).parts
        resting = _equal_blocks(encoded, coded.parts, len(places))
        decoded = [coded.dequantize(ops).astype(there.dtype)]
        lost = places[~(resting | _equal_blocks(decoded, [there], len(places)))]
        if len(lost):
            raise SpilledLost(tuple(lost.tolist()))
        codec = Spilled(self.blocks, layer, side, there.dtype, rest=coded.codec)
        return codec.spilled(there, places | np.where(resting, AT_REST, 0))

    def _retain(self) -> None:
        """Forget records that no node uses, once the number of records has doubled."""
        if self.blocks.records < 2 * self._records + RETAIN_FROM:
            return
        used = set()
        for node in self._prefixes.tree:
            used |= places_of(node.segment)
        self.blocks.retain(used)
        self._records = self.blocks.records


def is_spilled(segment: Segment) -> bool:
    return segment.derived(_spilled_side) is not None


def places_of(segment: Segment) -> set[int]:
    side = segment.derived(_spilled_side)
    return set() if side is None else set((np.array(side.parts[1])[0, 0] & ~AT_REST).tolist())


def _is_coded(side: Side) -> bool:
    return isinstance(side, Coded)


def _equal_blocks(
    left_parts: Sequence[mx.array], right_parts: Sequence[mx.array], blocks: int
) -> NDArray[np.bool_]:
    """Compare two sides block by block over all heads; return booleans, (blocks,)."""
    equal = np.ones(blocks, np.bool_)
    for left, right in zip(left_parts, right_parts, strict=True):
        same = (left == right).reshape(left.shape[1], blocks, -1)
        equal &= np.asarray(same.all(axis=-1).all(axis=0))
    return equal


def _spilled_side(segment: Segment) -> Coded | None:
    """Return the first spilled side of a segment; None if there is none."""
    sides = (keys for keys, _ in segment.layers)
    return next(
        (side for side in sides if isinstance(side, Coded) and isinstance(side.codec, Spilled)),
        None,
    )
