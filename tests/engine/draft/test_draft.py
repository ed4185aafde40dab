"""Draft models: equal text in fewer steps, within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import mlx.core as mx
import pytest
from core_parts import evict_all
from engine_faults import model_of
from mlx.utils import tree_map

from penstock.engine.core import Core
from penstock.engine.draft.draft import Draft, DraftKV
from penstock.engine.model import verification
from penstock.engine.model.step_costs import LEAST_SAMPLES, StepCosts
from penstock.engine.request import Request, Sampling
from penstock.errors import NeverFits, SettingError
from penstock.ledger import Kind
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

SMALL: dict[str, Any] = {
    "memory_limit": "80MB",
    "block_size": 16,
    "prefill_chunk": 32,
    "max_batch_size": 4,
    "max_kv_size": 512,
}
CODED = {
    "kv_cache_quantization": "turbo4",
    "kv_cache_quantize_when": "active",
    "kv_cache_min_quantize_tokens": 0,
    "block_size": 32,
}
PROMPT = (*range(1, 60), *range(100, 128))
REQUESTS = [
    Request(prompt=PROMPT, max_tokens=50, ignore_eos=True),
    Request(prompt=PROMPT[3:50], max_tokens=40, ignore_eos=True),
    Request(
        prompt=PROMPT[:40],
        max_tokens=45,
        ignore_eos=True,
        sampling=Sampling(temperature=0.4, seed=3),
    ),
    Request(
        prompt=PROMPT[:20],
        max_tokens=30,
        ignore_eos=True,
        sampling=Sampling(repetition_penalty=1.02, logprobs=True, top_logprobs=2),
    ),
]


def blurred(share: float = 0.3) -> Any:
    """Return the model with perturbed weights: often right, and often wrong."""
    model = deepcopy(model_of("llama"))
    mx.random.seed(5)

    def blur(weights: mx.array) -> mx.array:
        return weights + share * mx.std(weights) * mx.random.normal(weights.shape)

    model.update(tree_map(blur, model.parameters()))
    mx.eval(model.parameters())
    return model


@contextmanager
def running(main: Any, draft: Any = None, **settings: Any) -> Iterator[Core]:
    given = None if draft is None else (draft, None)
    core = Core(main, **{**SMALL, **settings}, draft_model=given)
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


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use constant step times, since a busy machine measures random ones."""
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)
    monkeypatch.setattr(StepCosts, "draft_ratio", lambda *_: 0.0)
    monkeypatch.setattr(StepCosts, "saved_seconds", lambda *_: 1e9)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"speculative_tokens": 1}),
        ("llama", {"speculative_tokens": 16, "block_size": 8}),
        ("llama", {"block_size": 1, "speculative_tokens": 4}),
        ("llama", CODED),
        ("falcon_h1", {}),
    ],
)
def test_draft_does_not_change_answers(family: str, more: dict[str, Any]) -> None:
    with running(model_of(family), **more) as core:
        expected = answers(core)
    for draft in (model_of("llama"), blurred()):
        with running(model_of(family), draft, **more) as core:
            for _ in range(2):  # cold and warm
                assert answers(core) == expected
            stats = core.view.stats()
            assert stats.failed_proposals == 0
            assert (stats.drafted_tokens > 0) == (core.limits.block_size > 1)
            if stats.drafted_tokens:
                assert core.draft is not None
                assert stats.by_kind["draft"] > core.draft.fixed_bytes, "its tree"


def test_accurate_draft_saves_steps_and_poor_draft_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy, steps = REQUESTS[:2], []
    for draft in (None, model_of("llama")):
        with running(model_of("llama"), draft) as core:
            answers(core, greedy)
            stats = core.view.stats()
            steps.append(stats.decode.count)
            assert stats.accepted_draft_tokens == stats.drafted_tokens
    assert stats.drafted_tokens > 45
    assert steps[1] < steps[0] / 2
    monkeypatch.setattr(StepCosts, "draft_ratio", lambda *given: 0.05 * given[-1])
    with running(model_of("falcon_h1"), model_of("llama")) as core:
        answers(core, greedy)
        stats = core.view.stats()
    assert stats.drafted_tokens < 60, "it is wrong"
    assert stats.generated_tokens == 90


