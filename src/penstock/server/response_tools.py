"""Tools of `/v1/responses`: their form for templates, and their calls in the client's form.

function     ──────────────────────────> the same
namespace    ── a function of it ──────> namespace__name, and back
custom       ── its input is a text ───> a function with one text, and back
local_shell  ──────────────────────────> a function with a command, and back
tools that run on OpenAI's side         left out, and named in a header
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
_BETWEEN = "__"
"""Separator of a namespace and the name of a function in it."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the client knows it."""

    kind: Kind
    name: str
    namespace: str | None = None
    grammar: str | None = None
    """Grammar of a `custom` tool's input, in llguidance's form."""
    strict: bool = False
    """Whether a function's calls follow its schema."""


@dataclass(slots=True)
class Tools:
    """The tools of one request."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    """Tools in the form of chat, which templates know."""
    left_out: list[str] = field(default_factory=list)
    """Names of tools that are left out of the prompt."""
    offered: dict[str, Offered] = field(default_factory=dict)
    """Tools by the names that the model knows."""

    @classmethod
    def of(cls, given: Iterable[dict[str, Any]] | None) -> Tools:
        """Read the tools of a request.

        Raises:
            BadRequest: a function or custom tool without a name, or with a grammar that is none.
        """
        tools = cls()
        for index, tool in enumerate(given or ()):
            tools._read(tool, f"tools.{index}", None)
        return tools

    @property
    def inputs(self) -> dict[str, str]:
        """Grammars of the inputs of custom tools, by the names that the model knows."""
        tools = self.offered.items()
        return {name: tool.grammar for name, tool in tools if tool.grammar is not None}

    @property
    def strict(self) -> frozenset[str]:
        """Names of functions whose calls follow their schemas."""
        return frozenset(name for name, tool in self.offered.items() if tool.strict)

    def is_function(self, name: str) -> bool:
        """Tell whether a call of this name goes to the client as a function's."""
        tool = self.offered.get(name)
        return tool is None or tool.kind == "function"

    def item(self, call: ToolCall) -> dict[str, Any]:
        """Return the output item of a call."""
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

    def _read(self, given: Mapping[str, Any], place: str, namespace: str | None) -> None:
        tool = {name: value for name, value in given.items() if value is not None}
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner = tool.get("tools")
            for index, one in enumerate(inner if isinstance(inner, list) else ()):
                if isinstance(one, dict):
                    self._read(one, f"{place}.tools.{index}", str(tool.get("name")))
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
            raise BadRequest(f"{place}: a tool of type {kind} has a name", param=place)
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
        wanted = tool.get("format")
        grammar = None
        if isinstance(wanted, dict) and wanted.get("type") == "grammar":
            grammar = _grammar(wanted, f"{place}.format")
            description = f"{description}\nIts input follows this grammar:\n{wanted['definition']}"
        self._add(Offered(kind, name, namespace, grammar), _INPUT, description.strip())

    def _add(self, tool: Offered, parameters: Any, description: str) -> dict[str, Any]:
        name = flat_name(tool.name, tool.namespace)
        self.offered.setdefault(name, tool)
        function = {"name": name, "description": description, "parameters": parameters}
        self.chat.append({"type": "function", "function": function})
        return function


def flat_name(name: str, namespace: Any = None) -> str:
    """Return the name under which the model knows a tool.

    >>> flat_name("close"), flat_name("close", "agents")
    ('close', 'agents__close')
    """
    return f"{namespace}{_BETWEEN}{name}" if isinstance(namespace, str) else name


def input_of(call: ToolCall) -> str:
    """Return the input of a custom tool's call; the raw arguments if they are not of its form."""
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


def _grammar(wanted: Mapping[str, Any], place: str) -> str:
    syntax, definition = wanted.get("syntax"), wanted.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
        raise BadRequest(
            f"{place}: a grammar has a syntax, lark or regex, and a definition", param=place
        )
    if syntax == "lark":
        return definition
    return regex_grammar(definition)


def regex_grammar(regex: str) -> str:
    """Return the grammar of a regular expression."""
    return f"start: INPUT\nINPUT: /{_slashes(regex)}/\n"


def _slashes(regex: str) -> str:
    r"""Escape the slashes of a regular expression that stands between slashes.

    >>> print(_slashes(r"a/b\/c\\/"))
    a\/b\/c\\\/
    """
    characters, escaped = [], False
    for character in regex.replace("\n", r"\n"):
        characters.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(characters)
