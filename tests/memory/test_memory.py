"""Memory arithmetic against mlx-lm's caches and against MLX."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from small_models import BASE, build

from penstock import memory
from penstock.errors import ModelError, SettingError
from penstock.memory import families

MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 64,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
}
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 16,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA3N = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 50,
    "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "model_type": "gemma3n_text",
}
FLOAT32 = {"torch_dtype": "float32"}  # MLX has no half-precision experts on the CPU
INDEXED = {
    **FLOAT32,
    **MLA,
    "q_lora_rank": 24,
    "rope_scaling": None,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "attention_bias": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama wide heads": {"model_type": "llama", "head_dim": 32},
    "llama all heads": {"model_type": "llama", "num_key_value_heads": None},
    "llama windows": {"model_type": "llama", "layer_types": MIXED, "sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "qwen2": {"head_dim": 48},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        **FLOAT32,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {**FLOAT32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 48},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 3},
    "gemma3": {
        "text_config": {
            **BASE,
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "head_dim": 32,
            "sliding_window": 8,
        }
    },
    "gemma3n": {"text_config": {**BASE, **GEMMA3N}},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 50,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text shared values": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "vocab_size_per_layer_input": 50,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {
        **FLOAT32,
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "cohere2": {"head_dim": 16, "sliding_window": 8, "layer_norm_eps": 1e-5},
    "exaone4": {
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": "LLG",
        "rope_scaling": {"rope_type": "default"},
    },
    "olmo3": {"sliding_window": 8},
    "phi": {"layer_norm_eps": 1e-5},
    "phi3": {},
    "seed_oss": {"head_dim": 32, "attention_bias": False},
    "glm4": {"head_dim": 32, "attention_bias": False, "partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 4},
    "olmo2": {},
    "ministral3": {
        "head_dim": 32,
        "layer_types": MIXED,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "granite": {
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "starcoder2": {"norm_epsilon": 1e-5},
    "qwen2_moe": {
        **FLOAT32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "phimoe": {
        **FLOAT32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "type": "longrope",
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        },
    },
    "qwen2_vl": {"text_config": {**BASE, "model_type": "qwen2"}},
    "qwen3_vl": {"text_config": {**BASE, "model_type": "qwen3_vl_text", "head_dim": 32}},
    "glm4_moe_lite": {
        **FLOAT32,
        **MLA,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "rope_scaling": None,
    },
    "deepseek_v2": {**MLA, "n_routed_experts": None},
    "deepseek_v3": {**MLA, "n_routed_experts": None},
    "deepseek_v32": {**INDEXED, "rope_theta": 1e4},
    "glm_moe_dsa": {**INDEXED, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "qwen3_next": {
        **FLOAT32,
        **GATED_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {"text_config": {**BASE, **GATED_DELTA, "model_type": "qwen3_5_text"}},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    "mamba": {
        **FLOAT32,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": "auto",
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 1.0],
        "time_step_rank": "auto",
    },
    "falcon_h1": {**MAMBA2, "head_dim": 16},
    "granitemoehybrid": {
        **MAMBA2,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 96,
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "*", "M"],
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
}


def config_of(name: str) -> dict[str, Any]:
    """Complete one family's small config; a value of None removes the key."""
    changes = FAMILIES[name]
    merged = {**BASE, "model_type": name, **changes}
    return {
        key: value for key, value in merged.items() if value is not None or key == "q_lora_rank"
    }


