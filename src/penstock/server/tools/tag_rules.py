r"""Grammars of calls with a tag for each argument, such as Qwen's and DeepSeek's, and Gemma's.

    <parameter=path>     a string: verbatim, up to its end tag
    a.txt
    </parameter>
    <parameter=count>    any other type: JSON that follows its schema
    3
    </parameter>

Properties follow the order of the schema. Strings follow `enum` and `const`, but no other rule for
strings. In formats where all values are JSON, such as Python calls, strings follow their schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.server.parsing.argument_types import branches, constants, json_types
from penstock.server.parsing.shapes import CallShape, Marks, ParameterTags
from penstock.server.tools.tool_schemas import COMPOSING, LITTLE_SPACE

EMPTY = '""'
TEXT_RULES = ("format", "maxLength", "minLength", "not", "pattern")
TYPE = "TYPE"
"""Placeholder for a value's JSON type."""
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_LOCAL = re.compile(r"#/(?:\$defs|definitions)/")
_DEFINITIONS = ("$defs", "definitions")


class TagRules(NamedTuple):
    text: str
    unenforced: tuple[str, ...] = ()


@dataclass(slots=True)
class TagWriter:
    shape: CallShape
    marks: Marks
    room: int

    @property
    def tags(self) -> ParameterTags:
        assert self.shape.tags is not None
        return self.shape.tags

    def rules(self, name: str, schema: Mapping[str, Any]) -> TagRules:
        rules = self._rules(name, schema)
        if len(rules.text) > self.room:
            rules = TagRules(self._rules(name, {}).text, ("size",))
        self.room -= len(rules.text)
        return rules

    def _rules(self, name: str, schema: Mapping[str, Any]) -> TagRules:
        if self.tags.notation == "gemma":
            text = self._text(f"{name}_text")
            writer = GemmaWriter(name, schema, self.marks, self.tags.end, text)
            return TagRules(writer.rules(), tuple(writer.unenforced))
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or COMPOSING & schema.keys():
            composed = sorted(COMPOSING & schema.keys())
            text = ordered(name, [], self._separator, f"{name}_any")
            return TagRules(f"{text}{self._any(name)}", tuple(composed))
        required = schema.get("required") or ()
        sequence, lines, unenforced = list[tuple[str, bool]](), list[str](), list[str]()
        for number, (key, value) in enumerate(properties.items()):
            if not re.fullmatch(self.tags.keys, key):
                unenforced.append("properties")
                continue
            rule = f"{name}_{number}"
            sequence.append((rule, key in required))
            lines.append(f"{rule}: {self._parameter(rule, key, value, schema)}")
            unenforced += self._left_out(value, schema)
        # As in the parsers: unknown names would make it ambiguous where a string ends.
        is_open = not properties or bool(schema.get("additionalProperties"))
        if self.tags.notation == "json":
            is_open = schema.get("additionalProperties") is not False
        if is_open:
            lines.append(self._any(name))
        whole = ordered(name, sequence, self._separator, f"{name}_any" if is_open else None)
        return TagRules("".join((whole, *lines)), tuple(dict.fromkeys(unenforced)))

    @property
    def _separator(self) -> str:
        return self.marks.of(self.tags.separator) if self.tags.separator else ""

    def _any(self, name: str) -> str:
        tags, rule = self.tags, f"{name}_any"
        before, key = self.marks.of(tags.before), f"/{tags.keys}/"
        if tags.notation == "json":
            return f"{rule}: {before} {key} {self.marks.of(tags.as_json)} {self._json(rule, {})}"
        return f"{rule}: {before} {key} {self.marks.of(tags.as_text)} {self._text(rule)}"

    def _parameter(self, rule: str, key: str, value: Any, root: Mapping[str, Any]) -> str:
        tags, types = self.tags, json_types(value, root)
        if tags.notation != "json" and (not types or "string" in types):
            head = self.marks.of(f"{tags.before}{key}{tags.as_text}")
            texts = _texts(value, root)
            if texts is None or any(tags.end in text for text in texts):
                return f"{head} {self._text(rule)}"
            return f"{head} ({' | '.join(map(_quoted, texts))}) {self._end}\n"
        schema = _alone(value, root) or ({"type": sorted(types)} if types else {})
        return f"{self._typed(key, types)} {self._json(rule, schema)}"

    def _typed(self, key: str, types: Collection[str]) -> str:
        """Return the text before a JSON value, with its type if the tag includes it."""
        first, named, rest = f"{self.tags.before}{key}{self.tags.as_json}".partition(TYPE)
        if not named:
            return self.marks.of(first)
        names = sorted({"number" if name == "integer" else name for name in types})
        choice = " | ".join(map(_quoted, names))
        return f"{self.marks.of(first)} ({choice}) {self.marks.of(rest)}"

    def _json(self, rule: str, schema: Mapping[str, Any]) -> str:
        spaced = {**schema, "x-guidance": LITTLE_SPACE}
        return f"{rule}_json {self._end}\n{rule}_json: %json {json.dumps(spaced)}\n"

    def _text(self, rule: str) -> str:
        """Return the rules of a string up to and including its end tag."""
        tags, special = self.tags, self.marks.special
        marks = [mark for mark in special if mark in tags.end]
        if not marks:
            # Even in a string, the call's end mark ends the whole call.
            ends = "|".join(map(_pattern, (self.shape.closing.strip(), *tags.outside)))
            over = f"/(?s:.*){_pattern(tags.end)}/ & ~/(?s:.*)({ends})(?s:.*)/"
            return f"{rule}_text {self._after}\n{rule}_text[lazy]: {over}\n"
        first, _, rest = tags.end.partition(max(marks, key=len))
        mark = self.marks.of(tags.end[len(first) : len(tags.end) - len(rest)])
        end = f"{mark} {self.marks.of(rest)}"
        if not first:  # no text contains a mark
            return f"/(?s:.+)/? {end} {self._after}\n"
        lines = f"{rule}_part[lazy]: /(?s:.*){_pattern(first)}/\n"
        return f"{rule}_part+ {end} {self._after}\n{lines}"

    @property
    def _after(self) -> str:
        return self.marks.of(self.tags.after)

    @property
    def _end(self) -> str:
        return self.marks.of(f"{self.tags.gap}{self.tags.end}{self.tags.after}")

    def _left_out(self, value: Any, root: Mapping[str, Any]) -> Iterator[str]:
        """Yield the unenforced schema rules of an argument."""
        types = json_types(value, root)
        if self.tags.notation == "json" or (types and "string" not in types):
            if _alone(value, root) is None:
                yield "$ref"
            return
        for branch in branches(value, root):
            if not constants(branch):
                yield from (rule for rule in TEXT_RULES if rule in branch)


