"""Worker threads of the server: slow functions never run in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Event as ThreadEvent
from typing import ParamSpec, TypeVar

from penstock.server.problems import ServerError
from penstock.server.prompt_memory import HOLD
from penstock.server.prompts import STOP

DISK_THREADS = 2
LONG_BYTES = 65_536
"""Bytes from which bodies are read in a thread of their own, so that short ones pass them."""

T = TypeVar("T")
P = ParamSpec("P")


class Workers:
    """One thread for short prompts, one for long ones, one for grammars, two for the disk.

    All methods belong to the event loop.

    Args:
        max_waiting: calls that may wait for the threads of prompts and grammars.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.pending = 0
        """Calls that wait for the threads of prompts and grammars, or are in one."""
        self.short = ThreadPoolExecutor(1, thread_name_prefix="penstock-prompts")
        self.long = ThreadPoolExecutor(1, thread_name_prefix="penstock-long-prompts")
        self.compiling = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammars")
        self._disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="penstock-sessions")

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that reads a prompt: `await workers.read(prompts.render, messages)`.

        There is one thread for short requests, and one for long ones, which lets the other
        go first between two pieces of a text. The thread stops there once the client has gone.

        Raises:
            ServerError: 429, as many as may wait for it do already.
        """
        hold = HOLD.get()
        worker = self.short if hold is None or hold.body_bytes < LONG_BYTES else self.long
        return await self._run(worker, call, *args, **kwargs)

    async def compile(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that compiles a grammar, which may take seconds; raises as `read`."""
        return await self._run(self.compiling, call, *args, **kwargs)

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that writes a long response: in the thread of long prompts.

        It is never refused: the answer that it writes is computed already.
        """
        loop, context = asyncio.get_running_loop(), copy_context()
        return await loop.run_in_executor(self.long, partial(context.run, call, *args, **kwargs))

    async def _run(
        self, worker: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self.pending > self.max_waiting:  # one of them is at work
            raise ServerError(
                f"{self.max_waiting} requests wait for their prompts to be read; try again later",
                status=429,
                code="queue_full",
            )
        loop, stop, context = asyncio.get_running_loop(), ThreadEvent(), copy_context()
        context.run(STOP.set, stop)
        self.pending += 1
        try:
            return await loop.run_in_executor(worker, partial(context.run, call, *args, **kwargs))
        finally:
            stop.set()
            self.pending -= 1

    async def use_disk(self, call: Callable[[], T]) -> T:
        """Run a function that waits for a disk, at most `DISK_THREADS` at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    def close(self) -> None:
        """Shut the threads down."""
        for worker in (self.short, self.long, self.compiling, self._disk):
            worker.shutdown(wait=False, cancel_futures=True)
