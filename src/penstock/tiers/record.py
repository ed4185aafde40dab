"""File format of a record: safetensors, with identity and checksum in the header.

One xxh3 hash covers everything read back: names, shapes, dtypes and bytes of the arrays, and the
header fields. A corrupted or truncated file, or one of another block, raises `Damaged`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

FORMAT = "penstock-block-1"
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "I64": "int64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
}
"""MLX dtype names by safetensors dtype names."""
_SAFE = {name: short for short, name in DTYPES.items()}
_Pieces: TypeAlias = tuple[str, str, tuple[int, ...], Sequence[NDArray[np.uint8]]]
"""Name, dtype, shape and bytes of an array."""
_BEGINNING, _DECODER = '{"__metadata__":', json.JSONDecoder()
TOKENS = "tokens"
"""Name of the array with the block's tokens."""
HEAD_BYTES = 16_384
"""Number of bytes read first from a file; most headers are shorter."""
MOST_DEPTH = 1 << 31
MOST_HEAD_BYTES = 1 << 20
"""Maximum size of a header in bytes; 80 layers take 16 kB."""
PIECES_AT_ONCE = 512
"""Maximum number of buffers per `preadv`; systems allow 1,024."""


class Damaged(ValueError):
    """Raised if bytes are not the requested record; the message describes the fault."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array of any dtype in host memory, including bfloat16, which NumPy lacks."""

    dtype: str
    """Name of the dtype in MLX: `float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Record:
    """KV of consecutive blocks, all layers; or a checkpoint, stored as a child of its block."""

    key: bytes
    """Hash of the last block and all tokens before it; see `blocks`."""
    parent: bytes
    """Hash of the preceding block; for the first block, the root of the chain."""
    depth: int
    """Number of blocks before the record."""
    arrays: Mapping[str, HostArray]
    blocks: int = 1
    replaces: Sequence[bytes] = ()
    """Hashes of shorter records with the same first block, which this one replaces; not in the
    file."""

    @property
    def nbytes(self) -> int:
        return sum(array.data.nbytes for array in self.arrays.values())

    @property
    def end_tokens(self) -> int:
        """Number of tokens of the chain up to the end of this record; 0 for a checkpoint."""
        tokens = self.arrays.get(TOKENS)
        count = 0 if tokens is None else tokens.shape[0]
        return (self.depth + self.blocks) * count // self.blocks


@dataclass(frozen=True, slots=True)
class Target:
    """Buffers into which an array is read, and its expected dtype and shape."""

    dtype: str
    """Name of the dtype in MLX."""
    shape: tuple[int, ...]
    pieces: Sequence[NDArray[np.uint8]]
    """Writable buffers, (n,) each, in the order of the array's bytes."""


def encode(record: Record, fingerprint: str) -> bytes:
    """Return the content of a record's file; raises ValueError for an unsupported dtype."""
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
        "blocks": str(record.blocks),
        "fingerprint": fingerprint,
    }
    words["xxh3"] = _hash(words, record.arrays)
    try:
        return bytes(serialize(specs, metadata=words))
    except SafetensorError as error:
        raise ValueError(f"a block cannot be written: {error}") from None


