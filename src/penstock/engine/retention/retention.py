"""`Retention`: one kind of state that layers resume from, beside plain keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.prefix.node import Node
from penstock.prefix.pin import Pin

Path: TypeAlias = Sequence[Node[Segment]]
"""Nodes of the prefix tree, from the root on."""
PathReader: TypeAlias = tuple[Path, int]
"""Path of a running sequence, and the number of its first tokens that the sequence reads."""


class RunningPath(Protocol):
    """KV of a running sequence, whose first tokens are those of a path of the tree."""

    @property
    def pin(self) -> Pin[Segment] | None:
        """The pinned path; None without one."""

    @property
    def num_cached_tokens(self) -> int:
        """First tokens of the path that the sequence reads."""

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of its whole blocks."""

    def note_again(self, first: int) -> None:
        """Have the cached blocks from the `first` on written to the tiers that lack them."""


class Retention:
    """One kind of state that layers resume from: windows, recurrent states, codecs, an index.

    An engine holds a tuple of them and asks each in turn. A new kind is a subclass that overrides
    what it needs: every method here is right for layers with plain keys and values. Not
    thread-safe: the engine's thread.
    """

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        return 0

    @property
    def reads_blocks(self) -> bool:
        """Whether prompts are read block by block, since a block is read in another form."""
        return False

    @property
    def ends_blocks(self) -> bool:
        """Whether each block is committed alone while decoding, for work at its end."""
        return False

    @property
    def resumes_inside(self) -> bool:
        """Whether a sequence can resume inside a block."""
        return True

    @property
    def spills(self) -> bool:
        """Whether keys and values of running sequences leave memory."""
        return False

    @property
    def codec_name(self) -> str | None:
        """Codec in which blocks are held; None if they stay as they are."""
        return None

    def coded_token_bytes(self, nbytes: float) -> float:
        """Return the bytes of a token's KV in the tree, of as many bytes as it was computed."""
        return nbytes

    # ---- a path

    def complete(self, path: Path, limit: int) -> int:
        """Return the last position of a path, up to a limit, before which no KV is missing."""
        return limit

    def resume(self, path: Path, limit: int) -> int:
        """Return the last position of a path, up to a limit, at which these layers can resume."""
        return self.complete(path, limit)

    def state(self, path: Path, position: int) -> RecurrentState | None:
        """Return the states of recurrent layers at a position that `resume` returned."""
        return None

    def attached(self, path: Path) -> None:
        """Prepare a path that a sequence reads from now on."""

    def check(self, path: Path, read: int, position: int) -> None:
        """Check that a path has what a sequence reads.

        Args:
            path: of the sequence.
            read: first tokens of the path that it reads.
            position: its next token.

        Raises:
            AssertionError: something is missing.
        """

    # ---- new tokens

    def computed(self, segment: Segment, start: int) -> Segment:
        """Return computed KV with what is kept beside it."""
        return segment

    def committed(self, segment: Segment, start: int) -> Segment:
        """Return whole blocks in the form in which later tokens read them.

        Raises:
            MemoryError, RuntimeError: MLX found no room.
        """
        return segment

    def completed(self, segment: Segment, state: RecurrentState) -> tuple[Segment, RecurrentState]:
        """Move what states hold for a block that is full into its segment; return both."""
        return segment, state

    def fill(
        self, pin: Pin[Segment], block_hashes: Sequence[bytes], segment: Segment, start: int
    ) -> bool:
        """Copy KV from whole blocks to the nodes of the tree that lack it; False without room.

        Args:
            pin: the pin of a sequence that reads its path up to `start`; without room it is
                shortened to what the sequence reads.
            block_hashes: hashes of the sequence's blocks.
            segment: blocks from `start` on, computed again or read from a tier.
            start: position of the segment.
        """
        return True

    def ended(self, segment: Segment, state: RecurrentState | None) -> Segment | None:
        """Return the end of a sequence with what is needed to resume behind it.

        None if there is no way to resume there, or no room for it.
        """
        return segment

    # ---- events

    def changed(self) -> None:
        """Note that nodes have come, or are no longer read."""

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> None:
        """Keep a sequence's recurrent states at a boundary of its path, if there is room."""

    def end_prompt(self, path: Path, position: int) -> None:
        """Retain the position where a prompt ends."""

    def end_turn(self, path: Path, position: int) -> int:
        """Retain the states with which a conversation goes on; return their position, or 0."""
        return 0

    # ---- between two steps

    def exchange_one(self, awaited: Iterable[Path]) -> Node[Segment] | None:
        """Hold one node in another form and return it; None if none is due.

        Args:
            awaited: paths of answers that were preempted, which read them again.

        Raises:
            MemoryError, RuntimeError: MLX found no room; the node stays as it is.
        """
        return None

    def spill(self, readers: Iterable[RunningPath], *, wait: bool = False) -> None:
        """Let KV leave memory that lies far behind the end of all its readers.

        Args:
            readers: the running sequences.
            wait: whether to wait until it is written.
        """

    def lost_nodes(self, places: Collection[int]) -> list[Node[Segment]]:
        """Return the nodes that hold some of the given spilled blocks."""
        return []

    def drop_lost(self, places: Collection[int]) -> None:
        """Evict the nodes that hold some lost blocks; none is read any more."""

    def release(self) -> None:
        """Give back the bytes that were set aside."""
