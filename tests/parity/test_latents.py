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
from step_copies import step_bytes

from penstock.attention import chosen_tokens, devices
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chosen_tokens import IndexPart
from penstock.attention.latent_reads import LatentReader, latent_reads
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.engine.core import Core
from penstock.engine.model import model_probe
from penstock.errors import SettingError
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
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
    monkeypatch.setattr(chosen_tokens, "LAZY_PARTS", lazy_parts)
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


@pytest.mark.parametrize(
    ("family", "settings"),
    [("deepseek_v3", {}), ("deepseek_v32", {}), ("deepseek_v3", {"attend_tokens": 128})],
    ids=["all", "own index", "choice"],
)
def test_proposals_are_checked_on_latents_in_place(family: str, settings: dict[str, int]) -> None:
    prompt, texts = (*BASE[:40] * 4, *BASE[:9]), []
    for tokens in (0, 4):
        with engine(model_of(family), speculative_tokens=tokens, **settings) as core:
            fitness = core.runner.fitness
            assert (fitness.way, fitness.several) == ("latent", True)
            assert core.limits.speculative_tokens == tokens
            handles = [ask(core, each, 24) for each in (prompt, prompt[:130], BASE)]
            drain(core)
            texts.append(list(map(answer, handles)))
            if not settings:
                for handle in handles:
                    expected = plain(family, handle.request.prompt, 24)
                    assert_same(answer(handle), expected, "with proposals")
            assert (core.view.stats().proposed_tokens > 0) is (tokens > 0)
    assert texts[0] == texts[1]