def ordered(
    name: str, members: Sequence[tuple[str, bool]], separator: str, more: str | None
) -> str:
    r"""Return Lark rules for members in a fixed order, some of them optional.

    >>> ordered("a", [("b", True), ("c", False)], "", None)
    'a: b c?\n'
    >>> print(ordered("a", [("b", False), ("c", True)], '","', None))
    a: b a_from_1 | c a_from_2
    a_from_1: "," c a_from_2
    a_from_2: ""
    <BLANKLINE>
    """
    if not separator:
        parts = [rule if needed else f"{rule}?" for rule, needed in members]
        return f"{name}: {' '.join([*parts, *([f'{more}*'] if more else [])]) or EMPTY}\n"
    starts, lines, empty = list[str](), list[str](), True
    for i, (rule, needed) in enumerate(members, 1):
        if empty:
            starts.append(f"{rule} {name}_from_{i}")
        empty = empty and not needed
        if i > 1:
            pair = f"{separator} {rule}"
            lines.append(
                f"{name}_from_{i - 1}: {pair if needed else f'({pair})?'} {name}_from_{i}\n"
            )
    last = f"({separator} {more})*" if more else EMPTY
    if members:
        lines.append(f"{name}_from_{len(members)}: {last}\n")
    if empty:
        starts += [f"{more} {last}"] if more else []
        starts.append(EMPTY)
    return "".join((f"{name}: {' | '.join(starts)}\n", *lines))


