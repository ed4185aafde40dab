"""Read a model's specification from its config.json and the headers of its weight files."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.memory.families import FAMILIES, Config, Family, unknown
from penstock.memory.heads import (
    HEADED_TYPES,
    PREFIX,
    SPLIT_TYPES,
    TOKEN_OFFSETS,
    BlockDrafterSpec,
    DrafterSpec,
    drafter_spec,
    drafter_tensor,
    head_part,
    is_of_head,
    no_head,
)
from penstock.memory.model_config import check_config, read_config
from penstock.memory.sizes import packed_matrix_bytes
from penstock.memory.spec import DTYPE_BYTES, LayerSpec, ModelSpec
from penstock.plurals import counted
from penstock.regular_files import open_regular


def read_model_spec(
    source: str | Path | Mapping[str, object],
    *,
    files: Mapping[str, int] | None = None,
    float32: bool = False,
    mtp: Path | None = None,
) -> ModelSpec:
    """Return the memory-related specification of a model.

    Args:
        source: a model folder, a config.json, or its content. safetensors files next to the
            config provide bytes and dtype.
        files: bytes of the loaded weights by dtype, if already known.
        float32: whether the weights become float32 when loaded.
        mtp: folder with a multi-token head, which may be the model's, or with a drafter that reads
            hidden states, that is loaded, too.
    """
    outer, name, folder = _load_config(source)
    inner = outer.get("text_config")
    values = {**outer, **inner} if isinstance(inner, dict) else outer
    types = [str(v["model_type"]) for v in (outer, values) if v.get("model_type")]
    if not types:
        raise ModelError(f"{name}: the config has no model_type")
    model_type = next((t for t in types if t in FAMILIES), types[-1])
    family = FAMILIES.get(model_type, Family(unknown, {}))
    notes: list[str] = []

    if files is None:
        files = _loaded_bytes(_own_tensors(folder), outer, float32=float32) if folder else {}
    if float32:
        outer = {**outer, "quantization": None}
        values = {**values, "dtype": "float32", "quantization": None}
    dtype = _dtype_of(files, values, notes)
    c = Config({**family.assumed, **values, "dtype": dtype}, name)
    _check_sizes(c)
    layers = _layers_of(c, family, model_type, notes)
    drafter = None if mtp is None else drafter_of(mtp)
    if drafter is not None:
        layers += _drafter_layers(c, drafter)
    elif mtp is not None:
        if model_type not in HEADED_TYPES or not has_head(mtp):
            raise no_head(mtp)
        attends = [layer for layer in layers if layer.kind == "full"] or [c.full()]
        full = max(attends, key=lambda layer: layer.key_dim)  # a head has an index of its own
        width = c.hidden * c.integer("hc_count", default=1)  # Qwen4's hidden state has streams
        layers.append(replace(full, state_bytes=width * c.scalar_bytes))
    elif model_type in HEADED_TYPES and folder is not None and has_head(folder):
        notes.append("the weights of its multi-token head are left out without --draft-model mtp")

    head: dict[str, int] = {}
    if mtp is not None:
        form = None if drafter is None else dtype
        tensors = {name: _as_loaded(name, e, form) for name, e in _head_tensors(mtp).items()}
        head = _loaded_bytes(tensors, outer, float32=float32)
    weight_bytes, weight_source = _weights(c, family, files)
    outside = _outside_layers(c, files, weight_bytes) + head.get(OUTSIDE, 0)
    if weight_bytes is not None:
        weight_bytes += sum(head.values()) - head.get(OUTSIDE, 0)
    if files and folder is None:
        weight_source = "header of the file"
    if has_float8_blocks(outer):
        notes.append(
            "8-bit floats are counted as mlx-vlm reads them (mxfp8); mlx-lm may take twice"
        )
    elif any(kind.startswith("F8") for kind in files):
        notes.append("the files hold 8-bit floats, which mlx-lm may dequantize to twice the bytes")
    return ModelSpec(
        name=name,
        model_type=model_type,
        dtype=dtype,
        layers=tuple(layers),
        weight_bytes=weight_bytes,
        weight_source=weight_source,
        max_tokens=c.maybe("max_position_embeddings"),
        notes=tuple(notes),
        whole_weight_bytes=outside,
    )


def _dtype_of(files: Mapping[str, int], values: Mapping[str, object], notes: list[str]) -> str:
    stated = str(values.get("dtype") or values.get("torch_dtype"))
    dtype = _held_dtype(files) or (stated if stated in DTYPE_BYTES else None)
    if dtype is None:
        notes.append(f"dtype {stated} is not one MLX computes in; bfloat16 is assumed")
    return dtype or "bfloat16"


def _layers_of(c: Config, family: Family, model_type: str, notes: list[str]) -> list[LayerSpec]:
    layers = list(family.read(c))
    if family.read is unknown:
        notes.append(
            f"model type {model_type} is not known to penstock: every attention layer is "
            "counted as full, an upper bound if it has windows"
        )
        if any(_RECURRENT_KEY.search(key) for key in c.values) and not c.strings("layer_types"):
            layers = [replace(layer, window_tokens=None, state_bytes=None) for layer in layers]
    stateless = sum(layer.state_bytes is None for layer in layers)
    if stateless:
        notes.append(f"the recurrent state of {stateless} layers is unknown and not counted")
    return layers


_RECURRENT_KEY = re.compile(r"mamba|ssm_|state_size|linear_\w+_dim|rwkv|lru_|conv_kernel")
_HEADER_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def _load_config(
    source: str | Path | Mapping[str, object],
) -> tuple[dict[str, object], str, Path | None]:
    if isinstance(source, Mapping):
        name = str(source.get("_name_or_path") or "the model")
        check_config(source, name)
        return dict(source), name, None
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        values = read_config(file)
    except FileNotFoundError:
        what = f"{path} has no config.json" if path.is_dir() else f"there is no {path}"
        raise ModelError(f"{what}; name a model folder or a config.json") from None
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return values, name, path if path.is_dir() else None


_SIZES = ("hidden_size", "n_embd", "d_model", "vocab_size", "num_attention_heads", "n_head")
_COUNTS = ("intermediate_size", "moe_intermediate_size", "head_dim", "num_key_value_heads")


def _check_sizes(c: Config) -> None:
    for key in (*_SIZES, *_COUNTS):
        value = c.values.get(key)
        if isinstance(value, int) and value < (1 if key in _SIZES else 0):
            raise ModelError(f"{c.name}: {key} is {value}, not a size")


PACKED_MODES = ("affine", "mxfp4")
"""MLX quantization modes whose codes the CPU plug-in multiplies without dequantizing them."""
MOST_HEADER_BYTES = 100_000_000
"""Maximum header size of a safetensors file in bytes, as in the safetensors library."""
METADATA = "__metadata__"
OUTSIDE = "outside of the layers"
FLOAT8_GROUP = 32
"""Number of weights per one-byte scale in MLX's mxfp8."""
_FLOAT8_PARTS = ("weight", "weight_scale_inv")
_CODED_PARTS = ("weight", "scales", "biases")
_HALVES = ("F16", "BF16")
_IN_LAYERS = re.compile(r"(^|\.)(layers|blocks|h)\.\d+\.")


