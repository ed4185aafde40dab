"""Worker thread of a cold tier, which owns the store, writes in the background and reads ahead.

    offer    ──> queue, bounded in bytes ──> Store.write      dropped if the store is too slow
    call     ──> before all writes       ──> any method       returns a future
    restore  ──> before all writes       ──> Store.restore    returns a future; 0 if switched off

A store that fails switches the tier off with one message; serving continues, and the thread retries
the store later. No request waits for a retry.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from penstock.tiers.disk.tombstone import Tombstone
from penstock.tiers.readers import Readers
from penstock.tiers.record import ArrayPart, Record, Target
from penstock.tiers.store import READERS, Store, TierCounts

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256_000_000
"""Maximum bytes of blocks queued for writing."""
RETRY_SECONDS = 30.0
"""Seconds until a failed store is retried."""
CLOSE_SECONDS = 30.0
FAULTS = (OSError, sqlite3.Error)
T = TypeVar("T")
Parts: TypeAlias = dict[bytes, list[NDArray[np.uint8]]]
"""Bytes of array parts, by key of the record."""


@dataclass(slots=True)
class TierStats:
    off: str | None = None
    """Reason why the tier is switched off; None while it is on."""
    full: str | None = None
    """Reason why writing is paused, while reads continue; None if it is not."""
    queued_bytes: int = 0
    dropped_blocks: int = 0
    """Number of blocks not written: the queue was full, the tier off, or the block evicted."""
    held_bytes: int = 0
    limit_bytes: int = 0
    """Limit of the folder in bytes; 0 for a remote store, whose limit is unknown."""
    faults: int = 0
    counts: TierCounts = field(default_factory=TierCounts)
    """Counts of the store, accumulated over reopening."""


@dataclass(eq=False, slots=True)
class _Call(Generic[T]):
    run: Callable[[Store], T]
    otherwise: T
    prepare: Callable[[], object] | None
    """Preparation that may run on the worker thread before the call; None for none."""
    answer: Future[T] = field(default_factory=Future)
    begun: bool = False

    def begin(self) -> bool:
        """Return False if the call was cancelled; afterwards it cannot be cancelled."""
        if not self.begun and not self.answer.cancelled():
            self.begun = self.answer.set_running_or_notify_cancel()
        return self.begun


class ColdTier:
    """A store and the thread that owns it. Thread-safe.

    The thread calls `make` to open the store, which may raise `OSError` or `sqlite3.Error`, and
    again `retry_seconds` after a failure. `name` is logged, so it must not contain secrets. A
    tombstone records a deletion across restarts until it is done.
    """

    def __init__(
        self,
        make: Callable[[], Store],
        *,
        queue_bytes: int = QUEUE_BYTES,
        name: str = "SSD cache",
        retry_seconds: float = RETRY_SECONDS,
        tombstone: Tombstone | None = None,
    ) -> None:
        self._make = make
        self._tombstone = tombstone
        self._unnoted: list[Future[int | None]] = []
        self._queue_bytes = queue_bytes
        self._name = name
        self._retry_seconds = retry_seconds
        self._stats = TierStats()
        self._calls: deque[_Call[Any]] = deque()
        self._writes: deque[Record] = deque()
        self._changed = threading.Condition()
        self._warned_full = False
        self._to_clear: bool | None = None
        """True to remove all models' blocks, False for only this model's, None for none."""
        self._chores: Iterator[None] | None = None
        self._closing = False
        self._busy = False
        self._store: Store | None = None
        thread_name = f"penstock-{name.split()[0].lower()}"
        self._asked = Readers(1, f"{thread_name}-parts")
        self._readers = Readers(READERS, f"{thread_name}-parts-read")
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    # ---- for all threads

    def offer(self, record: Record) -> bool:
        """Queue a block for writing; return False if it is dropped. Does not block."""
        with self._changed:
            if not self._takes(record.nbytes) or self.is_off:
                self._stats.dropped_blocks += 1
                return False
            self._writes.append(record)
            self._stats.queued_bytes += record.nbytes
            self._changed.notify_all()
        return True

    def has_room(self, nbytes: int) -> bool:
        with self._changed:
            return not self.is_off and self._takes(nbytes)

    def call(
        self,
        run: Callable[[Store], T],
        otherwise: T,
        prepare: Callable[[], object] | None = None,
    ) -> Future[T]:
        """Queue a call on the store, before all writes; a failure switches the tier off.

        The result is `otherwise` while the tier is off. `prepare` may run on the worker thread
        while an earlier call is reading.
        """
        call: _Call[T] = _Call(run, otherwise, prepare)
        with self._changed:
            if not self.is_off:
                self._calls.append(call)
                self._changed.notify_all()
                return call.answer
        call.answer.set_result(otherwise)
        return call.answer

    def restore(
        self,
        block_hashes: Sequence[bytes],
        make_targets: Callable[[], Sequence[Mapping[str, Target]]],
    ) -> Future[int]:
        """Read leading records of a chain into buffers; return a future of the number read.

        `make_targets` returns the same targets at each call. The worker thread calls it when
        it starts to read, or while reading for another call; the memory belongs to the thread until
        the future is done.
        """
        return self.call(
            lambda store: store.restore(block_hashes, make_targets(), self._look_ahead),
            0,
            make_targets,
        )

    def read_parts(self, parts: Mapping[bytes, Sequence[ArrayPart]]) -> Future[Parts]:
        """Read parts of records by key, unverified, even during writes. From a single thread."""
        with self._changed:
            store = None if self.is_off else self._store
        if store is None:
            none: Future[Parts] = Future()
            none.set_result({})
            return none
        return self._asked.submit(self._read_parts, store, parts)

    def _read_parts(self, store: Store, parts: Mapping[bytes, Sequence[ArrayPart]]) -> Parts:
        answers = self._readers.map(store.read_parts, list(parts.items()))
        reads = dict(zip(parts, answers, strict=True))
        wrong = {key: read for key, read in reads.items() if read.exception() is not None}
        if wrong:
            none: list[bool] = []
            self.call(lambda store: [store.is_whole(*read) for read in wrong.items()], none)
        return {key: read.result() for key, read in reads.items() if key not in wrong}

    def clear(self, *, all_models: bool = True) -> Future[int | None]:
        """Remove all blocks, or this model's; return a future of the number, or of None if off.

        The deletion is recorded until done: a store that recovers is cleared before it is read,
        even in another process.
        """
        with self._changed:
            self._drop_writes()
            self._to_clear = all_models or bool(self._to_clear)
            if self.is_off and not self._closing:
                self._unnoted.append(Future())
                self._changed.notify_all()
                return self._unnoted[-1]
        return self.call(self._clear, None)

    def wait(self, timeout_seconds: float) -> None:
        with self._changed:
            if self.is_busy:
                self._changed.wait(timeout_seconds)

    @property
    def is_busy(self) -> bool:
        return bool(self._writes or self._calls or self._busy)

    def stats(self) -> TierStats:
        with self._changed:
            return replace(self._stats, counts=replace(self._stats.counts))

    def flush(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy, timeout_seconds)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write pending records within the timeout, and end the thread. Idempotent."""
        self.flush(timeout_seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        for readers in (self._asked, self._readers):
            readers.close(timeout_seconds)

    # ---- the thread

    def _clear(self, store: Store) -> int:
        with self._changed:
            all_models = self._to_clear
        if all_models is None:  # done when the store recovered
            return 0
        for _ in self._chores or ():  # these would add files to the index
            pass
        self._chores = None
        self._remember()
        removed = store.clear(all_models=all_models)
        if self._tombstone is not None:
            self._tombstone.remove()
        with self._changed:
            self._to_clear = None
        return removed

    def _remember(self) -> None:
        with self._changed:
            all_models, unnoted = self._to_clear, self._unnoted
            self._unnoted = []
        if all_models is not None and self._tombstone is not None:
            try:
                self._tombstone.place(all_models=all_models)
            except OSError as error:
                logger.warning(
                    "a deletion in the %s could not be recorded and would be lost on a restart: %s",
                    self._name,
                    error,
                )
        for answer in unnoted:
            answer.set_result(None)

    def _look_ahead(self) -> None:
        """Prepare the next queued call while files are read for the current one."""
        with self._changed:
            following = self._calls[0] if self._calls else None
        if following is not None and following.prepare is not None and following.begin():
            # An error recurs when the call runs.
            with suppress(Exception):
                following.prepare()

    def _takes(self, nbytes: int) -> bool:
        return self._stats.queued_bytes + nbytes <= self._queue_bytes

    @property
    def is_off(self) -> bool:
        """Whether the tier accepts no calls, because it is closing or its store has failed."""
        return self._stats.off is not None or self._closing

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            with self._changed:
                self._closing = True
                self._drop_writes()
                self._busy = False
                self._changed.notify_all()
            self._remember()
            self._refuse()
            # Restore buffers use this thread's stream; one left by an ended thread aborts the
            # process.
            mx.clear_streams()

    def _serve(self) -> None:
        store: Store | None = None
        working = True
        while working:
            try:
                if store is None:
                    store = self._make()
                    store.counts = self._stats.counts
                    self._chores = store.reconciling()
                    if self._to_clear is None and self._tombstone is not None:
                        self._to_clear = self._tombstone.read()
                    if self._to_clear is not None:
                        self._clear(store)
                    self._stats.held_bytes = store.nbytes
                    self._stats.limit_bytes = store.limit_bytes
                    self._switch(None)
                    self._store = store
                    if self._unnoted:  # requested while the store recovered
                        self._clear(store)
                    self._note_full(store.full)
                working = self._wait() and self._work(store)
            except FAULTS as error:
                self._chores = self._store = None
                if store is not None:
                    store.abandon(error)
                    store = None
                self._switch(f"{type(error).__name__}: {error}")
                working = self._rest()
        self._store = None
        if store is not None:
            with suppress(*FAULTS):
                store.close()

    def _wait(self) -> bool:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._writes or self._calls or self._chores or self._closing
            )
            self._busy = bool(self._writes or self._calls)
            return not (self._closing and not self._calls)

    def _rest(self) -> bool:
        until = time.monotonic() + self._retry_seconds
        while True:
            self._remember()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._closing or self._unnoted, until - time.monotonic()
                )
                if self._closing or not self._unnoted:
                    return not self._closing

    def _work(self, store: Store) -> bool:
        with self._changed:
            called = self._calls.popleft() if self._calls else None
            record = self._writes.popleft() if called is None and self._writes else None
        try:
            if called is not None:
                if called.begin():
                    try:
                        called.answer.set_result(called.run(store))
                    except FAULTS:
                        called.answer.set_result(called.otherwise)
                        raise
                    # Errors are passed to the caller.
                    except Exception as error:
                        logger.exception("a call to the %s failed", self._name)
                        # Its frames would keep the call and its buffers alive.
                        error.__context__ = None
                        called.answer.set_exception(error.with_traceback(None))
            elif record is not None:
                self._write(store, record)
            elif self._chores is not None and next(self._chores, "done") == "done":
                self._chores = None
            if called is not None and not self._calls:  # waiting calls come first
                store.note_uses()
        finally:
            with self._changed:
                if record is not None:
                    self._stats.queued_bytes -= record.nbytes
        held_bytes = store.nbytes  # read before taking the lock
        with self._changed:
            self._stats.held_bytes = held_bytes
        self._note_full(store.full)
        return True

    def _note_full(self, full: str | None) -> None:
        """Record why writing is paused, and log it the first time."""
        with self._changed:
            self._stats.full = full
        if full is not None and not self._warned_full:
            self._warned_full = True
            logger.warning("pausing writes to the %s: %s", self._name, full)

    def _write(self, store: Store, record: Record) -> None:
        try:
            store.write(record)
        except ValueError as error:  # only this block is affected
            logger.error("dropping a block that cannot be written to the cold tier: %s", error)
            with self._changed:
                self._stats.dropped_blocks += 1

    def _switch(self, off: str | None) -> None:
        with self._changed:
            before, self._stats.off = self._stats.off, off
            if off is not None:
                self._stats.faults += 1
                self._stats.dropped_blocks += len(self._writes)
                self._drop_writes()
        if off is not None and before is None:
            logger.warning(
                "the %s failed; switched off, retrying in %.0f s: %s",
                self._name,
                self._retry_seconds,
                off,
            )
        if off is not None:
            self._refuse()
        elif before is not None:
            logger.warning("the %s is available again", self._name)

    def _drop_writes(self) -> None:
        self._stats.queued_bytes -= sum(record.nbytes for record in self._writes)
        self._writes.clear()

    def _refuse(self) -> None:
        with self._changed:
            while self._calls:
                call = self._calls.popleft()
                if call.begin():
                    call.answer.set_result(call.otherwise)
