from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenarios import AGENTS, FORMATS, format_script, format_turns, marked, script_of
from scripted_model import CALLS, END, ENDLESS, Words, write_model
from written_answers import written_call

from penstock import Engine, Request, load
from penstock.models.mlx_lm import load_tokenizer
from penstock.server.parsing.formats import CALL_FORMATS, answer_format

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
    """Return the answer to a conversation, and the cached share of its prompt."""
    engine, tokenizer, _ = scripted
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    (answer,) = engine.submit(Request(prompt=tuple(prompt), max_tokens=200)).result()
    usage = answer.finish.usage
    text = tokenizer.decode(list(answer.tokens)).removesuffix(END)
    return text, usage.cached_tokens / usage.prompt_tokens


def test_scripted_turns_follow_script_and_reuse_cached_prefix(scripted: Any) -> None:
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


def test_answer_pieces_are_unique() -> None:
    words = Words({"<|place 1.0|>": "abcdefghi123456789abcdefghi"})
    pieces = [piece for piece, _ in words.follows]
    assert len({*pieces}) == len(pieces) and "".join(pieces).endswith("abcdefghi")


def test_request_without_tools_gets_summary(scripted: Any) -> None:
    asked = [{"role": "user", "content": "Name this talk: Say hello. (task 1)"}]
    assert ask(scripted, asked, tools=None)[0] == "What we did, in short."


def test_turns_past_script_end_report_task_done(
    scripted: Any,
) -> None:
    *_, script = scripted
    messages = [{"role": "user", "content": "Sum up. (task 10)"}]
    for answer in (*script[10], "Task 10 is over.", "Task 10 is over."):
        assert ask(scripted, messages)[0] == answer
        messages += [*said_and_done(answer), {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("family", CALLS)
def test_script_tool_calls_match_rendered_history(family: str, tmp_path: Path) -> None:
    """The call format is detected from the template, as for a real model."""
    write_model(tmp_path, {1: ["So."]}, family=family)
    tokenizer = load_tokenizer(tmp_path)
    form = answer_format(tokenizer)
    assert form.calls == CALL_FORMATS["hermes" if family == "json_tools" else family]
    arguments = {"path": "a b", "content": " x\r\n"}
    function = {"name": "look_up", "arguments": arguments}
    call = {"type": "function", "id": "functions.look_up:0", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    rendered = tokenizer.apply_chat_template([said], tokenize=False)
    written = written_call(family, arguments).replace("<tool_call>\n{", "<tool_call>{")
    assert written.replace("}\n</tool_call>", "}</tool_call>") in rendered


@pytest.mark.parametrize(("program", "family"), FORMATS)
def test_script_contains_call_markers_of_its_format(
    program: str, family: str, tmp_path: Path
) -> None:
    """Texts have trailing blanks, both kinds of line ends, and `null`."""
    script = format_script(AGENTS[program].tools, Path("/work"), family, written_call)
    write_model(tmp_path, script, family=family)
    text = marked(family)
    assert text.count("\r\n") > 2 and text.endswith("  \t \n \n") and "null" in text
    marks = [mark for mark in CALL_FORMATS[family].openings if mark in text]
    assert marks and len(format_turns(family)) == len(script)
