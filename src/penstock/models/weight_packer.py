"""Interface to the plug-in that multiplies by quantized weights directly on a CPU ("packed")."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from penstock.config import WeightsDtype
from penstock.errors import ModelError
from penstock.extensions import extension
from penstock.memory import ModelSpec
from penstock.models.widening import Widening, model_bytes, slow_half, widen

logger = logging.getLogger(__name__)


Packing: TypeAlias = Literal["layer", "product"]
"""Kind of a packed module: in a compiled decoder layer, or a single product."""


class WeightPacker(Protocol):
    def takes(self, module: nn.Module) -> bool: ...
    def packed_bytes(self, module: nn.Module) -> int: ...

    def pack(self, model: nn.Module, *, exact: bool, read: Callable[[str], None]) -> None:
        """Replace the quantized modules of a model one by one; the rest is in float32 already.

        `read` is called with a module's name before its codes are used.
        """

    def packing(self, module: nn.Module) -> Packing | None:
        """Return how a module multiplies by its codes; None for modules that are not packed."""

    def kv_dtype(self, model: nn.Module) -> mx.Dtype | None:
        """Return the dtype in which a model's KV is stored, or None for that of activations."""

    def planned_kv_dtype(self, spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
        """Return the name of `kv_dtype` for a model that is not loaded, from its config."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Number of modules of each name in a packed model, by how they are computed."""

    layers: Mapping[str, int]
    products: Mapping[str, int]
    """Modules that multiply by their codes outside compiled layers."""
    float32: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> PackedParts | None:
        """Count the modules of a model; None if none of them is packed."""
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
    """Return the plug-in for packed weights; None if it or its library is not installed."""
    try:
        packer: WeightPacker | None = extension("packed")
    except ImportError as error:
        logger.info("weights are not packed, because the plug-in cannot be imported: %s", error)
        return None
    return packer


def kv_dtype(model: nn.Module) -> mx.Dtype | None:
    """Return the dtype in which a model's KV is stored, or None for its activations' dtype."""
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    if not any(hasattr(module, "packed_bytes") for module in modules):
        return None  # without importing the plug-in's libraries
    packer = weight_packer()
    return None if packer is None else packer.kv_dtype(model)


def planned_kv_dtype(spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
    """Return the name of `kv_dtype` for a model that is not loaded, from its config."""
    packer = weight_packer()
    return None if packer is None else packer.planned_kv_dtype(spec, config)


def can_pack() -> bool:
    """Return whether `--weights-dtype auto` may choose packed weights on this device."""
    return slow_half() and weight_packer() is not None


def decision(model: nn.Module, choice: WeightsDtype, limit_bytes: int | None) -> Widening:
    """Decide how to convert the weights of a lazily loaded model, without evaluating them."""
    native, wide = model_bytes(model)
    modules: list[nn.Module] = model.modules()  # type: ignore[no-untyped-call]
    quantized = any("scales" in module for module in modules)
    # Only if needed, as the plug-in's libraries take 0.2 s to import.
    packed = _packed_bytes(model, wide) if quantized and can_pack() else None
    return Widening(choice, native, wide, limit_bytes, packed)


def _packed_bytes(model: nn.Module, wide_bytes: int) -> int | None:
    """Return the bytes of a model's weights after packing; None if nothing can be packed."""
    packer = weight_packer()
    if packer is None:
        return None
    modules: list[Any] = model.modules()  # type: ignore[no-untyped-call]
    modules = [module for module in modules if packer.takes(module)]
    if not modules:
        return None
    wide: int = sum(4 * module.weight.size * 32 // module.bits for module in modules)
    return wide_bytes - wide + sum(map(packer.packed_bytes, modules))


def pack(
    model: nn.Module,
    dense: Callable[[nn.Module], nn.Module | None],
    *,
    exact: bool,
    read: Callable[[str], None] = lambda name: None,
) -> None:
    """Replace quantized modules with ones that multiply by codes; convert the rest to float32.

    Args:
        model: the model, loaded lazily or evaluated.
        dense: see `widen`; used for modules that cannot be packed.
        exact: whether activations have 24 bits instead of 16.
        read: reads the codes of a quantized module by its name, if they are not there yet.

    Raises:
        ModelError: the plug-in is not installed.
    """
    packer = weight_packer()
    if packer is None:
        raise ModelError("--weights-dtype packed needs Numba: pip install numba, or use float32")
    widen(model, dense, packer.takes, read)
    packer.pack(model, exact=exact, read=read)
    widen(model, lambda module: None)  # modules that turned out not to be packable
