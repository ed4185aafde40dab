"""How long it takes to compute a prompt's KV, and to read it from a store: both as measured."""

from __future__ import annotations

FIRST_BYTES_PER_SECOND = 500e6
"""What a store is taken for until it was read: slower than almost every SSD."""
NEWEST_WEIGHT = 0.25
"""Of the last measurement in the mean."""


class RunningMean:
    """A running mean.

    Args:
        first: what it is taken for before anything was measured.
    """

    def __init__(self, first: float) -> None:
        self.value = first

    def add(self, measured: float) -> None:
        """Take in a measurement."""
        self.value += NEWEST_WEIGHT * (measured - self.value)


class PrefillRate:
    """A model's speed. Pure: it is told what was measured.

    Args:
        token_seconds: what a token of a prompt takes to compute.
    """

    def __init__(self, token_seconds: RunningMean) -> None:
        self._token_seconds = token_seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Take in how long it took to compute some tokens of a prompt."""
        self._token_seconds.add(seconds / tokens)

    def prefill_seconds(self, tokens: int) -> float:
        """Return how long so many tokens take to compute."""
        return tokens * self._token_seconds.value


class ReadRate:
    """A store's speed. Pure: it is told what was measured.

    Args:
        byte_seconds: what a byte of its files takes to read.
    """

    def __init__(self, byte_seconds: RunningMean) -> None:
        self._byte_seconds = byte_seconds

    def restored(self, nbytes: int, seconds: float) -> None:
        """Take in how long it took to read so many bytes of files; none tell nothing."""
        if nbytes:
            self._byte_seconds.add(seconds / nbytes)

    def seconds(self, nbytes: int) -> float:
        """Return how long so many bytes take to read."""
        return nbytes * self._byte_seconds.value
