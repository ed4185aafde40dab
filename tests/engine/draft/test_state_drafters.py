"""Drafters that read hidden states (DFlash, EAGLE-3): equal text, fewer steps, and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
from drafted_models import (
    CONFIGS,
    FAMILIES,
    KINDS,
    UNTIED,
    constant,
    drafted,
    drafted_tokens,
    undrafted,
    write_drafter,
    write_model,
)

from penstock.engine.draft.head_draft import BlockDraft, HeadDraft
from penstock.engine.model.constraint import json_schema_grammar
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.model.step_costs import StepCosts
from penstock.engine.request import Request
from penstock.ledger import Kind
from penstock.models.loading import load
from penstock.recall import MODEL_PATH

pytestmark = [pytest.mark.usefixtures("drafts_pay"), pytest.mark.parametrize("kind", KINDS)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(60 if SOAK else 6))
def test_drafter_does_not_change_answers(family: str, seed: int, kind: str) -> None:
    """360 random requests, cold and warm; with PENSTOCK_WHOLE_MATRIX 3,600, half of them greedy."""
    requests = drawn(seed, 6)
    more: dict[str, Any] = [
        {"speculative_tokens": 5},
        {"speculative_tokens": 1},
        {"block_size": 8, "speculative_tokens": 16},
    ][seed % 3]
    is_constant = seed % 4 == 3 and family in UNTIED
    plain = constant(family, kind, has_drafter=False) if is_constant else undrafted(family, kind)
    with running(plain, **more) as core:
        expected = answers(core, requests)
    model = constant(family, kind, has_drafter=True) if is_constant else drafted(family, kind)
    with running(model, draft_model="mtp", **more) as core:
        for _ in range(2):  # cold and warm
            assert_same(model, requests, answers(core, requests), expected)
        stats = core.view.stats()
        assert stats.failed_proposals == 0
        longest = max(request.max_tokens for request in requests)
        if longest > MEASURED_TOKENS and not is_constant:  # else known text may be right, too
            assert stats.drafted_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_match_mlx_lm(family: str, kind: str) -> None:
    prompt = tiny_families.prompt_of(40)
    expected, _ = tiny_families.plain_greedy(undrafted(family, kind), prompt, 40)
    request = Request(prompt=tuple(prompt), max_tokens=40, ignore_eos=True)
    with running(drafted(family, kind), draft_model="mtp") as core:
        for _ in range(2):
            assert answers(core, [request])[0][0] == expected


@pytest.mark.usefixtures("only_drafts")
@pytest.mark.parametrize("family", UNTIED)
def test_right_drafter_saves_steps_and_wrong_one_is_disabled(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(prompt=tuple(range(1, 40)), max_tokens=60, ignore_eos=True)
    more = {"draft_model": "mtp", "speculative_tokens": 7, "block_size": 32}
    with running(constant(family, kind, has_drafter=True), **more) as core:
        answers(core, [request])
        stats = core.view.stats()
        assert stats.accepted_draft_tokens == stats.drafted_tokens > 40
        assert stats.decode.count < 20
    monkeypatch.setattr(StepCosts, "draft_ratio", lambda *_: 0.3)
    with running(drafted(family, kind), **more) as core:
        answers(core, [request])
        assert core.view.stats().drafted_tokens < 60, "it is wrong"


@pytest.mark.usefixtures("only_drafts")
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_match_drafter_on_mlx_lm_caches(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's KV of the drafter is that of one pass over the whole text."""
    proposed = noted_proposals(monkeypatch, {"block": BlockDraft, "eagle": HeadDraft}[kind])
    model = drafted(family, kind)
    with running(model, draft_model="mtp", speculative_tokens=6) as core:
        for _ in range(2):
            answers(core, drawn(3, 6))
    checked = [(tokens, drafts) for tokens, drafts in proposed[::3] if drafts]
    assert sum(len(drafts) for _, drafts in checked) > 50
    assert [drafted_tokens(model, kind, tokens, len(drafts)) for tokens, drafts in checked] == [
        drafts for _, drafts in checked
    ]


