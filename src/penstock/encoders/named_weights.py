"""Weights of an encoder by their names in transformers, and the layers that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx

from penstock.encoders.encoder_spec import EncoderSpec
from penstock.errors import ModelError


@dataclass(frozen=True, slots=True)
class LinearLayer:
    weight: mx.array
    """Transposed weight (inputs, outputs)."""
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight if self.bias is None else mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: mx.array
    bias: mx.array | None
    epsilon: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.epsilon)


class NamedWeights:
    """Looks up weights by their names in transformers, whichever class saved them.

    Args:
        marker: name of a weight that each such model has.
        prefixes: prefixes of the names, by the class that saved them.
    """

    def __init__(
        self,
        weights: Mapping[str, mx.array],
        spec: EncoderSpec,
        marker: str,
        prefixes: Sequence[str],
    ) -> None:
        self._spec = spec
        self._weights = {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            ): array
            for name, array in weights.items()
        }
        self._prefix = next((p for p in prefixes if p + marker in self._weights), "")

    def __contains__(self, name: str) -> bool:
        """Return whether there is a weight of this whole name."""
        return name in self._weights

    def array(self, name: str, *shape: int | None, whole: bool = False) -> mx.array:
        """Return the array of a name, checked against a shape in which None is any size."""
        name = name if whole else self._prefix + name
        array = self._weights.get(name)
        if array is None:
            raise ModelError(f"{self._spec.folder} has no weight {name}")
        fits = len(shape) == array.ndim and all(
            size in (None, of_array) for size, of_array in zip(shape, array.shape, strict=True)
        )
        if not fits:
            raise ModelError(
                f"{self._spec.folder}: {name} has the shape {array.shape}, unlike config.json"
            )
        return array

    def linear(
        self, name: str, rows: int, columns: int, *, whole: bool = False, bias: bool = True
    ) -> LinearLayer:
        weight = self.array(f"{name}.weight", rows, columns, whole=whole)
        added = self.array(f"{name}.bias", rows, whole=whole) if bias else None
        return LinearLayer(weight.T, added)

    def norm(self, name: str, *, whole: bool = False, bias: bool = True) -> LayerNorm:
        width = self._spec.width
        weight = self.array(f"{name}.weight", width, whole=whole)
        added = self.array(f"{name}.bias", width, whole=whole) if bias else None
        return LayerNorm(weight, added, self._spec.epsilon)


def arrays_of(parts: Sequence[Any]) -> Iterator[mx.array]:
    """Yield the arrays in layers, and in dataclasses of layers."""
    for part in parts:
        if isinstance(part, mx.array):
            yield part
        elif is_dataclass(part):
            yield from arrays_of([getattr(part, of.name) for of in fields(part)])
