"""Answers of other families over HTTP: the parser comes from the template or a flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from parrot import TEMPLATE, parrot
from servers import serving

from penstock.server.prompts import Prompts

TOOL: Any = {"type": "object", "properties": {"thing": {"type": "string"}}}
ARGUMENTS = {"thing": "otter"}
CALL = json.dumps({"name": "look_up", "arguments": ARGUMENTS})
HARMONY = (
    "<|channel|>analysis<|message|>",
    "Hm",
    "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>",
    '{"thing": ',
    '"otter"}',
)
MUSE = (
    " to=self<|message|>",
    "Hm",
    "<|eom|><|start|>assistant to=look_up<|message|><atem:function_calls>\n",
    '<atem:invoke name="look_up">\n<atem:parameter name="thing">otter</atem:parameter>\n',
    "</atem:invoke>\n</atem:function_calls>",
)
NEMOTRON = ("<think>", "Hm", "</think>", "<TOOLCALL>[", CALL, "]</TOOLCALL>")
SERVED = {
    "harmony": (HARMONY, "{# <|channel|> <|message|> #}", {}),
    "muse_spark": (MUSE, "", {"tool_parser": "muse_spark"}),
    "nemotron": (NEMOTRON, "{# <TOOLCALL> <think></think> #}", {}),
    "named": (NEMOTRON, "", {"tool_parser": "nemotron", "reasoning_parser": "think"}),
}


@pytest.mark.parametrize("name", SERVED)
def test_reasoning_and_calls_are_parsed_by_all_clients(name: str, tmp_path: Path) -> None:
    pieces, shown, flags = SERVED[name]
    model = parrot(tmp_path, *pieces, template=shown + TEMPLATE)
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "look"}]}
    with serving(*model, **flags) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as api:
            function: Any = {
                "type": "function",
                "function": {"name": "look_up", "parameters": TOOL},
            }
            choice = api.chat.completions.create(**asked, tools=[function]).choices[0]
            (call,) = choice.message.tool_calls or ()
            assert json.loads(call.function.arguments) == ARGUMENTS  # type: ignore[union-attr]
            assert choice.message.reasoning_content == "Hm"  # type: ignore[attr-defined]
            assert choice.finish_reason == "tool_calls" and not choice.message.content
        with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as api:
            tools: Any = [{"name": "look_up", "input_schema": TOOL}]
            with api.messages.stream(**asked, max_tokens=64, tools=tools) as stream:
                (block,) = [b for b in stream.get_final_message().content if b.type == "tool_use"]
            assert (block.name, block.input) == ("look_up", ARGUMENTS)


@pytest.mark.parametrize(
    "shown",
    [
        *("<|channel|> <|message|>", "<｜tool▁calls▁begin｜> ```json", "｜DSML｜"),
        *("<tool_call>\n<function=", "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"),
        *("<start_function_call>", "<atem:function_calls>"),
    ],
)
def test_required_call_uses_model_format(shown: str, tmp_path: Path) -> None:
    """The model by itself would say something else."""
    things = {**TOOL, "properties": {"thing": {"enum": ["otter"]}}, "required": ["thing"]}
    things["additionalProperties"] = False
    function: Any = {"name": "look_up", "parameters": things}
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "look"}]}
    asked["tools"] = [{"type": "function", "function": function}]
    marks = ("｜", "▁")  # which the letters of the model lack
    model = parrot(tmp_path, "Hello", marks=marks, template=f"{{# {shown} #}}{TEMPLATE}")
    with serving(*model) as running:
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
            plain = api.chat.completions.create(**asked).choices[0]
            made = api.chat.completions.create(
                **asked, tool_choice="required", max_tokens=200
            ).choices[0]
    (call,) = made.message.tool_calls or ()
    assert plain.message.content == "Hello" and not plain.message.tool_calls
    assert call.function.name == "look_up"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == ARGUMENTS  # type: ignore[union-attr]
    assert made.finish_reason == "tool_calls" and not made.message.content


def test_harmony_reasoning_is_counted(tmp_path: Path) -> None:
    shown = "{# <|channel|> <|message|> #}"
    prompts = Prompts(parrot(tmp_path, *HARMONY[:2], template=shown + TEMPLATE)[1])
    answer = prompts.encode("<|channel|>analysis<|message|>Hm, well<|end|>So")
    assert prompts.reasoning_tokens(answer) == len(prompts.encode("Hm, well"))
    assert prompts.starts_in_reasoning(answer[:2])
    assert not prompts.starts_in_reasoning(answer)
