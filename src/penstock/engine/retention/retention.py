"""`Retention`: interface of a kind of state that layers resume from besides plain KV."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.prefix.node import Node
from penstock.prefix.pin import Pin

Path: TypeAlias = Sequence[Node[Segment]]
"""Nodes of the prefix tree, starting at the root."""
PathReader: TypeAlias = tuple[Path, int]
"""Path of a running sequence, and the number of leading tokens that it reads."""


class RunningPath(Protocol):
    @property
    def pin(self) -> Pin[Segment] | None:
        """Pinned path; None without one."""

    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> list[bytes]: ...
    def note_again(self, first: int) -> None: ...


class Retention:
    """One kind of state that layers resume from: windows, recurrent states, codecs, an index.

    An engine has a tuple of retentions and calls each in turn. A new kind is a subclass that
    overrides only what it needs: the defaults suit layers with plain KV. Not thread-safe: owned by
    the engine's thread.
    """

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def reads_blocks(self) -> bool:
        """Whether prompts are prefilled block by block, since finished blocks are read as codes."""
        return False

    @property
    def ends_blocks(self) -> bool:
        """Whether blocks are committed one by one during decoding, to run code at each end."""
        return False

    @property
    def resumes_inside(self) -> bool:
        """Whether a sequence can resume inside a block."""
        return True

    @property
    def spills(self) -> bool:
        """Whether KV of running sequences can be spilled to a cold tier."""
        return False

    @property
    def codec_name(self) -> str | None:
        """Codec of cached blocks; None if they stay raw."""
        return None

    def coded_token_bytes(self, nbytes: float) -> float:
        """Return the bytes of one token's KV in the tree, given its raw bytes."""
        return nbytes

    # ---- a path

    def complete(self, path: Path, limit: int) -> int:
        """Return the last position of a path, up to a limit, before which no KV is missing."""
        return limit

    def resume(self, path: Path, limit: int) -> int:
        """Return the last position of a path, up to a limit, at which these layers can resume."""
        return self.complete(path, limit)

    def state(self, path: Path, position: int) -> RecurrentState | None:
        """Return the states of recurrent layers at a position returned by `resume`."""
        return None

    def attached(self, path: Path) -> None:
        """Prepare a path that a sequence starts to read."""

    def check(self, path: Path, read: int, position: int) -> None:
        """Check that a path has the state that a sequence needs.

        Args:
            read: number of leading tokens that it reads.

        Raises:
            AssertionError: state is missing.
        """

    # ---- new tokens

    def computed(self, segment: Segment, start: int) -> Segment:
        """Return a computed segment with the data that this retention adds to its KV."""
        return segment

    def committed(self, segment: Segment, start: int) -> Segment:
        """Return whole blocks in the format that later tokens attend to.

        Raises:
            MemoryError, RuntimeError: MLX is out of memory.
        """
        return segment

    def completed(self, segment: Segment, state: RecurrentState) -> tuple[Segment, RecurrentState]:
        """Move a full block's compressed rows from the states into its segment; return both."""
        return segment, state

    def fill(
        self, pin: Pin[Segment], block_hashes: Sequence[bytes], segment: Segment, start: int
    ) -> bool:
        """Copy recomputed or restored KV into nodes that lack it; return False if out of memory.

        Args:
            pin: pinned path of the sequence; may be extended, or shortened if out of memory.
            block_hashes: hashes of the sequence's whole blocks.
            segment: the KV.
            start: position of the segment's first token.
        """
        return True

    def ended(self, segment: Segment, state: RecurrentState | None) -> Segment | None:
        """Return the end of a sequence with the state needed to resume there.

        None if it cannot be resumed, or if out of memory.
        """
        return segment

    # ---- events

    def changed(self) -> None:
        """Handle that nodes were added, or are no longer read by any sequence."""

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> None:
        """Checkpoint the recurrent states of a sequence at a boundary, if memory allows.

        Args:
            path: cached path of the sequence.
            position: block boundary at which `state` was captured.
            state: states of the recurrent layers.
            turn_end: whether a turn of the conversation ends there, so that it is kept longer.
        """

    def end_prompt(self, path: Path, position: int) -> None:
        """Retain the position where a prompt ends."""

    def end_turn(self, path: Path, position: int) -> int:
        """Retain the states from which a conversation continues; return their position, or 0."""
        return 0

    # ---- between two steps

    def exchange_one(self, awaited: Iterable[Path]) -> Node[Segment] | None:
        """Convert one node to another format, such as codes, and return it; None if none is due.

        Args:
            awaited: paths of preempted sequences, which will be read again.

        Raises:
            MemoryError, RuntimeError: MLX is out of memory; the node is unchanged.
        """
        return None

    def spill(self, readers: Iterable[RunningPath], *, wait: bool = False) -> None:
        """Spill KV outside all its readers' active tokens; `wait` first awaits pending writes."""

    def lost_nodes(self, places: Collection[int]) -> list[Node[Segment]]:
        """Return the nodes that contain any of the spilled blocks at `places` in the tiers."""
        return []

    def drop_lost(self, places: Collection[int]) -> None:
        """Evict the unpinned nodes that contain any of the lost blocks at `places`."""

    def release(self) -> None: ...