def test_check_detects_verifier_that_accepts_everything(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    assert changes_if_all_is_accepted(undrafted("qwen3", kind), drafted("qwen3", kind), monkeypatch)


@pytest.mark.parametrize("bits", [None, 4])
def test_grammar_holds_with_drafter(bits: int | None, kind: str, tmp_path: Path) -> None:
    vocabulary = json.loads((MODEL_PATH / "config.json").read_text())["vocab_size"]
    folder = write_model("qwen3", kind, tmp_path / "model", bits=bits, vocabulary=vocabulary)
    drafter = write_drafter("qwen3", kind, tmp_path / "drafter")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    request = Request(
        prompt=tuple(range(1, 30)), max_tokens=60, grammar=json_schema_grammar(schema)
    )
    texts = []
    for mtp in (False, drafter):
        model, tokenizer = load(folder, mtp=mtp)
        with running(model, tokenizer, draft_model=mtp or None) as core:
            texts.append(answers(core, [request] * 2))
            assert core.view.stats().failed_proposals == 0
    assert_same(load(folder, mtp=False)[0], [request] * 2, texts[1], texts[0])


# ---- memory


def test_every_byte_of_drafter_is_in_ledger(kind: str) -> None:
    bytes_of = []
    for model in (undrafted("qwen3", kind), drafted("qwen3", kind)):
        with running(
            model, draft_model=None if model is undrafted("qwen3", kind) else "mtp"
        ) as core:
            assert core.ledger.by_class()[Kind.WEIGHTS] == weight_bytes(model)
            assert core.view.stats().by_kind["draft"] == 0
            answers(core, drawn(2, 4))
            assert core.ledger.used_bytes <= core.ledger.limit_bytes
            bytes_of.append(core.runner.token_bytes)
            evict_all(core)
    config = CONFIGS[kind]
    numbers = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert bytes_of[1] == bytes_of[0] + 2 * 4 * numbers


@pytest.mark.parametrize("beside", [0, 60_000, 400_000])
def test_drafter_under_memory_pressure_does_not_change_answers(beside: int, kind: str) -> None:
    requests = drawn(5, 6)
    with running(undrafted("qwen3", kind)) as core:
        expected = answers(core, requests)
    with running(drafted("qwen3", kind), draft_model="mtp") as core:
        sequence = core.view.sequence_bytes(140)
        core.set_limit(core.ledger.used_bytes + sequence.per_sequence + sequence.shared + beside)
        for _ in range(2):
            assert answers(core, requests) == expected
            assert core.ledger.used_bytes <= core.ledger.limit_bytes


@pytest.mark.usefixtures("reads_all")
@pytest.mark.parametrize("codec", [None, "turbo8"])
def test_drafter_resumes_from_disk(codec: str | None, kind: str, tmp_path: Path) -> None:
    request = Request(prompt=tuple(range(1, 70)), max_tokens=20, ignore_eos=True)
    texts = []
    for cached in (0, 32):
        settings = {"ssd_cache_dir": tmp_path, "ssd_cache_limit": "40MB"}
        settings |= {"kv_cache_quantization": codec, "block_size": 32}
        with running(
            drafted("qwen3", kind), draft_model="mtp", fingerprint="x", **settings
        ) as core:
            texts.append(answers(core, [request]))
            (handle,) = [core.submit(request)]
            while core.step():
                pass
            assert handle.result(0.0)[0].finish.usage.cached_tokens >= cached
            assert core.view.stats().failed_proposals == 0
    assert texts[0] == texts[1]


def test_fault_of_drafter_costs_one_proposal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    requests = drawn(4, 4)
    with running(undrafted("qwen3", kind)) as core:
        expected = answers(core, requests)
    with running(drafted("qwen3", kind), draft_model="mtp") as core:
        method = {"block": "predict_block", "eagle": "predict"}[kind]
        monkeypatch.setattr(core.runner, method, fail)
        assert answers(core, requests) == expected
        assert core.view.stats().failed_proposals > 0
