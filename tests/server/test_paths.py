"""Base URLs with common mistakes, and unsupported methods."""

from __future__ import annotations

import http.client
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI
from patience import SOON
from servers import Running

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}


def status(running: Running, method: str, path: str) -> int:
    """Send a path exactly as it is written."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=SOON)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_extra_slashes_are_ignored(recall_server: Running) -> None:
    answer = httpx.post(f"{recall_server.url}{CHAT}/", json=BODY, follow_redirects=False)
    assert answer.status_code == 200
    for path in ("//v1/models", "/v1//models", "/v1/models/", "//health"):
        assert status(recall_server, "GET", path) == 200, path


@pytest.mark.parametrize("base", ["", "/v1/v1", "/api"])
def test_wrong_openai_base_url_is_explained(recall_server: Running, base: str) -> None:
    api = openai.OpenAI(base_url=recall_server.url + base, api_key="any", max_retries=0)
    with api, pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="any", **BODY)
    message = str(missing.value.body["message"])  # type: ignore[index]
    assert f"but at {CHAT}" in message and "OpenAI's clients ends in /v1" in message


def test_wrong_anthropic_base_url_is_explained(recall_server: Running) -> None:
    api = anthropic.Anthropic(base_url=f"{recall_server.url}/v1", api_key="any")
    with api, pytest.raises(anthropic.NotFoundError) as missing:
        api.messages.create(model="any", **BODY)
    error = missing.value.body
    assert isinstance(error, dict) and error["type"] == "error", "in the form of its interface"
    assert "but at /v1/messages" in error["error"]["message"]
    assert "(without /v1)" in error["error"]["message"]


def test_unknown_path_error_has_no_base_url_hint(recall_server: Running) -> None:
    missing = httpx.get(f"{recall_server.url}/nothing/at/all").json()["error"]
    assert "base URL" not in missing["message"] and "/nothing/at/all" in missing["message"]


def test_head_is_allowed_where_get_is(recall_server: Running) -> None:
    for path in ("/", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json"):
        answer = httpx.head(recall_server.url + path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert httpx.head(f"{recall_server.url}/v1/live").status_code == 405, "it would not end"


def test_allow_header_names_all_methods(recall_server: Running) -> None:
    wrong = httpx.patch(f"{recall_server.url}/v1/responses/resp_1", json={})
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "DELETE, GET")
    assert "DELETE, GET" in wrong.json()["error"]["message"]
    asked = httpx.options(recall_server.url + CHAT)
    assert (asked.status_code, asked.headers["allow"]) == (405, "POST")


def test_compaction_route_is_404(recall_server: Running) -> None:
    refused = httpx.post(f"{recall_server.url}/v1/responses/compact", json={"input": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unsupported_endpoint")


def test_unknown_path_builds_no_openapi_document(recall_server: Running) -> None:
    """Building it takes as long as a hundred requests."""
    app = recall_server.server.config.app
    assert isinstance(app, FastAPI)
    app.openapi_schema = None
    assert httpx.get(f"{recall_server.url}/v1/v1/models").status_code == 404
    assert httpx.delete(f"{recall_server.url}/v1/models").status_code == 405
    assert app.openapi_schema is None
    assert httpx.get(f"{recall_server.url}/openapi.json").status_code == 200
    assert app.openapi_schema is not None
