"""Where sequences of recurrent models can go on: checkpoints at boundaries between blocks.

    prefill ──> a chunk ends at a boundary ──> capture ──┐
    decode  ──> a block is full ────────────> capture ──┴──> thin: ever wider into the past
    match   ──> the deepest checkpoint of the path: tokens behind it are read again

A state is filed under exactly the boundary at which it was captured, is owned by the node there
and goes with it. It is shared as it lies: a sequence that resumes from it computes new arrays.
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
"""Largest bytes of a path's checkpoints, as a share of its KV."""
TURN_ENDS = 2
"""Newest ends of turns of a path that always keep their checkpoint."""
LEAST = 4
"""Checkpoints that a path may have however little its keys and values are."""
NEAR = 4
"""Spacings from a path's end within which the end of each may keep one; beyond, ever fewer do."""

Path = Sequence[Node[Segment]]


class Checkpoints:
    """Captures and evicts the checkpoints of a tree. Not thread-safe: the engine's thread.

    Args:
        prefixes: of the engine.
        state_bytes: of one sequence's states.
        spacing_tokens: between two that stay near a path's end; a span of blocks by default.
    """

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

    def resume(self, path: Path, most_tokens: int) -> tuple[int, RecurrentState | None]:
        """See the function of that name."""
        return resume(path, most_tokens)

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> bool:
        """File a sequence's states under a boundary of its path, as far as there is room.

        Args:
            path: of which some node holds the block in front of the boundary.
            position: of the boundary: the states are those after so many tokens.
            state: of the sequence.
            turn_end: whether a prompt ends in the next block.

        Returns:
            Whether there is a checkpoint now.
        """
        node = next((one for one in path if one.start < position <= one.end), None)
        if node is None:
            return False
        at = position - node.start
        held = next((one for one in node.segment.checkpoints if one.at == at), None)
        if held is not None:
            if turn_end and not held.turn_end:
                self._replace(node, [Checkpoint(at, held.states, turn_end=True)], {at})
            return True
        if self._prefixes.make_room(self._state_bytes):
            states = state.owned()
            new = [Checkpoint(at, states, turn_end=turn_end)]
            if st.is_finite(states) and self._replace(node, new, {at}):
                self.thin(path, position)
                return True
        return False

    def end_turn(self, path: Path, position: int) -> int:
        """Mark the deepest checkpoint at or before `end` as the end of a turn; return its position.

        Returns 0 if there is none. The conversation resumes there.
        """
        for node in reversed(path):
            for checkpoint in st.before(node.segment.checkpoints, position - node.start):
                if not checkpoint.turn_end:
                    kept = Checkpoint(checkpoint.at, checkpoint.states, turn_end=True)
                    self._replace(node, [kept], {checkpoint.at})
                return node.start + checkpoint.at
        return 0

    def thin(self, path: Path, tip: int) -> None:
        """Evict the checkpoints of a path that its end does not need so close together."""
        filed = [(node, checkpoint) for node in path for checkpoint in node.segment.checkpoints]
        places = [node.start + checkpoint.at for node, checkpoint in filed]
        # Where branches part, every one of them begins.
        fixed = {node.end for node in path if len(node.children) > 1}
        ends = [p for p, (_, checkpoint) in zip(places, filed, strict=True) if checkpoint.turn_end]
        fixed |= set(sorted(p for p in ends if p <= tip)[-TURN_ENDS:])
        kv_bytes = sum(node.segment.kv_nbytes for node in path)
        most = None
        if kv_bytes:
            most = max(LEAST, int(SHARE * kv_bytes) // max(1, self._state_bytes))
        kept = retained(places, tip, self._spacing_tokens, fixed, most)
        for node in path:
            evicted = {
                checkpoint.at
                for checkpoint in node.segment.checkpoints
                if node.start + checkpoint.at not in kept
            }
            if evicted:
                self._replace(node, [], evicted)

    def _replace(self, node: Node[Segment], new: Sequence[Checkpoint], at: Collection[int]) -> bool:
        """Put checkpoints in the place of those of a node that are at some positions."""
        kept = [checkpoint for checkpoint in node.segment.checkpoints if checkpoint.at not in at]
        segment = node.segment.checkpointed([*kept, *new])
        more = max(0, segment.checkpoint_nbytes - node.segment.checkpoint_nbytes)
        return self._prefixes.exchange(node, lambda _: segment, more)


def resume(path: Path, most_tokens: int) -> tuple[int, RecurrentState | None]:
    """Return the deepest position at which a sequence can resume, and its states there.

    At most `most_tokens`. 0 and None if that is the beginning.
    """
    for node in reversed(path):
        for checkpoint in st.before(node.segment.checkpoints, most_tokens - node.start):
            return node.start + checkpoint.at, RecurrentState(checkpoint.states, own=True)
    return 0, None


def retained(
    places: Collection[int],
    tip: int,
    spacing_tokens: int,
    fixed: Collection[int] = (),
    most: int | None = None,
) -> set[int]:
    """Say which of a path's checkpoints stay: ever fewer into the past.

    At a distance of d spacings from the end, checkpoints at multiples of 2^k spacings stay, with
    2^k at most d / NEAR. So a place that is evicted is never wanted again, however far the path
    grows. If more than `most` are left, it is as if they were twice, four times ... as far away.

    Args:
        places: of the checkpoints, in tokens.
        tip: the path's end, in tokens.
        spacing_tokens: between two that stay near the end.
        fixed: places that stay in any case, as the path's last one does.
        most: how many may stay, but for those.
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
        if most is None or not others or len(others) + len(always) <= most:
            return always | others
        away *= 2


def _spacing(tokens: int, least_tokens: int) -> int:
    """Return between how many tokens one is kept, so far from the end."""
    return least_tokens << max(0, (tokens // (NEAR * least_tokens)).bit_length() - 1)
