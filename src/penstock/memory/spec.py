"""Memory-related specifications of layers and models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import SettingError

LayerKind = Literal["full", "window", "recurrent"]
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV and state that one layer holds for a sequence."""

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int | None = None
    state_bytes: int | None = 0

    def columns(self, max_kv_size: int) -> int:
        if self.kind == "recurrent":
            return 0
        return min(max_kv_size, self.window_tokens or max_kv_size)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Memory-related properties of a model.

    `layers` have one cache each, in order. `notes` describe assumptions made. `max_tokens` is the
    context length. `whole_weight_bytes` counts the weights outside the layers. `raw_dtype` is the
    dtype of unquantized keys and values, if it differs from `dtype`.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerSpec, ...]
    weight_bytes: int | None
    weight_source: str
    max_tokens: int | None
    notes: tuple[str, ...] = ()
    whole_weight_bytes: int = 0
    raw_dtype: str | None = None

    def keeping(self, kv_bits: int | None) -> ModelSpec:
        """Return this model with the dtype in which its KV is stored, given `kv_bits`."""
        if self.raw_dtype is None or kv_bits is not None:
            return self
        return replace(self, dtype=self.raw_dtype)

    @property
    def scalar_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes or 0 for layer in self.layers)


def divided(spec: ModelSpec, hosts: int, *, pipeline: bool = False) -> ModelSpec:
    """Return the specification of the part of a model on one of `hosts` machines.

    Tensor parallelism: an equal share of each layer's heads, states and weights, and everything
    outside the layers; the single head of latent attention is replicated. With `pipeline`: whole
    layers, of the same kinds on each machine.
    """
    if hosts == 1:
        return spec
    layers = _some_layers(spec, hosts) if pipeline else _some_heads(spec, hosts)
    weights = spec.weight_bytes
    if weights is not None:
        weights = spec.whole_weight_bytes + -(-(weights - spec.whole_weight_bytes) // hosts)
    return replace(
        spec,
        layers=layers,
        weight_bytes=weights,
        weight_source=f"{spec.weight_source}; of one of {hosts} machines",
    )


def _some_heads(spec: ModelSpec, hosts: int) -> tuple[LayerSpec, ...]:
    for layer in spec.layers:
        if layer.kv_heads > 1 and layer.kv_heads % hosts:
            raise SettingError(
                f"{spec.name} has {layer.kv_heads} heads of keys and values, which --hosts {hosts} "
                f"does not divide; mlx-lm gives every machine whole ones, or with --pipeline "
                f"whole layers"
            )
    return tuple(
        replace(
            layer,
            kv_heads=max(1, layer.kv_heads // hosts) if layer.kv_heads else 0,
            state_bytes=None if layer.state_bytes is None else -(-layer.state_bytes // hosts),
        )
        for layer in spec.layers
    )


def _some_layers(spec: ModelSpec, hosts: int) -> tuple[LayerSpec, ...]:
    count, rest = divmod(len(spec.layers), hosts)
    first = spec.layers[:count]
    if rest or any(spec.layers[i * count :][:count] != first for i in range(hosts)):
        raise SettingError(
            f"{spec.name} has {len(spec.layers)} layers, which --hosts {hosts} does not divide "
            f"into equal parts; penstock decides for all machines at once, which must hold the same"
        )
    return first


def layer_groups(spec: ModelSpec) -> Iterator[tuple[int, LayerSpec]]:
    for layer, count in Counter(spec.layers).items():
        yield count, layer
