"""Blocks in a store shared by many servers; values have the format of the SSD tier's files.

    write   is it there? ──no──> one value, whole, for a time ──> known for a while
    read    value ──in pieces──> into its buffers ──> hash, fingerprint, tokens

The store may be slow, gone, full, or written by another program. A wrong record is a miss and
removed; a store that does not answer in time is an `OSError`. How much is kept for how long is its
own policy; a use prolongs a value's stay.
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
"""Number of copies of a piece in memory: the client's buffer, its answer, and the bytes it was cut
from."""
SEEN_SECONDS = 600.0
"""Seconds for which a value counts as present after it was seen, and is not written again."""
SEEN_KEYS = 16_384
"""Number of values remembered as present; the oldest are forgotten."""
SEEN_KEY_BYTES = 200
"""Python overhead of one remembered hash, in bytes."""
FULL_SECONDS = 60.0
"""Seconds without writes after the store refused a value."""
REFUSES = "the store is full, or may only be read; it is read from as before"
FIRST_PAGE = 8
MOST_PAGE = 512
"""Maximum values per request; first pages are small, since prompts may be unknown."""
CLOSE_SECONDS = 10.0
"""Seconds that `close` waits for reads."""

P = ParamSpec("P")
T = TypeVar("T")


def buffer_bytes(piece_bytes: int) -> int:
    """Return the memory reserved by a store for arriving pieces and names."""
    return READERS * COPIES * piece_bytes + SEEN_KEYS * SEEN_KEY_BYTES


class RemoteStore(Store):
    """One model's blocks in a store shared with other servers; see `Store`."""

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
            # A store that does not answer shows now, when no request waits.
            self._there([bytes(HASH_BYTES)])
        except OSError:
            objects.close()
            raise

    def name(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}.safetensors"

    # ---- questions

    def prepare(
        self, block_hashes: Sequence[bytes], known: int = 0, *, resumable: bool = False
    ) -> int:
        return self.held(block_hashes, resumable=resumable)

    # ---- acts

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

    # ---- parts

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
        """Return which values are present, without asking about those seen recently."""
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
        self._seen.clear()  # where one is not what it was, others may not be: all are asked for
        self._timed(self._objects.remove, [self.name(key) for key in block_hashes])

    def _read_into(self, key: bytes, targets: Mapping[str, Target]) -> int:
        if self._failed is not None:  # once is enough: each would wait as long
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
        if not follows:  # the checksum is no proof: anyone can compute it
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
        """Call a function, and raise TimeoutError if it was slow: the next call would be, too."""
        began = time.monotonic()
        answer = ask(*arguments, **more)
        took = time.monotonic() - began
        if took > self._timeout_seconds:
            raise TimeoutError(f"it took {took:.1f} s to answer, of {self._timeout_seconds:g} s")
        return answer


class _Value:
    """Bytes of a value, read one piece at a time; a `Source`."""

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
        """Return the cached bytes from `offset` on, fetching them if needed."""
        if not self._at <= offset < self._at + len(self._raw):
            self._fetch(offset)
        return self._raw[offset - self._at :]

    def _fetch(self, offset: int) -> None:
        self._raw = memoryview(b"")
        piece = self._get(offset)
        if piece is None or (offset and not piece.raw):
            raise FileNotFoundError("the value is not there")
        self.nbytes, self._at, self._raw = piece.nbytes, offset, memoryview(piece.raw)


def _pages(block_hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    start, size = 0, FIRST_PAGE
    while start < len(block_hashes):
        yield block_hashes[start : start + size]
        start, size = start + size, min(8 * size, MOST_PAGE)
