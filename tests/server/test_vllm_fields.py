"""vLLM's extra fields in chat and completions, with edge cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from parrot import END, TEMPLATE, parrot
from servers import Running, serving

from penstock.server.prompts import Prompts
from penstock.server.reasoning_effort import effort_switches

PATHS = ("/v1/completions", "/v1/chat/completions")
SAID = ("one ", "two ", "three ", "four ")
SPECIAL = "<|special|>"


@pytest.fixture(scope="module")
def saying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that answers "one two three four " and then EOS."""
    with serving(*parrot(tmp_path_factory.mktemp("parrot"), *SAID)) as running:
        yield running


def send(running: Running, path: str, **more: Any) -> httpx.Response:
    """Request an answer; a completion uses the prompt that chat renders."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/completions":
        asked = {"prompt": list(running.service.prompts.render(asked["messages"]))}
    return httpx.post(f"{running.url}{path}", json={**asked, **more}, timeout=60)


def ask(running: Running, path: str, **more: Any) -> tuple[str, str, int]:
    """Return the text, the finish reason, and the number of tokens."""
    answer = send(running, path, **more)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    choice = made["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], made["usage"]["completion_tokens"]


def token_of(running: Running, text: str) -> int:
    return int(running.service.prompts.tokenizer.convert_tokens_to_ids(text))


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_defers_eos(saying: Running, path: str) -> None:
    text, reason, tokens = ask(saying, path, max_tokens=12)
    assert (text, reason) == ("".join(SAID), "stop") and tokens <= 5
    text, reason, tokens = ask(saying, path, max_tokens=12, min_tokens=9)
    assert text.startswith("".join(SAID)) and END not in text and tokens >= 9
    assert ask(saying, path, max_tokens=12, min_tokens=0)[0] == "".join(SAID)
    assert ask(saying, path, max_tokens=6, min_tokens=6)[1:] == ("length", 6)


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_defers_stop_strings_and_token_ids(saying: Running, path: str) -> None:
    assert ask(saying, path, max_tokens=9, stop=["two"])[0] == "one "
    assert ask(saying, path, max_tokens=9, stop=["two"], min_tokens=1)[0] == "one "
    late = ask(saying, path, max_tokens=9, stop=["two", "our"], min_tokens=2)
    assert late[:2] == ("one two three f", "stop"), "a stop text may begin early, not end there"
    two = token_of(saying, "two ")
    assert ask(saying, path, max_tokens=9, stop_token_ids=[two])[0] == "one "
    kept = ask(saying, path, max_tokens=9, stop_token_ids=[two], min_tokens=3)[0]
    assert "two" not in kept and kept.startswith("one ")


@pytest.mark.parametrize("path", PATHS)
def test_include_stop_str_in_output_keeps_stop_text(saying: Running, path: str) -> None:
    keep = {"include_stop_str_in_output": True, "max_tokens": 9}
    assert ask(saying, path, stop=["thr"], **keep)[:2] == ("one two thr", "stop")
    three = token_of(saying, "three ")
    assert ask(saying, path, stop_token_ids=[three], **keep)[:2] == ("one two three ", "stop")
    keep["include_stop_str_in_output"] = False
    assert ask(saying, path, stop=["thr"], **keep)[0] == "one two "
    assert ask(saying, path, stop_token_ids=[three], **keep)[0] == "one two "
    assert ask(saying, path, include_stop_str_in_output=True)[0] == "".join(SAID), "no mark of EOS"


@pytest.mark.parametrize("path", PATHS)
def test_skip_special_tokens_removes_them_from_text(path: str, tmp_path: Path) -> None:
    model, tokenizer = parrot(tmp_path, "one ", SPECIAL, "two ")
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL]})
    with serving(model, tokenizer) as running:
        assert ask(running, path, max_tokens=9)[0] == f"one {SPECIAL}two "
        assert ask(running, path, max_tokens=9, skip_special_tokens=False)[0].count(SPECIAL) == 1
        assert ask(running, path, max_tokens=9, skip_special_tokens=True)[0] == "one two "


@pytest.mark.parametrize("path", PATHS)
def test_neutral_sampling_values_disable_filters(saying: Running, path: str) -> None:
    """0 and -1 disable `top_k`; `min_p` 1 is greedy; a penalty of 1 does nothing."""
    hot: dict[str, Any] = {"max_tokens": 8, "temperature": 9.0, "seed": 7}
    wild = ask(saying, path, **hot)
    assert wild[0] != "".join(SAID)
    assert ask(saying, path, **hot, top_k=0) == ask(saying, path, **hot, top_k=-1) == wild
    assert ask(saying, path, **hot, repetition_penalty=1.0) == wild
    assert ask(saying, path, **hot, min_p=0.0) == wild
    assert ask(saying, path, **hot, top_k=1)[0] == "".join(SAID)
    assert ask(saying, path, **hot, min_p=1.0)[0] == "".join(SAID)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", -2), ("min_p", 1.1), ("min_p", -0.1), ("repetition_penalty", 0)),
        *(("repetition_penalty", -1), ("min_tokens", -1), ("prompt_logprobs", -2)),
        *(("skip_special_tokens", "yes"), ("include_stop_str_in_output", 1)),
    ],
)
def test_invalid_field_is_400_with_its_name(
    saying: Running, path: str, field: str, value: Any
) -> None:
    answer = send(saying, path, **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_above_max_tokens_is_400(saying: Running, path: str) -> None:
    answer = send(saying, path, max_tokens=3, min_tokens=4)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "min_tokens" and "4" in error["message"] and "3" in error["message"]


def test_max_completion_tokens_overrides_max_tokens(saying: Running) -> None:
    chat = PATHS[1]
    assert ask(saying, chat, max_tokens=3, max_completion_tokens=2)[1:] == ("length", 2)
    assert ask(saying, chat, max_completion_tokens=3, min_tokens=3)[2] == 3
    assert send(saying, chat, max_completion_tokens=0).status_code == 400


SWITCHES: dict[str, dict[str, Any]] = {
    "enable_thinking": {"none": False, "low": True, "high": True},
    "reasoning_effort": {"none": "low", "medium": "medium", "xhigh": "high"},
    "reasoning_strength": {"none": "low", "medium": "medium", "max": "xhigh"},
    "thinking": {"none": False, "high": True},
}
"""Value that the template gets for an effort, by the switch that it has."""


@pytest.mark.parametrize("name", SWITCHES)
def test_reasoning_effort_reaches_template(tmp_path: Path, name: str) -> None:
    """In chat and responses; the request's `chat_template_kwargs` override it."""
    template = f"[{{{{ {name} }}}}]" + TEMPLATE
    marks = ("<think>", "</think>")
    with serving(*parrot(tmp_path, "Hello", marks=marks, template=template)) as running:
        prompts = running.service.prompts
        messages = [{"role": "user", "content": "A"}]
        for effort, value in SWITCHES[name].items():
            rendered = prompts.render(messages, **{name: value})
            assert f"[{value}]" in prompts.decode(rendered)
            for body, path, field in (
                ({"messages": messages, "reasoning_effort": effort}, PATHS[1], "prompt_tokens"),
                ({"input": "A", "reasoning": {"effort": effort}}, "/v1/responses", "input_tokens"),
            ):
                answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"][field] == len(rendered), (path, effort)
            body = {"messages": messages, "reasoning_effort": effort}
            for path, field in (("/apply-template", "prompt"), ("/tokenize", "tokens")):
                answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
                expected = {"prompt": prompts.decode(rendered), "tokens": list(rendered)}
                assert answer.json()[field] == expected[field], (path, effort)
        override: dict[str, Any] = {
            "messages": messages,
            "reasoning_effort": "none",
            "max_tokens": 1,
        }
        override["chat_template_kwargs"] = {name: "a longer word"}
        answer = httpx.post(f"{running.url}{PATHS[1]}", json=override, timeout=60)
        longer: dict[str, Any] = {name: "a longer word"}
        rendered = prompts.render(messages, **longer)
        assert answer.json()["usage"]["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize("name", ["reasoning_effort", "reasoning_strength"])
def test_anthropic_effort_maps_to_template_level(tmp_path: Path, name: str) -> None:
    """Also when counting tokens; `thinking` decides whether the model reasons."""
    template = f"[{{{{ {name} }}}}{{{{ enable_thinking }}}}]" + TEMPLATE
    model = parrot(tmp_path, "Hello", marks=("<think>", "</think>"), template=template)
    with serving(*model) as server:
        prompts = server.service.prompts
        body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "A"}]}
        for effort, level in (*SWITCHES[name].items(), (None, "")):
            form = {**body, "max_tokens": 1, "output_config": {"effort": effort}}
            given: dict[str, Any] = {name: level, "enable_thinking": False}
            rendered = prompts.render(body["messages"], **given)
            assert prompts.decode(rendered).startswith(f"[{level}False]")
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                answer = httpx.post(f"{server.url}{path}", json=form, timeout=60)
                assert answer.status_code == 200, answer.text
                counted = answer.json().get("usage", answer.json())["input_tokens"]
                assert counted == len(rendered), (path, effort)


@pytest.mark.parametrize(
    ("taken", "levels"),
    [
        (("none", "high"), {"none": "none", "minimal": "none", "low": "high", "max": "high"}),
        (("low", "medium", "xhigh"), {"none": "low", "high": "medium", "max": "xhigh"}),
    ],
    ids=["mistral", "qwen"],
)
def test_effort_maps_to_nearest_template_level(
    tmp_path: Path, taken: tuple[str, ...], levels: dict[str, str]
) -> None:
    """The template raises on other levels."""
    raises = f"{{% if reasoning_effort not in {[*taken, '']} %}}{{{{ raise_exception('no') }}}}"
    head = "{% set reasoning_effort = reasoning_effort or '' %}" + raises + "{% endif %}"
    template = head + "[{{ reasoning_effort }}]" + TEMPLATE
    prompts = Prompts(parrot(tmp_path, "Hello", template=template)[1])
    assert prompts.traits.reasoning_effort == taken
    messages = [{"role": "user", "content": "A"}]
    for effort, level in levels.items():
        rendered = prompts.render(messages, **effort_switches(effort, prompts))
        assert prompts.decode(rendered).startswith(f"[{level}]")