def decode(raw: bytes) -> Record:
    """Parse a whole file with the safetensors library; raises Damaged if it is invalid."""
    words = header(raw)
    try:
        arrays = {
            name: HostArray(
                DTYPES[parts["dtype"]],
                tuple(parts["shape"]),
                np.frombuffer(parts["data"], np.uint8),
            )
            for name, parts in deserialize(raw)  # type: ignore[no-untyped-call]
        }
        record = Record(
            bytes.fromhex(words["key"]),
            bytes.fromhex(words["parent"]),
            int(words["depth"]),
            arrays,
            blocks_of(words),
        )
        checksum = words["xxh3"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise Damaged(f"invalid header: {error}") from None
    if _hash(words, arrays) != checksum:
        raise Damaged("checksum mismatch")
    return record


class Source(Protocol):
    """Interface for reading a record, from a file or a remote store."""

    @property
    def nbytes(self) -> int: ...
    def read(self, nbytes: int, offset: int) -> bytes: ...
    def fill(self, pieces: Sequence[NDArray[np.uint8]], offset: int) -> None:
        """Read bytes from `offset` on into consecutive buffers; raises OSError on failure."""


def read_from(source: Source, targets: Mapping[str, Target]) -> dict[str, str]:
    """Read all arrays of a file directly into their targets; return its header fields.

    Raises:
        Damaged: the file differs from what `encode` wrote, or has other arrays; the targets'
            content is then invalid.
        OSError: the source fails.
    """
    length, head = source.nbytes, _head(source)
    size = len(head)
    words = header(head)
    pieces = [piece for name in _order(head[8:], targets) for piece in targets[name].pieces]
    if length != size + sum(piece.nbytes for piece in pieces):
        raise Damaged(f"it has {length} bytes, which does not match its header")
    source.fill(pieces, size)
    arrays = [(name, target.dtype, target.shape, target.pieces) for name, target in targets.items()]
    if _hash_of(words, arrays) != words.pop("xxh3", None):
        raise Damaged("checksum mismatch")
    return words


def array_offsets(source: Source) -> Mapping[str, int]:
    """Return the position of each array's bytes in a file; raises Damaged for an invalid header."""
    head = _head(source)
    try:
        text = head[8:].decode()
        if text.startswith(_BEGINNING):
            words, end = _DECODER.raw_decode(text, len(_BEGINNING))
            offsets = _offsets("{" + text[end + 1 :])
        else:  # written by another version of the library
            words, offsets = _words(head[8:]), _offsets(text)
        if words["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"invalid header: {error}") from None
    return {name: len(head) + offset for name, offset in offsets.items()}


@lru_cache(maxsize=4)
def _offsets(arrays: str) -> Mapping[str, int]:
    """Return the positions of arrays after the header; cached, since records share array headers.

    Parsing the header of 28 layers takes as long as a dozen reads of the file.
    """
    return {
        name: int(array["data_offsets"][0])
        for name, array in json.loads(arrays).items()
        if name != "__metadata__"
    }


def _head(source: Source) -> bytes:
    head = source.read(HEAD_BYTES, 0)
    size = 8 + int.from_bytes(head[:8], "little")
    if size > MOST_HEAD_BYTES:
        raise Damaged(f"a header of {size} bytes is too large")
    if len(head) < size <= source.nbytes:
        head += source.read(size - len(head), len(head))
    return head[:size]


@dataclass(frozen=True, slots=True)
class FileSource:
    """Source of a record in an open file, which the caller closes."""

    descriptor: int
    """File descriptor, opened for reading."""

    @property
    def nbytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self.descriptor, nbytes, offset)

    def fill(self, pieces: Sequence[NDArray[np.uint8]], offset: int) -> None:
        for first in range(0, len(pieces), PIECES_AT_ONCE):
            batch = pieces[first : first + PIECES_AT_ONCE]
            nbytes = sum(piece.nbytes for piece in batch)
            buffers: list[Any] = list(batch)
            if os.preadv(self.descriptor, buffers, offset) != nbytes:
                raise OSError(f"the system has not read {nbytes} bytes at {offset}")
            offset += nbytes


def _order(head: bytes, targets: Mapping[str, Target]) -> list[str]:
    """Return the names of a file's arrays, which must match the targets, in file order."""
    fields = json.loads(head)
    del fields["__metadata__"]
    try:
        order = {
            name: (array["dtype"], tuple(array["shape"]), *array["data_offsets"])
            for name, array in fields.items()
        }
        names = sorted(order, key=lambda name: order[name][2])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"invalid header: {error}") from None
    start = 0
    for name in names:
        target = targets.get(name)
        if target is None:
            raise Damaged(f"it has an unexpected array {name}")
        end = start + sum(piece.nbytes for piece in target.pieces)
        if order[name] != (_SAFE[target.dtype], target.shape, start, end):
            raise Damaged(f"{name} is not {target.dtype} {target.shape} as expected")
        start = end
    if len(names) != len(targets):
        raise Damaged(f"it has {len(names)} arrays instead of {len(targets)}")
    return names


