"""The file of one block: safetensors, whose header says what it is and how to tell damage.

Everything that is read back is covered by one xxh3 hash: names, shapes, dtypes and bytes of the
arrays, and the words about them. A file in which a bit has flipped, that was cut short, or that
is another block's is `Damaged`, never a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

FORMAT = "penstock-block-1"
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
}
"""Names of dtypes in a file's header, and as safetensors takes them."""
_SAFE = {name: short for short, name in DTYPES.items()}


class Damaged(ValueError):
    """The bytes are not the record that was asked for; says what is wrong."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array in the host's memory, whatever its dtype: numpy knows no bfloat16."""

    dtype: str
    """As MLX calls it: `float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """Its bytes, (n,), row by row."""


@dataclass(frozen=True, slots=True)
class Record:
    """One block's KV, all layers."""

    key: bytes
    """Names the block and everything in front of it; see `blocks`."""
    parent: bytes
    """Key of the block in front; of the first block, the chain's root."""
    depth: int
    """Blocks in front of it."""
    arrays: Mapping[str, HostArray]
    """By name, as `3.keys`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.data.nbytes for array in self.arrays.values())


def encode(record: Record, fingerprint: str) -> bytes:
    """Return a record's file.

    Raises:
        ValueError: an array whose bytes do not fill its shape, or of a dtype that is not known.
    """
    specs = {}
    for name, array in record.arrays.items():
        if array.dtype not in _SAFE:
            raise ValueError(f"{name} is {array.dtype}; a block holds {', '.join(_SAFE)}")
        specs[name] = TensorSpec(
            dtype=array.dtype,
            shape=list(array.shape),
            data_ptr=array.data.ctypes.data,
            data_len=array.data.nbytes,
        )
    words = {
        "format": FORMAT,
        "key": record.key.hex(),
        "parent": record.parent.hex(),
        "depth": str(record.depth),
        "fingerprint": fingerprint,
    }
    words["xxh3"] = _hash(words, record.arrays)
    try:
        return bytes(serialize(specs, metadata=words))
    except SafetensorError as error:
        raise ValueError(f"a block cannot be written: {error}") from None


def decode(raw: bytes) -> tuple[Record, str]:
    """Read a file; return the record and its fingerprint.

    Raises:
        Damaged: it is not what `encode` has written, to the bit.
    """
    words = header(raw)
    try:
        arrays = {
            name: HostArray(
                DTYPES[found["dtype"]],
                tuple(found["shape"]),
                np.frombuffer(found["data"], np.uint8),
            )
            for name, found in deserialize(raw)  # type: ignore[no-untyped-call]
        }
        record = Record(
            bytes.fromhex(words["key"]),
            bytes.fromhex(words["parent"]),
            int(words["depth"]),
            arrays,
        )
        fingerprint, told = words["fingerprint"], words.pop("xxh3")
    except (SafetensorError, KeyError, ValueError) as error:
        raise Damaged(f"its header makes no sense: {error}") from None
    if _hash(words, arrays) != told:
        raise Damaged("its bytes are not those that were written")
    return record, fingerprint


def header(raw: bytes) -> dict[str, str]:
    """Return the words of a file's header, unchecked but for the format.

    Raises:
        Damaged: it has none, or is of another format.
    """
    size = int.from_bytes(raw[:8], "little")
    try:
        words = _words(raw[8 : 8 + size])
    except ValueError as error:
        raise Damaged(f"it is no safetensors file: {error}") from None
    if words.get("format") != FORMAT:
        raise Damaged(f"its format is {words.get('format')}, not {FORMAT}")
    return words


def _words(head: bytes) -> dict[str, str]:
    found = json.loads(head)
    if not isinstance(found, dict) or not isinstance(found.get("__metadata__"), dict):
        raise ValueError("no metadata")
    return {str(name): str(value) for name, value in found["__metadata__"].items()}


def _hash(words: Mapping[str, str], arrays: Mapping[str, HostArray]) -> str:
    hashed = xxhash.xxh3_128()
    parts: list[Any] = [f"{name}={words[name]}" for name in sorted(words)]
    for name in sorted(arrays):
        array = arrays[name]
        parts += [f"{name}:{array.dtype}{array.shape}", array.data]
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        hashed.update(len(raw).to_bytes(8, "little"))
        hashed.update(raw)
    return hashed.hexdigest()
