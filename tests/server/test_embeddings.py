"""Embeddings over HTTP: OpenAI's client, lengths, model kinds, and turns beside a text model."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from patience import SOON
from served_pool import Address, serve_pool, spec
from servers import settings, wait_until
from tiny_encoders import WIDTH, TinyEncoder, write_encoder

from penstock.encoders.encoder import expected_bytes, load_encoder
from penstock.pool.open_model import PoolMember
from penstock.recall import MODEL_PATH
from penstock.server.attached_models import ServedModel

LIMIT = 130_000_000
CLOSE = {"atol": 3e-6, "rtol": 3e-5}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return write_encoder(tmp_path_factory.mktemp("encoders") / "tiny", normalizes=True)


def member(tiny: TinyEncoder) -> PoolMember:
    return PoolMember(
        name="tiny",
        load=lambda limit: load_encoder(tiny.folder),
        expected_bytes=lambda limit: expected_bytes(tiny.folder, limit),
        encodes=True,
    )


@pytest.fixture(scope="module")
def served(tiny: TinyEncoder) -> Iterator[Address]:
    """A text model and an encoder."""
    kinds = {"recall": ("chat", "completion"), "tiny": ("embedding",)}
    models = [ServedModel(name, settings(), kinds=kinds[name]) for name in kinds]
    specs = [spec("recall", MODEL_PATH), member(tiny)]
    with serve_pool(models, specs, LIMIT, prompt_bytes=12_000_000) as address:
        yield address


@pytest.fixture
def client(served: Address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def post(served: Address, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json=body, timeout=SOON)


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


TEXTS = ["the gate holds back water", "amber falcon", "what is the code 1 2 3 4"]


def test_openai_client_gets_embeddings(client: openai.OpenAI, tiny: TinyEncoder) -> None:
    """The client asks for base64 by default, and decodes it."""
    expected = np.stack([tiny.vector(tiny.tokens(text)) for text in TEXTS])
    for more in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="tiny", input=TEXTS, user="u", **more)
        computed = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(computed, expected, **CLOSE)
        assert [item.index for item in answer.data] == [0, 1, 2]
        tokens = sum(len(tiny.tokens(text)) for text in TEXTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
        assert answer.model == "tiny"
    one = client.embeddings.create(model="tiny", input=TEXTS[1])
    np.testing.assert_allclose(one.data[0].embedding, expected[1], **CLOSE)


def test_float_and_base64_embeddings_are_equal(served: Address) -> None:
    floats = post(served, "/v1/embeddings", model="tiny", input=TEXTS).json()["data"]
    coded = post(
        served, "/v1/embeddings", model="tiny", input=TEXTS, encoding_format="base64"
    ).json()["data"]
    for of_floats, of_code in zip(floats, coded, strict=True):
        numbers = np.frombuffer(base64.b64decode(of_code["embedding"]), "<f4")
        assert np.array_equal(np.array(of_floats["embedding"], np.float32), numbers)


def test_input_may_be_token_ids(served: Address, tiny: TinyEncoder) -> None:
    tokens = [tiny.tokens(text) for text in TEXTS]
    expected = post(served, "/v1/embeddings", model="tiny", input=TEXTS).json()["data"]
    several = post(served, "/v1/embeddings", model="tiny", input=tokens).json()["data"]
    one = post(served, "/v1/embeddings", model="tiny", input=tokens[1]).json()["data"]
    for computed, text in ((several, expected), (one, expected[1:2])):
        for got, wanted in zip(computed, text, strict=True):
            np.testing.assert_allclose(got["embedding"], wanted["embedding"], **CLOSE)
    error = refusal(post(served, "/v1/embeddings", model="tiny", input=[[5, 99]]))
    assert "token 99 does not exist" in error["message"] and error["param"] == "input"


def test_truncated_dimensions_are_normalized(served: Address, tiny: TinyEncoder) -> None:
    body = {"model": "tiny", "input": TEXTS[0], "dimensions": 5}
    computed = post(served, "/v1/embeddings", **body).json()["data"][0]["embedding"]
    first = tiny.vector(tiny.tokens(TEXTS[0]))[:5]
    np.testing.assert_allclose(computed, first / np.linalg.norm(first), **CLOSE)
    error = refusal(post(served, "/v1/embeddings", **{**body, "dimensions": 17}))
    assert "17 exceeds the 16" in error["message"] and error["param"] == "dimensions"


def test_too_long_texts_are_refused_or_truncated(served: Address, tiny: TinyEncoder) -> None:
    words = ("the gate holds back water " * 6).split()
    texts = [TEXTS[0], " ".join(words)]
    error = refusal(post(served, "/v1/embeddings", model="tiny", input=texts))
    assert error["message"].startswith("input.1: 32 tokens are more than")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input.1")
    for truncate, kept in ((True, words[:22]), ("END", words[:22]), ("start", words[-22:])):
        answer = post(served, "/v1/embeddings", model="tiny", input=texts, truncate=truncate).json()
        expected = tiny.vector(tiny.tokens(" ".join(kept)))
        np.testing.assert_allclose(answer["data"][1]["embedding"], expected, **CLOSE)
        assert answer["truncated"] == [{"index": 1, "tokens": 32}]
        assert answer["usage"]["prompt_tokens"] == 24 + len(tiny.tokens(TEXTS[0]))
    refusal(post(served, "/v1/embeddings", model="tiny", input=texts, truncate="NONE"))
    refusal(post(served, "/v1/embeddings", model="tiny", input=[[5] * 25]))
    whole = post(served, "/v1/embeddings", model="tiny", input=texts[:1], truncate=True).json()
    assert "truncated" not in whole


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "the list is empty"),
        ({"input": [[]]}, "a list of token numbers"),
        ({"input": [1.5]}, "a list of texts"),
        ({}, "input"),
        ({"input": ["a"] * 2_049}, "1 to 2,048 texts"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate": "middle"}, "truncate"),
    ],
)
def test_invalid_bodies_are_refused(served: Address, body: dict[str, Any], words: str) -> None:
    assert words in refusal(post(served, "/v1/embeddings", model="tiny", **body))["message"]


def test_models_route_lists_model_kinds(served: Address) -> None:
    served.several.pool.unload("tiny").result(SOON)
    for load in (False, True):
        if load:
            served.several.pool.load("tiny").result(SOON)
        models = served.models()
        assert models["tiny"]["kinds"] == ["embedding"]
        assert models["recall"]["kinds"] == ["chat", "completion"]
    assert models["tiny"]["dimensions"] == WIDTH and models["tiny"]["context_length"] == 24


def test_text_requests_to_embedding_model_are_refused(served: Address) -> None:
    messages = [{"role": "user", "content": "hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": "hello"},
        "/v1/responses": {"input": "hello"},
    }
    for path, body in bodies.items():
        error = refusal(post(served, path, model="tiny", **body))
        assert "tiny is an encoder" in error["message"] and "/v1/embeddings" in error["message"]
    other = refusal(post(served, "/v1/embeddings", model="recall", input="a"), 404)
    assert "embeddings are not served" in other["message"]


def test_request_without_model_uses_first_suitable_model(served: Address) -> None:
    """Also where none is loaded: the first model is no encoder."""
    assert post(served, "/v1/embeddings", input="gate").status_code == 200
    assert post(served, "/v1/completions", prompt="A", max_tokens=1).status_code == 200


def test_large_request_does_not_block_others(served: Address, client: openai.OpenAI) -> None:
    """Between batches of 2,048 long texts a short text and a chat are answered."""
    engine = served.several.pool.enter("tiny").result(SOON).engine
    served.several.pool.leave("tiny")
    long_text = "the gate holds back water " * 4
    done: list[float] = []

    def large() -> None:
        for _ in range(2):
            answer = client.embeddings.create(model="tiny", input=[long_text] * 2_048)
            assert len(answer.data) == 2_048
        done.append(time.monotonic())

    served.chat("recall")  # loaded
    thread = threading.Thread(target=large)
    thread.start()
    batches = engine.counts.batches
    wait_until(lambda: engine.counts.batches > batches)
    client.embeddings.create(model="tiny", input=TEXTS[0])
    short = time.monotonic()
    served.chat("recall")
    thread.join(SOON)
    assert short < done[0]
    assert engine.counts.batches - batches > 3  # it was divided


def test_disconnect_stops_computing_embeddings(served: Address) -> None:
    engine = served.several.pool.enter("tiny").result(SOON).engine
    served.several.pool.leave("tiny")
    rows, used = engine.counts.rows, served.several.memory.used_bytes
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/embeddings",
            json={"model": "tiny", "input": ["the gate holds back water " * 4] * 2_048},
            timeout=0.05,
        )
    wait_until(lambda: not any(state.open_requests for state in served.several.pool.states()))
    assert engine.counts.rows - rows < 2_048
    wait_until(lambda: served.several.memory.used_bytes == used)


def test_ollama_embed_route_matches_reference(served: Address, tiny: TinyEncoder) -> None:
    """Long texts are truncated by default, and vectors have length 1."""
    expected = np.stack([tiny.vector(tiny.tokens(text)) for text in TEXTS])
    answer = post(served, "/api/embed", model="tiny", input=TEXTS).json()
    np.testing.assert_allclose(answer["embeddings"], expected, **CLOSE)
    assert answer["model"] == "tiny" and answer["total_duration"] > 0
    assert answer["prompt_eval_count"] == sum(len(tiny.tokens(text)) for text in TEXTS)
    one = post(served, "/api/embed", model="tiny", input=TEXTS[0], dimensions=5).json()
    first = expected[0][:5] / np.linalg.norm(expected[0][:5])
    np.testing.assert_allclose(one["embeddings"], [first], **CLOSE)
    old = post(served, "/api/embeddings", model="tiny", prompt=TEXTS[0]).json()
    np.testing.assert_allclose(old["embedding"], expected[0], **CLOSE)
    long = "water " * 40
    cut = post(served, "/api/embed", model="tiny", input=long).json()
    np.testing.assert_allclose(
        cut["embeddings"][0], tiny.vector(tiny.tokens("water " * 22)), **CLOSE
    )
    refused = post(served, "/api/embed", model="tiny", input=long, truncate=False)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("input: 42 tokens are more than")
    assert post(served, "/api/embed", model="tiny", input=[]).json()["embeddings"] == []
    assert post(served, "/api/embeddings", model="tiny").json() == {"embedding": []}
    shown = post(served, "/api/show", model="tiny").json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["bert.embedding_length"] == WIDTH
    chat = post(served, "/api/chat", model="tiny", messages=[])
    assert chat.status_code == 400 and "encoder" in chat.json()["error"]


def test_metrics_count_embedded_texts_and_tokens(served: Address) -> None:
    post(served, "/v1/embeddings", model="tiny", input=TEXTS)
    text = httpx.get(f"{served.url}/metrics?model=tiny", timeout=SOON).text
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert float(values["penstock_encoder_texts_total"]) >= 3
    assert float(values["penstock_encoder_tokens_total"]) >= 20


def test_request_is_retried_after_encoder_is_unloaded(served: Address) -> None:
    expected = post(served, "/v1/embeddings", model="tiny", input=TEXTS).json()["data"]
    pool = served.several.pool
    answers: list[httpx.Response] = []
    with pool.turns.turn(pool):  # no batch is computed meanwhile
        asking = threading.Thread(
            target=lambda: answers.append(post(served, "/v1/embeddings", model="tiny", input=TEXTS))
        )
        asking.start()
        attached = pool.loaded()["tiny"].attached
        wait_until(lambda: bool(attached.service._answers))
        attached.give_way()
        wait_until(lambda: not answers and bool(attached.service._answers))
    asking.join(SOON)
    (answer,) = answers
    assert answer.status_code == 200 and answer.json()["data"] == expected