def read_header(source: Source) -> dict[str, str]:
    """Return a file's header fields without reading the arrays; Damaged if invalid."""
    return header(_head(source))


def header(raw: bytes) -> dict[str, str]:
    size = int.from_bytes(raw[:8], "little")
    try:
        words = _words(raw[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not a safetensors file: {error}") from None
    if words.get("format") != FORMAT:
        raise Damaged(f"its format is {words.get('format')}, not {FORMAT}")
    return words


def blocks_of(words: Mapping[str, str]) -> int:
    """Return the number of blocks in a file from its header; older files have one."""
    return int(words.get("blocks", 1))


def read_tokens(source: Source) -> tuple[NDArray[np.uint32], int]:
    """Return a file's tokens, unverified, and its number of blocks; raises Damaged if invalid."""
    head = _head(source)
    try:
        start, end = json.loads(head[8:])[TOKENS]["data_offsets"]
        raw = source.read(min(end - start, MOST_HEAD_BYTES), len(head) + start)
        return np.frombuffer(raw, "<u4").astype(np.uint32), blocks_of(_words(head[8:]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Damaged(f"invalid header: {error}") from None


def _words(head: bytes) -> dict[str, str]:
    fields = json.loads(head)
    if not isinstance(fields, dict) or not isinstance(fields.get("__metadata__"), dict):
        raise ValueError("no metadata")
    return {str(name): str(value) for name, value in fields["__metadata__"].items()}


def _hash(words: Mapping[str, str], arrays: Mapping[str, HostArray]) -> str:
    return _hash_of(words, [(name, a.dtype, a.shape, [a.data]) for name, a in arrays.items()])


def _hash_of(words: Mapping[str, str], arrays: Sequence[_Pieces]) -> str:
    """Hash the header fields except the hash itself, and the arrays in order of names."""
    hashed = xxhash.xxh3_128()

    def add(*pieces: Any) -> None:
        hashed.update(sum(len(piece) for piece in pieces).to_bytes(8, "little"))
        for piece in pieces:
            hashed.update(piece)

    for name in sorted(words):
        if name != "xxh3":
            add(f"{name}={words[name]}".encode(errors="surrogatepass"))
    for name, dtype, shape, pieces in sorted(arrays, key=lambda array: array[0]):
        add(f"{name}:{dtype}{shape}".encode())
        add(*pieces)
    return hashed.hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class ArrayPart:
    """Range of bytes of a record's array."""

    name: str
    start: int
    """First byte within the array."""
    nbytes: int


def read_parts(source: Source, parts: Sequence[ArrayPart]) -> list[NDArray[np.uint8]]:
    """Read parts of a record's arrays, unverified; raises Damaged if one is missing."""
    offsets = array_offsets(source)
    buffers = [np.empty(part.nbytes, np.uint8) for part in parts]
    placed = sorted((_place(offsets, part), number) for number, part in enumerate(parts))
    together: list[NDArray[np.uint8]] = []
    start, end, nbytes = 0, 0, source.nbytes
    for offset, number in placed:
        if offset != end:
            source.fill(together, start)
            start, end, together = offset, offset, []
        end += parts[number].nbytes
        if end > nbytes:
            raise Damaged("it is truncated")
        together.append(buffers[number])
    source.fill(together, start)
    return buffers


def _place(offsets: Mapping[str, int], part: ArrayPart) -> int:
    if part.name not in offsets:
        raise Damaged(f"it does not hold {part.name}")
    return offsets[part.name] + part.start
