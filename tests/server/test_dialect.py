"""A new API format is one file: llama.cpp's `/completion`, implemented here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from threading import current_thread
from typing import Any, cast

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import Field
from servers import Running, serving, wait_until
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import Request
from penstock.engine.handle import Choice
from penstock.engine.request import Event, Finish
from penstock.server.dialect import Dialect
from penstock.server.forms import RequestForm, grammar_for
from penstock.server.problems import BadRequest, Problem, TimedOut
from penstock.server.request_body import reading_aside
from penstock.server.service import Service
from penstock.server.sse import data
from penstock.server.tools.calls import CallGrammar

PROMPT = "The code of the amber falcon is"


class CompletionForm(RequestForm):
    prompt: str
    n_predict: int = Field(16, ge=1)
    stream: bool = False
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None


class LlamaCompletion(Dialect):
    """One request of llama.cpp's interface."""

    path = "/completion"

    def __init__(self, service: Service, body: CompletionForm) -> None:
        super().__init__(service, streams=body.stream)
        self.body = body

    def read(self) -> None:
        self.prompt = self.service.prompts.encode(self.body.prompt)
        if not self.prompt:
            raise BadRequest("prompt has no tokens", param="prompt")

    def binds(self) -> bool:
        return self.body.json_schema is not None

    def rules(self) -> CallGrammar:
        return CallGrammar(grammar_for(self.body.json_schema, "json_schema"))

    def requests(self) -> Sequence[Request]:
        body = self.body
        return [
            Request(
                prompt=self.prompt,
                max_tokens=body.n_predict,
                goes_on=True,
                grammar=self.rule.grammar,
                ignore_eos=body.ignore_eos,
            )
        ]

    async def usage(self) -> dict[str, Any]:
        used = self.answering.usage()
        return {"tokens_evaluated": used.prompt_tokens, "tokens_predicted": used.completion_tokens}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {"content": choices[0].text, "stop": True, **usage}

    def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
        yield data({"content": "".join(event.text for event in events), "stop": False})

    def end(self, usage: dict[str, Any]) -> Iterator[bytes]:
        yield data({"content": "", "stop": True, **usage})

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield data({"error": {"code": problem.status, "message": problem.message}})


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=reading_aside(service))

    @routes.post(LlamaCompletion.path)
    async def completion(body: CompletionForm, http: HttpRequest) -> Response:
        return await LlamaCompletion(service, body).respond(http)

    return routes


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        cast(FastAPI, running.server.config.app).include_router(router(running.service))
        yield running


def post(server: Running, path: str = "/completion", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"prompt": PROMPT, **body}, timeout=60)


def read(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_custom_api_format_matches_other_apis(server: Running) -> None:
    other = post(server, "/v1/completions", max_tokens=16, temperature=0).json()
    whole = post(server)
    assert whole.status_code == 200 and whole.headers["content-type"] == "application/json"
    assert whole.json() == {
        "content": other["choices"][0]["text"],
        "stop": True,
        "tokens_evaluated": other["usage"]["prompt_tokens"],
        "tokens_predicted": other["usage"]["completion_tokens"],
    }
    streamed = post(server, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *parts, last = read(streamed.iter_lines())
    assert "".join(part["content"] for part in parts) == whole.json()["content"] != ""
    assert not any(part["stop"] for part in parts)
    assert last == {**whole.json(), "content": ""}


@pytest.mark.parametrize("stream", [False, True])
def test_custom_api_format_enforces_grammar(server: Running, stream: bool) -> None:
    answer = post(server, json_schema={"enum": ["teal"]}, stream=stream)
    parts = [*read(answer.iter_lines())] if stream else [answer.json()]
    assert "".join(part["content"] for part in parts) == '"teal"'


@pytest.mark.parametrize("stream", [False, True])
def test_unreadable_body_is_refused_before_stream(server: Running, stream: bool) -> None:
    for body in ({"prompt": ""}, {"n_predict": 0}, {"json_schema": {"type": "odd"}}):
        assert post(server, stream=stream, **body).status_code == 400
    assert server.service.open_requests == 0


def test_stream_error_has_custom_api_format(server: Running) -> None:
    body = {"prompt": PROMPT, "n_predict": 20_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=60) as answer:
        events = read(answer.iter_lines())
        assert next(events)["stop"] is False
        server.service.fail_all(TimedOut())
        *_, last = events
    assert last == {"error": {"code": 504, "message": str(TimedOut())}}
    wait_until(lambda: server.service.open_requests == 0)


def test_disconnect_cancels_request(server: Running) -> None:
    body = {"prompt": PROMPT, "n_predict": 20_000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{server.url}/completion", json={**body, "stream": True}, timeout=60
    ) as answer:
        events = read(answer.iter_lines())  # which closes the answer when it is dropped
        assert next(events)["stop"] is False
        assert server.service.open_requests == 1
    wait_until(lambda: server.service.open_requests == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/completion", json=body, timeout=0.3)
    wait_until(lambda: server.service.open_requests == 0)
    recent = server.service.recent
    assert recent[-1].state == recent[-2].state == "cancelled"


def test_slow_events_are_written_in_worker_thread(server: Running) -> None:
    threads: set[tuple[str, bool]] = set()

    class Long(LlamaCompletion):
        def is_long_chunk(self, events: Sequence[Event]) -> bool:
            return not any(isinstance(event, Finish) for event in events)

        def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
            threads.add((current_thread().name, self.is_long_chunk(events)))
            yield from super().chunk(events)

    routes = APIRouter()

    @routes.post("/long")
    async def completion(body: CompletionForm, http: HttpRequest) -> Response:
        return await Long(server.service, body).respond(http)

    cast(FastAPI, server.server.config.app).include_router(routes)
    *parts, _ = read(post(server, "/long", stream=True).iter_lines())
    assert "".join(part["content"] for part in parts) == post(server).json()["content"]
    names = {is_long: name for name, is_long in threads}
    assert len(threads) == 2 and names[True].startswith("penstock-long-prompts")
    assert names[False] == "test-server"
