"""Speculative decoding with all request options: equal answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import mlx.core as mx
import pytest

import penstock
from penstock.engine.core import Core
from penstock.engine.model import verification
from penstock.engine.model.constraint import Grammars, json_schema_grammar
from penstock.engine.model.proposals import LONGEST_NGRAM, Proposal, Speculation
from penstock.engine.model.reasoning import ReasoningLimit
from penstock.engine.model.sampling import SampledToken, TokenSampler, sample_all
from penstock.engine.request import ReasoningBudget, Request, Sampling
from penstock.errors import GrammarFailed
from penstock.models.mlx_lm import encode
from penstock.recall import MODEL_PATH

GRAMMAR = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "name": {"type": "string", "maxLength": 8},
        },
        "required": ["city", "name"],
        "additionalProperties": False,
    }
)
QUESTION = "Please note: The code of the amber falcon is 4821. What is the code of the falcon?"
WISHES: list[dict[str, Any]] = [
    {"stop": ("falcon",), "ignore_eos": True},
    {"n": 2, "sampling": Sampling(temperature=1.0, seed=5), "ignore_eos": True},
    {"sampling": Sampling(temperature=0.7, top_p=0.9, seed=2, logprobs=True, top_logprobs=3)},
    {"sampling": Sampling(logprobs=True), "ignore_eos": True},
    {"sampling": Sampling(presence_penalty=0.5, frequency_penalty=0.3), "ignore_eos": True},
    {"sampling": Sampling(logit_bias={40: 3.0, 41: -100.0}), "ignore_eos": True},
    {"grammar": GRAMMAR},
    {"grammar": GRAMMAR, "n": 2, "sampling": Sampling(temperature=1.0, seed=3)},
    {"reasoning": ReasoningBudget(max_tokens=9, end=(50, 51), inside=True), "ignore_eos": True},
    {
        "reasoning": ReasoningBudget(max_tokens=5, end=(50, 51), inside=True),
        "ignore_eos": True,
        "sampling": Sampling(temperature=0.8, seed=9),
    },
]


@pytest.fixture(scope="module")
def embedded() -> Any:
    return penstock.load(MODEL_PATH)


@contextmanager
def running(embedded: Any, **settings: Any) -> Iterator[Core]:
    core = Core(
        *embedded, memory_limit="100MB", block_size=32, max_batch_size=4, max_queue=64, **settings
    )
    try:
        yield core
    finally:
        core.close()


def answers(core: Core) -> list[Any]:
    """Return all results of the requests, with rounded log-probabilities."""
    prompt = tuple(encode(core.tokenizer, QUESTION))
    handles = [core.submit(Request(prompt=prompt, max_tokens=40, **wish)) for wish in WISHES]
    while core.step():
        core.view.check()
    return [
        (
            choice.tokens,
            choice.text,
            [
                (round(token.logprob or 0.0, 3), [t for t, _ in token.top])
                for token in choice.logprobs
            ],
            choice.finish and (choice.finish.reason, choice.finish.stop),
        )
        for handle in handles
        for choice in handle.result(0.0)
    ]


def oracle(texts: Sequence[Sequence[int]], wrong: float) -> Callable[..., Proposal]:
    """Return a proposer that knows the answers, with wrong tokens at a given rate."""
    draw = Random(1)

    def propose(self: Speculation, tokens: Sequence[int], most: int) -> Proposal:
        known = [text for text in texts if list(text[: len(tokens)]) == list(tokens)]
        following = draw.choice(known)[len(tokens) :][:most] if known else ()
        return Proposal([7 if draw.random() < wrong else t for t in following], LONGEST_NGRAM)

    return propose


def test_speculation_respects_all_request_options(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(embedded) as core:
        expected = answers(core)
        prompt = encode(core.tokenizer, QUESTION)
    texts = [[*prompt, *tokens] for tokens, *_ in expected]
    monkeypatch.setattr(Speculation, "propose", oracle(texts, 0.1))
    with running(embedded, speculative_tokens=8) as core:
        assert answers(core) == expected
        stats = core.view.stats()
    assert stats.accepted_tokens > sum(map(len, texts)) / 4 - len(prompt)
    assert stats.failed_proposals == 0
    monkeypatch.setattr(TokenSampler, "ahead", lambda self: self)  # its rule goes on twice
    with running(embedded, speculative_tokens=8) as core, pytest.raises(GrammarFailed):
        answers(core)


# ---- grammars


PHRASE = "The code of the amber falcon is "
FORCED = f'start: "{PHRASE}" /[0-9][0-9]/'


def test_forced_tokens_are_proposed_and_forbidden_are_cut(embedded: Any) -> None:
    rule = Grammars(embedded[1], 3_025).constraint(FORCED)
    forced = rule.forced()
    assert len(forced) > 4
    assert PHRASE.startswith(embedded[1].decode(forced).strip())
    assert rule.allowed_tokens(forced) == len(forced)
    assert rule.allowed_tokens([*forced[:2], forced[0], *forced[2:]]) == 2
    ahead = rule.copy()
    for token in forced:
        ahead.accept(token)
    assert ahead.forced() == [], "there is a choice"
    assert rule.forced() == forced, "asking changes nothing"


def test_constrained_answers_take_fewer_steps(embedded: Any) -> None:
    """Forced tokens are proposals, also without repetition."""
    steps, texts = [], []
    for width in (0, 8):
        with running(embedded, speculative_tokens=width) as core:
            request = Request(prompt=(5, 6, 7), max_tokens=30, grammar=FORCED)
            handle = core.submit(request)
            while core.step():
                pass
            texts.append(handle.result(0.0)[0].text)
            steps.append(core.counters.decode_steps)
    assert texts[0] == texts[1]
    assert steps[1] <= steps[0] * 2 / 3


def test_reasoning_end_is_forced_and_proposal_cut() -> None:
    limit = ReasoningLimit(ReasoningBudget(max_tokens=2, end=(50, 51), inside=True))
    assert limit.forced() == []
    assert limit.allowed_tokens([1, 2, 3]) == 2
    assert limit.allowed_tokens([1, 2, 50, 51, 3]) == 5
    limit.accept(1)
    limit.accept(2)
    assert limit.forced() == [50, 51]
    limit.accept(50)
    assert limit.forced() == [51]


# ---- the distribution

PROBS = ((0.4, 0.25, 0.15, 0.1, 0.06, 0.04), (0.05, 0.1, 0.3, 0.3, 0.2, 0.05))
"""Probabilities of a small vocabulary behind the prompt, and behind the proposed token."""
PROPOSED = 1
DRAWS = 3_000
LIMIT = 29.6
"""Chi-square of ten degrees of freedom that one correct sampler in a thousand exceeds."""


def chi_square() -> float:
    """Return the chi-square distance of two-token answers from the model's distribution."""
    logits = mx.log(mx.array([PROBS] * DRAWS))
    samplers = [TokenSampler(Sampling(temperature=1.0, seed=seed), (0,)) for seed in range(DRAWS)]
    rows = verification.verified(logits, [[PROPOSED]] * DRAWS, samplers, [()] * DRAWS)
    counts = Counter(tuple(t.token for t in row) for row in rows if not isinstance(row, Exception))
    first, second = PROBS
    expected: dict[tuple[int, ...], float] = {
        (token,): p for token, p in enumerate(first) if token != PROPOSED
    }
    expected |= {(PROPOSED, token): first[PROPOSED] * p for token, p in enumerate(second)}
    assert math.isclose(sum(expected.values()), 1.0)
    assert set(counts) <= set(expected)
    return sum((counts[t] - DRAWS * p) ** 2 / (DRAWS * p) for t, p in expected.items())


def test_verified_answers_follow_model_distribution() -> None:
    assert chi_square() < LIMIT


def test_check_detects_bias_toward_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one in ten proposals is accepted without a draw."""
    choose, draw = sample_all, Random(2)

    def biased(logits: mx.array, samplers: Any, generated: Any) -> list[Any]:
        rows = choose(logits, samplers, generated)
        return [SampledToken(PROPOSED) if draw.random() < 0.1 else row for row in rows]

    monkeypatch.setattr("penstock.engine.model.verification.sample_all", biased)
    assert chi_square() > LIMIT


def test_check_detects_correlated_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one key for all positions of an answer."""
    key = TokenSampler.key
    monkeypatch.setattr(TokenSampler, "key", lambda self, position: key(self, 0))
    assert chi_square() > LIMIT
