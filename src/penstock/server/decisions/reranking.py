"""Reranking and scoring by a generative model: its probability of "yes" for each document.

The prompt is that of Qwen3-Reranker, which any model with a chat template can follow. Instruction
and query are computed once; all documents share their KV.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.decisions.deciding import Decided, Decider, DecisionInput
from penstock.server.decisions.decision_questions import Option
from penstock.server.openai.openai_objects import ERRORS, Json
from penstock.server.request_body import reading_aside
from penstock.server.rerank_forms import (
    RERANK_PATHS,
    SCORE_PATHS,
    PairScores,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.service import Service

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class DocumentQuestion:
    """The question whether a document answers the query that precedes it in the prompt."""

    document: str
    options: tuple[Option, ...] = (Option("yes"), Option("no"))

    @property
    def text(self) -> str:
        return f"<Document>: {self.document}"


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["rerank"], responses=ERRORS, route_class=reading_aside(service))

    async def decide(
        http: HttpRequest, model: str | None, query: str, documents: Sequence[str]
    ) -> Decided:
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        questions = {
            f"documents.{index}": DocumentQuestion(document)
            for index, document in enumerate(documents)
        }
        read = DecisionInput(messages, questions, between="\n")
        decider = Decider(service, RERANK_PATHS[0], read, model)
        return await decider.decide(http)

    async def rerank(body: RerankRequest, http: HttpRequest) -> Response:
        """Order documents by the model's probability that they answer a query."""
        decided = await decide(http, body.model, body.query, body.texts)
        scores = [reading.probabilities[0] for reading in decided.readings]
        return Json(
            body.answer(service.shown_name(body.model), PairScores(scores, decided.input_tokens))
        )

    async def score(body: ScoreRequest, http: HttpRequest) -> Response:
        """Score pairs of a query and a document by the model's probability of yes."""
        pairs = zip(*body.pairs, strict=True)
        scores: list[float] = []
        tokens = 0
        for query, same in groupby(pairs, key=lambda pair: pair[0]):
            decided = await decide(http, body.model, query, [document for _, document in same])
            scores += [reading.probabilities[0] for reading in decided.readings]
            tokens += decided.input_tokens
        answer = body.answer(
            service.shown_name(body.model), int(time.time()), PairScores(scores, tokens)
        )
        return Json(answer)

    for paths, endpoint in ((RERANK_PATHS, rerank), (SCORE_PATHS, score)):
        for path in paths:
            routes.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    return routes
