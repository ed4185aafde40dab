"""Parsing of every family's answers in any pieces; invalid calls are text."""

from __future__ import annotations

import json
import os
from random import Random
from typing import Any

import pytest
from parsed_answers import halves, parse, read
from written_answers import FAMILIES, MLX_LM, TOOLS, Written, form_of, written, written_call

from penstock.server.parsing.answer_text import MOST_REREAD, AnswerText
from penstock.server.parsing.events import (
    ArgumentsPart,
    CallBroken,
    CallEnd,
    CallStart,
    Events,
    TextPart,
)
from penstock.server.parsing.formats import AnswerFormat
from penstock.server.problems import BadRequest
from penstock.server.tools.calls import call_grammar

OUTPUTS = 200
CUTS = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 4
"""Of one output every fourth cut is tried, from another place on with each output; of the first
`CUT_EVERYWHERE` all are, and of each with `make soak`."""
CUT_EVERYWHERE = 20


def damaged(answer: Written, random: Random) -> str:
    """Damage an answer: truncate it, or drop, duplicate or replace a part."""
    text = answer.text
    at = random.randrange(len(text) + 1)
    size = random.randrange(1, 6)
    return random.choice(
        (text[:at], text[:at] + text[at + size :], text[:at] + text[at - size :], f"{text[:at]}}}é")
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_result_is_independent_of_byte_boundaries(family: str) -> None:
    form = form_of(family)
    for number in range(OUTPUTS):
        random = Random(number)
        answer = written(family, random)
        text = damaged(answer, random) if number % 4 == 3 else answer.text
        whole = parse([text], form)
        if number % 4 != 3:
            heard = read(whole)
            assert (heard.reasoning, heard.calls) == (answer.reasoning, answer.calls), text
            assert heard.said.rstrip("\n ") == answer.said.rstrip("\n "), text
        assert parse(text, form) == whole, text
        first, step = (1, 1) if number < CUT_EVERYWHERE else (1 + number % CUTS, CUTS)
        for cut in range(first, len(text.encode()), step):
            assert parse(halves(text, cut), form) == whole, (text, cut)


BROKEN = {
    "hermes": (
        '<tool_call>{"name": "look_up", "arguments": {"text": "x"</tool_call> so',
        "<tool_call>no JSON</tool_call> so",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"a": \\d}}</tool_call>',
        "<tool_call>" + "[" * 500,
        '<tool_call>{"name": "look_up", "arguments": ' + '{"a":' * 500,
    ),
    "glm47": (
        "<tool_call>look_up\n<arg_key>list</arg_key>\n<arg_value>[1, 2]</tool_call>",
        "<tool_call>look_up\n<arg_key>list</arg_key>\n<arg_value>[1, 2] so</arg_value>",
    ),
    "nemotron": ('<TOOLCALL>[{"name": 1}]</TOOLCALL>', "<TOOLCALL>[{]"),
    "granite": ("<|tool_call|>[so", "<|tool_call|>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>functions.look_up:0<|tool_call_argument_begin|>{}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0{}",
    ),
    "phi": ("import functools[0]", 'functools[{"name"'),
    "llama": (
        '{"name": "Bob", "parameters": {}}',
        '{"answer": 42}',
        "[1, 2]",
        "[look_up](http://x)",
        '{[look_up(text="x")]',
        "[look_up(1)]",
        "[look_up(text=",
        "<|python_tag|>print(1)",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>so",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=look_up>\n<parameter=text>\na\n</parameter>\n"
        "<parameter=other>\nb\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look_up>\n<parameter=text>\na\n</parameter>\n"
        "<parameter=text>\nb\n</parameter>\n</function>\n</tool_call>",
    ),
    "deepseek, V3.2": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="look_up">so',
        "<｜DSML｜function_calls><｜DSML｜invoke>",
    ),
    "harmony": (
        "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>no",
        '<|channel|>commentary to=functions.look_up<|message|>{"text": ',
    ),
}


