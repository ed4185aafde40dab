"""Small models, and models, samplers and detokenizers with injected faults.

A text is one character a token here, so that texts and stop strings can be counted on fingers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from small_models import BASE, build

from penstock.attention.chunk_reads import MixedReads
from penstock.engine.model.sampling import TokenSampler

VOCABULARY_TOKENS = 512
LOUDER = {"llama": 4.0, "gemma2": 8.0, "falcon_h1": 1.0}
"""What attention's weights are multiplied by, so that texts depend on single tokens of the past."""

STATES = {
    "falcon_h1": {
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
    }
}
"""Of a family with recurrent layers, what else its config says."""

OUT_OF_MEMORY = "[metal::malloc] Attempting to allocate 70368744177664 bytes which is too much"
"""As MLX says it where a GPU is: on a CPU, it does not say so but ends the process."""


@functools.cache
def model_of(family: str, feed_forward: int = BASE["intermediate_size"]) -> Any:
    """Return a reproducible random float32 model of two layers."""
    mx.random.seed(3)
    size = {"num_hidden_layers": 2, "vocab_size": VOCABULARY_TOKENS, "head_dim": 16}
    more = {"model_type": family, "tie_word_embeddings": False, "torch_dtype": "float32"}
    size["intermediate_size"] = feed_forward
    model = build({**BASE, **size, **more, **STATES.get(family, {})})
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = layer.self_attn[name]
            module.weight = module.weight * LOUDER[family]
    mx.eval(model.parameters())
    return model


def spell(tokens: Sequence[int]) -> str:
    """Return the text of tokens: one character each."""
    return "".join(chr(0x4E00 + token) for token in tokens)


class Letters:
    """A streaming detokenizer: each token is a character, complete at once."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet

    def reset(self) -> None:
        """Reset; raise after `breaks_at` tokens, or for -1 in `finalize`."""
        breaks = self.alphabet.breaks
        self.breaks_at = breaks.pop(0) if breaks else None
        self.count = 0
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        if self.count == self.breaks_at:
            raise ValueError("a detokenizer's bug")
        self.count += 1
        self.last_segment = spell([token])

    def finalize(self) -> None:
        if self.breaks_at == -1:
            raise ValueError("a detokenizer's bug in finalize")
        self.last_segment = ""


@dataclass
class Alphabet:
    """A minimal tokenizer for the engine. `breaks` apply to the next answers."""

    eos_token_ids: frozenset[int] = frozenset()
    breaks: list[int | None] = field(default_factory=list)

    @property
    def detokenizer(self) -> Letters:
        return Letters(self)

    def decode(self, tokens: Sequence[int]) -> str:
        return spell(tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def get_vocab(self) -> dict[str, int]:
        return {spell([token]): token for token in range(VOCABULARY_TOKENS)}


class Broken(TokenSampler):
    """A sampler that fails after a number of tokens."""

    plain = False  # rows that are plain are chosen together, without asking any sampler

    def __init__(self, like: TokenSampler, at: int) -> None:
        self.__dict__.update(like.__dict__)
        self.at = at

    def _draft(self, logits: mx.array, generated: Sequence[int], *, sure: bool = False) -> Any:
        if len(generated) >= self.at:
            raise ValueError("a sampler's bug")
        return super()._draft(logits, generated, sure=sure)


class Faulty:
    """A model that fails a set number of times on request."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.times = 0
        self.rows: list[int] = []
        """Rows of each call that failed."""
        self.mixed: list[bool] = []
        """Whether each of them had tokens of answers beside a chunk of a prompt."""

    def arm(
        self,
        how: Fault,
        times: int = 1,
        *,
        only: Callable[[mx.array], bool] = lambda tokens: True,
    ) -> None:
        """Fail the next calls; `only` tells from their tokens (b, n) which of them."""
        self.how, self.times, self.only, self.rows, self.mixed = how, times, only, [], []

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        if not self.times or not self.only(tokens):
            return self.model(tokens, cache=cache)
        self.times -= 1
        self.rows.append(tokens.shape[0])
        self.mixed.append(isinstance((cache or [None])[0], MixedReads))
        return self.how(self.model, tokens, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


Fault = Callable[[Any, mx.array, Any], Any]
"""What a model does instead: called with it, the tokens and the caches."""


def fails(model: Any, tokens: mx.array, cache: Any) -> Any:
    """Raise before computing."""
    raise ValueError("a model's bug")


def fail_after_last_layer(model: Any, tokens: mx.array, cache: Any) -> Any:
    """Raise after all layers have written to their caches."""
    model(tokens, cache=cache)
    raise ValueError("a model's bug behind its last layer")


def runs_out_of_memory(model: Any, tokens: mx.array, cache: Any) -> Any:
    """Raise out of memory after all layers have written to their caches."""
    model(tokens, cache=cache)
    raise RuntimeError(OUT_OF_MEMORY)


def return_nan_logits(model: Any, tokens: mx.array, cache: Any) -> Any:
    """Return NaN logits."""
    return model(tokens, cache=cache) * float("nan")


def reads_a_chunk(tokens: mx.array) -> bool:
    """Return whether a call prefills (in these tests, never a single token)."""
    return tokens.shape[1] > 1


def decodes(tokens: mx.array) -> bool:
    """Return whether a call decodes."""
    return tokens.shape[1] == 1
