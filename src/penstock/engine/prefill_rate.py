"""Measured rates: computing a prompt's KV, and reading it from a store."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

FIRST_BYTES_PER_SECOND = 500e6
"""Rate of a store before its first read is measured: slower than almost every SSD."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest measurement in a running mean."""
REMEMBERED_CHUNKS = 32
"""Chunks of prompts, of different sizes and places, whose times are remembered."""
TOLERANCE = 1.4
"""Ratio of a chunk's time to the expected one up to which the machine is as fast as before."""


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


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A measured chunk of a prompt, and the bounds of other chunks' times that follow from it.

    A chunk takes a time of its own, some for each token, and some for each token that one reads.
    So one of twice the tokens takes twice as long at most, and one of as many tokens twice as far
    into a prompt, too.
    """

    tokens: int
    middle: float
    """Position of its middle."""
    seconds: float

    def most_seconds(self, tokens: int, middle: float) -> float:
        """Return an upper bound of the seconds that another chunk takes."""
        return self.seconds * max(1.0, tokens / self.tokens * max(1.0, middle / self.middle))

    def least_seconds(self, tokens: int, middle: float) -> float:
        """Return a lower bound of the seconds that another chunk takes."""
        return self.seconds * min(1.0, tokens / self.tokens * min(1.0, middle / self.middle))

    def contradicts(self, other: _Chunk) -> bool:
        """Tell whether the machine's speed must have changed between two chunks."""
        most = self.most_seconds(other.tokens, other.middle)
        least = self.least_seconds(other.tokens, other.middle)
        return not least / TOLERANCE <= other.seconds <= most * TOLERANCE

    def likely_seconds(self, tokens: int, middle: float) -> float:
        """Return the seconds of a chunk if only its tokens count, and the tokens that they read."""
        return self.seconds * tokens / self.tokens * max(1.0, middle / self.middle)


class PrefillRate:
    """A model's measured speed of prefill. Pure: it reads no clock.

    Args:
        token_seconds: seconds to compute a token of a prompt.
        chunk_tokens: tokens of the chunk, at the start of a prompt, with which that was measured.
    """

    def __init__(self, token_seconds: RunningMean, chunk_tokens: int = 1) -> None:
        self._token_seconds = token_seconds
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        """The latest chunk of each size and place, by powers of two; the last one read is last."""
        if token_seconds.value:
            self._note(_Chunk(chunk_tokens, chunk_tokens / 2, chunk_tokens * token_seconds.value))

    def prefilled(self, tokens: int, seconds: float, start: int = 0) -> None:
        """Add a measurement: seconds to compute `tokens` of a prompt from `start` on."""
        self._token_seconds.add(seconds / tokens)
        chunk = _Chunk(tokens, start + tokens / 2, seconds)
        known = list(self._chunks.items())
        changed = [number for number, (_, old) in enumerate(known) if old.contradicts(chunk)]
        if changed:  # and all that was measured before it is out of date, too
            self._chunks = dict(known[changed[-1] + 1 :])
        self._note(chunk)

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds that `tokens` take to compute."""
        return tokens * self._token_seconds.value

    def chunk_seconds(self, tokens: int, start: int) -> float:
        """Return the most seconds that a chunk from `start` on takes; 0 if none was measured."""
        middle = start + tokens / 2
        return min(
            (chunk.most_seconds(tokens, middle) for chunk in self._chunks.values()), default=0.0
        )

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        """Return the tokens, up to `most`, of the longest chunk that is known to take no longer."""
        return _largest(most, lambda tokens: self.chunk_seconds(tokens, start) <= seconds)

    def tokens_to_try(self, seconds: float, start: int, most: int) -> int:
        """Return the tokens, up to `most`, of a chunk that may take no longer; 0 if none may.

        Few where nothing of that size or that far into a prompt was read: the next one is longer.
        """
        known = self._chunks.values()

        def fits(tokens: int) -> bool:
            middle = start + tokens / 2
            return all(chunk.least_seconds(tokens, middle) <= seconds for chunk in known) and any(
                chunk.likely_seconds(tokens, middle) <= seconds for chunk in known
            )

        least = max((chunk.least_seconds(1, start + 0.5) for chunk in known), default=0.0)
        return _largest(most, fits) or int(least <= seconds * TOLERANCE)

    def tokens_worth(self, start: int) -> int:
        """Return the tokens from which a chunk spends more time on tokens than on overhead.

        The overhead is the time that the shortest chunk took beyond its tokens at the best rate.
        """
        known = self._chunks.values()
        if not known:
            return 0
        shortest = min(known, key=lambda chunk: chunk.tokens)
        own = shortest.seconds - shortest.tokens * self._token_seconds_at(shortest.middle)
        return int(max(0.0, own) / self._token_seconds_at(start))

    def _token_seconds_at(self, position: float) -> float:
        """Return the best known seconds of a token of a chunk, if tokens are all that counts."""
        return min(chunk.likely_seconds(1, position) for chunk in self._chunks.values())

    def _note(self, chunk: _Chunk) -> None:
        place = (chunk.tokens.bit_length(), int(chunk.middle).bit_length())
        self._chunks.pop(place, None)
        self._chunks[place] = chunk
        if len(self._chunks) > REMEMBERED_CHUNKS:
            del self._chunks[next(iter(self._chunks))]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, 0 if none: smaller ones fit, too."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


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
