"""Random models, small and seeded, with different kinds of attention caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as theirs
from mlx_lm.models import (
    deepseek_v3,
    deepseek_v32,
    falcon_h1,
    gear,
    gemma2,
    gemma3_text,
    gpt_oss,
    llama,
    mamba2,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
)

from penstock import caches
from penstock.models.loading import load
from penstock.recall import MODEL_PATH

VOCABULARY_TOKENS = 512
SLIDING_WINDOW = 24
LOUDER = 3.0
SHARED = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY_TOKENS,
}
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "embedded")
SHARED_FAMILIES = (*FAMILIES, "qwen2", "gpt_oss", "phi3")
"""Those whose attention the engine takes over, so that it reads KV where it lies."""
JOINED_FAMILIES = ("gemma2", "gear")
"""Those that the engine hands contiguous KV: attention or masks of their own kind."""
LATENT_FAMILIES = ("deepseek_v3", "deepseek_v32")
"""Those whose latents the engine reads where they lie, without and with an index of their own."""
RECURRENT_FAMILIES = ("qwen3_next", "falcon_h1", "mamba2")
"""Those with states: some layers of them, both in every layer, and nothing else."""


_SEEDS = (*SHARED_FAMILIES, "gemma2", "deepseek_v3", "gear", *RECURRENT_FAMILIES, "deepseek_v32")


@functools.cache
def model_of(family: str) -> Any:
    """Return a reproducible random float32 model, or the embedded one."""
    if family == "embedded":
        return load(MODEL_PATH)[0]
    mx.random.seed(_SEEDS.index(family))
    model = _random(family)
    model.set_dtype(mx.float32)
    # With weights as they are initialized attention is nearly uniform and tokens repeat; louder,
    # the text depends on single tokens of the past.
    for layer in model.layers:
        attention = layer.get("self_attn", {})
        for name in ("q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm", "v_proj", "o_proj"):
            if name in attention:
                attention[name].weight = attention[name].weight * LOUDER
        if "sinks" in attention:
            attention.sinks = mx.random.normal(attention.sinks.shape)
    mx.eval(model.parameters())
    return model


def _random(family: str) -> Any:
    """Return a model of a family as mlx-lm initializes it."""
    if family == "llama":
        return llama.Model(
            llama.ModelArgs(
                model_type="llama", num_hidden_layers=2, tie_word_embeddings=False, **SHARED
            )
        )
    if family == "qwen3":
        return qwen3.Model(
            qwen3.ModelArgs(
                model_type="qwen3",
                num_hidden_layers=2,
                head_dim=64,
                max_position_embeddings=4096,
                tie_word_embeddings=False,
                rope_theta=10_000.0,
                **SHARED,
            )
        )
    if family == "gemma3":
        return gemma3_text.Model(
            gemma3_text.ModelArgs(
                model_type="gemma3_text",
                num_hidden_layers=3,
                head_dim=64,
                query_pre_attn_scalar=64,
                sliding_window=SLIDING_WINDOW,
                sliding_window_pattern=3,
                **SHARED,
            )
        )
    if family == "mixtral":
        return mixtral.Model(
            mixtral.ModelArgs(
                model_type="mixtral", num_hidden_layers=2, num_local_experts=4, **SHARED
            )
        )
    if family == "qwen2":
        return qwen2.Model(
            qwen2.ModelArgs(
                model_type="qwen2", num_hidden_layers=2, tie_word_embeddings=False, **SHARED
            )
        )
    if family == "gpt_oss":
        return gpt_oss.Model(
            gpt_oss.ModelArgs(
                num_hidden_layers=2,
                head_dim=64,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=SLIDING_WINDOW,
                layer_types=["sliding_attention", "full_attention"],
                **SHARED,
            )
        )
    if family == "phi3":
        return phi3.Model(phi3.ModelArgs(model_type="phi3", num_hidden_layers=2, **SHARED))
    if family == "gemma2":
        return gemma2.Model(
            gemma2.ModelArgs(model_type="gemma2", num_hidden_layers=2, head_dim=64, **SHARED)
        )
    if family == "deepseek_v3":
        return deepseek_v3.Model(
            deepseek_v3.ModelArgs(
                num_hidden_layers=2,
                q_lora_rank=None,
                kv_lora_rank=32,
                qk_rope_head_dim=16,
                qk_nope_head_dim=32,
                v_head_dim=48,
                first_k_dense_replace=2,
                rope_scaling=None,
                n_routed_experts=None,
                **SHARED,
            )
        )
    if family == "deepseek_v32":
        return deepseek_v32.Model(
            deepseek_v32.ModelArgs(
                num_hidden_layers=2,
                index_head_dim=32,
                index_n_heads=8,
                index_topk=24,
                q_lora_rank=64,
                kv_lora_rank=32,
                qk_rope_head_dim=16,
                qk_nope_head_dim=32,
                v_head_dim=48,
                first_k_dense_replace=2,
                n_routed_experts=None,
                **SHARED,
            )
        )
    if family == "qwen3_next":
        return qwen3_next.Model(
            qwen3_next.ModelArgs(
                model_type="qwen3_next",
                num_hidden_layers=4,
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=32,
                linear_value_head_dim=32,
                linear_conv_kernel_dim=4,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=1,
                shared_expert_intermediate_size=64,
                mlp_only_layers=[],
                moe_intermediate_size=64,
                rope_theta=10_000.0,
                partial_rotary_factor=0.5,
                max_position_embeddings=4_096,
                head_dim=64,
                full_attention_interval=2,
                **SHARED,
            )
        )
    if family == "falcon_h1":
        return falcon_h1.Model(
            falcon_h1.ModelArgs(
                num_hidden_layers=2,
                head_dim=64,
                mamba_d_head=32,
                mamba_d_ssm=128,
                mamba_d_state=16,
                mamba_n_heads=4,
                lm_head_multiplier=1.0,
                **SHARED,
            )
        )
    if family == "mamba2":
        return mamba2.Model(
            mamba2.ModelArgs(
                model_type="mamba2",
                num_heads=8,
                head_dim=64,
                vocab_size=VOCABULARY_TOKENS,
                hidden_size=256,
                intermediate_size=512,
                state_size=16,
                num_hidden_layers=2,
                layer_norm_epsilon=1e-6,
                conv_kernel=4,
                n_groups=1,
                use_bias=False,
                use_conv_bias=True,
                tie_word_embeddings=False,
                time_step_limit=(0.0, 100.0),
                time_step_rank="auto",
            )
        )
    assert family == "gear", family
    return gear.Model(
        gear.ModelArgs(
            model_type="gear",
            num_hidden_layers=2,
            head_dim=64,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=SLIDING_WINDOW,
            attn_logit_softcapping=50.0,
            **SHARED,
        )
    )


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    key = mx.random.key(1_000 * seed + tokens)
    return mx.random.randint(2, VOCABULARY_TOKENS, (tokens,), key=key).tolist()


@dataclass(frozen=True)
class Step:
    """One generated token, and the log-probabilities it was chosen from, (V,)."""

    token: int
    logprobs: mx.array

    @property
    def gap(self) -> float:
        """Return its logit lead over the second."""
        best = mx.topk(self.logprobs, 2)
        return abs(float((best[1] - best[0]).item()))


def generate(
    model: Any, prompt: Sequence[int], cache: list[Any], tokens: int, step_size: int = 2_048
) -> list[Step]:
    """Generate greedily with the given caches, which are modified."""
    return [
        Step(int(token), logprobs)
        for token, logprobs in generate_step(
            mx.array(prompt),
            model,
            max_tokens=tokens,
            prompt_cache=cache,
            prefill_step_size=step_size,
        )
    ]


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [step.token for step in steps]


def assert_same(ours: Sequence[int], reference: Sequence[Step], what: str) -> None:
    """Compare tokens; report the first difference and the reference's margin there."""
    assert len(ours) == len(reference), f"{what}: {len(ours)} tokens, not {len(reference)}"
    for at, (token, step) in enumerate(zip(ours, reference, strict=True)):
        assert token == step.token, (
            f"{what}: token {at} is {token}, not {step.token}, which led by {step.gap:.3g}"
        )


