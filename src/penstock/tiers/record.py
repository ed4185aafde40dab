"""File of one block: safetensors, with its identity and a checksum in the header.

Everything that is read back is covered by one xxh3 hash: names, shapes, dtypes and bytes of the
arrays, and the words about them. A file in which a bit has flipped, that was cut short, or that
is another block's is `Damaged`, never a wrong answer.
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
"""Names of dtypes in a file's header, and as safetensors takes them."""
_SAFE = {name: short for short, name in DTYPES.items()}
_Pieces: TypeAlias = tuple[str, str, tuple[int, ...], Sequence[NDArray[np.uint8]]]
"""Name, dtype, shape and bytes of an array."""
_BEGINNING, _DECODER = '{"__metadata__":', json.JSONDecoder()
TOKENS = "tokens"
"""Name of the array of the block's tokens."""
HEAD_BYTES = 16_384
"""Read of a file at first: most headers are shorter."""
MOST_DEPTH = 1 << 31
MOST_HEAD_BYTES = 1 << 20
"""Largest header that is read, in bytes: 80 layers take 16 kB."""
PIECES_AT_ONCE = 512
"""Places that one read is spread over; systems allow 1,024."""


class Damaged(ValueError):
    """The bytes are not the record that was asked for; the text names the fault."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array of any dtype in the host's memory: numpy knows no bfloat16."""

    dtype: str
    """Name of the dtype in MLX: `float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """Its bytes, (n,), row by row."""


@dataclass(frozen=True, slots=True)
class Record:
    """KV of consecutive blocks, all layers; or a checkpoint.

    A checkpoint lies behind its block as a child.
    """

    key: bytes
    """Names the last block and everything in front of it; see `blocks`."""
    parent: bytes
    """Key of the block in front; of the first block, the chain's root."""
    depth: int
    """Blocks in front of it."""
    arrays: Mapping[str, HostArray]
    """Arrays by name, as `3.keys`."""
    blocks: int = 1
    """Number of blocks."""
    replaces: Sequence[bytes] = ()
    """Keys of shorter records with the same first block, which this one replaces; not in the
    file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.data.nbytes for array in self.arrays.values())

    @property
    def end_tokens(self) -> int:
        """Tokens of a chain from its first one to this record's last; 0 of a checkpoint."""
        tokens = self.arrays.get(TOKENS)
        count = 0 if tokens is None else tokens.shape[0]
        return (self.depth + self.blocks) * count // self.blocks


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of an array of a file: memory that the caller has allocated."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[NDArray[np.uint8]]
    """(n,) each, writable, in the order of the array's bytes."""


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
        "blocks": str(record.blocks),
        "fingerprint": fingerprint,
    }
    words["xxh3"] = _hash(words, record.arrays)
    try:
        return bytes(serialize(specs, metadata=words))
    except SafetensorError as error:
        raise ValueError(f"a block cannot be written: {error}") from None


def decode(raw: bytes) -> Record:
    """Read a file as a whole, with the library's own parser.

    Raises:
        Damaged: some bit of it is not as `encode` has written it.
    """
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
        raise Damaged(f"its header makes no sense: {error}") from None
    if _hash(words, arrays) != checksum:
        raise Damaged("its bytes are not those that were written")
    return record


