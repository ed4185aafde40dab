"""Reranking and scoring routes of an encoder.

A reranker scores a pair by the probability that the texts match. An embedder scores it by the
cosine similarity of their embeddings, at `/v1/score` only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.encoders.encoder_tokens import TokenizedText, Truncation
from penstock.server.encoders.embedding_routes import tokenized, unit
from penstock.server.encoders.encoder_service import (
    EncoderService,
    check_client,
    hold_tokens,
    reported_lengths,
)
from penstock.server.forms import truncation_of
from penstock.server.openai.openai_objects import ERRORS, Json
from penstock.server.problems import BadRequest
from penstock.server.request_body import reading_aside
from penstock.server.rerank_forms import (
    RERANK_PATHS,
    SCORE_PATHS,
    PairScores,
    RerankRequest,
    ScoreRequest,
)


def router(service: EncoderService) -> APIRouter:
    routes = APIRouter(tags=["rerank"], responses=ERRORS, route_class=reading_aside(service))

    async def rerank(body: RerankRequest, http: HttpRequest) -> Response:
        """Order documents by how well they answer a query."""
        if service.spec.embeds:
            raise BadRequest(
                f"{service.model_name} computes embeddings and is no reranker; POST /v1/score "
                "returns their cosine similarities",
                code="unsupported_endpoint",
                param="model",
            )
        texts = body.texts
        scores = await _pair_scores(
            service, http, [body.query] * len(texts), texts, truncation_of(body.truncate)
        )
        return Json(body.answer(service.model_name, scores))

    async def score(body: ScoreRequest, http: HttpRequest) -> Response:
        """Score pairs of texts."""
        first, second = body.pairs
        by = _cosines if service.spec.embeds else _pair_scores
        scores = await by(service, http, first, second, truncation_of(body.truncate))
        return Json(body.answer(service.model_name, int(time.time()), scores))

    for paths, endpoint in ((RERANK_PATHS, rerank), (SCORE_PATHS, score)):
        for path in paths:
            routes.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    return routes


async def _pair_scores(
    service: EncoderService,
    http: HttpRequest,
    first: Sequence[str],
    second: Sequence[str],
    truncation: Truncation | None,
) -> PairScores:
    """Score pairs with a reranker that has one output per pair."""
    if service.spec.labels != 1:
        raise BadRequest(
            f"{service.model_name} classifies texts into {service.spec.labels} classes and does "
            "not score pairs",
            code="unsupported_endpoint",
            param="model",
        )
    encoded = await service.encode(http, partial(_pairs, service, first, second, truncation))
    values = 1 / (1 + np.exp(-encoded.values[:, 0].astype(np.float64)))
    return PairScores(values.tolist(), encoded.tokens, encoded.truncated)


def _pairs(
    service: EncoderService,
    first: Sequence[str],
    second: Sequence[str],
    truncation: Truncation | None,
) -> list[TokenizedText]:
    """Tokenize pairs; each query once. Worker thread."""
    queries: dict[str, list[int]] = {}
    read = []
    for index, (query, text) in enumerate(zip(first, second, strict=True)):
        if query not in queries:
            with reported_lengths("query"):
                queries[query] = service.tokenizer.query(query, check_client)
        with reported_lengths(f"documents.{index}"):
            read.append(service.tokenizer.pair(queries[query], text, truncation, check_client))
    hold_tokens(read)
    return read


async def _cosines(
    service: EncoderService,
    http: HttpRequest,
    first: Sequence[str],
    second: Sequence[str],
    truncation: Truncation | None,
) -> PairScores:
    """Score pairs by the cosine similarity of embeddings; each distinct text is computed once."""
    texts = list(dict.fromkeys([*first, *second]))
    encoded = await service.encode(http, partial(tokenized, service, texts, truncation, "text"))
    places, vectors = {text: place for place, text in enumerate(texts)}, unit(encoded.values)
    values = [
        float(vectors[places[one]] @ vectors[places[other]])
        for one, other in zip(first, second, strict=True)
    ]
    tokens = {text["index"]: text["tokens"] for text in encoded.truncated}
    truncated = [
        {"index": index, "tokens": tokens[places[text]]}
        for index, pair in enumerate(zip(first, second, strict=True))
        for text in pair
        if places[text] in tokens
    ]
    return PairScores(values, encoded.tokens, truncated)
