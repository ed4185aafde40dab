"""Layers of each model type and their KV, as in mlx-lm's models.

To add a family, write a function that returns the layers of a config, and list it in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.errors import ModelError
from penstock.memory.spec import DTYPE_BYTES, LayerKind, LayerSpec


class Config:
    def __init__(self, values: Mapping[str, object], name: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.name = name

    def integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            if key in self.values:
                value = self.values[key]
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ModelError(f"{self.name}: {key} is {value!r}, not a count")
                return value
        if default is None:
            raise ModelError(f"{self.name}: the config has no {keys[0]}")
        return default

    def maybe(self, key: str) -> int | None:
        return self.integer(key) if key in self.values else None

    def positive(self, *keys: str) -> int:
        value = self.integer(*keys)
        if value == 0:
            raise ModelError(f"{self.name}: {keys[0]} is 0")
        return value

    def strings(self, key: str) -> list[str] | None:
        """Return a list of strings, None if missing; a single string is split into characters."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, str)) or not value:
            raise ModelError(f"{self.name}: {key} is {value!r}, not a list of names")
        return [str(item) for item in value]

    @property
    def layer_count(self) -> int:
        return self.positive("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def attention_heads(self) -> int:
        return self.positive("num_attention_heads", "n_head", "n_heads", "num_heads")

    @property
    def kv_heads(self) -> int:
        if "num_key_value_heads" in self.values:
            return self.positive("num_key_value_heads")
        return self.attention_heads

    @property
    def hidden(self) -> int:
        return self.positive("hidden_size", "n_embd", "d_model", "dim")

    @property
    def head_dim(self) -> int:
        return self.maybe("head_dim") or self.hidden // self.attention_heads

    @property
    def scalar_bytes(self) -> int:
        return DTYPE_BYTES[str(self.values["dtype"])]

    def full(self, **changes: int | None) -> LayerSpec:
        return self._attention("full", None, **changes)

    def window(self, window_tokens: int, **changes: int | None) -> LayerSpec:
        return self._attention("window", window_tokens, **changes)

    def _attention(
        self,
        kind: LayerKind,
        window_tokens: int | None,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        state_bytes: int | None = 0,
    ) -> LayerSpec:
        dim = head_dim or self.head_dim
        return LayerSpec(kind, kv_heads or self.kv_heads, dim, dim, window_tokens, state_bytes)

    def recurrent(self, plain_numbers: int, float32_numbers: int = 0) -> LayerSpec:
        """Return a recurrent layer, given its state's sizes in the model's dtype and in float32."""
        return LayerSpec("recurrent", state_bytes=self.state(plain_numbers, float32_numbers))

    def state(self, plain_numbers: int, float32_numbers: int) -> int:
        return plain_numbers * self.scalar_bytes + float32_numbers * 4


def _plain(c: Config) -> list[LayerSpec]:
    return [c.full()] * c.layer_count


def _derived_head_dim(c: Config) -> list[LayerSpec]:
    return [c.full(head_dim=c.hidden // c.attention_heads)] * c.layer_count


def _layer_types(c: Config) -> list[LayerSpec]:
    """Return layers by `layer_types`; without it, all layers are full (llama, ministral3)."""
    types = c.strings("layer_types") or ["full_attention"] * c.layer_count
    return [
        c.window(c.positive("sliding_window")) if kind == "sliding_attention" else c.full()
        for kind in types
    ]


def _pattern(c: Config) -> list[LayerSpec]:
    """Return sliding-window layers, every n-th one full, or a repeated pattern such as "LLLG"."""
    pattern = c.values.get("sliding_window_pattern")
    if pattern is None:
        return _plain(c)
    if isinstance(pattern, str):
        slides = [letter == "L" for letter in pattern]
    else:
        slides = [True] * (c.positive("sliding_window_pattern") - 1) + [False]
    return [
        c.window(c.positive("sliding_window")) if slides[i % len(slides)] else c.full()
        for i in range(c.layer_count)
    ]


def _alternating(period: int) -> Callable[[Config], list[LayerSpec]]:
    """Return a rule that uses `layer_types`, or makes each `period`-th layer full."""

    def read(c: Config) -> list[LayerSpec]:
        if "layer_types" in c.values:
            return _layer_types(c)
        c.values.setdefault("sliding_window_pattern", period)
        return _pattern(c)

    return read


def _shared_kv(c: Config) -> list[LayerSpec]:
    """Gemma 3n and 4: the last layers share the KV of earlier ones and hold none."""
    types = c.strings("layer_types")
    if types is None:
        period = c.positive("sliding_window_pattern")
        types = ["sliding_attention"] * (period - 1) + ["full_attention"]
        types *= c.layer_count // period + 1
    shared_heads = c.values.get("attention_k_eq_v")
    full = c.full(
        head_dim=c.maybe("global_head_dim"),
        kv_heads=c.maybe("num_global_key_value_heads") if shared_heads else None,
    )
    window = c.window(c.positive("sliding_window"))
    count = c.layer_count - c.integer("num_kv_shared_layers", default=0)
    return [full if kind == "full_attention" else window for kind in types[:count]]


def _latent(c: Config) -> list[LayerSpec]:
    """Multi-head latent attention cached as latents: latent as keys, rotary part as values."""
    layer = LayerSpec("full", 1, c.positive("kv_lora_rank"), c.positive("qk_rope_head_dim"))
    return [layer] * c.layer_count


def _index_kinds(config: Mapping[str, object]) -> list[bool] | None:
    """Return for each listed layer whether it has a sparse-attention index of its own.

    None if the config lists no layers.
    """
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if not isinstance(kinds, str | list):
        return None
    return [kind not in ("shared", "S") for kind in kinds]


def _index_period(config: Mapping[str, object]) -> int:
    """Return how many layers share an index; 1 if each has its own."""
    period = config.get("index_topk_freq")
    return max(period, 1) if isinstance(period, int) else 1


def shares_index(config: Mapping[str, object]) -> bool:
    """Return whether some layers reuse the sparse-attention index of an earlier one (GLM 5.2).

    >>> shares_index({"indexer_types": ["full", "shared"]}), shares_index({"index_topk_freq": 1})
    (True, False)
    """
    kinds = _index_kinds(config)
    return _index_period(config) > 1 if kinds is None else not all(kinds)


def _layers_with_index(c: Config) -> list[bool]:
    """Return for each layer whether it has a sparse-attention index of its own."""
    kinds, count = _index_kinds(c.values), c.layer_count
    if kinds is not None:
        return kinds[:count] + [True] * (count - len(kinds))
    period, first = _index_period(c.values), c.integer("index_skip_topk_offset", default=2)
    return [max(i - first + 1, 0) % period == 0 for i in range(count)]


def _indexed_latent(c: Config) -> list[LayerSpec]:
    """DeepSeek V3.2 and GLM 5: latents and index keys.

    mlx-lm's cache stores the index keys twice; mlx-vlm's, used if layers share an index, once.
    """
    index, indexed = c.positive("index_head_dim"), _layers_with_index(c)
    latent, rope = c.positive("kv_lora_rank"), c.positive("qk_rope_head_dim")
    whole = LayerSpec("full", 1, latent + index, rope + (index if all(indexed) else 0))
    return [whole if own else LayerSpec("full", 1, latent, rope) for own in indexed]


def _unfolded_latent(c: Config) -> list[LayerSpec]:
    """Multi-head latent attention that mlx-lm expands to all heads before caching."""
    key_dim = c.positive("qk_nope_head_dim") + c.positive("qk_rope_head_dim")
    layer = LayerSpec("full", c.attention_heads, key_dim, c.positive("v_head_dim"))
    return [layer] * c.layer_count


def _linear_attention(c: Config) -> LayerSpec:
    """State of Qwen's linear attention: convolution inputs, a float32 matrix per value head."""
    key_dim, value_dim = c.positive("linear_key_head_dim"), c.positive("linear_value_head_dim")
    values = c.positive("linear_num_value_heads") * value_dim
    channels = 2 * c.positive("linear_num_key_heads") * key_dim + values
    return c.recurrent((c.positive("linear_conv_kernel_dim") - 1) * channels, values * key_dim)


def _gated_delta(c: Config) -> list[LayerSpec]:
    """Qwen3-Next and 3.5: linear attention, and full attention every few layers."""
    linear, period = _linear_attention(c), c.positive("full_attention_interval")
    return [linear if (i + 1) % period else c.full() for i in range(c.layer_count)]


def _qwen4(c: Config) -> list[LayerSpec]:
    """Qwen4: Qwen3.5 with index keys in attention layers, and n-gram embeddings in a few others.

    An n-gram layer also keeps the last inputs of its convolution, and the last n - 1 tokens.
    """
    keys = c.kv_heads * c.head_dim
    full = LayerSpec("full", 1, keys + c.positive("indexer_head_dim"), keys)
    linear, ngram = _linear_attention(c), c.positive("ngram_size")
    inputs = (c.positive("ple_conv_kernel_size") - 1) * ngram * c.positive("hc_count") * c.hidden
    more = c.state(inputs, 0) + 8 * (ngram - 1)
    embeds = replace(linear, state_bytes=(linear.state_bytes or 0) + more)
    types, period = c.strings("layer_types"), c.positive("full_attention_interval")
    if types is None:
        types = ["linear_attention" if (i + 1) % period else "" for i in range(c.layer_count)]
    layers = [linear if kind == "linear_attention" else full for kind in types]
    numbers = c.values.get("ple_layer_ids")
    numbers = numbers if isinstance(numbers, list) else []
    return [embeds if i in numbers else layer for i, layer in enumerate(layers, 1)]


def _mamba2_state(
    c: Config, *, heads: int, head_dim: int, states: int, groups: int, kernel: int
) -> int:
    channels = heads * head_dim + 2 * groups * states
    return c.state((kernel - 1) * channels, heads * head_dim * states)


def _mamba(c: Config) -> list[LayerSpec]:
    """Mamba 1 states, all in float32.

    Model files store A_log in float32, so mlx-lm's activations are float32 after the first layer.
    For a model without float32 weights, this is twice the actual size.
    """
    inner = c.positive("intermediate_size", "d_inner")
    kernel, states = c.positive("conv_kernel", "d_conv"), c.positive("state_size", "d_state")
    return [c.recurrent(0, inner * (kernel - 1 + states))] * c.layer_count


def _mamba2(c: Config) -> list[LayerSpec]:
    state = _mamba2_state(
        c,
        heads=c.positive("num_heads"),
        head_dim=c.positive("head_dim"),
        states=c.positive("ssm_state_size", "state_size"),
        groups=c.positive("n_groups"),
        kernel=c.positive("conv_kernel"),
    )
    return [LayerSpec("recurrent", state_bytes=state)] * c.layer_count


def _mamba_keys_state(c: Config) -> int:
    return _mamba2_state(
        c,
        heads=c.positive("mamba_n_heads"),
        head_dim=c.positive("mamba_d_head"),
        states=c.positive("mamba_d_state"),
        groups=c.positive("mamba_n_groups"),
        kernel=c.positive("mamba_d_conv"),
    )


def _falcon_h1(c: Config) -> list[LayerSpec]:
    """Falcon H1: every layer has full attention and a Mamba-2 state."""
    return [c.full(state_bytes=_mamba_keys_state(c))] * c.layer_count


def _granite_hybrid(c: Config) -> list[LayerSpec]:
    types = c.strings("layer_types") or ["attention"] * c.layer_count
    full = c.full(head_dim=c.hidden // c.attention_heads)
    return [
        LayerSpec("recurrent", state_bytes=_mamba_keys_state(c)) if kind == "mamba" else full
        for kind in types
    ]


def _nemotron_h(c: Config) -> list[LayerSpec]:
    """Nemotron H: M is Mamba-2, * is attention; other layers (-, E) have no state."""
    letters = {"full_attention": "*", "attention": "*"}
    letters |= dict.fromkeys(("linear_attention", "mamba", "conv"), "M")
    words = c.strings("layers_block_type") or c.strings("layer_types") or []
    blocks = c.strings("hybrid_override_pattern") or [letters.get(word, "-") for word in words]
    if not blocks:
        raise ModelError(f"{c.name}: the config has no hybrid_override_pattern")
    state = _mamba2_state(
        c,
        heads=c.positive("mamba_num_heads"),
        head_dim=c.positive("mamba_head_dim"),
        states=c.positive("ssm_state_size"),
        groups=c.positive("n_groups"),
        kernel=c.positive("conv_kernel"),
    )
    mamba = LayerSpec("recurrent", state_bytes=state)
    return [mamba if block == "M" else c.full() for block in blocks if block in "M*"]


def _jamba(c: Config) -> list[LayerSpec]:
    """Jamba: Mamba 1 with state in the model's dtype, and attention layers in between."""
    types = c.strings("layers_block_type")
    if types is None:
        period, offset = c.positive("attn_layer_period"), c.integer("attn_layer_offset")
        types = ["attention" if i % period == offset else "mamba" for i in range(c.layer_count)]
    inner = c.positive("mamba_expand") * c.hidden
    mamba = c.recurrent(inner * (c.positive("mamba_d_conv") - 1 + c.positive("mamba_d_state")))
    full = c.full(head_dim=c.hidden // c.attention_heads)
    return [full if kind == "attention" else mamba for kind in types]


def _lfm2(c: Config) -> list[LayerSpec]:
    """LFM2: short convolutions over the hidden size, and attention layers in between."""
    full_at = c.values.get("full_attn_idxs")
    if not isinstance(full_at, list):
        types = c.strings("layer_types") or []
        full_at = [i for i, kind in enumerate(types) if kind == "full_attention"]
    convolution = c.recurrent((c.positive("conv_L_cache") - 1) * c.hidden)
    full = c.full(head_dim=c.hidden // c.attention_heads)
    return [full if i in full_at else convolution for i in range(c.layer_count)]


def unknown(c: Config) -> list[LayerSpec]:
    """Return layers of a model type without an entry, as an upper bound where possible.

    Every attention layer counts as full, even if it has a window in mlx-lm. Layers that
    `layer_types` names as something other than attention get a state of unknown size.
    """
    if "kv_lora_rank" in c.values and "v_head_dim" in c.values:
        return _unfolded_latent(c)
    types = c.strings("layer_types") or ["attention"] * c.layer_count
    return [
        c.full()
        if "attention" in kind and "linear" not in kind
        else LayerSpec("recurrent", state_bytes=None)
        for kind in types
    ]


@dataclass(frozen=True, slots=True)
class Family:
    """Rule for the layers of a model type, and default values of its config.

    `gated_mlp`: the model has gated MLPs (dense or experts), so weights can be counted.
    """

    read: Callable[[Config], list[LayerSpec]]
    assumed: Mapping[str, object]
    gated_mlp: bool = False


def _family(
    read: Callable[[Config], list[LayerSpec]], *, gated_mlp: bool = False, **assumed: object
) -> Family:
    return Family(read, assumed, gated_mlp)


_LLAMA = _family(_layer_types, gated_mlp=True)
_PLAIN = _family(_plain, gated_mlp=True)
_DERIVED = _family(_derived_head_dim, gated_mlp=True)
_LATENT = _family(_latent)
_GATED_DELTA = _family(_gated_delta, full_attention_interval=4)
_QWEN4 = _family(
    _qwen4,
    full_attention_interval=4,
    hc_count=4,
    ngram_size=3,
    ple_conv_kernel_size=4,
    indexer_head_dim=128,
)
_GEMMA3 = {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
_GEMMA4 = _family(
    _shared_kv, num_hidden_layers=35, hidden_size=1536, num_attention_heads=8, head_dim=256,
    global_head_dim=512, num_key_value_heads=1, num_kv_shared_layers=20, sliding_window=512,
    sliding_window_pattern=5,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "iquestcoder", "xverse"), _LLAMA),
    **dict.fromkeys(("qwen3", "qwen3_moe", "seed_oss", "glm4", "gemma", "gemma2"), _PLAIN),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text", "smollm3", "olmo2"), _PLAIN),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "phi3", "granite"), _DERIVED),
    "mixtral": _family(_derived_head_dim, gated_mlp=True, tie_word_embeddings=False),
    **dict.fromkeys(("qwen2_moe", "phi", "phimoe", "starcoder2"), _family(_derived_head_dim)),
    "gemma3": _family(
        _pattern, gated_mlp=True, num_attention_heads=8, num_key_value_heads=4, **_GEMMA3
    ),
    "gemma3_text": _family(
        _pattern, gated_mlp=True, num_attention_heads=4, num_key_value_heads=1, **_GEMMA3
    ),
    "gemma3n": _family(_shared_kv),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), _GEMMA4),
    "cohere2": _family(
        _pattern, gated_mlp=True, head_dim=128, sliding_window=4096, sliding_window_pattern=4
    ),
    "exaone4": _family(_pattern, gated_mlp=True),
    "gpt_oss": _family(_alternating(2), head_dim=64, sliding_window=128),
    "olmo3": _family(_alternating(4), gated_mlp=True, tie_word_embeddings=False),
    "deepseek_v2": _family(_unfolded_latent),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "joyai_llm_flash", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _family(_indexed_latent)),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), _GATED_DELTA),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTA),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QWEN4),
    **dict.fromkeys(("mamba", "falcon_mamba"), _family(_mamba)),
    "mamba2": _family(_mamba2),
    "falcon_h1": _family(_falcon_h1),
    "granitemoehybrid": _family(_granite_hybrid),
    "nemotron_h": _family(_nemotron_h),
    "jamba": _family(_jamba),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _family(_lfm2)),
}
