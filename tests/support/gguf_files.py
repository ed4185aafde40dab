"""GGUF files of small models, written by the reference package `gguf`.

Names of tensors, forms of blocks and keys of metadata are that package's, not those of
`penstock.plugins.gguf`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import sentencepiece
from gguf.quants import quantize
from mlx.utils import tree_flatten, tree_map
from tokenizers import pre_tokenizers

from support.small_models import BASE, build

VOCABULARY = 320
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SIZES = {
    **BASE,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
}
GEMMA4_ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}
LLAMA4 = {
    "model_type": "llama4",
    "num_hidden_layers": 5,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {
        "model_type": "llama",
        "head_dim": 32,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama4": LLAMA4,
    "llama4 with 128 experts": {
        **LLAMA4,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 128,
        "use_qk_norm": False,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16.0},
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16.0,
        "sliding_window": 12,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "sliding_window": 12,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 20.0,
        "rope_parameters": GEMMA4_ROPE,
    },
    "gemma4 with experts": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 12,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        "rope_parameters": GEMMA4_ROPE,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "phi3": {"model_type": "phi3", "tie_word_embeddings": False},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "glm4": {
        "model_type": "glm4",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "qwen35": {
        "model_type": "qwen3_5",
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "qwen35moe": {
        "model_type": "qwen3_5_moe",
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "sliding_window": 12,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
"""Arguments of a small model for each architecture that is read, by a name."""


def small_model(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a random model and its config."""
    config = {**SIZES, **MODELS[name]}
    model = build({**config, "text_config": config} if "llama4" in name else config)
    # Norms of ones, and sinks of zeros, would be the same in any order.
    shaken = tree_map(
        lambda array: (
            array * (1 + 0.2 * mx.random.normal(array.shape))
            + (0.1 * mx.random.normal(array.shape) if array.ndim == 1 else 0)
        ),
        model.parameters(),
    )
    model.update(shaken)
    if name == "gemma3":
        model.sanitize({})  # drops the output that no file of this family has
    return model, config


def small_file(folder: Path) -> Path:
    """Write a small llama of 4-bit codes as one file, and return its path."""
    model, config = small_model("llama")
    path = folder / "small.gguf"
    write_model(path, "llama", model, config, "Q4_1")
    return path


