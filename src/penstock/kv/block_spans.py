"""Spans of blocks: how many small blocks go together where each has a price of its own."""

from __future__ import annotations

from dataclasses import dataclass

SPAN_TOKENS = 256
"""Tokens that small blocks make together where each of them has a price of its own: in a node,
between two checkpoints."""
RECORD_TOKENS = 320
"""Tokens of a record of a cold tier, which small blocks make together. A conversation of 1,280
tokens or more then has no more records, its short last one included, than blocks of 256 make."""


def span_blocks(block_size: int) -> int:
    """Return how many blocks make `SPAN_TOKENS`; one that is longer makes a span by itself.

    >>> span_blocks(32), span_blocks(48), span_blocks(1024)
    (8, 5, 1)
    """
    return max(1, SPAN_TOKENS // block_size)


def record_blocks(block_size: int) -> int:
    """Return how many blocks make `RECORD_TOKENS`; one that is longer makes a record by itself.

    >>> record_blocks(32), record_blocks(48), record_blocks(1024)
    (10, 6, 1)
    """
    return max(1, RECORD_TOKENS // block_size)


def span_tokens(block_size: int) -> int:
    """Return the tokens of as many blocks.

    >>> span_tokens(32), span_tokens(48), span_tokens(1024)
    (256, 240, 1024)
    """
    return block_size * span_blocks(block_size)


@dataclass(frozen=True, slots=True)
class Spans:
    """How the blocks of a chain make records.

    >>> spans = Spans(4, cut=6)
    >>> spans.ends(11), spans.start(7), spans.end(7)
    ([4, 6, 8], 6, 8)
    """

    blocks: int = 1
    """Blocks of a record: a record ends at every multiple of it."""
    cut: int = 0
    """Block at which a record ends as well, since the blocks in front of it have another format; 0
    is none."""

    def start(self, block: int) -> int:
        """Return the first block of the record that has `block`."""
        first = block // self.blocks * self.blocks
        return max(first, self.cut) if block >= self.cut else first

    def end(self, block: int) -> int:
        """Return the end of the record that has `block`."""
        end = (block // self.blocks + 1) * self.blocks
        return min(end, self.cut) if block < self.cut else end

    def ends(self, blocks: int) -> list[int]:
        """Return where the whole records of a chain of so many blocks end."""
        ends = set(range(self.blocks, blocks + 1, self.blocks))
        return sorted(ends | ({self.cut} if 0 < self.cut <= blocks else set()))
