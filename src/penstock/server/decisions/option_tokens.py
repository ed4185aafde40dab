"""Token sequences of options, and the forward passes that give their probabilities.

options ──> stems: their tokens without the last ──> a pass per stem that is no other's prefix
rows of log-probabilities, one after each token of a stem ──> a sum for each option
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = tuple[int, ...]
Rows: TypeAlias = npt.NDArray[np.float32]


class OptionTokens:
    """Token sequences of one question's options.

    If one option is a prefix of another, each must be followed by a token that ends the answer:
    otherwise "1" would include the probability of "10".

    Args:
        options: tokens of each option, at least one.
        ends: tokens that end an answer.

    Raises:
        ValueError: an option is empty, two are equal, or one is a prefix of another and there are
            no `ends`.

    >>> tokens = OptionTokens([(1,), (2, 3), (2, 4)], ends=(0,))
    >>> tokens.stems, tokens.candidates
    ([(2,)], (1, 2, 3, 4))
    """

    def __init__(self, options: Sequence[Tokens], ends: Sequence[int]) -> None:
        if not all(options):
            raise ValueError("an option is empty")
        places: dict[Tokens, int] = {}
        for index, option in enumerate(options):
            if (first := places.setdefault(option, index)) != index:
                raise ValueError(f"options {first} and {index} have the same tokens")
        ordered = sorted(options)
        self.ended = any(_begins(one, other) for one, other in pairwise(ordered))
        self.steps: list[list[Tokens]] = [[(token,) for token in option] for option in options]
        """Steps of each option; a step lists the tokens allowed at its position."""
        if self.ended:
            if not ends:
                raise ValueError("one option is a prefix of another; the model has no end token")
            self.steps = [[*steps, tuple(sorted(ends))] for steps in self.steps]
        self.candidates = tuple(sorted({t for steps in self.steps for step in steps for t in step}))
        longest = sorted({_stem(steps) for steps in self.steps}, key=len, reverse=True)
        self.stems: list[Tokens] = []
        for stem in longest:
            if not any(_begins(stem, other) for other in self.stems):
                self.stems.append(stem)

    def logprobs(self, passes: Sequence[Rows]) -> list[float]:
        """Return the log-probability of each option.

        Args:
            passes: for each stem, the candidates' log-probabilities before it and after each of
                its tokens, (1 + tokens, candidates).
        """
        column = {token: index for index, token in enumerate(self.candidates)}
        totals = []
        for steps in self.steps:
            stem = _stem(steps)
            rows = passes[next(i for i, other in enumerate(self.stems) if _begins(stem, other))]
            values = [
                np.logaddexp.reduce(rows[depth, [column[token] for token in step]].astype(float))
                for depth, step in enumerate(steps)
            ]
            totals.append(float(sum(values)))
        return totals


def _stem(steps: Sequence[Tokens]) -> Tokens:
    return tuple(token for (token,) in steps[:-1])


def _begins(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return tuple(other[: len(one)]) == tuple(one)
