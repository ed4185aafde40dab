"""Calls in Python syntax: `name(key=value)`."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import regex

from penstock.server.parsing.answer_text import AnswerText, Reading, peek, until
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.json_text import arguments_text

_OPENING, _CLOSING = "([{", ")]}"
_ARGUMENT_DEPTH = 2
"""Number of brackets open around an argument: those of the list and of the call."""
_BEHIND_VALUE = regex.compile(r"\s*(?:,\s*[A-Za-z_]\w*\s*=|\)\s*(?:,|\]))")
"""Text after an argument: the next argument's name, or the end of a call in a list."""
_LITERALS = {"true": True, "false": False, "null": None}


def closed(source: AnswerText, before: str, *, verbatim: bool = False) -> Reading[str]:
    """Consume text until all brackets are closed; return the expression.

    `before` is the beginning of the expression, already consumed. With `verbatim`, single-quoted
    arguments have no escapes. Raises BrokenCall if a bracket is never closed.
    """
    text, depth = before, sum(map(before.count, _OPENING))
    while depth:
        while not source.ready:
            yield
        sign = source.sign
        if not sign:
            raise BrokenCall("a bracket without an end")
        if sign in "\"'":
            as_it_is = verbatim and sign == "'" and depth == _ARGUMENT_DEPTH
            text += yield from (_verbatim if as_it_is else _quoted)(source)
            continue
        text += source.advance()
        depth += (sign in _OPENING) - (sign in _CLOSING)
    return text


def emit_calls(out: Events, text: str) -> None:
    """Emit the call or list of calls in an expression; BrokenCall if it is neither."""
    body = _parsed(text)
    try:
        read = [_call(node) for node in (body.elts if isinstance(body, ast.List) else [body])]
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BrokenCall("no call in Python") from error
    if not read:
        raise BrokenCall("no calls")
    for name, _ in read:
        out.check(name)
    for name, arguments in read:
        out.start(name)
        out.arguments(arguments)
        out.end()


def python_value(text: str) -> Any:
    """Evaluate a Python literal, allowing JSON's constants; BrokenCall if it is not a literal.

    >>> python_value("{'a': [True, null, 1]}")
    {'a': [True, None, 1]}
    """
    try:
        return ast.literal_eval(_Literals().visit(_parsed(text)))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BrokenCall("no literal of Python's") from error


def _parsed(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes, which are kept unchanged
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenCall("no expression of Python's") from error


def _quoted(source: AnswerText) -> Reading[str]:
    quote = text = source.advance()
    while True:
        while not source.ready:
            yield
        sign = source.sign
        if not sign:
            raise BrokenCall("a string without an end")
        text += source.advance()
        if sign == quote:
            return text
        if sign == "\\":
            while not source.ready:
                yield
            text += source.advance() if source.sign else ""


def _verbatim(source: AnswerText) -> Reading[str]:
    """Consume a string without escapes, and return it as a Python literal.

    A quote that cannot end the value is part of the string.
    """
    source.advance()
    parts: list[str] = []
    while (yield from until(source, ("'",), parts.append)) is not None:
        if (yield from peek(source, _BEHIND_VALUE)) is not None:
            return repr("".join(parts))
        parts.append("'")
    raise BrokenCall("a string without an end")


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by keywords")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no call by keywords")
        arguments[keyword.arg] = ast.literal_eval(_Literals().visit(keyword.value))
    return _name(node.func), arguments_text(arguments)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise ValueError("no name")


class _Literals(ast.NodeTransformer):
    """Transformer that replaces JSON's constants by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _LITERALS:
            return node
        return ast.copy_location(ast.Constant(_LITERALS[node.id]), node)
