r"""Grammars of calls whose arguments stand between tags of their own, as Qwen's and DeepSeek's do.

    <parameter=path>     a text: as it is, up to the end of its tag
    a.txt
    </parameter>
    <parameter=count>    all else: JSON by its schema
    3
    </parameter>

The properties stand in the order of their schema. A text follows `enum` and `const`, and none of
the other rules for texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.server.parsing.argument_types import branches, constants, json_types
from penstock.server.parsing.shapes import CallShape, Marks, ParameterTags
from penstock.server.tool_schemas import COMPOSING, LITTLE_SPACE

TEXT_RULES = ("format", "maxLength", "minLength", "not", "pattern")
_KEY = re.compile(r'[^\s<>"]{1,128}')
"""A name that a tag can hold."""
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_LOCAL = re.compile(r"#/(?:\$defs|definitions)/")
_DEFINITIONS = ("$defs", "definitions")


class TagRules(NamedTuple):
    """Lark rules of one tool's arguments."""

    text: str
    unenforced: tuple[str, ...] = ()
    """Rules of the schema that are not enforced."""


@dataclass(slots=True)
class TagWriter:
    """Writer of the rules of arguments."""

    shape: CallShape
    marks: Marks
    room: int
    """Characters that are left for the rules of all tools."""

    @property
    def tags(self) -> ParameterTags:
        """Tags of each argument."""
        assert self.shape.tags is not None
        return self.shape.tags

    def rules(self, name: str, schema: Mapping[str, Any]) -> TagRules:
        """Return the rules of the arguments that a schema describes, as far as there is room.

        Args:
            name: of the first rule; those of the others begin with it.
            schema: of the arguments, as `Arguments` returns it.
        """
        rules = self._rules(name, schema)
        if len(rules.text) > self.room:
            rules = TagRules(self._rules(name, {}).text, ("size",))
        self.room -= len(rules.text)
        return rules

    def _rules(self, name: str, schema: Mapping[str, Any]) -> TagRules:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or COMPOSING & schema.keys():
            composed = sorted(COMPOSING & schema.keys())
            return TagRules(f"{name}: {name}_any*\n{self._any(name)}", tuple(composed))
        required = schema.get("required") or ()
        sequence, lines, unenforced = list[str](), list[str](), list[str]()
        for at, (key, value) in enumerate(properties.items()):
            if not _KEY.fullmatch(key):
                unenforced.append("properties")
                continue
            rule = f"{name}_{at}"
            sequence.append(rule if key in required else f"{rule}?")
            lines.append(f"{rule}: {self._parameter(rule, key, value, schema)}")
            unenforced += _left_out(value, schema)
        if schema.get("additionalProperties") is not False:
            sequence.append(f"{name}_any*")
            lines.append(self._any(name))
        whole = " ".join(sequence) or '""'
        text = "".join((f"{name}: {whole}\n", *lines))
        return TagRules(text, tuple(dict.fromkeys(unenforced)))

    def _any(self, name: str) -> str:
        """Return the rules of an argument of any name, which is a text."""
        tags, rule = self.tags, f"{name}_any"
        before, between = self.marks.of(tags.before), self.marks.of(tags.as_text)
        return f'{rule}: {before} /[^\\s<>"]+/ {between} {self._text(rule)}'

    def _parameter(self, rule: str, key: str, value: Any, root: Mapping[str, Any]) -> str:
        """Return the rules of one argument: those behind the name of the first."""
        tags, types = self.tags, json_types(value, root)
        if not types or "string" in types:
            head = self.marks.of(f"{tags.before}{key}{tags.as_text}")
            texts = _texts(value, root)
            if texts is None or any(tags.end in text for text in texts):
                return f"{head} {self._text(rule)}"
            end = self.marks.of(f"{tags.gap}{tags.end}{tags.after}")
            return f"{head} ({' | '.join(map(_quoted, texts))}) {end}\n"
        head = self.marks.of(f"{tags.before}{key}{tags.as_json}")
        end = self.marks.of(f"{tags.gap}{tags.end}{tags.after}")
        schema = _alone(value, root) or {"type": sorted(types)}
        schema["x-guidance"] = LITTLE_SPACE
        return f"{head} {rule}_json {end}\n{rule}_json: %json {json.dumps(schema)}\n"

    def _text(self, rule: str) -> str:
        """Return the rules of a text up to the end of its tag, and over it."""
        tags, special = self.tags, self.marks.special
        marks = [mark for mark in special if mark in tags.end]
        if not marks:
            # The whole call ends at the first mark behind it, in a text, too.
            over = f"/(?s:.*){_pattern(tags.end)}/ & ~/(?s:.*){self._closing}(?s:.*)/"
            return f"{rule}_text {self._after}\n{rule}_text[lazy]: {over}\n"
        first, _, rest = tags.end.partition(max(marks, key=len))
        mark = self.marks.of(tags.end[len(first) : len(tags.end) - len(rest)])
        end = f"{mark} {self.marks.of(rest)}"
        lines = f"{rule}_part[lazy]: /(?s:.*){_pattern(first)}/\n"
        return f"{rule}_part+ {end} {self._after}\n{lines}"

    @property
    def _after(self) -> str:
        return self.marks.of(self.tags.after)

    @property
    def _closing(self) -> str:
        return _pattern(self.shape.closing.strip())


def _alone(value: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of an argument with the parts that it names; None if there is none."""
    references = _REFERENCE.findall(json.dumps([value, *map(root.get, _DEFINITIONS)]))
    if any(not _LOCAL.match(reference) for reference in references):
        return None
    parts = {part: root[part] for part in _DEFINITIONS if references and part in root}
    return {**value, **parts}


def _texts(value: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Return all texts that a value can be; None if there are others."""
    texts = list[str]()
    for branch in branches(value, root):
        listed = constants(branch)
        if not listed and json_types(branch, root) != {"null"}:
            return None
        texts += [text for text in listed if isinstance(text, str)]
    return texts or None


def _left_out(value: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of an argument that are not kept to."""
    types = json_types(value, root)
    if types and "string" not in types:
        if _alone(value, root) is None:
            yield "$ref"
        return
    for branch in branches(value, root):
        if not constants(branch):
            yield from (rule for rule in TEXT_RULES if rule in branch)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