def _outside_layers(c: Config, files: Mapping[str, int], weight_bytes: int | None) -> int:
    """Return the weight bytes outside the layers; without files, estimated from the embeddings."""
    if files or weight_bytes is None:
        return files.get(OUTSIDE, 0)
    parameters = _matrix_parameters(c)
    return weight_bytes * _embeddings(c) // parameters if parameters else 0


def _loaded_bytes(
    headers: Mapping[str, Any], config: Mapping[str, object], *, float32: bool
) -> dict[str, int]:
    """Sum the bytes of tensors once loaded, by dtype, and outside the layers."""
    float8 = has_float8_blocks(config)
    nbytes: Counter[str] = Counter()
    for name, entry in headers.items():
        stem, _, last = name.rpartition(".")
        numbers, (start, end) = prod(entry["shape"]), entry["data_offsets"]
        kind, size = entry["dtype"], end - start
        if float8 and f"{stem}.weight_scale_inv" in headers and last in _FLOAT8_PARTS:
            # One byte per code, and one scale per 32 codes instead of the scales per block.
            size = 0 if last != "weight" else numbers + numbers // FLOAT8_GROUP
        elif f"{stem}.scales" in headers and last in _CODED_PARTS:
            coded = last == "weight"
            numbers = numbers * 32 // _coding(config, stem)[0] if coded else 0
            size = size if not float32 else 4 * numbers
        elif float32 and kind in _HALVES:
            size = 4 * numbers
        if float32 and kind.startswith("F8"):
            size = 4 * numbers
        kind = "F32" if float32 else kind
        nbytes[kind] += size
        if not _IN_LAYERS.search(name):
            nbytes[OUTSIDE] += size
    return dict(nbytes)


