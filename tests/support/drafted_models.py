"""Tiny models with drafters that read hidden states, without them, and as published folders."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny_families
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache

from penstock.memory.heads import drafter_spec
from penstock.models.drafted_reader import drafted_class
from penstock.recall import MODEL_PATH

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3")
UNTIED = FAMILIES[1:]
"""Families that `constant` can change."""
KINDS = ("block", "eagle")
_SIZES: dict[str, Any] = {
    "hidden_size": tiny_families.WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4_096,
    "vocab_size": tiny_families.VOCABULARY_TOKENS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "block": _SIZES
    | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "block_size": 8,
        "num_target_layers": tiny_families.LAYERS,
        "layer_types": ["full_attention", "full_attention"],
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3]},
    },
    "eagle": _SIZES
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    },
}
"""Configs of drafters' folders, by kind."""


@functools.cache
def drafted(family: str, kind: str) -> Any:
    """Return a random model of a family with a random drafter; always the same."""
    return _built(family, kind, CONFIGS[kind])


@functools.cache
def undrafted(family: str, kind: str) -> Any:
    """Return mlx-lm's own model with the weights of `drafted`, but for the drafter's."""
    return _without_drafter(family, drafted(family, kind))


@functools.cache
def constant(family: str, kind: str, *, has_drafter: bool) -> Any:
    """Return a model that always chooses the same token, as its drafter does."""
    model = _built(family, kind, CONFIGS[kind] | {"draft_vocab_size": _SIZES["vocab_size"]})
    text = getattr(model, "language_model", model)
    changed = {}
    for name, weight in parameters(model):
        if re.search(r"\.(o_proj|out_proj|down_proj)\.(weight|bias)$", name):
            changed[name] = mx.zeros_like(weight)  # a layer then adds nothing
        elif name.endswith("embed_tokens.weight"):
            changed[name] = mx.broadcast_to(weight[:1], weight.shape)
        elif name == "drafter.norm.weight":
            changed[name] = text.model.norm.weight
    model.update(tree_unflatten(list(changed.items())))
    mx.eval(model.parameters())
    if kind == "eagle":
        caches = model.make_cache()
        token = int(mx.argmax(model(mx.array([[3]]), cache=caches)[0, -1]).item())
        state = model.drafter.norm(caches[-1][1][0][0, -1])
        model.drafter.lm_head.weight = mx.arange(_SIZES["vocab_size"])[:, None] == token
        model.drafter.lm_head.weight = model.drafter.lm_head.weight * state
        mx.eval(model.parameters())
    return model if has_drafter else _without_drafter(family, model)


def parameters(model: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())


def _built(family: str, kind: str, config: dict[str, Any]) -> Any:
    spec = drafter_spec(config, "a drafter")
    assert spec is not None
    model = tiny_families.build(family, derived=lambda own: drafted_class(own, spec, dict))
    if kind == "eagle" and "d2t" in model.drafter:
        model.drafter.d2t = mx.arange(spec.vocabulary_tokens, dtype=mx.int32)  # each second token
    return model


def _without_drafter(family: str, model: Any) -> Any:
    plain = tiny_families.build(family)
    plain.load_weights([(n, w) for n, w in parameters(model) if not n.startswith("drafter.")])
    mx.eval(plain.parameters())
    return plain


class AttendingCache(KVCache):
    """mlx-lm's cache, with attention of tokens to all cached tokens and to each other."""

    @classmethod
    def of(cls, cache: KVCache) -> AttendingCache:
        return cls.from_state(cache.state)

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: None
    ) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def drafted_tokens(model: Any, kind: str, text: list[int], count: int) -> list[int]:
    """Return the tokens that the drafter proposes after a text, from one pass over all of it."""
    caches = model.make_cache()
    model(mx.array([text[:-1]]), cache=caches)
    if kind == "block":
        own = [AttendingCache.of(cache) for cache in caches[-2:]]
        logits = model.predict_block(mx.array([text[-1:]]), count + 1, own)
        return [int(token) for token in mx.argmax(logits[0], axis=-1).tolist()]
    kv, state = AttendingCache.of(caches[-1][0]), caches[-1][1]
    hidden, tokens = state[0], text[-1:]
    for _ in range(count):
        logits, hidden = model.predict(mx.array([tokens[-1:]]), hidden, kv)
        tokens = [*tokens, int(mx.argmax(logits[0, -1]).item())]
    return tokens[1:]


def write_model(
    family: str, kind: str, folder: Path, *, bits: int | None = None, vocabulary: int | None = None
) -> Path:
    """Write `undrafted` as a folder, with the embedded model's tokenizer.

    Args:
        bits: bits of its matrices; None for float32.
        vocabulary: number of tokens, up to which the model's are repeated; None for its own.
    """
    model = undrafted(family, kind)
    shutil.copytree(MODEL_PATH, folder, copy_function=shutil.copyfile)
    weights: dict[str, mx.array] = {}
    config = dataclasses.asdict(model.args) | {"model_type": family, "eos_token_id": 2}
    config["vocab_size"] = vocabulary or config["vocab_size"]
    coding = {"group_size": 32, "bits": bits, "mode": "affine"}
    if bits is not None:
        config["quantization"] = coding
    for name, weight in parameters(model):
        if vocabulary is not None and name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weight = mx.concatenate([weight] * (1 + vocabulary // len(weight)))[:vocabulary]
        if bits is None or weight.ndim == 1:
            weights[name] = weight
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(weight, **coding)
        weights |= zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(family: str, kind: str, folder: Path, **changes: Any) -> Path:
    """Write the drafter of `drafted`; `changes` replace values of its config."""
    folder.mkdir()
    weights = {}
    for name, weight in parameters(drafted(family, kind)):
        if name.startswith("drafter."):
            published = name.removeprefix("drafter.")
            if kind == "eagle":
                published = published.replace("layers.0.", "midlayer.")
            weights[published] = weight.astype(mx.int64) if "d2t" in name else weight
    if kind == "eagle":
        weights["t2d"] = mx.arange(tiny_families.VOCABULARY_TOKENS) % 2 == 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | changes))
    return folder
