"""Codex's requests, and the response store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from coding_agents import CODEX_FIRST, CODEX_SECOND, CODEX_TOOLS, codex
from parrot import TEMPLATE, parrot
from servers import Running, serving

from penstock.server.openai.response_forms import ResponsesRequest
from penstock.server.openai.response_input import ResponseInput
from penstock.server.openai.response_items import sealed
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import PromptMemory
from penstock.server.prompts import Prompts
from penstock.server.response_store import ResponseStore

THINKS = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
)
THINKING = TEMPLATE.replace("{{ message.content }}", THINKS + "{{ message.content }}")
PATCH = "*** Begin Patch\n*** Add File: a\n+b\n*** End Patch\n"
SAID = (
    json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}),
    json.dumps({"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}}),
    json.dumps({"name": "local_shell", "arguments": {"command": ["ls"]}}),
    json.dumps({"name": "exec_command", "arguments": {"cmd": "ls"}}),
)
TOOLS: Any = [*CODEX_TOOLS, {"type": "local_shell"}]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that thinks and calls each tool once."""
    pieces = ["<think>", "Hm.", "</think>"]
    pieces += [f"<tool_call>{call}</tool_call>" for call in SAID]
    folder = tmp_path_factory.mktemp("calling")
    model, tokenizer = parrot(folder, *pieces, template=THINKING)
    with serving(model, tokenizer, engine={"memory_limit": "600MB"}) as running:
        yield running


def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def read(prompts: Prompts, **body: Any) -> str:
    form = ResponsesRequest.model_validate(body)
    return prompts.decode(ResponseInput.of(form).render(form, prompts))


