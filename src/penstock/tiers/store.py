"""Base class of block stores, with the code to read chains of records.

    held ──> read in parallel into buffers ──> all records before the first failure

A damaged record counts as a miss and is removed. An error of the store itself is an `OSError`,
after which its worker switches the tier off.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kv.block_spans import Spans
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.tiers.readers import Readers
from penstock.tiers.record import ArrayPart, Damaged, Record, Target

logger = logging.getLogger(__name__)

READERS = 2
"""Number of records read in parallel, since one core hashes slower than most disks read."""


@dataclass(slots=True)
class TierCounts:
    """Counts of a store's events, kept when the store is reopened."""

    written_blocks: int = 0
    written_bytes: int = 0
    known_blocks: int = 0
    refused_blocks: int = 0
    """Writes refused for lack of space, or because the parent is missing."""
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Seconds spent on `read_bytes`."""
    damaged_blocks: int = 0
    missing_blocks: int = 0


class Store(ABC):
    """Store of one model's blocks. Not thread-safe: used only by a tier's thread.

    A record contains the blocks of a span, or only the first ones if the chain ended there; its key
    is the hash of the last block.
    """

    limit_bytes: int = 0
    """Limit on all bytes in the store; 0 if another program sets it."""
    full: str | None = None
    """Reason why writing is paused, while reads continue; None if it is not."""

    def __init__(self, fingerprint: str, name: str, spans: Spans) -> None:
        self.fingerprint = fingerprint
        self.tier_name = name
        self.spans = spans
        self.counts = TierCounts()
        self._readers = Readers(READERS, f"penstock-{name}-read")

    @property
    def nbytes(self) -> int:
        """Bytes stored; 0 if unknown."""
        return 0

    def held(self, block_hashes: Sequence[bytes], *, resumable: bool = False) -> int:
        """Return the number of a chain's leading blocks that can be read.

        Args:
            block_hashes: hashes of the chain's blocks.
            resumable: whether to count only blocks up to the last checkpoint.
        """
        ends = [0, *self.spans.ends(len(block_hashes))]
        whole = ends[self._first([block_hashes[end - 1] for end in ends[1:]])]
        batch = block_hashes[
            : self.spans.end(whole) - 1
        ]  # a shorter record may follow the full ones
        if not resumable:
            return whole + self._last(batch[whole:])
        checkpoints = [checkpoint_hash(key) for key in batch]
        count = self._last(checkpoints)
        while count and count not in ends and not self._last([block_hashes[count - 1]]):
            count = self._last(checkpoints[: count - 1])
        return count

    def chains(self, most_bytes: int) -> list[list[bytes]]:
        """Return this model's most valuable chains of hashes whose files fit in `most_bytes`."""
        return []

    @abstractmethod
    def _first(self, block_hashes: Sequence[bytes]) -> int: ...

    @abstractmethod
    def _last(self, block_hashes: Sequence[bytes]) -> int:
        """Return the number, from 1, of the last record that is present; 0 if none is."""

    @abstractmethod
    def write(self, record: Record) -> object:
        """Write a record unless present; if OSError or ValueError is raised, no part is stored."""

    def restore(
        self,
        block_hashes: Sequence[bytes],
        targets: Sequence[Mapping[str, Target]],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> int:
        """Read consecutive records into buffers; return the number read before the first failure.

        Records are read in parallel while `meanwhile` runs; all reads have ended when this returns.
        A missing record is a miss. Raises OSError if the store fails.
        """
        began = time.perf_counter()
        whole = list(zip(block_hashes[: self._first(block_hashes)], targets, strict=False))
        reads = [self._readers.submit(self._read_into, key, places) for key, places in whole]
        try:
            meanwhile()
        finally:
            wait(reads)
        count = 0
        for (key, _), read in zip(whole, reads, strict=True):
            if not self.is_whole(key, read):
                break
            self.counts.read_blocks += 1
            self.counts.read_bytes += read.result()
            count += 1
        self.counts.read_seconds += time.perf_counter() - began
        return count

    def holds(self, key: bytes) -> bool:
        return self._first([key]) == 1

    @abstractmethod
    def read_parts(self, key: bytes, parts: Sequence[ArrayPart]) -> list[NDArray[np.uint8]]:
        """Read parts of a record's arrays, unverified. Thread-safe.

        Returns:
            Bytes of each part, (nbytes,).

        Raises:
            Damaged, FileNotFoundError: a part or the record is missing.
            OSError: the store fails.
        """

    def is_whole(self, key: bytes, read: Future[Any]) -> bool:
        """Return whether a block was read; a damaged or missing block is removed.

        Raises:
            OSError: the store fails; a block that the disk could not read is also removed.
        """
        try:
            read.result()
        except (OSError, Damaged) as error:
            # The future keeps the error, whose frames, like those of its context, would keep the
            # buffers alive.
            error.__traceback__ = error.__context__ = None
            if isinstance(error, FileNotFoundError):
                self.counts.missing_blocks += 1
            elif isinstance(error, Damaged):
                self.counts.damaged_blocks += 1
                logger.warning(
                    "block %s of the %s cache is damaged (%s); removing it to recompute it",
                    key.hex()[:12],
                    self.tier_name,
                    error,
                )
            else:
                if error.errno == errno.EIO:  # do not retry a file that the disk cannot read
                    with suppress(OSError, sqlite3.Error):
                        self._forget([key])
                raise type(error)(*error.args) from None
            self._forget([key])
            return False
        return True

    def _check_is(self, words: Mapping[str, str], key: bytes) -> None:
        if (words.get("key"), words.get("fingerprint")) != (key.hex(), self.fingerprint):
            raise Damaged("it is another block")

    def drop_damaged(self, key: bytes) -> None:
        self.counts.damaged_blocks += 1
        self._forget([key])

    @abstractmethod
    def prepare(
        self, block_hashes: Sequence[bytes], known: int = 0, *, resumable: bool = False
    ) -> int:
        """Return the number of a chain's leading blocks that can be read, and count their use.

        Args:
            block_hashes: hashes of the chain's blocks.
            known: number of blocks already in memory, which need not be read ahead.
            resumable: see `held`.
        """

    def note_uses(self) -> None:  # noqa: B027 - not every store needs to
        ...

    def clear(self, *, all_models: bool = True) -> int:
        """Remove all blocks that this store owns, or this model's; return the number removed."""
        return 0

    def reconciling(self) -> Iterator[None]:
        """Repair the store, yielding periodically to let others use it."""
        yield from ()

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abandon(self, error: Exception) -> None: ...

    @abstractmethod
    def _read_into(self, key: bytes, targets: Mapping[str, Target]) -> int:
        """Read a record into buffers; return the size of its file. Thread-safe.

        Raises:
            Damaged: the file differs from the record written.
            FileNotFoundError: the record is missing.
            OSError: the store fails.
        """

    @abstractmethod
    def _forget(self, block_hashes: Sequence[bytes]) -> None: ...
