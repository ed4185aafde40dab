"""Checkpoints of recurrent states at block boundaries, from which sequences can resume.

    prefill ──> a chunk ends at a boundary ──> capture ──┐
    decode  ──> a block is full ────────────> capture ──┴──> thin: sparser towards the start
    match   ──> the deepest checkpoint of the path: tokens after it are recomputed

A state is valid at exactly one boundary. It belongs to the node that contains the boundary, and is
evicted with it. It is shared without copying: a sequence that resumes from it computes new arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.kv import states as st
from penstock.kv.block_spans import span_tokens
from penstock.kv.segment import Segment
from penstock.kv.states import Checkpoint, RecurrentState
from penstock.prefix.node import Node
from penstock.prefix.prefixes import Prefixes

SHARE = 0.25
"""Maximum bytes of a path's checkpoints, relative to its KV."""
TURN_ENDS = 2
"""Number of latest turn ends of a path whose checkpoints are always kept."""
LEAST = 4
"""Number of checkpoints that a path may always have, however small its KV."""
NEAR = 4
"""Distance from a path's end, in spacings, within which every boundary may keep a checkpoint."""

Path = Sequence[Node[Segment]]


class Checkpoints:
    """Captures and evicts the checkpoints of a tree. Not thread-safe: used by the engine thread."""

    def __init__(
        self,
        prefixes: Prefixes[Segment],
        state_bytes: int,
        *,
        spacing_tokens: int | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._state_bytes = state_bytes
        self._spacing_tokens = spacing_tokens or span_tokens(prefixes.block_size)

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> bool:
        """Store the states after `position` tokens; return False if they could not be stored."""
        node = next(
            (candidate for candidate in path if candidate.start < position <= candidate.end), None
        )
        if node is None:
            return False
        offset = position - node.start
        existing = next(
            (candidate for candidate in node.segment.checkpoints if candidate.offset == offset),
            None,
        )
        if existing is not None:
            if turn_end and not existing.turn_end:
                self._replace(node, [Checkpoint(offset, existing.states, turn_end=True)], {offset})
            return True
        if self._prefixes.make_room(self._state_bytes):
            states = state.owned()
            new = [Checkpoint(offset, states, turn_end=turn_end)]
            if st.is_finite(states) and self._replace(node, new, {offset}):
                self.thin(path, position)
                return True
        return False

    def end_turn(self, path: Path, position: int) -> int:
        """Mark the last checkpoint up to `position` as a turn's end; return its position or 0."""
        for node in reversed(path):
            for checkpoint in st.before(node.segment.checkpoints, position - node.start):
                if not checkpoint.turn_end:
                    kept = Checkpoint(checkpoint.offset, checkpoint.states, turn_end=True)
                    self._replace(node, [kept], {checkpoint.offset})
                return node.start + checkpoint.offset
        return 0

    def thin(self, path: Path, tip: int) -> None:
        """Evict checkpoints of a path closer together than `retained` allows."""
        filed = [(node, checkpoint) for node in path for checkpoint in node.segment.checkpoints]
        places = [node.start + checkpoint.offset for node, checkpoint in filed]
        # Every branch resumes at its branch point.
        fixed = {node.end for node in path if len(node.children) > 1}
        ends = [p for p, (_, checkpoint) in zip(places, filed, strict=True) if checkpoint.turn_end]
        fixed |= set(sorted(p for p in ends if p <= tip)[-TURN_ENDS:])
        kv_bytes = sum(node.segment.kv_nbytes for node in path)
        limit = None
        if kv_bytes:
            limit = max(LEAST, int(SHARE * kv_bytes) // max(1, self._state_bytes))
        kept = retained(places, tip, self._spacing_tokens, fixed, limit)
        for node in path:
            evicted = {
                checkpoint.offset
                for checkpoint in node.segment.checkpoints
                if node.start + checkpoint.offset not in kept
            }
            if evicted:
                self._replace(node, [], evicted)

    def _replace(
        self, node: Node[Segment], new: Sequence[Checkpoint], positions: Collection[int]
    ) -> bool:
        kept = [
            checkpoint
            for checkpoint in node.segment.checkpoints
            if checkpoint.offset not in positions
        ]
        segment = node.segment.checkpointed([*kept, *new])
        more = max(0, segment.checkpoint_nbytes - node.segment.checkpoint_nbytes)
        return self._prefixes.exchange(node, lambda _: segment, more)


def resume(path: Path, most_tokens: int) -> tuple[int, RecurrentState | None]:
    """Return the last checkpoint's position up to `most_tokens`, and its states; else 0, None."""
    for node in reversed(path):
        for checkpoint in st.before(node.segment.checkpoints, most_tokens - node.start):
            return node.start + checkpoint.offset, RecurrentState(checkpoint.states, exclusive=True)
    return 0, None


def retained(
    places: Collection[int],
    tip: int,
    spacing_tokens: int,
    fixed: Collection[int] = (),
    limit: int | None = None,
) -> set[int]:
    """Select the checkpoints of a path to keep, increasingly sparse towards the start.

    At a distance of d spacings from the end, checkpoints at multiples of 2^k spacings stay, with
    2^k at most d / NEAR. So a position dropped once is never selected again as the path grows.
    While more than `limit` are left, distances are doubled.
    """
    last = max((place for place in places if place <= tip), default=None)
    always = {place for place in places if place in fixed or place == last or place > tip}
    away = 1
    while True:
        others = {
            place
            for place in places
            if place not in always and place % _spacing((tip - place) * away, spacing_tokens) == 0
        }
        if limit is None or not others or len(others) + len(always) <= limit:
            return always | others
        away *= 2


def _spacing(tokens: int, least_tokens: int) -> int:
    """Return the spacing of checkpoints at a distance of `tokens` from the end."""
    return least_tokens << max(0, (tokens // (NEAR * least_tokens)).bit_length() - 1)
