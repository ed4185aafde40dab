"""Measured rates of computing the KV of a prompt and of reading KV from a store."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

FIRST_BYTES_PER_SECOND = 500e6
"""Assumed read rate of a store before the first measurement: slower than almost every SSD."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest measurement in a running mean."""
REMEMBERED_CHUNKS = 32
"""Number of prefill chunks, of different sizes and positions, whose times are remembered."""
TOLERANCE = 1.4
"""Maximum ratio of measured to expected time at which the machine's speed counts as unchanged."""


class RunningMean:
    def __init__(self, first: float) -> None:
        self.value = first

    def add(self, measured: float) -> None:
        self.value += NEWEST_WEIGHT * (measured - self.value)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A measured prefill chunk, and the bounds it implies on the times of other chunks.

    A chunk takes a constant time, plus a time per token, plus a time per token attended to. So
    doubling its tokens at most doubles its time, and so does doubling its position in the prompt.
    """

    tokens: int
    middle: float
    """Position of the chunk's middle in the prompt."""
    seconds: float

    def most_seconds(self, tokens: int, middle: float) -> float:
        """Return an upper bound on the seconds of another chunk."""
        return self.seconds * max(1.0, tokens / self.tokens * max(1.0, middle / self.middle))

    def least_seconds(self, tokens: int, middle: float) -> float:
        """Return a lower bound on the seconds of another chunk."""
        return self.seconds * min(1.0, tokens / self.tokens * min(1.0, middle / self.middle))

    def contradicts(self, other: _Chunk) -> bool:
        """Return whether the machine's speed must have changed between two chunks."""
        upper = self.most_seconds(other.tokens, other.middle)
        lower = self.least_seconds(other.tokens, other.middle)
        return not lower / TOLERANCE <= other.seconds <= upper * TOLERANCE

    def likely_seconds(self, tokens: int, middle: float) -> float:
        """Estimate the seconds of another chunk, assuming no constant time per chunk."""
        return self.seconds * tokens / self.tokens * max(1.0, middle / self.middle)


class PrefillRate:
    """Prefill speed of a model, from measured chunks; the first one gave `token_seconds`."""

    def __init__(self, token_seconds: RunningMean, chunk_tokens: int = 1) -> None:
        self._token_seconds = token_seconds
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        """Latest chunk by size and position, in powers of two; the most recent one is last."""
        if token_seconds.value:
            self._note(_Chunk(chunk_tokens, chunk_tokens / 2, chunk_tokens * token_seconds.value))

    def prefilled(self, tokens: int, seconds: float, start: int = 0) -> None:
        """Add the measured seconds of a chunk of `tokens` tokens at position `start`."""
        self._token_seconds.add(seconds / tokens)
        chunk = _Chunk(tokens, start + tokens / 2, seconds)
        known = list(self._chunks.items())
        changed = [number for number, (_, old) in enumerate(known) if old.contradicts(chunk)]
        if changed:  # older measurements are out of date
            self._chunks = dict(known[changed[-1] + 1 :])
        self._note(chunk)

    def prefill_seconds(self, tokens: int) -> float:
        """Estimate the seconds to compute `tokens` prompt tokens."""
        return tokens * self._token_seconds.value

    def chunk_seconds(self, tokens: int, start: int) -> float:
        """Return an upper bound on the seconds of a chunk at `start`; 0 without measurements."""
        middle = start + tokens / 2
        return min(
            (chunk.most_seconds(tokens, middle) for chunk in self._chunks.values()), default=0.0
        )

    def tokens_within(self, seconds: float, start: int, max_tokens: int) -> int:
        """Return the size in tokens of the largest chunk known to fit into `seconds`."""
        return _largest(max_tokens, lambda tokens: self.chunk_seconds(tokens, start) <= seconds)

    def tokens_to_try(self, seconds: float, start: int, max_tokens: int) -> int:
        """Return the size in tokens of a chunk likely to fit into `seconds`; 0 if none is.

        The result is small at first for unmeasured positions, and grows with measurements.
        """
        known = self._chunks.values()

        def fits(tokens: int) -> bool:
            middle = start + tokens / 2
            return all(chunk.least_seconds(tokens, middle) <= seconds for chunk in known) and any(
                chunk.likely_seconds(tokens, middle) <= seconds for chunk in known
            )

        least = max((chunk.least_seconds(1, start + 0.5) for chunk in known), default=0.0)
        return _largest(max_tokens, fits) or int(least <= seconds * TOLERANCE)

    def tokens_worth(self, start: int) -> int:
        """Return the size in tokens above which a chunk takes longer than its overhead.

        The overhead is the time of the smallest chunk minus its tokens' time at the best rate.
        """
        known = self._chunks.values()
        if not known:
            return 0
        shortest = min(known, key=lambda chunk: chunk.tokens)
        overhead = shortest.seconds - shortest.tokens * self._token_seconds_at(shortest.middle)
        return int(max(0.0, overhead) / self._token_seconds_at(start))

    def _token_seconds_at(self, position: float) -> float:
        """Return the lowest estimated seconds per token at a position, without overhead."""
        return min(chunk.likely_seconds(1, position) for chunk in self._chunks.values())

    def _note(self, chunk: _Chunk) -> None:
        place = (chunk.tokens.bit_length(), int(chunk.middle).bit_length())
        self._chunks.pop(place, None)
        self._chunks[place] = chunk
        if len(self._chunks) > REMEMBERED_CHUNKS:
            del self._chunks[next(iter(self._chunks))]


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` for which the monotonic `fits` holds; 0 if none."""
    return bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


class ReadRate:
    """Read rate of a store, estimated from measured reads.

    Args:
        byte_seconds: running mean of the seconds per byte of the store's files.
    """

    def __init__(self, byte_seconds: RunningMean) -> None:
        self._byte_seconds = byte_seconds

    def restored(self, nbytes: int, seconds: float) -> None:
        """Add the measured seconds of a read of `nbytes`; reads of 0 bytes are ignored."""
        if nbytes:
            self._byte_seconds.add(seconds / nbytes)

    def seconds(self, nbytes: int) -> float:
        """Estimate the seconds to read `nbytes`."""
        return nbytes * self._byte_seconds.value
