"""Speculative decoding: equal text in fewer steps."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from engine_faults import model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import build

from penstock.attention.reads import DecodeReads
from penstock.engine.core import Core
from penstock.engine.model import shared_text, verification
from penstock.engine.model.proposals import (
    FIRST_SHARE,
    LEAST_NGRAM,
    LONG_AGREEMENT,
    LONGEST_NGRAM,
    RESUMED,
    NgramProposer,
    PredictionProposer,
    Proposal,
    Speculation,
)
from penstock.engine.model.sampling import SampledToken
from penstock.engine.model.shared_text import PAGE_TOKENS, SharedProposer, SharedText
from penstock.engine.model.step_costs import FORGET_STEPS, LEAST_SAMPLES, StepCosts
from penstock.engine.request import Request, Sampling
from penstock.engine.run.executor import ModelExecutor
from penstock.errors import SettingError
from penstock.models.loading import load_all
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


def longest(text: Sequence[int], most: int) -> Proposal:
    """Return the proposal found by linear search."""
    places: dict[int, list[int]] = {}
    for end in range(LEAST_NGRAM - 1, len(text) - 1):
        same = 0
        while same < LONGEST_NGRAM and same <= end and text[end - same] == text[-1 - same]:
            same += 1
        places.setdefault(same, []).append(end + 1)
    length = max(places, default=0)
    if length < LEAST_NGRAM or most < 1:
        return Proposal([])
    texts = [[text[at + i % (len(text) - at)] for i in range(most)] for at in places[length][-8:]]
    tokens: list[int] = []
    while len(tokens) < most:
        going_on = [other[len(tokens)] for other in texts if other[: len(tokens)] == tokens]
        counts = Counter(reversed(going_on))  # of equally many the last one is met first
        tokens.append(counts.most_common(1)[0][0])
    return Proposal(tokens, length)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 8), st.integers(0, 60))
def test_longest_ngram_match_is_proposed(text: list[int], most: int, before: int) -> None:
    proposer = NgramProposer()
    proposer.propose(text[:before], 1)
    assert proposer.propose(text, most) == longest(text, most)


def test_predicted_answer_is_proposed() -> None:
    expected = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    proposer, prompt = PredictionProposer(expected, 3), [1, 2, 3]
    assert proposer.propose(prompt, 4) == ([5, 6, 7, 8], LONGEST_NGRAM), "before any answer"
    assert proposer.propose([*prompt, 5, 6], 2).tokens == [7, 8]
    changed = [*prompt, 5, 6, 40]
    assert proposer.propose(changed, 4).tokens == [], "the answer has left it"
    assert proposer.propose([*changed, 9, 10], 4).tokens == [], "two tokens are not enough"
    assert proposer.propose([*changed, 9, 10, 11], 4) == ([12, 13], LEAST_NGRAM)
    assert proposer.propose([*changed, 9, 10, 11, 12, 13], 4).tokens == [], "its end"


def test_proposal_length_maximizes_tokens_per_second() -> None:
    costs = StepCosts()
    sure, unsure = (16, FIRST_SHARE), (16, 0.05)
    assert costs.best_width([sure]) == 0, "a step without any is measured first"
    for _ in range(LEAST_SAMPLES):
        costs.add(1, 0, 1.0)
    assert costs.best_width([sure]) == 16, "a wider step is taken to cost nothing"
    for proposed, seconds in ((1, 1.05), (2, 1.1), (4, 2.5)):
        for _ in range(LEAST_SAMPLES):
            costs.add(1, proposed, seconds)
    assert costs.best_width([sure]) == 2, "wider costs more than it gains"
    assert costs.best_width([unsure]) == 0
    assert costs.best_width([(0, 1.0)]) == 0
    assert costs.best_width([(1, 1.0)]) == 1
    for proposed, seconds in ((0, 1.0), (1, 1.5)):
        for _ in range(LEAST_SAMPLES):
            costs.add(2, proposed, seconds)
    assert costs.best_width([(1, 0.9), (0, 0.9)]) == 0, "all rows pay for one"
    assert costs.best_width([(1, 0.9), (1, 0.9)]) == 1


def test_stale_step_timings_are_measured_again() -> None:
    costs, sure = StepCosts(), (16, FIRST_SHARE)
    for proposed, seconds in ((0, 1.0), (16, 9.0)):
        for _ in range(LEAST_SAMPLES):
            costs.add(1, proposed, seconds)
    assert costs.best_width([sure]) == 8, "as wide a step is too slow"
    for _ in range(FORGET_STEPS):
        costs.add(1, 0, 1.0)
    assert costs.best_width([sure]) == 8
    costs.add(1, 0, 1.0)
    assert costs.best_width([sure]) == 16
    for _ in range(FORGET_STEPS + 1):
        costs.add(1, 16, 1.0)
    assert costs.best_width([sure]) == 0, "contexts grow"


def test_outlier_step_time_is_ignored() -> None:
    costs = StepCosts()
    for seconds in (1.0,) * LEAST_SAMPLES:
        costs.add(1, 0, seconds)
    for seconds in (9.0, 1.1, 1.1):
        costs.add(1, 16, seconds)
    assert costs.ratio(1, 16) == pytest.approx(1.1)


def test_rejections_lower_acceptance_rate_of_match_length() -> None:
    wrong = Speculation()
    for _ in range(20):
        wrong.judged(2, 0, LEAST_NGRAM)
    assert wrong.share(LEAST_NGRAM) < 0.01
    assert wrong.share(LONG_AGREEMENT) == FIRST_SHARE
    assert wrong.rejected_tokens == 40
    for _ in range(70):
        wrong.judged(0, 0, 0)
    assert wrong.share(LEAST_NGRAM) == FIRST_SHARE, "tried again after a while"


def test_ngram_proposal_resumes_after_substituted_token() -> None:
    text = list(range(10, 40))
    speculation, told = Speculation([NgramProposer()]), [*text, *range(10, 19)]
    assert speculation.propose(told, 4) == ([19, 20, 21, 22], 9)
    told += [19, 20, 99]
    assert speculation.propose(told, 4) == ([22, 23, 24, 25], RESUMED)
    told += [22, 23]
    assert speculation.propose(told, 2) == ([24, 25], RESUMED), "until an agreement is found"
    assert speculation.propose([*told, 24], 2) == ([25, 26], LEAST_NGRAM)
    assert speculation.propose([*told, 24, 98, 97], 2).tokens == [], "two are others: it is left"


def test_short_match_does_not_resume_after_substitution() -> None:
    text = list(range(10, 30))
    speculation, told = Speculation([NgramProposer()]), [*text, 99, 10, 11, 12]
    assert speculation.propose(told, 4) == ([13, 14, 15, 16], LEAST_NGRAM)
    assert speculation.propose([*told, 98], 4).tokens == []


def test_most_frequent_continuation_is_proposed() -> None:
    """Tool calls of an agent, each with one differing token."""
    call = list(range(10, 20))
    calls = [[*call], [*call], [*call[:5], 98, *call[6:]]]
    text = [token for number, one in enumerate(calls) for token in (*one, 50 + number)]
    assert NgramProposer().propose([*text, *call[:4]], 4) == ([14, 15, 16, 17], 4)
    assert NgramProposer().propose([*text[11:], *call[:4]], 4) == ([14, 98, 16, 17], 4), "the last"


def test_proposer_with_longest_match_wins() -> None:
    class Fixed:
        def __init__(self, proposal: Proposal) -> None:
            self.proposal = proposal

        def propose(self, tokens: Sequence[int], most: int) -> Proposal:
            return self.proposal

    first, second = Proposal([1], 4), Proposal([2], 5)
    assert Speculation([Fixed(first), Fixed(second)]).propose([0], 4) == second
    assert Speculation([Fixed(second), Fixed(first)]).propose([0], 4) == second


# ---- text of other sequences


def shared(text: SharedText, number: int, tenant: bytes = b"one") -> SharedProposer:
    return SharedProposer(text, number, tenant.ljust(8))


def test_text_of_other_sequences_is_proposed_within_tenant() -> None:
    text = SharedText()
    shared(text, 0).propose([9, 1, 2, 3, 4, 5, 6, 7], 4)
    assert shared(text, 1).propose([8, 1, 2, 3], 2) == ([4, 5], 3)
    assert shared(text, 2).propose([8, 7, 2, 3], 2).tokens == [], "two tokens agree"
    assert shared(text, 3, b"two").propose([9, 1, 2, 3], 2).tokens == []
    own = SharedText()
    assert shared(own, 0).propose([1, 2, 3, 4, 1, 2, 3], 2).tokens == [], "its own text"
    text.clear()
    assert shared(text, 4).propose([8, 1, 2, 3], 2).tokens == []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=150)), max_size=12),
    st.lists(st.integers(0, 2), min_size=3, max_size=20),
)
@settings(max_examples=150)
def test_shared_text_matches_linear_search(
    parts: list[tuple[int, list[int]]], last: list[int]
) -> None:
    """Sequences take turns; there are few pages, so the oldest are reused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_text, "PAGE_TOKENS", 8)
        text = SharedText(8 * 6)
        writers = [shared_text.TextWriter(number, 1) for number in range(4)]
        texts: list[list[int]] = [[] for _ in writers]
        for number, tokens in parts:
            text.add(writers[number], tokens)
            texts[number] += tokens
        found, agreement = text.find(writers[3], last[-LONGEST_NGRAM:], 5)
    places = [
        (same, whole[end : end + 5])
        for whole in texts[:3]
        for end in range(1, len(whole))
        if (same := agreeing(whole[:end], last))
    ]
    if found:
        assert agreement >= LEAST_NGRAM
        assert any(
            same >= agreement and following[: len(found)] == found for same, following in places
        )
    elif sum(map(len, texts)) <= 8:  # nothing was filled anew
        assert max((same for same, _ in places), default=0) < LEAST_NGRAM


