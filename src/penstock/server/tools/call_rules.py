"""Grammars of calls in the model's own format.

required:  opening call closing
free:      text opening call, call closing text ...    the model chooses; only calls are constrained

A mark that is a special token of the tokenizer matches only that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.model.constraint import check_grammar
from penstock.errors import SettingError
from penstock.server.parsing.parser import ReasoningMarks
from penstock.server.parsing.shapes import CallShape, Marks
from penstock.server.tools.quoted_grammars import quoted_grammar
from penstock.server.tools.tag_rules import TagWriter
from penstock.server.tools.tool_schemas import ROOM, Arguments

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_BLANK = r"[ \n]?"
"""Optional whitespace in JSON; `\\s` would include characters that JSON does not allow."""
_TEXT = "TEXT: /(?s:.+)/\n"


class CallRule(NamedTuple):
    name: str
    schema: Mapping[str, Any] = ANY_ARGUMENTS
    input_grammar: str | None = None
    """Lark grammar of the single argument `input`; None for any arguments."""


class Rules(NamedTuple):
    """Lark rules of calls: `one` and `several`, both used after an opening."""

    text: str
    unenforced: tuple[str, ...]


def call_rules(shape: CallShape, marks: Marks, tools: Sequence[CallRule]) -> Rules:
    """Return the Lark rules for calls of these tools. Blocking."""
    # The input of a custom tool is a JSON string, or any text between tags.
    inputs = _inputs(tools) if shape.tags is None else dict.fromkeys(range(len(tools)))
    others = [number for number, rule in inputs.items() if rule is None]
    lines = [rule for rule in inputs.values() if rule is not None]
    room = ROOM - sum(map(len, lines))
    schemas, unenforced = Arguments.of([(tools[n].name, tools[n].schema) for n in others], room)
    lost = [f"{tools[n].name}:grammar" for n in others if tools[n].input_grammar is not None]
    writer = None if shape.tags is None else TagWriter(shape, marks, room)
    for number, schema in zip(others, schemas, strict=True):
        if writer is None:
            lines.append(f"arguments_{number}: %json {json.dumps(schema)}\n")
            continue
        rules = writer.rules(f"arguments_{number}", schema)
        lines.append(rules.text)
        lost += [f"{tools[number].name}:{rule}" for rule in rules.unenforced]
    heads = [
        f"{_head(shape, marks, tool.name)} arguments_{number}" for number, tool in enumerate(tools)
    ]
    after, closing = _around(shape, marks, shape.after), _closing(shape, marks)
    lines.append(f"call: ({' | '.join(heads)}) {after}\n")
    lines.append(f"one: call {closing}\n")
    more = shape.separator is not None
    several = f"({_around(shape, marks, shape.separator or '')} call)*" if more else ""
    lines.append(f"several: call {several} {closing}\n")
    return Rules("".join(lines), (*unenforced, *lost))


def demanded_grammar(shape: CallShape, marks: Marks, rules: Rules) -> str:
    opening = marks.of(shape.opening) if shape.opening else ""
    return f"start: {opening} one\n{rules.text}"


def free_grammar(
    shape: CallShape, marks: Marks, rules: Rules, reasoning: ReasoningMarks | None, *, inside: bool
) -> str:
    """Return the grammar of text with any number of calls, but none within reasoning."""
    opening = marks.token(shape.opening)
    thinks = None if reasoning is None else marks.token(reasoning.start)
    rest = marks.others(opening, thinks)
    turns, first = ["to_call several"], ""
    lines = [_until("to_call", shape.opening, marks, rest)]
    if reasoning is not None:
        turns.append("to_think think")
        lines.append(_until("to_think", reasoning.start, marks, rest))
        end = marks.token(reasoning.end)
        lines.append(_until("think", reasoning.end, marks, marks.others(end)))
        first = "think " if inside else ""
    lines.append(f"rest: {_any(rest)}\n")
    loop = f"start: {first}({' | '.join(turns)})* rest\n"
    if first:
        loop += f"    | {_any(marks.others(marks.token(reasoning.end) if reasoning else None))}\n"
    return "".join((loop, *lines, rules.text, _TEXT))


def _until(name: str, mark: str, marks: Marks, others: str | None) -> str:
    """Return a Lark rule for any text up to and including a mark."""
    if marks.token(mark) is not None:
        return f"{name}: {_any(others)} {marks.of(mark)}\n"
    between = f"(TEXT? {others})* " if others else ""
    pattern = re.escape(mark).replace("/", "\\/")
    return f"{name}: {between}{name}_end\n{name}_end[lazy]: /(?s:.*){pattern}/\n"


def _any(others: str | None) -> str:
    return f"(TEXT | {others})*" if others else "TEXT?"


def _head(shape: CallShape, marks: Marks, name: str) -> str:
    if not shape.json:
        return marks.of(f"{shape.before}{name}{shape.between}")
    written = _quoted(json.dumps(name, ensure_ascii=False)[1:-1])
    return f"/{_loose(shape.before)}/ {written} /{_loose(shape.between)}/"


def _around(shape: CallShape, marks: Marks, text: str) -> str:
    if not text:
        return ""
    return f"/{_loose(text)}/" if shape.json else marks.of(text)


def _closing(shape: CallShape, marks: Marks) -> str:
    if not shape.closing:
        return ""
    blank = '"\\n"? ' if shape.json else ""
    return f"{blank}{marks.of(shape.closing)}"


def _loose(text: str) -> str:
    r"""Return a pattern for JSON punctuation with optional whitespace.

    >>> print(_loose('{"name": "'), _loose(', '))
    [ \n]?\{[ \n]?"name"[ \n]?:[ \n]?" [ \n]?,[ \n]?
    """
    parts = re.findall(r'"\w+"|\S', text)
    # A quote at the beginning closes a string: a blank before it would be in the string.
    first = "" if text.startswith('"') else _BLANK
    return first + _BLANK.join(map(re.escape, parts)) + ("" if text[-1:] in '"}' else _BLANK)


def _inputs(tools: Sequence[CallRule]) -> dict[int, str | None]:
    """Return the rules of custom tools' arguments by index; None if they do not fit."""
    rules, left = dict[int, str | None](), ROOM
    for number, tool in enumerate(tools):
        rule = _input(tool, number) if len(tool.input_grammar or "") <= left else None
        rules[number] = rule if len(rule or "") <= left else None
        left -= len(rules[number] or "")
    return rules


def _input(tool: CallRule, number: int) -> str | None:
    """Return the rules of a custom tool's arguments; None if they cannot be constrained."""
    if tool.input_grammar is None:
        return None
    name, prefix = f"arguments_{number}", f"T{number}_"
    opening, closing = _loose('{"input": "'), _loose('"}')
    head = f"{name}: /{opening}/ {prefix}RULE_START /{closing}/"
    try:
        rule = f"{head}\n{quoted_grammar(tool.input_grammar, prefix)}\n"
        check_grammar(f"start: {name}\n{rule}", f"the grammar of {tool.name}")
    except SettingError:
        return None
    return rule


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
