"""Ends of conversations on their way to a cold tier: they wait, since most go on in a moment.

    note  ──> linger ──> the conversation goes on: dropped, its next end lies behind it
                    ├──> it does not for `LINGER_SECONDS`: written
                    └──> its memory is needed, or the engine ends: written first

So a conversation has no record for every turn. Chains alone, no KV.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.kv.segment import Segment
from penstock.prefix.node import Node

LINGER_SECONDS = 10.0
"""Seconds that the end of a conversation waits for the next turn."""
LAPSE_TOKENS = 2_048
"""Tokens behind one written end from which the next is written though the conversation goes on."""


@dataclass(frozen=True, slots=True)
class ConversationEnd:
    """A position at which a conversation resumes if it goes on."""

    block_hashes: tuple[bytes, ...]
    """Chain of the conversation, up to the end."""
    root: bytes
    due_seconds: float
    """Time at which it is written."""
    written_blocks: int
    """Blocks of the chain in front of the last end that was written."""
    asked: bool = False
    """Whether a prompt ended or parted there, and not a conversation: others may, too."""

    def is_passed_by(self, block_hashes: Sequence[bytes]) -> bool:
        """Tell whether a chain goes on from here."""
        blocks = len(self.block_hashes)
        return blocks < len(block_hashes) and block_hashes[blocks - 1] == self.block_hashes[-1]

    def needs(self, node: Node[Segment], block_size: int) -> bool:
        """Tell whether a node has blocks of the chain."""
        at = node.start // block_size
        first = node.block_hashes[:1]
        return bool(first) and first == self.block_hashes[at : at + 1]


class ConversationEnds:
    """The ends that wait. Not thread-safe: the engine's thread.

    Args:
        block_size: tokens of a block.
        most: ends that wait at the same time, at most.
        clock: seconds.
        most_blocks: blocks of all their chains, at most.
    """

    def __init__(
        self,
        block_size: int,
        most: int,
        clock: Callable[[], float],
        *,
        most_blocks: int = sys.maxsize,
    ) -> None:
        self._block_size = block_size
        self._most = most
        self._most_blocks = most_blocks
        self._clock = clock
        self._ends: list[ConversationEnd] = []

    def add(
        self,
        block_hashes: Sequence[bytes],
        root: bytes,
        *,
        answered: bool = False,
        asked: bool = False,
    ) -> list[ConversationEnd]:
        """Let an end wait in the place of those that its chain passes, but for the asked ones.

        Args:
            block_hashes: the chain, up to the end.
            root: hash before the first block.
            asked: see `ConversationEnd`.
            answered: whether it lies behind the answer of the same turn; the end in front of the
                answer stays, since a template may leave reasoning out of the next prompt.

        Returns:
            Ends that are written now: the one passed last if the last written one is far behind,
            and the oldest if there are too many.
        """
        chain = tuple(block_hashes)
        if chain in self:
            return []
        passed = [end for end in self._ends if end.is_passed_by(chain) and not end.asked]
        last = max(passed, key=lambda end: len(end.block_hashes), default=None)
        written, due = len(chain) if last is None else last.written_blocks, []
        if not answered:
            self._ends = [end for end in self._ends if end not in passed]
            if last is not None and (len(chain) - written) * self._block_size > LAPSE_TOKENS:
                due, written = [last], len(last.block_hashes)
        due_seconds = self._clock() + LINGER_SECONDS
        self._ends.append(ConversationEnd(chain, root, due_seconds, written, asked))
        while len(self._ends) > self._most or self._blocks > self._most_blocks:
            due.append(self._ends.pop(0))
        return due

    def drop_passed(self, block_hashes: Sequence[bytes]) -> None:
        """Drop the ends that a chain passes, the asked ones as well."""
        self._ends = [end for end in self._ends if not end.is_passed_by(block_hashes)]

    def take_due(self) -> list[ConversationEnd]:
        """Take out the ends that have waited long enough."""
        now = self._clock()
        return self._take(lambda end: end.due_seconds <= now)

    def take_needing(self, node: Node[Segment]) -> list[ConversationEnd]:
        """Take out the ends whose chains a node has blocks of."""
        return self._take(lambda end: end.needs(node, self._block_size))

    def take_all(self) -> list[ConversationEnd]:
        """Take all ends out."""
        return self._take(lambda end: True)

    def __iter__(self) -> Iterator[ConversationEnd]:
        return iter(self._ends)

    @property
    def _blocks(self) -> int:
        """Blocks of all chains."""
        return sum(len(end.block_hashes) for end in self._ends)

    def __contains__(self, block_hashes: Sequence[bytes]) -> bool:
        return any(end.block_hashes == tuple(block_hashes) for end in self._ends)

    def _take(self, is_taken: Callable[[ConversationEnd], bool]) -> list[ConversationEnd]:
        """Take ends out, the longest first: a record replaces shorter ones."""
        taken = [end for end in self._ends if is_taken(end)]
        if taken:
            self._ends = [end for end in self._ends if end not in taken]
        return sorted(taken, key=lambda end: -len(end.block_hashes))