def _alone(value: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an argument's schema with its definitions; None if a reference is not local."""
    references = _REFERENCE.findall(json.dumps([value, *map(root.get, _DEFINITIONS)]))
    if any(not _LOCAL.match(reference) for reference in references):
        return None
    parts = {part: root[part] for part in _DEFINITIONS if references and part in root}
    return {**value, **parts}


def _texts(value: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Return all strings allowed for a value; None if they are not enumerated."""
    texts = list[str]()
    for branch in branches(value, root):
        listed = constants(branch)
        if not listed and json_types(branch, root) != {"null"}:
            return None
        texts += [text for text in listed if isinstance(text, str)]
    return texts or None


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


DEPTH = 8
MOST_RULES = 400
"""Maximum number of rules per tool; beyond, values are unconstrained."""
EMPTY = '""'
SCALARS = frozenset({"boolean", "integer", "null", "number"})
_ALL_TYPES = (*sorted(SCALARS), "array", "object", "string")
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_FOLLOWED = frozenset(
    {
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items"),
        *("title", "description", "default", "example", "examples", "deprecated", "$comment"),
        *("$defs", "definitions", "anyOf", "oneOf", "$ref"),
    }
)
"""Schema keys that are enforced, or that do not constrain values."""


@dataclass(slots=True)
class GemmaWriter:
    """Writer of one tool's argument rules in Gemma's notation.

    This is JSON with unquoted keys, and strings between marks:

        path:<|"|>a.txt<|"|>,lines:[1,2],part:{at:1.5}

    Properties follow the order of the schema. Strings follow only `enum` and `const`; numbers
    follow their schema. `text` matches the rest of a string and its end mark.
    """

    name: str
    root: Mapping[str, Any]
    marks: Marks
    quote: str
    text: str
    lines: list[str] = field(default_factory=list)
    unenforced: dict[str, None] = field(default_factory=dict)
    _count: int = 0

    def rules(self) -> str:
        name = self.name
        self.lines = [
            f"{name}: {self._members(self.root, DEPTH)}\n",
            f"{name}_text: {self.marks.of(self.quote)} {self.text}",
            f"{name}_any: {' | '.join(self._typed(kind, {}, 0) for kind in _ALL_TYPES)}\n",
            f'{name}_pair: (/\\w{{1,128}}/ | {name}_text) ":" {name}_any\n',
            *self.lines,
        ]
        return "".join(self.lines)

    def _value(self, schema: Any, depth: int) -> str:
        if not depth or self._count > MOST_RULES:
            return f"{self.name}_any"
        choices = [
            choice
            for branch in branches(schema, self.root)
            for choice in self._choices(branch, depth)
        ]
        return self._rule(" | ".join(dict.fromkeys(choices)))

    def _choices(self, schema: Mapping[str, Any], depth: int) -> Iterator[str]:
        if listed := constants(schema):
            yield from (self.marks.of(gemma_text(value, self.quote)) for value in listed)
            return
        named = schema.get("type")
        types = [named] if isinstance(named, str) else named
        if not isinstance(types, list) or not set(types) <= set(_ALL_TYPES):
            yield f"{self.name}_any"
            return
        kept = _FOLLOWED | ({*_NUMBERS} if SCALARS & set(types) else set())
        self.unenforced |= dict.fromkeys(sorted(schema.keys() - kept))
        yield from (self._typed(kind, schema, depth - 1) for kind in types)

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return f"{self.name}_text"
        if kind in SCALARS:
            numbers = {key: schema[key] for key in _NUMBERS if key in schema}
            return self._rule(f"%json {json.dumps({'type': kind, **numbers})}")
        if kind == "object":
            return f'"{{" {self._rule(self._members(schema, depth))} "}}"'
        item = self._value(schema["items"], depth) if "items" in schema else f"{self.name}_any"
        return f'"[" ({item} ("," {item})*)? "]"'

    def _members(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        pair = f"{self.name}_pair"
        if not isinstance(properties, Mapping) or COMPOSING & schema.keys():
            self.unenforced |= dict.fromkeys(sorted(COMPOSING & schema.keys()))
            return self._in_order([], {}, pair)
        members = {
            key: self._rule(f'{self._key(key)} ":" {self._value(value, depth)}')
            for key, value in properties.items()
        }
        more = None if schema.get("additionalProperties") is False else pair
        return self._in_order(schema.get("required") or (), members, more)

    def _in_order(
        self, required: Collection[str], members: Mapping[str, str], more: str | None
    ) -> str:
        rest = f'("," {more})*' if more else EMPTY
        starts = [f"{more} {rest}", EMPTY] if more else [EMPTY]
        for key, rule in reversed([*members.items()]):
            after = self._rule(rest)
            starts = [f"{rule} {after}", *([] if key in required else starts)]
            pair = f'"," {rule}'
            rest = f"{pair if key in required else f'({pair})?'} {after}"
        return " | ".join(starts)

    def _rule(self, expression: str) -> str:
        self._count += 1
        rule = f"{self.name}_{self._count}"
        self.lines.append(f"{rule}: {expression}\n")
        return rule

    def _key(self, key: str) -> str:
        bare = re.fullmatch(r"\w+", key, re.ASCII)
        return self.marks.of(key if bare else f"{self.quote}{key}{self.quote}")


def gemma_text(value: Any, quote: str) -> str:
    """Return a value in Gemma's notation.

    >>> print(gemma_text({"a": ["b", 1, True]}, "'"))
    {a:['b',1,true]}
    """
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        pairs = (f"{key}:{gemma_text(member, quote)}" for key, member in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(gemma_text(item, quote) for item in value)}]"
    return json.dumps(value)