def test_text_depends_on_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the index scores nothing."""
    scores = own_indexes.HeadSumIndex.scores
    monkeypatch.setattr(
        own_indexes.HeadSumIndex, "scores", lambda self, *where: 0 * scores(self, *where)
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

    index, key = own_indexes.head_sum_index(module, x[:, -1:], qr[:, -1:], count - 1)
    keys = kv.keys[0, :, : kv.offset]
    assert mx.allclose(key[0], keys[:, -1:], atol=1e-5)
    budget = index.budget(count)
    assert budget == args.index_topk
    if count <= budget:
        assert chosen is None
        return
    parts = ((0, keys[:, :7]), (7, keys[:, 7:]))
    scores = mx.concatenate(
        [index.scores(0, 0, IndexPart(part, part[..., :0], at, count)) for at, part in parts]
    )
    ours = mx.argpartition(scores, kth=-budget)[-budget:]
    assert set(ours.tolist()) == set(chosen.flatten().tolist())


# ---- a choice by the key index


RANK, ROPE, HEADS = 64, 32, 4
NEEDLES = (100, 211, 333, 470)
"""One for each head, in the rotated part of its key alone."""


def attended(
    selection: Selection, codec: str | None = None, *, blind: bool = False
) -> tuple[mx.array, mx.array]:
    """Attend with one row of 600 tokens in two segments; also return the expected result.

    Args:
        codec: name of the segments' codec.
        blind: whether the index is made of keys without their rotated parts.
    """
    mx.random.seed(7)
    count, cut = 600, 352
    queries = mx.random.normal((1, HEADS, 1, RANK + ROPE))
    latents, rotated = (mx.random.normal((1, 1, count + 1, dim)) for dim in (RANK, ROPE))
    for head, place in enumerate(NEEDLES):
        query = queries[0, head, 0, RANK:]
        rotated[0, 0, place] = query * (60 / float((query * query).sum()))
    scores = queries[0, :, 0] @ mx.concatenate([latents, rotated], axis=-1)[0, 0].T
    expected = mx.softmax(scores, axis=-1) @ latents[0, 0]
    spans, device = [], devices.current()
    for start, stop in ((0, cut), (cut, count)):
        segment = Segment(((latents[:, :, start:stop], rotated[:, :, start:stop]),)).owned()
        if codec is not None:
            segment = segment.encoded(parse_scheme(codec), device)
        seen = segment
        if blind:
            first, second = segment.layers[0]
            seen = Segment(((first, mx.zeros_like(second)),))
        index = selection.index.indexed(seen, start, device).index
        spans.append(KVSpan(replace(segment, index=index), start, stop - start))
    tails = Tails(1, 1, [LayerShape(1, RANK, ROPE, mx.float32)])
    tails.ready()
    row = DecodeRow(tuple(spans), count, 0, 0)
    step = DecodeStep.of(device, [row], tails, selection=selection)
    (reads,) = latent_reads(step, [AttentionWindow()])
    rows, turned = reads.update_and_fetch(latents[:, :, -1:], rotated[:, :, -1:])
    mask = queries[..., RANK:] @ turned.swapaxes(-1, -2)
    mixed = reads.attend(queries[..., :RANK], rows, rows, 1.0, mask)
    return mixed[0, :, 0], expected


@pytest.mark.parametrize("codec", ["8g32", "4g32"])
def test_codes_of_latents_are_dequantized(codec: str) -> None:
    tolerance = {"8g32": 0.02, "4g32": 0.4}[codec]
    for selection in (READ_ALL, Selection(192, KeyIndex(frozenset([0]), latents=True))):
        read, expected = attended(selection, codec)
        assert 1e-4 < float(mx.abs(read - expected).max()) < tolerance


@pytest.mark.parametrize("rest", [False, True])
def test_choice_finds_tokens_by_latent_and_rotated_part(rest: bool) -> None:
    index = KeyIndex(frozenset([0]), rest, latents=True)
    read, expected = attended(Selection(192, index))
    assert mx.allclose(read, expected, atol=1e-3)
    # Negative control: of these tokens the index has the latents alone.
    blind, _ = attended(Selection(192, index), blind=True)
    assert float(mx.abs(blind - expected).max()) > 0.3


def test_reading_all_tokens_is_exact() -> None:
    read, expected = attended(READ_ALL)
    assert mx.allclose(read, expected, atol=1e-5)


@pytest.mark.parametrize("rest", [False, True])
def test_sequences_of_up_to_n_tokens_are_read_whole_and_others_choose(
    monkeypatch: pytest.MonkeyPatch, rest: bool
) -> None:
    read, exactly = list[int](), LatentReader._exactly

    def watched(self: Any, stacked: mx.array, keys: mx.array, values: mx.array) -> Any:
        read.append(keys.shape[1])
        return exactly(self, stacked, keys, values)

    monkeypatch.setattr(LatentReader, "_exactly", watched)
    model, prompt = model_of("deepseek_v3"), (*BASE, *prompt_of(250, 5))
    with engine(model, attend_tokens=512) as core:
        handle = ask(core, prompt, 12)
        drain(core)
        assert_same(answer(handle), plain("deepseek_v3", prompt, 12), "whole")
    assert not read
    with engine(model, attend_tokens=128, attend_rest=rest) as core:
        assert core.runner.index_token_bytes > 0
        alone = ask(core, prompt, 12)
        drain(core)
        # Each of two layers, in all steps but the first, which is read whole.
        assert len(read) == 2 * 11 and max(read) <= 128
        batch = [ask(core, prompt, 12), ask(core, prompt[:40], 12)]
        drain(core)
        assert cached(batch[0]) == len(prompt) - 1
        assert answer(batch[0]) == answer(alone)
        assert_same(answer(batch[1]), plain("deepseek_v3", prompt[:40], 12), "short")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("deepseek_v32", {}),
        ("deepseek_v3", {"attend_prompt": 256, "block_size": 32}),
        ("deepseek_v3", {"active_kv_size": 512, "hot_cache_only": False}),
    ],
)
def test_choice_that_latents_do_not_have_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    if "active_kv_size" in settings:
        settings = {**settings, "ssd_cache_dir": tmp_path}
    with pytest.raises(SettingError, match="does not work with this model"):
        Core(model_of(family), attend_tokens=128, **{**SMALL, **settings})


@pytest.mark.parametrize("lazy_parts", [0, 10])
def test_columns_of_parts_are_gathered_in_order(
    monkeypatch: pytest.MonkeyPatch, lazy_parts: int
) -> None:
    monkeypatch.setattr(chosen_tokens, "LAZY_PARTS", lazy_parts)
    rows = mx.random.normal((1, 30, 4))
    parts = [rows[:, :11], rows[:, 11:12], rows[:, 12:25], rows[:, 25:]]
    for columns in ([0, 10, 11, 12, 24, 25, 29], [12, 13], [29], list(range(30))):
        copied = chosen_tokens.gathered(parts, mx.array(columns, mx.uint32))
        assert mx.array_equal(copied, rows[:, mx.array(columns)])
