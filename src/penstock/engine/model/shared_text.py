"""Prompt-lookup speculation across sequences of one tenant; no MLX arrays.

    propose ──> append the sequence's new tokens to its page ──> continuation elsewhere

Sequences never see text of another tenant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engine.model.proposals import (
    LEAST_NGRAM,
    LONGEST_NGRAM,
    NOTHING,
    Proposal,
    TextPlaces,
)

SHARED_TEXT_TOKENS = 131_072
"""Number of most recent tokens stored, over all sequences."""
PAGE_TOKENS = 256
"""Number of tokens in a page, which one sequence fills."""
PAGE_BYTES = 4 * PAGE_TOKENS + 4 * 8
"""Bytes of a page with its links."""
NONE = -1
"""Marker for no token, no position and no sequence."""


class SharedText:
    def __init__(self, tokens: int = SHARED_TEXT_TOKENS) -> None:
        self._pages = tokens // PAGE_TOKENS
        self.clear()

    @staticmethod
    def nbytes_of(tokens: int = SHARED_TEXT_TOKENS) -> int:
        return tokens // PAGE_TOKENS * PAGE_BYTES

    @property
    def nbytes(self) -> int:
        arrays = (self._tokens, self._writers, self._tenants, self._before, self._behind)
        return sum(array.nbytes for array in arrays)

    def clear(self) -> None:
        def empty() -> npt.NDArray[np.int64]:
            return np.full(self._pages, NONE, np.int64)

        self._tokens = np.full(self._pages * PAGE_TOKENS, NONE, np.intc)
        self._writers, self._tenants = empty(), empty()
        self._before, self._behind = empty(), empty()  # places of the tokens next to a page
        self._next = 0

    def add(self, writer: TextWriter, tokens: Sequence[int]) -> None:
        done, total = 0, len(tokens)
        while done < total:
            if writer.page == NONE or self._writers[writer.page] != writer.id:
                self._turn(writer, NONE)  # it has no page, or its page was reused
            elif writer.used == PAGE_TOKENS:
                self._turn(writer, writer.page)
            count = min(PAGE_TOKENS - writer.used, total - done)
            start = writer.page * PAGE_TOKENS + writer.used
            self._tokens[start : start + count] = tokens[done : done + count]
            writer.used += count
            done += count

    def find(self, writer: TextWriter, last: Sequence[int], limit: int) -> Proposal:
        """Return the latest continuation of the longest match with `last` in other sequences.

        Args:
            writer: writer of the sequence, whose own text is not searched.
            last: last tokens of the sequence.
            limit: maximum number of proposed tokens.
        """
        ends = self._others(writer, np.flatnonzero(self._tokens == last[-1]))
        places, agreement = ends, 1
        for token in reversed(last[:-1]):
            places = self._moved(places, -1)
            same = (places != NONE) & (self._tokens[places] == token)
            if not same.any():
                break
            places, ends, agreement = places[same], ends[same], agreement + 1
        if agreement < LEAST_NGRAM:
            return NOTHING
        age = (ends // PAGE_TOKENS - self._next) % self._pages
        return Proposal(self._following(ends[[age.argmax()]], limit), agreement)

    def _others(self, writer: TextWriter, places: TextPlaces) -> TextPlaces:
        pages = places // PAGE_TOKENS
        places = places[
            (self._tenants[pages] == writer.tenant) & (self._writers[pages] != writer.id)
        ]
        behind = self._moved(places, 1)
        going_on: TextPlaces = places[(behind != NONE) & (self._tokens[behind] != NONE)]
        return going_on

    def _following(self, place: TextPlaces, limit: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < limit:
            place = self._moved(place, 1)
            token = NONE if place[0] == NONE else int(self._tokens[place[0]])
            if token == NONE:
                break
            tokens.append(token)
        return tokens

    def _moved(self, places: TextPlaces, by: int) -> TextPlaces:
        pages, moved = places // PAGE_TOKENS, places + by
        beyond = (self._behind if by > 0 else self._before)[pages]
        return np.where(moved // PAGE_TOKENS == pages, moved, beyond)

    def _turn(self, writer: TextWriter, previous: int) -> None:
        page, self._next = self._next, (self._next + 1) % self._pages
        start = page * PAGE_TOKENS
        # Unlink the reused page from its old neighbors.
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
    """Write position of one sequence in the shared text."""

    __slots__ = ("id", "page", "tenant", "used")

    def __init__(self, id: int, tenant: int) -> None:
        self.id = id
        self.tenant = tenant
        self.page = NONE
        self.used = 0


class SharedProposer:
    """Proposes continuations from other sequences of the same tenant, given by `root`."""

    def __init__(
        self, text: SharedText, sequence_id: int, root: bytes, known_tokens: int = 0
    ) -> None:
        self._text = text
        self._writer = TextWriter(sequence_id, int.from_bytes(root[:8], "big", signed=True))
        self._added = max(0, known_tokens - LONGEST_NGRAM)

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        self._text.add(self._writer, tokens[self._added :])
        self._added = len(tokens)
        if limit < 1 or len(tokens) < LEAST_NGRAM:
            return NOTHING
        return self._text.find(self._writer, tokens[-LONGEST_NGRAM:], limit)
