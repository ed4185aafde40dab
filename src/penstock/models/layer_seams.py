"""Hooks in a model's layers: attention, and matrix products with weights."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.latent_reads import ExpandedRows, LatentRows
from penstock.attention.reads import Reads
from penstock.caches.codec import TurboQuant
from penstock.caches.selective import SelectiveKVCache
from penstock.kv.checks import loaded_model
from penstock.models.latent_products import absorber
from penstock.models.own_indexes import HELPERS, chooser

_ATTENTION = "scaled_dot_product_attention"
HEAD = "lm_head"
"""Name of an output layer in mlx-lm's models."""
IS_HEAD = "penstock_head"
"""Attribute that marks an output layer."""


def attach(model: nn.Module) -> tuple[str, ...]:
    """Let penstock's caches compute a model's attention; return the names of the changed modules.

    In the Python modules of the model's classes, `scaled_dot_product_attention` is replaced by a
    dispatcher. It calls the cache's own attention for the engine's caches, a `TurboQuantKVCache` or
    a `SelectiveKVCache`, and mlx-lm's function for all others. The classes of linear layers and
    embeddings are replaced by this module's, those of indexes by `own_indexes`', and those of
    products with latents by `latent_products`'. Nothing else is patched. Idempotent.
    """
    loaded_model("attach", model)
    named: list[tuple[str, nn.Module]] = model.named_modules()  # type: ignore[no-untyped-call]
    names = {type(module).__module__ for _, module in named}
    names |= {helper for name in names for helper in HELPERS.get(name, ())}
    for name, part in named:
        kind = _SEAMS.get(type(part)) or chooser(type(part)) or absorber(type(part))
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
        if isinstance(keys, LatentRows | ExpandedRows) and not isinstance(cache, Reads):
            cache = cache[0]  # with an index, a layer passes on both of its caches
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
    """State of this thread's forward pass, set by the context managers below."""

    device: AttentionBackend | None = None
    logit_rows: Sequence[int] | None = None
    """Rows of the batch whose logits are needed; None for all."""
    skipped_tokens: int = 0
    """Number of leading tokens of each row whose logits are not needed."""
    adapters: mx.array | int = 0
    """Adapter number of each row, or one number for all rows."""


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
    """Let `device` compute products with weights, on this thread, within the context."""
    _active.device = device
    try:
        yield
    finally:
        _active.device = None


@contextmanager
def adapted(numbers: Sequence[int]) -> Iterator[None]:
    """Apply adapter `numbers[i]` to row i of a batch, on this thread, in a `with` block."""
    alike = len(set(numbers)) == 1
    _active.adapters = numbers[0] if alike else mx.array(list(numbers), dtype=mx.uint32)
    try:
        yield
    finally:
        _active.adapters = 0


def row_adapters(x: mx.array | None = None, layer: nn.Module | None = None) -> mx.array | int:
    """Return the adapter number of each row of this thread's batch, or one number for all.

    For the input `x` of an output layer, only of those rows that `read_rows` returns.
    """
    numbers, rows = _active.adapters, _active.logit_rows
    if x is None or not rows or isinstance(numbers, int) or not _reads_rows(layer):
        return numbers
    return numbers[mx.array(list(rows))]


@contextmanager
def without_logits() -> Iterator[None]:
    """Let models skip their logits, on this thread, within the context."""
    with logits_of(()):
        yield


@contextmanager
def logits_of(rows: Sequence[int]) -> Iterator[None]:
    """Let output layers compute only the given rows of a batch, on this thread."""
    _active.logit_rows = rows
    try:
        yield
    finally:
        _active.logit_rows = None


@contextmanager
def logits_behind(tokens: int) -> Iterator[None]:
    """Let output layers skip the first `tokens` tokens of each row, on this thread."""
    _active.skipped_tokens = tokens
    try:
        yield
    finally:
        _active.skipped_tokens = 0


def skips_logits() -> bool:
    return _active.logit_rows is not None and not _active.logit_rows


def read_rows(x: mx.array, layer: nn.Module | None = None) -> mx.array:
    """Return the part of an output layer's input whose logits are needed; all for other layers."""
    rows, skipped = _active.logit_rows, _active.skipped_tokens
    if not (rows or skipped) or not _reads_rows(layer):
        return x
    return x[:, skipped:] if rows is None else x[mx.array(list(rows))]


def _reads_rows(layer: nn.Module | None) -> bool:
    return layer is None or getattr(layer, IS_HEAD, False)