def test_invalid_call_is_reported_only_if_started() -> None:
    events = Events({"look_up"})
    events.broken("plain")
    events.start("look_up")
    events.broken("cut")
    broken = [CallStart("look_up"), CallBroken(), TextPart("cut")]
    assert events.take() == [TextPart("plain"), *broken]


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family, texts in BROKEN.items() for text in texts]
)
def test_invalid_call_is_text(family: str, text: str) -> None:
    """With its markers, whether or not its arguments were already streamed."""
    heard = read(parse([text], form_of(family)))
    assert (heard.said, heard.calls) == (text, [])


ESCAPED = {
    r"\" \\ \/ \b \f \n \r \t": '" \\ / \b \f \n \r \t',
    r"\u00e9\u4E2D\uaBcD": "é中\uabcd",
    r"\ud83d\ude00 x": "😀 x",
}


@pytest.mark.parametrize("text", ESCAPED)
def test_json_string_escapes_are_decoded(text: str) -> None:
    answer = f'<tool_call>{{"name": "look_up", "arguments": {{"text": "{text}"}}}}</tool_call>'
    for pieces in ([answer], answer):
        calls = read(parse(pieces, form_of("hermes"))).calls
        assert calls == [("look_up", {"text": ESCAPED[text]})]


@pytest.mark.parametrize("text", [r"\x41", r"\u12g4", r"\u12", r"\U1234", r"\'"])
def test_invalid_json_escape_makes_call_text(text: str) -> None:
    answer = f'<tool_call>{{"name": "look_up", "arguments": {{"text": "{text}"}}}}</tool_call>'
    for pieces in ([answer], answer):
        heard = read(parse(pieces, form_of("hermes")))
        assert (heard.said, heard.calls) == (answer, [])


def test_arguments_after_json_block_are_merged() -> None:
    answer = (
        '<|open|>tools<|sep|><|open|>call tool="look_up"<|sep|>'
        '<|open|>json type="object"<|sep|>{"n": 1}<|close|>json<|sep|>'
        '<|open|>argument key="text" type="string"<|sep|>x<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )
    for pieces in ([answer], answer):
        calls = read(parse(pieces, form_of("kimi_k3"))).calls
        assert calls == [("look_up", {"n": 1, "text": "x"})]


def test_list_arguments_are_streamed_partially() -> None:
    parser = form_of("glm47").parser(TOOLS)
    text = "<tool_call>look_up\n<arg_key>list</arg_key>\n<arg_value>[1, 2"
    seen = [event.text for event in parser.feed(text) if isinstance(event, ArgumentsPart)]
    assert "".join(seen).startswith('{"list": [1, ')


@pytest.mark.parametrize("text", ['{"text": "x"}', "[1]", "x"])
def test_arguments_may_be_json_string(text: str) -> None:
    answer = f'<tool_call>{{"name": "look_up", "arguments": {json.dumps(text)}}}</tool_call>'
    heard = read(parse([answer], form_of("hermes")))
    whole = text.startswith("{")
    assert heard.calls == ([("look_up", {"text": "x"})] if whole else [])
    assert heard.said == ("" if whole else answer)


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}'])
def test_call_without_arguments_is_parsed(arguments: str) -> None:
    answer = f'<tool_call>{{"name": "look_up"{arguments}}}</tool_call>'
    for pieces in ([answer], answer):
        assert read(parse(pieces, form_of("hermes"))).calls == [("look_up", {})]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_text_if_request_has_no_tools(family: str) -> None:
    form = form_of(family)
    for number in range(20):
        answer = written(family, Random(number))
        heard = read(parse([answer.text], form, []))
        assert not heard.calls
        for _, arguments in answer.calls if family == "harmony" else ():
            assert json.dumps(arguments, ensure_ascii=False) in heard.said
        for name, _ in answer.calls if family != "harmony" else ():
            assert name in heard.said


def test_valid_call_before_invalid_one_is_kept() -> None:
    text = '<TOOLCALL>[{"name": "look_up", "arguments": {}}, {"name": oh'
    heard = read(parse([text], form_of("nemotron")))
    assert (heard.calls, heard.said) == ([("look_up", {})], ', {"name": oh')


