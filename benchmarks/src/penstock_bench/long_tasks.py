"""Questions about long texts, after RULER's recipes: needles, variables, common words.

needle      one number in a long text
needles     four numbers under four names, asked for one by one: the others mislead
variables   a chain of assignments, scattered over a text; every name of the value is asked for
words       a list of words, ten of which come often; these are asked for

The text around is real. All that is hidden in it is drawn by a seed. An answer scores the share of
the wanted strings that it contains.
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
"""Variables that take the value of the one before, after the first."""
COMMON_WORDS = 10
RARE_TIMES = 3
"""Times that a word which is not common comes in a list."""
QUESTION_TOKENS = 120
"""Room for the template, the question and the hidden lines of a text, in tokens."""
PARAGRAPH = re.compile(r"\n\s*\n")
WORD = re.compile(r"\b[a-z]{4,9}\b")
CITIES = (
    *("Oslo", "Lima", "Cairo", "Quito", "Dakar", "Hanoi", "Turin", "Perth", "Delhi", "Kyoto"),
    *("Malmo", "Boston", "Tunis", "Lagos", "Porto", "Basel"),
)


class LongTask(StrEnum):
    """Kind of the strings that are hidden in a text and asked for."""

    NEEDLE = "needle"
    NEEDLES = "needles"
    VARIABLES = "variables"
    WORDS = "words"

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer, at most."""
        return {LongTask.VARIABLES: 40, LongTask.WORDS: 48}.get(self, 12)


@dataclass(frozen=True, slots=True)
class LongQuestion:
    """A question behind a text."""

    text: str
    lead: str
    """First words of the answer, which the model goes on from."""
    wanted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongText:
    """A text, and questions about it."""

    context: str
    questions: tuple[LongQuestion, ...]


class Haystack:
    """Paragraphs of a real text, with their lengths in tokens.

    Args:
        text: real prose or code; paragraphs are parted by empty lines.
        count: returns the number of tokens of a text.

    Raises:
        SettingError: there are too few words in it to make lists of.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        parts = [" ".join(part.split()) for part in PARAGRAPH.split(text)]
        self._paragraphs = [(part, count(f"{part}\n")) for part in parts if part]
        self.words = sorted(set(WORD.findall(text)))
        self._word_tokens = count(" ".join(self.words)) / max(1, len(self.words))
        if len(self.words) < 4 * COMMON_WORDS:
            raise SettingError(f"--text: {len(self.words)} different words are too few to ask for")

    def draw(self, pick: Random, tokens: int) -> list[str]:
        """Return neighboring paragraphs of `tokens` tokens together, at most."""
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
        """Return how many words of a list take so many tokens."""
        return int(tokens / self._word_tokens)


def write(task: LongTask, haystack: Haystack, tokens: int, seed: int) -> LongText:
    """Return a text of about `tokens` tokens, the questions included."""
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
    """Return a list, half of which is ten words, equally often."""
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
    """Put lines between paragraphs: in their order, one into each of as many equal parts."""
    places = [
        int(len(paragraphs) * (number + pick.random()) / len(lines)) for number in range(len(lines))
    ]
    for place, line in reversed(list(zip(places, lines, strict=True))):
        paragraphs.insert(place, line)
    return "\n".join(paragraphs)


def score(answer: str, wanted: Sequence[str]) -> float:
    """Return the share of the wanted strings that an answer contains.

    >>> score(" 1234567. The", ["1234567"]), score("patent, work", ["work", "code"])
    (1.0, 0.5)
    """
    return sum(text in answer for text in wanted) / len(wanted)
