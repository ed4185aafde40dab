"""Ends of conversations on their way to a cold tier: they wait, since most continue soon.

    note  ──> linger ──> the conversation continues: dropped, its next end lies behind it
                    ├──> it does not for `LINGER_SECONDS`: written
                    └──> its memory is needed, or the engine ends: written first

So a conversation has no record for every turn. Only chains, no KV.
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
"""Tokens since the last written end after which the next is written in any case."""


@dataclass(frozen=True, slots=True)
class ConversationEnd:
    """A position at which a conversation resumes if it continues."""

    block_hashes: tuple[bytes, ...]
    root: bytes
    due_seconds: float
    written_blocks: int
    """Blocks of the chain before the last written end."""
    requested: bool = False
    """Whether a prompt ended or diverged there, not a conversation: others may, too."""

    def is_passed_by(self, block_hashes: Sequence[bytes]) -> bool:
        blocks = len(self.block_hashes)
        return blocks < len(block_hashes) and block_hashes[blocks - 1] == self.block_hashes[-1]

    def needs(self, node: Node[Segment], block_size: int) -> bool:
        block = node.start // block_size
        first = node.block_hashes[:1]
        return bool(first) and first == self.block_hashes[block : block + 1]


class ConversationEnds:
    """The waiting ends, at most `most` with `most_blocks` together. The engine's thread."""

    def __init__(
        self,
        block_size: int,
        max_ends: int,
        clock: Callable[[], float],
        *,
        max_blocks: int = sys.maxsize,
    ) -> None:
        self._block_size = block_size
        self._max_ends = max_ends
        self._max_blocks = max_blocks
        self._clock = clock
        self._ends: list[ConversationEnd] = []

    def add(
        self,
        block_hashes: Sequence[bytes],
        root: bytes,
        *,
        answered: bool = False,
        requested: bool = False,
    ) -> list[ConversationEnd]:
        """Queue an end; it replaces queued ends of its own prefixes unless they were requested.

        Returns the ends that are written now: the last replaced one if the last written one is far
        behind, and the oldest if there are too many. If `answered`, the end before the answer
        stays, since a template may leave reasoning out of the next prompt.
        """
        chain = tuple(block_hashes)
        if chain in self:
            return []
        passed = [end for end in self._ends if end.is_passed_by(chain) and not end.requested]
        last = max(passed, key=lambda end: len(end.block_hashes), default=None)
        written, due = len(chain) if last is None else last.written_blocks, []
        if not answered:
            self._ends = [end for end in self._ends if end not in passed]
            if last is not None and (len(chain) - written) * self._block_size > LAPSE_TOKENS:
                due, written = [last], len(last.block_hashes)
        due_seconds = self._clock() + LINGER_SECONDS
        self._ends.append(ConversationEnd(chain, root, due_seconds, written, requested))
        while len(self._ends) > self._max_ends or self._blocks > self._max_blocks:
            due.append(self._ends.pop(0))
        return due

    def drop_passed(self, block_hashes: Sequence[bytes]) -> None:
        """Drop the ends of prefixes of a chain, requested ones as well."""
        self._ends = [end for end in self._ends if not end.is_passed_by(block_hashes)]

    def take_due(self) -> list[ConversationEnd]:
        now = self._clock()
        return self._take(lambda end: end.due_seconds <= now)

    def take_needing(self, node: Node[Segment]) -> list[ConversationEnd]:
        return self._take(lambda end: end.needs(node, self._block_size))

    def take_all(self) -> list[ConversationEnd]:
        return self._take(lambda end: True)

    def __iter__(self) -> Iterator[ConversationEnd]:
        return iter(self._ends)

    @property
    def _blocks(self) -> int:
        return sum(len(end.block_hashes) for end in self._ends)

    def __contains__(self, block_hashes: Sequence[bytes]) -> bool:
        return any(end.block_hashes == tuple(block_hashes) for end in self._ends)

    def _take(self, is_taken: Callable[[ConversationEnd], bool]) -> list[ConversationEnd]:
        taken = [end for end in self._ends if is_taken(end)]
        if taken:
            self._ends = [end for end in self._ends if end not in taken]
        return sorted(taken, key=lambda end: -len(end.block_hashes))
