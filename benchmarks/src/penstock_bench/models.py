"""Models of engine benchmarks, and prompts of exact lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from penstock import config, memory
from penstock.cli.model_table import name_of
from penstock.cli.planned_spec import limit_or_usual, read_spec
from penstock.models.loading import load, load_all
from penstock.models.mlx_lm import render
from penstock.models.weight_packer import pack
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue
from penstock_bench.rivals import random_llama

DIALOGUE_TOKENS = 2_000
"""Maximum length of the dialogues that make up long prompts of the embedded model."""


class ModelChoice(StrEnum):
    """Model of a benchmark."""

    RANDOM = "random"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Shape of the random llama, with the embedded model's vocabulary.

    The defaults have 21.5 million parameters, and 16 KiB of KV per token.
    """

    layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 640
    query_heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Model in memory, with a tokenizer for all of its tokens."""

    name: str
    model: Any
    tokenizer: Any
    layers: int
    kv_bytes_per_token: int
    query_heads: int
    block_size: int
    """Default block size of the engine for this model, in tokens."""
    draw: Callable[[int, int], list[int]]
    """Returns a prompt of exactly this length: `draw(seed, tokens)`."""
    dtype: str = "float32"
    exact: bool = True
    """Whether all correct sides generate the same tokens: float32, and logits far apart."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(weights.size for weights in dict(tree_flatten(self.model.parameters())).values())

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Return a prompt of exactly `tokens` tokens, determined by the seed."""
        return self.draw(seed, tokens)

    def as_object(self) -> dict[str, Any]:
        """Return the model's entry in a record."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "dtype": self.dtype,
        }


def packed_model(shape: LlamaShape | None = None) -> BenchModel:
    """Return the random llama in 4 bits, multiplied by its codes, with KV in float16."""
    wide = bench_model(ModelChoice.RANDOM, shape)
    nn.quantize(wide.model, group_size=32, bits=4)
    pack(wide.model, lambda module: None, exact=False)
    halved = wide.kv_bytes_per_token // 2
    return replace(wide, name="random llama, 4 bits", kv_bytes_per_token=halved, dtype="packed")


def bench_model(choice: str, shape: LlamaShape | None = None) -> BenchModel:
    """Load a model, or construct a random one of `shape`; see `ModelChoice` and `load_all`."""
    if choice not in list(ModelChoice):
        return _real_model(choice)
    embedded, tokenizer = load(MODEL_PATH)
    vocabulary_size = int(embedded.args.vocab_size)
    random_tokens = _drawn_from(range(vocabulary_size))

    def dialogues(seed: int, tokens: int) -> list[int]:
        return _dialogues(tokenizer, seed, tokens)

    if choice == ModelChoice.EMBEDDED:
        return _described("embedded", embedded, tokenizer, config.BLOCK_SIZE, dialogues)
    sizes = shape or LlamaShape()
    model = random_llama(
        layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        query_heads=sizes.query_heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocabulary_size=vocabulary_size,
    )
    return _described("random llama", model, tokenizer, config.BLOCK_SIZE, random_tokens)


def _real_model(choice: str) -> BenchModel:
    loaded = load_all(choice)
    spec = read_spec(choice, "auto", limit_or_usual(None)).keeping(None)
    special = set(loaded.tokenizer.all_special_ids)
    config_of_text = loaded.config.get("text_config", loaded.config)
    return BenchModel(
        name_of(choice),
        loaded.model,
        loaded.tokenizer,
        len(spec.layers),
        memory.bytes_per_token(spec),
        int(config_of_text["num_attention_heads"]),
        config.BLOCK_SIZE,
        _drawn_from([i for i in range(loaded.tokenizer.vocab_size) if i not in special]),
        dtype=spec.dtype,
        exact=False,
    )


def _drawn_from(tokens: Sequence[int]) -> Callable[[int, int], list[int]]:
    return lambda seed, count: Random(seed).choices(tokens, k=count)


def _dialogues(tokenizer: Any, seed: int, tokens: int) -> list[int]:
    """Return `tokens` tokens of dialogues, ending with a question about the last fact."""
    length = min(DIALOGUE_TOKENS, max(64, tokens))
    talk = dialogue(seed << 20, tokens=length, facts=length // 64)
    written = render(tokenizer, talk.ask(talk.questions[-1]))
    while len(written) < tokens:
        earlier = dialogue((seed << 20) + len(written), tokens=DIALOGUE_TOKENS)
        written = render(tokenizer, earlier.messages, answer=False) + written
    return written[-tokens:]


def _described(
    name: str,
    model: Any,
    tokenizer: Any,
    block_size: int,
    draw: Callable[[int, int], list[int]],
) -> BenchModel:
    args = model.args
    head_dim = args.head_dim or args.hidden_size // args.num_attention_heads
    numbers = 2 * args.num_hidden_layers * args.num_key_value_heads * head_dim
    return BenchModel(
        name,
        model,
        tokenizer,
        int(args.num_hidden_layers),
        int(numbers) * mx.float32.size,
        int(args.num_attention_heads),
        block_size,
        draw,
    )