def has_float8_blocks(config: Mapping[str, object]) -> bool:
    """Return whether weights are float8 with a scale per block, which mlx-vlm converts to mxfp8."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, Mapping) else {})
    stated = next((form for place in places if (form := place.get("quantization_config"))), None)
    form = stated if isinstance(stated, Mapping) else {}
    kind = form.get("quant_method"), form.get("fmt", "e4m3"), form.get("weight_block_size")
    return kind == ("fp8", "e4m3", [128, 128])


def _coding(config: Mapping[str, object], stem: str) -> tuple[int, str]:
    """Return the bits and mode of a quantized matrix, which may differ from the model's."""
    common = config.get("quantization")
    common = common if isinstance(common, Mapping) else {}
    own = common.get(stem)
    settings = own if isinstance(own, Mapping) else common
    return int(settings.get("bits", 4)), str(settings.get("mode", "affine"))


def packed_weight_bytes(folder: str | Path, *, mtp: Path | None = None) -> int | None:
    """Return the bytes of a folder's weights, quantized ones packed and others in float32."""
    values = _load_config(folder)[0]
    common = values.get("quantization")
    if not isinstance(common, dict):
        return None
    headers = _own_tensors(Path(folder).expanduser())
    if headers and mtp is not None:
        headers |= {name: _as_loaded(name, e, None) for name, e in _head_tensors(mtp).items()}
    total, has_packed = 0, False
    for name, entry in headers.items():
        numbers = prod(entry["shape"])
        stem, _, last = name.rpartition(".")
        if f"{stem}.scales" not in headers or last not in ("weight", "scales", "biases"):
            total += 4 * numbers
        if f"{stem}.scales" not in headers or last != "weight":
            continue
        bits, mode = _coding(values, stem)
        scales = headers[f"{stem}.scales"]
        if mode not in PACKED_MODES:
            total += 4 * numbers * 32 // bits
            continue
        has_packed = True
        scale_bytes = 2 if scales["dtype"] == "F16" or mode != "affine" else 4
        *experts, rows, columns = entry["shape"]
        columns = columns * 32 // bits
        group = columns // scales["shape"][-1]
        sides = 2 if mode == "affine" else 1
        one = packed_matrix_bytes(rows, columns, bits, group, scale_bytes, sides=sides)
        total += prod(experts) * one
    return total if has_packed else None


def has_tensor(folder: Path, parts: Sequence[str]) -> bool:
    """Return whether the name of any tensor in a folder contains one of `parts`."""
    return any(part in name for name, _ in _tensors(folder) for part in parts)


def has_head(folder: Path) -> bool:
    """Return whether a folder has the weights of a multi-token head or a drafter."""
    return bool(_head_tensors(folder))


def drafter_of(folder: Path) -> DrafterSpec | None:
    """Return the drafter that a folder has; None if it has none. Errors as `drafter_spec`."""
    config = folder / "config.json"
    return drafter_spec(read_config(config), folder) if config.is_file() else None


def _drafter_layers(c: Config, drafter: DrafterSpec) -> list[LayerSpec]:
    dims = {"head_dim": drafter.sizes.head_dim, "kv_heads": drafter.sizes.kv_heads}
    if isinstance(drafter, BlockDrafterSpec):
        return [c.full(**dims)] * drafter.layers
    return [c.full(**dims, state_bytes=drafter.sizes.width * c.scalar_bytes)]


def _head_tensors(folder: Path) -> dict[str, Any]:
    tensors, config = dict(_tensors(folder)), _text_config(folder)
    if config.get("model_type") in SPLIT_TYPES:
        return {PREFIX + name: entry for name, entry in tensors.items()}
    if drafter_of(folder) is not None:
        named = ((drafter_tensor(name), entry) for name, entry in tensors.items())
        return {name: entry for name, entry in named if name is not None}
    parts = ((head_part(name, config), entry) for name, entry in tensors.items())
    return {PREFIX + part: entry for part, entry in parts if part is not None}


