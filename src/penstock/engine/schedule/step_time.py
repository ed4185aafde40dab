"""Time limit for the prefill chunks of a step. Pure: reads no clock."""

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
        """Return the maximum seconds that a chunk takes."""

    def tokens_within(self, seconds: float, start: int, max_tokens: int) -> int:
        """Return the longest chunk, up to `max_tokens` tokens, known to take at most `seconds`."""

    def tokens_to_try(self, seconds: float, start: int, max_tokens: int) -> int:
        """Return the longest chunk, up to `max_tokens`, that might take at most `seconds`."""

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
    """Limit in seconds of all other steps; None for no limit."""
    others_wait: bool = True
    block_tokens: int | None = None
    """Size of a block. While others wait, a quarter of the limit is used, or a block's time if that
    is longer: larger chunks gain little then. None to use all of the limit."""

    @property
    def alone(self) -> StepTime | None:
        """The limit for a step in which no other request waits."""
        if self.alone_seconds is None:
            return None
        seconds = max(self.seconds, self.alone_seconds)
        return replace(self, seconds=seconds, others_wait=False)

    def tokens(self, start: int, max_tokens: int, beside: Iterable[tuple[int, int]] = ()) -> int:
        """Return the longest chunk from `start` that fits into the remaining time."""
        spent = sum(self.speed.chunk_seconds(tokens, begin) for begin, tokens in beside)
        left = self._used_seconds(start) - spent
        return self.speed.tokens_within(left, start, max_tokens) if left > 0 else 0

    def _used_seconds(self, start: int) -> float:
        """Return the part of the limit that chunks from `start` on use."""
        if self.block_tokens is None or not self.others_wait:
            return self.seconds
        block = self.speed.chunk_seconds(self.block_tokens, start)
        return min(self.seconds, max(self.seconds / 4, block))

    def least(self, start: int) -> int:
        """Return the minimum chunk, prefilled even if it exceeds the limit; 0 while others wait."""
        return 0 if self.others_wait else self.speed.tokens_worth(start)

    def is_short(self, start: int, rest: int) -> bool:
        """Return whether the rest of a prompt might fit into one step."""
        return self.speed.tokens_to_try(self.seconds, start, rest) == rest

    def part(self, start: int, block: int) -> int:
        """Return the tokens to prefill of a block beyond the limit; all if not one fits."""
        if self.whole_blocks or self.speed.chunk_seconds(block, start) <= SLACK * self.seconds:
            return block
        tokens = self.speed.tokens_to_try(self.seconds, start, block) or block
        return min(block, max(tokens, self.speed.tokens_worth(start)))
