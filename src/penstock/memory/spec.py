"""Specification of a layer and of a model, as far as memory is concerned."""

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
    """State that one layer keeps for a sequence.

    `state_bytes` is a state without a token axis (convolution and recurrence), for one
    sequence; None if the config does not tell. A full layer can have one beside its KV.
    """

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int | None = None
    state_bytes: int | None = 0

    def columns(self, max_kv_size: int) -> int:
        """Tokens this layer has room for when the cache is bounded to `max_kv_size`."""
        if self.kind == "recurrent":
            return 0
        return min(max_kv_size, self.window_tokens or max_kv_size)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as far as memory is concerned.

    `layers` are the layers that own a cache, in order. `notes` name in words the assumptions, and
    the values that could not be read from the config. `max_tokens` is the longest text the model
    was made for, None if it does not say. `unquantizable` says why mlx-lm's code for the model
    cannot read quantized caches, None if it can. `whole_weight_bytes` count embeddings, head and
    all other weights outside of the layers.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerSpec, ...]
    weight_bytes: int | None
    weight_source: str
    max_tokens: int | None
    notes: tuple[str, ...] = ()
    unquantizable: str | None = None
    whole_weight_bytes: int = 0

    @property
    def scalar_bytes(self) -> int:
        """Bytes of one number of the model's dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, all layers; unknown states count as nothing."""
        return sum(layer.state_bytes or 0 for layer in self.layers)


def divided(spec: ModelSpec, hosts: int, *, pipeline: bool = False) -> ModelSpec:
    """Return the part of a model on one of `hosts` machines that divide it.

    That is an equal part of every layer's heads, states and weights, and all tensors outside the
    layers. The one head of a latent attention is on every machine.

    Args:
        spec: of the whole model.
        hosts: machines.
        pipeline: each machine has whole layers, as many and of the same kinds as the others.

    Raises:
        SettingError: the heads, or the layers, are not divisible by so many.
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
    """Return every layer, with a machine's heads of it."""
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
    """Return a machine's layers, which are like those of every other one."""
    count, rest = divmod(len(spec.layers), hosts)
    first = spec.layers[:count]
    if rest or any(spec.layers[i * count :][:count] != first for i in range(hosts)):
        raise SettingError(
            f"{spec.name} has {len(spec.layers)} layers, which --hosts {hosts} does not divide "
            f"into equal parts; penstock decides for all machines at once, which must hold the same"
        )
    return first


def layer_groups(spec: ModelSpec) -> Iterator[tuple[int, LayerSpec]]:
    """Yield each distinct layer with how often the model has it, in order of appearance."""
    for layer, count in Counter(spec.layers).items():
        yield count, layer
