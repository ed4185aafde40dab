"""Calls rendered by the template are parsed back as the same call, or as text."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import parse, read
from written_answers import FAMILIES, form_of, written_call

from penstock.server.parsing.events import CallStart, ParsedEvent
from penstock.server.parsing.formats import answer_format
from penstock.server.parsing.pythonic import PythonicCalls
from penstock.server.parsing.tag_calls import TagCalls

FORMS = [family for family in FAMILIES if family != "muse_spark, with headers"]
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "scale": {"type": "number"},
    "deep": {"type": "boolean"},
    "parts": {"type": "array"},
    "options": {"type": "object"},
    "mode": {"enum": ["null", "true", "1"]},
    "content": {"type": "string"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}
TEXTS = (
    *("", " ", "\n", "\n\n", "\t", "    return x\n", "a\r\nb\r\n", "a  ", "null", "None", "true"),
    *(
        "1",
        "1e-7",
        '"',
        "'",
        '\\"',
        "\\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "🦫",
        "日本",
        "é",
        "<",
        ">",
    ),
    *("&lt;", "<b>", "</b>", "```", "]]>", "<![CDATA[", "x = y", ")", ", b=1)", "}}", "]}"),
)


def marks_of(family: str) -> list[str]:
    """Return the call markers of a family as they may occur in a text."""
    calls = form_of(family).calls
    shape = form_of(family).shape
    assert shape is not None
    marks = [*(calls.openings if calls is not None else ()), shape.closing, shape.after]
    marks += [shape.before + "other" + shape.between]
    if shape.tags is not None:
        tags = shape.tags
        marks += [tags.end, tags.gap + tags.end + tags.after, f"{tags.before}x{tags.as_text}"]
        marks += [f"{tags.before}x{tags.as_text}y{tags.gap}{tags.end}{tags.after}"]
        marks += [f"{tags.before}path{tags.as_text}"]
    return [mark for mark in marks if mark]


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Return a strategy for JSON values that contain those texts."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from((0, -1, 2**53 + 1, 10**18, 1e-7, -2.5)),
        texts,
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(("k", "a_b", "C")), inner, max_size=3),
        ),
        max_leaves=5,
    )


@st.composite
def calls(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw the arguments of a call; all texts may contain markers of the family's format."""
    texts = st.lists(st.sampled_from((*TEXTS, *marks_of(family))), max_size=4).map("".join)
    # Gemma's notation has no names by which an argument within another could be told from text.
    nested = values(st.sampled_from(TEXTS) if "gemma" in family else texts)
    optional = {
        "count": st.sampled_from((None, 0, -7, 10**18)),
        "scale": st.sampled_from((1e-7, 0.5, -3, 2**53 + 1)),
        "deep": st.booleans(),
        "parts": st.lists(nested, max_size=3),
        "options": st.dictionaries(st.sampled_from(("k", "a_b")), nested, max_size=2),
        "mode": st.sampled_from(("null", "true", "1")),
    }
    chosen = draw(st.lists(st.sampled_from([*optional]), unique=True))
    arguments = {"path": draw(texts)}
    arguments |= {key: draw(optional[key]) for key in chosen}
    return arguments | ({"content": draw(texts)} if draw(st.booleans()) else {})


def said(events: list[ParsedEvent]) -> str:
    return read(events).said


@pytest.mark.parametrize("family", FORMS)
@given(data=st.data())
def test_rendered_call_is_parsed_exactly_or_kept_as_text(family: str, data: st.DataObject) -> None:
    """Whole, character by character, and with text after it."""
    arguments = data.draw(calls(family))
    form, text = form_of(family), written_call(family, arguments)
    heard = read(parse([text], form, [TOOL]))
    if heard.calls:
        assert heard.calls == [("look_up", arguments)], text
        assert json.dumps(heard.calls[0][1]) == json.dumps(arguments), "and of the same types"
    else:
        assert heard.said == text, "no call, and not all of its text"
        assert may_be_unclear(family, arguments), text
    whole = parse([text], form, [TOOL])
    assert parse(text, form, [TOOL]) == whole, text


