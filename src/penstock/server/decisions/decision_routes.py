"""Routes of `/v1/decisions` and `/v1/systemone`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.decisions import reranking
from penstock.server.decisions.deciding import Decided, Decider
from penstock.server.decisions.decision_forms import DecisionsRequest, SystemOneRequest
from penstock.server.openai.openai_objects import ERRORS
from penstock.server.problems import dumps
from penstock.server.request_body import reading_aside
from penstock.server.service import Service

DECISIONS = "/v1/decisions"
SYSTEM_ONE = "/v1/systemone"


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["decisions"], responses=ERRORS, route_class=reading_aside(service))

    async def answer(
        body: DecisionsRequest | SystemOneRequest, http: HttpRequest, path: str
    ) -> Response:
        decided = await Decider(service, path, body.asked(), body.model).decide(http)
        write = partial(_written, body, service.shown_name(body.model), decided)
        return await service.workers.write(write)

    @routes.post(DECISIONS, response_model=None)
    async def decisions(body: DecisionsRequest, http: HttpRequest) -> Response:
        """Answer questions about an input with probabilities, as OpenAI's API does."""
        return await answer(body, http, DECISIONS)

    @routes.post(SYSTEM_ONE, response_model=None)
    async def system_one(body: SystemOneRequest, http: HttpRequest) -> Response:
        """Answer named questions about a state with probabilities."""
        return await answer(body, http, SYSTEM_ONE)

    both = APIRouter()  # each has its own tag
    both.include_router(routes)
    both.include_router(reranking.router(service))
    return both


def _written(body: DecisionsRequest | SystemOneRequest, model: str, decided: Decided) -> Response:
    return Response(dumps(body.answer(model, decided)), media_type="application/json")
