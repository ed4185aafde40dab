"""Grammars of arguments in Gemma's notation: JSON with unquoted keys, and strings between marks.

path:<|"|>a.txt<|"|>,lines:[1,2],part:{at:1.5}

Properties follow the order of the schema. Strings follow only `enum` and `const`; numbers follow
their schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.server.parsing.argument_types import branches, constants
from penstock.server.parsing.shapes import Marks
from penstock.server.tools.tool_schemas import COMPOSING

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
    """Writer of one tool's argument rules; `text` matches the rest of a string and its end mark."""

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
