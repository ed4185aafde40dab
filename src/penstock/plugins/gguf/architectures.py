"""Conversion of GGUF architectures to mlx-lm's configs and weight names.

To add an architecture, write a function that returns the special part of its config, and add a line
to `ARCHITECTURES`. Keys and names are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's
`gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import ModelError
from penstock.plugins.gguf.header import Header
from penstock.plurals import counted

Config = dict[str, Any]

GATE_UP = "gate_up_proj"
"""Name of a matrix of experts that are two modules, one above the other in each."""
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA,
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": f"experts.switch_glu.{GATE_UP}",
    "ffn_down_exps": "experts.switch_glu.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_PHI = {**_COMMON, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
    **_COMMON,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_GLM4 = {
    **_COMMON,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
_QWEN35 = {
    **_EXPERTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_LLAMA4 = {
    **_COMMON,
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "output": "lm_head",
}
_WHOLE_NAMES = {
    "linear_attn.A_log": "linear_attn.A_log",
    "linear_attn.dt.bias": "linear_attn.dt_bias",
    "self_attn.sinks.weight": "self_attn.sinks",
    "layer_scalar.weight": "layer_scalar",
}
"""Names of arrays that are not the `weight` or `bias` of a module."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are converted to values of the config; the model has no such weights."""
_PARTLY_ROTARY = ("phi3", "glm4", "qwen35", "qwen35moe")
"""Architectures whose RoPE may rotate only a part of a head."""
_SHARED_KV = "attention.shared_kv_layers"
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.([\w.]+?)(\.weight|\.bias|)")


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str
    special: Callable[[Header, str], Config]
    """Function that returns the architecture-specific part of the config."""
    names: Mapping[str, str] = field(default_factory=lambda: _COMMON)
    """Names of modules within a layer in mlx-lm, by their name in the file."""
    interleaved: bool = False
    """Whether the file has the rows of queries and keys in RoPE's interleaved order."""
    norm_offset: float = 0.0
    """Offset that is included in the file's norm weights, but that mlx-lm adds itself."""
    prefix: str = ""
    """Prefix of all weight names in mlx-lm's model."""
    varies: bool = False
    """Whether layers may differ in size and KV heads, which `special` returns."""
    scales_rope: bool = True
    """Whether mlx-lm's model supports `rope_scaling`."""
    nested: bool = False
    """Whether mlx-lm's model has its config in `text_config`."""


def architecture(header: Header) -> Architecture:
    """Return the architecture of a file; ModelError if it is not supported."""
    name = header.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.name} has the architecture {str(name)[:64]!r}; supported in GGUF files are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    if name == "llama" and header.integer("llama.expert_count", 0):
        raise ModelError(f"{header.name}: llama with experts (Mixtral) is not supported in GGUF")
    return ARCHITECTURES[name]