@pytest.mark.parametrize("family", [family for family in FAMILIES if "deepseek" in family])
def test_all_calls_of_one_section_are_read(family: str) -> None:
    answer = next(a for n in range(20) if len((a := written(family, Random(n))).calls) > 1)
    heard = read(parse([answer.text + "so"], form_of(family)))
    assert (heard.calls, heard.said.strip()) == (answer.calls, f"{answer.said}so".strip())


def test_call_inside_invalid_call_is_parsed() -> None:
    """So a later broken call can be read again, too, and the call within it is found."""
    begun = '[1] <|python_tag|>{"name": "look_up", "parameters": {"text": "'
    heard = read(parse([f"{begun}<|python_tag|>[look_up(text=2)]"], form_of("llama")))
    assert (heard.calls, heard.said) == ([("look_up", {"text": 2})], begun)


def test_arguments_are_streamed_as_written() -> None:
    parser = form_of("hermes").parser(TOOLS)
    parser.feed('<tool_call>{"name": "write_file", "arguments"')
    assert parser.feed(': {"text": "one') == [
        CallStart("write_file"),
        ArgumentsPart('{"text": "one'),
    ]
    assert parser.feed("\ntwo") == [ArgumentsPart("\\ntwo")]
    assert parser.feed('"}}') == [ArgumentsPart('"}'), CallEnd()]


def test_call_invalid_after_start_is_reported() -> None:
    parser = form_of("hermes").parser(TOOLS)
    text = '<tool_call>{"name": "look_up", "arguments": {"a": oh'
    assert parser.feed(text) == [CallStart("look_up"), ArgumentsPart('{"a": ')]
    assert parser.feed(" no") == [CallBroken(), TextPart(f"{text} no")]


def test_harmony_recipient_is_read_from_any_header_form() -> None:
    """With or without `to=`, before or after the channel, with or without a type."""
    for header in (
        "<|channel|>commentary functions.look_up<|message|>",
        "<|channel|>commentary functions.look_up <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.look_up <|constrain|> json<|message|>",
        "<|start|>assistant to=functions.look_up<|channel|>analysis code<|message|>",
        "assistant<|channel|>commentary to=look_up<|constrain|>json<|message|>",
    ):
        answer = header if header[0] == "<" else f"<|start|>{header}"
        heard = read(parse([f"{answer}{{}}<|call|>"], form_of("harmony")))
        assert (heard.said, heard.calls) == ("", [("look_up", {})]), header
    odd = "<|channel|>commentary one two three<|message|>So"
    assert read(parse([odd], form_of("harmony"))).said == odd, "this is no header"


def test_muse_spark_message_to_itself_is_reasoning() -> None:
    form = form_of("muse_spark, with headers")
    call = MLX_LM["muse_spark"]([("look_up", {"text": "x"})])
    text = f" to=self<|message|>{call}<|eom|><|start|>assistant to=user<|message|>So<|eot|>"
    heard = read(parse([text], form))
    assert (heard.reasoning, heard.said, heard.calls) == (call, "So", [])
    doubled = call.replace('"look_up"', '"look_up.look_up"')
    heard = read(parse([f" to=look_up.look_up<|message|>{doubled}"], form))
    assert (heard.said, heard.calls) == ("", [("look_up", {"text": "x"})])
    for odd in ("to=user is no header", "<|start|>tool x<|message|>y", "to do: <|eot|>"):
        assert read(parse([odd], form)).said == odd.removesuffix("<|eot|>")
    assert read(parse([call], form)).calls == [("look_up", {"text": "x"})], "demanded by a grammar"


def test_harmony_without_header_is_text() -> None:
    """As an answer that a grammar begins."""
    assert read(parse(['{"a": 1}'], form_of("harmony"))).said == '{"a": 1}'


def test_harmony_builtin_tools_are_not_called() -> None:
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    heard = read(parse([text], form_of("harmony")))
    assert (heard.reasoning, heard.calls) == ("print(1)", [])


def test_mistral_tool_name_and_call_id_are_separated() -> None:
    text = '[TOOL_CALLS]look_up[CALL_ID]a1b2c3d4e[ARGS]{"text": "x[CALL_ID]y[ARGS]"}'
    heard = read(parse([text], form_of("mistral")))
    assert heard.calls == [("look_up", {"text": "x[CALL_ID]y[ARGS]"})]


