"""Tools of `/v1/responses`, converted to functions for templates, and their calls back.

function     ──────────────────────────> unchanged
namespace    ── each function ─────────> namespace__name, and back
custom       ── text as input ─────────> a function with one text argument, and back
local_shell  ──────────────────────────> a function with a command, and back
tools that run on OpenAI's servers      left out, and named in a header
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from penstock.server.answers import ToolCall
from penstock.server.problems import BadRequest
from penstock.server.tools.allowed_tools import flat_name

Kind: TypeAlias = Literal["function", "custom", "local_shell"]

LOCAL_SHELL = "local_shell"
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_COMMAND = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


@dataclass(frozen=True, slots=True)
class Offered:
    kind: Kind
    name: str
    namespace: str | None = None
    grammar: str | None = None
    """Grammar of a `custom` tool's input, in llguidance's format."""
    strict: bool = False


@dataclass(slots=True)
class Tools:
    chat: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    offered: dict[str, Offered] = field(default_factory=dict)

    @classmethod
    def of(cls, offered: Iterable[dict[str, Any]] | None) -> Tools:
        tools = cls()
        for index, tool in enumerate(offered or ()):
            tools._read(tool, f"tools.{index}", None)
        return tools

    @property
    def inputs(self) -> dict[str, str]:
        tools = self.offered.items()
        return {name: tool.grammar for name, tool in tools if tool.grammar is not None}

    @property
    def strict(self) -> frozenset[str]:
        return frozenset(name for name, tool in self.offered.items() if tool.strict)

    def is_function(self, name: str) -> bool:
        tool = self.offered.get(name)
        return tool is None or tool.kind == "function"

    def item(self, call: ToolCall) -> dict[str, Any]:
        tool = self.offered.get(call.name) or Offered("function", call.name)
        if tool.kind == "local_shell":
            action = {"env": {}, **_object(call.arguments), "type": "exec"}
            return {**_item("lsh", "local_shell_call", call.id), "action": action}
        if tool.kind == "custom":
            text = input_of(call)
            item = {**_item("ctc", "custom_tool_call", call.id), "name": tool.name, "input": text}
        else:
            item = {**_item("fc", "function_call", call.id), "name": tool.name}
            item["arguments"] = call.arguments
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        return item

    def _read(self, fields: Mapping[str, Any], place: str, namespace: str | None) -> None:
        tool = {name: value for name, value in fields.items() if value is not None}
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner = tool.get("tools")
            for index, function in enumerate(inner if isinstance(inner, list) else ()):
                if isinstance(function, dict):
                    self._read(function, f"{place}.tools.{index}", str(tool.get("name")))
        elif kind in ("function", "custom"):
            self._offer(tool, kind, place, namespace)
        elif kind == LOCAL_SHELL:
            self._add(Offered("local_shell", LOCAL_SHELL), _COMMAND, "Runs a command locally.")
        else:
            self.left_out.append(str(tool.get("name") or kind))

    def _offer(
        self, tool: Mapping[str, Any], kind: Kind, place: str, namespace: str | None
    ) -> None:
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{place}: a tool of type {kind} must have a name", param=place)
        description = str(tool.get("description") or "")
        if kind == "function":
            function = self._add(
                Offered(kind, name, namespace, strict=tool.get("strict") is True),
                tool.get("parameters"),
                description,
            )
            if "description" not in tool:
                del function["description"]
            if "parameters" not in tool:
                del function["parameters"]
            return
        form = tool.get("format")
        grammar = None
        if isinstance(form, dict) and form.get("type") == "grammar":
            grammar = _grammar(form, f"{place}.format")
            description = f"{description}\nIts input follows this grammar:\n{form['definition']}"
        self._add(Offered(kind, name, namespace, grammar), _INPUT, description.strip())

    def _add(self, tool: Offered, parameters: Any, description: str) -> dict[str, Any]:
        name = flat_name(tool.name, tool.namespace)
        self.offered.setdefault(name, tool)
        function = {"name": name, "description": description, "parameters": parameters}
        self.chat.append({"type": "function", "function": function})
        return function


def input_of(call: ToolCall) -> str:
    """Return the input of a custom tool's call; its raw arguments if it has no text input."""
    text = _object(call.arguments).get("input")
    return text if isinstance(text, str) else call.arguments


def _item(prefix: str, kind: str, call_id: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}_{uuid.uuid4().hex}",
        "type": kind,
        "call_id": call_id,
        "status": "completed",
    }


def _object(arguments: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments or "{}")
        if isinstance(parsed, dict):
            return parsed
    return {}


def _grammar(grammar_format: Mapping[str, Any], place: str) -> str:
    syntax, definition = grammar_format.get("syntax"), grammar_format.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
        raise BadRequest(
            f"{place}: a grammar must have a syntax, lark or regex, and a definition", param=place
        )
    if syntax == "lark":
        return definition
    return regex_grammar(definition)


def regex_grammar(regex: str) -> str:
    return f"start: INPUT\nINPUT: /{_slashes(regex)}/\n"


def _slashes(regex: str) -> str:
    r"""Escape the slashes of a regular expression.

    >>> print(_slashes(r"a/b\/c\\/"))
    a\/b\/c\\\/
    """
    characters, escaped = [], False
    for character in regex.replace("\n", r"\n"):
        characters.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(characters)
