"""Piecewise tokenization of long texts, with the same result as tokenizing them whole.

A text is cut after a line that does not end in a blank, and before a character that follows a line
end in no token of the vocabulary, so that no token spans the cut. Between pieces, other requests
get their turn, and disconnected clients are detected.
"""

from __future__ import annotations

import string
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from threading import Lock
from typing import Any

PIECE_CHARACTERS = 16_384
SIGNS = string.ascii_letters + string.digits
"""Characters that may begin a piece, if they follow a line end in no token."""
SAMPLE = (
    "The first line, with a word or two.\nSecond one: 17, 4,096 and 3.5!\n\n  def f(x):\n"
    "    return {'a': [x, -1]}\nclass É:\tüber\r\nzwei  Worte \nI'm 日本語 🦫.\n7 a\nB\n"
)
"""Text on which piecewise tokenization is verified before use."""

Check = Callable[[int, int], None]


class FairLock:
    def __init__(self) -> None:
        self._next = Lock()
        self._held = Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


class PieceEncoder:
    def __init__(self, tokenizer: Any, lock: FairLock, size: int = PIECE_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._lock = lock
        self._size = size

    def encode(
        self, text: str, *, special: bool, check: Check, large: Callable[[int], None]
    ) -> list[int]:
        if len(text) <= self._size or not self.can_cut:
            large(len(text))
            return self._read(text, special=special)
        first, last = self._around if special else ([], [])
        tokens, seen = [*first], 0
        for piece in pieces(text, self._starts, self._size):
            large(len(piece))
            tokens += self._piece(piece, begins=seen == 0)
            seen += len(piece)
            check(len(tokens), seen)
        return [*tokens, *last]

    @cached_property
    def longest_token(self) -> int:
        with self._lock:
            return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def count_bytes(self, tokens: Iterable[int]) -> int:
        sizes = self._sizes
        return sum(sizes[token] for token in tokens if token < len(sizes))

    @cached_property
    def _sizes(self) -> array[int]:
        with self._lock:
            vocabulary = self._tokenizer.get_vocab()
        sizes = array("I", [0]) * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            sizes[token] = len(text.encode())
        return sizes

    @cached_property
    def _starts(self) -> frozenset[str]:
        with self._lock:
            vocabulary = self._tokenizer.get_vocab()
        inside: set[str] = set()
        for token in vocabulary:
            for end in ("\n", "Ċ"):  # plain, or in the alphabet of byte-level tokenizers
                _, *rests = token.split(end)
                inside.update(rest[:1] for rest in rests)
        return frozenset(SIGNS) - inside

    @cached_property
    def _newline(self) -> list[int]:
        return self._read("\n", special=False)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        bare, whole = self._read("a", special=False), self._read("a", special=True)
        begin = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), len(whole))
        return whole[:begin], whole[begin + len(bare) :]

    @cached_property
    def can_cut(self) -> bool:
        """Whether tokenizing `SAMPLE` in pieces gives the same tokens as tokenizing it whole."""
        starts = self._starts
        for text in (SAMPLE, SAMPLE.replace("\n", "\n\n"), SAMPLE.replace("\n", " \n")):
            cut = [
                token
                for number, piece in enumerate(pieces(text, starts, 1))
                for token in self._piece(piece, begins=number == 0)
            ]
            first, last = self._around
            if cut != self._read(text, special=False):
                return False
            if [*first, *cut, *last] != self._read(text, special=True):
                return False
        return bool(starts)

    def _piece(self, piece: str, *, begins: bool) -> list[int]:
        if begins:
            return self._read(piece, special=False)
        tokens = self._read(f"\n{piece}", special=False)
        return tokens[len(self._newline) :]

    def _read(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=special))


def pieces(text: str, starts: frozenset[str], size: int) -> Iterator[str]:
    r"""Cut a text at line ends into pieces of at least `size` characters.

    >>> list(pieces("ab\ncd\n e\n\nf\nd", frozenset("abcdef"), 1))
    ['ab\n', 'cd\n e\n\nf\n', 'd']
    """
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + size - 1) + 1
        while 0 < end < len(text) and not _cuts(text, end, starts):
            end = text.find("\n", end) + 1
        if end == 0:
            end = len(text)
        yield text[begin:end]
        begin = end


def _cuts(text: str, end: int, starts: frozenset[str]) -> bool:
    return text[end] in starts and not text[end - 2 : end - 1].isspace()
