"""Time of a step for chunks of prompts. Pure: it reads no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

SLACK = 2.0
"""Times its seconds that a step may take for a whole block: parts of one take longer together.

Measured on SmolLM2, four agents over HTTP: with 1.0 a quarter of the tokens a second is lost.
"""

ALONE_SECONDS = 1.0
"""Seconds of a step in which no sequence decodes: a request that comes waits for its end."""


class ChunkSpeed(Protocol):
    """Measured speed of prefill, by where a chunk begins."""

    def chunk_seconds(self, tokens: int, start: int) -> float:
        """Return the seconds that a chunk takes at most."""

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        """Return the tokens, up to `most`, of the longest chunk that is known to take no longer."""

    def tokens_to_try(self, seconds: float, start: int, most: int) -> int:
        """Return the tokens, up to `most`, of the longest chunk that may take no longer."""

    def tokens_worth(self, start: int) -> int:
        """Return the tokens from which a chunk spends more time on tokens than on overhead."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step for chunks of prompts, and the speed at which they are read."""

    seconds: float
    """Seconds of a step beside which others wait: they decode, or their prompt is short."""
    speed: ChunkSpeed
    whole_blocks: bool = False
    """Whether a block is read at once, also where there is no time for all of it."""
    alone_seconds: float | None = None
    """Seconds of all other steps; None is no bound."""
    others_wait: bool = True

    @property
    def alone(self) -> StepTime | None:
        """Time of a step for which no other request waits."""
        if self.alone_seconds is None:
            return None
        seconds = max(self.seconds, self.alone_seconds)
        return replace(self, seconds=seconds, others_wait=False)

    def tokens(self, start: int, most: int, beside: Iterable[tuple[int, int]] = ()) -> int:
        """Return the tokens of the longest chunk from `start` on that there is time for.

        Args:
            start: position of its first token.
            most: most tokens.
            beside: start and tokens of the other chunks of the step.
        """
        spent = sum(self.speed.chunk_seconds(tokens, at) for at, tokens in beside)
        left = self.seconds - spent
        return self.speed.tokens_within(left, start, most) if left > 0 else 0

    def least(self, start: int) -> int:
        """Return the tokens that are read even if they take longer; few where others wait."""
        return 0 if self.others_wait else self.speed.tokens_worth(start)

    def is_short(self, start: int, rest: int) -> bool:
        """Tell whether there may be time for the whole rest of a prompt."""
        return self.speed.tokens_to_try(self.seconds, start, rest) == rest

    def part(self, start: int, block: int) -> int:
        """Return the tokens to read of a block that may not fit; all of them if no token may.

        Not so few that most of the time is the chunk's own: parts would wait for each other.
        """
        if self.whole_blocks or self.speed.chunk_seconds(block, start) <= SLACK * self.seconds:
            return block
        tokens = self.speed.tokens_to_try(self.seconds, start, block) or block
        return min(block, max(tokens, self.speed.tokens_worth(start)))
