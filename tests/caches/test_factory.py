"""make_kv_cache: one bound for every kind of layer, and capacity by request."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from combinations import each
from helpers import model_of
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as theirs
from mlx_lm.models.deepseek_v41 import LayerCache
from small_models import BASE

from penstock import (
    QuantizedRotatingKVCache,
    RotatingKVCache,
    SettingError,
    SinkRotatingKVCache,
    make_kv_cache,
)
from penstock.cli.plan import make_plan
from penstock.config import EngineSettings, parse
from penstock.memory import read_model_spec

SLIDING = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
GEMMA3N: dict[str, Any] = {
    "text_config": {
        "model_type": "gemma3n",
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": 300,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 300,
        "sliding_window": 16,
        "max_position_embeddings": 4096,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1e6,
        "final_logit_softcapping": 30.0,
        "layer_types": [
            f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
        ],
        "activation_sparsity_pattern": [0.0] * 5,
        "hidden_size_per_layer_input": 64,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "rope_scaling": None,
    }
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"max_position_embeddings": 4096},
    "gemma3_text": SLIDING,
    "cohere2": {"hidden_size": 256, "sliding_window": 16, "sliding_window_pattern": 2},
    "gemma3n": GEMMA3N,
    "afm7": {
        "hidden_dim": 256,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 2.0,
    },
    "mamba": {
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
        "intermediate_size": 256,
    },
    "falcon_h1": {"max_position_embeddings": 4096},
}


def tokens(model: Any, cache: Any, step_size: int = 2_048) -> list[int]:
    prompt = mx.random.randint(2, 300, (60,), key=mx.random.key(1))
    steps = generate_step(
        prompt, model, prompt_cache=cache, max_tokens=20, prefill_step_size=step_size
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(("family", "step_size"), each(tuple(FAMILIES), (9, 2_048)))
def test_tokens_match_mlx_lm_cache(family: str, step_size: int) -> None:
    model = model_of(family, **FAMILIES[family])
    plain = tokens(model, theirs.make_prompt_cache(model), step_size)
    assert tokens(model, make_kv_cache(model), step_size) == plain
    assert tokens(model, make_kv_cache(model, capacity=80), step_size) == plain


def kinds(cache: list[Any]) -> list[str]:
    return [type(layer).__name__ for layer in cache]


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("a/model", r"penstock\.load\('a/model'\)"),
        (("model", "tokenizer"), "takes apart what it returns"),
        (None, r"penstock\.load\(\.\.\.\)"),
    ],
)
def test_model_path_instead_of_model_is_refused(model: Any, remedy: str) -> None:
    with pytest.raises(SettingError, match=f"takes a loaded model, not a .*; load it: .*{remedy}"):
        make_kv_cache(model)


def test_max_kv_size_applies_to_models_with_own_make_cache() -> None:
    """mlx-lm ignores max_kv_size for them and keeps 604 tokens instead of 128."""
    model = model_of("llama")
    assert hasattr(model, "make_cache")
    cache = make_kv_cache(model, max_kv_size=32, keep=4)
    tokens(model, cache)
    assert all(layer.keys.shape[2] == 32 for layer in cache)


def test_model_window_is_capped_at_max_kv_size() -> None:
    model = model_of("gemma3_text", **SLIDING)
    cache = make_kv_cache(model, max_kv_size=40, keep=4)
    assert [layer.max_size for layer in cache] == [16, 40, 16, 40]
    assert [layer.keep for layer in cache] == [0, 4, 0, 4]
    cache = make_kv_cache(model, max_kv_size=8, keep=2)
    assert [layer.max_size for layer in cache] == [8] * 4
    tokens(model, cache)
    assert all(layer.keys.shape[2] == 8 for layer in cache)


def test_recurrent_layers_are_unchanged() -> None:
    model = model_of("mamba", **FAMILIES["mamba"])
    assert kinds(make_kv_cache(model, max_kv_size=32)) == ["ArraysCache"] * 4
    mixed = make_kv_cache(model_of("falcon_h1", **FAMILIES["falcon_h1"]), max_kv_size=32, keep=4)
    assert kinds(mixed[0].caches) == ["ArraysCache", "SinkRotatingKVCache"]


def test_capacity_below_context_length_avoids_reallocation() -> None:
    model = model_of("llama")
    cache = make_kv_cache(model, capacity=80)
    tokens(model, cache)
    assert [layer.max_size for layer in cache] == [131_072] * 4
    assert [layer.capacity for layer in cache] == [80] * 4
    assert [layer.growths for layer in cache] == [0] * 4


def test_only_full_attention_layers_use_codec() -> None:
    model = model_of("gemma3_text", **SLIDING)
    settings = {
        "kv_cache_quantization": "turbo8",
        "kv_cache_min_quantize_tokens": 64,
        "kv_cache_raw_first_tokens": 64,
    }
    cache = make_kv_cache(model, 256, keep=128, capacity=80, **settings)
    assert kinds(cache) == ["RotatingKVCache", "TurboQuantKVCache"] * 2
    assert (cache[1].max_size, cache[1].keep) == (256, 128)
    assert (cache[1].first, cache[1].least) == (64, 64)
    plain = theirs.make_prompt_cache(model)
    assert tokens(model, cache, 16) == tokens(model, plain, 16)
    assert cache[1].nbytes <= 128 * 2 * 2 * 64 * 4 + 64 * 2 * 2 * 66
    for _ in range(6):
        tokens(model, cache)
        assert cache[1].size() <= 256
    assert cache[1].offset == 7 * 80


def test_raw_disables_codec_and_unknown_codec_is_refused() -> None:
    model = model_of("llama")
    cache = make_kv_cache(model, kv_cache_quantization="raw", kv_bits=8)
    assert kinds(cache) == kinds(make_kv_cache(model, kv_bits=8))
    with pytest.raises(SettingError, match="'q4' is not a codec"):
        make_kv_cache(model, kv_cache_quantization="q4")


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llama", {"kv_bits": 8}, "exclude each other; set one"),
        ("gemma3n", {}, "read other layers' keys"),
        ("llama", {"kv_cache_min_quantize_tokens": -1}, "min_quantize_tokens must be at least 0"),
        ("llama", {"kv_cache_raw_first_tokens": -1}, "raw_first_tokens must be at least 0"),
    ],
)
def test_unsupported_codec_combinations_are_refused(
    family: str, settings: dict[str, Any], words: str
) -> None:
    model = model_of(family, **FAMILIES[family])
    with pytest.raises(SettingError, match=words):
        make_kv_cache(model, kv_cache_quantization="turbo4", **settings)


@pytest.mark.parametrize(
    ("max_kv_size", "keep", "kept"),
    [(100, 20, 20), (100, 99, 99), (100, None, 50), (8, None, 4), (10_000, None, 4_096)],
)
def test_keep_is_as_requested_or_half_of_window_up_to_4096(
    max_kv_size: int, keep: int | None, kept: int
) -> None:
    cache = make_kv_cache(model_of("llama"), max_kv_size, keep)
    assert {layer.keep for layer in cache} == {kept}
    assert {type(layer) for layer in cache} == {SinkRotatingKVCache}


@pytest.mark.parametrize("window", [2, 4_097, 6_000, 8_192, 131_072])
def test_plan_library_and_engine_have_same_default_keep(window: int) -> None:
    model = model_of("llama")
    (kept,) = {layer.keep for layer in make_kv_cache(model, window)}
    assert kept == min(4_096, window // 2)
    assert parse(EngineSettings, memory_limit=1, max_kv_size=window).keep_tokens == kept
    spec = read_model_spec({**BASE, "model_type": "llama"})
    assert make_plan(spec, memory_bytes=1 << 40, max_kv_size=window).keep_kv_size == kept


@pytest.mark.parametrize(
    "form",
    [{}, {"kv_bits": 8, "kv_group_size": 32}, {"kv_cache_quantization": "8"}],
    ids=["raw", "bits", "codec"],
)
@pytest.mark.parametrize(("max_kv_size", "keep"), [(128, 128), (128, 4_096)])
def test_keep_as_large_as_window_is_refused(
    max_kv_size: int, keep: int, form: dict[str, Any]
) -> None:
    words = f"keep {keep} leaves no room in a window of max_kv_size {max_kv_size}"
    with pytest.raises(SettingError, match=words):
        make_kv_cache(model_of("llama"), max_kv_size, keep, **form)


@pytest.mark.parametrize(
    "form",
    [{}, {"keep": 0}, {"kv_bits": 8, "kv_group_size": 32}],
    ids=["sinks", "plain", "bits"],
)
def test_capacity_window_preallocates_whole_window(form: dict[str, Any]) -> None:
    model = model_of("llama")
    grown = make_kv_cache(model, 2_000, **form)
    at_once = make_kv_cache(model, 2_000, capacity="window", **form)
    for caches in (grown, at_once):
        model(mx.array([[1, 2, 3]]), cache=caches)
    assert {layer.capacity for layer in grown} == {256}
    assert {layer.capacity for layer in at_once} == {2_000}
    held = [layer.nbytes for layer in at_once]
    for caches in (grown, at_once):
        for _ in range(9):
            model(mx.array([[1] * 256]), cache=caches)
    assert [layer.nbytes for layer in at_once] == held
    assert {layer.growths for layer in at_once} == {0}
    assert min(layer.growths for layer in grown) > 0


def test_keep_0_uses_plain_rotating_cache() -> None:
    cache = make_kv_cache(model_of("llama"), 100, keep=0)
    assert {type(layer) for layer in cache} == {RotatingKVCache}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_quantized_rotating_cache_has_constant_size(family: str) -> None:
    model = model_of(family, **FAMILIES[family])
    cache = make_kv_cache(model, max_kv_size=32, keep=4, kv_bits=8, kv_group_size=32)
    assert {type(layer) for layer in cache} == {QuantizedRotatingKVCache}
    assert len(tokens(model, cache)) == 20
    held = [layer.nbytes for layer in cache]
    tokens(model, cache)
    assert [layer.nbytes for layer in cache] == held


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_kv_size": 0}, ValueError, "max_kv_size"),
        ({"max_kv_size": "8"}, TypeError, "max_kv_size"),
        ({"keep": -1}, ValueError, "keep"),
        ({"keep": 1.0}, TypeError, "keep"),
        ({"capacity": 0}, ValueError, "capacity"),
        ({"capacity": "all"}, SettingError, "capacity must be a number of tokens or 'window'"),
        ({"kv_bits": 7}, SettingError, "^kv_bits must be one of .*, not 7"),
        ({"kv_bits": 4, "kv_group_size": 7}, SettingError, "^kv_group_size must be one of"),
        (
            {"max_kv_size": 64, "kv_cache_quantization": "turbo4"},
            SettingError,
            "^max_kv_size must be at least 128 with kv_cache_quantization, not 64",
        ),
    ],
)
def test_bad_arguments_are_named_in_error(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_kv_cache(model_of("llama"), **arguments)


READ_BY_OTHERS = ("gemma3n", "afm7")


BOUNDS: list[tuple[str, dict[str, int]]] = [
    ("gemma3n", {"keep": 8}),
    ("gemma3n", {"keep": 8, "kv_bits": 8}),
    ("gemma3n", {"keep": 0}),
    ("afm7", {"keep": 8}),
    ("afm7", {"keep": 0}),
]


@pytest.mark.parametrize(("bounded", "step_size"), each(BOUNDS, (9, 25, 2_048)))
def test_kv_shared_layers_match_mlx_lm(bounded: tuple[str, dict[str, int]], step_size: int) -> None:
    """The prompt exceeds the window; later layers read the KV of earlier ones."""
    family, bound = bounded
    model = model_of(family, **FAMILIES[family])

    def ours() -> list[Any]:
        return make_kv_cache(model, max_kv_size=32, kv_group_size=32, **bound)

    cache = ours()
    assert tokens(model, cache, step_size) == tokens(model, ours(), 1)
    held = [layer.nbytes for layer in cache]
    tokens(model, cache, step_size)
    assert [layer.nbytes for layer in cache] == held


@pytest.mark.parametrize("family", READ_BY_OTHERS)
def test_kv_shared_layers_match_mlx_lm_in_batch(family: str) -> None:
    model = model_of(family, **FAMILIES[family])
    prompts = [mx.random.randint(2, 300, (n,), key=mx.random.key(n)).tolist() for n in (40, 23, 40)]
    caches = [make_kv_cache(model, capacity=60) for _ in prompts]
    generator = BatchGenerator(model, max_tokens=10, prefill_step_size=20)
    numbers = generator.insert(prompts, caches=caches)
    said: dict[int, list[int]] = {number: [] for number in numbers}
    while responses := generator.next_generated():
        for response in responses:
            said[response.uid].append(response.token)
    for number, prompt in zip(numbers, prompts, strict=True):
        alone = generate_step(
            mx.array(prompt), model, max_tokens=10, prompt_cache=theirs.make_prompt_cache(model)
        )
        assert said[number] == [int(token) for token, _ in alone]


class Stub:
    """A model that only provides caches."""

    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    def make_cache(self) -> list[Any]:
        return list(self.caches)

    def named_modules(self) -> list[Any]:
        return []


def test_chunk_size_is_capped_at_max_kv_size() -> None:
    (cache,) = make_kv_cache(Stub(theirs.ChunkedKVCache(8_192)), max_kv_size=64)
    assert cache.chunk_size == 64
    (cache,) = make_kv_cache(Stub(theirs.ChunkedKVCache(32)), max_kv_size=64)
    assert cache.chunk_size == 32


def test_unbounded_layer_cache_is_refused() -> None:
    """DeepSeek 4.1 has compressed keys of unbounded size."""
    with pytest.raises(SettingError, match=r"deepseek_v41\.LayerCache cannot be bounded"):
        make_kv_cache(Stub(LayerCache(32)))


def test_sliding_window_layers_have_keep_0() -> None:
    model = model_of("gemma3_text", **SLIDING)
    cache = make_kv_cache(model, max_kv_size=8, keep=2)
    assert [layer.keep for layer in cache] == [0, 2, 0, 2]
    quantized = make_kv_cache(model, max_kv_size=8, keep=2, kv_bits=8)
    assert [layer.keep for layer in quantized] == [0, 2, 0, 2]
