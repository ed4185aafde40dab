"""How long it takes to compute a prompt's KV, and to read it from a disk: both as measured."""

from __future__ import annotations

FIRST_BYTES_PER_SECOND = 500e6
"""What a disk is taken for until it was read: slower than almost every SSD."""
NEWEST_WEIGHT = 0.25
"""Of the last measurement in the mean."""


class Pace:
    """Running means of a model's and of a disk's speed. Pure: it is told what was measured.

    Args:
        prefill_token_seconds: a first guess.
    """

    def __init__(self, prefill_token_seconds: float) -> None:
        self._token_seconds = prefill_token_seconds
        self._byte_seconds = 1 / FIRST_BYTES_PER_SECOND

    @property
    def speeds(self) -> tuple[float, float]:
        """Seconds that a token takes to compute, and a byte to read."""
        return self._token_seconds, self._byte_seconds

    def set(self, token_seconds: float, byte_seconds: float) -> None:
        """Go by what somebody else has measured from now on."""
        self._token_seconds, self._byte_seconds = token_seconds, byte_seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Take in how long it took to compute some tokens of a prompt."""
        self._token_seconds += NEWEST_WEIGHT * (seconds / tokens - self._token_seconds)

    def restored(self, nbytes: int, seconds: float) -> None:
        """Take in how long it took to read so many bytes of files; none tell nothing."""
        if nbytes:
            self._byte_seconds += NEWEST_WEIGHT * (seconds / nbytes - self._byte_seconds)

    def prefill_seconds(self, tokens: int) -> float:
        """Return how long so many tokens take to compute."""
        return tokens * self._token_seconds

    def restore_seconds(self, nbytes: int) -> float:
        """Return how long so many bytes take to read."""
        return nbytes * self._byte_seconds
