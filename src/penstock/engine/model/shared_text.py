"""Text of many sequences, proposed to others that wrote the same. Pure: no arrays of MLX.

    propose ──> the sequence's new tokens into its page ──> what followed the same tokens elsewhere

A tenant's sequences find only text of the same tenant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engine.model.ngram_filter import LEAST_NGRAM, NgramFilter
from penstock.engine.model.proposals import (
    LONGEST_NGRAM,
    NOTHING,
    Proposal,
    TextPlaces,
)

SHARED_TEXT_TOKENS = 131_072
"""Tokens that are kept of all sequences together, the last ones."""
PAGE_TOKENS = 256
"""Tokens of a page, which one sequence fills."""
PAGE_BYTES = 4 * PAGE_TOKENS + 4 * 8
"""Bytes of a page with its links."""
NONE = -1
"""Number of no token, no place and no sequence."""


class SharedText:
    """The last tokens of all sequences, in pages; the oldest page is filled anew.

    Not thread-safe: the engine's thread.

    Args:
        tokens: most tokens that are kept.
    """

    def __init__(self, tokens: int = SHARED_TEXT_TOKENS) -> None:
        self._pages = tokens // PAGE_TOKENS
        self.clear()

    @staticmethod
    def nbytes_of(tokens: int = SHARED_TEXT_TOKENS) -> int:
        """Return the bytes that so many tokens take."""
        return tokens // PAGE_TOKENS * PAGE_BYTES + 2 * NgramFilter.nbytes_of(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (self._tokens, self._writers, self._tenants, self._before, self._behind)
        filters = self._new_runs.nbytes + self._old_runs.nbytes
        return sum(array.nbytes for array in arrays) + filters

    def clear(self) -> None:
        """Forget all text."""

        def empty() -> npt.NDArray[np.int64]:
            return np.full(self._pages, NONE, np.int64)

        self._tokens = np.full(self._pages * PAGE_TOKENS, NONE, np.intc)
        self._writers, self._tenants = empty(), empty()
        self._before, self._behind = empty(), empty()  # places of the next tokens beyond a page
        self._next = 0
        # Each run of a page is in one of two filters: that of the text since the first page was
        # filled anew, and that of the text between then and the time before.
        self._new_runs = NgramFilter(len(self._tokens))
        self._old_runs = NgramFilter(len(self._tokens))

    def add(self, writer: TextWriter, tokens: Sequence[int]) -> bool:
        """Add tokens behind those that a sequence has added before.

        Returns:
            False if the last `LEAST_NGRAM` of them are new, so that nothing agrees with them. True
            without new tokens.
        """
        done, total = 0, len(tokens)
        while done < total:
            if writer.page == NONE or self._writers[writer.page] != writer.id:
                self._turn(writer, NONE)  # the first page, or one that was filled anew
            elif writer.used == PAGE_TOKENS:
                self._turn(writer, writer.page)
            count = min(PAGE_TOKENS - writer.used, total - done)
            start = writer.page * PAGE_TOKENS + writer.used
            self._tokens[start : start + count] = tokens[done : done + count]
            writer.used += count
            done += count
        return self._add_runs(writer, tokens)

    def _add_runs(self, writer: TextWriter, tokens: Sequence[int]) -> bool:
        """Add the runs of new tokens; tell whether the last one may have occurred before."""
        if not tokens:
            return True
        behind = [*writer.last, *tokens[-len(self._tokens) :]]
        writer.last = behind[1 - LEAST_NGRAM :]
        return self._new_runs.add(behind) or behind[-LEAST_NGRAM:] in self._old_runs

    def find(self, writer: TextWriter, last: Sequence[int], most: int) -> Proposal:
        """Return the newest continuation of the longest agreement with `last` in others' text."""
        ends = self._others(writer, np.flatnonzero(self._tokens == last[-1]))
        at, agreement = ends, 1
        for token in reversed(last[:-1]):
            at = self._moved(at, -1)
            same = (at != NONE) & (self._tokens[at] == token)
            if not same.any():
                break
            at, ends, agreement = at[same], ends[same], agreement + 1
        if agreement < LEAST_NGRAM:
            return NOTHING
        age = (ends // PAGE_TOKENS - self._next) % self._pages
        return Proposal(self._following(ends[[age.argmax()]], most), agreement)

    # ---- parts

    def _others(self, writer: TextWriter, places: TextPlaces) -> TextPlaces:
        """Return the places in text of other sequences of the tenant that has a next token."""
        pages = places // PAGE_TOKENS
        places = places[
            (self._tenants[pages] == writer.tenant) & (self._writers[pages] != writer.id)
        ]
        behind = self._moved(places, 1)
        going_on: TextPlaces = places[(behind != NONE) & (self._tokens[behind] != NONE)]
        return going_on

    def _following(self, place: TextPlaces, most: int) -> list[int]:
        """Return the tokens behind a place."""
        tokens: list[int] = []
        while len(tokens) < most:
            place = self._moved(place, 1)
            token = NONE if place[0] == NONE else int(self._tokens[place[0]])
            if token == NONE:
                break
            tokens.append(token)
        return tokens

    def _moved(self, places: TextPlaces, by: int) -> TextPlaces:
        """Return the places one token on or back; `NONE` where there is none."""
        pages, moved = places // PAGE_TOKENS, places + by
        beyond = (self._behind if by > 0 else self._before)[pages]
        return np.where(moved // PAGE_TOKENS == pages, moved, beyond)

    def _turn(self, writer: TextWriter, previous: int) -> None:
        """Give a sequence the oldest page, behind the previous one."""
        page, self._next = self._next, (self._next + 1) % self._pages
        if page == 0:
            self._new_runs, self._old_runs = self._old_runs, self._new_runs
            self._new_runs.clear(len(self._tokens))
        start = page * PAGE_TOKENS
        # Pages beside it in its old text end there now.
        if self._before[page] != NONE:
            self._behind[self._before[page] // PAGE_TOKENS] = NONE
        if self._behind[page] != NONE:
            self._before[self._behind[page] // PAGE_TOKENS] = NONE
        self._tokens[start : start + PAGE_TOKENS] = NONE
        self._writers[page], self._tenants[page] = writer.id, writer.tenant
        self._before[page] = self._behind[page] = NONE
        if previous not in (NONE, page):
            self._before[page], self._behind[previous] = (
                previous * PAGE_TOKENS + PAGE_TOKENS - 1,
                start,
            )
        writer.page, writer.used = page, 0


class TextWriter:
    """Place of one sequence in the shared text.

    Args:
        id: number of the sequence, from 0.
        tenant: number of its tenant.
    """

    __slots__ = ("id", "last", "page", "tenant", "used")

    def __init__(self, id: int, tenant: int) -> None:
        self.id = id
        self.tenant = tenant
        self.page = NONE
        self.used = 0
        """Tokens of the page that are written."""
        self.last: list[int] = []
        """Last tokens that were written: with the next one they are a run."""


class SharedProposer:
    """Proposes the tokens by which other sequences of the tenant went on behind the same ones.

    Args:
        text: of all sequences.
        sequence_id: number of the sequence.
        root: root hash of its tenant.
        known_tokens: first tokens that an earlier sequence has computed, and added.
    """

    def __init__(
        self, text: SharedText, sequence_id: int, root: bytes, known_tokens: int = 0
    ) -> None:
        self._text = text
        self._writer = TextWriter(sequence_id, int.from_bytes(root[:8], "big", signed=True))
        self._added = max(0, known_tokens - LONGEST_NGRAM)

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return up to `most` tokens that may follow, and add the sequence's new tokens."""
        known = self._text.add(self._writer, tokens[self._added :])
        self._added = len(tokens)
        if not known or most < 1 or len(tokens) < LEAST_NGRAM:
            return NOTHING
        return self._text.find(self._writer, tokens[-LONGEST_NGRAM:], most)
