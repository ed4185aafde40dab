"""Lengths of an engine's last answers: an estimate of how long the next one will be."""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 256
"""Least length that is expected of an answer, in tokens."""
LEAST_REST_TOKENS = 64
"""Least length that is expected of the rest of an answer, in tokens."""
REMEMBERED_ANSWERS = 256
"""Number of answers whose mean length is expected of the next."""


class AnswerLengths:
    """Lengths of the last answers. Not thread-safe: the engine's thread.

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
        """Mean length of the last answers in tokens, rounded up; at least `LEAST_TOKENS`."""
        mean = -(-self._sum // len(self._last)) if self._last else 0
        return max(LEAST_TOKENS, mean)

    def rest_tokens(self, generated: int) -> int:
        """Return how many tokens are expected after the first `generated` ones of an answer."""
        return max(LEAST_REST_TOKENS, self.expected_tokens - generated)

    def note(self, generated: int) -> None:
        """Note the length of an answer that has ended."""
        self._last.append(generated)
        self._sum += generated
        if len(self._last) > REMEMBERED_ANSWERS:
            self._sum -= self._last.popleft()
