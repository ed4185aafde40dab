"""Answers that may call some of the offered tools: OpenAI's `allowed_tools`.

The prompt offers all tools, so that its prefix stays the same from turn to turn. A grammar keeps
the calls to those that are allowed: any text, and between the model's marks only such a call.
Where no mark tells a call from text, or its arguments are no JSON, the prompt offers the allowed
ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.server.calls import CallGrammar, demanded, free_call_grammar, offered
from penstock.server.parsing import AnswerFormat
from penstock.server.problems import BadRequest
from penstock.server.response_tools import flat_name

Tool = dict[str, Any]
MODES = ("auto", "required")


class ToolPlan(NamedTuple):
    """Tools of one request: those in its prompt, and those that its answer may call."""

    prompt: list[Tool] | None
    """Tools that the prompt offers, in OpenAI's form."""
    choice: str | dict[str, Any] | None
    """Choice among the callable tools, without `allowed_tools`."""
    callable: list[Tool] | None
    """Tools that the answer may call."""
    narrow: bool = False
    """Whether free text may hold calls of the callable tools alone, by a grammar."""
    strict: frozenset[str] = frozenset()
    """Names of more tools whose calls follow their schemas; others say so by `strict`."""

    @classmethod
    def of(
        cls, form: AnswerFormat, tools: Sequence[Tool] | None, choice: str | dict[str, Any] | None
    ) -> ToolPlan:
        """Read a `tool_choice` of chat or of responses.

        Raises:
            BadRequest: an unknown mode, or a tool that is not offered.
        """
        if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
            plain = offered(tools, choice)
            return cls(plain, choice, plain)
        inner = choice.get("allowed_tools", choice)  # of responses: without the layer
        mode = inner.get("mode") if isinstance(inner, dict) else None
        if mode not in MODES:
            raise BadRequest(
                "tool_choice: allowed_tools has a mode, auto or required, and tools",
                param="tool_choice",
                code="unsupported_value",
            )
        allowed = _allowed(list(tools or ()), inner.get("tools"))
        narrow = mode == "auto" and form.free_shape is not None
        kept = allowed if mode == "auto" and not narrow else list(tools or ())
        return cls(kept, mode, allowed, narrow)

    def keeping(self, strict: Iterable[str]) -> ToolPlan:
        """Return the same, with calls of these tools that follow their schemas."""
        return self._replace(strict=frozenset(strict))

    def grammar(
        self,
        form: AnswerFormat,
        inputs: Mapping[str, str] | None = None,
        *,
        inside: bool = False,
    ) -> CallGrammar | None:
        """Return the grammar of the answer's calls; None where any text will do. Slow.

        Args:
            form: of the model's answers.
            inputs: grammars of the inputs of custom tools, by name.
            inside: whether the answer begins inside the model's reasoning.

        Raises:
            BadRequest: as `demanded`.
        """
        if self.choice not in (None, "auto"):
            return demanded(form, self.callable, self.choice, inputs)
        functions = [tool["function"] for tool in self.callable or ()]
        kept = {one["name"] for one in functions if self._keeps(one)}
        given = {one["name"] for one in functions}
        inputs = {name: text for name, text in (inputs or {}).items() if name in given}
        if not kept and not inputs:
            return None
        return free_call_grammar(form, self.callable or (), kept, inputs, inside=inside)

    def _keeps(self, function: Mapping[str, Any]) -> bool:
        """Tell whether free text may hold calls of this function by its schema alone."""
        return self.narrow or bool(function.get("strict")) or function["name"] in self.strict


def _allowed(tools: list[Tool], named: Any) -> list[Tool]:
    """Return the tools that `allowed_tools` names, in the order of the prompt."""
    names = {_name(one) for one in named} if isinstance(named, list) else set()
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    unknown = names - {tool["function"]["name"] for tool in allowed}
    if unknown or not allowed:
        which = f"no tool named {sorted(map(str, unknown))[0][:80]!r}" if unknown else "no tool"
        raise BadRequest(f"tool_choice: {which} is offered", param="tool_choice")
    return allowed


def _name(named: Any) -> str:
    """Return the name of a tool as `allowed_tools` writes it; empty if it has none."""
    if not isinstance(named, dict):
        return ""
    function = named.get("function", named)
    name = function.get("name") if isinstance(function, dict) else None
    if named.get("type") == "local_shell":
        name = "local_shell"
    return flat_name(name, named.get("namespace")) if isinstance(name, str) else ""
