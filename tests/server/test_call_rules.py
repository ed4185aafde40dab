"""Grammars of tool calls, required or not, for the families that write JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from written_answers import OURS, TOOLS, dumped, form_of, written_call

from penstock.server.parsing.deepseek import DeepSeekCalls
from penstock.server.parsing.events import ArgumentsPart, CallEnd, CallStart
from penstock.server.parsing.formats import AnswerFormat
from penstock.server.parsing.mistral import HEADED
from penstock.server.parsing.shapes import NO_MARKS, CallShape, Marks
from penstock.server.tools.call_rules import CallRule, call_rules, demanded_grammar
from penstock.server.tools.calls import call_grammar, free_call_grammar
from penstock.server.tools.tag_rules import TagWriter

SPECIAL = (
    *("<think>", "</think>", "<tool_call>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("[TOOL_CALLS]", "[ARGS]", "｜DSML｜", "<|open|>", "<|close|>", "<|sep|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
)
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
    **{name: form_of(name) for name in ("hermes", "nemotron", "granite", "phi", "llama", "seed")},
    **{name: form_of(name) for name in ("json_tools", "harmony", "deepseek", "apriel")},
    **{name: form_of(name) for name in ("qwen3_coder", "mistral", "deepseek, V3.2")},
    **{name: form_of(name) for name in ("kimi_k2", "minimax_m2")},
    **{name: form_of(name) for name in ("kimi_k3", "minicpm5", "pythonic", "gemma4")},
    **{name: form_of(name) for name in ("function_gemma", "muse_spark", "glm47", "longcat")},
    "deepseek, V3.1": V31,
    "mistral, newer": replace(form_of("mistral"), calls=HEADED),
}
TAGGED = (
    *("qwen3_coder", "seed", "minimax_m2", "deepseek, V3.2", "kimi_k3", "minicpm5", "pythonic"),
    *("gemma4", "function_gemma", "muse_spark", "glm47", "longcat"),
)
"""Forms in which each argument stands alone."""
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
    """Return whether a text follows a grammar to its end, with markers as special tokens."""
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
    return written_call(family, ARGUMENTS if arguments is None else arguments, name)


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_required_call_follows_model_format(family: str, marks: Marks) -> None:
    """And parsed as that call; other tools, arguments and text are rejected."""
    form = replace(FORMS[family], marks=marks)
    grammar = call_grammar(form, STRICT, "look_up").grammar
    call = written(family)
    assert follows(grammar, call, marks)
    parser = form.parser(STRICT)
    events = [*parser.feed(call), *parser.end()]
    start, end = [one for one in events if isinstance(one, CallStart | CallEnd)]
    assert isinstance(start, CallStart) and start.name == "look_up" and end == CallEnd()
    for wrong in (written(family, "look_up_all"), written(family, arguments={"text": "c"})):
        assert not follows(grammar, wrong, marks)
    for blank in " \n\u1680":
        assert not follows(grammar, call.replace('look_up"', f'look_up{blank}"'), marks) or (
            'look_up"' not in call
        )
    assert not follows(grammar, f"So: {call}", marks)
    assert not follows(call_grammar(form, STRICT).grammar, call + "and", marks)


MANY = {
    "path": {"type": "string"},
    "mode": {"type": "string", "enum": ["read", "write"]},
    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    "deep": {"type": "boolean"},
    "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}},
    "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
}
PART = {"type": "object", "properties": {"at": {"type": "number"}}, "required": ["at"]}
MANY_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": MANY,
            "required": ["path", "count"],
            "$defs": {"Part": PART},
        },
    },
}
GIVEN = {"path": 'a "b" <c>\n\\ü', "mode": "read", "count": 3, "deep": False}
GIVEN_PARTS = {"parts": [{"at": 1.5}], "note": "abcd"}


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_tagged_arguments_follow_types(family: str, marks: Marks) -> None:
    """And are parsed as values of those types."""
    form = replace(FORMS[family], marks=marks)
    made = call_grammar(form, [MANY_TOOL], "look_up")
    texts_as_json = family == "pythonic"
    assert made.unenforced == (() if texts_as_json else ("look_up:maxLength",))
    parts = GIVEN_PARTS | ({"note": "abc"} if texts_as_json else {})
    for given in (GIVEN, GIVEN | parts, {"path": "", "count": -1}):
        call = written_call(family, given)
        assert follows(made.grammar, call, marks)
        parser = form.parser([MANY_TOOL])
        events = [*parser.feed(call), *parser.end()]
        grown = "".join(one.text for one in events if isinstance(one, ArgumentsPart))
        assert json.loads(grown) == given
    missing = {"path": "a"}
    for wrong in ({"mode": "go"}, {"count": "x"}, {"deep": 1}, {"parts": [{"at": "x"}]}, {"q": 1}):
        assert not follows(made.grammar, written_call(family, GIVEN | wrong), marks), wrong
    assert not follows(made.grammar, written_call(family, missing), marks)


@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
@pytest.mark.parametrize("family", ["gemma4", "function_gemma"])
def test_gemma_grammar_supports_nested_schemas(family: str, marks: Marks) -> None:
    """Also for recursive schemas; keys that are no words stand between markers."""
    quote = "<escape>" if family == "function_gemma" else '<|"|>'
    node = {
        "type": "object",
        "properties": {
            "a b": {"type": "string", "minLength": 1},
            "below": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            "size": {"type": "number", "minimum": 2},
        },
        "required": ["a b"],
    }
    properties = {"top": {"$ref": "#/$defs/Node"}, "rest": {"type": "object"}}
    schema = {"properties": properties, "$defs": {"Node": node}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    form = replace(FORMS[family], marks=marks)
    made = call_grammar(form, [tool], "look_up")
    assert made.unenforced == ("look_up:minLength",)
    leaf = {"a b": "}{,c:1 \n", "size": 2.5}
    for given in (
        {},
        {"rest": {"x": [None, {"y": "z"}], "w": True}},
        {"top": {"a b": "", "below": [leaf, {"a b": "", "below": [leaf]}]}, "rest": {}},
    ):
        call = written_call(family, given).replace("a b:", f"{quote}a b{quote}:")
        assert follows(made.grammar, call, marks), call
        parser = form.parser([tool])
        events = [*parser.feed(call), *parser.end()]
        grown = "".join(one.text for one in events if isinstance(one, ArgumentsPart))
        assert json.loads(grown) == given
    for wrong in ({"top": {"size": 3}}, {"top": {"a b": "", "below": [{"a b": 1}]}}, {"rest": 1}):
        call = written_call(family, wrong).replace("a b:", f"{quote}a b{quote}:")
        assert not follows(made.grammar, call, marks), call


def test_call_end_marker_is_never_inside_arguments() -> None:
    """mlx-lm's parsers stop at the first end marker."""
    grammar = call_grammar(FORMS["qwen3_coder"], [MANY_TOOL]).grammar
    call = written_call("qwen3_coder", {"path": "so </tool_call> so", "count": 1})
    assert not follows(grammar, call)
    assert follows(grammar, call.replace("so </tool_call>", "so </tool_cal>"))


