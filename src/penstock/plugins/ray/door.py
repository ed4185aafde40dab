"""Ingress deployment: tokenizes a prompt, hashes its blocks, and forwards the request unchanged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ApiKey
from penstock.models.mlx_lm import load_tokenizer
from penstock.models.source import checked_source
from penstock.models.source_choice import choose_source
from penstock.plugins.ray.fleet_metrics import FleetMetrics
from penstock.plugins.ray.fleet_state import fleet_state
from penstock.plugins.ray.passing import Passing
from penstock.plugins.ray.replica import Served
from penstock.plurals import counted
from penstock.prefix import hash_blocks, root_hash
from penstock.server.access import KEY_HOLDER, Access, KeyHolder, checked
from penstock.server.app import UNCOUNTED, Health, RequestId, is_open
from penstock.server.hints import Hint, hint_of
from penstock.server.metrics import exposed
from penstock.server.paths import Paths
from penstock.server.problems import REQUEST_ID, ServerError, TooLarge, Unavailable, response_for
from penstock.server.prompts import Prompts

logger = logging.getLogger(__name__)

NAMES_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""Seconds after the request timeout until a replica that sends nothing counts as failed."""
FLUSH_SECONDS = 60.0
"""Seconds for replicas to write pending blocks after all answers have ended."""
DRAIN_LOOK_SECONDS = 0.05
GOODBYE_SECONDS = 4.0
"""Seconds for clients to receive the error that ends their answer."""
PASSED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")
"""ASGI scope keys that are forwarded, besides headers and addresses."""


