"""Arrays of a model that are not weights, such as the frequencies of a scaled RoPE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def evaluate(model: Any) -> None:
    """Evaluate the weights and constants of a model; do nothing if it is not an `nn.Module`.

    The engine's thread cannot evaluate arrays that another thread has left unevaluated.
    """
    if isinstance(model, nn.Module):
        mx.eval(model.parameters(), list(_constants(model)))  # type: ignore[no-untyped-call]


def _constants(model: nn.Module) -> Iterator[mx.array]:
    modules: list[Any] = model.modules()  # type: ignore[no-untyped-call]
    for module in modules:
        yield from (a for name, a in module.items() if name[0] == "_" and isinstance(a, mx.array))
        for part in vars(module).values():
            yield from (a for a in getattr(part, "__dict__", {}).values() if type(a) is mx.array)
