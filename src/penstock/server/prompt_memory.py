"""Memory of request bodies, texts and tokens: a pool in the ledger, shared by all requests.

    body arrives ──take──> read as JSON ──> tokens ──settle──> answered ──release──> 0

A request holds its cost as long as it is open. One that costs more than is free is refused
before it is read, so that no number of large bodies takes more than the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from threading import Lock

from penstock.heap import give_back_freed_memory
from penstock.memory.sizes import format_bytes
from penstock.server.body_scan import BodyScan
from penstock.server.engine_client import EngineClient
from penstock.server.problems import TooLarge, Unavailable

POOL_SHARE = 24
"""Fraction of the memory limit: 1 / 24."""
LEAST_POOL_BYTES = 1_000_000
MOST_POOL_BYTES = 256_000_000
TOKEN_BYTES = 48
PIECE_TOKEN_BYTES = 360
"""Bytes of a tokenizer for a token it encodes: 88 to 363 measured (tokenizers 0.22)."""
UNCUT_CHARACTERS = 131_072
"""Size up to which an uncut piece needs no pool memory: one is encoded at a time."""
TEXT_COPIES = 5
"""Bytes per character of a returned text: itself, and twice each its JSON as text and bytes."""
GIVE_BACK_BYTES = 4_000_000
"""Size of a request after which freed memory is returned to the system."""
GIVE_BACK_SECONDS = 0.2
"""Delay of that trim."""


class PromptMemory:
    """Pool of bytes for prompts. Thread-safe."""

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.reliefs: list[Callable[[int], None]] = []
        """Callbacks that free at least the given bytes, which no request needs, in order."""
        self._used_bytes = 0
        self._lock = Lock()
        self._giving_back = False

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def hold(self, *, relieves: bool = True) -> PromptHold:
        """Return an empty hold; `relieves`: whether it may evict bytes that no request needs."""
        return PromptHold(self, relieves=relieves)

    def check_fits(self, nbytes: int) -> None:
        if nbytes > self.pool_bytes:
            raise TooLarge(
                f"this request needs at least {format_bytes(nbytes)} to be read; there are "
                f"{format_bytes(self.pool_bytes)} for all prompts. Send less, or raise "
                "--memory-limit",
                code="request_too_large",
            )

    def _change(self, before: int, after: int, *, relieves: bool) -> None:
        self.check_fits(after)
        for relief in self.reliefs if relieves else ():
            missing = after - before - (self.pool_bytes - self._used_bytes)
            if missing > 0:
                relief(missing)
        with self._lock:
            free = self.pool_bytes - self._used_bytes
            if after - before > free:
                raise Unavailable(
                    f"this request needs about {format_bytes(after)} to be read; "
                    f"{format_bytes(max(0, free))} of {format_bytes(self.pool_bytes)} for all "
                    "prompts are free; try again later",
                    code="prompts_full",
                )
            self._used_bytes += after - before

    def give_back_soon(self) -> None:
        """Trim the heap once the objects of a request are gone."""
        if self._giving_back:
            return
        self._giving_back = True
        loop = asyncio.get_running_loop()

        def give_back() -> None:
            self._giving_back = False
            with suppress(RuntimeError):  # the loop's threads are gone already
                loop.run_in_executor(None, give_back_freed_memory)

        loop.call_later(GIVE_BACK_SECONDS, give_back)


class PromptHold:
    """Bytes of one request, or of something kept between requests."""

    __slots__ = (
        "_memory",
        "_relieves",
        "body_bytes",
        "kept_bytes",
        "most_bytes",
        "nbytes",
        "token_bytes",
    )

    def __init__(self, memory: PromptMemory, *, relieves: bool = True) -> None:
        self._memory = memory
        self._relieves = relieves
        self.nbytes = 0
        self.most_bytes = 0
        self.body_bytes = 0
        self.kept_bytes = 0
        """Bytes of the parsed body, kept until the answer's end."""
        self.token_bytes = 0
        """Bytes of tokens and scores, kept until the answer's end."""

    def resize(self, nbytes: int) -> None:
        """Hold this many bytes. TooLarge if the pool is smaller, Unavailable if it is in use."""
        self._memory._change(self.nbytes, nbytes, relieves=self._relieves)
        self.nbytes = nbytes
        self.most_bytes = max(self.most_bytes, nbytes)

    @property
    def most_free_bytes(self) -> int:
        """Bytes it could hold besides its own, if it were alone."""
        return self._memory.pool_bytes - self.nbytes

    def check_fits(self, nbytes: int) -> None:
        self._memory.check_fits(nbytes)

    def take_body(self, scan: BodyScan) -> None:
        """Hold the cost of parsing a body, before it is parsed; raises as `resize`."""
        self.body_bytes = scan.nbytes
        peak, self.kept_bytes = scan.cost
        self.resize(peak)

    def add_tokens(self, count: int) -> None:
        """Add the cost of prompt tokens; raises as `resize`."""
        self.keep(TOKEN_BYTES * count)

    def keep(self, nbytes: int) -> None:
        """Add bytes until the answer's end; raises as `resize`."""
        self.resize(self.nbytes + nbytes)
        self.token_bytes += nbytes

    def settle(self) -> None:
        """Shrink to what stays after parsing: the body and its tokens."""
        self.resize(min(self.nbytes, self.kept_bytes + self.token_bytes))

    def release(self) -> None:
        """Free the bytes; much memory is returned to the system. Event loop only."""
        self.resize(0)
        if self.most_bytes >= GIVE_BACK_BYTES:
            self._memory.give_back_soon()


HOLD: ContextVar[PromptHold | None] = ContextVar("hold", default=None)


def hold_text(characters: int) -> None:
    """Hold the memory of a returned text until its response is written; raises as `resize`."""
    if (hold := HOLD.get()) is not None:
        hold.keep(TEXT_COPIES * characters)


def pool_bytes(engine: EngineClient) -> int:
    limit = engine.ask(lambda view: view.limits.memory_limit).result()
    return min(max(limit // POOL_SHARE, LEAST_POOL_BYTES), MOST_POOL_BYTES)
