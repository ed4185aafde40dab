"""Requantized nodes: smaller, bounded, and near full precision."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any
from weakref import ref

import mlx.core as mx
import pytest
from core_parts import cached_match, cached_nodes, retention_of
from tiny_families import build, uncompiled
from whole_blocks import drop_partial_blocks

from penstock.attention import devices
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model.runner import Runner
from penstock.engine.model.step_trials import peak_of
from penstock.engine.request import Request, Sampling
from penstock.engine.retention.requantize import Requantizer
from penstock.errors import NeverFits, SettingError
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.segment import Segment
from penstock.ledger import Kind
from penstock_bench.key_forms import KeyForm, reform
from penstock_bench.models import LlamaShape, ModelChoice, bench_model

SHAPE = LlamaShape(
    layers=3, hidden_size=128, intermediate_size=128, query_heads=4, kv_heads=2, head_dim=64
)
BLOCK = 64
SMALL: dict[str, Any] = {
    "block_size": BLOCK,
    "prefill_chunk": 128,
    "max_batch_size": 4,
    "max_kv_size": 4_096,
    "memory_limit": "400MB",
    "kv_cache_min_quantize_tokens": 0,
    "kv_cache_raw_first_tokens": 64,
    "kv_cache_quantize_when": "active",
}


@pytest.fixture(scope="module")
def model() -> Any:
    return bench_model(ModelChoice.RANDOM, SHAPE).model


@pytest.fixture(scope="module")
def large() -> Any:
    """Return the same model with large key channels."""
    made = bench_model(ModelChoice.RANDOM, SHAPE).model
    reform(made, KeyForm.OUTLIERS)
    return made


def covered(core: Core) -> dict[bool, tuple[int, int]]:
    """Return the token ranges of a single path that are raw and quantized."""
    found: dict[bool, tuple[int, int]] = {}
    for start, end, whole in coded(core):
        before = found.get(whole, (start, start))
        assert before[1] == start, "raw and coded nodes in turn"
        found[whole] = (before[0], end)
    return found


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(512) for _ in range(tokens))


@contextmanager
def running(model: Any, codec: str | None, **settings: Any) -> Iterator[Core]:
    core = Core(model, **{**SMALL, "kv_cache_quantization": codec, **settings})
    try:
        yield core
        core.view.check()
    finally:
        core.close()
        core.view.check()


def submit(core: Core, tokens: Sequence[int], **more: Any) -> Handle:
    return core.submit(
        Request(prompt=tuple(tokens), **{"max_tokens": 16, "ignore_eos": True, **more})
    )


def drain(core: Core) -> None:
    while core.step():
        core.view.check()
        assert core.ledger.used_bytes <= core.ledger.limit_bytes
    drop_partial_blocks(core)


def ask(core: Core, tokens: Sequence[int], **more: Any) -> list[int]:
    handle = submit(core, tokens, **more)
    drain(core)
    return said(handle)


def said(handle: Handle) -> list[int]:
    (found,) = handle.result(0.0)
    assert found.finish is not None and found.finish.reason == "length", found
    return list(found.tokens)


def coded(core: Core) -> list[tuple[int, int, bool]]:
    """Return start, end, and whether it is fully quantized, for each node."""
    return sorted(
        (node.start, node.end, all(isinstance(s, Coded) for kv in node.segment.layers for s in kv))
        for node in cached_nodes(core)
    )


def likely(core: Core, tokens: Sequence[int]) -> dict[int, float]:
    """Return the log-probabilities of the next token."""
    handle = submit(core, tokens, max_tokens=1, sampling=Sampling(logprobs=True, top_logprobs=20))
    drain(core)
    (token,) = handle.result(0.0)[0].logprobs
    return dict(token.top)


def apart(model: Any, codec: str, least: int = 10) -> float:
    """Return how much a codec changes the log-probabilities after a prompt."""
    asked = prompt(700)
    with running(model, None) as core:
        expected = likely(core, asked)
    with running(model, codec) as core:
        likely(core, asked)
        found = likely(core, asked)
        assert core.view.stats().hit_tokens == 640
    both = expected.keys() & found.keys()
    assert len(both) >= least
    return max(abs(expected[token] - found[token]) for token in both)


@pytest.mark.parametrize("codec", ["8", "turbo8", "kivi8/turbo8", "k8v8"])
def test_eight_bits_are_near_full_precision(codec: str, model: Any) -> None:
    assert apart(model, codec) < 0.05


def test_check_detects_loss_of_4_bit_codec(model: Any) -> None:
    """Negative control: the codes are read, not the raw KV."""
    assert 0.05 < apart(model, "4") < 0.5


@pytest.mark.parametrize("codec", ["8", "k8v4", "turbo8", "kivi8/turbo6"])
def test_text_is_equal_cold_warm_and_batched(codec: str, model: Any) -> None:
    asked = prompt(700)
    with running(model, codec) as core:
        expected = ask(core, asked)
        assert ask(core, asked) == expected
        assert core.view.stats().hit_tokens == 640
        handles = [submit(core, asked), submit(core, prompt(300, 1)), submit(core, asked)]
        drain(core)
        assert said(handles[0]) == said(handles[2]) == expected


@pytest.mark.parametrize("codec", ["4", "k8v4", "turbo2.5", "kivi4/turbo3"])
def test_node_nbytes_match_formula(codec: str, model: Any) -> None:
    """The raw arrays are freed in the ledger and in memory."""
    with running(model, codec) as core:
        mx.set_cache_limit(0)  # it hands out larger buffers than were asked for
        before = mx.get_active_memory() - core.view.held_bytes
        ask(core, prompt(700))
        assert covered(core) == {False: (0, 64), True: (64, 704)}
        bits = parse_scheme(codec).token_bits(64, 64, 32)
        wide = 2 * 64 * 32
        nodes = 3 * 2 * (64 * wide + 640 * bits) // 8
        assert core.ledger.by_class()[Kind.NODES] == nodes
        assert mx.get_active_memory() - core.view.held_bytes == before


def test_memory_stays_within_limit(model: Any) -> None:
    with running(model, "kivi4/turbo3.5", memory_limit="45MB") as core:
        others = mx.get_active_memory() - core.view.held_bytes
        handles = [submit(core, prompt(1_200, seed), max_tokens=20) for seed in range(4)]
        while True:
            mx.reset_peak_memory()
            if not core.step():
                break
            core.view.check()
            taken = mx.get_peak_memory() - others + core.ledger.by_class()[Kind.INDEX]
            assert taken <= core.ledger.limit_bytes
        assert all(len(said(handle)) == 20 for handle in handles)


def test_nodes_are_quantized_once_not_in_use(model: Any) -> None:
    asked = prompt(500)
    with running(model, None) as core:
        expected = ask(core, asked)
    with running(model, "turbo3", kv_cache_quantize_when="at-rest") as core:
        handle = submit(core, asked)
        while not handle.ends:
            assert not any(whole for _, _, whole in coded(core)), "it is being read"
            core.step()
        assert said(handle) == expected, "the first answer is that of full precision"
        drain(core)
        assert covered(core) == {False: (0, 64), True: (64, 512)}


def test_node_awaiting_quantization_can_be_evicted(model: Any) -> None:
    """Only the tree holds it, so its bytes are no longer counted."""
    with running(model, "8", kv_cache_quantize_when="at-rest") as core:
        handle = submit(core, prompt(500))
        while not handle.ends:
            core.step()
        requantizer = retention_of(core, Requantizer)
        assert requantizer is not None
        requantizer._look(())
        waiting = list(requantizer._due)
        nodes = [ref(node) for node in cached_nodes(core)]
        assert waiting and all(node() is not None for node in nodes)
        core.set_limit(core.ledger.used_bytes - core.ledger.by_class()[Kind.NODES])
        assert core.ledger.by_class()[Kind.NODES] == 0
        assert [node() for node in nodes] == [None] * len(nodes)


def test_preempted_answer_has_full_precision(model: Any) -> None:
    """Nodes that it reads after resuming are not encoded meanwhile."""
    asked = prompt(500)
    with running(model, None) as core:
        expected = ask(core, asked)
    with running(model, "turbo2", kv_cache_quantize_when="at-rest", max_batch_size=1) as core:
        handle = submit(core, asked)
        while not any(s.generated_tokens > 3 for s in core.admission.sequences.values()):
            assert core.step()
        urgent = submit(core, prompt(300, 1), priority=1, max_tokens=60)
        drain(core)
        assert core.view.stats().preemptions == 1
        assert len(said(urgent)) == 60
        assert said(handle) == expected
        assert core.view.stats().prefilled_tokens < 2 * 500 + 300, "it found its path"


def test_skipped_layers_stay_raw(model: Any) -> None:
    with running(model, "4", kv_cache_skip_layers=(0, 2)) as core:
        ask(core, prompt(300))
        (node,) = (node for node in cached_nodes(core) if node.start == 64)
        assert [isinstance(keys, Coded) for keys, _ in node.segment.layers] == [False, True, False]


AT_REST: dict[str, Any] = {
    "kv_cache_quantize_when": "at-rest",
    "kv_cache_raw_first_tokens": 0,
    "kv_cache_min_quantize_tokens": 256,
}


@pytest.mark.parametrize("when", ["active", "at-rest"])
def test_short_prompt_stays_raw(when: str, model: Any) -> None:
    settings = {**AT_REST, "kv_cache_quantize_when": when}
    asked = prompt(230)
    with running(model, None) as core:
        expected = [ask(core, asked) for _ in range(2)]
    with running(model, "4", **settings) as core:
        assert [ask(core, asked) for _ in range(2)] == expected
        assert core.view.stats().hit_tokens > 0
        assert not any(whole for _, _, whole in coded(core))


@pytest.mark.parametrize("first", [0, 64, 300])
@pytest.mark.parametrize("tokens", [257, 300, 500])
def test_long_prompt_is_quantized_whole(tokens: int, first: int, model: Any) -> None:
    with running(model, "4", **{**AT_REST, "kv_cache_raw_first_tokens": first}) as core:
        ask(core, prompt(tokens), max_tokens=1)
        raw, end = -(-first // BLOCK) * BLOCK, tokens // BLOCK * BLOCK
        expected = {False: (0, min(raw, end)), True: (raw, end)}
        assert covered(core) == {
            whole: (start, stop) for whole, (start, stop) in expected.items() if start < stop
        }


def test_active_quantization_keeps_first_tokens_raw(model: Any) -> None:
    """Otherwise a block would need two forms, for the short and the longer prompt."""
    with running(model, "4", **{**AT_REST, "kv_cache_quantize_when": "active"}) as core:
        ask(core, prompt(500), max_tokens=1)
        assert covered(core) == {False: (0, 256), True: (256, 448)}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_short_prompt_shares_codes_of_longer_prompt(order: tuple[int, ...], model: Any) -> None:
    """A node is coded if any path through it is long enough."""
    long, short = prompt(400), (*prompt(128), *prompt(70, 1))
    asked = (long, short, prompt(200, 2))
    with running(model, "4", **AT_REST) as core:
        for number in order:
            ask(core, asked[number], max_tokens=1)
        paths = [cached_match(core, tokens).path for tokens in asked]
        forms = [
            [(n.start, n.end, isinstance(n.segment.layers[0][0], Coded)) for n in path]
            for path in paths
        ]
        assert {whole for _, _, whole in forms[0]} == {True}
        assert {(end <= 128, whole) for _, end, whole in forms[1]} == {(True, True), (False, False)}
        assert {whole for _, _, whole in forms[2]} == {False}
        token = 3 * 2 * 2 * 64  # numbers
        nodes = 384 * token * 4.5 / 8 + (64 + 192) * token * 4
        assert core.ledger.by_class()[Kind.NODES] == nodes


def test_conversation_is_quantized_when_it_becomes_long(model: Any) -> None:
    turns = [prompt(tokens) for tokens in (100, 200, 300, 500)]
    with running(model, "turbo4", **AT_REST) as core:
        held = hits = 0
        for turn in turns:
            ask(core, turn, max_tokens=1)
            assert core.view.stats().hit_tokens - hits == held
            hits, held = core.view.stats().hit_tokens, len(turn) // BLOCK * BLOCK
            assert covered(core) == {len(turn) >= 256: (0, held)}


def test_512_tokens_in_8_bits_match_vllm_mlx_nbytes() -> None:
    shape = replace(SHAPE, layers=1, query_heads=8, kv_heads=8, hidden_size=512)
    half = bench_model(ModelChoice.RANDOM, shape).model
    half.set_dtype(mx.float16)
    settings = {"block_size": 32, "kv_cache_quantization": "8"}
    core = Core(half, memory_limit="400MB", **settings)
    try:
        ask(core, prompt(512), max_tokens=1)
        assert core.ledger.by_class()[Kind.NODES] == 557_056
    finally:
        core.close()


def test_keep_tokens_stay_raw(model: Any) -> None:
    with running(model, "4", keep=130) as core:
        ask(core, prompt(500))
        assert covered(core) == {False: (0, 192), True: (192, 512)}


def test_branches_sharing_quantized_prefix_have_same_text(model: Any) -> None:
    common = prompt(300)
    branches = [(*common, *prompt(200, seed)) for seed in (1, 2, 3)]
    with running(model, "8") as core:
        expected = [ask(core, branch) for branch in branches]
    with running(model, "8") as core:
        handles = [submit(core, branch) for branch in branches]
        drain(core)
        assert [said(handle) for handle in handles] == expected
        assert core.view.stats().hit_tokens >= 2 * 256


def test_node_stays_raw_without_memory_for_both_forms(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(700)
    with running(model, None) as core:
        expected = ask(core, asked)
    with running(model, "turbo2", kv_cache_quantize_when="at-rest") as core:
        monkeypatch.setattr(core.prefixes, "exchange", lambda *_: False)
        assert ask(core, asked) == expected
        assert ask(core, asked) == expected
        assert core.view.stats().hit_tokens > 0


def test_quantization_is_retried_when_memory_is_free(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, "4", kv_cache_quantize_when="at-rest") as core:
        real, asked = core.prefixes.exchange, []

        def exchange(*given: Any) -> bool:
            asked.append(given)
            return len(asked) > 3 and real(*given)

        monkeypatch.setattr(core.prefixes, "exchange", exchange)
        for _ in range(4):  # tried again whenever an answer ends
            ask(core, prompt(700), max_tokens=1)
        assert len(asked) > 3
        assert covered(core) == {False: (0, 64), True: (64, 640)}


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_out_of_memory_while_encoding_does_not_change_answers(
    error: type[Exception], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(700)
    with running(model, None) as core:
        expected = ask(core, asked)
    with running(model, "turbo2") as core:

        def fails(*_: Any) -> None:
            raise error("no room")

        monkeypatch.setattr(Segment, "encoded", fails)
        assert ask(core, asked) == expected
        assert core.view.stats().out_of_memory > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_quantization": "q4"}, "is not a codec; supported: raw"),
        ({"kv_cache_quantization": "kivi4", "block_size": 32}, "do not divide a block_size of 32"),
        ({"kv_cache_quantization": "4g128"}, "layer 0: affine4g128 uses groups of 128 values"),
        ({"kv_cache_quantization": "4", "kv_cache_skip_layers": (3,)}, "others, are 0 to 2"),
        ({"kv_cache_quantization": "4", "kv_cache_min_quantize_tokens": -1}, "greater than or"),
    ],
)
def test_invalid_settings_are_refused_with_reason(
    settings: dict[str, Any], words: str, model: Any
) -> None:
    with pytest.raises(SettingError, match=words):
        Core(model, **{**SMALL, **settings})


@pytest.mark.parametrize(("codec", "share"), [("raw", 0.95), ("k8v4", 0.7), ("auto5x", 0.7)])
def test_quantization_does_not_shorten_longest_prompt(model: Any, codec: str, share: float) -> None:
    """Chunks dequantize piecewise; whole layers would halve the longest prompt."""

    def longest(codec: str | None) -> int:
        with running(model, codec, memory_limit="35MB") as core:
            with pytest.raises(NeverFits) as caught:
                core.submit(Request(prompt=prompt(8_000), max_tokens=1))
            return 8_000 * caught.value.room_bytes // caught.value.needed_bytes

    # MLX's threads are behind by more or less when a step is measured: medians, in turn.
    pairs = [(longest(codec), longest(None)) for _ in range(5)]
    assert median(own for own, _ in pairs) >= share * median(plain for _, plain in pairs)


def test_raw_codec_disables_requantizer(model: Any) -> None:
    with running(model, "raw") as core:
        assert retention_of(core, Requantizer) is None


# ---- scales of the keys' channels


def scales(core: Core) -> tuple[Any, ...]:
    requantizer = retention_of(core, Requantizer)
    assert requantizer is not None
    return requantizer.rule.scheme.scales


def test_outlier_channel_scales_do_not_change_logits(
    model: Any, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, "turbo4") as core:
        ordinary = scales(core)
    with running(large, "turbo4") as core:
        found = scales(core)
    assert not any(ordinary)
    large_channels = [sorted(power for head in layer for power in head if power) for layer in found]
    assert large_channels == [[4] * 8] * 3, "four of each head, by 16"
    plain = apart(model, "turbo4")
    assert apart(large, "turbo4") == pytest.approx(plain, abs=1e-3), "the codes are the same"
    monkeypatch.setattr(Runner, "key_scales", lambda *_: ())
    assert abs(apart(large, "turbo4", least=5) - plain) > 1e-2, (
        "a negative control: others without scales"
    )


@pytest.mark.parametrize("codec", ["turbo4", "turbo2.5", "k8v4"])
def test_text_with_scaled_keys_is_equal_cold_warm_and_batched(codec: str, large: Any) -> None:
    asked = prompt(700)
    with running(large, codec) as core:
        assert scales(core)
        expected = ask(core, asked)
        assert ask(core, asked) == expected
        assert core.view.stats().hit_tokens == 640
        handles = [submit(core, asked), submit(core, prompt(300, 1)), submit(core, asked)]
        drain(core)
        assert said(handles[0]) == said(handles[2]) == expected


@pytest.mark.parametrize("codec", [None, "8", "kivi4/turbo4", "raw/turbo4"])
def test_scales_are_not_measured_for_other_codecs(
    codec: str | None, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any) -> tuple[Any, ...]:
        raise AssertionError("nobody needs that")

    monkeypatch.setattr(Runner, "key_scales", measured)
    with running(model, codec) as core:
        ask(core, prompt(100))


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        ({"max_position_embeddings": 1_024}, [0, 256, 512, 768]),
        ({"n_positions": 100, "max_position_embeddings": 1_024}, [0, 25, 50, 75]),
        ({"text_config": SimpleNamespace(max_position_embeddings=400)}, [0, 100, 200, 300]),
        ({}, [0, 64, 128, 192]),
    ],
    ids=str,
)
def test_scales_are_measured_across_all_positions(
    arguments: dict[str, Any], starts: list[int], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, None) as core:
        real, asked = core.runner._chunk_reads, []

        def caches(parts: Any, position: int, way: Any, **more: Any) -> Any:
            asked.append(position)
            return real(parts, position, way, **more)

        monkeypatch.setattr(core.runner, "_chunk_reads", caches)
        arguments["tie_word_embeddings"] = model.args.tie_word_embeddings
        monkeypatch.setattr(model, "args", SimpleNamespace(**arguments))
        core.runner.key_scales()
        assert asked == starts


def test_only_attention_layers_have_scales() -> None:
    model = build("qwen3_next")
    for layer in model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.k_norm.weight = layer.self_attn.k_norm.weight.at[0].multiply(64.0)
    with uncompiled():
        runner = Runner(model, devices.current(), max_kv_size=256, keep=0)
        found = runner.key_scales()
    assert len(found) == len(runner.shapes) < len(model.layers)
    assert all(head[0] >= 2 for layer in found for head in layer)


def test_models_with_custom_attention_have_no_scales(large: Any) -> None:
    runner = Runner(large, devices.current(), max_kv_size=256, keep=0)
    assert all(runner.key_scales())
    runner.fitness = replace(runner.fitness, way="joined")
    assert runner.key_scales() == ()


def test_scale_calibration_is_repeatable_within_reserved_bytes(large: Any) -> None:
    with running(large, "turbo4") as core:
        taken, _ = peak_of(core.runner.key_scales)
        assert taken <= core.budget.step_bytes
        assert core.runner.key_scales() == scales(core)


def test_quantized_nodes_are_merged_by_bytes(model: Any) -> None:
    """Readers then have fewer spans; without codecs merging is unchanged."""
    asked = prompt(1_200)
    for codec, longest in (("affine8", 448), (None, 128)):
        with running(model, codec, kv_cache_quantize_when="at-rest") as core:
            tree, each = core.prefixes.tree, core.view.token_bytes
            assert tree.max_merge_bytes == (2_048 * each if codec else 0)
            tree.max_merge_tokens, tree.max_merge_bytes = 128, 128 * each if codec else 0
            ask(core, asked)
            found = [node for node in tree if node.end <= 1_152]
            assert max(len(node.tokens) for node in found) == longest
            assert max(node.segment.nbytes for node in found) <= 128 * each