def test_llama_builtin_tool_is_called_if_offered() -> None:
    text = '<|python_tag|>brave_search.call(query="a)b")'
    offered = [*TOOLS, {"type": "function", "function": {"name": "brave_search"}}]
    heard = read(parse([text], form_of("llama"), offered))
    assert heard.calls == [("brave_search", {"query": "a)b"})]
    assert read(parse([text], form_of("llama"))).said == text


def test_muse_spark_strings_are_not_json() -> None:
    """Strings stay as they are: numbers, JSON words, surrounding blanks; null may be null."""
    properties: dict[str, Any] = {
        "text": {"type": "string"},
        "none": {"type": ["string", "null"]},
        "any": {},
        "count": {"type": "integer"},
    }
    tools = [{"type": "function", "function": {"name": "put", "parameters": {}}}]
    schema = {"type": "object", "properties": properties}
    tools += [{"type": "function", "function": {"name": "look_up", "parameters": schema}}]
    given = {"text": "1.0", "none": "null", "any": "[1]", "count": "3"}
    read_as = {"text": "1.0", "none": None, "any": [1], "count": 3}
    form = form_of("muse_spark")
    for text in ("1.0", "null", "  a  ", '{"a": 1}', '"', "<x>\n\\"):
        answer = MLX_LM["muse_spark"]([("put", {"text": "2"}), ("look_up", given | {"text": text})])
        heard = read(parse([answer], form, tools))
        assert heard.calls == [("put", {"text": 2}), ("look_up", read_as | {"text": text})]
    heard = read(parse([MLX_LM["muse_spark"]([("look_up", {"none": "nul"})])], form, tools))
    assert heard.calls == [("look_up", {"none": "nul"})]


def test_function_gemma_bare_word_is_string() -> None:
    """As in mlx-lm's parser: the small model may forget the markers."""
    heard = read(
        parse(
            ["<start_function_call>call:look_up{text:Rome,n:2}<end_function_call>"],
            form_of("function_gemma"),
        )
    )
    assert heard.calls == [("look_up", {"text": "Rome", "n": 2})]


def test_gemma_quote_inside_string_is_kept() -> None:
    """In an object a member begins with its key; in a list any text begins one."""
    form = form_of("gemma4")
    for given in ({"text": 'a<|"|>, b'}, {"any": {"deep": 'a<|"|>, b'}}, {"any": ["a", 5]}):
        assert read(parse([written_call("gemma4", given)], form)).calls == [("look_up", given)]


def test_value_containing_end_of_call_is_parsed_whole() -> None:
    form = form_of("qwen3_coder")
    given = {"text": "a\n</parameter>\n</function>\n</tool_call> b"}
    call = written_call("qwen3_coder", given)
    for cut in range(1, len(call)):
        assert read(parse([call[:cut], call[cut:]], form)).calls == [("look_up", given)], cut


def test_mistral_marker_without_call_is_text() -> None:
    heard = read(parse(["[TOOL_CALLS] {} so"], form_of("mistral")))
    assert (heard.said, heard.calls) == ("[TOOL_CALLS] {} so", [])


def test_text_is_parsed_again_up_to_limit() -> None:
    source = AnswerText()
    source.unread("x" * (MOST_REREAD - 1))
    assert source.rereads
    source.unread("x")
    assert not source.rereads


def test_required_call_needs_known_format() -> None:
    with pytest.raises(BadRequest, match="template shows no format"):
        call_grammar(AnswerFormat(), TOOLS)


def test_tool_with_invalid_name_cannot_be_required() -> None:
    """A dash is a minus in Python; other tools are still offered."""
    dashed = {"type": "function", "function": {"name": "look-up", "parameters": {}}}
    form = form_of("pythonic")
    with pytest.raises(BadRequest, match="pythonic, has no calls of a tool named 'look-up'"):
        call_grammar(form, [*TOOLS, dashed], "look-up")
    grammar = call_grammar(form, [*TOOLS, dashed]).grammar or ""
    assert "look_up(" in grammar and "look-up" not in grammar
