"""Calls that follow a grammar, demanded or not, in the forms of the families that write JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from written_answers import OURS, TOOLS, dumped, form_of

from penstock.server.call_rules import CallRule, call_rules, demanded_grammar
from penstock.server.calls import call_grammar, free_call_grammar
from penstock.server.parsing import AnswerFormat, CallEnd, CallStart
from penstock.server.parsing.deepseek import DeepSeekCalls
from penstock.server.parsing.shapes import NO_MARKS, Marks

SPECIAL = ("<think>", "</think>", "<tool_call>", "<|channel|>", "<|message|>", "<|constrain|>")
END = 256
ARGUMENTS = {"text": "a"}
STRICT = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"enum": ["a", "b"]}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look_up", "look_up_all")
]
V31 = replace(form_of("deepseek"), calls=DeepSeekCalls(fenced=False))
FORMS = {
    **{name: form_of(name) for name in ("hermes", "nemotron", "granite", "phi", "llama")},
    **{name: form_of(name) for name in ("json_tools", "harmony", "deepseek")},
    "deepseek, V3.1": V31,
}
BARE = ("harmony", "llama")
"""Forms in which no mark alone tells a call from text."""


class Bytes:
    """Tokenizer for llguidance: a token for every byte, and some special tokens."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(END)), b"<end>", *map(str.encode, SPECIAL))
    special_token_ids = tuple(range(END, len(tokens)))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError
        return list(text.encode())


TOKENS = LLTokenizer(TokenizerWrapper(Bytes()))
MARKS = Marks({text: END + 1 + at for at, text in enumerate(SPECIAL)}, {END})


