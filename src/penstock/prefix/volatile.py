"""Classification of text that changes from prompt to prompt: dates, counters, random ids."""

from __future__ import annotations

import re
from typing import NamedTuple

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? )"
KINDS: tuple[tuple[str, str], ...] = (
    ("random id", r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"),
    ("date", r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?Z?)?\b"),
    ("date", rf"\b{_DAY}?{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?\b"),
    ("date", rf"\b{_DAY}?\d{{1,2}}\.? {_MONTH}(?: \d{{4}})?\b"),
    ("date", r"\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"),
    ("time", r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AaPp][Mm])?\b"),
    ("remaining tokens", r"\b\d[\d,]*(?= (?:\w+ ){0,2}tokens? (?:\w+ )?(?:left|remain))"),
    ("remaining tokens", r"(?<=remaining: )\d[\d,]*\b|(?<=left: )\d[\d,]*\b"),
    ("time", r"\b1[5-9]\d{8}(?:\d{3})?\b"),
    ("counter", r"(?<![\w.])\d[\d,]*(?![\w.]*[A-Za-z])"),
    ("random id", r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{5,}\b"),
)
"""Kinds of volatile text, with patterns; the first that matches both texts is used."""


class Volatile(NamedTuple):
    """First difference of two prompts: its kind, and the text in each."""

    kind: str
    held: str
    given: str


def name_volatile(held: str, given: str) -> Volatile | None:
    """Classify the text at the first difference of two texts; None if no kind matches.

    >>> name_volatile("Today is 2026-11-22. Hi", "Today is 2026-11-23. Hi")
    Volatile(kind='date', held='2026-11-22', given='2026-11-23')
    >>> name_volatile("a cat sat", "a dog sat") is None
    True
    """
    pairs = enumerate(zip(held, given, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(held), len(given)))
    for kind, pattern in KINDS:
        spans = [_around(pattern, text, index) for text in (held, given)]
        if spans[0] is not None and spans[1] is not None and spans[0] != spans[1]:
            return Volatile(kind, spans[0], spans[1])
    return None


def _around(pattern: str, text: str, index: int) -> str | None:
    """Return the match of a pattern that contains an index, or ends there."""
    matches = re.finditer(pattern, text)
    return next((m.group() for m in matches if m.start() <= index <= m.end()), None)
