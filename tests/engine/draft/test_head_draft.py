"""A model's multi-token head: equal text in fewer steps, and its memory in the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from combinations import SOAK
from core_parts import evict_all
from draft_runs import (
    MEASURED_TOKENS,
    answers,
    assert_same,
    changes_if_all_is_accepted,
    drawn,
    noted_proposals,
    running,
)
from headed_models import FAMILIES, headed, headless, right_headed, write_published

from penstock.engine.draft.head_draft import HeadDraft
from penstock.engine.model.constraint import json_schema_grammar
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.model.step_costs import StepCosts
from penstock.engine.request import Request
from penstock.ledger import Kind
from penstock.models.loading import load
from penstock.recall import MODEL_PATH

pytestmark = pytest.mark.usefixtures("drafts_pay")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(120 if SOAK else 12))
def test_head_does_not_change_answers(family: str, seed: int) -> None:
    """216 random requests, cold and warm; with PENSTOCK_WHOLE_MATRIX 2,160, half of them greedy."""
    requests = drawn(seed, 6)
    more = [{}, {"speculative_tokens": 1}, {"block_size": 8, "speculative_tokens": 16}][seed % 3]
    is_right = seed % 4 == 3
    with running(right_headed(family) if is_right else headless(family), **more) as core:
        expected = answers(core, requests)
    model = right_headed(family) if is_right else headed(family)
    with running(model, draft_model="mtp", **more) as core:
        for _ in range(2):  # cold and warm
            assert_same(model, requests, answers(core, requests), expected)
        stats = core.view.stats()
        assert stats.failed_proposals == 0
        if max(request.max_tokens for request in requests) > MEASURED_TOKENS:
            assert stats.drafted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_match_mlx_lm(family: str) -> None:
    prompt = tiny_families.prompt_of(40)
    expected, _ = tiny_families.plain_greedy(headless(family), prompt, 40)
    request = Request(prompt=tuple(prompt), max_tokens=40, ignore_eos=True)
    with running(headed(family), draft_model="mtp") as core:
        for _ in range(2):
            assert answers(core, [request])[0][0] == expected


@pytest.mark.usefixtures("only_drafts")
@pytest.mark.parametrize("family", FAMILIES)
def test_right_head_saves_steps_and_wrong_head_is_disabled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(prompt=tuple(range(1, 40)), max_tokens=60, ignore_eos=True)
    with running(right_headed(family), draft_model="mtp") as core:
        answers(core, [request])
        stats = core.view.stats()
        assert stats.accepted_draft_tokens == stats.drafted_tokens > 40
        assert stats.decode.count < 20
    monkeypatch.setattr(StepCosts, "draft_ratio", lambda *given: 0.05 * given[-1])
    with running(headed(family), draft_model="mtp") as core:
        answers(core, [request])
        assert core.view.stats().drafted_tokens < 45, "it is wrong"


@pytest.mark.usefixtures("only_drafts")
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_match_head_on_mlx_lm_caches(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's KV and states of the head are those of one pass over the whole text."""
    proposed = noted_proposals(monkeypatch, HeadDraft)
    model = headed(family)
    with running(model, draft_model="mtp") as core:
        for _ in range(2):
            answers(core, drawn(3, 6))
    same = checked = 0
    for tokens, drafts in proposed[::3]:
        caches = model.make_cache()
        model(mx.array([tokens[:-1]]), cache=caches)
        kv, state = caches[-1]
        hidden, last = state[0], tokens[-1]
        for token in drafts:
            logits, hidden = model.predict(mx.array([[last]]), hidden, kv)
            last = int(mx.argmax(logits[0, -1]).item())
            same += last == token
            checked += 1
            last = token
    assert checked > 50
    assert same == checked


def test_check_detects_verifier_that_accepts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    assert changes_if_all_is_accepted(headless("qwen3_5"), headed("qwen3_5"), monkeypatch)


def test_grammar_holds_with_head(tmp_path: Path) -> None:
    vocabulary = json.loads((MODEL_PATH / "config.json").read_text())["vocab_size"]
    folder = write_published("qwen3_5", tmp_path / "model", vocabulary=vocabulary)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    request = Request(
        prompt=tuple(range(1, 30)), max_tokens=60, grammar=json_schema_grammar(schema)
    )
    texts = []
    for mtp in (False, True):
        model, tokenizer = load(folder, mtp=mtp)
        with running(model, tokenizer, draft_model="mtp" if mtp else None) as core:
            texts.append(answers(core, [request] * 2))
            assert core.view.stats().failed_proposals == 0
    assert texts[0] == texts[1]


# ---- memory


def test_every_byte_of_head_is_in_ledger() -> None:
    bytes_of = {}
    for model in (headless("qwen3_5"), headed("qwen3_5")):
        with running(model, draft_model=None if model is headless("qwen3_5") else "mtp") as core:
            assert core.ledger.by_class()[Kind.WEIGHTS] == weight_bytes(model)
            assert core.view.stats().by_kind["draft"] == 0
            answers(core, drawn(2, 4))
            assert core.ledger.used_bytes <= core.ledger.limit_bytes
            bytes_of[core] = core.runner.token_bytes, core.runner.state_bytes
            evict_all(core)
    (token, state), (token_with, state_with) = bytes_of.values()
    width = headed("qwen3_5").language_model.args.hidden_size
    assert token_with == 2 * token - token // 2, "three full layers in place of two"
    assert state_with == state + 4 * width


@pytest.mark.parametrize("beside", [0, 60_000, 400_000])
def test_head_under_memory_pressure_does_not_change_answers(beside: int) -> None:
    requests = drawn(5, 6)
    with running(headless("qwen3_5")) as core:
        expected = answers(core, requests)
    with running(headed("qwen3_5"), draft_model="mtp") as core:
        sequence = core.view.sequence_bytes(140)
        core.set_limit(core.ledger.used_bytes + sequence.per_sequence + sequence.shared + beside)
        for _ in range(2):
            assert answers(core, requests) == expected
            assert core.ledger.used_bytes <= core.ledger.limit_bytes


@pytest.mark.usefixtures("reads_all")
def test_head_resumes_from_disk(tmp_path: Path) -> None:
    request = Request(prompt=tuple(range(1, 70)), max_tokens=20, ignore_eos=True)
    texts = []
    for cached in (0, 32):
        settings = {"ssd_cache_dir": tmp_path, "ssd_cache_limit": "40MB"}
        with running(headed("qwen3_5"), draft_model="mtp", fingerprint="x", **settings) as core:
            texts.append(answers(core, [request]))
            (handle,) = [core.submit(request)]
            while core.step():
                pass
            assert handle.result(0.0)[0].finish.usage.cached_tokens >= cached
            assert core.view.stats().failed_proposals == 0
    assert texts[0] == texts[1]


def test_fault_of_head_costs_one_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    requests = drawn(4, 4)
    with running(headless("qwen3_5")) as core:
        expected = answers(core, requests)
    with running(headed("qwen3_5"), draft_model="mtp") as core:
        monkeypatch.setattr(core.runner, "predict", fail)
        assert answers(core, requests) == expected
        assert core.view.stats().failed_proposals > 0
