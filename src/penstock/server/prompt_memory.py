"""Memory for request bodies, texts and tokens: a pool in the ledger, shared by all requests.

    body arrives ──take──> read as JSON ──> tokens ──settle──> answered ──release──> 0

A request holds its bytes while it is open. A request that needs more than is free is refused
before it is parsed, so that large bodies never take more than the pool. The requests of one client
together leave a part of it to other clients; a single one may take all that is free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
"""Divisor of the memory limit that gives the pool's size."""
SMALL_SHARE = 64
"""Divisor of the pool's size. A client whose other requests hold no more than the quotient may
take all that is free for one request."""
LEAST_POOL_BYTES = 1_000_000
MOST_POOL_BYTES = 256_000_000
CLIENT_SHARE = 3
"""Maximum bytes of a client with several requests, as a multiple of the bytes left free: one client
gets at most three quarters of the pool, and two get three sevenths each."""
TOKEN_BYTES = 48
PIECE_TOKEN_BYTES = 360
"""Tokenizer memory per encoded token, in bytes: 88 to 363 measured (tokenizers 0.22)."""
UNCUT_CHARACTERS = 131_072
"""Size up to which a piece reserves no pool memory, as one is tokenized at a time."""
TEXT_COPIES = 5
"""Bytes per character of a returned text: the text, and two each for its JSON text and bytes."""
GIVE_BACK_BYTES = 4_000_000
"""Minimum size of a request after which freed memory is returned to the system."""
GIVE_BACK_SECONDS = 0.2
"""Delay after such a request before memory is returned to the system."""


class PromptMemory:
    """Byte budget for reading and tokenizing requests, and for cached answers; not for KV."""

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.reliefs: list[Callable[[int], None]] = []
        """Callbacks, in order, that free at least the given bytes of caches."""
        self._used_bytes = 0
        self._by_client: Counter[str] = Counter()
        self._lock = Lock()
        self._giving_back = False

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def hold(self, client: str | None = None, *, relieves: bool = True) -> PromptHold:
        """Return an empty hold.

        Args:
            client: name of the key or address that the bytes are charged to; None for a cache.
            relieves: whether it may evict cached answers and responses.
        """
        return PromptHold(self, client, relieves=relieves)

    def check_fits(self, nbytes: int) -> None:
        if nbytes > self.pool_bytes:
            raise TooLarge(
                f"this request needs at least {format_bytes(nbytes)} to be read; there are "
                f"{format_bytes(self.pool_bytes)} for all prompts. Send less, or raise "
                "--memory-limit",
                code="request_too_large",
            )

    def _change(self, client: str | None, before: int, after: int, *, relieves: bool) -> None:
        self.check_fits(after)
        for relief in self.reliefs if relieves else ():
            missing = after - before - self._free_bytes(client, before)
            if missing > 0:
                relief(missing)
        with self._lock:
            free = self._free_bytes(client, before)
            if after - before > max(0, free):
                raise Unavailable(
                    f"this request needs about {format_bytes(after)} to be read; "
                    f"{format_bytes(max(0, free))} of {format_bytes(self.pool_bytes)} for all "
                    "prompts are free for this client; try again later",
                    code="prompts_full",
                )
            self._used_bytes += after - before
            if client is not None:
                self._by_client[client] += after - before
                if not self._by_client[client]:
                    del self._by_client[client]

    def _free_bytes(self, client: str | None, before: int) -> int:
        """Return the bytes that a hold of `before` bytes can add; negative beyond its share."""
        free = self.pool_bytes - self._used_bytes
        client_bytes = self._by_client[client] if client is not None else 0
        if client_bytes - before <= self.pool_bytes // SMALL_SHARE:
            return free
        return min(free, (CLIENT_SHARE * free - client_bytes) // (CLIENT_SHARE + 1))

    def give_back_soon(self) -> None:
        if self._giving_back:
            return
        self._giving_back = True
        loop = asyncio.get_running_loop()

        def give_back() -> None:
            self._giving_back = False
            with suppress(RuntimeError):  # the loop's executor has shut down
                loop.run_in_executor(None, give_back_freed_memory)

        loop.call_later(GIVE_BACK_SECONDS, give_back)


class PromptHold:
    __slots__ = (
        "_again_bytes",
        "_client",
        "_memory",
        "_relieves",
        "body_bytes",
        "kept_bytes",
        "most_bytes",
        "nbytes",
        "token_bytes",
    )

    def __init__(
        self, memory: PromptMemory, client: str | None = None, *, relieves: bool = True
    ) -> None:
        self._memory = memory
        self._client = client
        self._relieves = relieves
        self.nbytes = 0
        self.most_bytes = 0
        self.body_bytes = 0
        self.kept_bytes = 0
        """Bytes of the parsed body, kept until the answer's end."""
        self.token_bytes = 0
        """Bytes of tokens and scores, kept until the answer's end."""
        self._again_bytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes`; TooLarge if they exceed the pool, Unavailable if too few are free."""
        self._memory._change(self._client, self.nbytes, nbytes, relieves=self._relieves)
        self.nbytes = nbytes
        self.most_bytes = max(self.most_bytes, nbytes)

    @property
    def most_free_bytes(self) -> int:
        """Bytes this hold could add if no other held any."""
        return self._memory.pool_bytes - self.nbytes

    def check_fits(self, nbytes: int) -> None:
        self._memory.check_fits(nbytes)

    def take_body(self, scan: BodyScan) -> None:
        self.body_bytes = scan.nbytes
        peak, self.kept_bytes = scan.cost
        self.resize(peak)

    def add_tokens(self, count: int) -> None:
        self.keep(TOKEN_BYTES * count)

    def keep(self, nbytes: int) -> None:
        held_bytes = min(nbytes, self._again_bytes)
        self.resize(self.nbytes + nbytes - held_bytes)
        self._again_bytes -= held_bytes
        self.token_bytes += nbytes

    def ask_again(self) -> None:
        """Keep the tokens' bytes for a retry, which holds the same tokens without adding bytes."""
        self._again_bytes += self.token_bytes
        self.token_bytes = 0

    def settle(self) -> None:
        self._again_bytes = 0
        self.resize(min(self.nbytes, self.kept_bytes + self.token_bytes))

    def release(self) -> None:
        """Free all bytes; after a large request, return memory to the system. Event loop only."""
        self.resize(0)
        if self.most_bytes >= GIVE_BACK_BYTES:
            self._memory.give_back_soon()


HOLD: ContextVar[PromptHold | None] = ContextVar("hold", default=None)


def hold_text(characters: int) -> None:
    """Hold the memory of a returned text until the response is written. Raises like `resize`."""
    if (hold := HOLD.get()) is not None:
        hold.keep(TEXT_COPIES * characters)


def pool_bytes(engine: EngineClient) -> int:
    return share_of(engine.ask(lambda view: view.limits.memory_limit).result())


def share_of(limit_bytes: int) -> int:
    """Return the part of a memory limit that is set aside for prompts."""
    return min(max(limit_bytes // POOL_SHARE, LEAST_POOL_BYTES), MOST_POOL_BYTES)
