"""Decode steps read latents where they lie, and choose by an index of the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from asking import answer, ask, cached, drain
from cold_engine import running, settle
from core_parts import way_of, why_of
from mlx_lm.models import cache as theirs
from mlx_lm.models import deepseek_v3, deepseek_v32
from parity_models import SHARED, Step, assert_same, generate, model_of, prompt_of

from penstock.attention import latent_decode
from penstock.engine.core import Core
from penstock.engine.model import model_probe
from penstock.models import own_indexes

SMALL: dict[str, Any] = {"memory_limit": "400MB", "block_size": 16, "prefill_chunk": 32}
BASE = tuple(prompt_of(70))
TOPK = 16


@contextmanager
def engine(model: Any, **settings: Any) -> Iterator[Core]:
    core = Core(model, **{**SMALL, **settings})
    try:
        yield core
    finally:
        core.close()


def plain(family: str, prompt: Sequence[int], tokens: int) -> list[Step]:
    model = model_of(family)
    return generate(model, prompt, theirs.make_prompt_cache(model), tokens)


def wide_model(family: str) -> Any:
    """Return a model with one layer and few heads, whose latents outweigh all else."""
    mx.random.seed(3)
    sizes = {
        **SHARED,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "q_lora_rank": 32,
        "first_k_dense_replace": 1,
    }
    if family == "deepseek_v3":
        model: Any = deepseek_v3.Model(deepseek_v3.ModelArgs(**sizes))
    else:
        more = {"index_head_dim": 64, "index_n_heads": 2, "index_topk": TOPK}
        model = deepseek_v32.Model(deepseek_v32.ModelArgs(**sizes, **more))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def step_bytes(core: Core, tokens: int) -> float:
    """Return the peak of a decode step behind `tokens` tokens, as a share of a layer's KV."""
    prompt = prompt_of(tokens)
    for _ in range(2):
        ask(core, prompt, 1)
        drain(core)
    ask(core, prompt, 1)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    drain(core)
    return (mx.get_peak_memory() - before) / (tokens * core.view.token_bytes)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_decode_step_copies_no_latents(family: str) -> None:
    with engine(wide_model(family), block_size=64, prefill_chunk=256) as core:
        assert way_of(core) == "latent", why_of(core)
        assert step_bytes(core, 1_024) < 0.12
        # Negative control: contiguous latents, and scores in MLX's own attention.
        core.runner.fitness = replace(core.runner.fitness, way="joined")
        assert step_bytes(core, 1_024) > 0.7


@pytest.mark.parametrize("lazy_parts", [0, 4, 100])
def test_text_is_equal_cold_warm_batched_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lazy_parts: int
) -> None:
    """Chosen tokens are copied with or without evaluating the choice."""
    monkeypatch.setattr(latent_decode, "LAZY_PARTS", lazy_parts)
    family, fork = "deepseek_v32", (*BASE[:40], *prompt_of(30, 3))
    prompts = (BASE, fork, BASE[:20])  # the last reads all tokens at first
    with running(tmp_path, model=model_of(family), **SMALL) as core:
        for hits in (0, 64):
            handle = ask(core, BASE, 12)
            drain(core)
            assert cached(handle) == hits
            assert_same(answer(handle), plain(family, BASE, 12), "alone")
        for handle in [ask(core, prompt, 12) for prompt in prompts]:
            drain(core)
            assert_same(answer(handle), plain(family, handle.request.prompt, 12), "in a batch")
        settle(core)
    with running(tmp_path, model=model_of(family), **SMALL) as core:
        handle = ask(core, BASE, 12)
        settle(core)
        assert core.view.stats().restored_tokens == 64
        assert_same(answer(handle), plain(family, BASE, 12), "restored")


def test_text_depends_on_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the index scores nothing."""
    scores = own_indexes.HeadSumIndex.scores
    monkeypatch.setattr(
        own_indexes.HeadSumIndex, "scores", lambda self, row, keys: 0 * scores(self, row, keys)
    )
    with engine(model_of("deepseek_v32")) as core:
        handle = ask(core, BASE, 12)
        drain(core)
    with pytest.raises(AssertionError):
        assert_same(answer(handle), plain("deepseek_v32", BASE, 12), "without scores")


def test_unknown_index_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind few tokens an index chooses nothing, so the trial alone would not show it."""
    monkeypatch.setattr(own_indexes, "FORMS", {})
    own_indexes.chooser.cache_clear()
    try:
        model = tiny_families.build("deepseek_v32")
        assert len(model_probe.PROBE) < model.args.index_topk
        with engine(model) as core:
            assert way_of(core) == "joined"
            assert "an index of its own, in cache 1, 3" in why_of(core)
    finally:
        own_indexes.chooser.cache_clear()


@pytest.mark.parametrize("count", [3, 24, 25])
def test_index_scores_choose_what_the_model_chooses(count: int) -> None:
    """The scores of parts are those of mlx-lm's module over all keys."""
    attention = model_of("deepseek_v32").layers[0].self_attn
    module, args = attention.indexer, attention.config
    mx.random.seed(count)
    x = mx.random.normal((1, count, args.hidden_size))
    qr = mx.random.normal((1, count, args.q_lora_rank))
    kv = theirs.KVCache()
    if count > 1:
        module(x[:, :-1], qr[:, :-1], None, kv)
    chosen = module(x[:, -1:], qr[:, -1:], None, kv)

    class Place:
        offset = count - 1

    index, key = own_indexes.FORMS["mlx_lm.models.deepseek_v32", "Indexer"](
        module, x[:, -1:], qr[:, -1:], Place()
    )
    keys = kv.keys[0, :, : kv.offset]
    assert mx.allclose(key[0], keys[:, -1:], atol=1e-5)
    assert index.budget == args.index_topk
    if count <= index.budget:
        assert chosen is None
        return
    scores = mx.concatenate([index.scores(0, keys[:, :7]), index.scores(0, keys[:, 7:])])
    ours = mx.argpartition(scores, kth=-index.budget)[-index.budget :]
    assert set(ours.tolist()) == set(chosen.flatten().tolist())


@pytest.mark.parametrize("lazy_parts", [0, 10])
def test_columns_of_parts_are_gathered_in_order(
    monkeypatch: pytest.MonkeyPatch, lazy_parts: int
) -> None:
    monkeypatch.setattr(latent_decode, "LAZY_PARTS", lazy_parts)
    rows = mx.random.normal((1, 30, 4))
    parts = [rows[:, :11], rows[:, 11:12], rows[:, 12:25], rows[:, 25:]]
    for columns in ([0, 10, 11, 12, 24, 25, 29], [12, 13], [29], list(range(30))):
        copied = latent_decode.gathered(parts, mx.array(columns, mx.uint32))
        assert mx.array_equal(copied, rows[:, mx.array(columns)])