def test_unenforceable_tag_schemas_are_reported() -> None:
    properties = {
        "a b": {"type": "string"},
        "c": {"$ref": "#/properties/d"},
        "d": {"type": "integer"},
    }
    schema = {"type": "object", "properties": properties, "required": ["a b", "c"]}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    made = call_grammar(FORMS["qwen3_coder"], [tool])
    assert set(made.unenforced) == {"look_up:properties", "look_up:$ref"}
    assert follows(made.grammar, written_call("qwen3_coder", {"c": 1}))
    assert not follows(made.grammar, written_call("qwen3_coder", {"c": "x"}))
    wide = {f"{n:0100}": {"type": "string"} for n in range(300)}
    large = {"type": "function", "function": {"name": "large", "parameters": {"properties": wide}}}
    made = call_grammar(FORMS["qwen3_coder"], [large])
    assert made.unenforced == ("large:size",) and len(made.grammar or "") < 65_536
    assert follows(made.grammar, "<tool_call>\n<function=large>\n</function>\n</tool_call>")


@pytest.mark.parametrize("family", [name for name in FORMS if name not in BARE])
@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_calls_in_free_text_follow_schemas(family: str, marks: Marks) -> None:
    """For strict tools only; any text may surround the calls."""
    form = replace(FORMS[family], marks=marks)
    made = free_call_grammar(form, STRICT, {"look_up"})
    # Their marks have a special token in them.
    if family in ("deepseek, V3.2", "kimi_k3") and marks is MARKS:
        assert made == (None, ("look_up:strict",), False)
        return
    grammar = made.grammar
    good, bad = written(family), written(family, arguments={"text": "c"})
    other = written(family, "look_up_all", {"text": "c"})
    for text in ("", "Hello <b>.", good, f"So:\n{good}", f"{good}{good}", f"{other} {good} Bye."):
        assert follows(grammar, text, marks), text
    assert not follows(grammar, bad, marks)
    assert not follows(grammar, f"Hello {bad}", marks)
    assert not follows(grammar, f"{good}\n{bad}", marks)
    assert not follows(grammar, written(family, "unknown"), marks)


