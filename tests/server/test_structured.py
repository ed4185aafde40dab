"""vLLM's fields for structured output and reasoning effort."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from servers import Running

from penstock.server.reasoning_effort import effort_switches

SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["code"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "What is the code of the amber falcon?"}]
CHOICES = ["seven/eight", 'the "amber" falcon', "nine"]
LARK = 'start: "falcon " NUMBER\nNUMBER: /[0-9]{3}/\n'
FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"guided_json": SCHEMA}, lambda text: 0 <= json.loads(text)["code"] <= 99),
    ({"guided_json": json.dumps(SCHEMA)}, lambda text: 0 <= json.loads(text)["code"] <= 99),
    ({"guided_regex": "[ab]{3}/[0-9]"}, re.compile("[ab]{3}/[0-9]").fullmatch),
    ({"guided_choice": CHOICES}, CHOICES.__contains__),
    ({"guided_grammar": LARK}, re.compile("falcon [0-9]{3}").fullmatch),
    ({"structured_outputs": {"json": SCHEMA}}, lambda text: 0 <= json.loads(text)["code"] <= 99),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, re.compile("[ab]{3}").fullmatch),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"structured_outputs": {"grammar": LARK}}, re.compile("falcon [0-9]{3}").fullmatch),
    (
        {"structured_outputs": {"json_object": True}},
        lambda text: isinstance(json.loads(text), dict),
    ),
]


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"max_tokens": 200, **body}, timeout=60)


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_structured_answer_follows_format(recall_server: Running, number: int) -> None:
    """Sampled at high temperature, so that the grammar decides."""
    form, fits = FORMS[number]
    # An object of any form may go on for long.
    temperature = 0.0 if "json_object" in str(form) else 3.0
    body = {**form, "temperature": temperature, "seed": 1}
    chat = post(recall_server, "/v1/chat/completions", messages=MESSAGES, **body).json()
    text = post(recall_server, "/v1/completions", prompt="The code is", **body).json()
    (answer,), (completion,) = chat["choices"], text["choices"]
    for choice, said in ((answer, answer["message"]["content"]), (completion, completion["text"])):
        assert choice["finish_reason"] == "stop" or temperature == 0.0
        assert choice["finish_reason"] == "length" or fits(said)


def test_answer_without_format_is_unconstrained(recall_server: Running) -> None:
    """The control: the model alone follows none of the formats."""
    body = {"prompt": "The code is", "max_tokens": 20, "temperature": 3.0, "seed": 1}
    text = post(recall_server, "/v1/completions", **body).json()["choices"][0]["text"]
    for _, fits in FORMS:
        with pytest.raises((ValueError, AssertionError)):
            assert fits(text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_json": {"type": 7}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice.0"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_unenforceable_rules_are_refused_by_name(
    recall_server: Running, body: dict[str, Any], param: str
) -> None:
    answer = post(recall_server, "/v1/chat/completions", messages=MESSAGES, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_answer_may_contain_zero_byte(recall_server: Running) -> None:
    text = "a\0b"
    body = {"prompt": "a", "guided_choice": [text], "max_tokens": 9}
    assert post(recall_server, "/v1/completions", **body).json()["choices"][0]["text"] == text
    tokens = post(recall_server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert "".join(tokens["token_strs"]).endswith(text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_grammar": "start: " + '"a" ' * 16_384}, "guided_grammar"),
        ({"structured_outputs": {"regex": "[z-a]"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar"),
    ],
)
def test_invalid_grammar_is_400_and_names_field(
    recall_server: Running, path: str, form: dict[str, Any], param: str
) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = post(recall_server, path, **asked, **form)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and param in error["message"]


def test_ignore_eos_continues_answer(recall_server: Running) -> None:
    end = min(recall_server.service.tokenizer.eos_token_ids)
    body = {"prompt": "a", "max_tokens": 5, "logit_bias": {str(end): 100}}
    plain = post(recall_server, "/v1/completions", **body).json()
    going_on = post(recall_server, "/v1/completions", **body, ignore_eos=True).json()
    assert plain["usage"]["completion_tokens"] <= 1
    assert going_on["usage"]["completion_tokens"] == 5


def test_reasoning_effort_maps_to_template_switch(recall_server: Running) -> None:
    """The embedded model has no switch; another has markers and a switch."""
    prompts = recall_server.service.prompts
    assert effort_switches("high", prompts) == {}
    assert effort_switches(None, prompts) == {}
    answer = post(recall_server, "/v1/chat/completions", messages=MESSAGES, reasoning_effort="low")
    assert answer.status_code == 200
