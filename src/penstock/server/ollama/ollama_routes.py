"""Routes of Ollama's API; the served model answers, whichever model a request names."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
from penstock.server.ollama.ollama_chat import (
    EMPTY,
    MEDIA_TYPE,
    OllamaChat,
    OllamaGenerate,
    encoded,
    now,
)
from penstock.server.ollama.ollama_forms import (
    LATEST,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from penstock.server.openai.logprobs import Logprobs
from penstock.server.openai.openai_objects import ERRORS, Json
from penstock.server.problems import OLLAMA_PATHS, NoEmbeddings, is_under
from penstock.server.request_body import reading_aside
from penstock.server.service import Service
from penstock.server.waiting_response import StreamForm

LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "object"}}}}
}
OLLAMA_VERSION = "0.35.0"
"""Version of Ollama whose API is implemented; clients require a minimum version."""


TAGS = "/api/tags"
LOADED = "/api/ps"


class OllamaError(BaseModel):
    """Ollama's error object."""

    error: str


def router(service: Service) -> APIRouter:
    errors: dict[int | str, dict[str, Any]] = {code: {"model": OllamaError} for code in ERRORS}
    routes = APIRouter(tags=["ollama"], responses=errors, route_class=reading_aside(service))
    logprobs = Logprobs(service.prompts)

    @routes.post(OllamaChat.path, response_model=None, responses=LINES)
    async def chat(body: OllamaChatBody, http: HttpRequest) -> Response:
        """Answer a conversation, as Ollama does."""
        if not body.messages:
            return _loaded(service, body, EMPTY[OllamaChat.path])
        return await OllamaChat(service, logprobs, body, body.request()).respond(http)

    @routes.post(OllamaGenerate.path, response_model=None, responses=LINES)
    async def generate(body: OllamaGenerateBody, http: HttpRequest) -> Response:
        """Answer a prompt, as Ollama does; `raw` continues it without the template."""
        if not body.prompt:
            return _loaded(service, body, EMPTY[OllamaGenerate.path])
        return await OllamaGenerate(service, logprobs, body, body.request()).respond(http)

    @routes.get(TAGS, response_model=None)
    async def tags() -> Response:
        """List the served model, as Ollama does."""
        return Json({"models": [await _model(service)]})

    @routes.get(LOADED, response_model=None)
    async def loaded() -> Response:
        """List the loaded model, as Ollama does."""
        model = loaded_object(await _model(service))
        return Json({"models": [{**model, "context_length": service.context_tokens}]})

    @routes.post("/api/show", response_model=None)
    async def show(body: OllamaShowBody) -> Response:
        """Describe the served model, as Ollama does."""
        prompts = service.prompts
        capabilities = ["completion"]
        capabilities += ["tools"] if prompts.traits.tools else []
        capabilities += ["vision"] if prompts.images is not None else []
        capabilities += ["thinking"] if prompts.format.reasoning is not None else []
        model = await _model(service)
        return Json(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": model["details"],
                "model_info": {
                    "general.architecture": "penstock",
                    "penstock.context_length": service.context_tokens,
                },
                "capabilities": capabilities,
                "modified_at": model["modified_at"],
            }
        )

    @routes.post("/api/embed", response_model=None, include_in_schema=False)
    @routes.post("/api/embeddings", response_model=None, include_in_schema=False)
    async def embed() -> Response:
        """Return 404, since this model writes text and computes no embeddings."""
        raise NoEmbeddings()

    @routes.get("/api/version", response_model=None)
    async def version() -> Response:
        """Return the implemented version of Ollama's API, and penstock's version."""
        return Json({"version": OLLAMA_VERSION, "penstock": __version__})

    return routes


def untagged(name: str, path: str) -> str:
    """Remove `:latest` from a model's name in a request to Ollama's API.

    >>> untagged("a:latest", "/api/chat"), untagged("a:latest", "/v1/completions")
    ('a', 'a:latest')
    """
    return name.removesuffix(LATEST) if is_under(OLLAMA_PATHS, path) else name


def waiting_lines(path: str, content: Mapping[str, Any]) -> StreamForm | None:
    """Return the form of a stream that waits for its model; None if the answer is one object.

    Clients read each line as JSON and fail at an empty one, so a comment is an empty answer.
    """
    if path not in EMPTY or content.get("stream") is False:
        return None

    def comment(_: str) -> bytes:
        empty = {"created_at": now(), **EMPTY[path], "done": False}
        return encoded({"model": str(content.get("model") or ""), **empty})

    return StreamForm(MEDIA_TYPE, comment, lambda body: body + b"\n")


def _loaded(service: Service, body: OllamaBody, content: dict[str, Any]) -> Response:
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    name = body.model or service.model_name
    return Json(
        {"model": name, "created_at": now(), **content, "done": True, "done_reason": reason}
    )


async def _model(service: Service) -> dict[str, Any]:
    weights = (await service.ask(lambda view: view.stats())).by_kind["weights"]
    return ollama_object(service.model_name, weights, service.created)


def ollama_object(name: str, nbytes: int, created: int) -> dict[str, Any]:
    """Return a model's entry in Ollama's list of models."""
    details = {
        "parent_model": "",
        "format": "mlx",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "size": nbytes,
        "digest": "",
        "details": details,
    }


def loaded_object(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's entry in Ollama's list of loaded models."""
    return {**model, "expires_at": "9999-12-31T23:59:59Z", "size_vram": model["size"]}
