"""JSON types of a tool's arguments, according to its schema.

Formats with a tag for each argument write strings verbatim and other types as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

DEPTH = 8
"""Maximum depth of references and unions."""
MOST_BRANCHES = 64
"""Maximum number of alternative schemas of a value."""
_PYTHON_TYPES = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
    type(None): "null",
}


def json_types(schema: Any, root: Any = None) -> set[str]:
    """Return the types a schema allows; empty if unspecified. `root` resolves `$ref`s.

    >>> sorted(json_types({"anyOf": [{"type": "integer"}, {"type": "null"}]}))
    ['integer', 'null']
    """
    types = set[str]()
    for branch in branches(schema, root):
        named = branch.get("type")
        if "enum" in branch or "const" in branch:
            types |= {_PYTHON_TYPES[type(value)] for value in constants(branch)}
        elif isinstance(named, str):
            types.add(named)
        elif isinstance(named, list):
            types |= {name for name in named if isinstance(name, str)}
        else:
            return set()
    return types


def branches(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a value's resolved alternative schemas; after `MOST_BRANCHES`, one that allows all."""
    schemas = _branches(schema, root, DEPTH)
    yield from islice(schemas, MOST_BRANCHES)
    if next(schemas, None) is not None:
        yield {}


def _branches(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if not isinstance(schema, Mapping) or not depth:
        yield {}
        return
    unions = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
    parts = next((part for part in unions if isinstance(part, list)), None)
    if "$ref" in schema:
        yield from _branches(_part(root, str(schema["$ref"])), root, depth - 1)
    elif parts and "type" not in schema:
        for part in parts:
            yield from _branches(part, root, depth - 1)
    else:
        yield schema


def constants(schema: Mapping[str, Any]) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _part(root: Any, reference: str) -> Any:
    """Resolve a `$ref`; None if it points to nothing."""
    part = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        name = key.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if reference.startswith("#/") else None
