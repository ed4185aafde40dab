"""The OpenAPI document against the server: no request gives a 5xx.

`HYPOTHESIS_PROFILE=soak` asks much longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from patience import SOON
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from servers import Running, serving, wait_until

from penstock.server.problems import OLLAMA_PATHS, is_under
from penstock.server.rerank_forms import RERANK_PATHS, SCORE_PATHS

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": not SOAK,
    "suppress_health_check": list(HealthCheck),
}
MOST_TOKENS = 8
"""Of an answer: what is looked at here is not what a model says."""

ENDLESS = "GET /v1/live"
"""A stream that does not end; tests/server/test_live.py reads it."""
OPERATIONS = (
    "GET /health",
    "GET /metrics",
    "GET /ready",
    "GET /v1/cache/stats",
    "GET /v1/cache/tree",
    "GET /v1/models",
    "GET /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/responses/compact",
    "POST /v1/responses/input_tokens",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/models/{model_id}",
    "DELETE /v1/cache",
    "POST /v1/cache/explain",
    "POST /v1/decisions",
    "POST /v1/systemone",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /rerank",
    "POST /v1/score",
    "POST /score",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/show",
    "GET /api/ps",
    "GET /api/tags",
    "GET /api/version",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "GET /v1/sessions",
    "POST /v1/sessions/{name}/save",
    "POST /v1/sessions/{name}/load",
    "DELETE /v1/sessions/{name}",
    "GET /tokenizer_info",
    "POST /apply-template",
    "POST /detokenize",
    "POST /tokenize",
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages": {
        "model": "any",
        "max_tokens": MOST_TOKENS,
        "messages": [{"role": "user", "content": "Hello!"}],
    },
    "/v1/messages/count_tokens": {
        "model": "any",
        "messages": [{"role": "user", "content": "Hello!"}],
    },
    "/v1/cache/explain": {"prompt": "Hello"},
    "/v1/decisions": {
        "input": "Hello",
        "questions": [{"type": "predicate", "instructions": "It is a word."}],
    },
    "/v1/systemone": {
        "state": "Hello",
        "questions": {"a": {"type": "choice", "criteria": {"word": None, "number": None}}},
    },
    **{path: {"query": "Hello", "documents": ["a", "b"]} for path in RERANK_PATHS},
    **{path: {"text_1": "Hello", "text_2": ["a", "b"]} for path in SCORE_PATHS},
    "/api/chat": {"messages": [{"role": "user", "content": "Hello!"}]},
    "/api/generate": {"prompt": "Hello"},
    "/api/show": {"model": "any"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [7, 8]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello!"}]},
}
"""A right body for each route that takes one."""
FIELDS = (
    *("model", "messages", "prompt", "input", "system", "max_tokens", "max_completion_tokens"),
    *("max_output_tokens", "stream", "stop", "stop_sequences", "n", "best_of", "seed", "echo"),
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "stream_options", "tools"),
    *("tool_choice", "response_format", "text", "instructions", "chat_template_kwargs", "salt"),
    *("prompt_cache_key", "cache_salt", "cache_control", "thinking", "output_config", "suffix"),
    *("thread", "previous_response_id", "store", "include", "reasoning", "metadata", "functions"),
    *("function_call", "parallel_tool_calls", "stop_token_ids", "prediction", "return_progress"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("prompt_logprobs", "reasoning_effort", "tokens", "content", "add_special_tokens"),
    *("min_tokens", "include_stop_str_in_output", "skip_special_tokens", "options", "format"),
    *("think", "keep_alive", "images", "raw", "questions", "state"),
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A fast server that must be consistent afterwards."""
    folder = tmp_path_factory.mktemp("cold")
    cold = {"ssd_cache_dir": folder / "blocks"}
    small = {"max_tokens": MOST_TOKENS, "max_depth": 32, "session_dir": folder / "sessions"}
    with serving(engine=cold, **small) as running:
        yield running
        stats = running.service.engine.stats
        wait_until(lambda: stats().running + stats().waiting == 0, SOON)
        running.service.engine.clear()
        running.service.engine.check()
        answer = httpx.post(f"{running.url}/v1/messages", json=BODIES["/v1/messages"])
        assert answer.status_code == 200


@pytest.fixture(scope="module")
def http(api: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=SOON) as client:
        yield client


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        yield made


@pytest.fixture(scope="module")
def schema(api: Running) -> Any:
    return schemathesis.openapi.from_url(f"{api.url}/openapi.json")


def operations(schema: Any) -> dict[str, Any]:
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


def test_every_operation_is_covered(schema: Any) -> None:
    assert set(operations(schema)) - {ENDLESS} == set(OPERATIONS)