def may_be_unclear(family: str, arguments: dict[str, Any]) -> bool:
    """Return whether a text argument contains the start of an argument."""
    calls = form_of(family).calls
    if not isinstance(calls, TagCalls):
        return False
    head = calls.tags.before.strip()
    return any(isinstance(one, str) and head in one for one in arguments.values())


@pytest.mark.parametrize("family", FORMS)
def test_strings_with_one_marker_are_always_parsed(family: str) -> None:
    """Each marker alone, inside, and at both ends of a string."""
    form = form_of(family)
    for mark in marks_of(family):
        for text in (mark, f"one {mark} two", f"{mark}two", f"one\n{mark}\n"):
            for arguments in ({"path": "a.txt", "content": text}, {"path": text, "deep": True}):
                call = written_call(family, arguments)
                heard = read(parse([call], form, [TOOL]))
                assert heard.calls == [("look_up", arguments)] or (
                    not heard.calls and heard.said == call and may_be_unclear(family, arguments)
                ), call


@pytest.mark.parametrize("family", FORMS)
def test_call_of_unknown_tool_is_text(family: str) -> None:
    text = f"As in {written_call(family, {'path': 'x'}, 'other')}, so."
    if family in ("llama", "llama, python"):  # whose calls stand where an answer begins
        text = written_call(family, {"path": "x"}, "other")
    events = parse([text], form_of(family), [TOOL])
    assert not any(isinstance(event, CallStart) for event in events)
    assert family == "harmony" or said(events) == text


@pytest.mark.parametrize("family", FORMS)
def test_truncated_call_is_text(family: str) -> None:
    """Truncated at any character, by `max_tokens` or a stop string."""
    form = form_of(family)
    arguments = {"path": "/etc/hosts", "count": 3, "content": "one\ntwo"}
    text = written_call(family, arguments)
    for cut in range(len(text)):
        parser = form.parser([TOOL])
        events = [*parser.feed(text[:cut]), *parser.end(cut=True)]
        heard = read(events)
        assert all(call == ("look_up", arguments) for call in heard.calls), text[:cut]
    parser = form.parser([TOOL])
    events = [*parser.feed(text), *parser.end(cut=True)]
    assert read(events).calls == [("look_up", arguments)]


