"""Hooks in a model's layers: attention through penstock's caches, products by its back end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.reads import Reads
from penstock.caches.codec import TurboQuant
from penstock.caches.selective import SelectiveKVCache
from penstock.kv.checks import loaded_model

_ATTENTION = "scaled_dot_product_attention"
HEAD = "lm_head"
"""Name of an output layer in mlx-lm's models."""
IS_HEAD = "penstock_head"
"""Attribute of an output layer."""


def attach(model: nn.Module) -> tuple[str, ...]:
    """Redirect a model's attention to penstock's caches; return the changed modules.

    In the modules of the model's own classes, the name `scaled_dot_product_attention` is bound to a
    dispatcher. A layer attends by its cache if that is one of penstock's `Reads`, a
    `TurboQuantKVCache` or a `SelectiveKVCache`. All other calls go to mlx-lm's function as before.
    Linear layers and embeddings become this module's classes. Nothing else is patched. Idempotent.
    """
    loaded_model("attach", model)
    named: list[tuple[str, nn.Module]] = model.named_modules()  # type: ignore[no-untyped-call]
    names = {type(module).__module__ for _, module in named}
    for name, part in named:
        kind = _SEAMS.get(type(part))
        if kind is not None:
            part.__class__ = kind
        if name.rpartition(".")[2] == HEAD:
            setattr(part, IS_HEAD, True)
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


# ---- products with weights


class _Active(threading.local):
    """Back end of this thread's products during a decode step; None otherwise."""

    device: AttentionBackend | None = None
    logit_rows: int | None = None
    """First rows of a batch whose logits are read; None for all of them."""


_active = _Active()


class Linear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        x = read_rows(x, self)
        if _active.device is None:
            return super().__call__(x)
        products = _active.device.multiply_weights(x, self["weight"])
        return products + self["bias"] if "bias" in self else products


class Embedding(nn.Embedding):
    """An embedding that may also be the output layer; see `Linear`."""

    def as_linear(self, x: mx.array) -> mx.array:
        x = read_rows(x)
        if _active.device is None:
            return super().as_linear(x)  # type: ignore[no-any-return, no-untyped-call]
        return _active.device.multiply_weights(x, self["weight"])


_SEAMS: dict[type, type[nn.Module]] = {nn.Linear: Linear, nn.Embedding: Embedding}


@contextmanager
def decoding(device: AttentionBackend) -> Iterator[None]:
    """Let a back end compute products with weights on this thread."""
    _active.device = device
    try:
        yield
    finally:
        _active.device = None


@contextmanager
def without_logits() -> Iterator[None]:
    """Let a model skip its logits on this thread, as nothing reads them."""
    with logits_of(0):
        yield


@contextmanager
def logits_of(rows: int) -> Iterator[None]:
    """Let output layers compute the first rows of a batch alone on this thread."""
    _active.logit_rows = rows
    try:
        yield
    finally:
        _active.logit_rows = None


def skips_logits() -> bool:
    return _active.logit_rows == 0


def read_rows(x: mx.array, layer: nn.Module | None = None) -> mx.array:
    """Return the rows of an output layer's input whose logits are read; all for another layer."""
    if not _active.logit_rows or (layer is not None and not getattr(layer, IS_HEAD, False)):
        return x
    return x[: _active.logit_rows]
