"""Texts that agents send in the server benchmark: generated facts, or real text."""

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
"""Sources available with every Python: prose in docstrings, and code."""
ASKED = ("What is this about?", "Explain this.", "Summarize this.", "What does this do?")
SYSTEM = "You are a helpful assistant. Answer questions about this text.\n\n"


class Words(Protocol):
    """Source of all messages to a server."""

    def system(self, tokens: int) -> str:
        """Return a system prompt of at most `tokens` tokens."""

    def lines(self, seed: int, count: int, tokens: int) -> list[str]:
        """Return `count` user messages of about `tokens` tokens each, determined by the seed."""


class FactWords:
    """Facts in the embedded model's language."""

    def system(self, tokens: int) -> str:
        return serve_model.system_prompt(tokens)

    def lines(self, seed: int, count: int, tokens: int) -> list[str]:
        return serve_model.lines(seed, count, tokens)


class TextWords:
    """Real text, and questions about pieces of it.

    Args:
        text: prose or code with empty lines between paragraphs.
        count: returns the number of tokens of a text.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        self._paragraphs = [part.strip() for part in PARAGRAPH.split(text) if part.strip()]
        self._count = count

    def system(self, tokens: int) -> str:
        """Return whole paragraphs of at most `tokens` tokens."""
        text, used = SYSTEM, self._count(SYSTEM)
        for part in cycle(self._paragraphs):
            used += self._count(f"{part}\n\n")
            if used > tokens:
                return text
            text += f"{part}\n\n"
        return text

    def lines(self, seed: int, count: int, tokens: int) -> list[str]:
        """Return questions, each followed by words from the middle of the text."""
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
    """Return the messages for a real model: text files, or sources of Python's library.

    Args:
        folder: folder of the model, with its tokenizer.
        texts: file names; empty for the sources.
    """
    tokenizer = load_tokenizer(folder)
    files = texts or [str(module.__file__) for module in MODULES]
    text = "\n\n".join(Path(file).read_text(errors="replace") for file in files)
    return TextWords(text, lambda piece: len(encode(tokenizer, piece)))