def _text_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config with that of the language model within it, or of a head alone."""
    file = folder / "config.json"
    config = read_config(file) if file.is_file() else {}
    inner = config.get("text_config")
    if not isinstance(inner, dict) or config.get("model_type") in SPLIT_TYPES:
        return config
    return {**config, **inner}


def _as_loaded(name: str, entry: Any, dtype: str | None) -> Any:
    """Return a head's tensor with its bytes once loaded: whole numbers take 32 bits.

    Args:
        dtype: dtype that floats get; None for that of the file.
    """
    if name.endswith(TOKEN_OFFSETS):
        kind, size = "I32", 4
    elif dtype is not None and entry["dtype"] in _HEADER_DTYPES:
        kind = next(kind for kind, name in _HEADER_DTYPES.items() if name == dtype)
        size = DTYPE_BYTES[dtype]
    else:
        return entry
    return {**entry, "dtype": kind, "data_offsets": (0, size * prod(entry["shape"]))}


def _own_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of a model's folder, without those of a multi-token head."""
    config = _text_config(folder)
    return {name: entry for name, entry in _tensors(folder) if not is_of_head(name, config)}


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and entries of the tensors in a folder's safetensors files.

    Only headers are read. A file consists of the header's length (8 bytes), the header as JSON, and
    the weights.
    """
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with open_regular(file) as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                # A larger length is corrupt: do not try to read terabytes.
                size = file.stat().st_size
                if length > MOST_HEADER_BYTES:
                    raise ValueError(f"its header has {counted(length, 'byte')}")
                header = json.loads(stream.read(min(length, size)))
            needed = 0
            for tensor, entry in header.items():
                if tensor != METADATA:
                    start, end = entry["data_offsets"]
                    if not 0 <= start <= end:
                        raise ValueError(f"{tensor} lies from byte {start} to byte {end}")
                    if not isinstance(entry["dtype"], str) or prod(entry["shape"]) < 0:
                        raise ValueError(f"{tensor} has no dtype or shape")
                    needed = max(needed, 8 + length + end)
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} has no readable safetensors header: {error}") from error
        if needed > size:
            raise ModelError(
                f"{file} is truncated: its header describes {counted(needed, 'byte')}, "
                f"the file has {size:,}; "
                "download it again"
            )
        yield from ((tensor, entry) for tensor, entry in header.items() if tensor != METADATA)


def _held_dtype(files: Mapping[str, int]) -> str | None:
    """Return the floating-point dtype of most bytes, in which the model computes."""
    floats = {kind: nbytes for kind, nbytes in files.items() if kind in _HEADER_DTYPES}
    return _HEADER_DTYPES[max(floats, key=floats.__getitem__)] if floats else None


def _weights(c: Config, family: Family, files: Mapping[str, int]) -> tuple[int | None, str]:
    """Return the weight bytes and a description of their source."""
    if files:
        return sum(files.values()) - files.get(OUTSIDE, 0), "headers of the safetensors files"
    parameters = _matrix_parameters(c) if family.gated_mlp else None
    quantization = c.values.get("quantization")
    if parameters is None:
        return None, "unknown: no weights in the folder"
    if quantization is None:
        return parameters * c.scalar_bytes, "estimated from the config"
    if not isinstance(quantization, dict) or quantization.get("mode", "affine") != "affine":
        return None, "unknown: no weights in the folder, and a quantization without a formula"
    q = Config(quantization, f"{c.name}: quantization")
    bits, group_size = q.positive("bits"), q.positive("group_size")
    return (
        parameters * bits // 8 + parameters // group_size * 2 * c.scalar_bytes,
        f"estimated from the config at {bits} bits, group {group_size}",
    )


def _matrix_parameters(c: Config) -> int | None:
    """Count the matrix parameters of a gated-MLP transformer, excluding norms and biases.

    embeddings  vocabulary x hidden, twice if not tied
    attention   hidden x head_dim x (2 x heads + 2 x KV heads), per layer
    MLP         3 x hidden x intermediate, times the experts, and their router, per layer
    """
    if "vocab_size" not in c.values or "intermediate_size" not in c.values:
        return None
    hidden, intermediate = c.hidden, c.positive("intermediate_size")
    experts = c.integer("num_local_experts", "num_experts", default=0)
    if experts:
        intermediate = c.integer("moe_intermediate_size", default=intermediate)
    mlp = 3 * hidden * intermediate * max(experts, 1) + hidden * experts
    attention = hidden * c.head_dim * 2 * (c.attention_heads + c.kv_heads)
    return _embeddings(c) + c.layer_count * (attention + mlp)


def _embeddings(c: Config) -> int:
    sides = 1 if c.values.get("tie_word_embeddings", True) else 2
    return sides * c.positive("vocab_size") * c.hidden
