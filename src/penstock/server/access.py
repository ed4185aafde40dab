"""API keys: their cache salts and rate limits.

--api-key, --keys FILE ──> Access ──client_of──> KeyHolder ──> salt of the prompt, name in metrics
▲                    │
└───────settle───────┘  tokens of the prompt and the answers
"""

from __future__ import annotations

import hmac
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.config import NOTICES, ApiKey, ServerSettings, digest_of, read_keys
from penstock.errors import SettingError
from penstock.plurals import counted
from penstock.server.problems import ServerError, Unauthorized

logger = logging.getLogger(__name__)
notices = logging.getLogger(NOTICES)

MINUTE = 60.0
ADMIN_PATHS = ("/v1/cache", "/v1/sessions", "/v1/live", "/metrics")
"""Paths to state shared by all clients; keys from the key file need `admin` for them."""
LOADING_PATHS = re.compile(r"/v1/models/.+/(?:un)?load")
OWN_PATHS = ("/v1/cache/explain",)
"""Exceptions to `ADMIN_PATHS`: they report on the key's own salt only."""
SALT_END = "\x1f"
"""Separator between a key's salt and the request's; no key's salt contains it."""


@dataclass(slots=True)
class KeyHolder:
    key: ApiKey
    tokens: int = 0


CLIENT: ContextVar[str] = ContextVar("client", default="")
KEY_HOLDER: ContextVar[KeyHolder | None] = ContextVar("key_holder", default=None)
"""Key of the current request; None if the server needs no keys."""


def salt_for(cache_salt: str | None) -> str:
    client = KEY_HOLDER.get()
    if client is None or not client.key.salt:
        return cache_salt or ""
    return f"{client.key.salt}{SALT_END}{cache_salt or ''}"


class RateLimited(ServerError):
    status = 429

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.headers = {"Retry-After": str(max(1, math.ceil(seconds)))}


class NotAdmin(ServerError):
    status = 403

    def __init__(self) -> None:
        super().__init__(
            "this key has no access to state shared by all clients; use the key of --api-key, or "
            "one with admin = true",
            code="not_admin",
        )


@dataclass(slots=True)
class _Allowance:
    per_minute: int
    left: float
    filled: float

    def wait_seconds(self, now: float, least: float) -> float:
        """Refill the bucket and return the seconds until it holds `least`."""
        rate = self.per_minute / MINUTE
        self.left = min(self.per_minute, self.left + (now - self.filled) * rate)
        self.filled = now
        return max(0.0, least - self.left) / rate


@dataclass(slots=True)
class _Account:
    key: ApiKey
    requests: _Allowance | None = None
    tokens: _Allowance | None = None
    counts: dict[str, int] = field(
        default_factory=lambda: {"requests": 0, "tokens": 0, "refused": 0}
    )


