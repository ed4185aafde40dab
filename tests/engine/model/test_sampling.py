"""Sampling: mlx-lm's filters, batch invariance, and per-row errors."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils
from other_thread import in_other_thread

from penstock.engine.model import sampling as module
from penstock.engine.model.sampling import (
    SampledToken,
    TokenSampler,
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_only,
    likeliest,
    sample_all,
    without_frames,
)
from penstock.engine.request import Sampling
from penstock.errors import PenstockError, SettingError

SIZES = [7, 64, 3025]


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> mx.array:
    logits = scale * mx.random.normal(shape, key=mx.random.key(seed))
    mx.eval(logits)
    return logits


def log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def sampler(prompt: Sequence[int] = (), choice: int = 0, **values: Any) -> TokenSampler:
    return TokenSampler(Sampling(**values), prompt, choice)


def token_of(chosen: SampledToken | Exception) -> int:
    assert isinstance(chosen, SampledToken), chosen
    return chosen.token


# The filters, beside mlx-lm's.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_matches_mlx_lm(size: int, top_p: float) -> None:
    logprobs = log_softmax(random_logits(4, size))
    ours, theirs = apply_top_p(logprobs, top_p), sample_utils.apply_top_p(logprobs, top_p)
    assert mx.array_equal(ours, theirs)
    assert mx.array_equal(apply_top_p(logprobs[2], top_p), ours[2])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("min_p", [1e-6, 0.01, 0.2, 1.0])
def test_min_p_matches_mlx_lm(size: int, min_p: float) -> None:
    logprobs = log_softmax(random_logits(4, size))
    assert mx.array_equal(apply_min_p(logprobs, min_p), sample_utils.apply_min_p(logprobs, min_p))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("scale", [3.0, 0.0], ids=["distinct", "all equal"])
def test_top_k_matches_mlx_lm(size: int, top_k: int, scale: float) -> None:
    logprobs = log_softmax(random_logits(4, size, scale=scale))
    ours = apply_top_k(logprobs, top_k)
    assert mx.array_equal(ours, sample_utils.apply_top_k(logprobs, top_k))
    assert (np.array(ours) > -np.inf).sum(axis=-1).tolist() == [top_k] * 4


@settings(deadline=None)  # mlx-lm's filters compile anew for every number and shape
@given(
    logits=st.lists(st.integers(-40, 40), min_size=12, max_size=12),
    top_p=st.sampled_from([0.01, 0.25, 0.5, 0.99]),
    min_p=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_filters_match_mlx_lm_with_ties(logits: list[int], top_p: float, min_p: float) -> None:
    logprobs = log_softmax(mx.array(logits, mx.float32) / 8)
    for ours, theirs, bound in (
        (apply_top_p, sample_utils.apply_top_p, top_p),
        (apply_min_p, sample_utils.apply_min_p, min_p),
    ):
        assert mx.array_equal(ours(logprobs, bound), theirs(logprobs, bound))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": 299},
        {"top_p": 0.7, "min_p": 0.05, "top_k": 4},
        {"top_k": 10**6},
    ],
)
def test_draws_match_mlx_lm_distribution(values: dict[str, Any]) -> None:
    logits = random_logits(50, 300)
    ours = sampler(temperature=0.8, seed=11, **values)
    for step, row in enumerate(logits):
        kept = log_softmax(row)
        if "top_p" in values:
            kept = sample_utils.apply_top_p(kept, values["top_p"])
        if "min_p" in values:
            kept = sample_utils.apply_min_p(kept, values["min_p"])
        if 0 < values.get("top_k", 0) < row.size:
            kept = sample_utils.apply_top_k(kept, values["top_k"])
        theirs = mx.random.categorical(kept / 0.8, key=ours.key(step))
        assert ours.choose(row, [0] * step).token == theirs.item()


def test_filter_order_matches_mlx_lm() -> None:
    """With these weights every other order leaves other tokens."""
    logits = mx.log(mx.array([30.0, 20.0, 18.0, 12.0, 8.0, 7.0, 5.0]))
    values = {"top_p": 0.65, "min_p": 0.61, "top_k": 2}
    theirs = sample_utils.make_sampler(temp=2.0, **values)
    mx.random.seed(0)
    drawn = {theirs(log_softmax(logits)[None]).item() for _ in range(60)}
    ours = sampler(temperature=2.0, seed=0, **values)
    assert {ours.choose(logits, [0] * step).token for step in range(60)} == drawn


@pytest.mark.parametrize("scale", [4.0, 0.01], ids=["found among the likeliest", "not found"])
def test_top_p_of_large_vocabulary_matches_mlx_lm(scale: float) -> None:
    """The largest logits are tried first, and all where these do not suffice."""
    size = 10 * module.NUCLEUS_TOKENS
    logits = random_logits(3, size, scale=scale)
    _, enough = module._nucleus(logits[0] - mx.max(logits[0]), 0.9, module.NUCLEUS_TOKENS)
    assert enough.item() == (scale > 1)
    ours = sampler(temperature=1.0, top_p=0.9, seed=3)
    for row in logits:
        kept = sample_utils.apply_top_p(log_softmax(row), 0.9)
        for step in range(20):
            theirs = mx.random.categorical(kept, key=ours.key(step))
            assert ours.choose(row, [0] * step).token == theirs.item()


def test_top_p_over_largest_logits_only_would_be_wrong() -> None:
    flat = random_logits(40_000, scale=0.01)
    flat = flat - mx.max(flat)
    quick, _ = module._nucleus(flat, 0.9, module.NUCLEUS_TOKENS)
    assert not mx.array_equal(quick, apply_top_p(flat, 0.9))


# Bias and penalties, beside mlx-lm's.


def processed(logits: mx.array, tokens: Sequence[int], **values: Any) -> mx.array:
    """Apply mlx-lm's logits processors with an unlimited context."""
    for name in list(values):
        if name.endswith("penalty"):
            values[f"{name.removesuffix('_penalty')}_context_size"] = 10**6
    for process in sample_utils.make_logits_processors(**values):
        logits = process(mx.array(tokens), logits[None])[0]
    return logits


