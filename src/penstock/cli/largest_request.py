"""Measurement of the largest request that `penstock serve` would admit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import config
from penstock.cli import options
from penstock.memory.sizes import format_bytes
from penstock.passing_folders import passing_folder
from penstock.plurals import counted

if TYPE_CHECKING:
    from penstock.engine.view import SpilledBytes


@dataclass(frozen=True, slots=True)
class LargestRequest:
    tokens: int
    spilled: SpilledBytes | None


def largest_request(
    model: str, weights_dtype: config.WeightsDtype, memory_limit: int, **engine: Any
) -> LargestRequest:
    """Load a model and return the largest request that the server would admit."""
    # mlx-lm takes a second to import, and a plan without --measure does not need it.
    from penstock.cli.engines import make_engine
    from penstock.server.service import Service

    mtp = options.head_of(engine)
    loaded = options.load_quietly(model, weights_dtype, memory_limit, mtp=mtp)
    with passing_folder() as folder:
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
    index, places, active, tree, cache = (
        format_bytes(nbytes)
        for nbytes in (
            *(spilled.index_bytes, spilled.place_bytes),
            *(spilled.active_bytes, spilled.tree_bytes, spilled.cache_bytes),
        )
    )
    return (
        f"spilled  {counted(spilled.tokens, 'token')} in "
        f"{format_bytes(memory_bytes)}: index {index}, "
        f"places {places}, {counted(spilled.active_tokens, 'token')} exactly "
        f"{active}, tree {tree}, "
        f"cache {cache}"
    )
