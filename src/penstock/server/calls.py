"""Calls that a client demands: a grammar that lets the model say nothing else.

Possible where the text around the arguments of its calls is known, as of most models. The tool and
its arguments stay the model's choice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.model.constraint import GRAMMAR_BYTES
from penstock.server.call_rules import (
    ANY_ARGUMENTS,
    CallRule,
    call_rules,
    demanded_grammar,
    free_grammar,
)
from penstock.server.parsing import AnswerFormat
from penstock.server.parsing.formats import NONE
from penstock.server.problems import BadRequest

LEFT_OUT = "x-penstock-left-out"
"""Header with the names of tools that were left out of the prompt."""
UNENFORCED = "x-penstock-unenforced"
"""Header with the rules of tools' schemas that a demanded call may break."""
MOST_HEADER_CHARACTERS = 2_000


class CallGrammar(NamedTuple):
    """Grammar of the calls of an answer."""

    grammar: str | None
    """Text of the grammar; None where any text will do."""
    unenforced: tuple[str, ...] = ()
    """Rules of the tools' schemas that are not kept to, as "search:uniqueItems"."""
    free: bool = False
    """Whether any text may stand around the calls, reasoning too."""


def left_out_headers(names: Iterable[str]) -> dict[str, str]:
    r"""Return the header that names tools which were left out; none if there are none.

    >>> left_out_headers(["web_search", "a\r\nb"]), left_out_headers([])
    ({'x-penstock-left-out': 'web_search, a__b'}, {})
    """
    return _header(LEFT_OUT, names)


def unenforced_headers(rules: Iterable[str]) -> dict[str, str]:
    """Return the header that names rules that are not kept to; none if there are none.

    >>> unenforced_headers(["search:uniqueItems"])
    {'x-penstock-unenforced': 'search:uniqueItems'}
    """
    return _header(UNENFORCED, rules)


def _header(header: str, names: Iterable[str]) -> dict[str, str]:
    plain = [re.sub(r"[^\w.:$-]", "_", name, flags=re.ASCII) for name in dict.fromkeys(names)]
    return {header: ", ".join(plain)[:MOST_HEADER_CHARACTERS]} if plain else {}


def offered(
    tools: Sequence[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None
) -> list[dict[str, Any]] | None:
    """Return the tools that a prompt offers, as OpenAI's `tool_choice` wants it."""
    return list(tools) if tools and tool_choice != "none" else None


def demanded(
    form: AnswerFormat,
    tools: Sequence[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    inputs: Mapping[str, str] | None = None,
) -> CallGrammar | None:
    """Return the grammar of the call that OpenAI's `tool_choice` demands; None if it does not.

    `inputs` has the grammars of the inputs of custom tools, by name.

    Raises:
        BadRequest: it is of no known form, or as `call_grammar`.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    if tool_choice == "required":
        return call_grammar(form, tools, inputs=inputs)
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function":
        function = tool_choice.get("function", tool_choice)  # of responses: without the layer
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
    """Return the grammar of one call. Slow: not in an event loop.

    Args:
        form: of the model's answers.
        tools: those offered, in OpenAI's form.
        name: of the tool that is to be called; None is any of them.
        inputs: grammars of the inputs of custom tools, by name.

    Raises:
        BadRequest: there is no such tool, or this model writes its calls in another way.
    """
    functions = [tool["function"] for tool in tools or ()]
    wanted = [function for function in functions if name in (None, function["name"])]
    if not wanted:
        what = "no tool" if name is None else f"no tool named {name[:80]!r}"
        raise BadRequest(f"tool_choice: {what} is offered", param="tool_choice")
    if (shape := form.shape) is None:
        raise _refused(form, "cannot be held to a call")
    named = [one for one in wanted if re.fullmatch(shape.names, one["name"])]
    if not named:
        raise _refused(form, f"has no calls of a tool named {wanted[0]['name'][:80]!r}: rename it")
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
    """Return the grammar of any text, whose calls of some tools are kept to. Slow.

    Args:
        form: of the model's answers.
        tools: those that may be called, in OpenAI's form.
        kept: names of those whose calls follow their schemas.
        inputs: grammars of the inputs of custom tools, by name, which are kept to as well.
        inside: whether the answer begins inside the model's reasoning.
    """
    inputs = inputs or {}
    functions = [tool["function"] for tool in tools]
    named = [f"{name}:strict" for name in kept] + [f"{name}:grammar" for name in inputs]
    if (shape := form.free_shape) is None:
        return CallGrammar(None, tuple(named))
    wanted = [
        rule if rule.name in kept or rule.input_grammar else CallRule(rule.name)
        for rule in rules_of(functions, inputs)
    ]
    rules = call_rules(shape, form.marks, wanted)
    grammar = free_grammar(shape, form.marks, rules, form.reasoning, inside=inside)
    if len(grammar) > GRAMMAR_BYTES:  # no call is demanded: without a grammar it is answered, too
        return CallGrammar(None, tuple(named))
    return CallGrammar(grammar, rules.unenforced, free=True)


def rules_of(
    functions: Iterable[Mapping[str, Any]], inputs: Mapping[str, str] | None = None
) -> list[CallRule]:
    """Return the rules for the calls of functions.

    Args:
        functions: in OpenAI's form.
        inputs: grammars of the inputs of custom tools, by name.
    """
    return [
        CallRule(
            function["name"],
            function.get("parameters") or ANY_ARGUMENTS,
            (inputs or {}).get(function["name"]),
        )
        for function in functions
    ]