def twin(cache: Any) -> Any:
    """Return penstock's empty cache for an empty one of mlx-lm."""
    if isinstance(cache, theirs.RotatingKVCache):
        return caches.RotatingKVCache(cache.max_size, cache.keep)
    if isinstance(cache, theirs.QuantizedKVCache):
        return caches.QuantizedKVCache(cache.group_size, cache.bits)
    assert isinstance(cache, theirs.KVCache), type(cache)
    return caches.KVCache()


def twins(caches: Sequence[Any]) -> list[Any]:
    return [twin(cache) for cache in caches]


def bounded(model: Any, max_size: int, keep: int) -> list[Any]:
    """Return mlx-lm's caches with every full-attention layer bounded; sliding layers stay."""
    return [
        cache
        if isinstance(cache, theirs.RotatingKVCache)
        else theirs.RotatingKVCache(max_size, keep)
        for cache in theirs.make_prompt_cache(model)
    ]


@dataclass(frozen=True)
class Finished:
    """One finished sequence of a batch."""

    tokens: list[int]
    cache: list[Any]


def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[list[Any]],
    tokens: Sequence[int],
    **settings: int,
) -> list[Finished]:
    """Run prompts together through mlx-lm's `BatchGenerator`, each with caches of its own."""
    batch = BatchGenerator(model, **settings)
    uids = batch.insert(
        [list(prompt) for prompt in prompts], max_tokens=list(tokens), caches=list(caches)
    )
    written: dict[int, list[int]] = {uid: [] for uid in uids}
    left: dict[int, list[Any]] = {}
    while responses := batch.next_generated():
        for response in responses:
            written[response.uid].append(response.token)
            if response.finish_reason is not None:
                left[response.uid] = response.prompt_cache
    batch.close()
    return [Finished(written[uid], left[uid]) for uid in uids]
