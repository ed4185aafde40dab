"""Measured rates: computing a prompt's KV, and reading it from a store."""

from __future__ import annotations

FIRST_BYTES_PER_SECOND = 500e6
"""Rate of a store before its first read is measured: slower than almost every SSD."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest measurement in a running mean."""


class RunningMean:
    """A running mean.

    Args:
        first: value before the first measurement.
    """

    def __init__(self, first: float) -> None:
        self.value = first

    def add(self, measured: float) -> None:
        """Take in a measurement."""
        self.value += NEWEST_WEIGHT * (measured - self.value)


class PrefillRate:
    """A model's measured prefill rate. Pure: it reads no clock.

    Args:
        token_seconds: seconds to compute a token of a prompt.
    """

    def __init__(self, token_seconds: RunningMean) -> None:
        self._token_seconds = token_seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Add a measurement: seconds to compute `tokens` of a prompt."""
        self._token_seconds.add(seconds / tokens)

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds that `tokens` take to compute."""
        return tokens * self._token_seconds.value

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens are computed in so many seconds."""
        return int(seconds / self._token_seconds.value)


class ReadRate:
    """A store's measured read rate. Pure: it reads no clock.

    Args:
        byte_seconds: seconds to read a byte of its files.
    """

    def __init__(self, byte_seconds: RunningMean) -> None:
        self._byte_seconds = byte_seconds

    def restored(self, nbytes: int, seconds: float) -> None:
        """Add a measurement: seconds to read `nbytes` of files; 0 bytes are left out."""
        if nbytes:
            self._byte_seconds.add(seconds / nbytes)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take to read."""
        return nbytes * self._byte_seconds.value
