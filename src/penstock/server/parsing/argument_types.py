"""JSON types of a tool's arguments, as its schema names them.

Formats that write each argument between tags write a text as it is, and all else as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

DEPTH = 8
"""References and unions that are followed one behind the other."""
MOST_BRANCHES = 64
"""Schemas of one value that are looked at."""
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
    """Return the types that a schema allows; none where it does not say.

    >>> sorted(json_types({"anyOf": [{"type": "integer"}, {"type": "null"}]}))
    ['integer', 'null']

    Args:
        schema: of a value.
        root: the schema whose parts its `$ref`s name.
    """
    types = set[str]()
    for branch in branches(schema, root):
        named = branch.get("type")
        if "enum" in branch or "const" in branch:
            types |= {_PYTHON_TYPES[type(value)] for value in constants(branch)}
        elif isinstance(named, str):
            types.add(named)
        elif isinstance(named, list):
            types |= {one for one in named if isinstance(one, str)}
        else:
            return set()
    return types


def branches(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of which a value follows one, without references and unions.

    Behind so many that no value needs them it is a schema that allows anything.
    """
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
    """Return the values that a schema lists; none if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def with_plain_types(tools: Any) -> list[Any]:
    """Return tools whose properties have one `type` each, for parsers that look for nothing else.

    mlx-lm's would give an `anyOf` of an integer and null as a text; Python's optional arguments
    have such a schema.

    >>> (tool,) = with_plain_types([{"function": {"parameters": {"properties": {
    ...     "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}}}])
    >>> tool["function"]["parameters"]["properties"]["n"]["type"]
    'integer'
    """
    return [_plain_tool(tool) for tool in tools]


def _plain_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    root = function.get("parameters") if isinstance(function, Mapping) else None
    properties = root.get("properties") if isinstance(root, Mapping) else None
    if function is None or root is None or not isinstance(properties, Mapping):
        return tool
    plain = {name: _plain(schema, root) for name, schema in properties.items()}
    return {**tool, "function": {**function, "parameters": {**root, "properties": plain}}}


def _plain(schema: Any, root: Any) -> Any:
    types = json_types(schema, root)
    wanted = {"string"} if "string" in types else types - {"null"}
    return {**schema, "type": wanted.pop()} if len(wanted) == 1 else schema


def _part(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference to it names; None if there is none."""
    at = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        at = at.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at if reference.startswith("#/") else None
