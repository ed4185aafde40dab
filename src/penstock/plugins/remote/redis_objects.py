"""Object store in Valkey, Redis or a compatible service; the only module that imports `redis`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.plugins.remote.objects import ObjectPiece, described

REFUSALS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
)
"""Errors of a store that refuses writes but is still readable."""
UNTOUCHED_SECONDS = 60.0
"""Seconds without extending lifetimes after the store refused to."""
MOST_CONNECTIONS = 4


class RedisObjects:
    def __init__(
        self, url: str, *, ttl_seconds: int, timeout_seconds: float, put_seconds: float
    ) -> None:
        self._url = url
        self._ttl_seconds = ttl_seconds
        self._untouched_until = 0.0
        with self._in_words():
            self._quick = self._client(timeout_seconds, timeout_seconds)
            self._patient = self._client(put_seconds, timeout_seconds)

    def _client(self, seconds: float, connect_seconds: float) -> Any:
        return redis.Redis.from_url(
            self._url,
            socket_timeout=seconds,
            socket_connect_timeout=connect_seconds,
            max_connections=MOST_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),  # the tier decides when to retry
            protocol=2,  # sufficient, and supported by every server
        )

    def get(self, name: str, offset: int, nbytes: int) -> ObjectPiece | None:
        with self._in_words():
            pipeline = self._quick.pipeline(transaction=False)
            pipeline.strlen(name).getrange(name, offset, offset + nbytes - 1)
            length, raw = pipeline.execute()
        return ObjectPiece(length, raw) if length else None

    def put(self, name: str, raw: bytes) -> bool:
        with self._in_words():
            try:
                self._patient.set(name, raw, ex=self._ttl_seconds, nx=True)
            except REFUSALS:
                return False
        return True

    def has(self, names: Sequence[str]) -> list[bool]:
        with self._in_words():
            if time.monotonic() >= self._untouched_until:
                pipeline = self._quick.pipeline(transaction=False)
                for name in names:
                    pipeline.expire(name, self._ttl_seconds)
                answers = pipeline.execute(raise_on_error=False)
                if not any(isinstance(answer, REFUSALS) for answer in answers):
                    return [bool(_checked(answer)) for answer in answers]
                self._untouched_until = time.monotonic() + UNTOUCHED_SECONDS
            pipeline = self._quick.pipeline(transaction=False)
            for name in names:
                pipeline.exists(name)
            return [bool(there) for there in pipeline.execute()]

    def remove(self, names: Sequence[str]) -> None:
        with self._in_words(), suppress(*REFUSALS):
            self._quick.unlink(*names)

    def close(self) -> None:
        for client in (self._quick, self._patient):
            client.close()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Convert every error to an OSError without secrets, and without its traceback."""
        try:
            yield
        except (redis.TimeoutError, TimeoutError) as error:
            raise TimeoutError(described(error, self._url)) from None
        except (redis.RedisError, OSError, ValueError, TypeError) as error:
            raise ConnectionError(described(error, self._url)) from None


def _checked(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
