"""Time limit for the prefill chunks of a step. Reads no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

SLACK = 2.0
"""Factor by which a whole block may exceed the step time, as splitting a block costs more in total.

Measured on SmolLM2 with four agents over HTTP: 1.0 costs a quarter of the tokens per second.
"""

ALONE_SECONDS = 1.0
"""Step time in seconds while no sequence decodes; a new request waits for the end of the step."""


class ChunkSpeed(Protocol):
    def chunk_seconds(self, tokens: int, start: int) -> float:
        """Return an upper bound on the seconds that a chunk takes."""

    def tokens_within(self, seconds: float, start: int, max_tokens: int) -> int:
        """Return the size of the largest chunk known to take at most `seconds`."""

    def tokens_to_try(self, seconds: float, start: int, max_tokens: int) -> int:
        """Return the size of the largest chunk that might take at most `seconds`."""

    def tokens_worth(self, start: int) -> int: ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time limit for prefill in a step, and the measured prefill speed."""

    seconds: float
    """Limit in seconds while others wait: decoding sequences or short prompts."""
    speed: ChunkSpeed
    whole_blocks: bool = False
    """Whether a block is always prefilled at once, even beyond the limit."""
    alone_seconds: float | None = None
    """Limit in seconds of all other steps; None means no limit."""
    others_wait: bool = True
    one_pass: bool = False
    """Whether the chunks of a step are computed in one pass, in the time of one long chunk."""
    block_tokens: int | None = None
    """Size of a block. While others wait, a quarter of the limit is used, or the time of a block if
    that is longer, because larger chunks gain little. None uses the whole limit."""

    @property
    def alone(self) -> StepTime | None:
        """The limit for a step in which no other request waits; None means no limit."""
        if self.alone_seconds is None:
            return None
        seconds = max(self.seconds, self.alone_seconds)
        return replace(self, seconds=seconds, others_wait=False)

    def tokens(self, start: int, max_tokens: int, beside: Iterable[tuple[int, int]] = ()) -> int:
        """Return the size of the largest chunk from `start` that fits into the remaining time.

        Args:
            start: position of the chunk.
            max_tokens: maximum number of its tokens.
            beside: positions and token counts of the other chunks of the step.
        """
        beside = list(beside)
        if self.one_pass:
            others = sum(tokens for _, tokens in beside)
            furthest = max([start, *(begin for begin, _ in beside)])
            used = self._used_seconds(start)
            return max(0, self.speed.tokens_within(used, furthest, max_tokens + others) - others)
        spent = sum(self.speed.chunk_seconds(tokens, begin) for begin, tokens in beside)
        left = self._used_seconds(start) - spent
        return self.speed.tokens_within(left, start, max_tokens) if left > 0 else 0

    def _used_seconds(self, start: int) -> float:
        """Return the part of the limit, in seconds, that chunks from `start` on may use."""
        if self.block_tokens is None or not self.others_wait:
            return self.seconds
        block = self.speed.chunk_seconds(self.block_tokens, start)
        return min(self.seconds, max(self.seconds / 4, block))

    def least(self, start: int) -> int:
        """Return the size of a chunk to prefill regardless of the limit; 0 while others wait."""
        return 0 if self.others_wait else self.speed.tokens_worth(start)

    def is_short(self, start: int, rest: int) -> bool:
        """Return whether the rest of a prompt might fit into one step."""
        return self.speed.tokens_to_try(self.seconds, start, rest) == rest

    def part(self, start: int, block: int) -> int:
        """Return how many tokens of a block to prefill now: all, unless they exceed the limit.

        Args:
            start: position of the first token.
            block: number of tokens up to the end of the block.
        """
        if self.whole_blocks or self.speed.chunk_seconds(block, start) <= SLACK * self.seconds:
            return block
        tokens = self.speed.tokens_to_try(self.seconds, start, block) or block
        return min(block, max(tokens, self.speed.tokens_worth(start)))
