"""Threads that read files, and keep no process from ending when their disk hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _ReadCall(Generic[T]):
    def __init__(self, call: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.answer: Future[T] = Future()
        self._call = call
        self._arguments = arguments

    def run(self) -> None:
        answer = self.answer
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
        self._calls: SimpleQueue[_ReadCall[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have something called; for one owner."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True)
                for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        read_call = _ReadCall(call, arguments)
        self._calls.put(read_call)
        return read_call.answer

    def close(self, timeout_seconds: float) -> None:
        """End the threads once their calls are done; again does nothing."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        self._threads = []

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # its buffers are the caller's, also while no other call follows