PROMPT = [5, 5, 9, 60, 3, 9]
ANSWER = [9, 9, 9, 1, 60, 2]


@pytest.mark.parametrize("penalty", [1.3, 0.7, 1.0])
def test_repetition_penalty_matches_mlx_lm(penalty: float) -> None:
    logits = random_logits(64)
    theirs = processed(mx.array(logits), PROMPT + ANSWER, repetition_penalty=penalty)
    ours = sampler(PROMPT, repetition_penalty=penalty).penalized(logits, ANSWER)
    assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("context", [1, 3, 6, 7, 11, 12, 13, 1000])
def test_repetition_penalty_respects_context_length(context: int) -> None:
    logits = random_logits(64)
    ours = sampler(PROMPT, repetition_penalty=1.5, repetition_context=context)
    for end in range(len(ANSWER) + 1):
        theirs = sample_utils.make_repetition_penalty(1.5, context)(
            mx.array(PROMPT + ANSWER[:end]), mx.array(logits)[None]
        )[0]
        assert mx.array_equal(ours.penalized(logits, ANSWER[:end]), theirs)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("penalty", [0.75, -0.5])
def test_presence_and_frequency_penalties_match_mlx_lm(name: str, penalty: float) -> None:
    logits = random_logits(64)
    theirs = processed(mx.array(logits), ANSWER, **{name: penalty})
    for prompt in (PROMPT, ()):
        ours = sampler(prompt, **{name: penalty}).penalized(logits, ANSWER)
        assert mx.allclose(ours, theirs, atol=1e-6)
        assert not mx.allclose(ours, logits, atol=1e-2)


