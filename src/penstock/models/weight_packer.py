"""Weights kept in their own bits on a CPU: the interface to the plug-in that multiplies them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from penstock.attention import devices
from penstock.config import WeightsDtype
from penstock.errors import ModelError
from penstock.extensions import extension
from penstock.memory import ModelSpec
from penstock.models.widening import Widening, model_bytes, widen

logger = logging.getLogger(__name__)


Packing: TypeAlias = Literal["layer", "product"]
"""Way to multiply by codes: within a compiled decoder layer, or by itself."""


class WeightPacker(Protocol):
    def takes(self, module: nn.Module) -> bool: ...
    def packed_bytes(self, module: nn.Module) -> int: ...

    def pack(self, model: nn.Module, *, exact: bool) -> None:
        """Replace quantized modules one by one; the rest of the model is in float32."""

    def packing(self, module: nn.Module) -> Packing | None:
        """Return how a module multiplies by its codes; None if `pack` did not make it."""

    def kv_dtype(self, model: nn.Module) -> mx.Dtype | None:
        """Return the dtype in which a model's KV is kept; None for that of its activations."""

    def planned_kv_dtype(self, spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
        """Return the name of that dtype for a model that is not loaded, by its config."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """The modules of a packed model by how they multiply: how many of each name."""

    layers: Mapping[str, int]
    products: Mapping[str, int]
    """Modules that multiply by their codes, outside of a compiled layer."""
    float32: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> PackedParts | None:
        """Return those of a model; None if none of its modules is packed."""
        packer = weight_packer()
        modules: list[tuple[str, nn.Module]] = model.named_modules()  # type: ignore[no-untyped-call]
        by_kind: dict[str, Counter[str]] = {"layer": Counter(), "product": Counter()}
        dense: Counter[str] = Counter()
        for name, module in modules if packer is not None else []:
            shared = re.sub(r"\b\d+\b", "*", name)
            kind = None if packer is None else packer.packing(module)
            if kind is not None:
                by_kind[kind][shared] += 1
            elif _is_wide(module):
                dense[shared] += 1
        if packer is None or not any(by_kind.values()):
            return None
        layers, products = (dict(by_kind[kind]) for kind in ("layer", "product"))
        return cls(layers, products, dict(dense))


def _is_wide(module: nn.Module) -> bool:
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim > 1 and weight.dtype == mx.float32


def weight_packer() -> WeightPacker | None:
    """Return the plug-in `packed`; None if it or its library is not installed."""
    try:
        packer: WeightPacker | None = extension("packed")
    except ImportError as error:
        logger.info("weights cannot be multiplied in packed form: %s", error)
        return None
    return packer


def kv_dtype(model: nn.Module) -> mx.Dtype | None:
    """Return the dtype in which a model's KV is kept; None for that of its activations."""
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    if not any(hasattr(module, "packed_bytes") for module in modules):
        return None  # without the plug-in's libraries
    packer = weight_packer()
    return None if packer is None else packer.kv_dtype(model)


def planned_kv_dtype(spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
    """Return the name of `kv_dtype` for a model that is not loaded, by its config."""
    packer = weight_packer()
    return None if packer is None else packer.planned_kv_dtype(spec, config)


def can_pack() -> bool:
    """Return whether `auto` may choose packed weights."""
    return devices.current().facts.slow_half and weight_packer() is not None


def decision(model: nn.Module, choice: WeightsDtype, limit_bytes: int | None) -> Widening:
    """Decide the dtype of the weights of a loaded model, none of which is evaluated."""
    native, wide = model_bytes(model)
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    quantized = any("scales" in module for module in modules)
    # The plug-in's libraries take 0.2 s to import.
    packed = _packed_bytes(model, wide) if quantized and can_pack() else None
    return Widening(choice, native, wide, limit_bytes, packed)


def _packed_bytes(model: nn.Module, wide_bytes: int) -> int | None:
    """Return the bytes of a model's weights once packed; None if nothing can be packed."""
    packer = weight_packer()
    if packer is None:
        return None
    modules: list[Any] = model.modules()  # type: ignore[no-untyped-call]
    modules = [module for module in modules if packer.takes(module)]
    if not modules:
        return None
    wide: int = sum(4 * module.weight.size * 32 // module.bits for module in modules)
    return wide_bytes - wide + sum(map(packer.packed_bytes, modules))


def pack(model: nn.Module, dense: Callable[[nn.Module], nn.Module | None], *, exact: bool) -> None:
    """Replace quantized modules by ones that multiply codes directly; convert the rest to float32.

    Args:
        model: loaded lazily, or evaluated.
        dense: see `widen`; used for modules whose codes cannot be multiplied directly.
        exact: whether activations have 24 bits, not 16.

    Raises:
        ModelError: the plug-in is not installed.
    """
    packer = weight_packer()
    if packer is None:
        raise ModelError("--weights-dtype packed needs Numba: pip install numba, or take float32")
    widen(model, dense, packer.takes)
    packer.pack(model, exact=exact)
    widen(model, lambda module: None)  # what was left, and could not be packed
