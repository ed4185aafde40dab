"""Spans of blocks: how many small blocks go together where each has a fixed cost."""

from __future__ import annotations

from dataclasses import dataclass

SPAN_TOKENS = 256
"""Tokens of small blocks together in a node, and between two checkpoints."""
RECORD_TOKENS = 320
"""Tokens of a record of a cold tier. A conversation of 1,280 tokens or more then has
no more records, its short last one included, than blocks of 256 make."""
SPILLED_MERGE_TOKENS = 512
"""Most tokens of a node whose KV is still in memory, unless a prompt chunk has more."""


def span_blocks(block_size: int) -> int:
    """Return how many blocks make `SPAN_TOKENS`; a longer block makes a span by itself.

    >>> span_blocks(32), span_blocks(48), span_blocks(1024)
    (8, 5, 1)
    """
    return max(1, SPAN_TOKENS // block_size)


def record_blocks(block_size: int) -> int:
    """Return how many blocks make `RECORD_TOKENS`; a longer block makes a record by itself.

    >>> record_blocks(32), record_blocks(48), record_blocks(1024)
    (10, 6, 1)
    """
    return max(1, RECORD_TOKENS // block_size)


def span_tokens(block_size: int) -> int:
    """Return the tokens of a span of blocks.

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
    """Blocks of a record, which ends at every multiple of them."""
    cut: int = 0
    """Block at which a record ends as well, where the format changes; 0 is none."""

    def start(self, block: int) -> int:
        """Return the first block of the record with `block`."""
        first = block // self.blocks * self.blocks
        return max(first, self.cut) if block >= self.cut else first

    def end(self, block: int) -> int:
        end = (block // self.blocks + 1) * self.blocks
        return min(end, self.cut) if block < self.cut else end

    def ends(self, blocks: int) -> list[int]:
        ends = set(range(self.blocks, blocks + 1, self.blocks))
        return sorted(ends | ({self.cut} if 0 < self.cut <= blocks else set()))
