"""GGUF headers: metadata and tensor locations, without reading weights.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; versions 2 and
3, little-endian, are supported. Every length and count is checked against the bytes left in the
file before memory is allocated, so a damaged or hostile header needs no more memory than its size.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ModelError
from penstock.plurals import counted
from penstock.regular_files import open_regular

SUFFIX = ".gguf"
MAGIC = b"GGUF"
MAX_METADATA_BYTES = 256 << 20
"""Maximum size of the metadata in bytes; a vocabulary of 262,144 tokens takes 15 MB."""
MAX_KEYS = 65_536
"""Maximum number of metadata keys; real files have about 40."""
MAX_TENSORS = 65_536
"""Maximum number of tensors; the largest models have about 2,000."""
MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Form:
    name: str
    numbers: int
    block_bytes: int
    bits: int | None = None
    """Bits of the corresponding MLX codes; None for dense formats."""
    is_exact: bool = True


GROUP = 32
"""Group size of the codes in MLX."""
FLOAT4 = "MXFP4"
"""Name of the format with 4-bit floats."""
FORMS = {
    0: Form("F32", 1, 4),
    1: Form("F16", 1, 2),
    2: Form("Q4_0", 32, 18, 4),
    3: Form("Q4_1", 32, 20, 4),
    6: Form("Q5_0", 32, 22, 5),
    7: Form("Q5_1", 32, 24, 5),
    8: Form("Q8_0", 32, 34, 8),
    10: Form("Q2_K", 256, 84, 4, is_exact=False),
    11: Form("Q3_K", 256, 110, 4, is_exact=False),
    12: Form("Q4_K", 256, 144, 4),
    13: Form("Q5_K", 256, 176, 5),
    14: Form("Q6_K", 256, 210, 8, is_exact=False),
    30: Form("BF16", 1, 2),
    39: Form(FLOAT4, 32, 17, 4),
}
"""Supported tensor formats by their number in the file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location, shape and format of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape in MLX's order, rows first; the file has the reverse."""
    form: Form
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.form.numbers * self.form.block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of a model in one GGUF file or in several parts."""

    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a metadata value, or `default`; ModelError if it is not of type `kind`."""
        value = self.metadata.get(key, default)
        if value is None or isinstance(value, kind):
            return value
        raise ModelError(f"{self.name}: {key} has the type {type(value).__name__}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a non-negative integer, or `default`; ModelError if missing or invalid."""
        value = self.get(key, (int, np.ndarray), default)
        if isinstance(value, np.ndarray):  # one per layer; accepted if all are equal
            if value.dtype.kind not in "iu" or len(set(value.tolist())) != 1:
                raise ModelError(f"{self.name}: {key} is not one integer for all layers")
            value = int(value[0])
        if value is None:
            raise ModelError(f"{self.name}: the metadata has no {key}")
        if isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.name}: {key} is {value}, which is not a count")
        return int(value)

    def integers(self, key: str) -> list[int]:
        """Return one non-negative integer per layer; ModelError if missing or invalid."""
        value = self.get(key, (int, np.ndarray))
        if not isinstance(value, np.ndarray):
            layers = self.integer(f"{self.metadata['general.architecture']}.block_count")
            return [self.integer(key)] * min(layers, MAX_TENSORS)
        if value.dtype.kind not in "iu" or len(value) > MAX_TENSORS or (value < 0).any():
            raise ModelError(f"{self.name}: {key} is not one count for each layer")
        return [int(count) for count in value]

    def flags(self, key: str, layers: int) -> list[bool]:
        """Return one flag per layer; ModelError if missing or invalid."""
        value = self.get(key, np.ndarray)
        if value is None or value.dtype.kind not in "biu" or len(value) < layers:
            raise ModelError(f"{self.name}: {key} is not one flag for each layer")
        return [bool(flag) for flag in value[:layers]]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number, or `default`; ModelError if missing or invalid."""
        value = self.get(key, (int, float), default)
        if value is None or not np.isfinite(value):
            raise ModelError(f"{self.name}: the metadata has no finite {key}")
        return float(value)


def is_gguf(path: str | Path) -> bool:
    file = Path(path).expanduser()
    return file.suffix == SUFFIX and file.is_file()


def read_header(path: str | Path) -> Header:
    """Read the header of a GGUF file, or of all parts if it is `NAME-00001-of-0000N.gguf`.

    Raises:
        ModelError: it is not a GGUF file, a part is missing, a format is unsupported, or the
            header is damaged.
    """
    first = Path(path).expanduser()
    files = _parts(first)
    headers = [_read_file(file) for file in files]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.name in tensors:
                raise ModelError(f"{tensor.file.name}: tensor {tensor.name} occurs twice")
            tensors[tensor.name] = tensor
    counted = headers[0].get("split.tensors.count", int)
    if counted is not None and counted != len(tensors):
        raise ModelError(f"{first.name}: its parts have {len(tensors)} of {counted} tensors")
    return Header(first.name, headers[0].metadata, tensors)


def _parts(first: Path) -> list[Path]:
    match = _PART.search(first.name)
    if match is None:
        return [first]
    number, count = int(match[1]), int(match[2])
    if number != 1:
        raise ModelError(f"{first.name} is part {number} of {count}; pass the first part")
    stem = first.name[: match.start()]
    files = [first.with_name(f"{stem}-{n:05d}-of-{match[2]}{SUFFIX}") for n in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{first.name} has {count} parts, and {file.name} is not beside it")
    return files


def _read_file(file: Path) -> Header:
    try:
        with open_regular(file) as stream:
            if stream.read(4) != MAGIC:
                raise ModelError(f"{file.name} is not a GGUF file: it does not start with GGUF")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return _Cursor(raw, file).header()
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error


class _Cursor:
    """Sequential reader of a header, which raises ModelError instead of reading past the end."""

    def __init__(self, raw: mmap.mmap, file: Path) -> None:
        self.raw, self.file = raw, file
        self.position = len(MAGIC)

    def header(self) -> Header:
        version = self.scalar("<I")
        if version not in (2, 3):
            raise self.damage(f"version {version} is not 2 or 3")
        tensors, keys = self.scalar("<Q"), self.scalar("<Q")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise self.damage(f"{tensors:,} tensors and {keys:,} keys are more than a model has")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string()
            if key in metadata:
                raise self.damage(f"the key {key[:64]!r} occurs twice")
            metadata[key] = self.value(self.scalar("<I"))
        infos = [self.tensor() for _ in range(tensors)]
        return Header(self.file.name, metadata, self.placed(infos, metadata))

    def damage(self, why: str) -> ModelError:
        return ModelError(f"{self.file.name} is damaged at byte {self.position:,}: {why}")

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > min(len(self.raw), MAX_METADATA_BYTES):
            raise self.damage(f"{counted(count, 'byte')} should follow, and the header ends before")
        taken = self.raw[self.position : end]
        self.position = end
        return taken

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        """Return the next string; bytes that are not UTF-8 are kept as surrogates."""
        return self.take(self.scalar("<Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        """Return the next value: a number, a string, a list of strings or an array of numbers."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("<I"), self.scalar("<Q"))
        return self.numbers(kind, 1)[0].item()

    def array(self, kind: int, count: int) -> Any:
        if kind != _STRING:
            return self.numbers(kind, count)
        if count * 8 > len(self.raw) - self.position:
            raise self.damage(f"{count:,} texts do not fit into the file")
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        """Return the next `count` strings; a fast path for vocabularies."""
        raw, end = self.raw, min(len(self.raw), MAX_METADATA_BYTES)
        read_length, position, pieces = struct.Struct("<Q").unpack_from, self.position, []
        for _ in range(count):
            start = position + 8
            if start > end or (stop := start + read_length(raw, position)[0]) > end:
                self.position = position
                raise self.damage("a text should follow, and the header ends before")
            pieces.append(raw[start:stop])
            position = stop
        self.position = position
        return [piece.decode("utf-8", "surrogateescape") for piece in pieces]

    def numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise self.damage(f"values of kind {kind} are unknown")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor(self) -> TensorInfo:
        """Return the next tensor; its offset is relative to the first tensor's data."""
        name = self.string()
        dimensions = self.scalar("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.damage(f"tensor {name[:64]!r} has {dimensions:,} dimensions")
        shape = tuple(int(self.scalar("<Q")) for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("<I"), self.scalar("<Q")
        form = FORMS.get(kind)
        if form is None:
            known = ", ".join(form.name for form in FORMS.values())
            raise ModelError(
                f"{self.file.name}: tensor {name[:64]!r} has format {kind}, which is not "
                f"supported; supported are {known}"
            )
        if shape[-1] % form.numbers:
            raise self.damage(f"tensor {name[:64]!r} has rows of {shape[-1]:,} in {form.name}")
        return TensorInfo(name, shape, form, self.file, offset)

    def placed(self, tensors: list[TensorInfo], metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self.damage(f"general.alignment is {alignment!r}")
        begin = -(-self.position // alignment) * alignment
        moved = [
            TensorInfo(x.name, x.shape, x.form, x.file, begin + x.offset)
            for x in sorted(tensors, key=lambda x: x.offset)
        ]
        for left, right in pairwise(moved):
            if left.offset + left.nbytes > right.offset:
                raise self.damage(f"tensors {left.name[:64]!r} and {right.name[:64]!r} overlap")
        for tensor in moved[-1:]:
            if tensor.offset + tensor.nbytes > len(self.raw):
                raise ModelError(
                    f"{self.file.name} is truncated: its header describes "
                    f"{counted(tensor.offset + tensor.nbytes, 'byte')}, the file "
                    f"has {len(self.raw):,}; "
                    f"download it again"
                )
        placed = {tensor.name: tensor for tensor in moved}
        if len(placed) != len(moved):
            raise self.damage("two tensors have one name")
        return placed
