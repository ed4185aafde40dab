from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenarios import AGENTS, script_of
from scripted_model import END, ENDLESS, write_model

from penstock import Engine, Request, load

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module", params=sorted(AGENTS))
def scripted(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("scripted")
    script = script_of(AGENTS[request.param].tools, Path("/work"))
    write_model(folder, script)
    model, tokenizer = load(folder)
    with Engine(model, tokenizer, memory_limit="200MB", block_size=64) as engine:
        yield engine, tokenizer, script


def ask(scripted: Any, messages: list[dict[str, Any]], tools: Any = TOOLS) -> tuple[str, float]:
    """Return the answer to a conversation, and the share of the prompt that was cached."""
    engine, tokenizer, _ = scripted
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    (answer,) = engine.submit(Request(prompt=tuple(prompt), max_tokens=200)).result()
    usage = answer.finish.usage
    text = tokenizer.decode(list(answer.tokens)).removesuffix(END)
    return text, usage.cached_tokens / usage.prompt_tokens


def test_every_turn_of_the_script_is_answered_from_what_is_cached(scripted: Any) -> None:
    *_, script = scripted
    messages = [{"role": "system", "content": "You are a coding agent. " * 100}]
    shares = []
    for number, answers in sorted(script.items()):  # a later task outdoes those before
        messages.append({"role": "user", "content": f"Do it. (task {number})"})
        for answer in answers:
            said, share = ask(scripted, messages)
            shares.append(share)
            if answer.endswith(ENDLESS):
                assert len(said) > 500 and said.startswith(answer.removesuffix(ENDLESS) * 3)
                continue
            assert said == answer
            messages += said_and_done(answer)
    assert len(shares) == sum(map(len, script.values())) and min(shares[1:]) > 0.8


def said_and_done(answer: str) -> list[dict[str, Any]]:
    if "<tool_call>" not in answer:
        return [{"role": "assistant", "content": answer}]
    call = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    return [said, {"role": "tool", "content": "Done."}]


def test_a_request_without_tools_is_none_of_the_turns(scripted: Any) -> None:
    asked = [{"role": "user", "content": "Name this talk: Say hello. (task 1)"}]
    assert ask(scripted, asked, tools=None)[0] == "What we did, in short."


def test_a_program_that_goes_on_behind_its_script_is_told_that_a_task_is_over(
    scripted: Any,
) -> None:
    *_, script = scripted
    messages = [{"role": "user", "content": "Sum up. (task 10)"}]
    for answer in (*script[10], "Task 10 is over.", "Task 10 is over."):
        assert ask(scripted, messages)[0] == answer
        messages += [*said_and_done(answer), {"role": "user", "content": "And?"}]
