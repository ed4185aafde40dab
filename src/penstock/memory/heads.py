"""Multi-token heads (MTP) and drafters (DFlash, EAGLE-3) in folders: tensors, types and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import ModelError

LAYER_HEADED = frozenset(
    {"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"}
)
"""Model types whose heads are published as the layer after the last."""
_QWEN3_5 = frozenset({"qwen3_5", "qwen3_5_moe"})
HEADED_BY_SOURCE = {
    "mlx-lm": LAYER_HEADED | _QWEN3_5 | {"mimo", "qwen3_next"},
    "mlx-vlm": _QWEN3_5 | {"glm_moe_dsa", "qwen4_exp"},
}
"""Model types whose heads are read, by the library of the model's classes."""
HEADED_TYPES = frozenset[str]().union(*HEADED_BY_SOURCE.values())
SPLIT_TYPES = {"qwen3_5_mtp": "qwen3", "qwen4_exp_mtp": "qwen4_exp"}
"""Model types of folders that have a head alone, as mlx-vlm splits them off, and the beginning of
the model types that they go with."""
PREFIX = "mtp."
DRAFTER_PREFIX = "drafter."
BLOCK_DRAFTER = "DFlashDraftModel"
"""Class of block drafters in a config."""
TOKEN_OFFSETS = "d2t"
"""Tensor of differences between the model's tokens and those of an EAGLE-3 drafter."""
EAGLE = "Eagle3"
"""End of the names of the classes of EAGLE-3 drafters."""
_UNUSED = re.compile(r"t2d$|embed_tokens\.|verifier_|.*rotary_emb\.inv_freq$")
"""Names of a drafter's tensors that are not loaded; the embeddings are the model's."""
_HEAD = re.compile(r"(?:^|\.)mtp\.(.+)")
_MIMO_HEADS = "model.mtp_layers."
_SHARED = ("embed_tokens.", "shared_head.head.")
"""Parts of a head that repeat those of its model."""


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Sizes of a drafter's decoder layers."""

    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_positions: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DrafterSizes:
        """Read a config; KeyError, TypeError or ValueError if a size is missing or invalid."""
        heads, width = _count(values, "num_attention_heads"), _count(values, "hidden_size")
        rope = values.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        scaling = values.get("rope_scaling") or rope
        return cls(
            width,
            _count(values, "intermediate_size"),
            heads,
            _count({"num_key_value_heads": heads, **values}, "num_key_value_heads"),
            _count(values, "head_dim") if values.get("head_dim") else width // heads,
            _number(values, "rms_norm_eps"),
            _number(rope if "rope_theta" in rope else values, "rope_theta"),
            scaling if isinstance(scaling, dict) and scaling else None,
            _count(values, "max_position_embeddings"),
        )


@dataclass(frozen=True, slots=True)
class BlockDrafterSpec:
    """A block drafter (DFlash); see `models.block_drafter`."""

    sizes: DrafterSizes
    layers: int
    block_tokens: int
    """Number of tokens of a block: the last token of a text, and masks for proposals."""
    mask_token: int
    read_layers: tuple[int, ...]
    """Numbers of the model's layers whose outputs it reads."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockDrafterSpec:
        """Read a config; errors as `DrafterSizes.of`, and ModelError for sliding windows."""
        form = config.get("dflash_config")
        values = {**config, **form} if isinstance(form, dict) else config
        if any(kind != "full_attention" for kind in values.get("layer_types") or []):
            raise ModelError("block drafters with sliding windows are not supported")
        return cls(
            DrafterSizes.of(values),
            _count(values, "num_hidden_layers"),
            _count(values, "block_size", least=2),
            _count(values, "mask_token_id", least=0),
            _layer_numbers(values, "target_layer_ids", first=0),
        )


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """An EAGLE-3 drafter; see `models.eagle`."""

    sizes: DrafterSizes
    vocabulary_tokens: int
    """Number of tokens that it proposes, some of the model's."""
    read_layers: tuple[int, ...] | None
    """Numbers of the model's layers whose outputs it reads; None for an early, a middle and a late
    one."""
    bias: bool
    """Whether the projections of queries, keys and values have a bias."""
    adds_normed: bool
    """Whether attention is added to normed hidden states."""
    norms_states: bool
    """Whether the model's hidden states are normed together."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EagleSpec:
        """Read a config; errors as `DrafterSizes.of`, and ModelError for several layers."""
        inner = config.get("transformer_layer_config")
        values = {**config, **inner} if isinstance(inner, dict) else config
        if _count({"num_hidden_layers": 1, **values}, "num_hidden_layers") != 1:
            raise ModelError("EAGLE-3 drafters with several layers are not supported")
        sizes = DrafterSizes.of(values)
        key = "eagle_aux_hidden_state_layer_ids"
        # A number counts the layers before a state.
        read = None if config.get(key) is None else _layer_numbers(config, key, first=1)
        if (config.get("target_hidden_size") or sizes.width) != sizes.width:
            raise ModelError("EAGLE-3 drafters of another width than their model's are unsupported")
        return cls(
            sizes,
            _count(config, "draft_vocab_size"),
            read,
            bool(values.get("attention_bias")),
            bool(config.get("norm_before_residual")),
            bool(config.get("norm_before_fc")),
        )

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Return the numbers of the layers that are read of a model with `count` layers."""
        if self.read_layers is not None:
            return self.read_layers
        return 1, count // 2 - 1, count - 4