def config(header: Header) -> Config:
    """Return the config for mlx-lm's loader and `penstock plan`; ModelError if unsupported."""
    kind, prefix = architecture(header), str(header.metadata["general.architecture"])
    heads = header.integer(f"{prefix}.attention.head_count")
    hidden = header.integer(f"{prefix}.embedding_length")
    theta = header.number(f"{prefix}.rope.freq_base", 10_000.0)
    if not 0 < heads <= hidden or theta <= 0:
        raise ModelError(
            f"{header.name}: {counted(heads, 'head')} on {counted(hidden, 'number')}, "
            f"with a RoPE base of {theta:g}, "
            f"are no model"
        )
    common = {
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layer_count(header),
        "num_attention_heads": heads,
        "head_dim": header.integer(f"{prefix}.attention.key_length", hidden // heads),
        "rms_norm_eps": header.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(header),
        "max_position_embeddings": header.integer(f"{prefix}.context_length"),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": end_tokens(header),
    }
    if not kind.varies:
        common["intermediate_size"] = header.integer(f"{prefix}.feed_forward_length", 0)
        common["num_key_value_heads"] = _key_heads(header, prefix, heads)
    head = header.integer(f"{prefix}.attention.key_length", hidden // heads)
    rotary = header.integer(f"{prefix}.rope.dimension_count", head)
    if rotary != head and prefix not in _PARTLY_ROTARY:
        raise ModelError(
            f"{header.name}: RoPE rotates {rotary:,} of {counted(head, 'number')} of a head; "
            f"only whole heads "
            "are supported"
        )
    scaling = _rope_scaling(header, prefix)
    if scaling and not kind.scales_rope:
        raise ModelError(
            f"{header.name}: RoPE scaling {scaling['type']!r} is not supported by mlx-lm's "
            f"{kind.model_type}"
        )
    whole = {
        **common,
        **({"rope_scaling": scaling} if scaling else {}),
        **kind.special(header, prefix),
    }
    _check_sizes(header, whole)
    return whole


def layer_count(header: Header) -> int:
    """Return the number of layers, excluding those for multi-token prediction."""
    prefix = str(header.metadata.get("general.architecture"))
    predicting = header.integer(f"{prefix}.nextn_predict_layers", 0)
    layers = header.integer(f"{prefix}.block_count") - predicting
    if layers < 1:
        raise ModelError(f"{header.name}: all {predicting:,} layers are for multi-token prediction")
    return layers


def is_read(header: Header, tensor: str) -> bool:
    """Return whether a tensor is a weight of the model that is loaded.

    RoPE's factors and layers for multi-token prediction are not, nor keys and values of layers that
    use those of others.
    """
    prefix = header.metadata.get("general.architecture")
    predicting, shared = f"{prefix}.nextn_predict_layers", f"{prefix}.{_SHARED_KV}"
    match = _BLOCK.fullmatch(tensor)
    if match is None:
        return tensor not in ROPE_TENSORS
    layers = header.integer(predicting, 0) and layer_count(header)
    if layers and int(match[1]) >= layers:
        return False
    of_keys = match[2] in ("attn_k", "attn_v", "attn_k_norm")
    return not (
        of_keys
        and shared in header.metadata
        and int(match[1]) >= layer_count(header) - header.integer(shared)
    )


def _key_heads(header: Header, prefix: str, heads: int) -> int:
    """Return the number of KV heads of the layers that have any; it must be the same for all."""
    name = f"{prefix}.attention.head_count_kv"
    counts = header.integers(name) if name in header.metadata else [heads]
    positive = {count for count in counts if count}
    if len(positive) != 1:
        raise ModelError(f"{header.name}: {name} is not one integer for all layers with keys")
    return positive.pop()


def _check_sizes(header: Header, config: Config) -> None:
    """Raise ModelError if the config contradicts the size of a tensor."""
    for name, claimed, actual in _claims(header, config):
        if claimed != actual:
            raise ModelError(
                f"{header.name}: its metadata says {claimed:,} {name}, its tensors have {actual:,}"
            )


def _claims(header: Header, config: Config) -> Iterator[tuple[str, int, int]]:
    """Yield the name of a size, its value in the config, and its value in the tensors."""
    layers = {
        int(match[1])
        for name in header.tensors
        if (match := _BLOCK.fullmatch(name)) and is_read(header, name)
    }
    yield "layers", config["num_hidden_layers"], max(layers, default=-1) + 1
    rows, columns = header.tensors["token_embd.weight"].shape
    yield "numbers a token", config["hidden_size"], columns
    yield "tokens", max(rows, len(header.get("tokenizer.ggml.tokens", list, []))), rows
    heads, keys, head = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    for name, axis, claimed in (
        ("attn_q", 0, heads * head),
        ("attn_k", 0, keys * head),
        ("attn_qkv", 0, _joined_rows(config, (heads + 2 * keys) * head)),
        ("ffn_down", 1, int(config.get("intermediate_size_mlp") or config["intermediate_size"])),
        ("ffn_gate_inp", 0, int(config.get("num_experts") or config.get("num_local_experts") or 0)),
    ):
        tensor = header.tensors.get(f"blk.0.{name}.weight")
        if tensor is not None and len(tensor.shape) == 2:
            yield f"numbers of {name}", claimed, tensor.shape[axis]


def _joined_rows(config: Config, of_attention: int) -> int:
    """Return the rows of attn_qkv, which in Qwen 3.5 belongs to recurrent layers."""
    if "linear_num_key_heads" not in config:
        return of_attention
    return int(
        2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        + config["linear_num_value_heads"] * config["linear_value_head_dim"]
    )


def module_of(kind: Architecture, tensor: str) -> str | None:
    """Return mlx-lm's name for a tensor of the file; None if the model has no such weight.

    >>> module_of(ARCHITECTURES["llama"], "blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match = _BLOCK.fullmatch(tensor)
    if match is not None:
        name = "linear_attn.dt" if match[2] == "ssm_dt" else kind.names.get(match[2])
        if name is None:
            return None
        name = _WHOLE_NAMES.get(f"{name}{match[3]}", f"{name}{match[3]}")
        return f"{kind.prefix}model.layers.{match[1]}.{name}"
    stem, _, suffix = tensor.rpartition(".")
    return f"{kind.prefix}{_OUTER[stem]}.{suffix}" if stem in _OUTER else None


def end_tokens(header: Header) -> list[int]:
    """Return the tokens that end an answer, found by metadata and by text, like llama.cpp."""
    texts = header.get("tokenizer.ggml.tokens", list, [])
    named = [
        header.integer(f"tokenizer.ggml.{key}_token_id")
        for key in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        if f"tokenizer.ggml.{key}_token_id" in header.metadata
    ]
    ends = _end_marks(frozenset(texts))
    marks = [token for token, text in enumerate(texts) if text in ends]
    return list(dict.fromkeys([*named, *marks]))


def _end_marks(texts: frozenset[str]) -> frozenset[str]:
    ends = texts & END_MARKS
    if texts.issuperset(("<|return|>", "<|call|>")) or texts.issuperset(("<|calls|>", "<|flush|>")):
        ends -= {"<|end|>"}  # ends a message there, not the answer
    if texts & {"<|tool_response>", "<|plamo:eos|>"}:
        ends -= {"</s>"}  # ordinary text there
    return ends


CONTROL = 3
"""Token type of control tokens, which are not text."""
END_MARKS = frozenset(
    (
        *(
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
            "<|flush|>",
            "<|calls|>",
        ),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]"),
        *("[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
        *("<｜end▁of▁sentence｜>", "[e~[", "<|end_of_turn|>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
"""Texts of tokens that end an answer: ends of turns and texts, separators of code files."""


def _vocabulary(header: Header) -> int:
    """Return the number of rows of the embedding, which may exceed the number of tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.name} has no tensor token_embd.weight of two dimensions")
    return embedding.shape[0]


def _rope_scaling(header: Header, prefix: str) -> Config | None:
    """Return the RoPE scaling, or None; raises ModelError if it is not supported."""
    kind = header.get(f"{prefix}.rope.scaling.type", str, "linear")
    old = header.number(f"{prefix}.rope.scale_linear", 0.0)
    factor = header.number(f"{prefix}.rope.scaling.factor", old) or 1.0
    longest = header.integer(f"{prefix}.context_length")
    original = header.integer(f"{prefix}.rope.scaling.original_context_length", 0) or longest
    attention = header.number(f"{prefix}.rope.scaling.attn_factor", 1.0)
    if not 0 < factor < math.inf or not 0 < attention < math.inf:
        raise ModelError(
            f"{header.name}: invalid RoPE scaling {factor:g}, or attention factor {attention:g}"
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    if kind == "longrope":
        return None  # the factors are in tensors
    if kind != "yarn":
        raise ModelError(f"{header.name}: positions are scaled by {kind!r}, which is not read")
    for name, read in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0)):
        value = header.number(f"{prefix}.rope.scaling.{name}", read)
        if value not in (read, -1.0):  # -1 means the default
            raise ModelError(f"{header.name}: {name} is {value:g}; only {read:g} is supported")
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        key = f"{prefix}.rope.scaling.yarn_{name}"
        if key in header.metadata:
            scaling[name] = header.number(key)
    if attention != 1.0 and factor > 1.0:
        # mlx-lm multiplies by 0.1 * mscale * ln(factor) + 1.
        log = 0.1 * math.log(factor)
        scaling["mscale"] = ((log + 1.0) * attention - 1.0) / log
    return scaling


