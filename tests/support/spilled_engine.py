"""An engine that spills old KV from memory to a folder."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cold_engine
import mlx.core as mx
from core_parts import retention_of
from engine_faults import LOUDER, VOCABULARY_TOKENS, model_of
from small_models import BASE
from small_models import build as small_model
from tiny_families import build

from penstock.engine.core import Core
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.retention.spilling import Spilling
from penstock.ledger import Kind

ACTIVE = 256
CHOICE: dict[str, Any] = {"attend_tokens": 128, "max_kv_size": 4_096, "prefill_chunk": 128}
SPILLED: dict[str, Any] = {**CHOICE, "active_kv_size": ACTIVE}


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 90) for _ in range(tokens))


@contextmanager
def running(folder: Path, family: str = "llama", **settings: Any) -> Iterator[Core]:
    model = build(family) if family == "cohere2" else model_of(family)
    given = {"model": model, "record_tokens": 64, **SPILLED, **settings}
    with cold_engine.running(folder, **given) as core:
        yield core


def spilling_of(core: Core) -> Spilling:
    spilling = retention_of(core, Spilling)
    assert spilling is not None
    return spilling


@functools.cache
def single_layer() -> Any:
    """Return a random float32 llama of one layer and one head whose text depends on the past."""
    config = {"model_type": "llama", "vocab_size": VOCABULARY_TOKENS, "torch_dtype": "float32"}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    mx.random.seed(3)
    model = small_model({**BASE, **config, **heads, "num_hidden_layers": 1})
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = model.layers[0].self_attn[name]
        module.weight = module.weight * LOUDER["llama"]
    mx.eval(model.parameters())
    return model


def others_bytes(model: Any) -> int:
    """Return MLX's bytes besides a model's weights, before an engine exists."""
    return int(mx.get_active_memory()) - weight_bytes(model)


def check_peak(core: Core, others: int) -> None:
    """Check that MLX's peak since the last check, plus bytes outside MLX, fits the limit."""
    room = spilling_of(core).blocks.cache_bytes + core.ledger.by_class()[Kind.INDEX]
    taken = mx.get_peak_memory() - others + room
    assert taken <= core.ledger.limit_bytes, f"{taken} bytes of {core.ledger.limit_bytes}"
    mx.reset_peak_memory()
