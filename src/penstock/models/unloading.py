"""Release of a model's weights even if parts of a closed engine still refer to the model."""

from __future__ import annotations

import gc
import traceback

import mlx.nn as nn


def drop_frames(error: BaseException | None) -> None:
    """Clear the local variables in an error's tracebacks, which may refer to weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def unload(model: nn.Module) -> None:
    """Drop all weights and attributes of a model, which cannot be used afterwards."""
    modules: list[nn.Module] = list(model.modules())  # type: ignore[no-untyped-call]
    for module in modules:
        module.clear()
        module.__dict__.clear()
    gc.unfreeze()  # undoes the server's `gc.freeze`
    gc.collect()
