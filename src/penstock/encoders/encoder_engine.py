"""`EncoderEngine`: encodes texts on a thread of its own, one batch a turn.

    encode ──> jobs ──a row of each in turn──> a batch ──reserved──> one pass ──> vectors
                 ▲                                                          │
                 └────────────── the next turn: other models first ─────────┘

A batch takes about `BATCH_SECONDS`, so that no other request or model waits for all texts of a
request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from penstock.encoders.bert import EncoderRow, batch_bytes
from penstock.encoders.encoder import Encoder
from penstock.engine.turns import Turns
from penstock.engine.view import Holdings
from penstock.errors import EngineStopped, LedgerFull, NeverFits, StepFailed
from penstock.kv.numpy_arrays import Floats
from penstock.ledger import Kind, Ledger, ModelLedger

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.1
"""Target duration of a batch."""
FIRST_TOKENS = 512
"""Tokens of a batch before the encoder's speed is measured."""
LEAST_TOKENS = 256
"""Lower bound of a batch's tokens where memory allows, however slow the encoder is."""
MOST_TOKENS = 16_384
RETRY_SECONDS = 0.02
"""Delay before a failed reservation is retried."""
HUNG_SECONDS = 120.0
"""Duration of a batch after which the engine counts as hung."""
CLOSE_SECONDS = 120.0


@dataclass(slots=True)
class _EncodeJob:
    """The texts of one request, and their progress."""

    rows: Sequence[EncoderRow]
    answer: Future[Floats]
    waiting: list[int]
    """Indices of the rows still to be computed, shortest first; taken from the end."""
    values: Floats | None = None
    computed: int = 0


