"""Questions with fixed options: their text in the prompt, and the options' probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["predicate", "choice", "score"]

CLOSINGS: dict[Kind, str] = {
    "predicate": "Answer with Yes or No only.",
    "choice": "Answer with one of these options only, exactly as written.",
    "score": "Answer with the number of one level only.",
}


@dataclass(frozen=True, slots=True)
class Option:
    text: str
    """The model's answer that selects this option."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class FixedQuestion:
    kind: Kind
    instructions: str
    options: tuple[Option, ...]

    @property
    def text(self) -> str:
        """Text of the question in the prompt, after the state.

        >>> print(FixedQuestion("predicate", "Urgent?", (Option("Yes", "Now."), Option("No"))).text)
        Question: Urgent?
        - Yes: Now.
        Answer with Yes or No only.
        """
        shown = [
            f"- {option.text}: {option.description}" if option.description else f"- {option.text}"
            for option in self.options
            if option.description or self.kind != "predicate"
        ]
        asked = [f"Question: {self.instructions}"] if self.instructions else ["Question:"]
        return "\n".join([*asked, *shown, CLOSINGS[self.kind]])


@dataclass(frozen=True, slots=True)
class OptionReading:
    """Probabilities of a question's options."""

    probabilities: tuple[float, ...]
    """Probability of each option, normalized to a sum of 1."""
    mass: float
    """Probability that the model answers with one of the options."""

    @classmethod
    def of(cls, logprobs: Sequence[float]) -> OptionReading:
        """Normalize the log-probabilities of the options.

        >>> reading = OptionReading.of([math.log(0.06), math.log(0.02)])
        >>> [round(share, 6) for share in reading.probabilities]
        [0.75, 0.25]
        """
        top = max(logprobs)
        weights = [math.exp(value - top) for value in logprobs]
        total = math.fsum(weights)
        mass = min(1.0, math.exp(top) * total)
        return cls(tuple(weight / total for weight in weights), mass)

    @property
    def best(self) -> int:
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """Distance of the best probability from a uniform distribution, 0 to 1.

        >>> OptionReading((0.88, 0.12, 0.0), 1.0).confidence
        0.82
        """
        count = len(self.probabilities)
        if count == 1:
            return 1.0
        above = (self.probabilities[self.best] - 1 / count) / (1 - 1 / count)
        return round(min(1.0, max(0.0, above)), 12)

    @property
    def expected(self) -> float:
        """Mean option index, weighted by probability."""
        return math.fsum(i * value for i, value in enumerate(self.probabilities))


def plain(value: Any) -> str:
    """Return text unchanged, and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def predicate(instructions: str, true: str = "", false: str = "") -> FixedQuestion:
    return FixedQuestion("predicate", instructions, (Option("Yes", true), Option("No", false)))


def choice(instructions: str, options: Sequence[tuple[str | bool, str]]) -> FixedQuestion:
    """Build a question with named options; text that equals a boolean option is quoted.

    >>> [option.text for option in choice("", [(True, ""), ("true", ""), ("a", "")]).options]
    ['true', '"true"', 'a']
    """
    truths = {_truth(value) for value, _ in options if isinstance(value, bool)}
    named = [
        Option(_truth(value), text)
        if isinstance(value, bool)
        else Option(json.dumps(value) if value in truths else value, text)
        for value, text in options
    ]
    return FixedQuestion("choice", instructions, tuple(named))


def score(instructions: str, levels: Sequence[str]) -> FixedQuestion:
    """Build a question with ordered levels; its options are their indices."""
    options = (Option(str(number), level) for number, level in enumerate(levels))
    return FixedQuestion("score", instructions, tuple(options))


def _truth(value: bool) -> str:
    return "true" if value else "false"