def _factors(header: Header, name: str) -> list[float]:
    tensor = header.tensors[name]
    if tensor.form.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 12:
        raise ModelError(f"{header.name}: {name} is not a short float32 vector")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return [float(x) for x in np.frombuffer(stream.read(tensor.nbytes), "<f4")]


def _llama(header: Header, prefix: str) -> Config:
    return {"rope_traditional": False, **_llama3_scaling(header, prefix, high=4.0)}


def _llama3_scaling(header: Header, prefix: str, high: float) -> Config:
    """Return Llama 3's RoPE scaling, which the file has as one factor per frequency.

    `high` is its `high_freq_factor`, which the file does not have.
    """
    if "rope_freqs.weight" not in header.tensors:
        return {}
    factors = _factors(header, "rope_freqs.weight")
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors, default=0.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8_192,
    }
    theta = header.number(f"{prefix}.rope.freq_base", 10_000.0)
    ours = llama3_factors(theta, scaling, len(factors)) if min(factors, default=0.0) >= 1 else []
    if not ours or not np.allclose(factors, ours, rtol=1e-3):
        raise ModelError(f"{header.name}: the factors in rope_freqs.weight are not Llama 3's")
    return {"rope_scaling": scaling}


def llama3_factors(theta: float, scaling: Mapping[str, Any], count: int) -> list[float]:
    """Return the factors by which Llama 3 divides each frequency (Meta's `apply_scaling`).

    Args:
        theta: base of the frequencies.
        scaling: `rope_scaling` of the config.
        count: number of frequencies, half of the head size.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = [
        scaling["original_max_position_embeddings"] / (2 * np.pi * theta ** (i / count))
        for i in range(count)
    ]
    smooth = [
        float(turn > high) if turn <= low or turn >= high else (turn - low) / (high - low)
        for turn in turns
    ]
    return [1 / ((1 - share) / scaling["factor"] + share) for share in smooth]


LLAMA4_CHUNK = 8_192
"""Number of tokens in a chunk of Llama 4's local attention, which llama.cpp has as a constant."""
LLAMA4_WITHOUT_NORM = 128
"""Number of experts of the model without norms of queries and keys (Maverick)."""


