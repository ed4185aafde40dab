"""Required calls of tools whose schemas have references, recursion, or unenforceable rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from parrot import parrot
from patience import SOON
from servers import Running, serving

from penstock.engine.model.constraint import GRAMMAR_BYTES, json_schema_grammar
from penstock.server.tools.tool_schemas import Arguments, closed

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/Place"}, "back": {"$ref": "#/definitions/Back"}},
    "required": ["to", "back"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
    "definitions": {"Back": {"enum": ["yes", "no"]}},
}
"""As pydantic and zod write nested models."""
EXOTIC = {
    "type": "object",
    "properties": {
        "uniqueItems": {"enum": ["a"]},
        "list": {"type": "array", "uniqueItems": True, "items": {"const": "b"}, "maxItems": 2},
        "word": {"type": "string", "format": "word-like", "not": {"const": "x"}, "maxLength": 3},
    },
    "required": ["uniqueItems", "list", "word"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(*parrot(tmp_path_factory.mktemp("parrot"), "Hello")) as running:
        yield running


def asked(running: Running, path: str, schemas: dict[str, Any], choice: Any) -> httpx.Response:
    chat = path.endswith("completions")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        if chat
        else {"type": "function", "name": name, "parameters": schema}
        if path.endswith("responses")
        else {"name": name, "input_schema": schema}
        for name, schema in schemas.items()
    ]
    messages = [{"role": "user", "content": "look"}]
    prompt = {"input": "look"} if path.endswith("responses") else {"messages": messages}
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {"model": "any", **prompt, "tools": tools, "tool_choice": choice, limit: 200}
    return httpx.post(f"{running.url}{path}", json=body, timeout=SOON)


def arguments(path: str, answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if path.endswith("completions"):
        (call,) = body["choices"][0]["message"]["tool_calls"]
        return json.loads(call["function"]["arguments"])
    if path.endswith("responses"):
        return json.loads(body["output"][-1]["arguments"])
    return body["content"][-1]["input"]


PATHS = {
    "/v1/chat/completions": "required",
    "/v1/responses": "required",
    "/v1/messages": {"type": "any"},
}


@pytest.mark.parametrize("path", PATHS)
def test_schema_definitions_are_resolved(running: Running, path: str) -> None:
    answer = asked(running, path, {"travel": NESTED}, PATHS[path])
    given = arguments(path, answer)
    assert set(given) == {"to", "back"} and given["back"] in ("yes", "no")
    assert set(given["to"]) == {"city"} and given["to"]["city"] in ("Bern", "Oslo")
    assert "x-penstock-unenforced" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
def test_unenforced_rules_are_reported(running: Running, path: str) -> None:
    """The rest of the schema, and other tools' schemas, are enforced."""
    answer = asked(running, path, {"odd": EXOTIC}, PATHS[path])
    given = arguments(path, answer)
    assert given["uniqueItems"] == "a" and set(given["list"]) <= {"b"} and len(given["word"]) <= 3
    said = answer.headers["x-penstock-unenforced"].split(", ")
    assert set(said) == {"odd:uniqueItems", "odd:not", "odd:format"}
    both = asked(running, path, {"odd": EXOTIC, "travel": NESTED}, PATHS[path])
    assert both.status_code == 200 and "odd:not" in both.headers["x-penstock-unenforced"]


@pytest.mark.parametrize(
    ("schema", "rules"),
    [
        ({"$ref": "http://example.com/x"}, ["$ref"]),
        ({"type": "string", "pattern": "(?=a)b"}, ["pattern"]),
        ({"type": "no such type"}, ["parameters"]),
        ({"$ref": "#/nowhere"}, ["parameters"]),
        ({"enum": ["a" * 70_000]}, ["parameters"]),
        ({"const": {"$ref": "#", "not": 1}}, []),
        ({"$id": "http://example.com/y", "$ref": "#/$defs/A", "$defs": {"A": {"const": 1}}}, []),
    ],
)
def test_unenforced_rules_are_detected_in_schemas(schema: dict[str, Any], rules: list[str]) -> None:
    (made,), unenforced = Arguments.of([("f", schema)])
    assert list(unenforced) == [f"f:{rule}" for rule in rules]
    json_schema_grammar(made)


def test_many_large_tools_fit_together() -> None:
    """The largest are left unenforced until the rest compiles."""
    sizes = [20_000, 30_000, 25_000]
    tools = [(f"f{size}", {"type": "object", "properties": {"a" * size: {}}}) for size in sizes]
    made, unenforced = Arguments.of(tools)
    assert unenforced == ("f30000:size",)
    assert len("".join(map(json_schema_grammar, made))) <= GRAMMAR_BYTES


@pytest.mark.parametrize("space", [" ", "\n"])
def test_whitespace_in_calls_is_bounded(running: Running, space: str) -> None:
    """A weak model would emit spaces until max_tokens."""
    (token,) = running.service.tokenizer.encode(space, add_special_tokens=False)
    body = {
        "messages": [{"role": "user", "content": "look"}],
        "tools": [{"type": "function", "function": {"name": "travel", "parameters": NESTED}}],
        "tool_choice": "required",
        "max_tokens": 200,
        "logit_bias": {str(token): 100},
    }
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=SOON)
    assert set(arguments("/v1/chat/completions", answer)) == {"to", "back"}


OPEN = {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}
"""As most clients write it: without `additionalProperties`."""


def test_objects_have_only_named_properties(running: Running) -> None:
    """A weak model would add properties until max_tokens."""
    (comma,) = running.service.tokenizer.encode(",", add_special_tokens=False)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "look"}],
        "max_tokens": 200,
        "logit_bias": {str(comma): 100},
    }
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": OPEN}}
    format_only = {**body, "response_format": schema}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=format_only, timeout=SOON)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"city": "Bern"}
    tool = {"type": "function", "function": {"name": "go", "parameters": OPEN}}
    demanded = {**body, "tools": [tool], "tool_choice": "required"}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=demanded, timeout=SOON)
    assert arguments("/v1/chat/completions", answer) == {"city": "Bern"}


@pytest.mark.parametrize(
    "schema",
    [
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "string"}},
        {**OPEN, "anyOf": [OPEN, {"type": "object"}]},
        {"allOf": [OPEN, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]},
        {"type": "object"},
    ],
)
def test_explicitly_open_objects_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