def held_by(layer: Any) -> tuple[int, int]:
    """Return a layer cache's bytes per KV column, and its state bytes."""
    if hasattr(layer, "caches"):
        parts = [held_by(part) for part in layer.caches]
        return sum(p[0] for p in parts), sum(p[1] for p in parts)
    if hasattr(layer, "keys"):
        return sum(a.nbytes // a.shape[2] for a in (layer.keys, layer.values)), 0
    return 0, sum(state.nbytes for state in layer.cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_formula_matches_mlx_lm_caches(name: str) -> None:
    config = config_of(name)
    spec = memory.read_model_spec(config)
    model = build(config)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=caches))
    assert spec.notes == ()
    measured = [held_by(cache) for cache in caches]
    computed = [
        (memory.layer_bytes_per_token(layer, spec.scalar_bytes), layer.state_bytes)
        for layer in spec.layers
    ]
    assert computed == measured
    windows = [getattr(cache, "max_size", None) for cache in caches]
    assert [layer.window_tokens for layer in spec.layers] == windows


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "cohere2", "gpt_oss"])
def test_config_defaults_match_mlx_lm(name: str) -> None:
    assumed = families.FAMILIES[name].assumed
    args = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs(model_type=name)
    assert assumed == {key: getattr(args, key) for key in assumed}


def test_gemma3_default_head_sizes_match_mlx_lm() -> None:
    args = importlib.import_module("mlx_lm.models.gemma3").ModelArgs("gemma3", {})
    assumed = families.FAMILIES["gemma3"].assumed
    assert args.text_config.items() <= {**assumed, "vocab_size": args.vocab_size}.items()


def test_example_model_needs_1_gib_for_keys_and_1_for_values() -> None:
    layers = (memory.LayerSpec("full", 32, 128, 128),) * 32
    spec = memory.ModelSpec("example", "llama", "float16", layers, None, "", None)
    keys = 32 * 32 * memory.vector_bytes(128, 2) * 4096
    assert keys == 2**30
    assert memory.bytes_of_batch(spec, 1, 4096) == 2 * 2**30
    assert memory.bytes_per_token(spec) == 524_288