class Source(Protocol):
    """The bytes of a file, wherever they lie."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read(self, nbytes: int, at: int) -> bytes:
        """Return so many bytes from `at` on, or those that there are."""

    def fill(self, pieces: Sequence[NDArray[np.uint8]], at: int) -> None:
        """Read bytes from `at` on into pieces, one behind the other.

        Raises:
            OSError: they cannot be read.
        """


def read_into(descriptor: int, targets: Mapping[str, Target]) -> dict[str, str]:
    """Do as `read_from` with a file that is open for reading."""
    return read_from(FileSource(descriptor), targets)


def read_from(source: Source, targets: Mapping[str, Target]) -> dict[str, str]:
    """Read a file's arrays straight to where they belong; return the words of its header.

    Args:
        source: of the file's bytes.
        targets: by name, for all arrays that the file should have.

    Raises:
        Damaged: some bit of it is not as `encode` has written it, or it has other arrays. The
            content of the targets is worth nothing then.
        OSError: the source fails.
    """
    length, head = source.nbytes, _head(source)
    size = len(head)
    words = header(head)
    pieces = [piece for name in _order(head[8:], targets) for piece in targets[name].pieces]
    if length != size + sum(piece.nbytes for piece in pieces):
        raise Damaged(f"it has {length} bytes, which are not those that it tells of")
    source.fill(pieces, size)
    arrays = [(name, target.dtype, target.shape, target.pieces) for name, target in targets.items()]
    if _hash_of(words, arrays) != words.pop("xxh3", None):
        raise Damaged("its bytes are not those that were written")
    return words


def array_offsets(source: Source) -> Mapping[str, int]:
    """Return where the bytes of each array begin in a file, as its header tells.

    Raises:
        Damaged: the header makes no sense.
        OSError: the source fails.
    """
    head = _head(source)
    try:
        text = head[8:].decode()
        if text.startswith(_BEGINNING):
            words, end = _DECODER.raw_decode(text, len(_BEGINNING))
            offsets = _offsets("{" + text[end + 1 :])
        else:  # by another version of the library
            words, offsets = _words(head[8:]), _offsets(text)
        if words["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"its header makes no sense: {error}") from None
    return {name: len(head) + offset for name, offset in offsets.items()}


@lru_cache(maxsize=4)
def _offsets(arrays: str) -> Mapping[str, int]:
    """Return where arrays begin behind a header; all whole records of a model have the same text.

    Reading the header of 28 layers takes as long as a dozen reads of the file.
    """
    return {
        name: int(array["data_offsets"][0])
        for name, array in json.loads(arrays).items()
        if name != "__metadata__"
    }


def _head(source: Source) -> bytes:
    """Read the header of a file, its length in front of it included."""
    head = source.read(HEAD_BYTES, 0)
    size = 8 + int.from_bytes(head[:8], "little")
    if size > MOST_HEAD_BYTES:
        raise Damaged(f"a header of {size} bytes is none")
    if len(head) < size <= source.nbytes:
        head += source.read(size - len(head), len(head))
    return head[:size]


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file on a disk; see `Source`."""

    descriptor: int

    @property
    def nbytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, nbytes: int, at: int) -> bytes:
        return os.pread(self.descriptor, nbytes, at)

    def fill(self, pieces: Sequence[NDArray[np.uint8]], at: int) -> None:
        for first in range(0, len(pieces), PIECES_AT_ONCE):
            batch = pieces[first : first + PIECES_AT_ONCE]
            wanted = sum(piece.nbytes for piece in batch)
            buffers: list[Any] = list(batch)
            if os.preadv(self.descriptor, buffers, at) != wanted:
                raise OSError(f"the system has not read {wanted} bytes at {at}")
            at += wanted


def _order(head: bytes, targets: Mapping[str, Target]) -> list[str]:
    """Return the names of a file's arrays, all of them targets, in the order of their bytes."""
    fields = json.loads(head)
    del fields["__metadata__"]
    try:
        order = {
            name: (array["dtype"], tuple(array["shape"]), *array["data_offsets"])
            for name, array in fields.items()
        }
        names = sorted(order, key=lambda name: order[name][2])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its header makes no sense: {error}") from None
    at = 0
    for name in names:
        target = targets.get(name)
        if target is None:
            raise Damaged(f"it holds {name}, which was not asked for")
        end = at + sum(piece.nbytes for piece in target.pieces)
        if order[name] != (_SAFE[target.dtype], target.shape, at, end):
            raise Damaged(f"{name} is not the {target.dtype} {target.shape} that was asked for")
        at = end
    if len(names) != len(targets):
        raise Damaged(f"it holds {len(names)} arrays; {len(targets)} were asked for")
    return names


def header(raw: bytes) -> dict[str, str]:
    """Return the words of a file's header, unchecked but for the format.

    Raises:
        Damaged: it has none, or is of another format.
    """
    size = int.from_bytes(raw[:8], "little")
    try:
        words = _words(raw[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is no safetensors file: {error}") from None
    if words.get("format") != FORMAT:
        raise Damaged(f"its format is {words.get('format')}, not {FORMAT}")
    return words


def blocks_of(words: Mapping[str, str]) -> int:
    """Return how many blocks a file holds, as its header tells; older ones hold one."""
    return int(words.get("blocks", 1))


def read_tokens(descriptor: int) -> tuple[NDArray[np.uint32], int]:
    """Return the tokens of a file that is open for reading, unchecked, and of how many blocks.

    Raises:
        Damaged: the header makes no sense.
    """
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    head = os.pread(descriptor, min(size, MOST_HEAD_BYTES), 8)
    try:
        start, end = json.loads(head)[TOKENS]["data_offsets"]
        raw = os.pread(descriptor, min(end - start, MOST_HEAD_BYTES), 8 + size + start)
        return np.frombuffer(raw, "<u4").astype(np.uint32), blocks_of(_words(head))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Damaged(f"its header makes no sense: {error}") from None


def _words(head: bytes) -> dict[str, str]:
    fields = json.loads(head)
    if not isinstance(fields, dict) or not isinstance(fields.get("__metadata__"), dict):
        raise ValueError("no metadata")
    return {str(name): str(value) for name, value in fields["__metadata__"].items()}


def _hash(words: Mapping[str, str], arrays: Mapping[str, HostArray]) -> str:
    return _hash_of(words, [(name, a.dtype, a.shape, [a.data]) for name, a in arrays.items()])


def _hash_of(words: Mapping[str, str], arrays: Sequence[_Pieces]) -> str:
    """Hash the words but for the hash itself, and the arrays by name; each part with its length."""
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
