"""Several tokens a step: the same text, in fewer steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from engine_faults import model_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core import Core
from penstock.engine.model import verification
from penstock.engine.model.proposals import (
    LEAST_NGRAM,
    LONGEST_NGRAM,
    NgramProposer,
    Speculation,
    StepCosts,
)
from penstock.engine.request import Request, Sampling
from penstock.models.mlx_lm import load_all
from penstock.recall import MODEL_PATH

SMALL: dict[str, Any] = {
    "memory_limit": "80MB",
    "block_size": 32,
    "prefill_chunk": 64,
    "max_batch_size": 4,
    "max_kv_size": 512,
}
CODED = {
    "kv_cache_quantization": "turbo4",
    "kv_cache_quantize_when": "active",
    "kv_cache_min_quantize_tokens": 0,
}
PROMPT = (*range(1, 40), *range(1, 30))
REQUESTS = [
    Request(prompt=PROMPT, max_tokens=90, ignore_eos=True),
    Request(prompt=PROMPT[3:50], max_tokens=60, ignore_eos=True),
    Request(
        prompt=PROMPT, max_tokens=50, ignore_eos=True, sampling=Sampling(temperature=0.3, seed=3)
    ),
    Request(
        prompt=PROMPT[:20],
        max_tokens=70,
        ignore_eos=True,
        sampling=Sampling(repetition_penalty=1.02, logprobs=True, top_logprobs=2),
    ),
]


# ---- proposals


def longest(text: Sequence[int], most: int) -> list[int]:
    """Return what the proposer says, looked for place by place."""
    best, length = 0, 0
    for end in range(LEAST_NGRAM - 1, len(text) - 1):
        same = 0
        while same < LONGEST_NGRAM and same <= end and text[end - same] == text[-1 - same]:
            same += 1
        if same >= max(LEAST_NGRAM, length):
            best, length = end + 1, same
    if not length or most < 1:
        return []
    return [text[best + i % (len(text) - best)] for i in range(most)]


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 8), st.integers(0, 60))
def test_what_followed_the_longest_agreement_is_proposed(
    text: list[int], most: int, before: int
) -> None:
    proposer = NgramProposer()
    proposer.propose(text[:before], 1)
    assert proposer.propose(text, most) == longest(text, most)


def test_as_many_are_proposed_as_pay() -> None:
    costs, repeating = StepCosts(), [1, 2, 3, 4, 5] * 10
    free = Speculation()
    assert len(free.propose(repeating, 16, 1, costs)) == 16, "a wider step is taken to cost nothing"
    for width, seconds in ((1, 1.0), (2, 1.05), (3, 1.1), (5, 2.5)):
        costs.add(1, width, seconds)
    assert len(Speculation().propose(repeating, 16, 1, costs)) == 2, (
        "wider costs more than it gains"
    )
    wrong = Speculation()
    for _ in range(20):
        wrong.judged(2, 0)
    assert wrong.propose(repeating, 16, 1, costs) == []
    for _ in range(70):
        proposal = wrong.propose(repeating, 16, 1, costs)
    assert proposal, "tried again after a while"


# ---- the engine


@contextmanager
def running(family: str, **settings: Any) -> Iterator[Core]:
    core = Core(model_of(family), **{**SMALL, **settings})
    try:
        yield core
        core.view.check()
    finally:
        core.close()


def answers(core: Core, requests: Sequence[Request] = REQUESTS) -> list[Any]:
    """Return the answers of requests that run together."""
    handles = [core.submit(request) for request in requests]
    while core.step():
        core.view.check()
    return [
        (choice.tokens, choice.finish and choice.finish.reason)
        for handle in handles
        for choice in handle.result(0.0)
    ]


def oracle(texts: Sequence[Sequence[int]], wrong: float, seed: int = 0) -> Any:
    """Return a proposer that knows the answers, and errs in a share of the tokens."""
    draw = random.Random(seed)

    def propose(self: Speculation, tokens: Sequence[int], most: int, *_: Any) -> list[int]:
        count = len(tokens)
        known = [text for text in texts if list(text[:count]) == list(tokens)]
        following = known[draw.randrange(len(known))][count : count + max(0, most)] if known else ()
        return [7 if draw.random() < wrong else token for token in following]

    return propose


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"max_batch_size": 1}),
        ("llama", {"block_size": 8}),
        ("llama", {"max_kv_size": 48, "keep": 8}),
        ("llama", CODED),
        ("gemma2", {}),
        ("falcon_h1", {}),
    ],
)
def test_answers_are_the_same_with_and_without(
    family: str, more: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(family, **more) as core:
        expected = answers(core)
        steps = core.counters.decode_steps
    pairs = zip(REQUESTS, expected, strict=True)
    texts = [[*request.prompt, *answer] for request, (answer, _) in pairs]
    monkeypatch.setattr(Speculation, "propose", oracle(texts, 0.1))
    with running(family, **more, speculative_tokens=width) as core:
        for _ in range(2):  # cold and warm
            assert answers(core) == expected
        stats = core.view.stats()
        if core.runner.takes_several:
            assert stats.proposed_tokens / 3 < stats.accepted_tokens < stats.proposed_tokens
            assert core.counters.decode_steps < 1.7 * steps
        else:
            assert stats.proposed_tokens == 0


def test_text_that_repeats_takes_fewer_steps() -> None:
    """The embedded model says the same again and again where its context does."""
    recall = load_all(MODEL_PATH)
    prompt = recall.tokenizer.encode("amber lotus . " * 20)
    request = Request(prompt=tuple(prompt), max_tokens=60, ignore_eos=True)
    told, steps = [], []
    for width in (0, 8):
        core = Core(recall.model, recall.tokenizer, **SMALL, speculative_tokens=width)
        told.append(answers(core, [request]))
        steps.append(core.counters.decode_steps)
        core.close()
    assert told[0] == told[1]
    assert steps[1] < steps[0] / 2


def test_a_checker_that_accepts_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    greedy = [request for request in REQUESTS if request.sampling.plain]
    with running("llama") as core:
        expected = answers(core, greedy)
    monkeypatch.setattr(verification, "_accepted", lambda chosen, proposal: list(chosen))
    monkeypatch.setattr(Speculation, "propose", lambda self, tokens, most, *_: [7] * max(0, most))
    with running("llama", speculative_tokens=4) as core:
        assert answers(core, greedy) != expected


def test_an_answer_that_ends_inside_a_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("llama") as core:
        (whole, _), *_ = answers(core, REQUESTS[:1])
    for stop in (whole[30], whole[41]):
        request = Request(
            prompt=PROMPT, max_tokens=90, ignore_eos=True, stop_tokens=frozenset({stop})
        )
        with running("llama") as core:
            expected = answers(core, [request])
        with running("llama", speculative_tokens=16) as core:
            assert answers(core, [request]) == expected
            assert answers(core, REQUESTS[:1])[0][0] == whole, "the tree holds right tokens"
