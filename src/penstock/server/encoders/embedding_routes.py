"""Embedding routes: OpenAI's `/v1/embeddings` and Ollama's `/api/embed`."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import APIRouter
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.encoders.encoder_tokens import TokenizedText, Truncation
from penstock.kv.numpy_arrays import Floats
from penstock.plurals import counted
from penstock.server.encoders.encoder_service import (
    Encoded,
    EncoderService,
    check_client,
    hold_tokens,
    reported_lengths,
)
from penstock.server.forms import (
    MOST_TEXTS,
    Each,
    Id,
    Name,
    RequestForm,
    TruncateForm,
    truncation_of,
)
from penstock.server.openai.openai_objects import ERRORS, Json
from penstock.server.problems import BadRequest, dumps
from penstock.server.request_body import reading_aside

TEXT_FORMS = "a text, a list of texts, a list of token numbers, or a list of such lists"


def _texts(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    """Parse texts or tokens; on failure, raise an error that names all accepted forms."""
    if isinstance(value, list) and not value:
        raise PydanticCustomError("input_empty", "the list is empty")
    if isinstance(value, list) and len(value) > MOST_TEXTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_many_texts", f"1 to {MOST_TEXTS:,} texts")
    try:
        return parse(value)
    except ValidationError:
        raise PydanticCustomError("input_type", TEXT_FORMS) from None


Tokens: TypeAlias = Annotated[Each[Id], Field(min_length=1)]
Texts: TypeAlias = Annotated[str | Each[str] | Tokens | Each[Tokens], WrapValidator(_texts)]


def texts_of(value: str | Sequence[Any]) -> list[str | Sequence[int]]:
    """Return the texts of a request, each a string or a list of token ids."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return list(value)


class EmbeddingsRequest(RequestForm):
    """The body of `POST /v1/embeddings`."""

    model: Name | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    truncate: TruncateForm | None = None
    user: Name | None = None


class OllamaEmbedRequest(RequestForm):
    """The body of `POST /api/embed`."""

    model: Name = ""
    input: str | Each[str] = Field([], max_length=None)
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)


class OllamaEmbeddingsRequest(RequestForm):
    """The body of `POST /api/embeddings`, which Ollama keeps for old clients."""

    model: Name = ""
    prompt: str = ""


EMBEDDINGS = "/v1/embeddings"
OLLAMA_EMBED = "/api/embed"
OLLAMA_EMBEDDINGS = "/api/embeddings"
JSON_TYPE = "application/json"
LEAST_NORM = 1e-12


def router(service: EncoderService) -> APIRouter:
    routes = APIRouter(tags=["embeddings"], responses=ERRORS, route_class=reading_aside(service))

    async def embed(
        http: HttpRequest,
        texts: Sequence[str | Sequence[int]],
        truncation: Truncation | None,
        dimensions: int | None,
    ) -> Encoded:
        if not service.spec.embeds:
            raise BadRequest(
                f"{service.model_name} scores pairs of texts and has no embeddings: "
                "POST /v1/rerank, or /v1/score",
                code="unsupported_endpoint",
            )
        if dimensions is not None and dimensions > service.spec.width:
            raise BadRequest(
                f"dimensions: {dimensions} exceeds the {service.spec.width} of an embedding",
                param="dimensions",
            )
        return await service.encode(http, partial(tokenized, service, texts, truncation))

    @routes.post(EMBEDDINGS, response_model=None)
    async def embeddings(body: EmbeddingsRequest, http: HttpRequest) -> Response:
        """Embed texts."""
        texts, truncation = texts_of(body.input), truncation_of(body.truncate)
        encoded = await embed(http, texts, truncation, body.dimensions)
        write = partial(_openai_answer, service, body, encoded)
        return Response(await service.workers.write(write), media_type=JSON_TYPE)

    @routes.post(OLLAMA_EMBED, response_model=None)
    async def ollama_embed(body: OllamaEmbedRequest, http: HttpRequest) -> Response:
        """Embed texts, as Ollama does."""
        began = time.perf_counter_ns()
        texts = [body.input] if isinstance(body.input, str) else body.input
        if len(texts) > MOST_TEXTS:
            raise BadRequest(f"input: 1 to {MOST_TEXTS:,} texts", param="input")
        head: dict[str, Any] = {"model": body.model or service.model_name}
        if not texts:  # as Ollama answers a request that only loads a model
            return Json({**head, "embeddings": []})
        encoded = await embed(http, texts, "end" if body.truncate else None, body.dimensions)
        head |= {"total_duration": time.perf_counter_ns() - began, "load_duration": 0}
        head["prompt_eval_count"] = encoded.tokens
        write = partial(_ollama_answer, body.dimensions, head, encoded)
        return Response(await service.workers.write(write), media_type=JSON_TYPE)

    @routes.post(OLLAMA_EMBEDDINGS, response_model=None)
    async def ollama_embeddings(body: OllamaEmbeddingsRequest, http: HttpRequest) -> Response:
        """Embed a text, as Ollama did before `/api/embed`."""
        if not body.prompt:
            return Json({"embedding": []})
        encoded = await embed(http, [body.prompt], "end", None)
        return Response(b'{"embedding":%s}' % _row(encoded.values[0]), media_type=JSON_TYPE)

    return routes


