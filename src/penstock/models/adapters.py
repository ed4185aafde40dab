"""LoRA and DoRA adapters in mlx-lm's format, several of which share one copy of the weights.

    y = x W + b + s (x A) B                        LoRA
    y = (x W + s (x A) B) m / ||W + s A B|| + b    DoRA; the norm of each column

Each row of a batch can use another adapter: the matrices of all adapters are stacked, and rows
select theirs by number. Number 0 means no adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import xxhash

from penstock.errors import ModelError
from penstock.models.adapter_names import NO_ADAPTERS, AdapterNames
from penstock.models.layer_seams import row_adapters
from penstock.regular_files import check_regular, read_text

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"
KINDS = ("lora", "dora")
MOST_CONFIG_BYTES = 1 << 20

Pair: TypeAlias = tuple[mx.array, mx.array, mx.array | None]
"""Matrices A (inputs, rank) and B (rank, outputs), and the magnitudes of DoRA (outputs,)."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, read from its folder."""

    name: str
    scale: float
    pairs: Mapping[str, Pair]
    """Matrices by name of the linear layer."""
    fingerprint: str
    """Hash of the matrices and settings."""


@dataclass(slots=True)
class Adapters:
    """Names of a model's adapters, and the bytes of their matrices."""

    names: AdapterNames = NO_ADAPTERS
    nbytes: int = 0


NONE = Adapters()


def adapters_of(model: Any) -> Adapters:
    """Return the adapters that `put_adapters` added to a model; `NONE` without any."""
    modules: list[nn.Module] = model.modules()
    adapted = (module for module in modules if isinstance(module, AdaptedLinear))
    first = next(adapted, None)
    return NONE if first is None else first.adapters