def test_check_detects_verifier_that_accepts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    with running(model_of("llama")) as core:
        expected = answers(core, REQUESTS[:2])
    monkeypatch.setattr(verification, "_accepted", lambda chosen, proposal: list(chosen))
    with running(model_of("llama"), blurred(2.0)) as core:
        assert answers(core, REQUESTS[:2]) != expected


def test_drafting_is_disabled_if_it_costs_more_than_it_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepCosts, "draft_ratio", lambda *_: 9.0)
    with running(model_of("llama"), model_of("llama")) as core:
        answers(core)
        assert core.view.stats().drafted_tokens == 0
        assert core.draft is not None and not core.draft.live
        assert core.view.stats().by_kind["draft"] == core.draft.fixed_bytes


def test_draft_cost_limits_number_of_proposed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    costs, hoped = StepCosts(), [(16, 0.9)]
    for _ in range(LEAST_SAMPLES):
        costs.add(1, 0, 1.0)
    assert costs.best(hoped, 1)[0] == 16, "not known yet"
    for _ in range(LEAST_SAMPLES):
        costs.add_draft(1, 1, 0.2)
    assert 1 <= costs.best(hoped, 1)[0] < 16
    assert costs.best(hoped, 0)[0] == 16, "the same for nothing"
    assert costs.best(hoped, 1)[1] < costs.best(hoped, 0)[1]
    for _ in range(9):
        costs.add_draft(1, 1, 1.0)
    assert costs.best(hoped, 1) == (0, 1.0)


def test_short_answer_to_long_prompt_is_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the prompt must cost less than the answer's tokens gain."""
    read = []
    for tokens in (40, 120):
        with running(model_of("llama"), model_of("llama")) as core:
            assert core.draft is not None
            second = core.draft._estimator.prefill_token_seconds
            monkeypatch.setattr(StepCosts, "saved_seconds", lambda *_, second=second: second)
            answers(core, [REQUESTS[0].model_copy(update={"max_tokens": tokens})])
            read.append(core.view.stats().drafted_tokens)
    assert read[0] == 0 < read[1], f"a prompt of {len(PROMPT)} tokens"


# ---- memory


def run(core: Core, requests: Sequence[Request], steps: int) -> list[Any]:
    """Return the handles of requests after some steps."""
    handles = [core.submit(request) for request in requests]
    for _ in range(steps):
        core.step()
    return handles


@pytest.mark.parametrize("how", ["cancelled", "preempted", "finished", "failed"])
def test_finished_sequences_free_draft_bytes(how: str) -> None:
    with running(model_of("llama"), model_of("llama"), max_batch_size=2) as core:
        handles = run(core, REQUESTS[:2], 16)
        draft = core.draft
        assert draft is not None and len(draft.live) == 2
        if how == "cancelled":
            for handle in handles:
                handle.cancel()
        elif how == "preempted":
            for sequence in list(core.admission.sequences.values()):
                core.admission.preempt(sequence)
        elif how == "failed":
            for sequence in list(core.admission.sequences.values()):
                core.admission.fail(sequence, NeverFits("x", 1, 1, 1))
        else:
            while core.step():
                pass
        assert draft.live == []
        core.view.check()
        evict_all(core)
        assert draft.used_bytes == draft.fixed_bytes
        assert core.ledger.by_class()[Kind.DRAFT] == draft.fixed_bytes


def test_check_detects_leaked_draft_bytes() -> None:
    """Negative control."""
    with running(model_of("llama"), model_of("llama")) as core:
        run(core, REQUESTS[:1], 14)
        assert core.draft is not None and core.draft.live
        with (
            core.draft.stores.prefixes.ledger.reserve(Kind.NODES, 1),
            pytest.raises(AssertionError, match="nodes"),
        ):
            core.view.check()
        with core.ledger.reserve(Kind.DRAFT, 1), pytest.raises(AssertionError, match="draft"):
            core.view.check()


