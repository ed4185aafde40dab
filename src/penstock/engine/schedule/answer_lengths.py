"""Lengths of recent answers, used to estimate the length of the next one."""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 256
"""Minimum expected length of an answer, in tokens."""
LEAST_REST_TOKENS = 64
"""Minimum expected number of remaining tokens of a running answer."""
REMEMBERED_ANSWERS = 256
"""Number of recent answers averaged for the estimate."""


class AnswerLengths:
    """Moving average of answer lengths. Not thread-safe: owned by the engine's thread.

    >>> lengths = AnswerLengths()
    >>> lengths.expected_tokens
    256
    >>> lengths.note(1_000)
    >>> lengths.note(2_000)
    >>> lengths.expected_tokens, lengths.rest_tokens(400), lengths.rest_tokens(1_499)
    (1500, 1100, 64)
    """

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sum = 0

    @property
    def expected_tokens(self) -> int:
        """Mean length of the recent answers in tokens, rounded up; at least `LEAST_TOKENS`."""
        mean = -(-self._sum // len(self._last)) if self._last else 0
        return max(LEAST_TOKENS, mean)

    def rest_tokens(self, generated: int) -> int:
        """Return the expected number of further tokens of an answer that has `generated` tokens."""
        return max(LEAST_REST_TOKENS, self.expected_tokens - generated)

    def note(self, generated: int) -> None:
        self._last.append(generated)
        self._sum += generated
        if len(self._last) > REMEMBERED_ANSWERS:
            self._sum -= self._last.popleft()
