"""Limits of llguidance's structural tags for calls, which our grammars do not have.

`StructTag.to_grammar` makes a grammar of any text with calls in it. Where one of these tests fails,
llguidance can say more than it could, and may take the place of `call_rules.free_grammar`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from llguidance import StructTag
from test_call_rules import ARGUMENTS, BARE, FORMS, MARKS, NO_MARKS, STRICT, follows, written
from written_answers import dumped

from penstock.server.parsing.formats import AnswerFormat
from penstock.server.parsing.shapes import Marks
from penstock.server.tools.calls import call_grammar, free_call_grammar
from penstock.server.tools.tag_rules import TagWriter
from penstock.server.tools.tool_schemas import ROOM, Arguments

FAMILIES = sorted(FORMS.keys() - {*BARE})
UNSAID = frozenset(
    {
        *("deepseek, V3.2", "function_gemma", "gemma4", "kimi_k2", "kimi_k3", "mistral"),
        *("mistral, newer", "pythonic"),
    }
)
"""Families with a special token within a call, or whose first mark is one and no `<tag>`."""


def structural(family: str, marks: Marks) -> str:
    """Return llguidance's grammar of text with calls in the family's format."""
    shape, tags = FORMS[family].shape, list[StructTag]()
    assert shape is not None
    for tool in STRICT:
        name = str(tool["function"]["name"])
        call = written(family, name)
        (schema,), _ = Arguments.of([(name, tool["function"]["parameters"])])
        if shape.tags is None:
            begin, _, end = call.partition(dumped(ARGUMENTS))
            grammar = json.dumps(schema)
        else:
            begin = f"{shape.opening}{shape.before}{name}{shape.between}"
            end = f"{shape.after}{shape.closing}"
            rules = TagWriter(shape, marks, ROOM).rules("arguments", schema)
            grammar = f"start: arguments\n{rules.text}"
        special = next((mark for mark in marks.special if begin.startswith(mark)), None)
        tags.append(
            StructTag(trigger=special or shape.opening, begin=begin, grammar=grammar, end=end)
        )
    return str(StructTag.to_grammar(tags, assume_special=special is not None))


def ours(family: str, marks: Marks) -> str:
    form: AnswerFormat = replace(FORMS[family], marks=marks)
    grammar = free_call_grammar(form, STRICT, {"look_up": None, "look_up_all": None})
    assert grammar is not None
    return str(grammar.grammar)


@pytest.mark.parametrize("family", FAMILIES)
def test_structural_tags_write_special_tokens_as_text_in_call(family: str) -> None:
    """A third of the families cannot write calls with their special tokens."""
    call = f"So: {written(family)}"
    assert follows(structural(family, NO_MARKS), call, NO_MARKS)
    assert follows(structural(family, MARKS), call, MARKS) is (family not in UNSAID)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - UNSAID))
def test_structural_tags_forbid_special_tokens_in_text(family: str) -> None:
    """A model that marks its reasoning by special tokens could not reason."""
    answer = f"<think>Hm.</think>{written(family)}"
    assert not follows(structural(family, MARKS), answer, MARKS)
    assert follows(ours(family, MARKS), answer, MARKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_structural_tags_treat_drafts_in_reasoning_as_calls(family: str) -> None:
    answer = f"<think>Not {written(family, 'other')}</think>{written(family)}"
    assert not follows(structural(family, NO_MARKS), answer, NO_MARKS)
    assert follows(ours(family, NO_MARKS), answer, NO_MARKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_structural_tags_cannot_require_call(family: str) -> None:
    assert follows(structural(family, NO_MARKS), "There is none.", NO_MARKS)
    demanded = call_grammar(FORMS[family], STRICT).grammar
    assert not follows(demanded, "There is none.") and follows(demanded, written(family))


@pytest.mark.parametrize(
    "family", ["hermes", "json_tools", "nemotron", "apriel", "granite", "phi", "mistral"]
)
def test_structural_tags_accept_only_one_json_spacing(family: str) -> None:
    """Such as `{"name":"a"` without the blank, or a second call behind one marker."""
    tight = written(family).replace('": ', '":').replace(', "', ',"')
    assert not follows(structural(family, NO_MARKS), tight, NO_MARKS)
    assert follows(ours(family, NO_MARKS), tight, NO_MARKS)
    shape = FORMS[family].shape
    if shape is None or shape.separator is None:
        return
    first, second = (written(family, tool["function"]["name"]) for tool in STRICT)
    both = f"{first.removesuffix(shape.closing)}, {second.removeprefix(shape.opening)}"
    assert not follows(structural(family, NO_MARKS), both, NO_MARKS)
    assert follows(ours(family, NO_MARKS), both, NO_MARKS)
