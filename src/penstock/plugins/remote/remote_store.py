"""Store of blocks in an object store that servers share; values are like the SSD tier's files.

    write   does it exist? ──no──> put one value with a lifetime ──> remember it for a while
    read    get the value in pieces ──> fill the buffers ──> check hash, fingerprint, tokens

The object store may be slow, unreachable, full, or written by another program. A wrong record is a
miss, and is removed; if the store does not answer in time, an `OSError` is raised. The object store
itself decides what it evicts; each use extends a value's lifetime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.kv.block_spans import Spans
from penstock.plugins.remote.objects import ObjectPiece, Objects
from penstock.prefix.block_hashes import HASH_BYTES, is_hash_of, root_hash
from penstock.tiers.record import (
    FORMAT,
    HEAD_BYTES,
    TOKENS,
    ArrayPart,
    Damaged,
    Record,
    Target,
    blocks_of,
    encode,
    read_from,
    read_parts,
)
from penstock.tiers.store import READERS, Store

PIECE_BYTES = 4_000_000
"""Number of bytes of a value read at a time."""
COPIES = 4
"""Upper bound of the copies of a piece in memory: in the client's buffers and in its result."""
SEEN_SECONDS = 600.0
"""Seconds for which a value that was seen is assumed to exist, so that it is not written again."""
SEEN_KEYS = 16_384
"""Maximum number of values remembered as existing."""
SEEN_KEY_BYTES = 200
"""Python overhead of one remembered hash, in bytes."""
FULL_SECONDS = 60.0
"""Seconds without writes after the store refused a value."""
REFUSES = "the store is full, or may only be read; it is read from as before"
FIRST_PAGE = 8
MOST_PAGE = 512
"""Maximum number of values to look up per request; the first requests ask for fewer, because most
of a prompt may be unknown."""
CLOSE_SECONDS = 10.0
"""Seconds that `close` waits for reads to end."""

P = ParamSpec("P")
T = TypeVar("T")


def buffer_bytes(piece_bytes: int) -> int:
    """Return the memory to reserve for pieces being read and for remembered hashes."""
    return READERS * COPIES * piece_bytes + SEEN_KEYS * SEEN_KEY_BYTES