@dataclass(slots=True)
class EncoderCounts:
    rows: int = 0
    tokens: int = 0
    batches: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Calls:
    """Jobs and calls queued for the thread, guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    jobs: deque[_EncodeJob] = field(default_factory=deque)
    asked: deque[Callable[[], None]] = field(default_factory=deque)
    closing: bool = False


class EncoderEngine:
    """Computes embeddings of texts, or scores of pairs. Thread-safe.

    Args:
        encoder: weights and tokenizer; their bytes are reserved by the engine.
        ledger: the process's ledger, or a model's ledger within a pool.
        turns: turns that the engines of one ledger take on the device.

    Raises:
        LedgerFull, NeverFits: the weights do not fit.
    """

    def __init__(self, encoder: Encoder, ledger: Ledger, turns: Turns) -> None:
        self.encoder = encoder
        self.counts = EncoderCounts()
        self._ledger = ledger
        self._turns = turns
        self._calls = _Calls()
        self._batch_tokens = FIRST_TOKENS
        self._missing_bytes = 0
        self._begun_at: float | None = None
        with turns.turn(self):
            self._weights = ledger.reserve(Kind.WEIGHTS, encoder.nbytes)
        self._thread = threading.Thread(target=self._run, name="penstock-encoder", daemon=True)
        self._thread.start()

    def encode(self, rows: Sequence[EncoderRow]) -> Future[Floats]:
        """Return a future of a float32 array (rows, width) or (rows, labels). Never waits.

        Cancel the future, or set its exception, to drop the remaining rows.

        Raises (the future):
            NeverFits: a text needs more memory than the limit allows.
            StepFailed: the forward pass failed.
            EngineStopped: the engine is closed.
        """
        answer: Future[Floats] = Future()
        waiting = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        with self._calls.changed:
            if self._calls.closing:
                answer.set_exception(EngineStopped("the encoder is closed"))
                return answer
            self._calls.jobs.append(_EncodeJob(rows, answer, waiting))
            self._calls.changed.notify()
        return answer

    def holdings(self) -> Future[Holdings]:
        """Return a finished future of the bytes held; it does not wait for a batch."""
        answer: Future[Holdings] = Future()
        answer.set_result(Holdings(self._weights.nbytes, 0, 0.0, self._missing_bytes))
        return answer

    def evict_prefixes(self, nbytes: int) -> Future[int]:
        """Return a finished future of 0: an encoder caches nothing between requests."""
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit of the model's ledger within a pool."""
        assert isinstance(self._ledger, ModelLedger)
        with self._turns.turn(self):
            self._ledger.set_limit(limit_bytes)

    def check(self) -> None:
        """Recount all memory between two batches; raise AssertionError if a count differs."""
        answer: Future[None] = Future()

        def count() -> None:
            try:
                self._ledger.check({Kind.WEIGHTS: self.encoder.nbytes})
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                answer.set_exception(error)
            else:
                answer.set_result(None)

        with self._calls.changed:
            if self._calls.closing:
                return
            self._calls.asked.append(count)
            self._calls.changed.notify()
        answer.result()

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and no batch has taken longer than `HUNG_SECONDS`."""
        begun_at = self._begun_at
        hangs = begun_at is not None and time.monotonic() - begun_at > HUNG_SECONDS
        return self._thread.is_alive() and not hangs

    def close(self) -> None:
        """Fail open requests, release all bytes and end the thread. Idempotent."""
        with self._calls.changed:
            self._calls.closing = True
            self._calls.changed.notify()
        self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._next():
                with self._turns.turn(self):
                    worked = self._step()
                if not worked:  # give others time to release bytes
                    time.sleep(RETRY_SECONDS)
            error: BaseException = EngineStopped("the encoder is closed")
        except BaseException as fault:
            error = EngineStopped(f"the encoder's thread has died: {type(fault).__name__}")
            raise
        finally:
            with self._calls.changed:
                self._calls.closing = True
                left = [*self._calls.jobs]
                self._calls.jobs.clear()
            for job in left:
                _fail(job, error)
            for ask in self._calls.asked:
                ask()
            with self._turns.turn(self):
                self._weights.release()
            self._turns.forget(self)
            mx.clear_streams()

    def _next(self) -> bool:
        """Wait for a job and return True; return False once the engine closes."""
        calls = self._calls
        while True:
            with calls.changed:
                calls.changed.wait_for(lambda: calls.jobs or calls.asked or calls.closing)
                if calls.closing:
                    return False
                asked = list(calls.asked)
                calls.asked.clear()
                for job in [job for job in calls.jobs if job.answer.done()]:
                    calls.jobs.remove(job)
                works = bool(calls.jobs)
            for ask in asked:
                ask()
            if works:
                return True

    def _step(self) -> bool:
        """Compute a batch, in a turn; return False if its memory is not free now."""
        with self._calls.changed:
            jobs = list(self._calls.jobs)
        places = self._batch(jobs)
        rows = [job.rows[number] for job, number in places]
        lengths = [len(row) for row in rows]
        self._begun_at = began = time.monotonic()
        try:
            with self._ledger.reserve(Kind.BUFFERS, batch_bytes(self.encoder.spec, lengths)):
                self._missing_bytes = 0
                values = np.array(self.encoder.model(rows).astype(mx.float32))
                mx.clear_cache()
        except (LedgerFull, NeverFits) as error:
            if len(rows) > 1:
                self._batch_tokens = max(1, min(self._batch_tokens, sum(lengths)) // 2)
                return True
            if isinstance(error, LedgerFull):
                self._missing_bytes = error.needed_bytes - error.free_bytes
                return False
            self._end(places, error)
        # A boundary: an error of MLX fails only the requests of this batch.
        except Exception as error:
            logger.error(
                "an encoder batch failed with %s; its requests end with an error",
                type(error).__name__,
            )
            logger.debug("traceback of the failed batch", exc_info=error)
            self._end(places, StepFailed("the encoder has failed"))
        else:
            self._hand_out(places, values)
            self._note(lengths, time.monotonic() - began)
        finally:
            self._begun_at = None
        return True

    def _batch(self, jobs: Sequence[_EncodeJob]) -> list[tuple[_EncodeJob, int]]:
        """Choose the longest rows of all requests in turn; return them sorted by length."""
        places: list[tuple[_EncodeJob, int]] = []
        tokens, depth = 0, 1
        while jobs := [job for job in jobs if len(job.waiting) >= depth]:
            for job in jobs:
                number = job.waiting[-depth]
                tokens += len(job.rows[number])
                if places and tokens > self._batch_tokens:
                    return _by_length(places)
                places.append((job, number))
            depth += 1
        return _by_length(places)

    def _hand_out(self, places: Sequence[tuple[_EncodeJob, int]], values: Floats) -> None:
        jobs = {id(job): job for job, _ in places}
        for (job, number), value in zip(places, values, strict=True):
            if job.values is None:
                job.values = np.empty((len(job.rows), len(value)), np.float32)
            job.values[number] = value
            job.waiting.pop()  # a batch takes a job's rows from the end
        with self._calls.changed:
            for job in jobs.values():
                self._calls.jobs.remove(job)
                if job.waiting:
                    self._calls.jobs.append(job)  # the next batch begins with another job
        for job in jobs.values():
            if not job.waiting and job.values is not None:
                with suppress(InvalidStateError):  # cancelled meanwhile
                    job.answer.set_result(job.values)

    def _end(self, places: Sequence[tuple[_EncodeJob, int]], error: BaseException) -> None:
        jobs = {id(job): job for job, _ in places}
        with self._calls.changed:
            for job in jobs.values():
                self._calls.jobs.remove(job)
        for job in jobs.values():
            _fail(job, error)

    def _note(self, lengths: Sequence[int], seconds: float) -> None:
        tokens = sum(lengths)
        self.counts.rows += len(lengths)
        self.counts.tokens += tokens
        self.counts.batches += 1
        self.counts.seconds += seconds
        in_time = max(LEAST_TOKENS, int(tokens * BATCH_SECONDS / max(seconds, 1e-6)))
        if in_time < self._batch_tokens or tokens > self._batch_tokens // 2:
            most = min(2 * self._batch_tokens, MOST_TOKENS)
            self._batch_tokens = min(in_time, most)


def _by_length(places: list[tuple[_EncodeJob, int]]) -> list[tuple[_EncodeJob, int]]:
    return sorted(places, key=lambda place: len(place[0].rows[place[1]]))


def _fail(job: _EncodeJob, error: BaseException) -> None:
    with suppress(InvalidStateError):
        job.answer.set_exception(error)
