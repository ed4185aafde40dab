"""Groups of small blocks that are handled together to amortize fixed costs."""

from __future__ import annotations

from dataclasses import dataclass

SPAN_TOKENS = 256
"""Target tokens of a node merged from small blocks, and between two checkpoints."""
RECORD_TOKENS = 320
"""Target tokens of a cold-tier record. Conversations of 1,280 tokens or more need no more records,
including a short last one, than with blocks of 256 tokens."""
SPILLED_MERGE_TOKENS = 512
"""Maximum tokens of a node with KV in memory when spilling, unless a prefill chunk is larger."""
SPILLED_LONGER = 32
"""Multiple of `SPILLED_MERGE_TOKENS` for nodes whose KV is spilled; each node costs time per step.
"""
SPILLED_MERGE_BYTES = 32 << 20
"""Maximum bytes of such a node, which keeps the KV of sliding windows; merging copies them."""


def span_blocks(block_size: int) -> int:
    """Return the number of blocks in `SPAN_TOKENS`; at least one.

    >>> span_blocks(32), span_blocks(48), span_blocks(1024)
    (8, 5, 1)
    """
    return max(1, SPAN_TOKENS // block_size)


def record_blocks(block_size: int) -> int:
    """Return the number of blocks in `RECORD_TOKENS`; at least one.

    >>> record_blocks(32), record_blocks(48), record_blocks(1024)
    (10, 6, 1)
    """
    return max(1, RECORD_TOKENS // block_size)


def span_tokens(block_size: int) -> int:
    """Return the number of tokens in a span of blocks.

    >>> span_tokens(32), span_tokens(48), span_tokens(1024)
    (256, 240, 1024)
    """
    return block_size * span_blocks(block_size)


@dataclass(frozen=True, slots=True)
class Spans:
    """Division of a sequence's blocks into records.

    >>> spans = Spans(4, cut=6)
    >>> spans.ends(11), spans.start(7), spans.end(7)
    ([4, 6, 8], 6, 8)
    """

    blocks: int = 1
    """Number of blocks per record; records end at multiples of it."""
    cut: int = 0
    """Block before which a record also ends because the format changes; 0 for none."""

    def start(self, block: int) -> int:
        """Return the first block of the record that contains `block`."""
        first = block // self.blocks * self.blocks
        return max(first, self.cut) if block >= self.cut else first

    def end(self, block: int) -> int:
        end = (block // self.blocks + 1) * self.blocks
        return min(end, self.cut) if block < self.cut else end

    def ends(self, blocks: int) -> list[int]:
        ends = set(range(self.blocks, blocks + 1, self.blocks))
        return sorted(ends | ({self.cut} if 0 < self.cut <= blocks else set()))
