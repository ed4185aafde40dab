"""The largest request that `penstock serve` admits: measured, as the server itself does it."""

from __future__ import annotations

from typing import Any

from penstock import config
from penstock.cli import options


def largest_request(
    model: str, weights_dtype: config.WeightsDtype, memory_limit: int, **engine: Any
) -> int:
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
    with make_engine(loaded, memory_limit=memory_limit, **engine) as running:
        service = Service(running, loaded.tokenizer, config.ServerSettings(), model)
        try:
            return service.context_tokens
        finally:
            service.close()