class Access(Collector):
    """API keys, their limits and counters; used by the event loop and the main thread only."""

    def __init__(
        self,
        api_key: str | None = None,
        keys: Sequence[ApiKey] = (),
        *,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.needed = api_key is not None or file is not None
        self._clock = clock
        self._file = file
        self._operator: tuple[ApiKey, ...] = ()
        if api_key is not None:
            operator = ApiKey(name="", sha256=digest_of(api_key.encode()), admin=True)
            self._operator = (operator,)
        self._accounts: dict[str, _Account] = {}
        self.replace(keys)

    @classmethod
    def of(cls, settings: ServerSettings) -> Access:
        file = settings.keys
        return cls(settings.api_key, () if file is None else read_keys(file), file=file)

    def reload(self) -> None:
        if self._file is None:
            return
        try:
            keys = read_keys(self._file)
        except SettingError as error:
            logger.error("cannot reload the API keys, keeping the previous keys: %s", error)
        else:
            self.replace(keys)
            notices.info("reloaded %s", counted(len(keys), "API key"))

    def replace(self, keys: Sequence[ApiKey]) -> None:
        before, self._accounts = self._accounts, {}
        for key in keys:
            account = before.get(key.name) or _Account(key)
            account.key = key
            account.requests = self._allowance(account.requests, key.requests_per_minute)
            account.tokens = self._allowance(account.tokens, key.tokens_per_minute)
            self._accounts[key.name] = account

    def _allowance(self, before: _Allowance | None, per_minute: int | None) -> _Allowance | None:
        if per_minute is None:
            return None
        now = self._clock()
        if before is None:
            return _Allowance(per_minute, per_minute, now)
        before.wait_seconds(now, 0)
        used = before.per_minute - before.left
        return _Allowance(per_minute, per_minute - used, now)

    def names(self) -> list[str]:
        return list(self._accounts)

    def client_of(self, scope: Scope) -> KeyHolder | None:
        """Return the holder of the bearer token or `x-api-key`; None if the key is unknown."""
        headers = Headers(scope=scope)
        kind, _, token = headers.get("authorization", "").partition(" ")
        texts = [headers.get("x-api-key", "")]
        if kind.lower() == "bearer":
            texts.append(token.strip())
        # Headers are Latin-1 on the wire.
        shown = [digest_of(text.encode("latin-1")) for text in texts if text]
        known = [*self._operator, *(account.key for account in self._accounts.values())]
        matching = [
            key
            for key in known
            for digest in shown
            if hmac.compare_digest(key.sha256, digest)  # all are compared, each in constant time
        ]
        return KeyHolder(matching[0]) if matching else None

    def admit(self, client: KeyHolder) -> None:
        """Count a request against its key's limits; raise RateLimited if one is used up."""
        account = self._accounts.get(client.key.name)
        if account is None:
            return
        now, name = self._clock(), client.key.name
        for allowance, least, unit in (
            (account.requests, 1.0, "requests"),
            (account.tokens, 1.0, "tokens"),
        ):
            seconds = 0.0 if allowance is None else allowance.wait_seconds(now, least)
            if allowance is not None and seconds > 0.0:
                account.counts["refused"] += 1
                raise RateLimited(
                    f"the key {name} has used its {allowance.per_minute:,} {unit} a minute; try "
                    f"again in {max(1, math.ceil(seconds))} s",
                    seconds,
                )
        account.counts["requests"] += 1
        if account.requests is not None:
            account.requests.left -= 1

    def settle(self, client: KeyHolder) -> None:
        account = self._accounts.get(client.key.name)
        if account is not None:
            account.counts["tokens"] += client.tokens
            if account.tokens is not None:
                account.tokens.left -= client.tokens

    def collect(self) -> Iterator[Metric]:
        for count, words in (
            ("requests", "Requests admitted, by key name."),
            ("refused", "Requests refused by a rate limit, by key name."),
            ("tokens", "Tokens of prompts and answers, by key name."),
        ):
            family = CounterMetricFamily(f"penstock_key_{count}", words, labels=["key"])
            for name, account in self._accounts.items():
                family.add_metric([name], account.counts[count])
            if family.samples:
                yield family


def checked(client: KeyHolder | None, path: str) -> KeyHolder:
    """Return the client if it may access a path; else raise Unauthorized or NotAdmin."""
    if client is None:
        raise Unauthorized()
    if needs_admin(path) and not client.key.admin:
        raise NotAdmin()
    return client


def needs_admin(path: str) -> bool:
    """Return whether a path shows or changes state shared by all clients.

    >>> [needs_admin(path) for path in ("/v1/cache/tree", "/v1/cache/explain", "/v1/messages")]
    [True, False, False]
    >>> needs_admin("/v1/models/owner/name/unload")
    True
    """
    shared = any(path == prefix or path.startswith(f"{prefix}/") for prefix in ADMIN_PATHS)
    shared = shared or bool(LOADING_PATHS.fullmatch(path))
    return shared and path not in OWN_PATHS