@pytest.mark.parametrize("bits", memory.KV_BITS)
@pytest.mark.parametrize("group_size", memory.GROUP_SIZES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_quantized_bytes_match_mx_quantize(bits: int, group_size: int, dtype: str) -> None:
    vectors = mx.random.normal((3, 256)).astype(getattr(mx, dtype))
    parts = mx.quantize(vectors, group_size=group_size, bits=bits)
    computed = memory.vector_bytes(256, memory.DTYPE_BYTES[dtype], bits, group_size)
    assert 3 * computed == sum(part.nbytes for part in parts)


def test_check_detects_missing_group_overhead() -> None:
    parts = mx.quantize(mx.ones((1, 128), mx.float16), group_size=64, bits=4)
    held = sum(part.nbytes for part in parts)
    assert held == memory.vector_bytes(128, 2, 4, 64)
    assert held != 128 * 4 // 8


@pytest.mark.parametrize(
    ("bits", "group_size", "dim", "words"),
    [
        (7, 64, 128, "kv_bits 7 is not one of 8, 6, 5, 4, 3, 2"),
        (4, 48, 96, "group_size 48 is not one of 32, 64, 128"),
        (4, 64, 80, "group_size 64 does not divide the head size 80"),
    ],
)
def test_unquantizable_head_sizes_are_refused(
    bits: int, group_size: int, dim: int, words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        memory.vector_bytes(dim, 2, bits, group_size)


@pytest.mark.parametrize(("dim", "group_size"), [(128, 64), (64, 64), (96, 32), (32, 32)])
def test_group_size_is_64_or_32(dim: int, group_size: int) -> None:
    assert memory.group_size_for(spec_of([memory.LayerSpec("full", 1, dim, dim)])) == group_size


def test_unsupported_head_size_is_named_in_error() -> None:
    with pytest.raises(SettingError, match="head size 80 of example"):
        memory.group_size_for(spec_of([memory.LayerSpec("full", 1, 128, 80)]))


def spec_of(layers: list[memory.LayerSpec], weight_bytes: int | None = None) -> memory.ModelSpec:
    return memory.ModelSpec("example", "llama", "float16", tuple(layers), weight_bytes, "", None)


KINDS = st.one_of(
    st.builds(
        memory.LayerSpec,
        st.just("full"),
        st.integers(1, 4),
        st.sampled_from([32, 64]),
        st.sampled_from([32, 128]),
        st.none(),
        st.integers(0, 500),
    ),
    st.builds(
        memory.LayerSpec,
        st.just("window"),
        st.integers(1, 4),
        st.just(64),
        st.just(64),
        st.integers(1, 300),
    ),
    st.builds(memory.LayerSpec, st.just("recurrent"), state_bytes=st.integers(0, 5000)),
)


@given(
    layers=st.lists(KINDS, min_size=1, max_size=6),
    max_kv_size=st.integers(1, 1000),
    capacity=st.one_of(st.none(), st.integers(1, 1000)),
    batch=st.integers(1, 9),
    bits=st.sampled_from([None, *memory.KV_BITS]),
)
def test_batch_bytes_match_sum_over_columns(
    layers: list[memory.LayerSpec],
    max_kv_size: int,
    capacity: int | None,
    batch: int,
    bits: int | None,
) -> None:
    """Counted column by column, as a cache would allocate them."""
    expected = 0
    for layer in layers:
        expected += layer.state_bytes or 0
        if layer.kind == "recurrent":
            continue
        for column in range(max_kv_size):
            if capacity is not None and column >= capacity:
                break
            if layer.window_tokens is not None and column >= layer.window_tokens:
                break
            for dim in (layer.key_dim, layer.value_dim):
                numbers = layer.kv_heads * dim
                expected += numbers * 2 if bits is None else numbers * bits // 8
                expected += 0 if bits is None else numbers // 32 * 4
    computed = memory.bytes_of_batch(
        spec_of(layers), batch, max_kv_size, capacity=capacity, kv_bits=bits, group_size=32
    )
    assert computed == batch * expected


@given(
    layers=st.lists(KINDS, min_size=1, max_size=6),
    memory_bytes=st.integers(1, 2_000_000),
    weight_bytes=st.one_of(st.none(), st.integers(0, 1_000_000)),
    max_kv_size=st.integers(1, 1000),
    batch=st.integers(1, 5),
)
def test_largest_fitting_window_and_batch_are_exact(
    layers: list[memory.LayerSpec],
    memory_bytes: int,
    weight_bytes: int | None,
    max_kv_size: int,
    batch: int,
) -> None:
    spec = spec_of(layers, weight_bytes)
    fit = memory.what_fits(spec, memory_bytes, max_kv_size=max_kv_size, batch=batch)
    free = memory_bytes - (weight_bytes or 0)

    def held(sequences: int, tokens: int) -> int:
        return memory.bytes_of_batch(spec, sequences, tokens)

    assert fit.free_bytes == free
    assert fit.missing_bytes == max(0, held(batch, max_kv_size) - free)
    assert (fit.missing_bytes == 0) == (held(batch, max_kv_size) <= free)
    if fit.sequence_bytes:
        if fit.sequences:
            assert held(fit.sequences, max_kv_size) <= free
        assert held(fit.sequences + 1, max_kv_size) > free
    if fit.largest_window_tokens is None:
        assert held(batch, 10**9) <= free
    else:
        if fit.largest_window_tokens:
            assert held(batch, fit.largest_window_tokens) <= free
        assert held(batch, fit.largest_window_tokens + 1) > free


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GB", 16 * 10**9),
        ("16 gb", 16 * 10**9),
        ("16G", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("1.5kB", 1500),
        ("0.1MB", 100_000),
        ("2TiB", 2 * 2**40),
        ("512MiB", 512 * 2**20),
        ("7 B", 7),
        ("123456", 123_456),
        (4096, 4096),
    ],
)
def test_parse_bytes_reads_units(text: str | int, count: int) -> None:
    assert memory.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "16XB", "1e9", "1.GB", "16 G B", "nan", "∞"])
def test_parse_bytes_refuses_invalid_text(text: str) -> None:
    with pytest.raises(SettingError, match="is not a size; write"):
        memory.parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_999, "1.00 MB"),
        (147_456, "147.5 kB"),
        (2**30, "1.07 GB"),
        (5 * 10**15, "5,000.0 TB"),
        (-1500, "-1.50 kB"),
    ],
)
def test_format_bytes_chooses_unit(count: int, text: str) -> None:
    assert memory.format_bytes(count) == text


