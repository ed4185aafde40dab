"""Conversion of weights when a model is loaded: to float32, or to a plug-in's packed weights.

On a Linux CPU, MLX multiplies quantized and half-precision weights on one core without BLAS; in
float32 the same model prefills 50 times as fast. A plug-in that multiplies by the codes directly is
faster still, and needs a quarter of the memory. On a GPU weights stay native.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from penstock.attention import devices
from penstock.config import WeightsDtype
from penstock.errors import NeverFits
from penstock.memory.sizes import KV_SHARE, enough_for, format_bytes

BESIDE_PACKED = 0.1
"""Share of the memory limit that must stay free for `auto` to pack weights. It is small because
native weights, which are slow, need nearly as much memory."""
_HALF = (mx.float16, mx.bfloat16)


def slow_half() -> bool:
    """Return whether this device multiplies half precision slowly, as MLX does on a CPU."""
    return devices.current().facts.slow_half


@dataclass(frozen=True, slots=True)
class Widening:
    """Decision on native, packed or float32 weights, from their sizes and the memory limit."""

    choice: WeightsDtype
    """Requested dtype. On a CPU, `auto` packs quantized weights, and converts others to float32 if
    that leaves a quarter of the limit free."""
    native_bytes: int
    wide_bytes: int
    limit_bytes: int | None
    """Memory limit for everything, including weights; None if there is none."""
    packed_bytes: int | None = None
    """Bytes of the packed weights; None if they cannot be packed, or the plug-in is missing."""
    slow_half: bool = field(default_factory=slow_half)
    """Whether products of half precision are slow; if not, `auto` is `native`."""

    @property
    def widens(self) -> bool:
        if self.choice != "auto" or self.wide_bytes == self.native_bytes:
            return self.choice == "float32"
        return not self.packs and self._leaves(KV_SHARE, self.wide_bytes)

    @property
    def packs(self) -> bool:
        if self.choice == "auto":
            return self.packed_bytes is not None and self._leaves(BESIDE_PACKED, self.packed_bytes)
        return self.choice in ("packed", "packed-exact") and self.wide_bytes != self.native_bytes

    def _leaves(self, share: float, nbytes: int) -> bool:
        """Return whether weights of `nbytes` leave `share` of the limit free; False on a GPU."""
        if not self.slow_half:
            return False
        return self.limit_bytes is None or nbytes <= (1 - share) * self.limit_bytes

    @property
    def exact(self) -> bool:
        """Whether activations have 24 bits instead of 16 in products with packed weights."""
        return self.choice == "packed-exact"

    @property
    def loaded_bytes(self) -> int:
        if self.packs and self.packed_bytes is not None:
            return self.packed_bytes
        return self.wide_bytes if self.widens else self.native_bytes

    def part(self, parts: int) -> Widening:
        """Return the decision for one of `parts` equal parts, such as that of a rank."""
        packed = None if self.packed_bytes is None else self.packed_bytes // parts
        native, wide = self.native_bytes // parts, self.wide_bytes // parts
        return replace(self, native_bytes=native, wide_bytes=wide, packed_bytes=packed)

    def check_limit(self, name: str) -> None:
        # `packed_bytes` is only an estimate; packed weights need at least the native bytes.
        needed = self.native_bytes if self.packs else self.loaded_bytes
        if self.limit_bytes is None or needed <= self.limit_bytes:
            return
        packed = self.packed_bytes if self.choice not in ("native", "float32") else None
        enough = enough_for(max(needed, packed or 0))
        less = ""
        if self.widens and self.native_bytes < needed:
            less = f"; with --weights-dtype native they take {format_bytes(self.native_bytes)}"
        raise NeverFits(
            f"{name}: the weights of {format_bytes(needed)} alone exceed the memory limit of "
            f"{format_bytes(self.limit_bytes)}; about {enough} would be enough "
            f"(--memory-limit, or memory_limit of an engine){less}; penstock plan shows what fits",
            needed,
            self.limit_bytes,
            self.limit_bytes,
        )

    @property
    def note(self) -> str | None:
        """Description of the weights' conversion; None if there is none."""
        if self.wide_bytes == self.native_bytes:
            return None
        sizes = f"{format_bytes(self.native_bytes)} -> {format_bytes(self.wide_bytes)}"
        if self.widens:
            return f"float32, {sizes}; --weights-dtype native keeps them as stored"
        if self.packs:
            rows = "24 bits" if self.exact else "16 bits"
            other = "" if self.choice != "auto" else "; --weights-dtype float32 converts them"
            return f"packed (multiplied as stored), with activations in {rows}{other}"
        if self.choice == "native" or not self.slow_half:
            return None
        return (
            f"native, which is slow on a CPU: in float32 ({sizes}) they would leave less than a "
            f"quarter of the memory limit; raise it, or use --weights-dtype float32"
        )


def model_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of a model's weights as stored and in float32, without evaluating them."""
    arrays: dict[str, mx.array] = dict(_flat(model))
    modules = _modules(model)
    wide_bytes = 0
    for name, array in arrays.items():
        stem, _, last = name.rpartition(".")
        if f"{stem}.scales" in arrays and last in ("weight", "scales", "biases"):
            wide_bytes += 4 * array.size * 32 // modules[stem].bits if last == "weight" else 0
        else:
            wide_bytes += 4 * array.size if array.dtype in _HALF else array.nbytes
    return sum(array.nbytes for array in arrays.values()), wide_bytes


def widen(
    model: nn.Module,
    dense: Callable[[nn.Module], nn.Module | None],
    leaves: Callable[[nn.Module], bool] = lambda module: False,
    read: Callable[[str], None] = lambda name: None,
) -> None:
    """Convert a model's weights to float32 one by one, so that only one is in memory twice.

    Args:
        model: the model, changed in place.
        dense: function that returns a dense replacement for a quantized module; None to keep it.
        leaves: function that returns whether a quantized module is left unchanged.
        read: function called with a quantized module's name before its codes are used.
    """
    left: set[str] = set()
    for name, module in _modules(model).items():
        if "scales" not in module:
            continue
        if leaves(module):
            left.add(name)
            continue
        full = dense(module)
        if full is not None:
            read(name)
            full.weight = _numbers(module)
            if "bias" in module:
                full.bias = module.bias
            _put(model, name, full)
    half = (name for name, array in _flat(model) if array.dtype in _HALF)
    names = [name for name in half if name.rpartition(".")[0] not in left]
    for name in names:
        widened = dict(_flat(model))[name].astype(mx.float32)
        mx.eval(widened)
        model.update(tree_unflatten([(name, widened)]))


def _numbers(module: nn.Module) -> mx.array:
    affine = {} if module.get("biases") is None else {"biases": module.biases.astype(mx.float32)}
    scales = module.scales.astype(mx.float32) if affine else module.scales
    numbers = mx.dequantize(
        module.weight, scales, group_size=module.group_size, bits=module.bits, mode=module.mode,
        **affine,
    ).astype(mx.float32)  # fmt: skip
    mx.eval(numbers)
    return numbers


def _flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore
    return flat


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())  # type: ignore[no-untyped-call]


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    parent: Any = model
    for step in path:
        parent = parent[int(step)] if isinstance(parent, list) else parent[step]
    parent[int(last) if isinstance(parent, list) else last] = module
