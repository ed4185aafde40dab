"""Multi-token heads (MTP) that checkpoints ship: a layer that predicts one token further.

    hidden state at n-1 ─┐
                         ├─> norms, one matrix, a decoder layer ──> hidden state ──> token n+1
    token n ─────────────┘

A model class with a head has one more cache: the head's keys and values, and as its state the
hidden state of the last token. Each pass of the model also writes the head's keys and values, so
all that keeps, shares and counts KV and recurrent states covers the head. In training position 0
has no token; here it has the first one, with a hidden state of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.memory.heads import LAYER_HEADED, PREFIX, head_part, is_of_head
from penstock.models.hidden_states import caches_of, logits_of, shifted, text_model

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(.+)")
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
"""Suffixes of weights of all experts together."""
_LAYER_PARTS = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}
"""Names of parts of heads that are published as a further layer, and those used here."""
_INDEXED_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Model types whose layers have an index, with a cache of its own."""
_MASKED_TYPES = ("deepseek_v3", "glm4_moe_lite", *_INDEXED_TYPES)
"""Model types whose layers compute with masks, which must be arrays."""


class MultiTokenHead(nn.Module):
    """Multi-token prediction (MTP) head: two norms, a matrix and a layer of the model's class."""

    def __init__(self, text: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        args = text.args
        width, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.layers = [_layer_of(text)]
        self._masked = args.model_type in _MASKED_TYPES
        self._indexed = args.model_type in _INDEXED_TYPES
        self.norm = nn.RMSNorm(width, eps=eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, kv: Any) -> mx.array:
        """Return the head's hidden states, (b, n, width).

        Args:
            embedded: embeddings of tokens.
            hidden: normed hidden states of the tokens before them.
            kv: cache of the head's keys and values, or those of its keys and values and its index.
        """
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(parts, axis=-1))
        first = kv[0] if self._indexed else kv
        mask = first.make_mask(x.shape[1], return_array=self._masked, window_size=None)
        for layer in self.layers:
            x = layer(x, mask, kv)
        normed: mx.array = self.norm(x)
        return normed


def with_head(
    model_class: type[Any],
    make_kv: Callable[[], Any],
    make_cache: Callable[[Any], Any],
    split: Callable[[], Mapping[str, mx.array]] | None = None,
) -> type[nn.Module]:
    """Return a subclass of mlx-lm's model class that keeps the head of its checkpoint.

    Args:
        model_class: class of a type in `memory.heads.HEADED_TYPES`.
        make_kv: makes mlx-lm's cache of a layer that reads all tokens.
        make_cache: makes mlx-lm's cache of the head, given that of its keys and values.
        split: reads the weights of a head from a folder of its own; None for those of the
            checkpoint.
    """

    class HeadedModel(model_class):  # type: ignore[misc]
        states_by_token = True

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.mtp = MultiTokenHead(text_model(self))

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            text = text_model(self)
            if cache is None:
                return logits_of(text, text.model(inputs))
            *caches, (kv, state) = cache
            hidden = text.model(inputs, caches)
            # Of the head only keys and values are kept; the rest is never evaluated.
            previous = shifted(hidden, state)
            self.mtp(text.model.embed_tokens(inputs), previous, kv)
            return logits_of(text, hidden)

        def predict(self, tokens: mx.array, hidden: mx.array, kv: Any) -> tuple[mx.array, mx.array]:
            """Return the head's logits and its hidden states after tokens, (b, n, ...)."""
            text = text_model(self)
            hidden = self.mtp(text.model.embed_tokens(tokens), hidden, kv)
            return logits_of(text, hidden), hidden

        def make_cache(self) -> list[Any]:
            caches = caches_of(self, super(), make_kv)
            is_indexed = text_model(self).args.model_type in _INDEXED_TYPES
            # A cache like the last layer's, for the head's own keys, values and index keys.
            kv = caches_of(self, super(), make_kv)[-1] if is_indexed else make_kv()
            return [*caches, make_cache(kv)]

        def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
            args = text_model(self).args
            config = vars(args)
            rest = {n: weight for n, weight in weights.items() if not is_of_head(n, config)}
            parts = {n: head_part(n, config) for n in weights}
            of_head = {part: weights[n] for n, part in parts.items() if part is not None}
            if split is not None:
                head = split_weights(split())
            elif args.model_type in LAYER_HEADED or args.model_type == "mimo":
                head = layer_head_weights(model_class, args, of_head)
            else:
                raw = any("conv1d.weight" in n and w.shape[-1] != 1 for n, w in rest.items())
                head = head_weights(of_head, raw=raw)
            return {**super().sanitize(rest), **head}

    return HeadedModel


def layer_head_weights(
    model_class: type[Any], args: Any, weights: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the weights of a head of DeepSeek, GLM or MiMo under the names of `HeadedModel`.

    The model's class converts them as those of its first layer.

    Args:
        args: arguments of the model.
        weights: weights of a checkpoint by `head_part`.
    """
    first = "model.layers.0."
    alone = SimpleNamespace(args=replace(args, num_hidden_layers=1))
    layer = model_class.sanitize(alone, {first + part: w for part, w in weights.items()})
    named: dict[str, mx.array] = {}
    for name, weight in layer.items():
        part = name.removeprefix(first)
        stem, _, last = part.rpartition(".")
        if stem == "input_proj":  # MiMo's takes the hidden state first
            weight = mx.concatenate([*mx.split(weight, 2, axis=-1)][::-1], axis=-1)
        part = f"{_LAYER_PARTS[stem]}.{last}" if stem in _LAYER_PARTS else f"layers.0.{part}"
        named[PREFIX + part] = weight
    return named


def head_weights(weights: Mapping[str, mx.array], *, raw: bool) -> dict[str, mx.array]:
    """Return the weights of a head of Qwen's families under the names of `HeadedModel`.

    Args:
        weights: weights of a checkpoint by `head_part`.
        raw: whether they are as trained: norms multiply by 1 + weight.
    """
    named: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for part, weight in weights.items():
        name = PREFIX + part
        if match := _EXPERT.fullmatch(name):
            key = f"{match[1]}.switch_mlp.{match[3]}"
            experts.setdefault(key, {})[int(match[2])] = weight
        elif name.endswith(_GATE_UP):
            stem = f"{name.removesuffix(_GATE_UP)}.switch_mlp"
            sides = mx.split(weight, 2, axis=-2)
            named |= zip((f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight"), sides, strict=True)
        elif name.endswith(_DOWN):
            named[f"{name.removesuffix(_DOWN)}.switch_mlp.down_proj.weight"] = weight
        else:
            is_norm = weight.ndim == 1 and "norm" in name
            named[name] = weight + 1.0 if raw and is_norm else weight
    for name, by_number in experts.items():
        named[name] = mx.stack([by_number[number] for number in sorted(by_number)])
    return named


def split_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return weights of a folder with a head alone under the names of `HeadedModel`."""
    return {PREFIX + name.removeprefix(PREFIX): w for name, w in weights.items()}


def _layer_of(text: Any) -> Any:
    """Make the layer of a head, of the class of the model's layers with attention."""
    args, kind = text.args, type(text.model.layers[-1])
    if args.model_type == "mimo":
        return kind(args)
    interval = getattr(args, "full_attention_interval", None)
    if interval is None:
        return kind(args, args.num_hidden_layers)
    return type(text.model.layers[0])(args, interval - 1)  # number of the first that attends