def agreeing(text: Sequence[int], last: Sequence[int]) -> int:
    """Return the number of equal last tokens, at most `LONGEST_NGRAM`."""
    count = 0
    while count < min(len(text), len(last), LONGEST_NGRAM) and text[-1 - count] == last[-1 - count]:
        count += 1
    return count


def test_shared_text_crosses_pages_within_reserved_bytes() -> None:
    text, long = SharedText(), list(range(3 * PAGE_TOKENS))
    assert text.nbytes == SharedText.nbytes_of()
    shared(text, 0).propose(long, 4)
    for end in (PAGE_TOKENS - 3, PAGE_TOKENS, PAGE_TOKENS + 2):
        last = [7, *long[end - LONGEST_NGRAM : end]]
        found = shared(text, end).propose(last, 8)
        assert found == (long[end : end + 8], LONGEST_NGRAM)
    assert text.nbytes == SharedText.nbytes_of()


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
    """Return the answers of concurrent requests."""
    handles = [core.submit(request) for request in requests]
    while core.step():
        core.view.check()
    return [
        (choice.tokens, choice.finish and choice.finish.reason)
        for handle in handles
        for choice in handle.result(0.0)
    ]


@functools.cache
def plain(family: str, *settings: tuple[str, Any]) -> tuple[list[Any], int]:
    """Return the answers and decode steps of an engine without speculation."""
    with running(family, **dict(settings)) as core:
        return answers(core), core.counters.decode_steps


