"""Required calls: grammars that allow only a tool call.

The grammar requires a format whose text around calls is known, as for most models. The model
chooses the tool, unless named, and the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.model.constraint import GRAMMAR_BYTES
from penstock.server.parsing.formats import NONE, AnswerFormat
from penstock.server.problems import BadRequest
from penstock.server.tools.call_rules import (
    ANY_ARGUMENTS,
    CallRule,
    call_rules,
    demanded_grammar,
    free_grammar,
)

LEFT_OUT = "x-penstock-left-out"
"""Response header that lists tools omitted from the prompt."""
DESCRIBED = "x-penstock-tools-in-system"
"""Response header that lists tools described in the system message by this server."""
UNENFORCED = "x-penstock-unenforced"
"""Response header that lists schema rules that calls may violate."""
MOST_HEADER_CHARACTERS = 2_000


class CallGrammar(NamedTuple):
    grammar: str | None
    unenforced: tuple[str, ...] = ()
    """Unenforced schema rules, such as "search:uniqueItems"."""
    free: bool = False
    """Whether the grammar allows text and reasoning around the calls."""


def named_header(header: str, names: Iterable[str]) -> dict[str, str]:
    r"""Return a header that lists `names`; empty if there are none.

    >>> named_header(LEFT_OUT, ["web_search", "search:uniqueItems", "a\r\nb"])
    {'x-penstock-left-out': 'web_search, search:uniqueItems, a__b'}
    """
    plain = [re.sub(r"[^\w.:$-]", "_", name, flags=re.ASCII) for name in dict.fromkeys(names)]
    return {header: ", ".join(plain)[:MOST_HEADER_CHARACTERS]} if plain else {}


def offered(
    tools: Sequence[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    return list(tools) if tools and tool_choice != "none" else None


def demanded(
    form: AnswerFormat,
    tools: Sequence[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    inputs: Mapping[str, str] | None = None,
) -> CallGrammar | None:
    """Return the grammar of the call that `tool_choice` requires; None if it requires none.

    Args:
        form: format of the model's answers.
        tools: tools that may be called.
        tool_choice: `tool_choice` of the request.
        inputs: Lark grammars of the inputs of custom tools, by name.

    Raises:
        BadRequest: the choice is invalid, or the format does not support it.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    if tool_choice == "required":
        return call_grammar(form, tools, inputs=inputs)
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function":
        function = tool_choice.get("function", tool_choice)  # /v1/responses has no inner object
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return call_grammar(form, tools, name, inputs)
    raise BadRequest(
        'tool_choice can be "auto", "none", "required" or a function with its name',
        param="tool_choice",
        code="unsupported_value",
    )


def call_grammar(
    form: AnswerFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    name: str | None = None,
    inputs: Mapping[str, str] | None = None,
) -> CallGrammar:
    """Return the grammar of a call of the tool `name`, or of any if it is None; see `demanded`."""
    functions = [tool["function"] for tool in tools or ()]
    candidates = [function for function in functions if name in (None, function["name"])]
    if not candidates:
        what = "no tool" if name is None else f"no tool named {name[:80]!r}"
        raise BadRequest(f"tool_choice: {what} is offered", param="tool_choice")
    if (shape := form.shape) is None:
        raise _refused(form, "cannot be constrained by a grammar")
    named = [function for function in candidates if re.fullmatch(shape.names, function["name"])]
    if not named:
        unnamed = candidates[0]["name"]
        raise _refused(form, f"has no calls of a tool named {unnamed[:80]!r}: rename it")
    rules = call_rules(shape, form.marks, rules_of(named, inputs))
    return CallGrammar(demanded_grammar(shape, form.marks, rules), rules.unenforced)


def _refused(form: AnswerFormat, why: str) -> BadRequest:
    what = f"the format of this model's calls, {form.call_name}, {why}"
    if form.call_name == NONE:
        what = "this model's chat template shows no format of calls"
    return BadRequest(
        f"tool_choice can be auto or none here: {what}. Ask for the call in the prompt, or name "
        "another format with penstock serve --tool-parser if the model writes that",
        param="tool_choice",
        code="unsupported_value",
    )


def free_call_grammar(
    form: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    kept: Collection[str],
    inputs: Mapping[str, str] | None = None,
    *,
    inside: bool = False,
) -> CallGrammar:
    """Return the grammar of free text in which calls of the `kept` tools follow their schemas.

    Args:
        form: format of the model's answers.
        tools: tools that may be called.
        kept: names of the tools whose schemas are enforced.
        inputs: Lark grammars of the inputs of custom tools, by name.
        inside: whether the answer starts inside reasoning.
    """
    inputs = inputs or {}
    functions = [tool["function"] for tool in tools]
    named = [f"{name}:strict" for name in kept] + [f"{name}:grammar" for name in inputs]
    if (shape := form.free_shape) is None:
        return CallGrammar(None, tuple(named))
    rules_kept = [
        rule if rule.name in kept or rule.input_grammar else CallRule(rule.name)
        for rule in rules_of(functions, inputs)
    ]
    rules = call_rules(shape, form.marks, rules_kept)
    grammar = free_grammar(shape, form.marks, rules, form.reasoning, inside=inside)
    if len(grammar) > GRAMMAR_BYTES:  # no call is required: answer without a grammar
        return CallGrammar(None, tuple(named))
    return CallGrammar(grammar, rules.unenforced, free=True)


def rules_of(
    functions: Iterable[Mapping[str, Any]], inputs: Mapping[str, str] | None = None
) -> list[CallRule]:
    return [
        CallRule(
            function["name"],
            function.get("parameters") or ANY_ARGUMENTS,
            (inputs or {}).get(function["name"]),
        )
        for function in functions
    ]
