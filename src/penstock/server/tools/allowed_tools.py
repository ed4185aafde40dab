"""OpenAI's `allowed_tools`, which restricts an answer to some of the offered tools.

The prompt offers all tools, so that its prefix stays the same from turn to turn. A grammar
restricts calls to the allowed tools: any text, with only such calls between the model's marks.
If no mark distinguishes calls from text, or arguments are not JSON, the prompt offers only the
allowed tools.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.server.parsing.formats import AnswerFormat
from penstock.server.problems import BadRequest
from penstock.server.tools.calls import CallGrammar, demanded, free_call_grammar, offered

Tool = dict[str, Any]
MODES = ("auto", "required")
_BETWEEN = "__"


class ToolPlan(NamedTuple):
    """Tools of a request: those in its prompt, and those its answer may call."""

    prompt: list[Tool] | None
    choice: str | dict[str, Any] | None
    """`tool_choice` among the callable tools, without `allowed_tools`."""
    callable: list[Tool] | None
    narrow: bool = False
    """Whether a grammar restricts calls in free text to the callable tools."""
    strict: frozenset[str] = frozenset()
    """Names of strict tools in addition to those marked `strict`."""

    @classmethod
    def of(
        cls, form: AnswerFormat, tools: Sequence[Tool] | None, choice: str | dict[str, Any] | None
    ) -> ToolPlan:
        if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
            plain = offered(tools, choice)
            return cls(plain, choice, plain)
        inner = choice.get("allowed_tools", choice)  # /v1/responses has no inner object
        mode = inner.get("mode") if isinstance(inner, dict) else None
        if mode not in MODES:
            raise BadRequest(
                "tool_choice: allowed_tools must have a mode, auto or required, and tools",
                param="tool_choice",
                code="unsupported_value",
            )
        allowed = _allowed(list(tools or ()), inner.get("tools"))
        narrow = mode == "auto" and form.free_shape is not None
        kept = allowed if mode == "auto" and not narrow else list(tools or ())
        return cls(kept, mode, allowed, narrow)

    def keeping(self, strict: Iterable[str]) -> ToolPlan:
        return self._replace(strict=frozenset(strict))

    def binds(self, inputs: Collection[str] = ()) -> bool:
        """Return whether calls may need a grammar; `inputs` names custom tools with a grammar."""
        if self.choice not in (None, "auto"):
            return self.choice != "none"
        return any(
            self._keeps(function) or function["name"] in inputs
            for function in (tool["function"] for tool in self.callable or ())
        )

    def grammar(
        self, form: AnswerFormat, inputs: Mapping[str, str] | None = None, *, inside: bool = False
    ) -> CallGrammar | None:
        if self.choice not in (None, "auto"):
            return demanded(form, self.callable, self.choice, inputs)
        functions = [tool["function"] for tool in self.callable or ()]
        kept = {function["name"] for function in functions if self._keeps(function)}
        names = {function["name"] for function in functions}
        inputs = {name: text for name, text in (inputs or {}).items() if name in names}
        if not kept and not inputs:
            return None
        return free_call_grammar(form, self.callable or (), kept, inputs, inside=inside)

    def _keeps(self, function: Mapping[str, Any]) -> bool:
        """Return whether calls of this function in free text must follow its schema."""
        return self.narrow or bool(function.get("strict")) or function["name"] in self.strict


def flat_name(name: str, namespace: Any = None) -> str:
    """Return the name of a tool in the prompt, which includes its namespace.

    >>> flat_name("close"), flat_name("close", "agents")
    ('close', 'agents__close')
    """
    return f"{namespace}{_BETWEEN}{name}" if isinstance(namespace, str) else name


def _allowed(tools: list[Tool], named: Any) -> list[Tool]:
    names = {_name(tool) for tool in named} if isinstance(named, list) else set()
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    unknown = names - {tool["function"]["name"] for tool in allowed}
    if unknown or not allowed:
        which = f"no tool named {sorted(map(str, unknown))[0][:80]!r}" if unknown else "no tool"
        raise BadRequest(f"tool_choice: {which} is offered", param="tool_choice")
    return allowed


def _name(named: Any) -> str:
    if not isinstance(named, dict):
        return ""
    function = named.get("function", named)
    name = function.get("name") if isinstance(function, dict) else None
    if named.get("type") == "local_shell":
        name = "local_shell"
    return flat_name(name, named.get("namespace")) if isinstance(name, str) else ""