def tokenized(
    service: EncoderService,
    texts: Sequence[str | Sequence[int]],
    truncation: Truncation | None,
    param: str = "input",
) -> list[TokenizedText]:
    """Tokenize the texts; check those given as token ids. Worker thread."""
    read = []
    for index, text in enumerate(texts):
        place = param if len(texts) == 1 else f"{param}.{index}"
        with reported_lengths(place):
            if isinstance(text, str):
                read.append(service.tokenizer.text(text, truncation, check_client))
            else:
                _check_ids(text, service.spec.vocabulary_size, place)
                read.append(service.tokenizer.given(text, truncation))
    hold_tokens(read)
    return read


def _check_ids(tokens: Sequence[int], size: int, param: str) -> None:
    for token in tokens:
        if not 0 <= token < size:
            raise BadRequest(
                f"{param}: token {token} does not exist; the model has {counted(size, 'token')}, "
                f"0 to {size - 1}",
                param=param,
            )


def _openai_answer(service: EncoderService, body: EmbeddingsRequest, encoded: Encoded) -> bytes:
    """Return the response's JSON. Worker thread."""
    values = _shortened(encoded.values, body.dimensions, normalizes=service.spec.normalizes)
    write = _base64 if body.encoding_format == "base64" else _row
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%s}' % (index, write(value))
        for index, value in enumerate(values)
    )
    rest: dict[str, Any] = {
        "model": service.model_name,
        "usage": {"prompt_tokens": encoded.tokens, "total_tokens": encoded.tokens},
    }
    if encoded.truncated:
        rest["truncated"] = encoded.truncated
    return b'{"object":"list","data":[%s],%s' % (data, dumps(rest)[1:])


def _ollama_answer(dimensions: int | None, head: dict[str, Any], encoded: Encoded) -> bytes:
    """Return the response's JSON, with unit vectors as in Ollama. Worker thread."""
    values = unit(_shortened(encoded.values, dimensions, normalizes=False))
    return b'%s,"embeddings":[%s]}' % (dumps(head)[:-1], b",".join(map(_row, values)))


def _shortened(values: Floats, dimensions: int | None, *, normalizes: bool) -> Floats:
    if dimensions is None or dimensions == values.shape[1]:
        return values
    return unit(values[:, :dimensions]) if normalizes else values[:, :dimensions]


def unit(values: Floats) -> Floats:
    """Scale vectors to unit length."""
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    unit_values: Floats = values / np.maximum(norms, LEAST_NORM)
    return unit_values


def _row(value: Floats) -> bytes:
    """Return a JSON list of numbers with nine digits, which identify a float32."""
    if not np.isfinite(value).all():
        return dumps(value.tolist())
    return ("[" + ",".join(["%.9g"] * len(value)) % tuple(value.tolist()) + "]").encode()


def _base64(value: Floats) -> bytes:
    return b'"%s"' % base64.b64encode(value.astype("<f4").tobytes())
