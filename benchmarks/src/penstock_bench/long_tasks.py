"""Questions about long texts, after RULER: needles, variables, common words.

needle      one number in a long text
needles     four numbers under four names, asked for one by one
variables   a chain of assignments, scattered over a text; asks for all names of a value
words       a list of words; asks for the ten most frequent ones

The surrounding text is real; inserted strings are drawn by a seed. An answer scores the share of
the expected strings that it contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from random import Random
from string import ascii_uppercase

from penstock.errors import SettingError

NEEDLES = 4
CHAIN = 4
"""Length of the chain of variables, after the first."""
COMMON_WORDS = 10
RARE_TIMES = 3
"""Occurrences of each rare word in a list."""
QUESTION_TOKENS = 120
"""Tokens reserved for the template, the question and the inserted lines."""
PARAGRAPH = re.compile(r"\n\s*\n")
WORD = re.compile(r"\b[a-z]{4,9}\b")
CITIES = (
    *("Oslo", "Lima", "Cairo", "Quito", "Dakar", "Hanoi", "Turin", "Perth", "Delhi", "Kyoto"),
    *("Malmo", "Boston", "Tunis", "Lagos", "Porto", "Basel"),
)


class LongTask(StrEnum):
    """Kind of the inserted strings."""

    NEEDLE = "needle"
    NEEDLES = "needles"
    VARIABLES = "variables"
    WORDS = "words"

    @property
    def answer_tokens(self) -> int:
        """Maximum tokens of an answer."""
        return {LongTask.VARIABLES: 40, LongTask.WORDS: 48}.get(self, 12)


@dataclass(frozen=True, slots=True)
class LongQuestion:
    """Question after a text."""

    text: str
    lead: str
    """First words of the answer, included in the prompt."""
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongText:
    """Text, and questions about it."""

    context: str
    questions: tuple[LongQuestion, ...]


class Haystack:
    """Paragraphs of a real text, with their lengths in tokens.

    Args:
        text: prose or code; paragraphs are separated by empty lines.
        count: returns the number of tokens of a text.

    Raises:
        SettingError: the text has too few different words.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        parts = [" ".join(part.split()) for part in PARAGRAPH.split(text)]
        self._paragraphs = [(part, count(f"{part}\n")) for part in parts if part]
        self.words = sorted(set(WORD.findall(text)))
        self._word_tokens = count(" ".join(self.words)) / max(1, len(self.words))
        if len(self.words) < 4 * COMMON_WORDS:
            raise SettingError(f"--text: {len(self.words)} different words are too few to ask for")

    def draw(self, pick: Random, tokens: int) -> list[str]:
        """Return consecutive paragraphs of at most `tokens` tokens."""
        start = pick.randrange(len(self._paragraphs))
        drawn: list[str] = []
        used = 0
        for part, length in islice(cycle(self._paragraphs), start, None):
            used += length
            if used > tokens:
                return drawn
            drawn.append(part)
        return drawn

    def word_count(self, tokens: int) -> int:
        """Return the number of words that take about `tokens` tokens."""
        return int(tokens / self._word_tokens)


def write(task: LongTask, haystack: Haystack, tokens: int, seed: int) -> LongText:
    """Return a text of about `tokens` tokens, including the questions."""
    pick = Random(f"{task} {tokens} {seed}")
    room = tokens - QUESTION_TOKENS
    if task is LongTask.WORDS:
        return _words(haystack, pick, room)
    if task is LongTask.VARIABLES:
        return _variables(haystack, pick, room)
    return _needles(haystack, pick, room, 1 if task is LongTask.NEEDLE else NEEDLES)


def _needles(haystack: Haystack, pick: Random, room: int, count: int) -> LongText:
    cities = pick.sample(CITIES, count)
    codes = [str(pick.randrange(10**6, 10**7)) for _ in cities]
    pairs = list(zip(cities, codes, strict=True))
    lines = [f"The access code of {city} is {code}." for city, code in pairs]
    questions = [
        LongQuestion(
            f"What is the access code of {city}?", f"The access code of {city} is", (code,)
        )
        for city, code in pairs
    ]
    return LongText(_scattered(haystack.draw(pick, room), lines, pick), tuple(questions))


def _variables(haystack: Haystack, pick: Random, room: int) -> LongText:
    names = ["".join(pick.choices(ascii_uppercase, k=4)) for _ in range(CHAIN + 1)]
    value = str(pick.randrange(10**4, 10**5))
    sources = [value, *(f"VAR {name}" for name in names)]
    lines = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    question = LongQuestion(
        f"Which variables have the value {value}? List all of them.",
        f"The variables with the value {value} are",
        tuple(names),
    )
    return LongText(_scattered(haystack.draw(pick, room), lines, pick), (question,))


def _words(haystack: Haystack, pick: Random, room: int) -> LongText:
    """Return a list, half of which is ten equally frequent words."""
    drawn = pick.sample(haystack.words, len(haystack.words))
    common, rare = drawn[:COMMON_WORDS], drawn[COMMON_WORDS:]
    half = haystack.word_count(room) // 2
    words = list(islice(cycle(common), half))
    words += islice(cycle(rare[: max(1, half // RARE_TIMES)]), half)
    pick.shuffle(words)
    question = LongQuestion(
        "Which ten words come most often in this list?",
        "The ten words that come most often are",
        tuple(common),
    )
    return LongText(" ".join(words), (question,))


def _scattered(paragraphs: list[str], lines: Sequence[str], pick: Random) -> str:
    """Insert lines between paragraphs in order, one into each of as many equal parts."""
    places = [
        int(len(paragraphs) * (number + pick.random()) / len(lines)) for number in range(len(lines))
    ]
    for place, line in reversed(list(zip(places, lines, strict=True))):
        paragraphs.insert(place, line)
    return "\n".join(paragraphs)


def score(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that an answer contains.

    >>> score(" 1234567. The", ["1234567"]), score("patent, work", ["work", "code"])
    (1.0, 0.5)
    """
    return sum(text in answer for text in expected) / len(expected)
