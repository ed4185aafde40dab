"""Retention of recurrent layers: checkpoints of their states at block boundaries."""

from __future__ import annotations

from penstock.engine.retention.retention import Path, Retention
from penstock.kv import states as st
from penstock.kv.segment import Segment
from penstock.kv.states import Checkpoint, RecurrentState
from penstock.prefix import checkpoints as marks
from penstock.prefix.checkpoints import Checkpoints
from penstock.prefix.prefixes import Prefixes


class RecurrentStates(Retention):
    """Captures and evicts checkpoints of a tree. Not thread-safe: owned by the engine's thread.

    Args:
        state_bytes: bytes of one sequence's states.
        spacing_tokens: distance between two checkpoints kept near the end of a path.
    """

    def __init__(
        self, prefixes: Prefixes[Segment], state_bytes: int, *, spacing_tokens: int
    ) -> None:
        self.checkpoints = Checkpoints(prefixes, state_bytes, spacing_tokens=spacing_tokens)
        self._prefixes = prefixes
        self._state_bytes = state_bytes

    @property
    def ends_blocks(self) -> bool:
        """Whether blocks are committed one by one: True, since states are captured at each end."""
        return True

    def resume(self, path: Path, limit: int) -> int:
        """Return the position of the deepest checkpoint of a path, up to a limit; 0 without one."""
        return marks.resume(path, limit)[0]

    def state(self, path: Path, position: int) -> RecurrentState | None:
        """Return the states at a position returned by `resume`; None at position 0."""
        return marks.resume(path, position)[1]

    def ended(self, segment: Segment, state: RecurrentState | None) -> Segment | None:
        """Return a partial block with its states; None if memory is full or a state is NaN."""
        if state is None or not self._prefixes.make_room(self._state_bytes):
            return None
        states = state.owned()
        if not st.is_finite(states):
            return None
        return segment.checkpointed([Checkpoint(segment.tokens, states, turn_end=True)])

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> None:
        self.checkpoints.capture(path, position, state, turn_end=turn_end)

    def end_turn(self, path: Path, position: int) -> int:
        return self.checkpoints.end_turn(path, position)