def _llama4(header: Header, prefix: str) -> Config:
    if "output.weight" not in header.tensors:
        raise ModelError(f"{header.name} has no tensor output.weight, which mlx-lm's llama4 needs")
    experts = header.integer(f"{prefix}.expert_count", 0)
    used = header.integer(f"{prefix}.expert_used_count", 0)
    window = header.integer(f"{prefix}.attention.sliding_window", LLAMA4_CHUNK)
    if used != 1 or not window or layer_count(header) < 4:
        raise ModelError(
            f"{header.name}: Llama 4 with {experts:,} experts, {used:,} of them a token, and "
            f"{counted(layer_count(header), 'layer')} is not supported; only those with 1 of them, "
            f"chunked attention and at least 4 layers are"
        )
    return {
        "attention_bias": _has(header, "attn_q.bias"),
        "attention_chunk_size": LLAMA4_CHUNK,
        "interleave_moe_layer_step": header.integer(f"{prefix}.interleave_moe_layer_step"),
        "intermediate_size": header.integer(f"{prefix}.expert_feed_forward_length"),
        "intermediate_size_mlp": header.integer(f"{prefix}.feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "rope_scaling": None,
        "use_qk_norm": experts != LLAMA4_WITHOUT_NORM,
        **_llama3_scaling(header, prefix, high=1.0),
    }


def _qwen3(header: Header, prefix: str) -> Config:
    return {"head_dim": header.integer(f"{prefix}.attention.key_length")}


def _qwen3moe(header: Header, prefix: str) -> Config:
    return {
        **_qwen3(header, prefix),
        "num_experts": header.integer(f"{prefix}.expert_count"),
        "num_experts_per_tok": header.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": header.integer(f"{prefix}.expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _query_scale(header: Header, prefix: str, large: int) -> int:
    """Return Gemma's `query_pre_attn_scalar`; the model with `large` layers has another rule."""
    head = header.integer(f"{prefix}.attention.key_length")
    if header.integer(f"{prefix}.block_count") != large:
        return head
    heads = header.integer(f"{prefix}.attention.head_count")
    return header.integer(f"{prefix}.embedding_length") // heads


def _gemma2(header: Header, prefix: str) -> Config:
    return {
        "head_dim": header.integer(f"{prefix}.attention.key_length"),
        "attn_logit_softcapping": header.number(f"{prefix}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.number(f"{prefix}.final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(header, prefix, large=46),
    }


def _gemma3(header: Header, prefix: str) -> Config:
    return {
        "head_dim": header.integer(f"{prefix}.attention.key_length"),
        "rope_theta": header.number(f"{prefix}.rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": header.number(f"{prefix}.rope.freq_base_swa", 10_000.0),
        "sliding_window": header.integer(f"{prefix}.attention.sliding_window"),
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": _query_scale(header, prefix, large=62),
    }


def _gemma4(header: Header, prefix: str) -> Config:
    layers = layer_count(header)
    sliding = header.flags(f"{prefix}.attention.sliding_window_pattern", layers)
    shared, first = header.integer(f"{prefix}.{_SHARED_KV}", 0), 0
    if shared < layers:
        first = layers - shared
    narrow, *_, last = widths = header.integers(f"{prefix}.feed_forward_length")[:layers] * 2
    double = last != narrow
    doubled = [narrow * (1 + (double and layer >= first)) for layer in range(layers)]
    counts = header.integers(f"{prefix}.attention.head_count_kv")[:layers]
    keys = [
        {count for count, slides in zip(counts, sliding, strict=True) if slides is kind}
        for kind in (True, False)
    ]
    if not first or widths[:layers] != doubled or any(len(of) != 1 for of in keys):
        raise ModelError(f"{header.name}: its layers differ in other ways than those of Gemma 4")
    (window_keys,), (full_keys,) = keys
    full_head = header.integer(f"{prefix}.attention.key_length")
    inputs = header.integer(f"{prefix}.embedding_length_per_layer_input", 0)
    experts = header.integer(f"{prefix}.expert_count", 0)
    config: Config = {
        "head_dim": header.integer(f"{prefix}.attention.key_length_swa", full_head),
        "global_head_dim": full_head,
        "intermediate_size": narrow,
        "use_double_wide_mlp": double,
        "num_key_value_heads": window_keys,
        "num_global_key_value_heads": full_keys,
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in header.tensors
            for layer in range(first)
            if not sliding[layer]
        ),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "sliding_window": header.integer(f"{prefix}.attention.sliding_window"),
        "final_logit_softcapping": header.number(f"{prefix}.final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": inputs,
        "enable_moe_block": bool(experts),
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": _rotated_share(header, full_head),
                "rope_theta": header.number(f"{prefix}.rope.freq_base", 10_000.0),
                "rope_type": "proportional",
            },
            "sliding_attention": {
                "rope_theta": header.number(f"{prefix}.rope.freq_base_swa", 10_000.0),
                "rope_type": "default",
            },
        },
    }
    if (
        header.integer(f"{prefix}.rope.dimension_count_swa", config["head_dim"])
        != config["head_dim"]
    ):
        raise ModelError(f"{header.name}: RoPE rotates a part of the heads of sliding layers")
    if inputs and (embedding := header.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = embedding.shape[0]
    if experts:
        config["num_experts"] = experts
        config["top_k_experts"] = header.integer(f"{prefix}.expert_used_count")
        config["moe_intermediate_size"] = header.integer(f"{prefix}.expert_feed_forward_length")
    return config


def _rotated_share(header: Header, head: int) -> float:
    """Return the share of a head that RoPE rotates; the factors of the rest are 1e30."""
    name = "rope_freqs.weight"
    factors = _factors(header, name) if name in header.tensors else []
    rotated = factors.count(1.0)
    fixed = [factor for factor in factors[rotated:] if factor >= 1e30]
    if len(factors) != head // 2 or rotated + len(fixed) != len(factors):
        raise ModelError(f"{header.name}: the factors in {name} are not Gemma 4's")
    return 2 * rotated / head


def _phi3(header: Header, prefix: str) -> Config:
    heads = header.integer(f"{prefix}.attention.head_count")
    head = header.integer(f"{prefix}.embedding_length") // heads
    longest = header.integer(f"{prefix}.context_length")
    config: Config = {
        "partial_rotary_factor": header.integer(f"{prefix}.rope.dimension_count", head) / head,
        "original_max_position_embeddings": header.integer(
            f"{prefix}.rope.scaling.original_context_length", longest
        ),
    }
    if "rope_factors_long.weight" in header.tensors:
        _check_attention_factor(
            header, prefix, longest / config["original_max_position_embeddings"]
        )
        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": _factors(header, "rope_factors_long.weight"),
            "short_factor": _factors(header, "rope_factors_short.weight"),
        }
    return config


def _check_attention_factor(header: Header, prefix: str, ratio: float) -> None:
    """Raise ModelError if the file's attention factor differs from mlx-lm's."""
    key = f"{prefix}.rope.scaling.attn_factor"
    original = header.integer(f"{prefix}.rope.scaling.original_context_length", 0)
    computed = 1.0
    if ratio > 1.0 and original > 1:
        computed = math.sqrt(1 + math.log(ratio) / math.log(original))
    value = header.number(key, computed)
    if not math.isclose(value, computed, rel_tol=1e-3):
        raise ModelError(f"{header.name}: {key} is {value:g}; only {computed:g} is supported")


def _has(header: Header, tensor: str) -> bool:
    return any(name.endswith(f".{tensor}") for name in header.tensors)


def _granite(header: Header, prefix: str) -> Config:
    hidden = header.integer(f"{prefix}.embedding_length")
    head = hidden // header.integer(f"{prefix}.attention.head_count")
    return {
        "attention_multiplier": header.number(f"{prefix}.attention.scale", head**-0.5),
        "embedding_multiplier": header.number(f"{prefix}.embedding_scale", 1.0),
        "residual_multiplier": header.number(f"{prefix}.residual_scale", 1.0),
        "logits_scaling": header.number(f"{prefix}.logit_scale", 1.0),
        "attention_bias": _has(header, "attn_q.bias"),
        "mlp_bias": _has(header, "ffn_up.bias"),
    }


def _glm4(header: Header, prefix: str) -> Config:
    if "output.weight" not in header.tensors:
        raise ModelError(f"{header.name} has no tensor output.weight, which mlx-lm's glm4 needs")
    if f"{prefix}.rope.dimension_sections" in header.metadata:
        raise ModelError(f"{header.name}: positions with several axes (GLM-4V) are not supported")
    heads = header.integer(f"{prefix}.attention.head_count")
    head = header.integer(
        f"{prefix}.attention.key_length", header.integer(f"{prefix}.embedding_length") // heads
    )
    return {
        "attention_bias": _has(header, "attn_q.bias"),
        "partial_rotary_factor": header.integer(f"{prefix}.rope.dimension_count", head) / head,
        "rope_traditional": True,
    }


def _lfm2(header: Header, prefix: str) -> Config:
    if "output.weight" in header.tensors:
        raise ModelError(f"{header.name} has a tensor output.weight, unlike mlx-lm's lfm2")
    counts = header.integers(f"{prefix}.attention.head_count_kv")
    hidden = header.integer(f"{prefix}.embedding_length")
    return {
        "norm_eps": header.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "conv_bias": _has(header, "shortconv.conv.bias"),
        "conv_L_cache": header.integer(f"{prefix}.shortconv.l_cache"),
        "block_dim": hidden,
        "block_ff_dim": header.integer(f"{prefix}.feed_forward_length"),
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in counts],
    }


def _qwen35(header: Header, prefix: str) -> Config:
    head = header.integer(f"{prefix}.attention.key_length")
    values = header.integer(f"{prefix}.ssm.time_step_rank")
    inner, keys = (
        header.integer(f"{prefix}.ssm.inner_size"),
        header.integer(f"{prefix}.ssm.group_count"),
    )
    if not values or not keys or values % keys or inner % values:
        raise ModelError(
            f"{header.name}: {values:,} value heads of {inner:,} numbers on {keys:,} key heads are "
            f"no model"
        )
    return {
        "linear_num_value_heads": values,
        "linear_num_key_heads": keys,
        "linear_key_head_dim": header.integer(f"{prefix}.ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": header.integer(f"{prefix}.ssm.conv_kernel"),
        "full_attention_interval": header.integer(f"{prefix}.full_attention_interval", 4),
        "rope_parameters": {
            "type": "default",
            "rope_theta": header.number(f"{prefix}.rope.freq_base", 10_000.0),
            "partial_rotary_factor": header.integer(f"{prefix}.rope.dimension_count", head) / head,
        },
    }


def _qwen35moe(header: Header, prefix: str) -> Config:
    return {
        **_qwen35(header, prefix),
        **_qwen3moe(header, prefix),
        "shared_expert_intermediate_size": header.integer(
            f"{prefix}.expert_shared_feed_forward_length"
        ),
    }


def _gpt_oss(header: Header, prefix: str) -> Config:
    return {
        "num_local_experts": header.integer(f"{prefix}.expert_count"),
        "num_experts_per_tok": header.integer(f"{prefix}.expert_used_count"),
        "intermediate_size": header.integer(f"{prefix}.expert_feed_forward_length"),
        "sliding_window": header.integer(f"{prefix}.attention.sliding_window"),
        "layer_types": [
            "full_attention" if number % 2 else "sliding_attention"
            for number in range(layer_count(header))
        ],
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, interleaved=True),
    "llama4": Architecture(
        "llama4", _llama4, _LLAMA4, prefix="language_model.", scales_rope=False, nested=True
    ),
    "qwen2": Architecture("qwen2", lambda header, prefix: {}),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe, _EXPERTS),
    "gemma2": Architecture("gemma2", _gemma2, _GEMMA, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, _GEMMA, norm_offset=1.0),
    "gemma4": Architecture("gemma4_text", _gemma4, _GEMMA4, varies=True, scales_rope=False),
    "phi3": Architecture("phi3", _phi3, _PHI),
    "granite": Architecture("granite", _granite, interleaved=True),
    "glm4": Architecture("glm4", _glm4, _GLM4, scales_rope=False),
    "lfm2": Architecture("lfm2", _lfm2, _LFM2, scales_rope=False),
    "qwen35": Architecture(
        "qwen3_5", _qwen35, _QWEN35, prefix="language_model.", scales_rope=False
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe", _qwen35moe, _QWEN35, prefix="language_model.", scales_rope=False
    ),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _GPT_OSS),
}
"""Supported architectures by their name in the file; llama includes Mistral and SmolLM."""
