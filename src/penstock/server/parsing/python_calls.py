"""Calls in the words of Python: `name(key=value)`."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from penstock.server.parsing.answer_text import AnswerText, Reading
from penstock.server.parsing.events import BrokenCall, Events
from penstock.server.parsing.json_text import arguments_text

_OPENING, _CLOSING = "([{", ")]}"
_LITERALS = {"true": True, "false": False, "null": None}


def closed(source: AnswerText, before: str) -> Reading[str]:
    """Read up to where all brackets are closed; return the expression.

    Args:
        source: continues the expression.
        before: its begin, which has been read: no strings, and at least one open bracket.

    Raises:
        BrokenCall: they are never closed.
    """
    text, depth = before, sum(map(before.count, _OPENING))
    while depth:
        while not source.ready:
            yield
        sign = source.sign
        if not sign:
            raise BrokenCall("a bracket without an end")
        if sign in "\"'":
            text += yield from _quoted(source)
            continue
        text += source.advance()
        depth += (sign in _OPENING) - (sign in _CLOSING)
    return text


def emit_calls(out: Events, text: str) -> None:
    """Emit the calls of an expression: one, or a list of them.

    Raises:
        BrokenCall: the expression is something else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not have stays as it is
            body = ast.parse(text, mode="eval").body
        read = [_call(node) for node in (body.elts if isinstance(body, ast.List) else [body])]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BrokenCall("no call in Python") from error
    for name, arguments in read:
        out.start(name)
        out.arguments(arguments)
        out.end()


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
    """Reader of the names that JSON has for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _LITERALS:
            return node
        return ast.copy_location(ast.Constant(_LITERALS[node.id]), node)
