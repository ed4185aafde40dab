"""Incremental detokenization: complete characters, cut before the first stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

__all__ = ["Detokenizer", "TextStream"]


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Interface of mlx-lm's streaming detokenizers. Each answer has its own copy."""

    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...
    def reset(self) -> None: ...
    @property
    def text(self) -> str: ...
    @property
    def last_segment(self) -> str: ...


class NoText:
    text = last_segment = ""

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    def reset(self) -> None:
        pass


class TextStream:
    """Text of one answer, emitted in pieces as soon as they are final.

    The stop string that is completed first, or the longest on a tie, ends the text, which is cut
    before it. The result does not depend on how the text is split into tokens. Text that may be the
    start of a stop string is held back. Takes time linear in the length of the text.
    """

    __slots__ = (
        *("_detokenizer", "_early_tokens", "_held", "_keep_stop", "_known", "_silent"),
        *("_state", "_stops", "stopped"),
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        silent: Collection[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._keep_stop = keep_stop
        self._silent = silent
        self._early_tokens = min_tokens + 1
        """Number of leading tokens that cannot complete a stop string."""
        self._known = 0
        """Characters of `before` not yet emitted by the detokenizer."""
        self._begin_behind(before)
        self._stops = _Stops(stop) if stop else None
        self._state = _ROOT
        self._held = ""
        self.stopped: str | None = None
        """Stop string that ended the text."""

    @property
    def may_stop(self) -> bool:
        return self._stops is not None

    def push(self, token: int) -> str:
        """Add a token; return the text that has become final. Empty after a stop."""
        if self.stopped is not None:
            return ""
        self._early_tokens = max(0, self._early_tokens - 1)
        if token in self._silent:
            return ""
        self._detokenizer.add_token(token)
        return self._certain(self._new())

    def finish(self, *, cut: bool = False) -> str:
        """Return the text held back; `cut` drops an incomplete character."""
        if self.stopped is not None:
            return ""
        self._detokenizer.finalize()
        rest = self._new()
        text = self._certain(rest.rstrip(REPLACEMENT) if cut else rest)
        pending, self._held = self._held, ""
        self._state = _ROOT
        return text + pending

    def _begin_behind(self, before: Sequence[int]) -> None:
        if not before:
            return
        for token in before:
            self._detokenizer.add_token(token)
        emitted = len(self._detokenizer.last_segment)
        whole = copy(self._detokenizer)
        whole.finalize()
        # An incomplete last character is emitted with the token that completes it.
        self._known = len(whole.text.rstrip(REPLACEMENT)) - emitted

    def _new(self) -> str:
        piece = self._detokenizer.last_segment
        known = min(max(0, self._known), len(piece))
        self._known -= known
        return piece[known:]

    def _certain(self, piece: str) -> str:
        """Add text; return the part in which no stop string can start."""
        if self._stops is None:
            return piece
        for end, char in enumerate(piece, 1):
            self._state = self._stops.step(self._state, char)
            stop = self._stops.matches[self._state]
            if stop is not None and not self._early_tokens:
                text = self._held + piece[:end]
                self.stopped, self._held = stop, ""
                return text if self._keep_stop else text.removesuffix(stop)
        text = self._held + piece
        certain = len(text) - self._stops.depth[self._state]
        self._held = text[certain:]
        return text[:certain]


_ROOT = 0


class _Stops:
    """Searches for several strings in one pass (Aho and Corasick 1975).

    A state is the longest suffix of the text that is a prefix of one of the strings.
    """

    __slots__ = ("_fallback", "_next", "depth", "matches")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [_ROOT]
        self.depth = [0]
        self.matches: list[str | None] = [None]
        """Longest string that ends at each state."""
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state != _ROOT and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, _ROOT)

    def _add(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        state = _ROOT
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(_ROOT)
                self.depth.append(self.depth[state] + 1)
                self.matches.append(None)
            state = self._next[state][char]
        self.matches[state] = stop

    def _link(self) -> None:
        """Set the failure links of all states, shallow ones first."""
        waiting = deque(self._next[_ROOT].values())
        while waiting:
            state = waiting.popleft()
            shorter = self._fallback[state]
            if self.matches[state] is None:
                self.matches[state] = self.matches[shorter]
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(shorter, char)
                waiting.append(child)
