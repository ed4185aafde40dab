"""Long texts become tokens piece by piece: the same tokens as in one go.

A text is cut behind a line that ends in no blank, in front of a sign that no token of the
vocabulary has behind the end of a line. No token can lie across such a place, and words end there
in any case.
Between two pieces others have their turn, and a client that has gone is noticed.
"""

from __future__ import annotations

import string
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from threading import Lock
from types import TracebackType
from typing import Any

PIECE_CHARACTERS = 16_384
"""Characters of a text that are encoded in one go, where it can be cut."""
SIGNS = string.ascii_letters + string.digits
"""Signs that may begin a piece, if no token has them behind the end of a line."""
SAMPLE = (
    "The first line, with a word or two.\nSecond one: 17, 4,096 and 3.5!\n\n  def f(x):\n"
    "    return {'a': [x, -1]}\nclass É:\tüber\r\nzwei  Worte \nI'm 日本語 🦫.\n7 a\nB\n"
)
"""Text that a tokenizer must encode the same in pieces, before long texts are cut for it."""

Check = Callable[[int, int], None]


class FairLock:
    """Lock that goes to a waiting thread before the thread that has just released it."""

    def __init__(self) -> None:
        self._next = Lock()
        self._held = Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._held.release()


class PieceEncoder:
    """Encoder of texts with a tokenizer, long ones in pieces. Any thread may call it.

    Args:
        tokenizer: mlx-lm's wrapper.
        lock: held while the tokenizer is at work.
        size: characters that are read in one go, where a text can be cut.
    """

    def __init__(self, tokenizer: Any, lock: FairLock, size: int = PIECE_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._lock = lock
        self._size = size

    def encode(
        self, text: str, *, special: bool, check: Check, large: Callable[[int], None]
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: any.
            special: whether the tokenizer adds its special tokens around it.
            check: called with the tokens and the characters so far between two pieces; may raise.
            large: called with the characters of a long piece before it is read; may raise.
        """
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
        """Bytes of the vocabulary's longest token, at most."""
        with self._lock:
            return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def count_bytes(self, tokens: Iterable[int]) -> int:
        """Return the bytes of a text of these tokens, at most."""
        sizes = self._sizes
        return sum(sizes[token] for token in tokens if token < len(sizes))

    @cached_property
    def _sizes(self) -> array[int]:
        """Bytes of each token as the vocabulary writes it, which are those of its text or more."""
        with self._lock:
            vocabulary = self._tokenizer.get_vocab()
        sizes = array("I", [0]) * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            sizes[token] = len(text.encode())
        return sizes

    @cached_property
    def _starts(self) -> frozenset[str]:
        """Signs that a piece may begin with."""
        with self._lock:
            vocabulary = self._tokenizer.get_vocab()
        inside: set[str] = set()
        for token in vocabulary:
            for end in ("\n", "Ċ"):  # as it is, or as byte-level tokenizers write it
                _, *rests = token.split(end)
                inside.update(rest[:1] for rest in rests)
        return frozenset(SIGNS) - inside

    @cached_property
    def _newline(self) -> list[int]:
        return self._read("\n", special=False)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens in front of a text, and behind it."""
        bare, whole = self._read("a", special=False), self._read("a", special=True)
        begin = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), len(whole))
        return whole[:begin], whole[begin + len(bare) :]

    @cached_property
    def can_cut(self) -> bool:
        """Whether the tokenizer reads the sample in pieces as it reads it in one go."""
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
        """Return a piece's own tokens: behind the end of a line, but for the first."""
        if begins:
            return self._read(piece, special=False)
        tokens = self._read(f"\n{piece}", special=False)
        return tokens[len(self._newline) :]

    def _read(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=special))


def pieces(text: str, starts: frozenset[str], size: int) -> Iterator[str]:
    r"""Yield a text cut behind ends of lines, in pieces of at least `size` characters each.

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
    """Tell whether a text may be cut behind this end of a line."""
    return text[end] in starts and not text[end - 2 : end - 1].isspace()