def write_model(
    path: Path,
    name: str,
    model: Any,
    config: dict[str, Any],
    form: str,
    metadata: Mapping[str, gguf.GGUFValue] | None = None,
) -> None:
    """Write a model as llama.cpp's converter would, its matrices in one form.

    `metadata` stands in the place of what it would write under these keys.
    """
    arch = "llama" if name == "llama3" else name.split(" with ")[0]
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, arch, config)
    add_vocabulary(writer)
    (kind,) = (kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    parameters = {name: np.array(x, np.float32) for name, x in tree_flatten(model.parameters())}
    if arch == "gemma4":
        parameters = _as_gemma4(parameters, writer, config)
    for theirs, numbers in parameters.items():
        theirs = theirs.removeprefix("language_model.")
        if arch in ("llama", "granite") and ".q_proj." in theirs:
            numbers = interleaved(numbers, config["num_attention_heads"])
        if arch in ("llama", "granite") and ".k_proj." in theirs:
            numbers = interleaved(numbers, config["num_key_value_heads"])
        if "conv.weight" in theirs or "conv1d.weight" in theirs:
            numbers = numbers.squeeze(-1)
        if arch.startswith("qwen35"):
            theirs, numbers = _tiled(theirs, numbers, config)
        theirs = f"{theirs}.weight" if theirs.endswith(("sinks", "layer_scalar")) else theirs
        if arch in ("gemma2", "gemma3") and theirs.endswith("norm.weight"):
            numbers = numbers + 1
        known = names.get_name(theirs.replace("switch_mlp", "experts"), (".weight", ".bias"))
        # As the converter has it: norms, convolutions and routers stay as they are.
        is_small = numbers.ndim == 1 or any(part in str(known) for part in SMALL)
        kind = gguf.GGMLQuantizationType["F32" if is_small else form]
        writer.add_tensor(known, quantize(numbers, kind), raw_dtype=kind)
    if name == "llama3" or arch == "llama4":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.kv_data[0].update(metadata or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_gemma4(
    parameters: Mapping[str, np.ndarray[Any, Any]], writer: gguf.GGUFWriter, config: dict[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return tensors as the converter joins them, and add those that its table does not name."""
    joined = {}
    for name, numbers in parameters.items():
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.scale", numbers)
        elif name.endswith("router.per_expert_scale"):
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.scale", numbers)
        elif name.endswith("switch_glu.gate_proj.weight"):
            up = parameters[name.replace("gate_proj", "up_proj")]
            joined[f"model.layers.{layer}.experts.gate_up_proj.weight"] = np.concatenate(
                [numbers, up], axis=1
            )
        elif not name.endswith("switch_glu.up_proj.weight"):
            joined[name.replace("switch_glu.", "")] = numbers
    layers = config["num_hidden_layers"]
    for layer in range(layers - config["num_kv_shared_layers"], layers):
        # Published files have keys and values of layers that use those of others.
        stem = f"model.layers.{layer}.self_attn"
        joined[f"{stem}.k_proj.weight"] = np.ones((32, config["hidden_size"]), np.float32)
        joined[f"{stem}.k_norm.weight"] = np.ones(16, np.float32)
    rotated = config["global_head_dim"] // 8
    rest = config["global_head_dim"] // 2 - rotated
    writer.add_tensor("rope_freqs.weight", np.array([1] * rotated + [1e30] * rest, np.float32))
    return joined


def write_random_llama(path: Path, layers: int, width: int, hidden: int, form: str) -> int:
    """Write a llama of random codes; return the bytes of its largest tensor."""
    heads = width // SIZES["head_dim"]
    config = {
        **SIZES,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    shapes = {f"attn_{side}": (width, width) for side in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (hidden, width), "ffn_up": (hidden, width), "ffn_down": (width, hidden)}
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, "llama", config)
    add_vocabulary(writer)
    kind = gguf.GGMLQuantizationType[form]
    names = {"token_embd": (VOCABULARY, width)}
    for layer in range(layers):
        names |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for name, shape in names.items():
        writer.add_tensor(f"{name}.weight", random_blocks(form, *shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return hidden * width // numbers * block_bytes


def random_blocks(form: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return random blocks whose scales are small numbers of float16."""
    numbers, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (rows * columns // numbers, block_bytes), np.uint8)
    if form == "MXFP4":
        raw[:, 0] = rng.integers(110, 130, len(raw))
        return raw.reshape(rows, -1)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    for at in halves.get(form, (0, 2) if form in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)):
        scales = rng.normal(0, 0.01, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows of queries or keys permuted as the converter does for llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


SMALL = ("conv", "gate_inp", ".bias", "ssm_a")
"""Parts of names of tensors that no converter writes in codes."""


def _tiled(
    name: str, numbers: np.ndarray[Any, Any], config: dict[str, Any]
) -> tuple[str, np.ndarray[Any, Any]]:
    """Return a tensor of Qwen 3.5 as the converter names and orders it.

    All first value heads of the key heads come first, then all second ones.
    """
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    each = config["linear_num_value_heads"] // keys
    before = 2 * keys * config["linear_key_head_dim"]

    def tiled(values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
        parts = values.reshape(keys, each, width, *values.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(values.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        numbers = np.concatenate([numbers[:before], tiled(numbers[before:], size)])
    elif "in_proj_z" in name:
        numbers = tiled(numbers, size)
    elif "in_proj_a" in name or "in_proj_b" in name or "dt_bias" in name:
        numbers = tiled(numbers, 1)
    elif "A_log" in name:
        numbers = -np.exp(tiled(numbers, 1))
    elif "linear_attn.out_proj" in name:
        numbers = np.ascontiguousarray(tiled(np.ascontiguousarray(numbers.T), size).T)
    return name.replace("dt_bias", "dt_proj.bias"), numbers


def _add_sizes(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    dense = config.get("intermediate_size_mlp", config["intermediate_size"])
    writer.add_feed_forward_length(dense)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config or "num_local_experts" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        used = config.get("top_k_experts") or config["num_experts_per_tok"]
        writer.add_expert_used_count(used)
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "gemma4":
        _add_gemma4(writer, config)
    if arch == "llama4":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if arch == "glm4":
        writer.add_rope_dimension_count(config["head_dim"] // 2)
    if arch == "lfm2":
        kinds, heads = config["layer_types"], config["num_key_value_heads"]
        writer.kv_data[0].pop("lfm2.attention.head_count_kv")
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if arch.startswith("qwen35"):
        writer.add_rope_dimension_count(config["head_dim"] // 4)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        writer.add_ssm_inner_size(inner)
        writer.add_full_attention_interval(config["full_attention_interval"])


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    layers, wide = len(sliding), config["intermediate_size"]
    first = layers - config["num_kv_shared_layers"]
    for key in ("feed_forward_length", "attention.head_count_kv", "attention.key_length"):
        writer.kv_data[0].pop(f"gemma4.{key}")
    writer.add_feed_forward_length([wide if layer < first else 2 * wide for layer in range(layers)])
    full_heads = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if slides else full_heads for slides in sliding])
    writer.add_key_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.kv_data[0].pop("gemma4.rope.freq_base")
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _llama3_factors(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the RoPE factors by the loop of llama.cpp's converter."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    old = scaling["original_max_position_embeddings"]
    long, short = old / scaling["low_freq_factor"], old / scaling["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * config["rope_theta"] ** (i / dim)
        if wave < short:
            factors.append(1.0)
        elif wave > long:
            factors.append(scaling["factor"])
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (old / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add a vocabulary of all bytes, a few merges and three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "i n", "Ġ the"]
    texts = [*letters, *(merge.replace(" ", "") for merge in merges)]
    marks = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    spare = [f"<spare {n}>" for n in range(VOCABULARY - len(texts) - len(marks))]
    kinds = [1] * len(texts) + [3] * len(marks) + [5] * len(spare)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*texts, *marks, *spare])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(texts))
    writer.add_eos_token_id(len(texts) + 1)
    writer.add_chat_template(TEMPLATE)


def config_of(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def add_sentencepiece(writer: Any, lines: Iterable[str], vocabulary_size: int) -> Any:
    """Train a SentencePiece vocabulary on lines, and add it; return the processor it came from."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=trained,
        vocab_size=vocabulary_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    count = theirs.vocab_size()
    kinds = [
        2 if theirs.is_unknown(n) else 3 if theirs.is_control(n) else 6 if theirs.is_byte(n) else 1
        for n in range(count)
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([theirs.id_to_piece(n) for n in range(count)])
    writer.add_token_scores([theirs.get_score(n) for n in range(count)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(theirs.unk_id())
    writer.add_bos_token_id(theirs.bos_id())
    writer.add_eos_token_id(theirs.eos_id())
    return theirs