CASES = [
    *((name, GenerationMode.POSITIVE) for name in OPERATIONS),
    # What takes nothing but a name, or nothing at all, cannot be asked wrongly.
    *((f"POST {path}", GenerationMode.NEGATIVE) for path in BODIES),
    ("GET /v1/cache/tree", GenerationMode.NEGATIVE),
    ("GET /v1/responses/{response_id}/input_items", GenerationMode.NEGATIVE),
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_request_gives_5xx(
    schema: Any, session: requests.Session, name: str, mode: GenerationMode
) -> None:
    operation = operations(schema)[name]
    examples = 1
    if operation.body or operation.path_parameters or operation.query:
        examples = 400 if SOAK else 6
    checks = [
        response_schema_conformance,
        content_type_conformance,
        status_code_conformance,
        not_a_server_error,
    ]

    @settings(max_examples=examples, **SETTINGS)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        shorten(case.body)
        response = case.call(session=session, timeout=SOON)
        case.validate_response(response, checks=checks)

    run()


def shorten(body: Any) -> None:
    """Limit tokens and choices, so that a thousand requests take less than an hour."""
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
        value = body.get(name)
        if isinstance(value, int | float) and value > MOST_TOKENS:
            body[name] = MOST_TOKENS


# ---- what no document describes


def send(http: httpx.Client, path: str, body: bytes) -> httpx.Response:
    """Send arbitrary bytes; check that the server stays consistent."""
    headers = {"content-type": "application/json"}
    answer = http.post(path, content=body, headers=headers)
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error if is_under(OLLAMA_PATHS, path) else error["message"]
    return answer


@pytest.mark.parametrize("path", BODIES)
def test_random_bytes_give_no_5xx(http: httpx.Client, path: str) -> None:
    @settings(max_examples=300 if SOAK else 12, **SETTINGS)
    @given(body=st.binary(max_size=200))
    @example(b"")
    @example(b"\xff\xfe{\x00}\x00")
    @example(b'\xef\xbb\xbf{"prompt": "Hello"}')
    @example(b'{"prompt": "\xff\xfe"}')
    @example(b'{"prompt": "\xed\xa0\x80"}')
    @example(b'{"prompt": "a", "prompt": 1, "messages": {}}')
    @example(b'{"messages": [}')
    @example(b"null")
    @example(b"0")
    @example(b'"prompt"')
    def run(body: bytes) -> None:
        send(http, path, body)

    run()


@pytest.mark.parametrize("path", BODIES)
def test_corrupted_bodies_give_no_5xx(http: httpx.Client, path: str) -> None:
    good = json.dumps(BODIES[path]).encode()

    @settings(max_examples=300 if SOAK else 12, **SETTINGS)
    @given(at=st.integers(0, len(good)), cut=st.integers(0, 4), rubbish=st.binary(max_size=8))
    def run(at: int, cut: int, rubbish: bytes) -> None:
        send(http, path, good[:at] + rubbish + good[at + cut :])

    run()


NUMBERS = (
    *("1e999", "-1e999", "NaN", "Infinity", "-0", "0.1e-400", "1e308", "-1", "3.5", "4294967296"),
    *("9" * 19, "9" * 400, "9" * 5_000, "-" + "9" * 5_000, "1." + "0" * 5_000, "2147483648"),
)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:20])
def test_huge_numbers_give_no_5xx(http: httpx.Client, path: str, number: str) -> None:
    for field in ("seed", "temperature", "top_k", "n", "logprobs", "logit_bias", "prompt"):
        body = {**BODIES[path], "field": 0}
        text = json.dumps(body).replace('"field": 0', f'"{field}": {number}')
        send(http, path, text.encode())
    nested = json.dumps({**BODIES[path], "logit_bias": {"3": 0}}).replace(": 0}", f": {number}}}")
    send(http, path, nested.encode())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["\ud800", "\x00", "auto", "user", "text", "", "\U0010ffff"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "a", ""]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("path", BODIES)
def test_random_field_values_give_no_5xx(http: httpx.Client, path: str) -> None:
    @settings(max_examples=1_000 if SOAK else 15, **SETTINGS)
    @given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
    @example(changes={"stop": ["\ud800"], "stop_sequences": ["\ud800"]})
    @example(changes={"cache_salt": "\ud800"})
    @example(changes={"tools": [{"type": "function", "function": {"name": "\ud800"}}]})
    @example(changes={"prompt": "\x00" * 10})
    @example(changes={"prompt": [0, 2**31 - 1]})
    @example(changes={"prompt": ["", ""]})
    @example(changes={"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}})
    @example(changes={"chat_template_kwargs": {"messages": 1, "self": 2, "tokenize": True}})
    @example(changes={"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}})
    def run(changes: dict[str, Any]) -> None:
        body = {**BODIES[path], **changes}
        shorten(body)
        send(http, path, json.dumps(body).encode())

    run()


def test_client_chat_template_is_refused(http: httpx.Client) -> None:
    """A template is a program."""
    arguments = {"chat_template": "{% set x = 1 %}"}
    body = {**BODIES["/v1/chat/completions"], "chat_template_kwargs": arguments}
    answer = send(http, "/v1/chat/completions", json.dumps(body).encode())
    assert answer.status_code == 400
    assert "chat_template cannot be set" in answer.json()["error"]["message"]
    body["chat_template_kwargs"] = {"a_word_of_the_template": 1}
    assert send(http, "/v1/chat/completions", json.dumps(body).encode()).status_code == 200
