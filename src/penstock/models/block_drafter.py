"""Block drafters (DFlash): small models that propose several tokens in one pass.

    hidden states of tokens up to n-1, of some layers ──> one matrix ──> their keys and values
    token n, masks for n+1, n+2, ... ──> layers that attend to those and to each other ──> tokens

Token n is the last one, which the model has not read yet. A model class with a drafter has one more
cache per layer of the drafter. Each pass of the model writes their keys and values from the hidden
states of its own layers, so all that keeps, shares and counts KV covers the drafter. A proposal
reads them, and needs no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.memory.heads import BlockDrafterSpec, DrafterSizes
from penstock.models.drafter_layers import DrafterAttention, GatedMLP, check_model, drafter_weights
from penstock.models.hidden_states import caches_of, logits_of, outputs_of, text_model


class _DrafterLayer(nn.Module):
    def __init__(self, sizes: DrafterSizes, rope: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.self_attn = DrafterAttention(sizes.width, sizes, rope, norms=True)
        self.mlp = GatedMLP(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, eps=sizes.eps)

    def __call__(self, x: mx.array, kv: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), kv)
        y: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return y


class BlockDrafter(nn.Module):
    """The layers of a DFlash checkpoint; embeddings and output layer are those of its model."""

    def __init__(self, spec: BlockDrafterSpec, rope: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spec, sizes = spec, spec.sizes
        self.fc = nn.Linear(len(spec.read_layers) * sizes.width, sizes.width, bias=False)
        self.hidden_norm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.layers = [_DrafterLayer(sizes, rope) for _ in range(spec.layers)]
        self.norm = nn.RMSNorm(sizes.width, eps=sizes.eps)

    def _extra_repr(self) -> str:
        return repr(self.spec)  # part of the fingerprint

    def keep(self, hidden: Sequence[mx.array], caches: Sequence[Any]) -> None:
        """Write the keys and values of tokens to the caches of all layers.

        Args:
            hidden: the tokens' hidden states of the model's `read_layers`, (b, n, width) each.
        """
        features = self.hidden_norm(self.fc(mx.concatenate(list(hidden), axis=-1)))
        for layer, kv in zip(self.layers, caches, strict=True):
            layer.self_attn.keep(features, kv)

    def __call__(self, embedded: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the hidden states of a block, (b, n, width).

        Args:
            embedded: embeddings of the last token and of masks.
            caches: caches of all layers, with an `attend` that lets all tokens of a block see each
                other.
        """
        x = embedded
        for layer, kv in zip(self.layers, caches, strict=True):
            x = layer(x, kv)
        normed: mx.array = self.norm(x)
        return normed


def with_block_drafter(
    model_class: type[Any],
    make_kv: Callable[[], Any],
    spec: BlockDrafterSpec,
    rope: nn.Module,
    read: Callable[[], Mapping[str, mx.array]],
) -> type[nn.Module]:
    """Return a subclass of mlx-lm's model class that writes the KV of a drafter, and drafts.

    Args:
        model_class: class with a list of layers and an embedding without a factor.
        make_kv: makes mlx-lm's cache of a layer that reads all tokens.
        read: reads the weights of the drafter under their published names.

    Raises:
        ModelError: when a model is made: the drafter is one of another model.
    """

    class DraftedModel(model_class):  # type: ignore[misc]
        read_layers = spec.read_layers
        block_tokens = spec.block_tokens

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            check_model(self, spec.sizes.width, lambda count: spec.read_layers)
            if spec.mask_token >= text_model(self).args.vocab_size:
                raise ModelError(f"the drafter's mask_token_id {spec.mask_token:,} is no token")
            self.drafter = BlockDrafter(spec, rope)

        def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
            if cache is None:
                alone: mx.array = super().__call__(inputs, **more)
                return alone
            with outputs_of(text_model(self).model, spec.read_layers) as hidden:
                logits: mx.array = super().__call__(inputs, cache=cache[: -spec.layers], **more)
            self.drafter.keep([hidden[number] for number in spec.read_layers], _drafters(cache))
            return logits

        def predict_block(self, tokens: mx.array, width: int, caches: Sequence[Any]) -> mx.array:
            """Return logits of the `width - 1` tokens after tokens (b, 1), (b, width - 1, ...)."""
            text = text_model(self)
            masks = mx.full((len(tokens), width - 1), spec.mask_token, dtype=tokens.dtype)
            block = text.model.embed_tokens(mx.concatenate([tokens, masks], axis=1))
            return logits_of(text, self.drafter(block, _drafters(caches))[:, 1:])

        def make_cache(self) -> list[Any]:
            caches = caches_of(self, super(), make_kv)
            return [*caches, *(make_kv() for _ in range(spec.layers))]

        def sanitize(self, model_weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
            if hasattr(model_class, "sanitize"):
                model_weights = super().sanitize(model_weights)
            return {**model_weights, **drafter_weights(read(), model_weights)}

    def _drafters(caches: Sequence[Any]) -> Sequence[Any]:
        return caches[-spec.layers :]

    return DraftedModel
