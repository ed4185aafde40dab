"""Memory of requests' bodies, texts and tokens: a pool in the ledger, shared out by the server.

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

from penstock.engine.engine import Engine
from penstock.heap import give_back_freed_memory
from penstock.memory import format_bytes
from penstock.server.body_scan import BodyScan
from penstock.server.problems import TooLarge, Unavailable

POOL_SHARE = 24
"""Divisor of the memory limit that gives the pool."""
LEAST_POOL_BYTES = 1_000_000
MOST_POOL_BYTES = 256_000_000
TOKEN_BYTES = 48
"""Bytes of Python's objects for one token of a prompt."""
PIECE_TOKEN_BYTES = 360
"""Bytes of a tokenizer for one token, while it encodes the piece that the token is in. Measured
were 88 to 363 (tokenizers 0.22). A character is a token at most."""
UNCUT_CHARACTERS = 131_072
"""Characters up to which an uncut piece needs no memory of the pool: one is read at a time."""
TEXT_COPIES = 5
"""Bytes of one character of a text that goes back: the text, and its JSON as text and as bytes,
each of which may be twice as long."""
GIVE_BACK_BYTES = 4_000_000
"""Bytes from which a request's memory is given back to the system."""
GIVE_BACK_SECONDS = 0.2
"""Seconds after such a request until the heap is trimmed."""


class PromptMemory:
    """Pool of bytes for prompts, from which any thread may hold and release.

    Args:
        pool_bytes: that all requests may hold together.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.reliefs: list[Callable[[int], None]] = []
        """Called with the missing bytes, in order: they release bytes that no request needs."""
        self._used_bytes = 0
        self._lock = Lock()
        self._giving_back = False

    @property
    def used_bytes(self) -> int:
        """Bytes that requests hold."""
        return self._used_bytes

    def hold(self, *, relieves: bool = True) -> PromptHold:
        """Return a hold of nothing yet.

        Args:
            relieves: whether bytes that no request needs go to make room for it, as for a request.
        """
        return PromptHold(self, relieves=relieves)

    def check_fits(self, nbytes: int) -> None:
        """Raise TooLarge if there are not so many bytes for all prompts together."""
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
        """Trim the heap in a moment, when the objects of a request are gone."""
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
    """The bytes of one request, or of something that is kept between requests."""

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
        """Bytes held at the peak."""
        self.body_bytes = 0
        """Bytes of the body, as it came."""
        self.kept_bytes = 0
        """Bytes of the body, read, that stay until the answer's end."""
        self.token_bytes = 0
        """Bytes of the prompt's tokens, and of their scores, that stay until the answer's end."""

    def resize(self, nbytes: int) -> None:
        """Hold so many bytes from now on.

        Raises:
            TooLarge: there are not so many for all prompts together.
            Unavailable: others hold them; nothing is changed.
        """
        self._memory._change(self.nbytes, nbytes, relieves=self._relieves)
        self.nbytes = nbytes
        self.most_bytes = max(self.most_bytes, nbytes)

    @property
    def most_free_bytes(self) -> int:
        """Bytes that it could hold besides its own, if there were no other."""
        return self._memory.pool_bytes - self.nbytes

    def check_fits(self, nbytes: int) -> None:
        """Raise TooLarge if it can never hold so many bytes."""
        self._memory.check_fits(nbytes)

    def take_body(self, scan: BodyScan) -> None:
        """Hold the cost of reading a body, before it is read; raises as `resize`."""
        self.body_bytes = scan.nbytes
        peak, self.kept_bytes = scan.cost
        self.resize(peak)

    def add_tokens(self, count: int) -> None:
        """Hold so many tokens of a prompt as well; raises as `resize`."""
        self.keep(TOKEN_BYTES * count)

    def keep(self, nbytes: int) -> None:
        """Hold so many bytes more until the answer's end; raises as `resize`."""
        self.resize(self.nbytes + nbytes)
        self.token_bytes += nbytes

    def settle(self) -> None:
        """Hold the rest of a request that was read: its body, and its tokens."""
        self.resize(min(self.nbytes, self.kept_bytes + self.token_bytes))

    def release(self) -> None:
        """Give the bytes back, and the memory to the system if it was much; in the event loop."""
        self.resize(0)
        if self.most_bytes >= GIVE_BACK_BYTES:
            self._memory.give_back_soon()


HOLD: ContextVar[PromptHold | None] = ContextVar("hold", default=None)
"""Hold of the request that is served here."""


def hold_text(characters: int) -> None:
    """Hold the memory of a text that goes back to the client until its response is written.

    Raises:
        TooLarge: it is more than there is for all prompts together.
        Unavailable: others hold it.
    """
    if (hold := HOLD.get()) is not None:
        hold.keep(TEXT_COPIES * characters)


def pool_bytes(engine: Engine) -> int:
    """Return the bytes of an engine's memory that should be set aside for prompts."""
    limit = engine.ask(lambda view: view.limits.memory_limit).result()
    return min(max(limit // POOL_SHARE, LEAST_POOL_BYTES), MOST_POOL_BYTES)
