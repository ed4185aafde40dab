"""Tiny random models of every architecture of mlx-lm, built from its own argument classes.

A model's arguments come from the fields of its `ModelArgs`: rules read a field's name, and take
the first pattern that fits. So a family that a later mlx-lm adds mostly works by itself, and
what it does not say in its names stands in a table of exceptions.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache

LAYERS = 4
WIDTH = 64
HEADS = 4
VOCABULARY_TOKENS = 96
WINDOW = 12

PACKAGE = mlx_lm.models.__name__


class Unbuildable(Exception):
    """A family that cannot run here, and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why


# ---- which there are


@functools.cache
def families() -> list[str]:
    """Return the modules of mlx-lm that have a model and its arguments, by name.

    Their text is read, not imported: one of them ends the process where it misses a package.
    """
    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    return sorted(path.stem for path in files if _classes(path) >= {"Model", "ModelArgs"})


def _classes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {found.name for found in tree.body if isinstance(found, ast.ClassDef)}


def _module(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


# ---- the value of a field


DEFAULT = object()
"""A rule's value that leaves a field's default; one without is what its type says."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The family, and the argument class of a field."""

    family: str
    args: type
    model: type
    window: int = WINDOW
    package: str = PACKAGE
    exceptions: Mapping[tuple[str, str], Any] = dataclasses.field(
        default_factory=lambda: EXCEPTIONS
    )

    @property
    def modules(self) -> tuple[str, ...]:
        """The family and its argument modules, as in the exceptions."""
        written = [base.__module__ for base in self.args.__mro__]
        prefix = self.package + "."
        return (self.family, *(m.removeprefix(prefix) for m in written if m.startswith(prefix)))

    @property
    def source(self) -> str:
        """The source of the modules of the arguments and the model."""
        classes = (*self.args.__mro__, *self.model.__mro__)
        modules = {base.__module__: None for base in classes}
        written = [sys.modules[name] for name in modules if name.startswith(self.package)]
        return "".join(map(inspect.getsource, written))


class Asked(dict[str, Any]):
    """A config section without a class: any requested key exists."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    def __missing__(self, key: str) -> Any:
        return _value(self.place, key, None)


def _alternating(*values: Any) -> list[Any]:
    return [values[i % len(values)] for i in range(LAYERS)]


def _layer_types(place: Place) -> Any:
    """Alternate between the layer kinds mentioned in the family's source."""
    source = place.source
    kinds = ["conv_mixer", "recurrent", "mamba", "linear_attention", "sliding_attention"]
    found = [kind for kind in kinds if f'"{kind}"' in source]
    if '"full_attention"' in source:
        # A family that asks for this one only has another kind, whatever that is called.
        return _alternating(*(found or ["other"]), "full_attention")
    if not found:
        return DEFAULT
    return _alternating(*found, "attention" if '"attention"' in source else "full_attention")


def _mlp_layer_types(place: Place) -> Any:
    kinds = [kind for kind in ("dense", "sparse") if f'"{kind}"' in place.source]
    return _alternating(*kinds) if kinds else DEFAULT


def _rope_parameters(place: Place) -> Any:
    """Return RoPE parameters for all layers, and per layer kind, as newer configs have."""
    common = {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "type": "default",
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1,
    }
    return {**common, "sliding_attention": common, "full_attention": common}


def _text_config(place: Place) -> dict[str, Any]:
    return values(dataclasses.replace(place, args=_text_args(place.family)))


def _text_args(family: str) -> type:
    """Return the arguments of the language model in a multimodal model."""
    for base in _module(family).Model.__mro__:
        scope = vars(sys.modules[base.__module__])
        for name, found in scope.items():
            if re.match(r"Text\w*(Args|Config)$", name) and dataclasses.is_dataclass(found):
                return found
        for found in scope.values():
            if inspect.ismodule(found) and "text_config" not in _fields(found):
                args = getattr(found, "ModelArgs", None)
                if isinstance(args, type):
                    return args
    raise Unbuildable(family, "it does not say which arguments its text model has")


def _fields(module: Any) -> set[str]:
    args = getattr(module, "ModelArgs", None)
    return {field.name for field in dataclasses.fields(args)} if args else set()


RULES: tuple[tuple[str, Any], ...] = (
    # sections, and what layers are
    (r"text_config", _text_config),
    (r"(linear_attn|attn|ffn)_config", Asked),
    (r"rope_parameters", _rope_parameters),
    (r"_?(layer|block)_types|layers_block_type", _layer_types),
    (r"mlp_layer_types", _mlp_layer_types),
    (r"hybrid_override_pattern", lambda place: list("M*E-M*")),
    (r"hybrid_layer_pattern", _alternating(1, 0)),
    (r"sliding_window_layers|kda_layers", [1, 3]),
    (r"full_attn_layers", [2, 4]),
    (r"is_moe_layer", _alternating(False, True)),
    (r"mlp_only_layers", [0]),
    (r"no_rope_layers", _alternating(1, 0)),
    (r"layer_rope_theta", _alternating(10000.0, 0.0)),
    (r"use_cla", True),
    # how many, how often
    (r"num_hidden_layers|num_layers|n_layers?|num_transformer_layers", LAYERS),
    (r"num_kv_(shared|reuse)_layers", 2),
    (r"num_dense_layers|first_k_dense_replace|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers", 0),
    (r"\w+_(group_size|interval|period|every_n_layers|share_factor)|loop_num|num_loops", 2),
    (r"interleave_moe_layer_step|mamba_step|attn_res_block_size|altup_num_inputs", 2),
    (r"moe_layer_freq|decoder_sparse_step|moe_layer_interval|(attn|expert)_layer_offset", 1),
    (r"sliding_window_pattern", 2),
    # heads
    (r"n_heads_in_group|n_shared_head|\w*(kv_heads|key_value_heads|attention_groups)", HEADS // 2),
    (r"kv_n_heads|linear_num_key_heads|index_n_heads|(mamba_)?n_groups|group_norm_size", 2),
    (r"\w*num_(attention_|query_|value_)?heads(_per_layer)?|(mamba_)?n_heads?", HEADS),
    # sizes within a head; keys, values and compressed keys differ wherever they can
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"v_head_dim|swa_v_head_dim", 12),
    (r"linear_value_head_dim", 24),
    (r"global_head_dim", 32),
    (r"\w*head_dim|mamba_d_head|kv_channels|hidden_size_per_head", WIDTH // HEADS),
    (r"query_pre_attn_scalar", WIDTH / HEADS),
    (r"qk_head_dim", DEFAULT),
    (r"kv_lora_rank", 32),
    (r"q_lora_rank", 24),
    (r"o_lora_rank", 16),
    (r"o_groups", 2),
    (r"partial_rotary_factors?|rotary_pct", 0.5),
    # windows, and what is picked from the past
    (
        r"(attention_|loop_)?(sliding_)?window(_size)?|attention_chunk_size",
        lambda place: place.window,
    ),
    (r"index_topk|candidate_topk_blocks", 8),
    (r"index_topk_blocks|candidate_block_size", 2),
    (r"index_block_size", 4),
    (r"blocksparse_block_size", 32),
    (r"blocksparse_num_local_blocks", 1),
    (r"blocksparse_vert_stride", 2),
    # recurrent layers
    (r"mamba_d_ssm", WIDTH),
    (r"\w*state_size|mamba_d_state", 16),
    (r"mamba_d_conv|conv_kernel|conv1d_width|conv_L_cache|\w*conv_kernel_(size|dim)", 4),
    (r"mamba_expand", 2),
    (r"mamba_chunk_size", 8),
    (r"time_step_rank|\w+_low_rank_dim|laurel_rank", 8),
    (r"time_step_limit", (0.001, 100.0)),
    # experts
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|zero_expert_num", 2),
    (r"(moe_)?n(um)?_shared_experts?", 1),
    (r"(moe_)?(num|n_routed|num_local)_experts", 4),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"topk_method", "noaux_tc"),
    (r"scoring_func|score_func(tion)?", "sigmoid"),
    (r"zero_expert_type", "identity"),
    (r"norm_topk_prob|mla_scale_\w+", True),
    (r"routed_scaling_factor|ffn_multipliers", 1.5),
    # widths
    (r"routed_expert_hidden_size|moe_hidden_size|moe_latent_size|share_expert_dim", 32),
    (r"(moe|expert|shared)\w*(intermediate|ffn_hidden)_size", 32),
    (r"\w*hidden_size_per_layer_input", 16),
    (r"(dense_|ff_)?intermediate_size(_mlp)?|(mlp|ffn)_hidden_size|n_inner|block_ff_dim", 96),
    (r"hidden_size|hidden_dim|n_embd|d_model|model_dim|dim_model_base|block_dim", WIDTH),
    (r"block_multiple_of|ffn_dim_divisor", 16),
    (r"vocab_size(_per_layer_input)?|num_vocab|embedding_size", VOCABULARY_TOKENS),
    (r"ngram_vocab_size_ratio", 3),
    (r"\w*max_position_embeddings|model_max_length|n_ctx|n_positions|block_size", 512),
    # numbers that only have to be sound
    (r"\w*(eps|epsilon)", 1e-5),
    (r"\w*theta|rotary_emb_base|rope_local_base_freq", 10000.0),
    (r"\w*(softcapping|soft_cap)|gegelu_limit|clip_qkv|altup_coef_clip", 30.0),
    (r"attention_multiplier", (WIDTH / HEADS) ** -0.5),
    (r"activation_sparsity_pattern", _alternating(0.5, 0.0)),
    (r"altup_active_idx", 0),
    (r"hidden_act(ivation)?", DEFAULT),
)
"""What a field whose whole name fits a pattern is; a class or function is called with the place.

One value stands for a list of as many as there are layers where the field is a list.
"""

EXCEPTIONS: dict[tuple[str, str], Any] = {
    ("baichuan_m1", "conv_window"): 2,  # the only one it has
    # Which layers compress, and which of them read what others have compressed.
    ("deepseek_v41", "compress_ratios"): (0, 4, 4, 4),
    ("deepseek_v41", "kv_source_layer_ids"): (1, 3),
    ("deepseek_v41", "index_source_layer_ids"): (1, 2, 3),
    ("deepseek_v41", "candidate_source_layer_id"): 1,
    # It reads its own without asking whether there is one.
    ("deepseek_v2", "rope_scaling"): {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0},
    ("exaone4", "sliding_window_pattern"): "LG",  # letters, where others have a number
    ("gemma4_text", "rope_parameters"): DEFAULT,  # which differs between kinds of layers
    ("hunyuan", "rope_scaling"): {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    ("llama4", "num_experts_per_tok"): 1,  # the only one it has
    ("minicpm3", "rope_scaling"): {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    ("muse_spark", "num_shared_experts"): 0,  # it refuses them
    ("nemotron-nas", "block_configs"): [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1.0}},
    ],
    # The smallest model with one packed layer; 512 is the narrowest that is rotated.
    ("prism_hadamard_qwen35", "tensor_namespace"): "mlx-vlm-qwen3_5",
    ("prism_hadamard_qwen35", "quantization"): {"bits": 2, "group_size": 128, "mode": "affine"},
    ("prism_hadamard_qwen35", "intermediate_size"): 512,
    ("prism_hadamard_qwen35", "modules"): [
        {
            "path": "model.layers.0.mlp.down_proj",
            "block": 512,
            "embedding": False,
            "dtype": "float16",
        }
    ],
    ("qwen3_5_moe", "num_experts"): 4,
    ("qwen3_5", "num_experts"): 0,  # what tells it from qwen3_5_moe
}
"""What names cannot tell, by module (the family's, or that of the arguments) and field."""


def _value(place: Place, name: str, annotation: Any) -> Any:
    """Return the value of a field; `DEFAULT` if there is no rule."""
    for module in place.modules:
        if (module, name) in place.exceptions:
            return place.exceptions[module, name]
    for pattern, value in RULES:
        if re.fullmatch(pattern, name):
            if callable(value):
                value = value(place)
            if _is_list(annotation) and not isinstance(value, list | tuple):
                return DEFAULT if value is DEFAULT else [value] * LAYERS
            return value
    return DEFAULT


def values(place: Place) -> dict[str, Any]:
    """Return the arguments of a class without those that keep their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(place.args):
        value = _value(place, field.name, field.type)
        if value is not DEFAULT:
            found[field.name] = value
        elif field.default is field.default_factory is dataclasses.MISSING:
            found[field.name] = _by_type(place, field)
    return found


def _by_type(place: Place, field: dataclasses.Field[Any]) -> Any:
    """Return a harmless value for a field without rule or default."""
    if field.name == "model_type":
        return place.family
    harmless = {"bool": False, "float": 1.0, "str": "silu", "Any": None}
    text = _text(field.type)
    if text in harmless:
        return harmless[text]
    if field.name == "rope_scaling" or "None" in text or "Optional" in text:
        return None
    raise Unbuildable(place.family, f"no rule says what {field.name} ({text}) is")


def _text(annotation: Any) -> str:
    text = annotation.__name__ if type(annotation) is type else str(annotation)
    return text.replace("typing.", "")


def _is_list(annotation: Any) -> bool:
    text = _text(annotation).removeprefix("Optional[")
    return text.lower().startswith(("list", "tuple"))


# ---- the model


SEED = 2
QUIET = 0.05
"""Spread of the embeddings: small, so that text comes from layers and does not repeat itself."""
LOUD = 2.0
"""Spread of what a matrix makes of noise: attention picks single tokens."""


def arguments_of(name: str, window: int = WINDOW) -> dict[str, Any]:
    """Return the arguments of a family's `ModelArgs`."""
    module = _module(name)
    return values(Place(name, module.ModelArgs, module.Model, window))


def build(
    name: str,
    *,
    window: int = WINDOW,
    derived: Callable[[type[Any]], type[Any]] = lambda model_class: model_class,
) -> Any:
    """Return a reproducible tiny random float32 model of a family.

    Args:
        name: the family.
        window: tokens that its sliding windows, or chunks of attention, are long.
        derived: returns the class to build for the family's.

    Raises:
        Unbuildable: it cannot be made here, or cannot run here.
    """
    try:
        module = _module(name)
    except (ImportError, SystemExit) as error:
        raise Unbuildable(name, f"importing it ends in {error!r}, for want of a package") from error
    mx.random.seed(zlib.crc32(f"{SEED} {name}".encode()))
    arguments = arguments_of(name, window)
    # A boundary: what a family does with arguments that do not suit it, or with a device that
    # does not have its kernels, is its own affair.
    try:
        model = derived(module.Model)(module.ModelArgs(**arguments))
        silence_few(model)
        randomize(model)
        model.eval()
        mx.eval(model.parameters())
        with uncompiled():
            mx.eval(model(mx.array([[1]]), cache=make_prompt_cache(model)))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        kernel = "metal" in text.lower() or "kernel" in text.lower()
        raise Unbuildable(name, f"it needs a GPU kernel ({text})" if kernel else text) from error
    return model


def silence_few(model: Any) -> None:
    """Let phi3small silence a token that there is.

    It silences tokens of its own vocabulary by number, and does not look how large the vocabulary
    is: beyond the end it writes into memory of others.
    """
    if hasattr(model, "_dummy_tokenizer_ids"):
        model._dummy_tokenizer_ids = mx.array([VOCABULARY_TOKENS - 1])


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run functions that mlx-lm compiles without compiling them.

    On a CPU that has not done it before, compiling takes far longer than all these models: about
    20 s of processor time for one step of each family.
    """
    mx.disable_compile()
    try:
        yield
    finally:
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()


def randomize(model: nn.Module) -> None:
    """Draw all weights again in float32, since many are initialized to zero."""
    embeddings = {path for path, part in model.named_modules() if isinstance(part, nn.Embedding)}

    def draw(path: str, weights: mx.array) -> mx.array:
        if weights.dtype == mx.int64:
            return weights  # a table, not codes
        if not mx.issubdtype(weights.dtype, mx.floating):
            top = mx.iinfo(weights.dtype).max
            return mx.random.randint(0, min(top, 2**31 - 1), weights.shape).astype(weights.dtype)
        if path.endswith(".signs"):
            return weights.astype(mx.float32)
        noise = mx.random.normal(weights.shape)
        if path.removesuffix(".weight") in embeddings:
            return QUIET * noise
        if path.endswith("weight") and weights.ndim >= 2:
            shape = weights.shape[1:] if "conv" in path else weights.shape[-1:]
            inputs = 1
            for size in shape:
                inputs *= size
            return LOUD * noise / inputs**0.5
        # Norms, biases, decays: near what they start as.
        return weights.astype(mx.float32) + (0.3 if weights.ndim >= 2 else 0.1) * noise

    model.update(tree_map_with_path(draw, model.parameters()))


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    key = mx.random.key(1_000 * seed + tokens)
    found: list[int] = mx.random.randint(2, VOCABULARY_TOKENS, (tokens,), key=key).tolist()
    return found


def plain_greedy(
    model: Any, prompt: Sequence[int], count: int, *, cuts: Sequence[int] = ()
) -> tuple[list[int], mx.array]:
    """Generate greedily on mlx-lm's own caches.

    Args:
        model: a family's.
        prompt: read in one chunk, or in several.
        count: tokens to generate.
        cuts: where in the prompt chunks end.

    Returns:
        The tokens, and the logits that each was chosen by, (count, vocabulary).
    """
    caches = make_prompt_cache(model)
    for chunk in _pieces(prompt, cuts):
        logits = model(mx.array([chunk]), cache=caches)[0, -1]
        mx.eval(logits)
    tokens: list[int] = []
    found: list[mx.array] = []
    while True:
        found.append(logits)
        tokens.append(int(mx.argmax(logits).item()))
        if len(tokens) == count:
            return tokens, mx.stack(found)
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
        mx.eval(logits)


def anew_greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], mx.array]:
    """Generate greedily, prefilling the whole text for each token; see `plain_greedy`."""
    tokens, found = list(prompt), []
    module = sys.modules[type(getattr(model, "language_model", model)).__module__]
    stepped = getattr(module, "DECODE_BLOCK_SIZE", None)
    if stepped is not None:
        module.DECODE_BLOCK_SIZE = 0  # short texts are read token by token otherwise
    try:
        for _ in range(count):
            logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
            mx.eval(logits)
            found.append(logits)
            tokens.append(int(mx.argmax(logits).item()))
    finally:
        if stepped is not None:
            module.DECODE_BLOCK_SIZE = stepped
    return tokens[len(prompt) :], mx.stack(found)


def _pieces(prompt: Sequence[int], cuts: Sequence[int]) -> Iterator[list[int]]:
    starts = (0, *cuts)
    for start, end in zip(starts, (*cuts, len(prompt)), strict=True):
        yield list(prompt[start:end])
