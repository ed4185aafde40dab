"""Generated long-context tasks: their texts, questions and scores."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import pytest

from penstock.errors import SettingError
from penstock_bench.long_tasks import COMMON_WORDS, Haystack, LongTask, score, write


def count(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack(Path(argparse.__file__).read_text(), count)


@pytest.mark.parametrize("task", LongTask)
@pytest.mark.parametrize("tokens", [400, 2_000])
def test_task_text_has_requested_length_and_is_reproducible(
    task: LongTask, tokens: int, haystack: Haystack
) -> None:
    text = write(task, haystack, tokens, 1)
    assert 0.5 * tokens < count(text.context) <= tokens
    assert text == write(task, haystack, tokens, 1)
    assert text != write(task, haystack, tokens, 2)


def test_needles_occur_once_and_have_a_question(haystack: Haystack) -> None:
    text = write(LongTask.NEEDLES, haystack, 1_000, 1)
    assert len(text.questions) == 4
    for question in text.questions:
        city = question.text.removesuffix("?").split()[-1]
        assert text.context.count(f"The access code of {city} is {question.expected[0]}.") == 1
        assert question.lead == f"The access code of {city} is"


def test_needle_depths_span_the_text(haystack: Haystack) -> None:
    texts = [write(LongTask.NEEDLE, haystack, 1_000, seed).context for seed in range(24)]
    depths = [text.index("The access code of") / len(text) for text in texts]
    assert min(depths) < 0.25
    assert max(depths) > 0.75


def test_variable_chains_resolve_to_value_in_question(haystack: Haystack) -> None:
    text = write(LongTask.VARIABLES, haystack, 1_000, 3)
    (question,) = text.questions
    sources = dict(re.findall(r"VAR ([A-Z]{4}) = (?:VAR )?([A-Z]{4}|\d{5})\.", text.context))
    value = question.text.split()[5].removesuffix("?")
    for name in question.expected:
        while name in sources:
            name = sources[name]
        assert name == value
    assert set(sources) == set(question.expected)


def test_common_words_are_most_frequent(haystack: Haystack) -> None:
    text = write(LongTask.WORDS, haystack, 1_000, 3)
    counted = Counter(text.context.split()).most_common()
    assert {word for word, _ in counted[:COMMON_WORDS]} == set(text.questions[0].expected)
    assert counted[COMMON_WORDS - 1][1] > 2 * counted[COMMON_WORDS][1]


def test_score_is_share_of_expected_words() -> None:
    assert score(" 1234567. It is", ["1234567"]) == 1.0
    assert score("ABCD, EFGH", ["ABCD", "EFGH", "IJKL", "MNOP"]) == 0.5
    assert score("", ["1"]) == 0.0


def test_haystack_with_too_few_words_is_refused() -> None:
    with pytest.raises(SettingError, match="too few"):
        Haystack("the same words " * 100, count)
