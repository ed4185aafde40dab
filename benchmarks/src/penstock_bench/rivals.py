"""Parts of mlx-lm used only by benchmarks, in addition to `penstock.models.mlx_lm`.

Caches, random models of its llama and Qwen3-Next classes, and two ways to generate step by step:
`BatchGenerator` for many sequences, as in mlx-lm's server, and `generate_step` for one. Both look
prompts up in an `LRUPromptCache` first. `tests/bench/test_engine_benches.py` checks the interfaces
used here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import falcon_h1, llama, qwen3_next
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import (
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from penstock.attention.devices import default_stream

__all__ = [
    "Batched",
    "KVCache",
    "LRUPromptCache",
    "QuantizedSides",
    "RotatingKVCache",
    "ScriptedCaches",
    "Solo",
    "make_caches",
    "plain_tokens",
    "random_falcon",
    "random_hybrid",
    "random_llama",
    "speculative_tokens",
]

PREFILL_STEP_TOKENS = 2_048
"""Prefill chunk of mlx-lm's server by default, in tokens."""
PREFILL_BATCH = 8
"""Prompts that mlx-lm's server prefills together by default."""
_KEY = "model"
"""Name of the model in the prompt cache."""


def random_llama(
    *,
    layers: int,
    hidden_size: int,
    intermediate_size: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary_size: int,
    seed: int = 0,
) -> nn.Module:
    """Construct mlx-lm's llama with random float32 weights, evaluated; deterministic by seed.

    Matrices are uniform with variance 1 / inputs, so that activations keep their size from layer to
    layer. The head is not tied to the embedding: a tied random model repeats its input token,
    whatever its cache holds.
    """
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            intermediate_size=intermediate_size,
            num_attention_heads=query_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=vocabulary_size,
            rope_theta=500_000.0,
            tie_word_embeddings=False,
        )
    )
    return _randomized(model, seed)


def random_hybrid(
    *,
    layers: int,
    hidden_size: int,
    full_every: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    state_heads: int,
    state_dim: int,
    experts: int,
    vocabulary_size: int,
    seed: int = 0,
) -> nn.Module:
    """Construct mlx-lm's Qwen3-Next with random float32 weights, evaluated.

    One in `full_every` layers is attention. The others are gated delta nets with `state_heads`
    states of (state_dim, state_dim).
    """
    model = qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next",
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            intermediate_size=hidden_size,
            num_attention_heads=query_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            linear_num_value_heads=state_heads,
            linear_num_key_heads=state_heads // 2,
            linear_key_head_dim=state_dim,
            linear_value_head_dim=state_dim,
            linear_conv_kernel_dim=4,
            num_experts=experts,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=hidden_size // 2,
            mlp_only_layers=[],
            moe_intermediate_size=hidden_size // 2,
            rms_norm_eps=1e-6,
            vocab_size=vocabulary_size,
            rope_theta=500_000.0,
            partial_rotary_factor=0.25,
            max_position_embeddings=131_072,
            full_attention_interval=full_every,
            tie_word_embeddings=False,
        )
    )
    return _randomized(model, seed)


def random_falcon(*, vocabulary_size: int) -> nn.Module:
    """Construct a small Falcon-H1 of mlx-lm with random float32 weights, evaluated.

    Every layer has attention and a Mamba state.
    """
    model = falcon_h1.Model(
        falcon_h1.ModelArgs(
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            mamba_d_head=32,
            mamba_d_ssm=128,
            mamba_d_state=16,
            mamba_n_heads=4,
            lm_head_multiplier=1.0,
            vocab_size=vocabulary_size,
            tie_word_embeddings=False,
        )
    )
    return _randomized(model, 0)


def _randomized(model: Any, seed: int) -> nn.Module:
    """Replace all weights, matrices or norms, by random ones; evaluated."""
    parameters = dict(tree_flatten(model.parameters()))
    shapes = [(name, weights.shape) for name, weights in parameters.items()]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    drawn = [(name, _drawn(keys[i], shape)) for i, (name, shape) in enumerate(shapes)]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    evaluated: nn.Module = model.eval()
    return evaluated


