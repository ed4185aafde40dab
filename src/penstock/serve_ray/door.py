"""The ingress: reads a request's prompt, names its blocks, and passes everything on as it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.models.mlx_lm import load_tokenizer
from penstock.prefix import hash_blocks, root_hash
from penstock.serve_ray.replica import Served
from penstock.server.app import shows_key
from penstock.server.hints import Hint, hint_of
from penstock.server.problems import ServerError, TooLarge, Unavailable, response_for
from penstock.server.prompts import Prompts

logger = logging.getLogger(__name__)

NAMES_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""Seconds that a replica may be silent beyond the limit of a request; streams send an event sooner.
"""
PASSED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")
"""Keys of ASGI's scope that are passed on, besides headers and addresses."""


class Door:
    """Ingress in front of all replicas, which has the tokenizer and no model."""

    def __init__(self, replicas: DeploymentHandle, served: Served) -> None:
        self._replicas = replicas
        self._settings = served.settings
        self._prompts = Prompts(
            load_tokenizer(served.model),
            keep_billing_header=served.settings.keep_billing_header,
            tool_parser=served.settings.tool_parser,
            reasoning_parser=served.settings.reasoning_parser,
        )
        self._names: tuple[str, int] | None = None

    async def __call__(self, http: HttpRequest) -> Response:
        """Pass a request on; the answer comes as its parts do."""
        try:
            body = await self._body(http)
        except (ServerError, ClientDisconnect) as error:
            return response_for(http.url.path, error)
        block_hashes, cache_key = await self._hint(http, body)
        seconds = self._settings.request_timeout_seconds + SILENCE_SECONDS
        return Passed(self._replicas, scope_of(http), body, block_hashes, cache_key, seconds)

    async def _body(self, http: HttpRequest) -> bytes:
        """Return the body.

        Raises:
            ServerError: it is too large, or comes too slowly.
        """
        most, seconds = self._settings.max_body_bytes, self._settings.body_timeout_seconds
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                async for part in http.stream():
                    size += len(part)
                    if size > most:
                        raise TooLarge(
                            f"the body is larger than {most:,} bytes", code="body_too_large"
                        )
                    parts.append(part)
        except TimeoutError:
            raise ServerError(
                f"the body did not arrive within {seconds:.0f} s", status=408
            ) from None
        return b"".join(parts)

    async def _hint(self, http: HttpRequest, body: bytes) -> tuple[bytes, str | None]:
        """Return the joined keys of the prompt's blocks, and the client's cache key."""
        api_key = self._settings.api_key
        if api_key is not None and not shows_key(http.scope, api_key):
            return b"", None  # it will be refused; nothing is computed for strangers
        try:
            hint = await asyncio.to_thread(hint_of, http.url.path, body, self._prompts)
            if hint is None:
                return b"", None
            return b"".join(await self._keys(hint)), hint.cache_key
        # A boundary: a hint may fail, an answer may not.
        except Exception as error:
            logger.error("a prompt could not be read: %s", type(error).__name__)
            logger.debug("its error", exc_info=error)
            return b"", None

    async def _keys(self, hint: Hint) -> list[bytes]:
        if self._names is None:  # all replicas' are the same
            async with asyncio.timeout(NAMES_SECONDS):
                self._names = await self._replicas.names.remote()
        fingerprint, block_size = self._names
        return hash_blocks(hint.tokens, block_size, root_hash(fingerprint, hint.salt))


class Passed(Response):
    """Answer of a replica, passed on message by message."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        scope: dict[str, Any],
        body: bytes,
        block_hashes: bytes,
        cache_key: str | None,
        silence_seconds: float,
    ) -> None:
        super().__init__()
        self._silence_seconds = silence_seconds
        self._replicas = replicas
        self._given = (scope, body)
        self._hint = {"block_hashes": block_hashes, "cache_key": cache_key}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chosen replica's answer; one that cannot be asked is 429 or 503."""
        started = False
        coming = self._replicas.options(stream=True).answer.remote(*self._given, **self._hint)
        messages = aiter(coming)
        try:
            while (message := await self._next(messages)) is not None:
                started = True
                await send(message)
        except BackPressureError:
            await self._refuse(scope, receive, send, 429, "too many requests wait")
        except (RayError, TimeoutError) as error:
            logger.error("a replica failed: %s", type(error).__name__)
            if started:
                raise  # the connection is cut: half an answer must not look whole
            await self._refuse(scope, receive, send, 503, "the replica that was asked has failed")
        finally:
            coming.cancel()

    async def _next(self, messages: AsyncIterator[Message]) -> Message | None:
        """Return the next part of the answer, None after the last one."""
        async with asyncio.timeout(self._silence_seconds):
            return await anext(messages, None)

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, status: int, why: str
    ) -> None:
        error: ServerError = ServerError(why, status=429, code="queue_full")
        if status == 503:
            error = Unavailable(why, code="replica_failed")
        await response_for(scope["path"], error)(scope, receive, send)


def scope_of(http: HttpRequest) -> dict[str, Any]:
    """Return the parts of a request's scope that a replica needs, in plain values."""
    scope = http.scope
    passed = {name: scope[name] for name in PASSED if name in scope}
    passed["asgi"] = {"version": "3.0"}
    passed["root_path"] = ""
    passed["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    passed["client"], passed["server"] = scope.get("client"), scope.get("server")
    return passed