def test_draft_prefixes_are_shared_and_evicted_first() -> None:
    with running(model_of("llama"), model_of("llama")) as core:
        assert core.draft is not None
        (first,) = answers(core, REQUESTS[:1])
        tree = core.draft.stores.prefixes.tree
        assert tree.tokens >= len(PROMPT), "what it has read stays"
        talk = Request(prompt=(*PROMPT, *first[0], 5, 6), max_tokens=8, ignore_eos=True)
        core.submit(talk)
        while not core.draft.live:
            core.step()
        assert core.draft.live[0].num_cached_tokens > len(PROMPT) // 16 * 16 - 16
        while core.step():
            pass
        nodes = core.view.stats().nodes
        assert core.prefixes.make_room(core.ledger.free_bytes + tree.nbytes)
        assert (tree.tokens, core.view.stats().nodes) == (0, nodes)


def test_draft_kv_of_running_sequences_is_evicted_last() -> None:
    with running(model_of("llama")) as core:
        expected = answers(core, REQUESTS[:2])
    with running(model_of("llama"), model_of("llama")) as core:
        handles = run(core, REQUESTS[:2], 14)
        draft = core.draft
        assert draft is not None and len(draft.live) == 2
        cold = core.prefixes.evictable_bytes - draft.nbytes
        assert core.prefixes.make_room(core.ledger.free_bytes + cold)
        assert len(draft.live) == 2
        assert core.prefixes.make_room(core.ledger.free_bytes + draft.nbytes)
        assert draft.live == [] and draft.used_bytes == draft.fixed_bytes
        core.view.check()
        while core.step():
            core.view.check()
        assert [handle.result(0.0)[0].tokens for handle in handles] == [a for a, _ in expected]


@pytest.mark.parametrize("beside", [0, 60_000, 150_000, 400_000])
def test_draft_under_memory_pressure_does_not_change_answers(beside: int) -> None:
    with running(model_of("llama")) as core:
        expected = answers(core)
    with running(model_of("llama"), model_of("llama")) as core:
        sequence = core.view.sequence_bytes(140)
        core.set_limit(core.ledger.used_bytes + sequence.per_sequence + sequence.shared + beside)
        for _ in range(2):
            assert answers(core) == expected
            assert core.ledger.used_bytes <= core.ledger.limit_bytes


def test_draft_error_does_not_change_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    with running(model_of("llama")) as core:
        expected = answers(core)
    for faulty, name in ((Draft, "_pass"), (Draft, "_read_chunk"), (DraftKV, "settle")):
        with monkeypatch.context() as patch:
            patch.setattr(faulty, name, fail)
            with running(model_of("llama"), model_of("llama")) as core:
                assert answers(core) == expected
                assert core.view.stats().failed_proposals > 0
                assert core.view.stats().failed == 0


# ---- which models


def test_incompatible_draft_models_are_refused() -> None:
    recall = load_all(MODEL_PATH)
    with (
        pytest.raises(SettingError, match="model has 512"),
        running(model_of("llama"), recall.model),
    ):
        pass
    with (
        pytest.raises(SettingError, match="recurrent"),
        running(model_of("llama"), model_of("falcon_h1")),
    ):
        pass

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {**recall.tokenizer.get_vocab(), "another": 7}

    with pytest.raises(SettingError, match=r"differs from the model's in 1 entries"):
        Core(recall.model, recall.tokenizer, **SMALL, draft_model=(recall.model, Other()))
    with pytest.raises(NeverFits):
        Core(recall.model, recall.tokenizer, memory_limit="9MB", draft_model=str(MODEL_PATH))


def test_draft_folder_defaults_to_four_tokens() -> None:
    recall = load_all(MODEL_PATH)
    core = Core(recall.model, recall.tokenizer, **SMALL, draft_model=str(MODEL_PATH))
    try:
        assert core.limits.speculative_tokens == 4
        prompt = tuple(recall.tokenizer.encode("the code of the amber falcon is 4821 ."))
        answers(core, [Request(prompt=prompt, max_tokens=30, ignore_eos=True)])
        stats = core.view.stats()
        assert stats.accepted_draft_tokens == stats.drafted_tokens > 5
    finally:
        core.close()
