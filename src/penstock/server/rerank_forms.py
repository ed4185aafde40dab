"""Request and response formats of reranking (Cohere, Jina) and scoring (vLLM)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import Field, model_validator

from penstock.plurals import counted
from penstock.server.forms import MOST_TEXTS, Each, Name, RequestForm, TruncateForm
from penstock.server.problems import BadRequest

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")


class DocumentForm(RequestForm):
    """A document given as an object with its text."""

    text: str


Document: TypeAlias = str | DocumentForm


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of pairs of texts."""

    values: Sequence[float]
    tokens: int
    truncated: Sequence[dict[str, int]] = ()


class RerankRequest(RequestForm):
    """The body of `POST /v1/rerank`. Long documents are truncated, unless `truncate` is false."""

    model: Name | None = None
    query: str
    documents: Each[Document] = Field(min_length=1, max_length=MOST_TEXTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    truncate: TruncateForm = True

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def answer(self, model: str, scores: PairScores) -> dict[str, Any]:
        """Return the response, with documents sorted by score, highest first."""
        values, texts = scores.values, self.texts
        order = sorted(range(len(values)), key=lambda index: -values[index])
        results = [
            {
                "index": index,
                "relevance_score": values[index],
                **({"document": {"text": texts[index]}} if self.return_documents else {}),
            }
            for index in order[: self.top_n]
        ]
        answer = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": model,
            "results": results,
            "meta": {"billed_units": {"search_units": 1}},
            "usage": {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens},
        }
        return answer | ({"truncated": list(scores.truncated)} if scores.truncated else {})


class ScoreRequest(RequestForm):
    """The body of `POST /v1/score`: one text and several, or two lists of equal length."""

    model: Name | None = None
    text_1: str | Each[str]
    text_2: str | Each[str]
    truncate: TruncateForm = True

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, body: Any) -> Any:
        """Accept vLLM's newer names of the fields, `queries` and `documents`."""
        if not isinstance(body, dict):
            return body
        names = {"queries": "text_1", "documents": "text_2"}
        return {names.get(name, name): value for name, value in body.items()}

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        first = [self.text_1] if isinstance(self.text_1, str) else list(self.text_1)
        second = [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)
        if not first or not second or len(second) > MOST_TEXTS:
            raise BadRequest(f"text_2: 1 to {MOST_TEXTS:,} texts", param="text_2")
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise BadRequest(
                f"text_1 has {counted(len(first), 'text')}, text_2 {len(second):,}: give one, or "
                "as many",
                param="text_1",
            )
        return first, second

    def answer(self, model: str, created: int, scores: PairScores) -> dict[str, Any]:
        answer = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": created,
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores.values)
            ],
            "usage": {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens},
        }
        return answer | ({"truncated": list(scores.truncated)} if scores.truncated else {})
