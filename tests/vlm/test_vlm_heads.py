"""Multi-token heads of mlx-vlm's models: equal text, fewer steps, and mlx-vlm's own proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from combinations import SOAK
from draft_runs import (
    MEASURED_TOKENS,
    answers,
    assert_same,
    changes_if_all_is_accepted,
    drawn,
    noted_proposals,
    running,
)
from tiny_families import prompt_of

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from headed_vlm_models import (
    FAMILIES,
    headed_vlm,
    headless_vlm,
    right_headed_vlm,
    write_head,
    write_headed,
)
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.split_mtp import split_mtp
from tiny_image_models import Pair, prompts

from penstock import memory
from penstock.attention import devices
from penstock.engine.draft.head_draft import HeadDraft
from penstock.engine.model.runner import Runner
from penstock.engine.request import Request
from penstock.memory.heads import HEADED_BY_SOURCE
from penstock.models.loading import load, load_all
from penstock.plugins.vlm.vlm_reader import HEADS

pytestmark = pytest.mark.usefixtures("drafts_pay")


def own_tokens(family: str, prompt: list[int], count: int) -> list[int]:
    """Generate greedily with mlx-vlm's model on its own caches."""
    model = headless_vlm(family).language_model
    caches, tokens, inputs = make_prompt_cache(model), list[int](), prompt
    for _ in range(count):
        model._position_ids = None
        logits = model(mx.array([inputs]), cache=caches).logits[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
        inputs = tokens[-1:]
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_match_mlx_vlm(family: str) -> None:
    prompt = prompt_of(40)
    expected = own_tokens(family, prompt, 40)
    request = Request(prompt=tuple(prompt), max_tokens=40, ignore_eos=True)
    with running(headed_vlm(family), draft_model="mtp") as core:
        for _ in range(2):
            assert answers(core, [request])[0][0] == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(120 if SOAK else 12))
def test_head_does_not_change_answers(family: str, seed: int) -> None:
    requests = drawn(seed, 6)
    more = [{}, {"speculative_tokens": 1}, {"block_size": 8, "speculative_tokens": 16}][seed % 3]
    model = right_headed_vlm(family) if seed % 4 == 3 else headed_vlm(family)
    with running(model, **more) as core:
        expected = answers(core, requests)
    with running(model, draft_model="mtp", **more) as core:
        for _ in range(2):  # cold and warm
            assert_same(model, requests, answers(core, requests), expected)
        stats = core.view.stats()
        assert stats.failed_proposals == 0
        if max(request.max_tokens for request in requests) > MEASURED_TOKENS:
            assert stats.drafted_tokens > 0


@pytest.mark.usefixtures("only_drafts")
@pytest.mark.parametrize("family", FAMILIES)
def test_right_head_saves_steps(family: str) -> None:
    request = Request(prompt=tuple(range(1, 40)), max_tokens=60, ignore_eos=True)
    with running(right_headed_vlm(family), draft_model="mtp") as core:
        answers(core, [request])
        stats = core.view.stats()
        assert stats.accepted_draft_tokens == stats.drafted_tokens > 40
        assert stats.decode.count < 20


@pytest.mark.usefixtures("only_drafts")
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_match_drafter_of_mlx_vlm(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine's KV and states give the tokens of mlx-vlm's drafter over the whole text."""
    proposed = noted_proposals(monkeypatch, HeadDraft)
    with running(headed_vlm(family), draft_model="mtp") as core:
        for _ in range(2):
            answers(core, drawn(3, 6))
    published = write_headed(family, tmp_path / "model")
    drafter, _ = load_drafter(str(published), "mtp")
    model = headless_vlm(family).language_model
    same = checked = 0
    for tokens, drafts in proposed[::3]:
        model._position_ids = None
        caches = make_prompt_cache(model)
        output = model(mx.array([tokens[:-1]]), cache=caches, return_hidden=True)
        hidden = output.hidden_states[-1]
        drafter.reset(model)
        # The first token, with zeros as the state before it, is a pair of ours.
        zeros = mx.zeros_like(hidden[:, :1])
        drafter._forward_tokens(
            mx.array([tokens[:-1]]), mx.concatenate([zeros, hidden[:, :-1]], axis=1), mx.int32
        )
        block = drafter.draft_block(
            tokens[-1], hidden[:, -1:], None, len(drafts) + 1, None, greedy=True
        )
        same += sum(a == b for a, b in zip(block[0].tolist(), drafts, strict=True))
        checked += len(drafts)
    assert checked > 50
    assert same == checked


def test_check_detects_verifier_that_accepts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    assert changes_if_all_is_accepted(
        headless_vlm("qwen4_exp"), headed_vlm("qwen4_exp"), monkeypatch
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_counts_layers_and_head(family: str, tmp_path: Path) -> None:
    folder = write_headed(family, tmp_path / "model")
    for head, model in ((None, headless_vlm(family)), (folder, headed_vlm(family))):
        spec = memory.read_model_spec(folder, mtp=head)
        runner = Runner(model, devices.current(), max_kv_size=1_000, keep=4)
        assert spec.state_bytes == runner.state_bytes
        assert memory.bytes_per_token(spec) == runner.token_bytes


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
@pytest.mark.parametrize("bits", [None, 8])
def test_split_head_is_loaded(family: str, bits: int | None, tmp_path: Path) -> None:
    folder = write_headed(family, tmp_path / "model")
    options = {} if bits is None else {"q_bits": bits, "q_group_size": 32}
    head = split_mtp(str(folder), str(tmp_path / "head"), **options)
    model, _ = load(folder, weights_dtype="native", mtp=head, model_source="mlx-vlm")
    logits = []
    for tried in (headed_vlm(family), model):
        caches = tried.make_cache()
        tried(mx.array([[3, 1, 4, 1, 5]]), cache=caches)
        kv, state = caches[-1]
        logits.append(tried.predict(mx.array([[7]]), state[0], kv)[0])
    tolerance = 1e-4 if bits is None else 0.3
    assert mx.allclose(*logits, rtol=0, atol=tolerance * mx.abs(logits[0]).max().item())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_head_beside_images_does_not_change_answers(family: str, tmp_path: Path) -> None:
    pair = Pair.of(family, tmp_path / "model")
    head = write_head(family, tmp_path / "model", tmp_path / "head")
    loaded = load_all(tmp_path / "model", weights_dtype="native", mtp=head)
    assert loaded.source.name == "mlx-vlm"
    requests = [pair.request(text, files, 12) for text, files in prompts(8)]
    settings: dict[str, Any] = {"memory_limit": "400MB", "max_kv_size": 1024, "prefill_chunk": 256}
    with running(loaded.model, draft_model="mtp", **settings) as core:
        for _ in range(2):  # cold and warm
            for (text, files), given in zip(prompts(8), answers(core, requests), strict=True):
                assert given[0] == pair.own_answer(text, files, 12)
        stats = core.view.stats()
        assert stats.failed_proposals == 0
        assert stats.drafted_tokens > 0


def test_planned_types_are_those_whose_heads_are_read() -> None:
    assert HEADED_BY_SOURCE["mlx-vlm"] == HEADS.keys()