def test_penalty_order_matches_mlx_lm() -> None:
    """With an empty prompt both count the same tokens."""
    logits = random_logits(64)
    values: dict[str, Any] = {
        "logit_bias": {9: -4.0, 2: 7.5, 0: 1.0},
        "repetition_penalty": 1.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    theirs = processed(mx.array(logits), ANSWER, **values)
    assert mx.allclose(sampler(**values).penalized(logits, ANSWER), theirs, atol=1e-6)


def test_penalties_do_not_modify_logits() -> None:
    logits = mx.array([1.0, 3.0, 2.0])
    ours = sampler(frequency_penalty=0.75)
    answer: list[int] = []
    for _ in range(5):
        answer.append(ours.choose(logits, answer).token)
    assert answer == [1, 1, 2, 1, 2]
    assert logits.tolist() == [1.0, 3.0, 2.0]


def test_penalties_recount_truncated_answer() -> None:
    logits = random_logits(64)
    ours = sampler(PROMPT, repetition_penalty=2.0, repetition_context=4, frequency_penalty=1.0)
    for answer in (ANSWER, ANSWER[:2], [*ANSWER[:2], 7, 7], []):
        fresh = TokenSampler(ours.sampling, PROMPT)
        assert mx.array_equal(ours.penalized(logits, answer), fresh.penalized(logits, answer))


@given(
    before=st.lists(st.integers(0, 9), max_size=12),
    answer=st.lists(st.integers(0, 9), max_size=30),
    window=st.one_of(st.none(), st.integers(1, 15)),
    data=st.data(),
)
def test_token_counts_are_updated_incrementally(
    before: list[int], answer: list[int], window: int | None, data: st.DataObject
) -> None:
    """Tokens 8 and 9 are beyond the vocabulary, like image placeholders."""
    ours = module._Occurrences(before, window)
    ends = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    for end in [*ends, *range(len(answer) + 1)]:
        tokens = [*before, *answer[:end]]
        kept = Counter(tokens if window is None else tokens[-window:])
        counts = ours.counts(answer[:end], 8).tolist()
        assert counts == [kept[token] for token in range(8)]


def test_logit_bias_outside_vocabulary_is_refused() -> None:
    sampling = Sampling(logit_bias={3: 1.0, 64: 1.0})
    TokenSampler(sampling, (), vocabulary_size=65)
    with pytest.raises(SettingError, match="names token 64; the model has the 64 tokens"):
        TokenSampler(sampling, (), vocabulary_size=64)
    assert TokenSampler(sampling, ()).choice == 0
    with pytest.raises(SettingError, match="names token 64"):
        TokenSampler(sampling, ()).choose(random_logits(64), [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_can_forbid_and_force(temperature: float) -> None:
    logits = random_logits(32)
    best = int(mx.argmax(logits).item())
    forbid = sampler(temperature=temperature, seed=1, logit_bias={best: -1e30})
    force = sampler(temperature=temperature, seed=1, logit_bias={7: 1e30})
    for step in range(20):
        assert forbid.choose(logits, [0] * step).token != best
        assert force.choose(logits, [0] * step).token == 7


# Draws.


def drawn(ours: TokenSampler, logits: mx.array, count: int) -> list[int]:
    answer: list[int] = []
    for _ in range(count):
        answer.append(ours.choose(logits, answer).token)
    return answer


def test_draws_depend_only_on_seed_and_choice() -> None:
    logits = mx.zeros(1000)
    same = drawn(sampler(temperature=1.0, seed=5), logits, 12)
    assert drawn(sampler([1, 2, 3], temperature=1.0, seed=5), logits, 12) == same
    assert drawn(sampler(temperature=1.0, seed=6), logits, 12) != same
    assert drawn(sampler(choice=1, temperature=1.0, seed=5), logits, 12) != same
    assert drawn(sampler(temperature=1.0, seed=-5), logits, 12) != same
    assert len(set(same)) > 6


def test_unseeded_samplers_draw_different_tokens() -> None:
    logits = mx.zeros(1000)
    one, two = (drawn(sampler(temperature=1.0), logits, 12) for _ in range(2))
    assert one != two


def test_global_random_state_is_unused() -> None:
    logits = random_logits(500)
    ours = sampler(temperature=1.0, top_p=0.9, seed=5)
    mx.random.seed(1)
    before = [state.tolist() for state in mx.random.state]
    first = drawn(ours, logits, 8)
    assert [state.tolist() for state in mx.random.state] == before
    mx.random.seed(2)
    assert drawn(ours, logits, 8) == first


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_distribution(temperature: float) -> None:
    """Chi squared of 4,000 draws over 8 tokens; one seed in a thousand exceeds 24.3."""
    logits, count = random_logits(8, scale=1.0), 4000
    ours = sampler(temperature=temperature, seed=9)
    tokens = [token_of(ours.choose(logits, range(step))) for step in range(count)]
    wanted = np.array(mx.softmax(logits / temperature)) * count
    seen = np.bincount(tokens, minlength=8)
    assert ((seen - wanted) ** 2 / wanted).sum() < 24.3


def test_neighboring_draws_are_independent() -> None:
    """Pairs of neighboring draws, seeds and choices are equally frequent."""
    logits, count = mx.zeros(2), 1500
    base = [sampler(temperature=1.0, seed=1).choose(logits, range(i)).token for i in range(count)]
    seed = [sampler(temperature=1.0, seed=2).choose(logits, range(i)).token for i in range(count)]
    other = [
        sampler(choice=1, temperature=1.0, seed=1).choose(logits, range(i)).token
        for i in range(count)
    ]
    for one, two in ((base, base[1:]), (base, seed), (base, other)):
        pairs = Counter(zip(one, two, strict=False))
        wanted = min(len(one), len(two)) / 4
        assert len(pairs) == 4
        assert sum((seen - wanted) ** 2 / wanted for seen in pairs.values()) < 16.3


@pytest.mark.parametrize("temperature", [2e-5, 1e-3, 1e6])
def test_extreme_temperatures_are_argmax_or_uniform(temperature: float) -> None:
    logits = 1000 * random_logits(64)
    tokens = set(drawn(sampler(temperature=temperature, seed=1), logits, 40))
    assert tokens == {int(mx.argmax(logits).item())} or (temperature > 1 and len(tokens) > 20)


# Log-probabilities.


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_logprobs_match_model(dtype: mx.Dtype) -> None:
    logits = random_logits(500).astype(dtype)
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    ours = sampler(
        [1, 2, 3],
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.5,
        logit_bias={4: 3.0},
        seed=1,
        logprobs=True,
        top_logprobs=5,
    )
    chosen = ours.choose(logits, [7])
    assert chosen.logprob == pytest.approx(exact[chosen.token], abs=1e-4)
    order = sorted(range(500), key=lambda token: (-exact[token], token))[:5]
    assert [token for token, _ in chosen.top] == order
    assert [value for _, value in chosen.top] == pytest.approx(exact[order], abs=1e-4)


def test_greedy_token_has_logprob_only_if_requested() -> None:
    logits = random_logits(64)
    plain = sampler().choose(logits, [])
    asked = sampler(logprobs=True).choose(logits, [])
    assert (plain.token, plain.logprob, plain.top) == (asked.token, None, ())
    assert asked.logprob == pytest.approx(float(mx.max(log_softmax(logits)).item()), abs=1e-5)
    assert asked.top == ()


def test_top_logprobs_are_capped_at_vocabulary_size() -> None:
    chosen = sampler(logprobs=True, top_logprobs=20).choose(mx.zeros(3), [])
    assert [token for token, _ in chosen.top] == [0, 1, 2]


# A whole step.


def company() -> list[TokenSampler]:
    """Return one sampler of every kind, each with its own seed."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "top_k": 50},
        {"logprobs": True, "top_logprobs": 3},
        {},
        {"repetition_penalty": 1.3, "repetition_context": 5},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {3: 5.0}},
    ]
    return [sampler([1, 2, 3], choice=row, seed=row, **kind) for row, kind in enumerate(kinds)]


def test_batched_rows_match_single_rows() -> None:
    """12 steps with rows in changing order, one of them invalid."""
    alone, together = company(), company()
    answers: list[list[int]] = [[] for _ in alone]
    order = np.random.default_rng(0)
    for step in range(12):
        logits = random_logits(len(alone) + 1, 200, seed=step)
        rows = [int(row) for row in order.permutation(len(alone) + 1)]
        everybody = [*together, sampler(logit_bias={200: 1.0})]
        chosen = sample_all(
            logits[mx.array(rows)],
            [everybody[row] for row in rows],
            [[*answers, []][row] for row in rows],
        )
        by_row = dict(zip(rows, chosen, strict=True))
        assert isinstance(by_row.pop(len(alone)), SettingError)
        for row, one in enumerate(alone):
            assert by_row[row] == one.choose(logits[row], answers[row])
        for row, answer in enumerate(answers):
            answer.append(token_of(by_row[row]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_rows_are_argmax(dtype: mx.Dtype) -> None:
    logits = random_logits(5, 3025).astype(dtype)
    samplers = [sampler() for _ in range(5)]
    assert greedy_only(samplers)
    expected = mx.argmax(logits, axis=-1).tolist()
    assert [token_of(one) for one in sample_all(logits, samplers, [[]] * 5)] == expected
    best = likeliest(logits)
    mx.eval(best.tokens, best.values, logits + 1)
    assert [token_of(one) for one in best.read()] == expected
    assert not greedy_only([*samplers, sampler(temperature=1.0)])
    assert greedy_only([])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mixed", [False, True], ids=["greedy", "mixed"])
def test_nan_row_fails_alone(bad: float, mixed: bool) -> None:
    logits = random_logits(8, 200)
    logits[2] = bad
    logits[4] = bad
    samplers = company() if mixed else [sampler() for _ in range(8)]
    chosen = sample_all(logits, samplers, [[]] * 8)
    for row, one in enumerate(chosen):
        assert isinstance(one, PenstockError) == (row in (2, 4))
        if row not in (2, 4):
            assert one == samplers[row].choose(logits[row], [])


class Unreadable(list[int]):
    """A token list that raises when its length is read."""

    def __len__(self) -> int:
        raise RuntimeError("unreadable")


def test_error_in_one_row_fails_alone() -> None:
    logits = random_logits(8, 200)
    sound = sample_all(logits, company(), [[]] * 8)
    for row in (1, 2, 5, 6):
        answers: list[list[int]] = [[] for _ in range(8)]
        answers[row] = Unreadable()
        chosen = sample_all(logits, company(), answers)
        assert isinstance(chosen[row], RuntimeError)
        assert [one for at, one in enumerate(chosen) if at != row] == [
            one for at, one in enumerate(sound) if at != row
        ]


class Unsure(TokenSampler):
    """A sampler that fails when its row is evaluated, not when it is prepared."""

    folder: Path

    def penalized(self, logits: mx.array, generated: Sequence[int]) -> mx.array:
        return logits + failing(self.folder, logits.size)


def failing(folder: Path, *shape: int) -> mx.array:
    """Return an array whose evaluation fails: its file is truncated before it is read."""
    file = folder / "array.npy"
    mx.save(str(file), mx.zeros(shape))
    array = mx.load(str(file))
    assert isinstance(array, mx.array)
    with file.open("r+b") as opened:
        opened.truncate(200)
    return array


@in_other_thread
def test_lazy_error_fails_only_its_own_row(tmp_path: Path) -> None:
    logits = random_logits(8, 200)
    sound = sample_all(logits, company(), [[]] * 8)
    for row in (0, 1, 7):
        samplers = company()
        samplers[row] = unsure = Unsure(Sampling(logprobs=True), ())
        unsure.folder = tmp_path
        chosen = sample_all(logits, samplers, [[]] * 8)
        assert isinstance(chosen[row], RuntimeError)
        del chosen[row]
        assert chosen == [one for at, one in enumerate(sound) if at != row]


@pytest.mark.parametrize("mixed", [False, True], ids=["greedy", "mixed"])
@in_other_thread
def test_logits_that_cannot_be_evaluated_fail_step(tmp_path: Path, mixed: bool) -> None:
    samplers = company() if mixed else [sampler() for _ in range(8)]
    with pytest.raises(RuntimeError, match="Unable to read"):
        sample_all(failing(tmp_path, 8, 200) + 1, samplers, [[]] * 8)


def test_row_count_must_match_samplers() -> None:
    with pytest.raises(ValueError, match="3 rows for 2 samplers"):
        sample_all(random_logits(3, 8), [sampler(), sampler()], [[], []])


def test_single_row_of_one_token_vocabulary_gives_token_0() -> None:
    for one in (sampler(), sampler(temperature=1.0, top_p=0.5, top_k=1, min_p=0.5)):
        assert token_of(sample_all(mx.zeros((1, 1)), [one], [[]])[0]) == 0


def test_samplers_work_in_other_thread() -> None:
    """Streams belong to threads: the constructor must create nothing lazy."""
    samplers, found = company(), []

    def work() -> None:
        with mx.stream(mx.new_thread_local_stream(mx.default_device())):
            found.extend(sample_all(random_logits(8, 200), samplers, [[]] * 8))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == sample_all(random_logits(8, 200), company(), [[]] * 8)


# What an error keeps.


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_caught_error_retains_no_arrays() -> None:
    before = mx.get_active_memory()
    logits = random_logits(2, 100_000)
    chosen = sample_all(logits, [sampler(logit_bias={100_000: 1.0}), sampler()], [[], []])
    error = chosen[0]
    assert mx.get_active_memory() - before >= 800_000
    del logits, chosen
    assert mx.get_active_memory() == before
    assert isinstance(error, SettingError)
    assert "penalized" in "".join(error.__notes__)


@pytest.mark.usefixtures("no_collector")
def test_without_frames_frees_arrays_held_by_traceback() -> None:
    def fail() -> Exception:
        logits = random_logits(2, 100_000)
        try:
            raise KeyError(logits.shape[0])
        except KeyError as error:
            return error

    before = mx.get_active_memory()
    error = fail()
    assert mx.get_active_memory() - before >= 800_000
    without_frames(error)
    assert mx.get_active_memory() == before