@given(st.integers(0, 10**14))
def test_formatted_bytes_round_trip(count: int) -> None:
    text = memory.format_bytes(count).replace(",", "")
    assert abs(memory.parse_bytes(text) - count) <= 0.006 * count


@pytest.mark.parametrize(
    ("gigabytes", "percent"),
    [(8, 70), (31, 70), (32, 75), (63, 75), (64, 80), (128, 85), (512, 85)],
)
def test_default_limit_is_smaller_share_on_small_machines(gigabytes: int, percent: int) -> None:
    recommended = gigabytes * 10**9
    assert memory.default_limit_bytes(recommended) == recommended * percent // 100


@pytest.mark.parametrize(
    ("gigabytes", "share"), [(8, 0.8), (31, 0.8), (32, 0.85), (64, 0.9), (128, 0.95), (512, 0.95)]
)
def test_default_memory_threshold_depends_on_machine(gigabytes: int, share: float) -> None:
    assert memory.default_threshold(gigabytes * 10**9) == pytest.approx(share)


@pytest.mark.parametrize(
    "name", ["llama", "llama wide heads", "qwen3", "qwen3_moe", "gemma3_text", "mixtral", "olmo3"]
)
@pytest.mark.parametrize("quantization", [None, {"bits": 4, "group_size": 32}])
def test_estimated_weights_match_model(name: str, quantization: Any) -> None:
    """Wider than other test models, so that norms weigh as little as in real ones."""
    config = config_of(name) | {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "head_dim": 128,
        "torch_dtype": "float16",
        "quantization": quantization,
    }
    spec = memory.read_model_spec(config)
    model = build(config)
    if hasattr(model, "sanitize"):  # as when loading: a tied output holds nothing of its own
        model.sanitize({})
    if quantization:
        nn.quantize(model, **quantization)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert spec.weight_bytes == pytest.approx(held, rel=0.01)
    assert "estimated" in spec.weight_source


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        # Llama 3.1 8B and Qwen3 4B, whose parameter counts are published in their model cards.
        ((4096, 32, 14336, 32, 8, 128, 128256, False), 8_030_261_248),
        ((2560, 36, 9728, 32, 8, 128, 151936, True), 4_022_468_096),
    ],
)
def test_estimated_weights_match_released_models(sizes: Any, parameters: int) -> None:
    keys = (
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
    )
    config = dict(zip(keys, sizes, strict=True)) | {"model_type": "qwen3", "dtype": "bfloat16"}
    spec = memory.read_model_spec(config)
    assert spec.weight_bytes == pytest.approx(2 * parameters, rel=0.001)


def test_weights_are_counted_from_safetensors_headers(tmp_path: Path) -> None:
    config = config_of("llama") | {"torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    half = {"model.a": mx.ones((8, 16), mx.bfloat16), "model.b": mx.ones((3,), mx.uint32)}
    mx.save_safetensors(str(tmp_path / "model-00001-of-00002.safetensors"), half, {"format": "mlx"})
    mx.save_safetensors(str(tmp_path / "model-00002-of-00002.safetensors"), {"c": mx.ones((5,))})
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"c": mx.ones((500,))})
    spec = memory.read_model_spec(tmp_path)
    assert spec.weight_bytes == 8 * 16 * 2 + 3 * 4 + 5 * 4
    assert spec.dtype == "bfloat16"  # what the weights are, whatever the config says
    assert spec.name == tmp_path.name
    by_file = memory.read_model_spec(tmp_path / "config.json")
    assert (by_file.dtype, by_file.layers) == ("float16", spec.layers)