class AdaptedLinear(nn.Module):
    """Linear layer that applies to each row the adapter selected by `row_adapters`."""

    def __init__(
        self,
        linear: nn.Module,
        adapters: Adapters,
        name: str,
        pairs: Sequence[Pair | None],
        scales: Sequence[float],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        outputs, inputs = _shape(linear)
        for pair in pairs:
            if pair is not None and (pair[0].shape[0], pair[1].shape[1]) != (inputs, outputs):
                raise ModelError(
                    f"an adapter's {name} has {pair[0].shape[0]} inputs and {pair[1].shape[1]} "
                    f"outputs, the model's {inputs} and {outputs}: it is another model's adapter"
                )
        self.linear = linear
        # MLX does not count attributes with an underscore as parameters of the model.
        self._adapters = adapters
        rank = max(pair[0].shape[1] for pair in pairs if pair is not None)
        dtype = mx.result_type(*(side for pair in pairs if pair is not None for side in pair[:2]))
        self._a = mx.zeros((1 + len(pairs), inputs, rank), dtype)
        self._b = mx.zeros((1 + len(pairs), rank, outputs), dtype)
        self._scales = mx.array([0.0, *scales], dtype)
        self._factors: mx.array | None = None
        for number, pair in enumerate(pairs, 1):
            if pair is not None:
                self._a[number, :, : pair[0].shape[1]] = pair[0]
                self._b[number, : pair[0].shape[1]] = pair[1]
        if any(pair is not None and pair[2] is not None for pair in pairs):
            ones = mx.ones(outputs)
            factors = [
                ones if pair is None else _factor(linear, pair, scale)
                for pair, scale in zip(pairs, scales, strict=True)
            ]
            self._factors = mx.stack([ones, *factors])[:, None]
        held = [self._a, self._b, self._scales]
        held += [] if self._factors is None else [self._factors]
        mx.eval(held)
        self.adapter_bytes = sum(array.nbytes for array in held)

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    def _extra_repr(self) -> str:
        number, _, rank = self._a.shape
        return f"adapters={number - 1}, rank={rank}, dtype={self._a.dtype}"

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        rows = row_adapters()
        if isinstance(rows, int):
            if not rows:
                return y
            added = (x @ self._a[rows] * self._scales[rows]) @ self._b[rows]
            return self._combined(y, added.astype(y.dtype), rows)
        # Some layers get all tokens on one axis, in which those of a row are consecutive.
        per_row = x.reshape(rows.size, -1, x.shape[-1])
        lowered = mx.gather_mm(per_row, self._a, rhs_indices=rows) * self._scales[rows, None, None]
        added = mx.gather_mm(lowered, self._b, rhs_indices=rows).astype(y.dtype)
        return self._combined(y.reshape(added.shape), added, rows).reshape(y.shape)

    def _combined(self, y: mx.array, added: mx.array, rows: mx.array | int) -> mx.array:
        if self._factors is None:
            return y + added
        factors = self._factors[rows].astype(y.dtype)
        changed = (y + added) * factors
        bias = self.linear.get("bias")
        return changed if bias is None else changed + bias * (1 - factors)


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read an adapter in mlx-lm's format; raises ModelError if it cannot be used."""
    where = f"adapter {name}"
    settings, weights = folder / CONFIG, folder / WEIGHTS
    for file in (settings, weights):
        if not file.is_file():
            raise ModelError(f"{where}: {folder} has no {file.name}; mlx_lm.lora writes both files")
        check_regular(file)
    try:
        text = read_text(settings)
        config = json.loads(text)
        kind = config.get("fine_tune_type", "lora")
        scale = float(config["lora_parameters"]["scale"])
        arrays: dict[str, mx.array] = dict(mx.load(str(weights)))  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    if kind not in KINDS:
        raise ModelError(
            f"{where} has type {str(kind)[:40]}; only lora and dora are supported. Use mlx_lm.fuse "
            f"to make a model folder of a full fine-tune"
        )
    fingerprint = xxhash.xxh3_128(text.encode())
    for key in sorted(arrays):
        fingerprint.update(f"{key}:{arrays[key].dtype}{arrays[key].shape}".encode())
        fingerprint.update(memoryview(arrays[key].astype(mx.float32)))  # type: ignore[arg-type]
    return Adapter(name, scale, _pairs(where, arrays), fingerprint.hexdigest())


def _pairs(where: str, arrays: Mapping[str, mx.array]) -> dict[str, Pair]:
    sides: dict[str, dict[str, mx.array]] = {}
    for key, array in arrays.items():
        module, _, side = key.rpartition(".")
        sides.setdefault(module, {})[side] = array
    pairs = {}
    for module, matrices in sides.items():
        a, b = matrices.get("lora_a"), matrices.get("lora_b")
        known = not set(matrices) - {"lora_a", "lora_b", "m"} and "layers." in module
        if not known or a is None or b is None or not a.ndim == b.ndim == 2:
            raise ModelError(
                f"{where} changes {module}, which is not a linear layer of a decoder layer; use "
                f"mlx_lm.fuse to make a model folder with it"
            )
        pairs[module] = (a, b, matrices.get("m"))
    if not pairs:
        raise ModelError(f"{where} changes nothing")
    return pairs


def _factor(linear: Any, pair: Pair, scale: float) -> mx.array:
    """Return the factor of each output, m / ||W + s A B|| for DoRA and 1 for LoRA."""
    a, b, magnitudes = pair
    if magnitudes is None:
        return mx.ones(b.shape[1])
    weight = linear.weight
    if "scales" in linear:
        weight = mx.dequantize(
            weight,
            linear.scales,
            linear.get("biases"),
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    whole = weight.astype(mx.float32) + (scale * b.T.astype(mx.float32)) @ a.T.astype(mx.float32)
    return magnitudes.astype(mx.float32) / mx.linalg.norm(whole, axis=1)


def _shape(linear: Any) -> tuple[int, int]:
    outputs, inputs = linear.weight.shape
    return outputs, inputs * 32 // linear.bits if "scales" in linear else inputs


def _linear(model: nn.Module, name: str) -> nn.Module:
    module: Any = model
    for part in name.split("."):
        module = module[int(part)] if isinstance(module, list) else getattr(module, part, None)
    if not isinstance(module, nn.Linear | nn.QuantizedLinear):
        raise ModelError(
            f"an adapter changes {name}, not a linear layer of this model: it is another model's"
        )
    return module


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    place: Any = model
    for part in parent.split("."):
        place = place[int(part)] if isinstance(place, list) else getattr(place, part)
    setattr(place, last, module)


def put_adapters(model: nn.Module, folders: Mapping[str, Path]) -> None:
    """Add adapters, given by name and folder, to a model with native weights, in place.

    Raises:
        ModelError: an adapter cannot be read, or does not fit the model.
    """
    read = [read_adapter(name, folder) for name, folder in folders.items()]
    adapters = Adapters(AdapterNames({adapter.name: adapter.fingerprint for adapter in read}))
    scales = [adapter.scale for adapter in read]
    for name in sorted({name for adapter in read for name in adapter.pairs}):
        pairs = [adapter.pairs.get(name) for adapter in read]
        adapted = AdaptedLinear(_linear(model, name), adapters, name, pairs, scales)
        adapters.nbytes += adapted.adapter_bytes
        _put(model, name, adapted)


def adapter_bytes(folders: Mapping[str, Path]) -> int:
    """Return an upper bound of the bytes of stacked adapters, from the sizes of their files."""
    files = [folder / WEIGHTS for folder in folders.values()]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return (1 + len(folders)) * max(sizes, default=0)