class Door:
    """Ingress of all replicas, which has the tokenizer and image processor but no model."""

    def __init__(self, replicas: DeploymentHandle, served: Served) -> None:
        self._replicas = replicas
        self._name = served.name
        self._settings = served.settings
        self._access = Access(served.settings.api_key, file=served.settings.keys)
        source = checked_source(served.model)
        _, reader = choose_source(source, served.model_source)
        self._prompts = Prompts(
            load_tokenizer(served.model),
            images=reader.image_reader(source),
            keep_billing_header=served.settings.keep_billing_header,
            tool_parser=served.settings.tool_parser,
            reasoning_parser=served.settings.reasoning_parser,
            refuses_tools=served.settings.tools_without_template == "refuse",
            system=served.settings.system,
        )
        self._names: tuple[str, int] | None = None
        self._open: set[Passing] = set()
        self._draining = False
        self._metrics = FleetMetrics(self._access, lambda: len(self._open))
        self._app = RequestId(Paths(self._answer))

    async def __call__(self, http: HttpRequest) -> Response:
        return _Whole(self._app)

    # ---- calls of `penstock serve`

    async def set_keys(self, keys: Sequence[ApiKey]) -> None:
        self._access.replace(keys)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait up to `seconds` for open ones, then close the replicas."""
        self._draining = True
        if not await self._all_ended(seconds):
            for passing in tuple(self._open):
                passing.stop()
            await self._all_ended(GOODBYE_SECONDS)
        closing = self._replicas.broadcast("close")
        await closing.results_async(timeout_s=FLUSH_SECONDS, return_exceptions=True)

    async def _all_ended(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._open and time.monotonic() < until:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        return not self._open

    async def check_health(self) -> None:
        """Fetch the parameters of block hashes from a replica before the first request."""
        with suppress(RayError, RayServeException, TimeoutError):
            await self._block_names()

    # ---- requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._own(scope)
            if response is None:
                return await self._pass_on(scope, receive, send)
        except (ServerError, ClientDisconnect) as error:
            response = response_for(scope["path"], error)
        return await response(scope, receive, send)

    async def _own(self, scope: Scope) -> Response | None:
        """Return the door's own response, or None to forward; raise ServerError to refuse."""
        path, is_get = scope["path"], scope["method"] == "GET"
        if path == "/ready" and is_get:
            return self._ready()
        if self._draining and not (path == "/health" and is_get):
            raise Unavailable("the server is shutting down", code="shutting_down")
        if path == "/metrics" and is_get:
            if self._access.needed:
                checked(self._access.client_of(scope), path)
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            return exposed(self._metrics.registry, accept)
        return None

    def _ready(self) -> Response:
        """Return the response to `/ready`: 200 if requests are accepted and a replica answers."""
        answering = fleet_state().replicas - fleet_state().ejected
        status: Literal["ok", "draining", "dead"] = "ok" if answering else "dead"
        if self._draining:
            status = "draining"
        report = Health(
            status=status, model=self._name, models=[self._name], open_requests=len(self._open)
        )
        counts = {"replicas": fleet_state().replicas, "ejected": fleet_state().ejected}
        return JSONResponse({**report.model_dump(), **counts}, 200 if status == "ok" else 503)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = None if is_open(scope) else self._access.client_of(scope)
        if client is not None and scope["method"] not in UNCOUNTED:
            self._access.admit(client)
        silence_seconds = self._settings.request_timeout_seconds + SILENCE_SECONDS
        passing = Passing(self._replicas, scope, silence_seconds)
        self._open.add(passing)
        try:
            body = await self._body(HttpRequest(scope, receive))
            KEY_HOLDER.set(client)
            block_hashes, cache_key = await self._hint(scope["path"], body)
            hint = {"block_hashes": block_hashes, "cache_key": cache_key}
            await passing.run((scope_of(scope, client), body), hint, receive, send)
        finally:
            self._open.discard(passing)
            self._metrics.ended(passing)
            if client is not None:
                client.tokens = passing.tokens
                self._access.settle(client)

    async def _body(self, http: HttpRequest) -> bytes:
        """Read the body; raise ServerError if it is too large or arrives too slowly."""
        limit, seconds = self._settings.max_body_bytes, self._settings.body_timeout_seconds
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                async for part in http.stream():
                    size += len(part)
                    if size > limit:
                        raise TooLarge(
                            f"the body is larger than {counted(limit, 'byte')}",
                            code="body_too_large",
                        )
                    parts.append(part)
        except TimeoutError:
            raise ServerError(
                f"the body did not arrive within {seconds:.0f} s", status=408
            ) from None
        return b"".join(parts)

    async def _hint(self, path: str, body: bytes) -> tuple[bytes, str | None]:
        if self._access.needed and KEY_HOLDER.get() is None:
            return b"", None  # it will be refused, so nothing is computed
        try:
            hint = await asyncio.to_thread(hint_of, path, body, self._prompts)
            if hint is None:
                return b"", None
            return b"".join(await self._keys(hint)), hint.cache_key
        # A boundary: an error in a routing hint must not fail the request.
        except Exception as error:
            logger.error(
                "a prompt could not be hashed, so its request is routed by load: %s",
                type(error).__name__,
            )
            logger.debug("traceback of the failed prompt hash", exc_info=error)
            return b"", None

    async def _keys(self, hint: Hint) -> list[bytes]:
        fingerprint, block_size = await self._block_names()
        return hash_blocks(hint.tokens, block_size, root_hash(fingerprint, hint.salt))

    async def _block_names(self) -> tuple[str, int]:
        if self._names is None:
            async with asyncio.timeout(NAMES_SECONDS):
                self._names = await self._replicas.names.remote()
        return self._names


class _Whole(Response):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def scope_of(scope: Scope, client: KeyHolder | None) -> dict[str, Any]:
    """Return the entries of the ASGI scope that a replica needs, as serializable values."""
    passed = {name: scope[name] for name in PASSED if name in scope}
    passed["asgi"] = {"version": "3.0"}
    passed["root_path"] = ""
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    request_id = (REQUEST_ID.get() or "").encode()  # the same id in both processes
    headers = [header for header in headers if header[0] != b"x-request-id"]
    passed["headers"] = [*headers, (b"x-request-id", request_id)]
    passed["client"], passed["server"] = scope.get("client"), scope.get("server")
    passed["state"] = {"key_holder": client}
    return passed