@pytest.mark.parametrize("marks", [MARKS, NO_MARKS], ids=["special", "spelt"])
def test_reasoning_may_mention_calls(marks: Marks) -> None:
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
def test_unenforced_rules_are_reported(family: str) -> None:
    form = FORMS[family]
    made = free_call_grammar(form, STRICT, ["look_up"], {"patch": "start: /a/"})
    assert made.grammar is None and made.unenforced == ("look_up:strict", "patch:grammar")


def test_list_of_calls_after_one_marker_follows_schemas() -> None:
    form: AnswerFormat = form_of("nemotron")
    grammar = free_call_grammar(form, STRICT, {"look_up"}).grammar
    calls = [("look_up", {"text": "a"}), ("look_up_all", {"text": "z"})]
    assert follows(grammar, OURS["nemotron"][1](calls))
    assert not follows(grammar, OURS["nemotron"][1](calls[:1] * 2).replace('"a"', '"c"'))


def test_custom_tool_input_follows_its_grammar() -> None:
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


def test_recursive_grammar_is_reported_as_unenforced() -> None:
    form = form_of("hermes")
    custom = {"type": "function", "function": {"name": "nest", "parameters": {"type": "object"}}}
    made = free_call_grammar(form, [custom], (), {"nest": 'start: "(" start? ")"'})
    assert made.unenforced == ("nest:grammar",)
    assert follows(made.grammar, written("hermes", "nest", {"input": "(("}))


def test_oversized_custom_grammars_are_reported_as_unenforced() -> None:
    """A grammar may have 65,536 characters; one input has 36,000."""
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


def test_too_many_tools_for_grammar_are_reported() -> None:
    names = [f"look_up_{number}" for number in range(600)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    made = free_call_grammar(form_of("hermes"), tools, names[:3])
    assert made.grammar is None and not made.free
    assert made.unenforced == tuple(f"{name}:strict" for name in names[:3])
    assert free_call_grammar(form_of("hermes"), tools[:99], names[:3]).grammar is not None


def test_oversized_grammar_is_rejected_without_escaping() -> None:
    custom = {"type": "function", "function": {"name": "patch", "parameters": {"type": "object"}}}
    wide = "start: " + " ".join(f"/[a-z{number}]/" for number in range(200_000))
    before = time.process_time()
    made = free_call_grammar(form_of("hermes"), [custom], (), {"patch": wide})
    assert time.process_time() - before < 1
    assert made.unenforced == ("patch:grammar",)


@pytest.mark.parametrize("last", [{"type": "integer"}, {"anyOf": []}, {"$ref": "#/$defs/D0"}])
def test_schema_with_many_branches_is_fast(last: dict[str, Any]) -> None:
    """Each level has 200 references to the next: a billion branches."""
    levels = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 200} for n in range(4)}
    schema = {"properties": {"n": {"$ref": "#/$defs/D0"}}, "$defs": {**levels, "D4": last}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    form = FORMS["qwen3_coder"]
    before = time.process_time()
    parser = form.parser([tool])
    events = [*parser.feed(written_call("qwen3_coder", {"n": "7"})), *parser.end()]
    assert any(isinstance(one, ArgumentsPart) for one in events)
    assert list(TagWriter(cast(CallShape, form.shape), NO_MARKS, 9_999).rules("a", schema))
    assert time.process_time() - before < 1


def test_names_and_schemas_are_escaped_in_grammar() -> None:
    shape = form_of("hermes").shape
    assert shape is not None
    schema = {"properties": {'a"b': {"const": "</tool_call>"}}, "required": ['a"b']}
    tool = CallRule('f"\\', {"type": "object", **schema})
    grammar = demanded_grammar(shape, NO_MARKS, call_rules(shape, NO_MARKS, [tool]))
    assert follows(grammar, written("hermes", 'f"\\', {'a"b': "</tool_call>"}))
    assert json.dumps('f"\\') in written("hermes", 'f"\\')
