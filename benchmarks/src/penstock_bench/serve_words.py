"""Texts that agents send in the server bench: made-up facts, or a real text."""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

from penstock.models.mlx_lm import encode, load_tokenizer
from penstock_bench import serve_model
from penstock_bench.long_tasks import PARAGRAPH

MODULES = (argparse, statistics, textwrap)
"""Sources that are on every machine with Python: prose in docstrings, and code."""
ASKED = ("What is this about?", "Explain this.", "Summarize this.", "What does this do?")
SYSTEM = "You are a helpful assistant. Answer questions about this text.\n\n"


class Words(Protocol):
    """Source of all messages to a server."""

    def system(self, tokens: int) -> str:
        """Return a system prompt of so many tokens, at most."""

    def lines(self, seed: int, count: int, tokens: int) -> list[str]:
        """Return `count` messages of a user of about `tokens` tokens each; others by seed."""


class FactWords:
    """Facts that the embedded model knows how to keep, in its tokens."""

    def system(self, tokens: int) -> str:
        """See `Words`."""
        return serve_model.system_prompt(tokens)

    def lines(self, seed: int, count: int, tokens: int) -> list[str]:
        """See `Words`."""
        return serve_model.lines(seed, count, tokens)


class TextWords:
    """A real text, and questions about pieces of it.

    Args:
        text: prose or code with empty lines between paragraphs.
        count: returns the number of tokens of a text.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        self._paragraphs = [part.strip() for part in PARAGRAPH.split(text) if part.strip()]
        self._count = count

    def system(self, tokens: int) -> str:
        """See `Words`; whole paragraphs."""
        text, used = SYSTEM, self._count(SYSTEM)
        for part in cycle(self._paragraphs):
            used += self._count(f"{part}\n\n")
            if used > tokens:
                return text
            text += f"{part}\n\n"
        return text

    def lines(self, seed: int, count: int, tokens: int) -> list[str]:
        """See `Words`; words from the middle of the text, behind a question."""
        words = " ".join(self._paragraphs).split()
        start = (seed + 1) * 7919 % len(words)
        return [
            self._line(islice(cycle(words), start + number * tokens, None), number, tokens)
            for number in range(count)
        ]

    def _line(self, words: Iterator[str], number: int, tokens: int) -> str:
        text = ASKED[number % len(ASKED)]
        while self._count(text) < tokens:
            text += f" {next(words)}"
        return text


def words_of(folder: Path, texts: Sequence[str]) -> TextWords:
    """Return the words for a real model: files of text, or sources of Python's library.

    Args:
        folder: of the model, with its tokenizer.
        texts: names of files; none takes the sources.
    """
    tokenizer = load_tokenizer(folder)
    files = texts or [str(module.__file__) for module in MODULES]
    text = "\n\n".join(Path(file).read_text(errors="replace") for file in files)
    return TextWords(text, lambda piece: len(encode(tokenizer, piece)))
