"""The attention seam: layers whose caches are penstock's attend by them."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.caches.codec_reading import TurboQuant
from penstock.caches.selective import SelectiveKVCache
from penstock.kv.reads import Reads

_ATTENTION = "scaled_dot_product_attention"


def attach(model: nn.Module) -> tuple[str, ...]:
    """Put the attention seam under a model; return the modules in which it was put.

    In the modules of the model's own classes, the name `scaled_dot_product_attention` is bound
    to a dispatcher: a layer whose cache is one of penstock's `Reads`, a `TurboQuantKVCache` or a
    `SelectiveKVCache` attends by it, everything else goes to mlx-lm's function as before. Nothing
    else is patched. Again does nothing.
    """
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    names = {type(module).__module__ for module in modules}
    attached = []
    for name in sorted(names):
        module = sys.modules[name]
        theirs = getattr(module, _ATTENTION, None)
        if theirs is None:
            continue
        if not hasattr(theirs, "penstock_seam"):
            setattr(module, _ATTENTION, _dispatching(theirs))
        attached.append(name)
    return tuple(attached)


def _dispatching(theirs: Any) -> Any:
    @wraps(theirs)
    def dispatch(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> Any:
        if isinstance(cache, Reads):
            return cache.attend(queries, keys, values, scale, mask, sinks)
        if isinstance(cache, TurboQuant | SelectiveKVCache):
            mixed = cache.attend(queries, keys, values, scale, mask, sinks)
            if mixed is not None:
                return mixed
        return theirs(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    dispatch.penstock_seam = True  # type: ignore[attr-defined]
    return dispatch