MODES = {
    "affine": {"group_size": 64, "bits": 4},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


@pytest.mark.parametrize("mode", MODES)
def test_float32_weight_bytes_are_counted_per_tensor(tmp_path: Path, mode: str) -> None:
    """Of all quantizations, with one matrix in bits of its own, norms, and a float32 tensor."""
    own = {"group_size": 32, "bits": 8, "mode": "affine"}
    name = "model.layers.0.mlp.down_proj"
    config = config_of("llama") | {"quantization": {**MODES[mode], name: own}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (40, 128), name: (64, 256), "lm_head": (24, 64)}
    weights = {"model.norm.weight": mx.ones((64,), mx.bfloat16), "model.b": mx.ones((3,))}
    for stem, shape in shapes.items():
        settings = own if stem == name else MODES[mode]
        parts = mx.quantize(mx.random.normal(shape).astype(mx.bfloat16), **settings)
        names = ("weight", "scales", "biases")[: len(parts)]
        weights |= {f"{stem}.{n}": part for n, part in zip(names, parts, strict=True)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    wide = memory.read_model_spec(tmp_path, float32=True)
    assert wide.weight_bytes == 4 * (40 * 128 + 64 * 256 + 24 * 64 + 64 + 3)
    assert wide.whole_weight_bytes == 4 * (40 * 128 + 24 * 64 + 64 + 3)
    native = memory.read_model_spec(tmp_path)
    assert native.weight_bytes == sum(array.nbytes for array in weights.values())


def test_fp8_blocks_are_counted_as_mxfp8(tmp_path: Path) -> None:
    """As mlx-vlm reads them: a byte a number, and one for the scale of 32."""
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = config_of("llama") | {"quantization_config": form}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"q.weight": (256, 128), "q.weight_scale_inv": (2, 1), "norm.weight": (64,)}
    kinds = {
        "q.weight": ("F8_E4M3", 1),
        "q.weight_scale_inv": ("F32", 4),
        "norm.weight": ("F32", 4),
    }
    header, offset = {}, 0
    for name, shape in shapes.items():
        kind, width = kinds.get(name, ("F32", 4))
        size = width * prod(shape)
        entry = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        header[f"model.layers.0.{name}"] = entry
        offset += size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(offset)
    (tmp_path / "model.safetensors").write_bytes(content)
    spec = memory.read_model_spec(tmp_path)
    assert spec.weight_bytes == 256 * 128 + 256 * 128 // 32 + 4 * 64
    assert any("mxfp8" in note for note in spec.notes)
    assert memory.read_model_spec(tmp_path, float32=True).weight_bytes == 4 * (256 * 128 + 64)


@pytest.mark.parametrize("content", [b"", b"\x05\x00", b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_damaged_header_error_has_file_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors has no readable safetensors header"):
        memory.read_model_spec(tmp_path)


@pytest.mark.parametrize("missing", [1, 500])
def test_truncated_weights_error_has_both_sizes(tmp_path: Path, missing: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {"a": mx.ones((100,)), "b": mx.ones((200,))})
    whole = file.stat().st_size
    assert memory.read_model_spec(tmp_path).weight_bytes == 1200
    file.write_bytes(file.read_bytes()[:-missing])
    words = f"describes {whole:,} bytes, the file has {whole - missing:,}"
    with pytest.raises(ModelError, match=words):
        memory.read_model_spec(tmp_path)


@pytest.mark.parametrize("offsets", [[8, 4], [-4, 4]])
def test_invalid_tensor_offsets_are_reported_as_damaged_header(
    tmp_path: Path, offsets: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    entry = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    header = json.dumps({"odd": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(100)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=f"odd lies from byte {offsets[0]} to byte {offsets[1]}"):
        memory.read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -128),
        ("hidden_size", 0),
        ("vocab_size", -1),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", -2),
        ("head_dim", -16),
        ("intermediate_size", -96),
    ],
)
def test_impossible_size_is_refused_even_if_unused(tmp_path: Path, key: str, value: int) -> None:
    """The head size is given and the weights exist, so the sizes go unread."""
    config = {**config_of("qwen3"), "head_dim": 32, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.ones((8,))})
    with pytest.raises(ModelError, match=f"{tmp_path.name}: {key} is {value}"):
        memory.read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        ("{", "is not a readable JSON file"),
        ("[]", "does not hold a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": "llama"}', "has no hidden_size|has no num_"),
        ('{"model_type": "llama", "num_hidden_layers": "4"}', "is '4', not a count"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers is 0"),
    ],
)
def test_broken_config_error_has_reason(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        memory.read_model_spec(tmp_path)


def test_missing_folder_is_named_in_error() -> None:
    with pytest.raises(ModelError, match="there is no nowhere/model"):
        memory.read_model_spec("nowhere/model")


def test_unknown_model_type_is_noted_as_upper_bound() -> None:
    spec = memory.read_model_spec(config_of("llama") | {"model_type": "newcomer"})
    assert spec.layers == memory.read_model_spec(config_of("llama")).layers
    assert "newcomer is not known" in spec.notes[0]
    assert spec.weight_bytes is None
    assert spec.weight_source.startswith("unknown")


def test_unknown_recurrent_state_is_noted() -> None:
    named = {"layer_types": ["linear_attention", "full_attention"] * 2}
    hinted = {"mamba_d_state": 16}
    for changes, kinds, stateless in (
        (named, ["recurrent", "full"] * 2, 2),
        (hinted, ["full"] * 4, 4),
    ):
        spec = memory.read_model_spec(config_of("llama") | {"model_type": "newcomer"} | changes)
        assert [layer.kind for layer in spec.layers] == kinds
        assert sum(layer.state_bytes is None for layer in spec.layers) == stateless
        assert f"recurrent state of {stateless} layers is unknown" in spec.notes[-1]


def test_unsupported_dtype_is_noted() -> None:
    spec = memory.read_model_spec(config_of("llama") | {"torch_dtype": "float8_e4m3fn"})
    assert spec.dtype == "bfloat16"
    assert "float8_e4m3fn" in spec.notes[0]


def test_consecutive_equal_layers_are_grouped() -> None:
    spec = memory.read_model_spec(config_of("llama windows"))
    assert [(n, layer.kind) for n, layer in memory.layer_groups(spec)] == [
        (3, "window"),
        (1, "full"),
    ]
    assert replace(spec, dtype="float32").scalar_bytes == 4


def test_exact_amount_of_memory_fits() -> None:
    spec = spec_of([memory.LayerSpec("full", 2, 64, 64), memory.LayerSpec("window", 2, 64, 64, 8)])
    needed = memory.bytes_of_batch(spec, 3, 100)
    exact = memory.what_fits(spec, needed, max_kv_size=100, batch=3)
    assert (exact.largest_window_tokens, exact.sequences, exact.missing_bytes) == (100, 3, 0)
    short = memory.what_fits(spec, needed - 1, max_kv_size=100, batch=3)
    assert (short.largest_window_tokens, short.sequences, short.missing_bytes) == (99, 2, 1)
    full = memory.what_fits(spec, 0, max_kv_size=100)
    assert (full.sequences, full.largest_window_tokens) == (0, 0)


def test_default_group_size_is_64() -> None:
    spec = spec_of([memory.LayerSpec("full", 2, 128, 128)])
    assert memory.vector_bytes(128, 2, 4) == memory.vector_bytes(128, 2, 4, 64)
    for count in (
        memory.bytes_per_token(spec, kv_bits=4),
        memory.bytes_of_window(spec, 1, kv_bits=4),
        memory.bytes_of_batch(spec, 1, 1, kv_bits=4),
        memory.what_fits(spec, 1, max_kv_size=1, kv_bits=4).sequence_bytes,
    ):
        assert count == 4 * 72


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_kv_size": 0}, "max_kv_size must be at least 1 token, not 0"),
        ({"max_kv_size": 9, "capacity": 0}, "capacity must be at least 1 token, not 0"),
        ({"max_kv_size": 9, "batch": 0}, "batch must be at least 1 sequence, not 0"),
    ],
)
def test_sizes_below_one_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        memory.bytes_of_batch(spec_of([]), **{"batch": 1, **sizes})
