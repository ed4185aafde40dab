"""EAGLE-3 drafters: a layer that proposes from hidden states of three layers of a model.

    hidden states at n-1, of three layers ──> one matrix ─┐
                                                          ├─> norms, a layer ──> token n+1
    token n ──────────────────────────────────────────────┘         └─> as the matrix's output at n

A model class with such a drafter has one more cache: the drafter's keys and values, and as its
state the output of the matrix for the last token. Each pass of the model writes both. A pass over
proposals stores that output for every token; after a rejection the one of the last accepted token
is taken, without a further pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.memory.heads import DRAFTER_PREFIX, TOKEN_OFFSETS, EagleSpec
from penstock.models.drafter_layers import DrafterAttention, GatedMLP, check_model, drafter_weights
from penstock.models.hidden_states import caches_of, outputs_of, shifted, text_model


class _EagleLayer(nn.Module):
    def __init__(self, spec: EagleSpec, rope: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        sizes = spec.sizes
        self._adds_normed = spec.adds_normed
        self.input_layernorm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.hidden_norm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.self_attn = DrafterAttention(2 * sizes.width, sizes, rope, bias=spec.bias)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.mlp = GatedMLP(sizes)

    def keep(self, embedded: mx.array, hidden: mx.array, kv: Any) -> None:
        """Write the keys and values of tokens to their cache."""
        self.self_attn.keep(self._inputs(embedded, hidden), kv)

    def __call__(self, embedded: mx.array, hidden: mx.array, kv: Any) -> mx.array:
        mixed = self.self_attn(self._inputs(embedded, hidden), kv)
        x = mixed + (self.hidden_norm(hidden) if self._adds_normed else hidden)
        y: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return y

    def _inputs(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        return mx.concatenate([self.input_layernorm(embedded), self.hidden_norm(hidden)], axis=-1)


class EagleDrafter(nn.Module):
    """The layers of an EAGLE-3 checkpoint; the embeddings are those of its model."""

    def __init__(self, spec: EagleSpec, rope: nn.Module, states: int, vocabulary: int) -> None:
        """Take the number of hidden states it reads, and of the model's tokens."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.spec, sizes = spec, spec.sizes
        read = states * sizes.width
        self.fc = nn.Linear(read, sizes.width, bias=False)
        if spec.norms_states:
            self.input_norm = nn.RMSNorm(read, eps=sizes.eps)
        self.layers = [_EagleLayer(spec, rope)]
        self.norm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.lm_head = nn.Linear(sizes.width, spec.vocabulary_tokens, bias=False)
        self._vocabulary = vocabulary
        if spec.vocabulary_tokens != vocabulary:
            self.d2t = mx.zeros(spec.vocabulary_tokens, mx.int32)

    def _extra_repr(self) -> str:
        return repr(self.spec)  # part of the fingerprint

    def checked(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights to load; ModelError for tokens that the model does not have."""
        name = DRAFTER_PREFIX + TOKEN_OFFSETS
        if TOKEN_OFFSETS not in self:  # it proposes all of the model's
            return {key: weight for key, weight in weights.items() if key != name}
        if name in weights:
            tokens = mx.arange(len(weights[name])) + weights[name]
            if mx.any((tokens < 0) | (tokens >= self._vocabulary)).item():
                raise ModelError(f"the drafter's {TOKEN_OFFSETS} names tokens that do not exist")
        return dict(weights)

    def joined(self, hidden: Sequence[mx.array]) -> mx.array:
        """Combine hidden states of the model's layers, (b, n, width) each: (b, n, width)."""
        x = mx.concatenate(list(hidden), axis=-1)
        if self.spec.norms_states:
            x = self.input_norm(x)
        y: mx.array = self.fc(x)
        return y

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits of the model's tokens, -inf for those that are not proposed."""
        drafted: mx.array = self.lm_head(self.norm(hidden))
        if self.spec.vocabulary_tokens == self._vocabulary:
            return drafted
        logits = mx.full((*drafted.shape[:-1], self._vocabulary), -mx.inf, drafted.dtype)
        logits[..., mx.arange(self.spec.vocabulary_tokens) + self.d2t] = drafted
        return logits


def with_eagle(
    model_class: type[Any],
    make_kv: Callable[[], Any],
    make_cache: Callable[[Any], Any],
    spec: EagleSpec,
    rope: nn.Module,
    read: Callable[[], Mapping[str, mx.array]],
) -> type[nn.Module]:
    """Return a subclass of mlx-lm's model class that writes the KV of a drafter, and drafts.

    Args:
        model_class: class with a list of layers and an embedding without a factor.
        make_kv: makes mlx-lm's cache of a layer that reads all tokens.
        make_cache: makes mlx-lm's cache of the drafter, given that of its keys and values.
        read: reads the weights of the drafter under their published names.

    Raises:
        ModelError: when a model is made: the drafter is one of another model.
    """

    class EagleModel(model_class):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            check_model(self, spec.sizes.width, spec.layers_of)
            vocabulary = int(text_model(self).args.vocab_size)
            self.drafter = EagleDrafter(spec, rope, len(self.read_layers), vocabulary)

        states_by_token = True

        @property
        def read_layers(self) -> tuple[int, ...]:
            return spec.layers_of(len(text_model(self).model.layers))

        def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
            if cache is None:
                alone: mx.array = super().__call__(inputs, **more)
                return alone
            *caches, (kv, state) = cache
            text = text_model(self)
            with outputs_of(text.model, self.read_layers) as hidden:
                logits: mx.array = super().__call__(inputs, cache=caches, **more)
            states = self.drafter.joined([hidden[number] for number in self.read_layers])
            previous = shifted(states, state)
            self.drafter.layers[0].keep(text.model.embed_tokens(inputs), previous, kv)
            return logits

        def predict(self, tokens: mx.array, hidden: mx.array, kv: Any) -> tuple[mx.array, mx.array]:
            """Return the drafter's logits and its hidden states after tokens, (b, n, ...)."""
            embedded = text_model(self).model.embed_tokens(tokens)
            hidden = self.drafter.layers[0](embedded, hidden, kv)
            return self.drafter.logits(hidden), hidden

        def make_cache(self) -> list[Any]:
            return [*caches_of(self, super(), make_kv), make_cache(make_kv())]

        def sanitize(self, model_weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
            if hasattr(model_class, "sanitize"):
                model_weights = super().sanitize(model_weights)
            drafter = drafter_weights(read(), model_weights)
            return {**model_weights, **self.drafter.checked(drafter)}

    return EagleModel
