"""Reduction of tools' argument schemas to the rules that a grammar can enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.model.constraint import GRAMMAR_BYTES, WHITESPACE, json_schema_grammar
from penstock.errors import SettingError

VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keys whose values are data, not schemas."""
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keys whose values are named schemas."""
COMPOSING = frozenset(
    {
        *("$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "else", "if", "oneOf"),
        *("patternProperties", "then", "unevaluatedProperties"),
    }
)
"""Keys other than `properties` that add properties to an object."""
FOREIGN = frozenset({"$anchor", "$id", "$schema"})
"""Keys that identify a schema's location, which changes here."""
LITTLE_SPACE = {"whitespace_pattern": WHITESPACE}
"""Limit on whitespace in a call, which a model could otherwise repeat until its token limit."""
ATTEMPTS = 8
"""Attempts to drop single rules before the whole schema is dropped."""
ROOM = GRAMMAR_BYTES - 4_096
"""Bytes of a grammar available for the schemas of all tools."""

_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_FORMAT = re.compile(r"Unknown format: (\S+)")


class Arguments(NamedTuple):
    schemas: tuple[dict[str, Any], ...]
    unenforced: tuple[str, ...]
    """Unenforced rules, as "tool:rule"."""

    @classmethod
    def of(cls, functions: Sequence[tuple[str, Mapping[str, Any]]], room: int = ROOM) -> Arguments:
        """Return enforceable schemas of functions, without the largest if they exceed `room`."""
        parts = [_eased(closed(parameters)) for _, parameters in functions]
        schemas, rules = [schema for schema, _ in parts], [list(names) for _, names in parts]
        sizes = [len(json.dumps(schema)) for schema in schemas]
        while sum(sizes) > room:
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            schemas[largest], rules[largest] = {"type": "object"}, ["size"]
            sizes[largest] = 0
        unenforced = [
            f"{name}:{rule}"
            for (name, _), names in zip(functions, rules, strict=True)
            for rule in names
        ]
        spaced = tuple({**schema, "x-guidance": LITTLE_SPACE} for schema in schemas)
        return cls(spaced, tuple(unenforced))


def _eased(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a schema without unenforceable rules, and the names of those rules."""
    eased, left_out = _local(schema), list[str]()
    for _ in range(ATTEMPTS):
        try:
            json_schema_grammar(eased)
        except SettingError as error:
            names, drop = _wrong(str(error))
            left_out += names
            eased = _without(eased, drop)
        else:
            return eased, list(dict.fromkeys(left_out))
    return {"type": "object"}, ["parameters"]


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Forbid additional properties in a schema's objects.

    Few clients set `additionalProperties`, and a weak model would keep adding properties. A
    schema that composes objects from several parts stays open, as no part names all properties.

    >>> closed({"properties": {"a": {}}})
    {'additionalProperties': False, 'properties': {'a': {}}}
    >>> closed({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]})
    {'allOf': [{'properties': {'a': {}}}, {'properties': {'b': {}}}]}
    """
    composed = False

    def close(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal composed
        composed = composed or _is_composed(part)
        return {"additionalProperties": False, **part} if "properties" in part else part

    whole: dict[str, Any] = _mapped(schema, lambda key, value: (key, value), close)
    return dict(schema) if composed else whole


def _is_composed(part: Mapping[str, Any]) -> bool:
    several = isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1
    return several or ("properties" in part and bool(COMPOSING & part.keys()))


def _wrong(message: str) -> tuple[list[str], Callable[[str, Any], bool]]:
    """Return the rules that an error names, and a predicate for the keys to drop."""
    if keys := _KEYS.search(message):
        names = [str(name) for name in json.loads(keys[1])]
        return names, lambda key, value: key in names
    if unknown := _FORMAT.search(message):
        return ["format"], lambda key, value: key == "format" and value == unknown[1]
    if "regex" in message:
        return ["pattern"], lambda key, value: key in ("pattern", "patternProperties")
    return ["$ref"], lambda key, value: key == "$ref" and not str(value).startswith("#")


def _without(schema: Any, drop: Callable[[str, Any], bool]) -> Any:
    return _mapped(schema, lambda key, value: None if drop(key, value) else (key, value))


def _local(schema: Any) -> Any:
    return _mapped(schema, lambda key, value: None if key in FOREIGN else (key, value))


def _mapped(
    schema: Any,
    change: Callable[[str, Any], tuple[str, Any] | None],
    finish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Any:
    """Rewrite the keys and values of a schema, recursively."""
    if isinstance(schema, list):
        return [_mapped(part, change, finish) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    mapped = {}
    for key, value in schema.items():
        changed = change(key, value)
        if changed is None:
            continue
        key, value = changed
        if key in VALUES:
            mapped[key] = value
        elif key in NAMED and isinstance(value, Mapping):
            mapped[key] = {name: _mapped(part, change, finish) for name, part in value.items()}
        else:
            mapped[key] = _mapped(value, change, finish)
    return finish(mapped)
