"""Worker threads for blocking functions, which never run on the event loop."""

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
from penstock.models.image_reader import ImageError
from penstock.server.access import CLIENT
from penstock.server.problems import ServerError
from penstock.server.prompt_memory import HOLD
from penstock.server.prompts import STOP
from penstock.server.remote_images import fetch

DISK_THREADS = 2
FETCH_THREADS = 4
LONG_BYTES = 65_536
"""Body size from which requests use a separate thread, so that they do not delay short ones."""

T = TypeVar("T")
P = ParamSpec("P")


class FairThread:
    """Worker thread in which clients take turns. Call `run` on the event loop."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns: dict[str, int] = {}
        """Number of the last turn of each waiting client and of the most recent client."""
        self._busy = False

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(call, *args, **kwargs)

    async def run(self, client: str, call: Callable[[], T]) -> T:
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
            if not turn.cancelled():  # the turn was already granted: pass it on
                self._next()
            raise

    def _begin(self, client: str) -> None:
        number = max(self._turns.values(), default=0) + 1
        self._turns = {name: turn for name, turn in self._turns.items() if name in self._waiting}
        self._turns[client] = number
        self._busy = True

    def _next(self) -> None:
        """Give the next turn to the waiting client whose last turn is the oldest."""
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
        self._executor.shutdown(wait=False, cancel_futures=True)


class Workers:
    """Worker threads: for short prompts, long prompts, grammars, sessions and remote images.

    The first three are one thread each, in which clients take turns. Call all methods on the event
    loop.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._pending: Counter[str] = Counter()
        self.short = FairThread("penstock-prompts")
        self.long = FairThread("penstock-long-prompts")
        self.compiling = FairThread("penstock-grammars")
        self._fetching = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="penstock-fetches")
        self._disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="penstock-sessions")

    @property
    def pending(self) -> int:
        return self._pending.total()

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that tokenizes a prompt; ServerError 429 if the queue is full."""
        hold = HOLD.get()
        worker = self.short if hold is None or hold.body_bytes < LONG_BYTES else self.long
        return await self._run(worker, call, *args, **kwargs)

    async def compile(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that compiles a grammar, which may take seconds. Raises like `read`."""

        def compile_all() -> T:
            with one_request():
                return call(*args, **kwargs)

        return await self._run(self.compiling, compile_all)

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that writes a long response, in the thread for long prompts."""
        run = partial(copy_context().run, call, *args, **kwargs)
        return await self.long.run(CLIENT.get(), run)

    async def _run(
        self, worker: FairThread, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        client = CLIENT.get()
        share = self.max_waiting // len({*self._pending, client})  # of each client
        full = self._pending.total() > self.max_waiting  # the count includes a running one
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

    async def fetch(self, url: str, most_bytes: int) -> bytes | ImageError:
        """Fetch an image from a public address; return the error if that fails."""

        def fetched() -> bytes | ImageError:
            try:
                return fetch(url, most_bytes)
            except ImageError as error:
                return error

        return await asyncio.get_running_loop().run_in_executor(self._fetching, fetched)

    async def use_disk(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    def close(self) -> None:
        for worker in (self.short, self.long, self.compiling):
            worker.close()
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)