def test_codex_second_turn_is_cached() -> None:
    with serving(engine={"memory_limit": "600MB", "block_size": 32}) as running:
        usages = []
        for items in (CODEX_FIRST, CODEX_SECOND):
            body = codex(items, max_output_tokens=32)
            answer = httpx.post(f"{running.url}/v1/responses", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            last = json.loads(answer.text.strip().rsplit("data: ", 1)[1])
            assert last["type"] in ("response.completed", "response.incomplete")
            usages.append(last["response"]["usage"])
            left_out = answer.headers["x-penstock-left-out"].split(", ")
            assert left_out[:2] == ["web_search", "image_generation"]
        assert left_out[2:] == ["web_search_call"]
        read_tokens = usages[1]["input_tokens_details"]["cached_tokens"]
        assert read_tokens >= 0.7 * usages[1]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_use_client_tool_types(calling: Running, stream: bool) -> None:
    asked: Any = {"model": "any", "input": "look", "tools": TOOLS}
    with client(calling) as api:
        if stream:
            events = list(api.responses.create(**asked, stream=True))
            made = events[-1].response
            (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
            assert done.input == PATCH
        else:
            made = api.responses.create(**asked)
    reasoning, patch, close, shell, command = made.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert (close.name, close.to_dict()["namespace"]) == ("close_agent", "multi_agent_v1")
    assert (shell.type, shell.action.command) == ("local_shell_call", ["ls"])
    assert (command.type, command.name) == ("function_call", "exec_command")
    assert reasoning.type == "reasoning"


def test_encrypted_reasoning_round_trips(calling: Running) -> None:
    """Codex sends back `encrypted_content` without the text."""
    with client(calling) as api:
        made = api.responses.create(
            model="any", input="look", include=["reasoning.encrypted_content"], store=False
        )
    item = {**made.output[0].to_dict(), "content": None}
    assert "<think>Hm.</think>" in read(calling.service.prompts, input=[item])


def test_consecutive_items_join_to_one_assistant_message(calling: Running) -> None:
    commit = {"type": "reasoning", "encrypted_content": sealed("So."), "summary": []}
    found = read(calling.service.prompts, input=[*CODEX_SECOND[2:3], commit, *CODEX_SECOND[4:]])
    assert found == (
        "<|user|>Look at notes.txt.<|end|><|assistant|><think>So.</think>I look."
        '<tool_call>{"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}}'
        '</tool_call><tool_call>{"name": "apply_patch", "arguments": '
        '{"input": "*** Begin Patch\\n"}}</tool_call>'
        '<tool_call>{"name": "local_shell", "arguments": {"command": ["ls"]}}</tool_call><|end|>'
        "<|tool|>closed<|end|><|tool|>no: [image left out]<|end|><|tool|>notes.txt<|end|>"
        "<|assistant|>"
    )


def test_required_custom_call_follows_grammar(tmp_path: Path) -> None:
    """The model by itself would say something else."""
    choice: Any = {"type": "custom", "name": "apply_patch"}
    number: Any = {
        "type": "custom",
        "name": "number",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}/x"},
    }
    with serving(*parrot(tmp_path, "Hello")) as running, client(running) as api:
        ask: Any = {"model": "any", "input": "look", "tools": [*TOOLS, number]}
        made = api.responses.create(**ask, tool_choice=choice, max_output_tokens=400)
        (item,) = made.output
        assert (item.type, item.name) == ("custom_tool_call", "apply_patch")
        assert item.input.startswith("*** Begin Patch\n*** Add File: ")
        choice = {"type": "custom", "name": "number"}
        *_, last = api.responses.create(**ask, tool_choice=choice, stream=True)
        (item,) = last.response.output
        assert item.input[:3].isdigit() and item.input[3:] == "/x"


def test_optional_custom_call_follows_grammar(tmp_path: Path) -> None:
    """The client requires nothing, and the model would break the grammar."""
    head = '{"name": "number", "arguments": {"input": "'
    said = ("I count. ", "<tool_call>", head, "abc", '"}}', "</tool_call>")
    definition = 'start: DIGIT{3} "\\n"\n%import common.DIGIT'
    number: Any = {"type": "custom", "name": "number"}
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    with serving(*parrot(tmp_path, *said)) as running, client(running) as api:
        ask: Any = {"model": "any", "input": "look", "max_output_tokens": 60}
        free = api.responses.create(**ask, tools=[number])
        assert free.output[-1].input == "abc"  # type: ignore[union-attr]
        made = api.responses.create(**ask, tools=[{**number, "format": form}])
        text, call, *_ = made.output
        assert text.type == "message" and made.output_text.startswith("I count. ")
        assert call.type == "custom_tool_call" and call.name == "number"
        assert call.input[:3].isdigit() and call.input[3:] == "\n"
        nested = {**form, "definition": 'start: "(" start? ")"'}
        answer = api.responses.with_raw_response.create(**ask, tools=[{**number, "format": nested}])
        assert answer.headers["x-penstock-unenforced"] == "number:grammar"


def test_effort_maps_to_template_switch(tmp_path: Path) -> None:
    template = "{{ reasoning_effort }}{{ enable_thinking }}" + TEMPLATE
    marks = ("<think>", "</think>")
    prompts = Prompts(parrot(tmp_path, "Hello", marks=marks, template=template)[1])
    found = {
        effort: read(prompts, input="A", reasoning={"effort": effort}).partition("<")[0]
        for effort in ("none", "low", "xhigh")
    }
    assert found == {"none": "lowFalse", "low": "lowTrue", "xhigh": "highTrue"}


# ---- what is kept


def test_conversation_continues_from_response_id(calling: Running) -> None:
    asked: Any = {"model": "any", "tools": TOOLS}
    with client(calling) as api:
        first = api.responses.create(**asked, input="look")
        *_, last = api.responses.create(
            **asked, input="so?", previous_response_id=first.id, stream=True
        )
        second = last.response
        assert second.previous_response_id == first.id
        items = [
            {"role": "user", "content": "look"},
            *first.output,
            {"role": "user", "content": "so?"},
        ]
        whole = api.responses.create(**asked, input=items, store=False)  # type: ignore[arg-type]
        assert second.usage is not None and whole.usage is not None
        assert second.usage.input_tokens == whole.usage.input_tokens
        reference: Any = {"type": "item_reference", "id": first.output[1].id}
        referring = api.responses.create(**asked, input=[items[0], reference])  # type: ignore[list-item]
        spelled = api.responses.create(**asked, input=[items[0], first.output[1]])  # type: ignore[list-item]
        assert referring.usage is not None and spelled.usage is not None
        assert referring.usage.input_tokens == spelled.usage.input_tokens
        for more in (
            {"previous_response_id": whole.id},  # it was not to be kept
            {"previous_response_id": first.id, "extra_body": {"cache_salt": "another"}},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                api.responses.create(**asked, input="so?", **more)
            assert refused.value.code == "previous_response_not_found"
    figures = httpx.get(f"{calling.url}/metrics").text
    assert "\npenstock_stored_responses 0.0" not in figures
    assert "\npenstock_stored_response_bytes " in figures


def test_response_store_is_bounded() -> None:
    memory = PromptMemory(100_000)
    store = ResponseStore(memory, 10_000)
    for number in range(50):
        store.put("a", f"r{number}", [{"id": f"i{number}", "text": "x" * 1_000}], {})
        assert store.nbytes == memory.used_bytes <= 10_000
        assert store.get("a", f"r{number}")
        if number:
            store.get("a", "r0")  # asked for, it stays
    assert set(store.items("a")) == {"i0", "i47", "i48", "i49"}
    assert store.items("b") == {}
    with pytest.raises(BadRequest):
        store.get("a", "r1")
    count = len(store)
    store.put("a", "huge", [{"text": "x" * 10_000}], {})
    assert len(store) == count
    for response_id in ("r0", "r47", "r48", "r49"):
        store.delete("a", response_id)
    assert (len(store), store.nbytes, memory.used_bytes) == (0, 0, 0)


def test_stored_responses_are_evicted_for_open_requests() -> None:
    """Oldest first; nothing is stored while requests use all memory."""
    memory = PromptMemory(100_000)
    store, request = ResponseStore(memory, 32_000_000), memory.hold()
    for number in range(40):
        store.put("a", f"r{number}", [{"id": f"i{number}", "text": "x" * 1_000}], {})
    assert len(store) == 12 and 24_000 < store.nbytes <= 25_000
    request.resize(90_000)
    assert set(store.items("a")) == {"i36", "i37", "i38", "i39"}
    store.put("a", "r40", [{"id": "i40", "text": "x" * 5_000}], {})
    assert set(store.items("a")) == {"i39", "i40"}
    request.resize(100_000)
    assert (len(store), memory.used_bytes) == (0, 100_000)
    store.put("a", "r41", [{"id": "i41"}], {})
    assert (len(store), memory.used_bytes) == (0, 100_000)
    request.resize(0)
    store.put("a", "r42", [{"id": "i42"}], {})
    assert set(store.items("a")) == {"i42"}
