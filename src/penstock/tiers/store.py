"""Base of all stores of blocks: how a chain is read.

    held ──> read some at the same time, each straight to where it belongs ──> all before the first
                                                                               that is not whole

A fault of a record is a miss that is counted, and the record is forgotten. A fault of the store
itself is an `OSError`, on which its worker switches the tier off.
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
from penstock.tiers.record import Damaged, Record, Target
from penstock.tiers.record_parts import ArrayPart

logger = logging.getLogger(__name__)

READERS = 2
"""Records that are read at the same time: to read and to hash takes a core longer than most
disks."""


@dataclass(slots=True)
class TierCounts:
    """Counts of a store's events. A store that is opened again may go on with the old ones."""

    written_blocks: int = 0
    written_bytes: int = 0
    """Bytes of files: the wear of the disk."""
    known_blocks: int = 0
    """Writes that were not needed."""
    refused_blocks: int = 0
    """Writes for which there was no room, or whose beginning is not there."""
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Spent on `read_bytes`."""
    damaged_blocks: int = 0
    missing_blocks: int = 0
    """Were taken to be there, and are not."""


class Store(ABC):
    """Blocks of one model. Not thread-safe: one owner, a tier's thread.

    A record has the blocks of a span, or its first ones if the chain ended there, and is named by
    the last of them.

    Args:
        fingerprint: identity of everything but the tokens that KV depends on.
        name: of the threads that read.
        spans: which blocks make a record together.
    """

    limit_bytes: int = 0
    """Limit of all bytes in the store; 0 if another program sets it."""
    full: str | None = None
    """Why no new blocks are taken for now; those that are there are read all the same."""

    def __init__(self, fingerprint: str, name: str, spans: Spans) -> None:
        self.fingerprint = fingerprint
        self.tier_name = name
        self.spans = spans
        self.counts = TierCounts()
        self._readers = Readers(READERS, f"penstock-{name}-read")

    # ---- questions

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, as far as that can be told."""
        return 0

    def held(self, block_hashes: Sequence[bytes], *, resumable: bool = False) -> int:
        """Return how many blocks of a chain, from its first on, could be read.

        Args:
            block_hashes: of the blocks.
            resumable: count no further than to the last one behind which a checkpoint is there.
        """
        ends = [0, *self.spans.ends(len(block_hashes))]
        whole = ends[self._first([block_hashes[end - 1] for end in ends[1:]])]
        batch = block_hashes[
            : self.spans.end(whole) - 1
        ]  # behind the whole records one may be shorter
        if not resumable:
            return whole + self._last(batch[whole:])
        checkpoints = [checkpoint_hash(key) for key in batch]
        at = self._last(checkpoints)
        while at and at not in ends and not self._last([block_hashes[at - 1]]):
            at = self._last(checkpoints[: at - 1])
        return at

    def chains(self, most_bytes: int) -> list[list[bytes]]:
        """Return the hashes of the blocks worth most of this model, whole chains from their start.

        As many as fit into `nbytes` bytes of files.
        """
        return []

    @abstractmethod
    def _first(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many of some records are there, from the first one on."""

    @abstractmethod
    def _last(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many records there are up to the last one that is there."""

    # ---- acts

    @abstractmethod
    def write(self, record: Record) -> object:
        """Keep a block, unless it is there.

        Raises:
            OSError: the store fails; nothing of the block is left.
            ValueError: the block has no form in a file.
        """

    def restore(
        self,
        block_hashes: Sequence[bytes],
        targets: Sequence[Mapping[str, Target]],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> int:
        """Read consecutive records into their buffers; return how many succeeded before a failure.

        Some records are read at the same time; all are done with when this returns.

        Args:
            block_hashes: of the records.
            targets: of each record, for all of its arrays.
            meanwhile: is called while the records are read.

        Raises:
            OSError: the store fails; a record that is not there is only a miss.
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
        """Tell whether a record could be read."""
        return self._first([key]) == 1

    @abstractmethod
    def read_parts(self, key: bytes, parts: Sequence[ArrayPart]) -> list[NDArray[np.uint8]]:
        """Read parts of a record's arrays, unchecked. Any thread may.

        Raises:
            Damaged: it has no such parts.
            FileNotFoundError: it is not there.
            OSError: the store fails.
        """

    def is_whole(self, key: bytes, read: Future[Any]) -> bool:
        """Tell whether a block was read; one that is damaged or gone is a miss, and removed.

        Raises:
            OSError: the store fails; a block that a disk could not read is removed, too.
        """
        try:
            read.result()
        except (OSError, Damaged) as error:
            # A future keeps its error, whose frames would keep the memory that was read into; so
            # would those of the error that it was raised for.
            error.__traceback__ = error.__context__ = None
            if isinstance(error, FileNotFoundError):
                self.counts.missing_blocks += 1
            elif isinstance(error, Damaged):
                self.counts.damaged_blocks += 1
                logger.warning(
                    "block %s of the %s cache is damaged (%s); it is removed, and computed again",
                    key.hex()[:12],
                    self.tier_name,
                    error,
                )
            else:
                if error.errno == errno.EIO:  # of a file that cannot be read, once is enough
                    with suppress(OSError, sqlite3.Error):
                        self._forget([key])
                raise type(error)(*error.args) from None
            self._forget([key])
            return False
        return True

    def _check_is(self, words: Mapping[str, str], key: bytes) -> None:
        """Raise Damaged if the words of a record are another's."""
        if (words.get("key"), words.get("fingerprint")) != (key.hex(), self.fingerprint):
            raise Damaged("it is another block")

    def drop_damaged(self, key: bytes) -> None:
        """Remove a record of which a part was not as written."""
        self.counts.damaged_blocks += 1
        self._forget([key])

    @abstractmethod
    def prepare(
        self, block_hashes: Sequence[bytes], known: int = 0, *, resumable: bool = False
    ) -> int:
        """Return how many first blocks of a chain could be read, and count a use of each.

        Args:
            block_hashes: of the blocks.
            known: how many first ones need not be read.
            resumable: as of `held`.
        """

    def note_uses(self) -> None:  # noqa: B027 - not every store needs to
        """Write which blocks were used since the last time."""

    def clear(self, *, all_models: bool = True) -> int:
        """Remove all blocks, or this model's, as far as this store owns them; return how many."""
        return 0

    def reconciling(self) -> Iterator[None]:
        """Put the store in order, and yield now and then: others may use the store meanwhile."""
        yield from ()

    @abstractmethod
    def close(self) -> None:
        """End."""

    @abstractmethod
    def abandon(self, error: Exception) -> None:
        """Close after an error."""

    # ---- parts

    @abstractmethod
    def _read_into(self, key: bytes, targets: Mapping[str, Target]) -> int:
        """Read a block to where it belongs; return the bytes of its file. Any thread may.

        Raises:
            Damaged: it differs from the record written.
            FileNotFoundError: it is not there.
            OSError: the store fails.
        """

    @abstractmethod
    def _forget(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks, or their remains."""