class RemoteStore(Store):
    """Store of one model's blocks in an object store; see `Store`."""

    def __init__(
        self,
        objects: Objects,
        *,
        fingerprint: str,
        piece_bytes: int = PIECE_BYTES,
        timeout_seconds: float,
        ttl_seconds: int,
        spans: Spans = Spans(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(fingerprint, "remote", spans)
        self._objects = objects
        self._folder = f"{FORMAT}/{root_hash(fingerprint).hex()}"
        self._piece_bytes = piece_bytes
        self._timeout_seconds = timeout_seconds
        self._seen_seconds = min(SEEN_SECONDS, ttl_seconds / 2)
        self._seen: dict[bytes, float] = {}
        self._full_until = 0.0
        self._failed: str | None = None
        try:
            # Detects a store that does not answer now, when no request waits.
            self._there([bytes(HASH_BYTES)])
        except OSError:
            objects.close()
            raise

    def name(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}.safetensors"

    def prepare(
        self, block_hashes: Sequence[bytes], known: int = 0, *, resumable: bool = False
    ) -> int:
        return self.held(block_hashes, resumable=resumable)

    # ---- changes

    def write(self, record: Record) -> str:
        if self._there([record.key])[0]:
            self.counts.known_blocks += 1
            return "known"
        full = time.monotonic() < self._full_until
        raw = b"" if full else encode(record, self.fingerprint)
        if full or not self._objects.put(self.name(record.key), raw):
            if not full:
                self._full_until = time.monotonic() + FULL_SECONDS
                self.full = REFUSES
            self.counts.refused_blocks += 1
            return "refused"
        self.full = None
        self._see(record.key)
        self.counts.written_blocks += 1
        self.counts.written_bytes += len(raw)
        return "written"

    def close(self) -> None:
        self._readers.close(CLOSE_SECONDS)
        self._objects.close()

    def abandon(self, error: Exception) -> None:
        self.close()

    def _first(self, block_hashes: Sequence[bytes]) -> int:
        count = 0
        for page in _pages(block_hashes):
            there = self._there(page)
            if not all(there):
                return count + there.index(False)
            count += len(page)
        return count

    def _last(self, block_hashes: Sequence[bytes]) -> int:
        count = len(block_hashes)
        for page in _pages(block_hashes[::-1]):
            there = self._there(page)
            if any(there):
                return count - there.index(True)
            count -= len(page)
        return 0

    def _there(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether each value exists; those seen recently are not looked up."""
        since = time.monotonic() - self._seen_seconds
        unsure = [key for key in block_hashes if self._seen.get(key, since) <= since]
        if unsure:
            answers = self._timed(self._objects.has, [self.name(key) for key in unsure])
            for key, there in zip(unsure, answers, strict=True):
                self._seen.pop(key, None)
                if there:
                    self._see(key)
        return [key in self._seen for key in block_hashes]

    def _see(self, key: bytes) -> None:
        self._seen.pop(key, None)
        self._seen[key] = time.monotonic()
        while len(self._seen) > SEEN_KEYS:
            del self._seen[next(iter(self._seen))]

    def _forget(self, block_hashes: Sequence[bytes]) -> None:
        self._seen.clear()  # other values may be wrong or missing, too
        self._timed(self._objects.remove, [self.name(key) for key in block_hashes])

    def _read_into(self, key: bytes, targets: Mapping[str, Target]) -> int:
        if self._failed is not None:  # do not wait for a timeout again
            raise ConnectionError(self._failed)
        try:
            value = self._value(key, self._piece_bytes)
            words = read_from(value, targets)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._failed = str(error)
            raise
        self._check_is(words, key)
        tokens = None
        if TOKENS in targets:
            tokens = np.concatenate(targets[TOKENS].pieces).view("<u4").astype(np.uint32)
        try:
            parent = bytes.fromhex(words["parent"])
            follows = is_hash_of(key, parent, tokens, blocks_of(words))
        except (KeyError, ValueError):
            follows = False
        if not follows:  # a checksum is no proof of origin, as anyone can compute it
            raise Damaged("its key is not that of its tokens")
        return value.nbytes

    def read_parts(self, key: bytes, parts: Sequence[ArrayPart]) -> list[NDArray[np.uint8]]:
        largest = max(part.nbytes for part in parts)
        return read_parts(self._value(key, min(self._piece_bytes, max(HEAD_BYTES, largest))), parts)

    def _value(self, key: bytes, piece_bytes: int) -> _Value:
        return _Value(
            lambda offset: self._timed(self._objects.get, self.name(key), offset, piece_bytes)
        )

    def _timed(self, ask: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
        """Call a function; raise TimeoutError if it took too long, as the next call would, too."""
        began = time.monotonic()
        answer = ask(*arguments, **more)
        took = time.monotonic() - began
        if took > self._timeout_seconds:
            raise TimeoutError(
                f"it took {took:.1f} s to answer, more than {self._timeout_seconds:g} s"
            )
        return answer


class _Value:
    """`Source` that reads a value one piece at a time."""

    def __init__(self, get: Callable[[int], ObjectPiece | None]) -> None:
        self._get = get
        self._fetch(0)

    def read(self, nbytes: int, offset: int) -> bytes:
        raw = b""
        while len(raw) < nbytes and offset < self.nbytes:
            chunk = bytes(self._from(offset)[: nbytes - len(raw)])
            raw += chunk
            offset += len(chunk)
        return raw

    def fill(self, pieces: Sequence[NDArray[np.uint8]], offset: int) -> None:
        for piece in pieces:
            done = 0
            while done < piece.nbytes:
                chunk = self._from(offset)[: piece.nbytes - done]
                piece[done : done + len(chunk)] = chunk
                done += len(chunk)
                offset += len(chunk)

    def _from(self, offset: int) -> memoryview:
        """Return bytes of the current piece from `offset` on, fetching another piece if needed."""
        if not self._at <= offset < self._at + len(self._raw):
            self._fetch(offset)
        return self._raw[offset - self._at :]

    def _fetch(self, offset: int) -> None:
        self._raw = memoryview(b"")
        piece = self._get(offset)
        if piece is None or (offset and not piece.raw):
            raise FileNotFoundError("the value does not exist")
        self.nbytes, self._at, self._raw = piece.nbytes, offset, memoryview(piece.raw)


def _pages(block_hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    start, size = 0, FIRST_PAGE
    while start < len(block_hashes):
        yield block_hashes[start : start + size]
        start, size = start + size, min(8 * size, MOST_PAGE)
