"""Decode steps of mlx-vlm's sparse models choose tokens in place, by the models' own indexes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from asking import answer, ask, drain
from core_parts import way_of, why_of
from step_copies import step_bytes
from tiny_families import prompt_of

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

import model_matrix
import tiny_families
from mlx_vlm.models import cache as theirs
from model_matrix import Differs, Zoo, examine
from tiny_vlm_families import arguments_of

from penstock.attention import chosen_tokens
from penstock.attention.pooled_reads import SeenInputs
from penstock.engine.core import Core
from penstock.engine.model.step_costs import StepCosts
from penstock.plugins.vlm.vlm_reader import TextModel

ALTERNATING = ["full", "shared", "full", "shared"]
CHANGES: dict[str, dict[str, Any]] = {
    "qwen4_exp": {},
    "hy_v4": {},
    "glm_moe_dsa": {"indexer_types": ALTERNATING},
    "longcat_flash_sparse": {"index_init_tokens": 2, "index_local_tokens": 3},
    "glm5_next": {"indexer_types": ["full", "full", "full", "shared"]},
    "deepseek_v4": {"compress_ratios": [4, 128, 0, 4], "index_topk": 5},
    "minimax_m3": {"sparse_topk_blocks": 4, "sparse_init_block": 1, "sparse_local_block": 2},
}
"""Families, and arguments that the matrix of families does not try."""
SMALL: dict[str, Any] = {"memory_limit": "400MB", "block_size": 16, "prefill_chunk": 32}
WAYS = dict.fromkeys(("qwen4_exp", "deepseek_v4", "minimax_m3"), "indexed")


def build(name: str, **changes: Any) -> TextModel:
    """Return a tiny random model of a family of `CHANGES`, with further changes."""
    family = name.partition(",")[0]
    language_model, (arguments, *others) = arguments_of(family)
    for key, value in (CHANGES[family] | changes).items():
        if key.startswith("sparse"):
            arguments.sparse_attention_config[key] = value
        else:
            setattr(arguments, key, value)
    mx.random.seed(zlib.crc32(family.encode()))
    model = TextModel(language_model(arguments, *others), arguments)
    tiny_families.randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


ZOO = Zoo("mlx-vlm", build, theirs)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Hunyuan 4 compiles its partition for the number of tokens at first."""
    with tiny_families.uncompiled():
        yield


@pytest.mark.parametrize("family", CHANGES)
def test_text_matches_own_code(family: str) -> None:
    """Cold, warm, in the next turn, in a batch, and restored from disk."""
    assert examine(f"{family}, changed", ZOO).way == WAYS.get(family, "latent")


@pytest.mark.parametrize("family", CHANGES)
def test_text_depends_on_choice(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the worst tokens are chosen, or the first rows."""
    best, rows = chosen_tokens._best, SeenInputs.chosen
    monkeypatch.setattr(SeenInputs, "chosen", lambda *use: rows(*use[:-1], mx.arange(len(use[-1]))))
    monkeypatch.setattr(
        chosen_tokens, "_best", lambda scores, *rest, **named: best(-scores, *rest, **named)
    )
    with pytest.raises(Differs):
        examine(f"{family}, changed", ZOO, whole=False)


@pytest.mark.parametrize("family", CHANGES)
def test_decode_step_copies_no_kv(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_tokens, "SCORED_AT_ONCE", 256)
    # The pools of GLM 5 Next are computed from half of what it caches.
    bound = {"glm5_next": 0.35, "deepseek_v4": 0.15}.get(family, 0.11)
    core = Core(build(family), **{**SMALL, "block_size": 64, "prefill_chunk": 256})
    try:
        assert way_of(core) == WAYS.get(family, "latent"), why_of(core)
        assert step_bytes(core, 2_048) < bound
        # Negative control: contiguous keys and values.
        core.runner.fitness = replace(core.runner.fitness, way="joined")
        assert step_bytes(core, 2_048) > bound
    finally:
        core.close()


@pytest.mark.parametrize("family", CHANGES)
def test_each_proposed_token_chooses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)  # proposals pay
    model, texts = build(family), list[list[list[int]]]()
    for tokens in (0, 4):
        core = Core(model, **SMALL, speculative_tokens=tokens)
        try:
            assert core.runner.fitness.several
            for _ in range(2):  # the first answers propose for the second
                handles = [ask(core, prompt_of(count), 16) for count in (70, 45)]
                drain(core)
                texts.append(list(map(answer, handles)))
            assert (core.counters.accepted_tokens > 10) is (tokens > 0)
        finally:
            core.close()
    assert texts == texts[:1] * 4


@pytest.mark.parametrize("at_once", [24, 4_096])
def test_rows_pooled_across_parts_match_own_code(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """DeepSeek 4 pools 4 and 128 tokens; blocks of 16 tokens end inside of the latter.

    The answers are longer than its window.
    """
    monkeypatch.setattr(chosen_tokens, "SCORED_AT_ONCE", at_once)
    monkeypatch.setattr(model_matrix, "ANSWER", 15)
    name, model = "deepseek_v4, long", build("deepseek_v4")
    core = Core(model, **SMALL)
    try:
        for what in ("cold", "warm"):
            handles = [model_matrix._submit(core, prompt_of(count)) for count in (283, 130)]
            drain(core)
            for handle in handles:
                model_matrix._check(name, model, what, handle)
    finally:
        core.close()


def test_blocks_of_rows_are_chosen_first() -> None:
    """DeepSeek 4 chooses from 10 rows of the best blocks, whose means depend on all rows so far.

    So its text is compared with that of contiguous keys and values.
    """
    model = build("deepseek_v4", index_topk=8, index_block=2, index_keep=5)
    texts = dict[str, list[list[int]]]()
    for way in ("indexed", "joined", "flat"):
        core = Core(model, **SMALL)
        try:
            assert way_of(core) == "indexed"
            if way == "joined":
                core.runner.fitness = replace(core.runner.fitness, way="joined")
            if way == "flat":  # negative control
                for layer in model.layers:
                    if "indexer" in layer.attn:
                        layer.attn.indexer.index_block = 0
            handles = [ask(core, prompt_of(count), 24) for count in (90, 61)]
            drain(core)
            texts[way] = list(map(answer, handles))
        finally:
            core.close()
    assert texts["indexed"] == texts["joined"] != texts["flat"]
