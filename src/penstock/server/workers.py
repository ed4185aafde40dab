"""Worker threads: blocking functions never run in the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Event as ThreadEvent
from typing import ParamSpec, TypeVar

from penstock.engine.model.grammar_trials import one_request
from penstock.server.access import CLIENT
from penstock.server.problems import ServerError
from penstock.server.prompt_memory import HOLD
from penstock.server.prompts import STOP

DISK_THREADS = 2
LONG_BYTES = 65_536
"""Bytes from which bodies go to a thread of their own, so that short ones overtake them."""

T = TypeVar("T")
P = ParamSpec("P")


class FairThread:
    """One thread for the calls of clients, which take turns. `run` belongs to the event loop.

    A client that has had its turn is behind the others, however many calls of its own wait.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns: dict[str, int] = {}
        """Number of the last turn of the client that had it last, and of all that wait."""
        self._busy = False

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in the thread before all calls that have not begun; any thread may ask."""
        return self._executor.submit(call, *args, **kwargs)

    async def run(self, client: str, call: Callable[[], T]) -> T:
        """Run a function in the thread once it is the client's turn."""
        loop = asyncio.get_running_loop()
        if self._busy:
            await self._turn(client, loop.create_future())
        else:
            self._begin(client)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended before the call
                loop.call_soon_threadsafe(self._next)

        work = self._executor.submit(call)
        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    async def _turn(self, client: str, turn: asyncio.Future[None]) -> None:
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had come just then
                self._next()
            raise

    def _begin(self, client: str) -> None:
        number = max(self._turns.values(), default=0) + 1
        self._turns = {name: at for name, at in self._turns.items() if name in self._waiting}
        self._turns[client] = number
        self._busy = True

    def _next(self) -> None:
        """Give the next turn to the client that has waited longest since its last one."""
        while self._waiting:
            client = min(self._waiting, key=lambda name: self._turns.get(name, 0))
            turns = self._waiting[client]
            turn = turns.popleft()
            if not turns:
                del self._waiting[client]
            if not turn.done():
                self._begin(client)
                turn.set_result(None)
                return
        self._busy = False

    def close(self) -> None:
        """Shut the thread down."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Workers:
    """One thread for short prompts, one for long ones, one for grammars, two for the disk.

    In each but those for the disk, clients take turns. All methods belong to the event loop.

    Args:
        max_waiting: calls that may wait for the threads of prompts and grammars. Where one client
            fills that, others get an equal share beyond.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._pending: Counter[str] = Counter()
        self.short = FairThread("penstock-prompts")
        self.long = FairThread("penstock-long-prompts")
        self.compiling = FairThread("penstock-grammars")
        self._disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="penstock-sessions")

    @property
    def pending(self) -> int:
        return self._pending.total()

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that reads a prompt: `await workers.read(prompts.render, messages)`.

        Long requests have a thread of their own, which yields between pieces of a text and stops
        once the client has disconnected. ServerError 429 if the queue is full.
        """
        hold = HOLD.get()
        worker = self.short if hold is None or hold.body_bytes < LONG_BYTES else self.long
        return await self._run(worker, call, *args, **kwargs)

    async def compile(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that compiles a grammar, which may take seconds; raises as `read`."""

        def compile_all() -> T:
            with one_request():
                return call(*args, **kwargs)

        return await self._run(self.compiling, compile_all)

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that writes a long response: in the thread of long prompts.

        It is never refused: the answer that it writes is computed already.
        """
        run = partial(copy_context().run, call, *args, **kwargs)
        return await self.long.run(CLIENT.get(), run)

    async def _run(
        self, worker: FairThread, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        client = CLIENT.get()
        share = self.max_waiting // len({*self._pending, client})  # each has one in a full queue
        full = self._pending.total() > self.max_waiting  # one of them is at work
        if full and self._pending[client] >= share:
            raise ServerError(
                f"the queue of prompts is full: {self.max_waiting} waiting; try again later",
                status=429,
                code="queue_full",
            )
        stop, context = ThreadEvent(), copy_context()
        context.run(STOP.set, stop)
        self._pending[client] += 1
        try:
            return await worker.run(client, partial(context.run, call, *args, **kwargs))
        finally:
            stop.set()
            self._pending[client] -= 1
            if not self._pending[client]:
                del self._pending[client]

    async def use_disk(self, call: Callable[[], T]) -> T:
        """Run a function that waits for a disk, at most `DISK_THREADS` at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    def close(self) -> None:
        """Shut the threads down."""
        for worker in (self.short, self.long, self.compiling):
            worker.close()
        self._disk.shutdown(wait=False, cancel_futures=True)
