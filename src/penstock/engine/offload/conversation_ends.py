"""Queue of conversation ends to write to a cold tier; they wait, since most conversations continue.

    note  ──> linger ──> the conversation continues: dropped, replaced by its next end
                    ├──> it does not for `LINGER_SECONDS`: written
                    └──> its memory is needed, or the engine stops: written first

So not every turn of a conversation is written. Holds only block hashes, no KV.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.kv.segment import Segment
from penstock.prefix.node import Node

LINGER_SECONDS = 10.0
"""Seconds that a conversation's end waits for the next turn."""
LAPSE_TOKENS = 2_048
"""Number of tokens since the last written end after which the next end is always written."""


@dataclass(frozen=True, slots=True)
class ConversationEnd:
    """Position at which a conversation resumes if it continues."""

    block_hashes: tuple[bytes, ...]
    root: bytes
    due_seconds: float
    written_blocks: int
    """Number of blocks of the chain before the last written end."""
    requested: bool = False
    """Whether a prompt ended or diverged here, as others may again."""

    def is_passed_by(self, block_hashes: Sequence[bytes]) -> bool:
        blocks = len(self.block_hashes)
        return blocks < len(block_hashes) and block_hashes[blocks - 1] == self.block_hashes[-1]

    def needs(self, node: Node[Segment], block_size: int) -> bool:
        block = node.start // block_size
        first = node.block_hashes[:1]
        return bool(first) and first == self.block_hashes[block : block + 1]


class ConversationEnds:
    """Ends of conversations whose blocks wait to be offloaded: `max_ends`, `max_blocks` at most.

    Engine thread only.
    """

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

        Returns the ends to write now: the latest replaced one if the last written one is too long
        ago, and the oldest ones if there are too many. If `answered`, the end before the answer
        stays, since a template may omit reasoning from the next prompt.
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
        """Drop the ends of proper prefixes of a chain, including requested ones."""
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
