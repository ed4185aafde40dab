"""Arrays and measurements for cache tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx

HEADS, WIDTH = 2, 64
TOKEN_BYTES = 2 * HEADS * WIDTH * 4
"""Bytes of one token's keys and values in float32."""


def kv(tokens: int, batch: int = 1, start: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    """Return keys and values of `tokens` tokens: their indices, and the negatives."""
    index = mx.arange(start, start + tokens).reshape(1, 1, tokens, 1)
    keys = mx.broadcast_to(index, (batch, HEADS, tokens, WIDTH)).astype(dtype)
    mx.eval(keys)
    return keys, -keys


def feed(cache: Any, *chunks: int, start: int = 0) -> Any:
    """Write chunks in turn, evaluating each; return the last result."""
    fetched = None
    for tokens in chunks:
        del fetched  # a view still held would turn the next write into a copy
        fetched = cache.update_and_fetch(*kv(tokens, start=start))
        mx.eval(fetched)
        start += tokens
    return fetched


def indices(side: mx.array, row: int = 0) -> list[int]:
    """Return the token in each column of a side made by `kv`."""
    return [abs(int(number)) for number in side[row, 0, :, 0].tolist()]


def peak_above(act: Callable[[], Any]) -> int:
    """Return the peak of allocated bytes above the start while `act` ran."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    act()
    return int(mx.get_peak_memory()) - int(before)


def model_of(family: str, **changes: Any) -> Any:
    """Build a small random float32 model of mlx-lm's, seeded."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "vocab_size": 300,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        **changes,
    }
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model
