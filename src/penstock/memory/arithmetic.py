"""Bytes of KV caches, computed from a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.memory.spec import LayerKind, LayerSpec, ModelSpec

KV_BITS = (8, 6, 5, 4, 3, 2)
GROUP_SIZES = (32, 64, 128)


def vector_bytes(
    dim: int, scalar_bytes: int, kv_bits: int | None = None, group_size: int = 64
) -> int:
    """Return the bytes of one head's key (or value) of one token.

    Unquantized: dim x scalar_bytes. Quantized by `mx.quantize`: dim x bits / 8 of codes, and
    for each group one scale and one bias in the model's dtype. These add 2 x 8 x scalar_bytes /
    group_size bits to every number.
    """
    if kv_bits is None:
        return dim * scalar_bytes
    if kv_bits not in KV_BITS:
        raise SettingError(f"kv_bits {kv_bits} is not one of {_listed(KV_BITS)}")
    if group_size not in GROUP_SIZES:
        raise SettingError(f"group_size {group_size} is not one of {_listed(GROUP_SIZES)}")
    if dim % group_size:
        raise SettingError(
            f"group_size {group_size} does not divide the head size {dim}; "
            "choose a smaller group_size, or leave the cache in full precision"
        )
    return dim * kv_bits // 8 + 2 * (dim // group_size) * scalar_bytes


def layer_bytes_per_token(
    layer: LayerSpec, scalar_bytes: int, *, kv_bits: int | None = None, group_size: int = 64
) -> int:
    """Return the KV bytes of one token in a layer; 0 for a recurrent layer."""
    if layer.kind == "recurrent":
        return 0
    return layer.kv_heads * (
        vector_bytes(layer.key_dim, scalar_bytes, kv_bits, group_size)
        + vector_bytes(layer.value_dim, scalar_bytes, kv_bits, group_size)
    )


def bytes_per_token(
    spec: ModelSpec,
    *,
    kind: LayerKind | None = None,
    kv_bits: int | None = None,
    group_size: int = 64,
) -> int:
    """Return the KV bytes of one token over the layers of `kind`; None means all layers.

    Window layers stop growing at their window, after which only `kind="full"` counts.
    """
    return sum(
        layer_bytes_per_token(layer, spec.scalar_bytes, kv_bits=kv_bits, group_size=group_size)
        for layer in spec.layers
        if kind in (None, layer.kind)
    )


def bytes_of_window(
    spec: ModelSpec,
    max_kv_size: int,
    *,
    capacity: int | None = None,
    kv_bits: int | None = None,
    group_size: int = 64,
) -> int:
    """Return the bytes of one sequence in a cache of at most `max_kv_size` tokens.

    Sum over layers of min(max_kv_size, capacity, window) x bytes per token + state_bytes.
    `keep` does not matter: kept tokens are part of the window.
    """
    if max_kv_size < 1:
        raise SettingError(f"max_kv_size must be at least 1 token, not {max_kv_size}")
    if capacity is not None and capacity < 1:
        raise SettingError(f"capacity must be at least 1 token, not {capacity}")
    tokens = max_kv_size if capacity is None else min(max_kv_size, capacity)
    return spec.state_bytes + sum(
        layer.columns(tokens)
        * layer_bytes_per_token(layer, spec.scalar_bytes, kv_bits=kv_bits, group_size=group_size)
        for layer in spec.layers
    )


def bytes_of_batch(
    spec: ModelSpec,
    batch: int,
    max_kv_size: int,
    *,
    capacity: int | None = None,
    kv_bits: int | None = None,
    group_size: int = 64,
) -> int:
    """Return the bytes of `batch` sequences, each with a full window."""
    if batch < 1:
        raise SettingError(f"batch must be at least 1 sequence, not {batch}")
    return batch * bytes_of_window(
        spec, max_kv_size, capacity=capacity, kv_bits=kv_bits, group_size=group_size
    )


def group_size_for(spec: ModelSpec) -> int:
    """Return the group size of a quantized cache: 64, or 32 if 64 does not divide all heads."""
    dims = {d for layer in spec.layers for d in (layer.key_dim, layer.value_dim)}
    for group_size in (64, 32):
        if all(dim % group_size == 0 for dim in dims):
            return group_size
    odd = next(dim for dim in sorted(dims) if dim % 32)
    raise SettingError(
        f"head size {odd} of {spec.name} is not a multiple of 32, the smallest group "
        "mx.quantize has; leave the cache in full precision"
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of fitting a batch of bounded sequences in the memory left by the weights.

    `largest_window_tokens` is the largest max_kv_size at which the batch fits; None if no
    size is too large, because all layers have windows of their own.

    """

    free_bytes: int
    sequence_bytes: int
    sequences: int
    missing_bytes: int
    largest_window_tokens: int | None


def what_fits(
    spec: ModelSpec,
    memory_bytes: int,
    *,
    max_kv_size: int,
    batch: int = 1,
    kv_bits: int | None = None,
    group_size: int = 64,
) -> Fit:
    """Divide the memory left by the weights among sequences.

    free = memory - weights (unknown weights count as 0);
    sequences = free // bytes_of_window; missing = bytes_of_batch - free, if positive.
    """
    free = memory_bytes - (spec.weight_bytes or 0)

    def batch_bytes(tokens: int) -> int:
        return bytes_of_batch(spec, batch, tokens, kv_bits=kv_bits, group_size=group_size)

    growing = bytes_per_token(spec, kind="full", kv_bits=kv_bits, group_size=group_size)
    ring = max((layer.window_tokens or 1 for layer in spec.layers), default=1)
    largest: int | None = None
    if growing or batch_bytes(ring) > free:
        largest, above = 0, (max(free, 0) // (batch * growing) if growing else ring) + 1
        while largest + 1 < above:
            middle = (largest + above) // 2
            largest, above = (middle, above) if batch_bytes(middle) <= free else (largest, middle)
    needed = batch_bytes(max_kv_size)
    sequence = needed // batch
    return Fit(
        free_bytes=free,
        sequence_bytes=sequence,
        sequences=max(free, 0) // sequence if sequence else 0,
        missing_bytes=max(needed - free, 0),
        largest_window_tokens=largest,
    )


def default_limit_bytes(recommended_bytes: int) -> int:
    """Return the memory limit for a device that recommends `recommended_bytes`.

    70 % below 32 GB, 75 % below 64 GB, 80 % below 128 GB, 85 % otherwise: a small
    machine needs a larger share for other programs.
    """
    for under_gb, percent in ((32, 70), (64, 75), (128, 80)):
        if recommended_bytes < under_gb * 10**9:
            return recommended_bytes * percent // 100
    return recommended_bytes * 85 // 100


def default_threshold(total_bytes: int) -> float:
    """Return the share of memory in use above which prefixes are evicted: the limit plus 10 %."""
    return default_limit_bytes(total_bytes) / total_bytes + 0.1


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
