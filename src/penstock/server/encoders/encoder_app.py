"""The application of an encoder: its routes, and errors for requests to generate text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.server.app import app_of
from penstock.server.encoders import embedding_routes, rerank_routes
from penstock.server.encoders.encoder_service import EncoderService
from penstock.server.metrics import exposed
from penstock.server.ollama.ollama_forms import OllamaShowBody
from penstock.server.ollama.ollama_routes import OLLAMA_VERSION, ollama_object
from penstock.server.openai.openai_objects import Json
from penstock.server.problems import BadRequest

TEXT_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/decisions", "/v1/systemone", "/api/chat", "/api/generate"),
)
"""Paths that only a generative model serves."""


def encoder_app(service: EncoderService) -> FastAPI:
    """Return the application of one encoder without middlewares."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    routers = [module.router(service) for module in (embedding_routes, rerank_routes)]
    return app_of([*routers, _router(service)], lifespan)


def encoder_object(service: EncoderService) -> dict[str, Any]:
    """Return the encoder's entry in a list of models."""
    length = service.spec.most_tokens
    about = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "penstock",
        "max_model_len": length,
        "context_length": length,
        "type": "model",
        "display_name": service.model_name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "max_input_tokens": length,
        "lifecycle": "active",
        "kinds": service.kinds,
    }
    return about | ({"dimensions": service.spec.width} if service.spec.embeds else {})


def _router(service: EncoderService) -> APIRouter:
    routes = APIRouter(tags=["encoder"])

    async def refuse() -> Response:
        """Reject a request to generate text."""
        does = "computes embeddings: POST /v1/embeddings"
        if not service.spec.embeds:
            does = "scores texts: POST /v1/rerank, or /v1/score"
        raise BadRequest(
            f"{service.model_name} is an encoder, which writes no text; it {does}",
            code="unsupported_endpoint",
            param="model",
        )

    for path in TEXT_PATHS:
        routes.add_api_route(
            path, refuse, methods=["POST"], response_model=None, include_in_schema=False
        )

    @routes.post("/api/show", response_model=None)
    async def show(body: OllamaShowBody) -> Response:
        """Describe the encoder, as Ollama does."""
        model = ollama_object(service.model_name, service.nbytes, service.created)
        family = service.spec.model_type
        info = {
            "general.architecture": family,
            f"{family}.context_length": service.spec.most_tokens,
            f"{family}.embedding_length": service.spec.width,
        }
        return Json(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": {**model["details"], "family": family},
                "model_info": info,
                "capabilities": service.kinds,
                "modified_at": model["modified_at"],
            }
        )

    @routes.get("/api/version", response_model=None)
    async def version() -> Response:
        """Return the implemented version of Ollama's API, and penstock's version."""
        return Json({"version": OLLAMA_VERSION, "penstock": __version__})

    registry = CollectorRegistry()
    registry.register(_EncoderMetrics(service))

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: HttpRequest) -> Response:
        """Return the encoder's metrics in Prometheus' text format."""
        return exposed(registry, http.headers.get("accept", ""))

    return routes


class _EncoderMetrics(Collector):
    def __init__(self, service: EncoderService) -> None:
        self._service = service

    def collect(self) -> list[Metric]:
        counts = self._service.engine.counts
        return [
            CounterMetricFamily(f"penstock_encoder_{name}", words, value)
            for name, words, value in (
                ("texts", "Texts and pairs computed.", counts.rows),
                ("tokens", "Tokens computed.", counts.tokens),
                ("batches", "Batches computed.", counts.batches),
                ("seconds", "Seconds spent on computing batches.", counts.seconds),
            )
        ]
