"""Reranking and scores by a cross-encoder, by cosine, and by a text model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from patience import SOON
from served_pool import Address, serve_pool
from servers import Running, settings
from tiny_encoders import TinyEncoder, write_encoder

from penstock.encoders.encoder import expected_bytes, load_encoder
from penstock.pool.open_model import PoolMember
from penstock.server.attached_models import ServedModel

QUERY = "what holds back water"
DOCUMENTS = ["amber falcon", "the gate holds back the river", "code 1 2 3 4"]
CLOSE = {"atol": 3e-6, "rtol": 3e-5}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyEncoder]:
    folder = tmp_path_factory.mktemp("encoders")
    return {
        "reranker": write_encoder(folder / "reranker", reranks=True, prefix="bert."),
        "embedder": write_encoder(folder / "embedder", normalizes=False),
    }


@pytest.fixture(scope="module")
def served(encoders: dict[str, TinyEncoder]) -> Iterator[Address]:
    kinds = {"reranker": ("rerank",), "embedder": ("embedding",)}
    models = [ServedModel(name, settings(), kinds=kinds[name]) for name in kinds]
    specs = [_member(name, tiny.folder) for name, tiny in encoders.items()]
    with serve_pool(models, specs, 60_000_000) as address:
        yield address


def _member(name: str, folder: Path) -> PoolMember:
    return PoolMember(
        name=name,
        load=lambda limit: load_encoder(folder),
        expected_bytes=lambda limit: expected_bytes(folder, limit),
        encodes=True,
    )


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=SOON)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_score(
    served: Address, encoders: dict[str, TinyEncoder], path: str
) -> None:
    """Cohere's and Jina's form: strings or objects, `top_n`, and the documents on demand."""
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    expected = [encoders["reranker"].score(QUERY, text) for text in DOCUMENTS]
    answer = post(served.url, path, **body).json()
    assert [r["index"] for r in answer["results"]] == np.argsort(expected)[::-1].tolist()
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
        assert "document" not in result
    objects = [{"text": text} for text in DOCUMENTS]
    few = post(
        served.url, path, **{**body, "documents": objects}, top_n=2, return_documents=True
    ).json()
    assert [(r["index"], r["document"]["text"]) for r in few["results"]] == [
        (r["index"], DOCUMENTS[r["index"]]) for r in answer["results"][:2]
    ]
    assert answer["usage"]["total_tokens"] > 0 and answer["model"] == "reranker"


def test_score_accepts_one_query_or_one_per_document(
    served: Address, encoders: dict[str, TinyEncoder]
) -> None:
    one = post(served.url, "/v1/score", model="reranker", text_1=QUERY, text_2=DOCUMENTS).json()
    expected = [encoders["reranker"].score(QUERY, text) for text in DOCUMENTS]
    np.testing.assert_allclose([d["score"] for d in one["data"]], expected, **CLOSE)
    several = post(
        served.url, "/score", model="reranker", queries=[QUERY] * 3, documents=DOCUMENTS
    ).json()
    assert [d["score"] for d in several["data"]] == pytest.approx(expected, abs=1e-5)
    refused = post(served.url, "/v1/score", model="reranker", text_1=[QUERY] * 2, text_2=DOCUMENTS)
    assert refused.status_code == 400
    assert "text_1 has 2 texts, text_2 3" in refused.json()["error"]["message"]


def test_embedding_model_scores_by_cosine_and_refuses_rerank(
    served: Address, encoders: dict[str, TinyEncoder]
) -> None:
    tiny = encoders["embedder"]
    query, *others = (tiny.vector(tiny.tokens(text)) for text in (QUERY, *DOCUMENTS))
    expected = [query @ o / np.linalg.norm(query) / np.linalg.norm(o) for o in others]
    answer = post(served.url, "/v1/score", model="embedder", text_1=QUERY, text_2=DOCUMENTS).json()
    np.testing.assert_allclose([d["score"] for d in answer["data"]], expected, **CLOSE)
    refused = post(served.url, "/v1/rerank", model="embedder", query=QUERY, documents=DOCUMENTS)
    assert refused.status_code == 400
    assert "/v1/score" in refused.json()["error"]["message"]
    swapped = post(served.url, "/v1/embeddings", model="reranker", input="gate")
    assert swapped.status_code == 400
    assert "/v1/rerank" in swapped.json()["error"]["message"]


def test_long_documents_are_truncated_and_reported(served: Address) -> None:
    long = [DOCUMENTS[0], "the gate holds back water " * 9]
    body = {"model": "reranker", "query": QUERY, "documents": long}
    answer = post(served.url, "/v1/rerank", **body).json()
    assert answer["truncated"] == [{"index": 1, "tokens": 52}]
    refused = post(served.url, "/v1/rerank", **body, truncate=False).json()["error"]
    assert refused["message"].startswith("documents.1: 52 tokens are more than")
    query = post(served.url, "/v1/rerank", **{**body, "query": "gate " * 30}).json()["error"]
    assert query["message"].startswith("query: 33 tokens")


def test_text_model_reranks_by_probability_of_yes(recall_server: Running) -> None:
    """In order, and the same number alone, together and as a score."""
    body = {"query": "the code of the amber falcon", "documents": DOCUMENTS}
    answer = post(recall_server.url, "/v1/rerank", **body).json()
    scores = {r["index"]: r["relevance_score"] for r in answer["results"]}
    ordered = [result["relevance_score"] for result in answer["results"]]
    assert sorted(ordered, reverse=True) == ordered
    one = post(recall_server.url, "/v1/rerank", **{**body, "documents": DOCUMENTS[1:2]}).json()
    assert one["results"][0]["relevance_score"] == pytest.approx(scores[1], abs=1e-5)
    scored = post(recall_server.url, "/v1/score", text_1=body["query"], text_2=DOCUMENTS).json()[
        "data"
    ]
    assert [d["score"] for d in scored] == pytest.approx([scores[i] for i in range(3)], abs=1e-5)
