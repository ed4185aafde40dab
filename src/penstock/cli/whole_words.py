"""Line wrapping for terminals, only between words, so that numbers are not split."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text


def print_line(console: Console, line: str, *, indent: int = 0, label: str = "") -> None:
    """Print a line; on a terminal, wrap it between words."""
    if console.is_terminal:
        line = broken(line, console.width, indent)
    text = Text(line)
    text.stylize("bold", 0, len(label))
    console.print(text, soft_wrap=True)


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    pairs = list(rows)
    width = max(len(label) for label, _ in pairs) + 2
    for label, value in pairs:
        print_line(console, f"{label:<{width}}{value}", indent=width, label=label)


def broken(line: str, width: int, indent: int = 0) -> str:
    """Wrap a text between words; words longer than `width` are not split.

    >>> print(broken("a folder: /home/someone/models 1,200 tokens", 12, 2))
    a folder:
      /home/someone/models
      1,200
      tokens
    """
    return "\n".join(
        textwrap.fill(
            paragraph,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for paragraph in line.split("\n")
    )
