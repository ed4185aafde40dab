"""Scripts of `penstock bench agents`, and how answers are judged."""

from __future__ import annotations

import pytest

from penstock_bench.crowd import AgentLine, common_tokens, judged, write_scripts
from penstock_bench.recall import Fact, Message, Question, count_tokens


def question(value: str) -> Question:
    fact = Fact("city", "amber", "falcon", value)
    return Question("What is the city of the amber falcon?", f"{value}.", fact, 0, 0)


@pytest.mark.parametrize("prompt_tokens", [32, 100, 1_000, 5_000])
def test_system_prompt_fits_token_budget(prompt_tokens: int) -> None:
    system, _ = write_scripts(1, 2, prompt_tokens, count_tokens)
    assert prompt_tokens - 16 < count_tokens([system]) <= prompt_tokens
    assert system["role"] == "system"


def test_system_prompt_has_one_line_at_any_size() -> None:
    system, _ = write_scripts(1, 2, 1, count_tokens)
    assert len(system["content"].splitlines()) == 1


def test_agents_ask_only_about_facts_in_their_prompts() -> None:
    system, scripts = write_scripts(1, 3, 400, count_tokens)
    shared = system["content"].splitlines()
    own: list[list[str]] = []
    for lines in scripts:
        own.append([])
        for line in lines:
            if line.question is None:
                own[-1].append(line.text)
                continue
            fact = line.question.fact
            told = shared if line.shared else own[-1]
            assert any(all(w in text for w in (*fact.key, fact.value)) for text in told)
    facts = [text for texts in (shared, *own) for text in texts]
    assert len(set(facts)) == len(facts)  # nobody knows another's facts
    assert [len(texts) for texts in own] == [2, 2, 2]


def test_scripts_are_reproducible_by_seed() -> None:
    def written(seed: int) -> tuple[Message, list[list[AgentLine]]]:
        return write_scripts(seed, 2, 200, count_tokens)

    assert written(1) == written(1) != written(2)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Lisbon.", True),
        ("It is lisbon", True),
        ("", False),
        ("London.", False),
        ("Lisbonne.", False),
        ("I do not know.", False),
    ],
)
def test_answer_containing_value_is_right(answer: str, right: bool) -> None:
    assert judged(question("Lisbon"), answer, shared=True).right is right


def test_number_inside_other_number_is_wrong() -> None:
    assert judged(question("4821"), "4821.", shared=False).right
    assert not judged(question("4821"), "14821.", shared=False).right


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([[1, 2], [1, 2]], 2),
        ([[1, 2, 3], [1, 2]], 2),
        ([[1], [2]], 0),
        ([[1, 2, 3], [1, 9, 3]], 1),
        ([[], [1]], 0),
    ],
)
def test_number_of_common_tokens_ends_at_first_difference(
    prompts: list[list[int]], tokens: int
) -> None:
    assert common_tokens(prompts) == tokens
