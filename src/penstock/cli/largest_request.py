"""The largest request that `penstock serve` admits: measured, as the server itself does it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import config
from penstock.cli import options
from penstock.memory import format_bytes

if TYPE_CHECKING:
    from penstock.engine.view import SpilledBytes


@dataclass(frozen=True, slots=True)
class LargestRequest:
    """The largest request that an engine admits."""

    tokens: int
    """Most tokens that a prompt and its answer have together."""
    spilled: SpilledBytes | None
    """Its bytes in memory, where most of its keys and values are in a cold tier."""


def largest_request(
    model: str, weights_dtype: config.WeightsDtype, memory_limit: int, **engine: Any
) -> LargestRequest:
    """Load a model and return the most tokens that a prompt and its answer have together.

    It is the service's own number, which the banner and `/v1/models` show: the working memory of a
    step is measured, and the memory for prompts set aside.

    Args:
        model: as `penstock serve` takes it.
        weights_dtype: see `--weights-dtype`.
        memory_limit: bytes, for weights and all else.
        engine: other settings of the engine.

    Raises:
        ModelError: the model cannot be loaded, or the engine cannot run it.
        SettingError: weights and buffers are over the limit.
    """
    # mlx-lm takes a second to import, which a plan alone need not wait for.
    from penstock.cli.engines import make_engine
    from penstock.server.service import Service

    loaded = options.load_quietly(model, weights_dtype, memory_limit)
    with tempfile.TemporaryDirectory() as folder:
        if engine.get("active_kv_size") is not None:
            engine["ssd_cache_dir"] = folder
        with make_engine(loaded, memory_limit=memory_limit, **engine) as running:
            service = Service(running, loaded.tokenizer, config.ServerSettings(), model)
            try:
                tokens = service.context_tokens
                spilled = running.ask(lambda view: view.spilled_bytes(tokens)).result()
                return LargestRequest(tokens, spilled)
            finally:
                service.close()


def spilled_line(spilled: SpilledBytes, memory_bytes: int) -> str:
    """Write the bytes in memory of a sequence that is mostly in a cold tier."""
    index, places, active, tree, cache = (
        format_bytes(nbytes)
        for nbytes in (
            *(spilled.index_bytes, spilled.place_bytes),
            *(spilled.active_bytes, spilled.tree_bytes, spilled.cache_bytes),
        )
    )
    return (
        f"spilled  {spilled.tokens:,} tokens in {format_bytes(memory_bytes)}: index {index}, "
        f"places {places}, {spilled.active_tokens:,} tokens exactly {active}, tree {tree}, "
        f"cache {cache}"
    )
