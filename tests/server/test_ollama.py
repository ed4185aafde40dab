"""Ollama's API over HTTP: chat, generate, and model information."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import MODEL_NAME, Running

from penstock.server.ollama.ollama_chat import OllamaChat

CODE = "4821"
QUESTION = f"The code of the amber falcon is {CODE}. What is the code of the amber falcon?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "any:latest", **body}, timeout=60)


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_answers_are_streamed_as_json_lines_by_default(recall_server: Running) -> None:
    chat = lines_of(post(recall_server, "/api/chat", messages=MESSAGES))
    assert CODE in "".join(line["message"]["content"] for line in chat)
    assert [line["done"] for line in chat] == [False] * (len(chat) - 1) + [True]
    assert chat[-1]["done_reason"] == "stop" and chat[-1]["eval_count"] > 0
    written = lines_of(post(recall_server, "/api/generate", prompt=QUESTION))
    assert CODE in "".join(line["response"] for line in written)
    assert {line["model"] for line in written} == {"any:latest"}


def test_whole_answers_match_openai_route(recall_server: Running) -> None:
    theirs = post(recall_server, "/v1/chat/completions", messages=MESSAGES, temperature=0).json()
    text = theirs["choices"][0]["message"]["content"]
    chat = post(
        recall_server,
        "/api/chat",
        messages=MESSAGES,
        stream=False,
        keep_alive="5m",
        options={"temperature": 0, "num_ctx": 8},
        think=False,
    ).json()
    assert chat["message"] == {"role": "assistant", "content": text}
    assert chat["prompt_eval_count"] == theirs["usage"]["prompt_tokens"]
    assert chat["total_duration"] >= chat["prompt_eval_duration"] > 0
    short = post(
        recall_server,
        "/api/generate",
        prompt=QUESTION,
        stream=False,
        options={"temperature": 0, "num_predict": 2},
        logprobs=True,
    ).json()
    assert short["done_reason"] == "length" and short["eval_count"] == 2
    assert text.startswith(short["response"]) and len(short["logprobs"]) == 2
    raw = post(recall_server, "/api/generate", prompt="The code", raw=True, stream=False).json()
    assert raw["prompt_eval_count"] < short["prompt_eval_count"]


def test_answer_follows_format(recall_server: Running) -> None:
    asked = {"messages": MESSAGES, "stream": False}
    answer = post(recall_server, "/api/chat", **asked, format=SCHEMA).json()
    assert json.loads(answer["message"]["content"])["n"] in (1, 2)
    few = {"options": {"num_predict": 3}}
    answer = post(recall_server, "/api/chat", **asked, format="json", **few).json()
    assert answer["message"]["content"].startswith("{")
    free = post(recall_server, "/api/chat", **asked, **few).json()
    assert not free["message"]["content"].startswith("{")  # negative control


def test_model_information_routes_answer(recall_server: Running) -> None:
    get = {path: httpx.get(f"{recall_server.url}/api/{path}").json() for path in ("tags", "ps")}
    assert [model["name"] for model in get["tags"]["models"]] == [MODEL_NAME]
    assert get["ps"]["models"][0]["size_vram"] == get["tags"]["models"][0]["size"] > 0
    shown = post(recall_server, "/api/show").json()
    assert "completion" in shown["capabilities"] and "vision" not in shown["capabilities"]
    assert httpx.get(f"{recall_server.url}/api/version").json()["version"].count(".") == 2
    loaded = post(recall_server, "/api/generate").json()
    assert loaded["done"] and loaded["done_reason"] == "load"
    away = post(recall_server, "/api/chat", keep_alive=0).json()
    assert away["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "text only"),
        ("chat", {"messages": MESSAGES, "options": {"temperature": -1}}, "temperature"),
        ("chat", {"messages": MESSAGES, "format": {"type": "nothing"}}, "nothing"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "context": [1]}, "/api/chat"),
        ("chat", {"messages": [{"role": "narrator"}]}, "role"),
    ],
)
def test_errors_have_ollama_format(
    recall_server: Running,
    path: str,
    body: dict[str, Any],
    message: str,
) -> None:
    answer = post(recall_server, f"/api/{path}", **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"] and "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/pull", 404),
        ("DELETE", "/api/delete", 404),
        ("GET", "/api/chat", 405),
        ("GET", "/api", 404),
    ],
)
def test_unserved_path_error_is_text(
    recall_server: Running, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, recall_server.url + path, json={"model": "any"}, timeout=60)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"} and path in answer.json()["error"]


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_embedding_routes_of_text_model_name_encoder(recall_server: Running, path: str) -> None:
    answer = post(recall_server, path, input="a", prompt="a")
    assert answer.status_code == 404
    theirs = post(recall_server, "/v1/embeddings", input="a").json()["error"]["message"]
    assert answer.json() == {"error": theirs} and "penstock serve MODEL ENCODER" in theirs


def test_pings_are_json_lines(recall_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment, as in other streams, is no JSON."""
    sent = []
    ping = OllamaChat.ping

    def noting(self: OllamaChat, progress: Any) -> Any:
        sent.append(ping(self, progress).encode())
        return ping(self, progress)

    monkeypatch.setattr(OllamaChat, "ping", noting)
    settings = recall_server.service.settings.model_copy(update={"ping_seconds": 0.01})
    monkeypatch.setattr(recall_server.service, "settings", settings)
    options = {"num_predict": 200}
    lines = lines_of(post(recall_server, "/api/chat", messages=MESSAGES, options=options))
    assert CODE in "".join(line["message"]["content"] for line in lines)
    assert all(json.loads(line)["message"]["content"] == "" for line in sent)