def oracle(texts: Sequence[Sequence[int]], wrong: float, seed: int = 0) -> Any:
    """Return a proposer that knows the answers, with wrong tokens at a given rate."""
    draw = random.Random(seed)

    def propose(self: Speculation, tokens: Sequence[int], most: int) -> Proposal:
        count = len(tokens)
        known = [text for text in texts if list(text[:count]) == list(tokens)]
        following = known[draw.randrange(len(known))][count : count + max(0, most)] if known else ()
        right = [7 if draw.random() < wrong else token for token in following]
        return Proposal(right, LONGEST_NGRAM)

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
        ("falcon_h1", {"max_batch_size": 1}),
    ],
)
def test_speculation_does_not_change_answers(
    family: str, more: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, steps = plain(family, *more.items())
    pairs = zip(REQUESTS, expected, strict=True)
    texts = [[*request.prompt, *answer] for request, (answer, _) in pairs]
    monkeypatch.setattr(Speculation, "propose", oracle(texts, 0.1))
    # A busy machine measures anything, and steps are counted below.
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)
    with running(family, **more, speculative_tokens=width) as core:
        for _ in range(2):  # cold and warm
            assert answers(core) == expected
        stats = core.view.stats()
        if core.runner.takes_several:
            assert stats.proposed_tokens / 3 < stats.accepted_tokens < stats.proposed_tokens
            assert core.counters.decode_steps < 1.7 * steps
        else:
            assert stats.proposed_tokens == 0


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "lfm2", "nemotron_h", "rwkv7"])
def test_recurrent_states_follow_accepted_tokens(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    prompt = (*range(1, 30), *range(5, 20))
    requests = [
        Request(prompt=prompt[:length], max_tokens=40, ignore_eos=True) for length in (44, 31)
    ]
    told = []
    for width in (0, 4):
        core = Core(model, **SMALL, speculative_tokens=width)
        try:
            # The second time from the states that were kept of the first.
            told.append(answers(core, requests) + answers(core, requests))
            if width:
                assert core.counters.accepted_tokens > 20
                assert core.counters.proposed_tokens > core.counters.accepted_tokens
        finally:
            core.close()
        pairs = zip(requests, told[0], strict=False)
        texts = [[*request.prompt, *answer] for request, (answer, _) in pairs]
        monkeypatch.setattr(Speculation, "propose", oracle(texts, 0.1))
    assert told[0] == told[1]


@pytest.mark.parametrize("fault", ["fails", "errs", ""])
def test_models_failing_on_multi_token_steps_disable_speculation(fault: str) -> None:
    model = build("llama")
    theirs = type(model)

    class OneToken(theirs):  # type: ignore[misc, valid-type]
        """A model whose own code does not take several tokens of a row in a decode step."""

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            several = isinstance(cache[0], DecodeReads) and inputs.shape[1] > 1
            if several and fault == "fails":
                raise ValueError("one token a row")
            logits: mx.array = super().__call__(inputs, cache=cache)
            return logits[:, ::-1] if several and fault else logits

    model.__class__ = OneToken
    core = Core(model, **SMALL, speculative_tokens=4)
    assert core.limits.speculative_tokens == (0 if fault else 4)
    assert [reason for _, reason in answers(core, REQUESTS[1:2])] == ["length"]
    core.close()


def test_check_detects_states_after_rejected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def kept(self: ModelExecutor, decoded: Any, *_: Any) -> list[Any]:
        return list(decoded.recurrent_states)

    with running("falcon_h1") as core:
        expected = answers(core)
    monkeypatch.setattr(ModelExecutor, "_states_behind", kept)
    monkeypatch.setattr(Speculation, "propose", lambda self, tokens, most: Proposal([7] * most, 16))
    with running("falcon_h1", speculative_tokens=4) as core:
        assert answers(core) != expected


def test_repetitive_text_takes_fewer_steps() -> None:
    """The embedded model repeats itself where its context does."""
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


def test_check_detects_verifier_that_accepts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    greedy = [request for request in REQUESTS if request.sampling.plain]
    with running("llama") as core:
        expected = answers(core, greedy)
    monkeypatch.setattr(verification, "_accepted", lambda chosen, proposal: list(chosen))
    monkeypatch.setattr(Speculation, "propose", lambda self, tokens, most: Proposal([7] * most, 16))
    with running("llama", speculative_tokens=4) as core:
        assert answers(core, greedy) != expected


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_answer_may_end_inside_proposal(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation continues from the recurrent states at the end."""
    with running(family) as core:
        (whole, _), *_ = answers(core, REQUESTS[:1])
    monkeypatch.setattr(Speculation, "propose", oracle([[*PROMPT, *whole]], 0.0))
    for end in (30, 41):
        request = Request(prompt=PROMPT, max_tokens=90, ignore_eos=True, stop_tokens=(whole[end],))
        talk = (*PROMPT, *whole[: whole.index(whole[end]) + 1], 2, 3)
        further = Request(prompt=talk, max_tokens=20, ignore_eos=True)
        with running(family) as core:
            expected = answers(core, [request]) + answers(core, [further])
        with running(family, speculative_tokens=16) as core:
            assert answers(core, [request]) + answers(core, [further]) == expected
            assert core.counters.accepted_tokens > 0
            assert answers(core, REQUESTS[:1])[0][0] == whole, "the tree holds right tokens"


def test_earlier_answers_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled answers of a random model do not repeat themselves."""

    def request(salt: str) -> Request:
        sampling = Sampling(temperature=1.0, seed=4)
        return Request(
            prompt=PROMPT[:40], max_tokens=60, ignore_eos=True, sampling=sampling, salt=salt
        )

    def accepted(core: Core, salt: str) -> int:
        before = core.counters.accepted_tokens
        assert answers(core, [request(salt)]) == expected
        return core.counters.accepted_tokens - before

    with running("llama") as core:
        expected = answers(core, [request("")])
    with running("llama", speculative_tokens=8) as core:
        assert accepted(core, "") < 10
        assert accepted(core, "") > 30
        assert accepted(core, "other") < 10, "another tenant's text"
        core.clear()
        assert accepted(core, "") < 10, "forgotten"
    with monkeypatch.context() as patch, running("llama", speculative_tokens=8) as core:
        patch.setattr(SharedProposer, "propose", lambda self, tokens, most: Proposal([]))
        assert max(accepted(core, ""), accepted(core, "")) < 10, "without the shared text"


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (NgramProposer, "propose"),
        (StepCosts, "add"),
        (StepCosts, "best_width"),
        (Speculation, "judged"),
    ],
)
def test_proposer_error_skips_proposal(
    faulty: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    with running("llama") as core:
        expected = answers(core)
    monkeypatch.setattr(faulty, name, fail)
    with running("llama", speculative_tokens=4) as core:
        assert answers(core) == expected
        stats = core.view.stats()
    assert stats.failed_proposals > 10
    assert stats.failed == 0


def test_excess_proposed_tokens_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("llama") as core:
        expected = answers(core)
    monkeypatch.setattr(Speculation, "propose", lambda self, tokens, most: Proposal([7] * 50, 16))
    with running("llama", speculative_tokens=4) as core:
        assert answers(core) == expected


def test_prediction_is_proposed_and_counted_in_usage() -> None:
    sampling = Sampling(temperature=1.0, seed=4)
    with running("llama") as core:
        plain = Request(prompt=PROMPT[:40], max_tokens=60, ignore_eos=True, sampling=sampling)
        ((expected, reason),) = answers(core, [plain])
    for prediction, least in ((expected, 40), (expected[:9] + expected[12:], 30), ([7] * 60, 0)):
        request = plain.model_copy(update={"prediction": tuple(prediction)})
        with running("llama", speculative_tokens=8) as core:
            handle = core.submit(request)
            while core.step():
                core.view.check()
            (choice,) = handle.result(0.0)
            assert choice.finish is not None
            assert (choice.tokens, choice.finish.reason) == (expected, reason)
            usage, stats = choice.finish.usage, core.view.stats()
        assert least <= usage.accepted_tokens <= usage.completion_tokens
        assert usage.accepted_tokens <= stats.accepted_tokens
        assert usage.rejected_tokens == stats.proposed_tokens - stats.accepted_tokens
    with running("llama") as core, pytest.raises(SettingError, match="knows"):
        core.submit(plain.model_copy(update={"prediction": (10**6,)}))


def test_usage_excludes_proposals_past_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running("llama") as core:
        (whole, _), *_ = answers(core, REQUESTS[:1])
    request = Request(prompt=PROMPT, max_tokens=90, ignore_eos=True, stop_tokens=(whole[5],))
    end = whole.index(whole[5])
    monkeypatch.setattr(Speculation, "propose", oracle([[*PROMPT, *whole]], 0.0))
    with running("llama", speculative_tokens=16) as core:
        handle = core.submit(request)
        while core.step():
            pass
        (choice,) = handle.result(0.0)
        assert choice.tokens == whole[:end]
        assert choice.finish is not None
        usage = choice.finish.usage
        assert usage.accepted_tokens <= usage.completion_tokens == end + 1
        assert usage.accepted_tokens < core.view.stats().accepted_tokens


def test_error_after_accepted_tokens_retains_no_arrays() -> None:
    """A grammar may raise one cached error; its frames would hold the step's logits."""
    kept = ValueError("no token fits")

    class Refusing:
        """Sampler that chooses one token, and then none."""

        def ahead(self) -> Refusing:
            return self

        def accept(self, token: int) -> bool:
            return False

        def choose(self, logits: mx.array, generated: Sequence[int]) -> SampledToken:
            raise kept

    accepted = [SampledToken(7, 0.0)]
    found = verification._go_on(accepted, mx.zeros((3, 9)), [7, 8], Refusing(), [])  # type: ignore[arg-type]
    assert [token.token for token in found] == [7]
    assert kept.__traceback__ is None and "no token fits" in kept.__notes__[0]
