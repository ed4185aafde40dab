"""Threads that read files, and keep no process from ending when their disk hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
QUICK_SECONDS = 1e-4
"""Calls that take less each are not handed over. Of 18 records parts were read, cached by the
system, in 0.5 ms by one thread, and in 0.8 ms by two; not cached, in 5.1 and 3.9 ms."""


class _ReadCall(Generic[T]):
    def __init__(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.answer: Future[T] = Future()
        self._call = call
        self._arguments = arguments

    def run(self) -> None:
        answer = self.answer
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(self._call(*self._arguments))
        # A boundary: what is wrong with it is its caller's.
        except BaseException as error:  # noqa: BLE001
            # An error, or what has caused it, knows the frames that it went through, and the
            # answer the error: what was to be read into would stay until the garbage collector
            # comes by, if this frame knew the answer.
            answer.set_exception(error.with_traceback(None))
        finally:
            del answer, self


class Readers:
    """Runs calls in `count` daemon threads, which begin with the first call.

    A `ThreadPoolExecutor`'s are no daemons: the interpreter waits for them at its end.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: SimpleQueue[Sequence[_ReadCall[Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_quick = False
        """Whether the calls of the last `map` were quick."""

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have something called; for one owner."""
        read_call = _ReadCall(call, arguments)
        self._put([read_call])
        return read_call.answer

    def map(self, call: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[Future[T]]:
        """Have something called for each of some arguments, and wait; the answers are there.

        Each thread takes a share in a row. Where calls are quicker than handing them over, as are
        reads of a file that the system has in memory, the caller's thread takes all of them.
        """
        calls = [_ReadCall(call, own) for own in arguments]
        answers, began = [call.answer for call in calls], time.perf_counter()
        if self._is_quick:
            for own in calls:
                own.run()
        else:
            share = max(1, -(-len(calls) // self._count))
            for start in range(0, len(calls), share):
                self._put(calls[start : start + share])
            wait(answers)
        self._is_quick = time.perf_counter() - began < QUICK_SECONDS * len(calls)
        return answers

    def _put(self, calls: Sequence[_ReadCall[Any]]) -> None:
        """Have a thread run some calls, one behind the other."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True)
                for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self._calls.put(calls)

    def close(self, timeout_seconds: float) -> None:
        """End the threads once their calls are done; again does nothing."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        self._threads = []

    def _run(self) -> None:
        while (calls := self._calls.get()) is not None:
            for call in calls:
                call.run()
            del call, calls  # their buffers are the callers', also while no other call follows