@pytest.mark.parametrize("family", FORMS)
def test_truncated_second_call_keeps_first(family: str) -> None:
    form = form_of(family)
    first, second = (written_call(family, {"path": path}) for path in ("a", "b"))
    parser = form.parser([TOOL])
    joined = f"{first}; {second}" if family == "llama" else f"{first}\n{second}"
    if family in ("harmony", "llama, python"):
        return  # a message, or a list, holds one call
    heard = read([*parser.feed(joined[: len(joined) - len(second) // 2]), *parser.end(cut=True)])
    assert heard.calls == [("look_up", {"path": "a"})]


def test_missing_final_closing_tag_keeps_call() -> None:
    """Where the model ended its answer by itself."""
    for family in FORMS:
        calls = form_of(family).calls
        if not isinstance(calls, TagCalls) or not calls.shape.closing:
            continue
        text = written_call(family, {"path": "a"}).removesuffix(calls.shape.closing.strip())
        assert read(parse([text], form_of(family), [TOOL])).calls == [("look_up", {"path": "a"})]


def test_two_calls_after_one_marker_are_parsed() -> None:
    text = written_call("qwen3_coder", {"path": "a"})
    head, tail = "<function=look_up>", "\n</tool_call>"
    body = text.partition(head)[2].removesuffix(tail)
    twice = text.removesuffix(tail) + f"\n{head}{body}{tail}"
    heard = read(parse([twice], form_of("qwen3_coder"), [TOOL]))
    assert heard.calls == [("look_up", {"path": "a"})] * 2 and not heard.said


def test_call_inside_unclosed_reasoning_is_a_call() -> None:
    form, call = form_of("hermes"), written_call("hermes", {"path": "a"})
    for text in (f"I look. {call}", f"I may write <tool_call> and then: {call}"):
        heard = read(parse([f"<think>{text}"], form, [TOOL]))
        assert heard.calls == [("look_up", {"path": "a"})]
        assert heard.reasoning == text.removesuffix(call)
    for family in ("hermes", "qwen3_coder"):
        draft = written_call(family, {"path": "b"})
        answer = written_call(family, {"path": "a"})
        heard = read(parse([f"<think>{draft} or not</think>{answer}"], form_of(family), [TOOL]))
        assert (heard.reasoning, heard.calls) == (f"{draft} or not", [("look_up", {"path": "a"})])


def test_parsing_many_markers_without_calls_is_fast() -> None:
    """Each could begin a call, and is scanned to the end of the answer."""
    text = '<tool_call>{"name": "look_up", "arguments": {"path": "' * 4_000
    heard = read(parse([text], form_of("hermes"), [TOOL]))
    assert heard.said == text and not heard.calls


VERBATIM = ("it's", "a\\nb", "two\nlines", "'", "''", "\\", "x', y", "'quoted'", "tab\t", "(", "]")


@pytest.mark.parametrize("text", VERBATIM)
def test_unescaped_single_quotes_are_parsed_if_template_writes_them(text: str) -> None:
    """As in LFM2.5; elsewhere they are Python strings with escapes."""
    form = replace(form_of("pythonic"), calls=PythonicCalls(verbatim=True))
    call = f"<|tool_call_start|>[look_up(path='{text}', count=3, deep=True)]<|tool_call_end|>"
    heard = read(parse(call, form, [TOOL]))
    assert heard.calls == [("look_up", {"path": text, "count": 3, "deep": True})]
    last = f"<|tool_call_start|>[look_up(count=None, path='{text}')]<|tool_call_end|>"
    assert read(parse(last, form, [TOOL])).calls == [("look_up", {"count": None, "path": text})]
    python = f"<|tool_call_start|>[look_up(path={text!r})]<|tool_call_end|>"
    assert read(parse(python, form_of("pythonic"), [TOOL])).calls == [("look_up", {"path": text})]


def test_nested_lists_are_parsed_as_python_literals() -> None:
    form = replace(form_of("pythonic"), calls=PythonicCalls(verbatim=True))
    call = (
        """<|tool_call_start|>[look_up(path='a', parts=['a', 1, None, "it's"])]<|tool_call_end|>"""
    )
    heard = read(parse(call, form, [TOOL]))
    assert heard.calls == [("look_up", {"path": "a", "parts": ["a", 1, None, "it's"]})]


@pytest.mark.parametrize("family", ["seed", "minicpm5"])
def test_lists_and_objects_in_python_notation_are_parsed(family: str) -> None:
    """As templates with `| string` write them; JSON is parsed too."""
    parts, options = [1, {"k": ["v", None, True]}], {"k": {"a_b": "it's"}}
    for write in (repr, json.dumps):
        call = written_call(family, {"path": "a", "parts": write(parts), "options": write(options)})
        heard = read(parse([call], form_of(family), [TOOL]))
        assert heard.calls == [("look_up", {"path": "a", "parts": parts, "options": options})]


def test_unescaped_quotes_are_detected_from_template() -> None:
    shown = """<|tool_call_start|>{{- "'" + arg_value + "'" -}}"""
    made = SimpleNamespace(chat_template=shown, has_thinking=False, eos_token_ids=[])
    made.get_vocab, made.has_tool_calling = dict, True
    made.tool_parser = SimpleNamespace(__module__="mlx_lm.tool_parsers.pythonic")
    assert answer_format(made).calls == PythonicCalls(verbatim=True)
    made.chat_template = shown.replace("+ arg_value +", "+ (arg_value | tojson) +")
    assert answer_format(made).calls == PythonicCalls()
