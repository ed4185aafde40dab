"""Routes of OpenAI's chat completions, completions and models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.models.encoder_types import WRITING
from penstock.server.openai.chat_completions import CHAT, ChatCompletions
from penstock.server.openai.completions import COMPLETIONS, Completions
from penstock.server.openai.logprobs import Logprobs
from penstock.server.openai.openai_forms import ChatRequest, CompletionRequest
from penstock.server.openai.openai_objects import (
    ERRORS,
    STREAMED,
    ChatCompletion,
    Completion,
    Json,
    Model,
    Models,
    OpenAIError,
)
from penstock.server.problems import NoEmbeddings, NotFound
from penstock.server.request_body import reading_aside
from penstock.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["openai"], responses=ERRORS, route_class=reading_aside(service))
    logprobs = Logprobs(service.prompts)

    @routes.post(CHAT, response_model=ChatCompletion, responses=STREAMED)
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """Answer a conversation."""
        return await ChatCompletions(service, logprobs, body).respond(http)

    @routes.post(COMPLETIONS, response_model=Completion, responses=STREAMED)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Complete a text without applying a chat template."""
        return await Completions(service, logprobs, body).respond(http)

    @routes.post("/v1/embeddings", response_model=None, responses={404: {"model": OpenAIError}})
    async def embeddings() -> Response:
        """Return 404, since this model writes text and computes no embeddings."""
        raise NoEmbeddings()

    @routes.get("/v1/models", response_model=Models)
    async def models() -> Response:
        """List the served model."""
        names = service.names
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        data = [model_object(service, name) for name in names]
        return Json({"object": "list", "data": data, **ends})

    @routes.get("/v1/models/{model_id:path}", response_model=Model)
    async def model(model_id: str) -> Response:
        """Describe the served model."""
        if model_id not in service.names:
            raise NotFound(
                f"there is no model of this name; {', '.join(service.names)} is served",
                code="model_not_found",
                param="model",
            )
        return Json(model_object(service, model_id))

    return routes


def model_object(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "penstock",
        "max_model_len": service.context_tokens,
        "context_length": service.context_tokens,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "max_input_tokens": max(1, service.context_tokens - 1),
        "max_tokens": service.context_tokens,
        "lifecycle": "active",
        "kinds": list(WRITING),
    }