DrafterSpec: TypeAlias = BlockDrafterSpec | EagleSpec


def drafter_spec(config: Mapping[str, Any], name: str | Path) -> DrafterSpec | None:
    """Return what a folder's config says of a drafter that reads hidden states; None if it is none.

    Raises:
        ModelError: a size is missing or invalid, or the form is not supported.
    """
    classes = config.get("architectures")
    names = [str(part) for part in classes] if isinstance(classes, list) else []
    kinds = config.get("model_type"), config.get("speculators_model_type")
    read: Callable[[Mapping[str, Any]], DrafterSpec]
    if BLOCK_DRAFTER in names:
        read = BlockDrafterSpec.of
    elif "eagle3" in kinds or any(part.endswith(EAGLE) for part in names):
        read = EagleSpec.of
    else:
        return None
    try:
        return read(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{name}: the config of a drafter has no valid {error}") from None


def drafter_tensor(name: str) -> str | None:
    """Return the name of a drafter's tensor in a model with it; None if it is not used.

    >>> drafter_tensor("midlayer.mlp.up_proj.weight")
    'drafter.layers.0.mlp.up_proj.weight'
    >>> drafter_tensor("embed_tokens.weight")  # the model's
    """
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    return None if _UNUSED.match(name) else DRAFTER_PREFIX + name


def _layer_numbers(values: Mapping[str, Any], key: str, first: int) -> tuple[int, ...]:
    """Return numbers of layers from 0, of a list that counts from `first`."""
    numbers = values[key]
    if not isinstance(numbers, list) or not numbers:
        raise ValueError(f"{key!r}: {numbers!r}"[:64])
    return tuple(_count({key: number}, key, least=first) - first for number in numbers)


def _number(values: Mapping[str, Any], key: str) -> float:
    number = values[key]
    if not isinstance(number, int | float) or not 0 < number < 1e30:
        raise ValueError(f"{key!r}: {number!r}"[:64])
    return float(number)


def _count(values: Mapping[str, Any], key: str, least: int = 1) -> int:
    number = values[key]
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{key!r}: {number!r}"[:64])
    return number


def is_of_head(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a weight belongs to a multi-token head; mlx-lm's classes leave it out.

    Args:
        config: config of the language model.

    >>> is_of_head("mtp.layers.0.mlp.up_proj.weight", {"model_type": "qwen3_next"})
    True
    >>> glm = {"model_type": "glm4_moe", "num_hidden_layers": 46}
    >>> is_of_head("model.layers.46.eh_proj.weight", glm)
    True
    """
    kind = config.get("model_type")
    if kind in LAYER_HEADED:
        return name.startswith(_layer_prefix(config))
    return name.startswith(_MIMO_HEADS) if kind == "mimo" else _HEAD.search(name) is not None


def head_part(name: str, config: Mapping[str, Any]) -> str | None:
    """Return a weight's name within its head; None if it is not loaded.

    Weights that repeat the model's are not, nor further heads of MiMo.

    >>> head_part("model.mtp_layers.0.input_proj.weight", {"model_type": "mimo"})
    'input_proj.weight'
    """
    kind = config.get("model_type")
    if kind in LAYER_HEADED or kind == "mimo":
        prefix = f"{_MIMO_HEADS}0." if kind == "mimo" else _layer_prefix(config)
        part = name.removeprefix(prefix) if name.startswith(prefix) else None
        return None if part is None or part.startswith(_SHARED) else part
    match = _HEAD.search(name)
    return None if match is None else match[1]


def _layer_prefix(config: Mapping[str, Any]) -> str:
    return f"model.layers.{config.get('num_hidden_layers')}."


def not_beside_file(source: str | Path) -> ModelError:
    return ModelError(
        f"{source}: multi-token heads and drafters are read beside model folders alone, not beside "
        f".gguf files"
    )


def no_head(source: str | Path) -> ModelError:
    known = ", ".join(sorted(HEADED_TYPES))
    return ModelError(
        f"{source} has no multi-token head (mtp) that is read; folders of {known} have one as "
        f"their makers published them, and most conversions leave it out"
    )
