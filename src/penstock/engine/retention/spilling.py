"""Retention of full-attention layers: keys and values far behind a sequence's end leave memory.

    commit ──> written to a tier, as all blocks are ──> behind the active tokens of all readers?
           ──> `spill`: the node keeps its index, and of keys and values checksums and places
    lost   ──> `drop_lost`: those nodes leave the tree; their tokens are computed again

A node is spilled whole, once the records of all of its tokens are in a tier.
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
"""Longest wait for a tier to write the KV that has to leave memory."""
PAUSE_SECONDS = 30.0
"""Seconds after a loss in which nothing is spilled that memory has room for."""
RETAIN_FROM = 64
"""Records that are not in use by any node, from which on they are looked for."""


class Spilling(Retention):
    """Spills nodes to cold tiers. Not thread-safe: the engine's thread.

    Args:
        blocks: places of spilled blocks, and their reader.
        prefixes: of the engine.
        tiers: of the engine.
        selection: its layers are spilled, because they read a choice of long sequences.
        spans: which blocks make a record.
        active_tokens: last tokens of a sequence that stay in memory.
        clock: seconds.
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
        """Records with a place after those without a node were forgotten."""

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes set aside; see `ColdBlocks`."""
        return self.blocks.nbytes

    @property
    def spilled_tokens(self) -> int:
        """Tokens of the tree whose keys and values are in a tier alone. O(nodes)."""
        return sum(len(node.tokens) for node in self._prefixes.tree if is_spilled(node.segment))

    def stats(self) -> SpillStats:
        """Return the figures as they are now. O(nodes)."""
        spilled = self.spilled_tokens
        counts = replace(self.blocks.counts)
        return SpillStats(self._prefixes.tree.tokens - spilled, spilled, counts)

    @property
    def spills(self) -> bool:
        """Whether keys and values of running sequences leave memory."""
        return True

    # ---- acts

    def spill(self, readers: Iterable[RunningPath], *, wait: bool = False) -> None:
        """Spill written nodes far behind all their readers; wait for the others if told to."""
        if wait:
            self.wait(readers)
        else:
            self.work(readers)

    def work(self, readers: Iterable[RunningPath], *, urgent: bool = False) -> bool:
        """Spill written nodes that lie behind the active tokens of all their readers.

        Args:
            readers: paths of the running sequences.
            urgent: whether memory is needed, so that there is no pause after a loss.

        Returns:
            Whether nodes that are due remain, since no tier has them yet.
        """
        paths = [path for path in readers if path.pin is not None]
        if not urgent and self._clock() < self._paused_until:
            return False
        ends: dict[int, int] = {}
        for path in paths:
            for node in path.pin.path if path.pin is not None else ():
                end = path.num_cached_tokens - self.active_tokens
                ends[node.id] = min(end, ends.get(node.id, end))
        due = [
            (node, self._records_of(node, path.block_hashes))
            for path in paths
            for node in (path.pin.path if path.pin is not None else ())
            if node.end <= ends[node.id] and self._can_leave(node)
        ]
        held = self.blocks.held({key for _, records in due for key in records.values()})
        waiting, lost_blocks = False, set[int]()
        for node, records in due:
            if self._can_leave(node):  # not yet for another path
                ready = bool(records) and held.issuperset(records.values())
                try:
                    waiting = not (ready and self._spill(node, records)) or waiting
                except SpilledLost as error:  # records have other numbers: write them again
                    lost_blocks.update(error.places)
        if lost_blocks:
            waiting = True
            self.blocks.drop(lost_blocks)
            for path in paths:
                self._note_again(path)
        self._retain()
        return waiting

    def wait(self, readers: Iterable[RunningPath]) -> bool:
        """Have the tiers write the KV that is due, wait, and spill it; False if they did not."""
        paths = list(readers)
        until = time.monotonic() + WRITE_SECONDS
        for attempt in ("noted", "noted again"):
            while any(not tier.is_written for tier in self._tiers) and time.monotonic() < until:
                for tier in self._tiers:
                    tier.writer.offer_next()
                    tier.tier.wait(LOOK_SECONDS)
            if not self.work(paths, urgent=True):
                return True
            if attempt == "noted":  # they were dropped, or evicted from the tier
                for path in paths:
                    self._note_again(path)
        return False

    def drop_lost(self, places: Collection[int]) -> None:
        """Evict the nodes that hold some lost blocks, and all below them; none is read any more."""
        self._paused_until = self._clock() + PAUSE_SECONDS
        self.blocks.forget(places)
        for node in self.lost_nodes(places):
            if node in self._prefixes.tree:
                self._prefixes.drop(node)

    def lost_nodes(self, places: Collection[int]) -> list[Node[Segment]]:
        """Return the nodes that hold some of the given blocks."""
        lost = set(places)
        return [n for n in self._prefixes.tree if not lost.isdisjoint(places_of(n.segment))]

    def release(self) -> None:
        """Give back the bytes that were set aside."""
        self.blocks.release()

    # ---- parts

    def _note_again(self, path: RunningPath) -> None:
        """Have the cached blocks of a path written again, behind the first spilled ones."""
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
        """Spill a node that is in a tier; False without room for the places, or for both forms.

        Raises:
            SpilledLost: records of a coded node have other numbers.
        """
        places = self._places(node, records)
        if places is None:
            return False
        sides = [side for n in self._layers for side in node.segment.layers[n]]
        heads = sum(col.arrays(side)[0].shape[1] for side in sides)
        # Codes are compared piece by piece, and the pieces are joined.
        nbytes = heads * len(places) * Spilled.block_bytes * (1 + any(map(_is_coded, sides)))
        return self._prefixes.exchange(node, lambda held: self._spilled(held, places), nbytes)

    def _records_of(self, node: Node[Segment], block_hashes: Sequence[bytes]) -> dict[int, bytes]:
        """Return the records that have a node's blocks, by the first of these in each.

        None of them if the chain ends inside the last one.
        """
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
        """Return the places of a node's blocks; None without room for them."""
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
        """Return a segment of whose chosen layers only checksums and places are in memory."""
        layers: list[Layer] = list(segment.layers)
        for number in self._layers:
            keys, values = segment.layers[number]
            layers[number] = (
                self._side(keys, number, 0, places),
                self._side(values, number, 1, places),
            )
        return replace(segment, layers=tuple(layers))

    def _side(self, held: Side, layer: int, side: int, places: Numbers) -> Coded:
        if isinstance(held, mx.array):
            return Spilled(self.blocks, layer, side, held.dtype).spilled(held, places)
        assert isinstance(held, Coded)
        parts = []
        for start in range(0, held.tokens, PIECE_TOKENS):
            stop = min(start + PIECE_TOKENS, held.tokens)
            own = places[start // BLOCK_TOKENS : stop // BLOCK_TOKENS]
            parts.append(self._resting(held.take(start, stop), layer, side, own))
        return parts[0].join(*parts[1:]) if len(parts) > 1 else parts[0]

    def _resting(self, held: Coded, layer: int, side: int, places: Numbers) -> Coded:
        """Spill codes; of each block the tier has the numbers before coding, or those decoded.

        Raises:
            SpilledLost: it has other ones.
        """
        there, ops = self.blocks.as_recorded(layer, side, places), self.blocks.ops
        encoded = held.codec.encode(there, ops).parts
        resting = _equal_blocks(encoded, held.parts, len(places))
        decoded = [held.dequantize(ops).astype(there.dtype)]
        lost = places[~(resting | _equal_blocks(decoded, [there], len(places)))]
        if len(lost):
            raise SpilledLost(tuple(lost.tolist()))
        codec = Spilled(self.blocks, layer, side, there.dtype, rest=held.codec)
        return codec.spilled(there, places | np.where(resting, AT_REST, 0))

    def _retain(self) -> None:
        """Forget the places of records that no node has any more, now and then."""
        if self.blocks.records < 2 * self._records + RETAIN_FROM:
            return
        held = set()
        for node in self._prefixes.tree:
            held |= places_of(node.segment)
        self.blocks.retain(held)
        self._records = self.blocks.records


def is_spilled(segment: Segment) -> bool:
    """Tell whether some keys and values of a segment are in a tier alone."""
    return _spilled_side(segment) is not None


def places_of(segment: Segment) -> set[int]:
    """Return the places of a segment's blocks that are in a tier alone."""
    side = _spilled_side(segment)
    return set() if side is None else set((np.array(side.parts[1])[0, 0] & ~AT_REST).tolist())


def _is_coded(side: Side) -> bool:
    return isinstance(side, Coded)


def _equal_blocks(
    left_parts: Sequence[mx.array], right_parts: Sequence[mx.array], blocks: int
) -> NDArray[np.bool_]:
    """Return in which blocks the parts of two sides are equal for all heads, (blocks,)."""
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