def _drawn(key: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Draw one parameter: a matrix (outputs, inputs), or ones for a norm."""
    if len(shape) == 1:
        return mx.ones(shape)
    bound = (3.0 / shape[-1]) ** 0.5
    return mx.random.uniform(-bound, bound, shape, key=key)


class _Rival:
    """Base of both ways: the prompt cache, and the common stream."""

    model_seconds = 0.0
    """Always 0: not measured separately."""

    def __init__(self, model: nn.Module, prefill_step_tokens: int) -> None:
        self._model = model
        self._prefill_step_tokens = prefill_step_tokens
        self._stream = default_stream()
        self._known: Any = LRUPromptCache()

    def learn(self, prefix: Sequence[int]) -> None:
        """Prefill the uncached part of `prefix`, and store its cache as one entry.

        mlx-lm's server stores such an entry after a request with a system prompt, and another one
        of the whole prompt for every request, which is omitted here.
        """
        caches, rest = self._fetch(list(prefix))
        caches = caches or make_prompt_cache(self._model)
        for start in range(0, len(rest), self._prefill_step_tokens):
            chunk = mx.array(rest[start : start + self._prefill_step_tokens])
            self._model(chunk[None], cache=caches)
            mx.eval([cache.state for cache in caches])
        self._known.insert_cache(_KEY, list(prefix), caches, cache_type="system")

    def _fetch(self, prompt: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Return the caches of the longest cached prefix or None, and the rest of the prompt."""
        caches, rest = self._known.fetch_nearest_cache(_KEY, prompt)
        return caches, rest

    def settle(self) -> None:
        """Wait until nothing is in flight; mlx-lm computes one step ahead."""
        mx.synchronize(self._stream)


class Batched(_Rival):
    """Several sequences in mlx-lm's `BatchGenerator`, driven like its server does.

    `step` calls `next`: one token of every running sequence, or a chunk of every waiting prompt.
    Not thread-safe; everything is computed in the thread's default stream.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        *,
        prefill_batch: int = PREFILL_BATCH,
        prefill_step_tokens: int = PREFILL_STEP_TOKENS,
    ) -> None:
        super().__init__(model, prefill_step_tokens)
        self._generator: Any = BatchGenerator(
            model,
            completion_batch_size=batch_size,
            prefill_batch_size=min(prefill_batch, batch_size),
            prefill_step_size=prefill_step_tokens,
            stream=self._stream,
        )
        self._places: dict[int, int] = {}
        self._known_tokens: list[int] = []
        self._read_tokens: list[int] = []

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prompt cache."""
        return sum(self._known_tokens)

    @property
    def prompt_read(self) -> int:
        """Prompt tokens in caches so far."""
        return sum(self._read_tokens)

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Submit all prompts at once, each with its entry of the prompt cache."""
        for prompt in prompts:
            tokens = list(prompt)
            caches, rest = self._fetch(tokens)
            known = len(tokens) - len(rest)
            (uid,) = self._generator.insert(
                [rest], [max_tokens], caches=[caches], all_tokens=[tokens[:known]]
            )
            self._places[uid] = len(self._places)
            self._known_tokens.append(known)
            self._read_tokens.append(known)

    def cancel(self) -> None:
        """Remove all sequences from the generator; the prompt cache stays."""
        self._generator.remove(list(self._places))
        self._places, self._known_tokens, self._read_tokens = {}, [], []

    def step(self) -> list[tuple[int, int]]:
        """Run one step; return (sequence, token) of every new token."""
        prefilled, generated = self._generator.next()
        for response in prefilled:
            place = self._places[response.uid]
            self._read_tokens[place] = self._known_tokens[place] + response.progress[0]
        return [(self._places[response.uid], int(response.token)) for response in generated]

    def close(self) -> None:
        """Restore the generator's settings; its memory is freed with the object."""
        self._generator.close()


class Solo(_Rival):
    """One sequence in mlx-lm's `generate_step`: no batch, padding or mask of rows.

    With `kv_bits` mlx-lm's quantized cache is used from the first token on.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        prefill_step_tokens: int = PREFILL_STEP_TOKENS,
        kv_bits: int | None = None,
    ) -> None:
        super().__init__(model, prefill_step_tokens)
        self._kv_bits = kv_bits
        self._tokens: Iterator[tuple[Any, Any]] = iter(())
        self.cached_tokens = 0
        """Prompt tokens found in the prompt cache."""
        self.prompt_read = 0
        """Prompt tokens in the cache so far."""

    def save(self, prefix: Sequence[int], file: Path) -> None:
        """Write the cache of a cached prefix to a file."""
        caches, _ = self._fetch(list(prefix))
        save_prompt_cache(str(file), caches)

    def load(self, prefix: Sequence[int], file: Path) -> None:
        """Read a file written by `save` and cache the prefix."""
        caches = load_prompt_cache(str(file))
        self._known.insert_cache(_KEY, list(prefix), caches, cache_type="system")

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Submit one prompt, with its entry of the prompt cache."""
        (prompt,) = prompts
        caches, rest = self._fetch(list(prompt))
        self.cached_tokens = len(prompt) - len(rest)

        def progress(tokens: int, _: int) -> None:
            self.prompt_read = self.cached_tokens + tokens

        self._tokens = generate_step(
            mx.array(rest),
            self._model,
            self._stream,
            max_tokens=max_tokens,
            prompt_cache=caches,
            prefill_step_size=self._prefill_step_tokens,
            prompt_progress_callback=progress,
            kv_bits=self._kv_bits,
            quantized_kv_start=0,
        )

    def step(self) -> list[tuple[int, int]]:
        """Generate the next token, after prefill on the first call; return (0, token)."""
        token, _ = next(self._tokens)
        return [(0, int(token))]

    def cancel(self) -> None:
        """Drop the generator and its caches; the prompt cache stays."""
        self._tokens = iter(())

    def close(self) -> None:
        """Stop generating."""
        self.cancel()


class ScriptedCaches:
    """Caches of one conversation in mlx-lm, of a model and an optional draft model."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches

    def rest(self, prompt: Sequence[int]) -> mx.array:
        """Trim the caches to a prefix of the prompt; return the remaining tokens."""
        known = min(len(prompt) - 1, *(int(cache.offset) for cache in self.caches))
        for cache in self.caches:
            cache.trim(int(cache.offset) - known)
        return mx.array(list(prompt[known:]))


def make_caches(model: nn.Module, draft: nn.Module | None = None) -> ScriptedCaches:
    """Return empty caches; a draft model's follow the model's."""
    drafts = [] if draft is None else make_prompt_cache(draft)
    return ScriptedCaches([*make_prompt_cache(model), *drafts])


def plain_tokens(
    rest: mx.array, model: nn.Module, caches: list[Any], max_tokens: int
) -> Generator[int, None, None]:
    """Yield the tokens that mlx-lm generates after the cached tokens and `rest`."""
    steps: Any = generate_step(rest, model, max_tokens=max_tokens, prompt_cache=caches)
    for token, _ in steps:
        yield int(token)


def speculative_tokens(
    rest: mx.array,
    model: nn.Module,
    draft: nn.Module,
    caches: list[Any],
    max_tokens: int,
    proposed: int,
) -> Generator[int, None, None]:
    """Yield like `plain_tokens`, with `proposed` draft tokens per step."""
    steps: Any = speculative_generate_step(
        rest,
        model,
        draft,
        num_draft_tokens=proposed,
        max_tokens=max_tokens,
        prompt_cache=caches,
    )
    for token, *_ in steps:
        yield int(token)


class QuantizedSides:
    """One layer of one sequence in mlx-lm's `QuantizedKVCache`, filled at once.

    Args:
        keys: (1, heads, tokens, dim).
        values: the same.
        bits: bits per value.
        group_size: elements that share a scale and an offset.
    """

    def __init__(self, keys: mx.array, values: mx.array, *, bits: int, group_size: int) -> None:
        self._cache = QuantizedKVCache(group_size=group_size, bits=bits)
        self._dtype = keys.dtype
        self._sides = self._cache.update_and_fetch(keys, values)

    @property
    def arrays(self) -> list[mx.array]:
        """Codes, scales and offsets."""
        return [part for side in (self._cache.keys, self._cache.values) for part in side]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens; up to 255 more are allocated."""
        return sum(part.nbytes for side in self._sides for part in side)

    def dequantize(self) -> tuple[mx.array, mx.array]:
        """Return dequantized keys and values."""
        (keys, *of_keys), (values, *of_values) = self._sides
        return self._dequantized(keys, *of_keys), self._dequantized(values, *of_values)

    def _dequantized(self, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        group, bits = self._cache.group_size, self._cache.bits
        return mx.dequantize(codes, scales, biases, group_size=group, bits=bits)

    def attend(self, queries: mx.array) -> mx.array:
        """Attend with scaled queries (heads, m, dim); return (heads, m, dim)."""
        mixed: mx.array = quantized_scaled_dot_product_attention(
            queries[None].astype(self._dtype),
            *self._sides,
            scale=1.0,
            mask=None,
            group_size=self._cache.group_size,
            bits=self._cache.bits,
        )
        return mixed[0]
