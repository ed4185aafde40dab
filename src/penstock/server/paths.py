"""Normalization of request paths: extra slashes, a repeated or missing `/v1`.

Extra slashes are ignored; an error about `/v1` says how the base URL should end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.problems import NotFound, ServerError

API = "/v1"
ENDLESS = f"{API}/live"
"""Path of an endless stream, for which HEAD is not answered."""
REFERENCE = "/docs"
DOCUMENT = "/openapi.json"
"""Path of the OpenAPI document, which `REFERENCE` draws."""
SHOWN_CHARACTERS = 80
BASE_URLS = (
    f"a base URL of OpenAI's clients ends in {API}, one of Anthropic's in the port (without {API})"
)


class Paths:
    """Middleware that normalizes paths, and answers HEAD wherever GET is served."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": plain(scope["path"])}
            if scope["method"] == "HEAD" and scope["path"] != ENDLESS:
                scope["method"] = "GET"  # uvicorn sends no body: its own scope still has HEAD
        return await self.app(scope, receive, send)


def plain(path: str) -> str:
    """Remove extra slashes; a trailing slash outside `/v1` is kept for the page's links.

    >>> plain("//v1//models/"), plain("/docs/")
    ('/v1/models', '/docs/')
    """
    path = re.sub("//+", "/", path)
    return path.rstrip("/") if path.startswith(f"{API}/") else path


def served_methods(routers: Iterable[APIRouter]) -> dict[str, set[str]]:
    served: dict[str, set[str]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                served.setdefault(route.path, set()).update(route.methods or ())
    return served


def unserved(
    http: HttpRequest, error: HTTPException, served: Mapping[str, Iterable[str]]
) -> Exception:
    path = http.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").split(", ")
        methods = {*allowed, *methods_of(path, served)} - {""}
        return WrongMethod(path, http.method, ", ".join(sorted(methods)))
    if error.status_code != 404:
        return error
    message = f"there is nothing at {path[:SHOWN_CHARACTERS]}"
    near = nearest(path, served)
    if near is None:
        return NotFound(f"{message}; /openapi.json lists the paths")
    return NotFound(f"{message}, but at {near}: {BASE_URLS}")


class WrongMethod(ServerError):
    status = 405

    def __init__(self, path: str, method: str, allowed: str) -> None:
        super().__init__(
            f"{path[:SHOWN_CHARACTERS]} is served with {allowed}, "
            f"not with {method[:SHOWN_CHARACTERS]}"
        )
        self.headers = {"Allow": allowed}


def methods_of(path: str, served: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the methods that serve a path.

    >>> sorted(methods_of("/v1/a/b", {"/v1/a/{id}": ("GET", "DELETE"), "/v1/a": ("POST",)}))
    ['DELETE', 'GET']
    """
    methods = set[str]()
    for template, names in served.items():
        if re.fullmatch(_PARAMETER.sub("[^/]+", template), path):
            methods.update(names)
    return methods


_PARAMETER = re.compile(r"\{[^}]*\}")


def nearest(path: str, served: Iterable[str]) -> str | None:
    """Return the longest served path that `path` ends with, ignoring its `/v1`.

    >>> served = ("/v1/messages", "/v1/models", "/health")
    >>> [nearest(path, served) for path in ("/v1/v1/messages", "/models", "/api/x", "/health")]
    ['/v1/messages', '/v1/models', None, None]
    """
    fixed = [route for route in served if route.startswith(f"{API}/") and "{" not in route]
    ends = [route for route in fixed if path.endswith(route.removeprefix(API))]
    return max(ends, key=len, default=None)