def follows(grammar: str | None, text: str, marks: Marks = NO_MARKS) -> bool:
    """Tell whether a text follows a grammar to its end; a mark in it is its special token."""
    assert grammar is not None
    matcher = LLMatcher(TOKENS, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    while text:
        mark = next((mark for mark in marks.special if text.startswith(mark)), None)
        tokens += list(text[0].encode()) if mark is None else [marks.special[mark]]
        text = text[1 if mark is None else len(mark) :]
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def written(family: str, name: str = "look_up", arguments: Any = None) -> str:
    """Return a call as a family writes it."""
    given = ARGUMENTS if arguments is None else arguments
    if family == "harmony":
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return head + dumped(given)
    if family == "granite":
        return f"<|tool_call|>{dumped([{'name': name, 'arguments': given}])}"
    if family == "json_tools":
        family = "hermes"
    return str(OURS[family][1]([(name, given)]))


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_a_demanded_call_is_written_as_the_model_writes_it(family: str, marks: Marks) -> None:
    """And read as that call; no other tool's, nor other arguments, nor text."""
    form = replace(FORMS[family], marks=marks)
    grammar = call_grammar(form, STRICT, "look_up").grammar
    call = written(family)
    assert follows(grammar, call, marks)
    parser = form.parser(STRICT)
    events = [*parser.feed(call), *parser.end()]
    assert [one for one in events if isinstance(one, CallStart | CallEnd)] == [
        CallStart("look_up"),
        CallEnd(),
    ]
    for wrong in (written(family, "look_up_all"), written(family, arguments={"text": "c"})):
        assert not follows(grammar, wrong, marks)
    assert not follows(grammar, f"So: {call}", marks)
    assert not follows(call_grammar(form, STRICT).grammar, call + "and", marks)


@pytest.mark.parametrize("family", [name for name in FORMS if name not in BARE])
@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_calls_in_free_text_follow_their_schemas(family: str, marks: Marks) -> None:
    """Of a strict tool alone; before, between and behind calls there is any text."""
    form = replace(FORMS[family], marks=marks)
    grammar = free_call_grammar(form, STRICT, {"look_up"}).grammar
    good, bad = written(family), written(family, arguments={"text": "c"})
    other = written(family, "look_up_all", {"text": "c"})
    for text in ("", "Hello <b>.", good, f"So:\n{good}", f"{good}{good}", f"{other} {good} Bye."):
        assert follows(grammar, text, marks), text
    assert not follows(grammar, bad, marks)
    assert not follows(grammar, f"Hello {bad}", marks)
    assert not follows(grammar, f"{good}\n{bad}", marks)
    assert not follows(grammar, written(family, "unknown"), marks)


@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_reasoning_may_speak_of_calls(marks: Marks) -> None:
    form = replace(form_of("hermes"), marks=marks)
    bad = written("hermes", arguments={"text": "c"})
    thought = f"I could say {bad}."
    free = free_call_grammar(form, STRICT, {"look_up"})
    assert free.free and follows(free.grammar, f"<think>{thought}</think>Hi.", marks)
    assert not follows(free.grammar, f"<think>{thought}</think>{bad}", marks)
    inside = free_call_grammar(form, STRICT, {"look_up"}, inside=True).grammar
    assert follows(inside, f"{thought}</think>Hi.", marks)
    assert follows(inside, thought, marks)
    assert not follows(inside, f"{thought}</think>{bad}", marks)


@pytest.mark.parametrize("family", BARE)
def test_what_is_not_kept_to_is_named(family: str) -> None:
    form = FORMS[family]
    made = free_call_grammar(form, STRICT, ["look_up"], {"patch": "start: /a/"})
    assert made.grammar is None and made.unenforced == ("look_up:strict", "patch:grammar")


def test_a_list_of_calls_stands_behind_one_mark() -> None:
    form: AnswerFormat = form_of("nemotron")
    grammar = free_call_grammar(form, STRICT, {"look_up"}).grammar
    calls = [("look_up", {"text": "a"}), ("look_up_all", {"text": "z"})]
    assert follows(grammar, OURS["nemotron"][1](calls))
    assert not follows(grammar, OURS["nemotron"][1](calls[:1] * 2).replace('"a"', '"c"'))


def test_the_input_of_a_custom_tool_follows_its_grammar() -> None:
    form = form_of("hermes")
    patch = 'start: head line+\nhead: "*** \\"Patch\\"" LF\nline: "+" /(.*)/ LF\n%import common.LF'
    custom = {"type": "function", "function": {"name": "patch", "parameters": {"type": "object"}}}
    tools = [*TOOLS, custom]
    grammar = free_call_grammar(form, tools, (), {"patch": patch}).grammar
    for text in ('*** "Patch"\n+a "b" \\n\n+\tü\n', '*** "Patch"\n+\n'):
        assert follows(grammar, f"So: {written('hermes', 'patch', {'input': text})}")
        assert follows(grammar, written("hermes", arguments={"anything": text}))
        wrong = text.replace("\n+", "\n-", 1)
        assert not follows(grammar, f"So: {written('hermes', 'patch', {'input': wrong})}")
        assert not follows(grammar, written("hermes", "patch", {"input": text + "so"}))


def test_a_grammar_that_contains_itself_is_named() -> None:
    form = form_of("hermes")
    custom = {"type": "function", "function": {"name": "nest", "parameters": {"type": "object"}}}
    made = free_call_grammar(form, [custom], (), {"nest": 'start: "(" start? ")"'})
    assert made.unenforced == ("nest:grammar",)
    assert follows(made.grammar, written("hermes", "nest", {"input": "(("}))


def test_inputs_without_room_are_named_and_the_others_are_kept_to() -> None:
    """A grammar has 65,536 characters; one input has 36,000 of them here."""
    numbers = [f"{number:05}" for number in range(4_500)]
    lark = "start: " + " ".join(map(dumped, numbers))
    grammars = dict.fromkeys(("one", "two", "three"), lark)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in grammars
    ]
    made = free_call_grammar(form_of("hermes"), tools, (), grammars)
    assert set(made.unenforced) == {"two:grammar", "three:grammar"}
    assert follows(made.grammar, written("hermes", "one", {"input": "".join(numbers)}))
    assert not follows(made.grammar, written("hermes", "one", {"input": "0"}))
    assert follows(made.grammar, written("hermes", "two", {"input": "0"}))


def test_more_tools_than_a_grammar_has_room_for_are_named() -> None:
    names = [f"look_up_{number}" for number in range(600)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    made = free_call_grammar(form_of("hermes"), tools, names[:3])
    assert made.grammar is None and not made.free
    assert made.unenforced == tuple(f"{name}:strict" for name in names[:3])
    assert free_call_grammar(form_of("hermes"), tools[:99], names[:3]).grammar is not None


def test_a_grammar_that_is_far_too_long_is_not_quoted() -> None:
    custom = {"type": "function", "function": {"name": "patch", "parameters": {"type": "object"}}}
    wide = "start: " + " ".join(f"/[a-z{number}]/" for number in range(200_000))
    before = time.process_time()
    made = free_call_grammar(form_of("hermes"), [custom], (), {"patch": wide})
    assert time.process_time() - before < 1
    assert made.unenforced == ("patch:grammar",)


def test_names_and_schemas_are_quoted() -> None:
    shape = form_of("hermes").shape
    assert shape is not None
    schema = {"properties": {'a"b': {"const": "</tool_call>"}}, "required": ['a"b']}
    tool = CallRule('f"\\', {"type": "object", **schema})
    grammar = demanded_grammar(shape, NO_MARKS, call_rules(shape, NO_MARKS, [tool]))
    assert follows(grammar, written("hermes", 'f"\\', {'a"b': "</tool_call>"}))
    assert json.dumps('f"\\') in written("hermes", 'f"\\')
