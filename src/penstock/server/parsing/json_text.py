"""Incremental parsers of JSON. Raw control characters in strings are escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from penstock.server.parsing.answer_text import (
    AnswerText,
    Emit,
    Reading,
    accept,
    expect,
    skip_whitespace,
)
from penstock.server.parsing.events import BrokenCall, Events

DEEPEST = 64
ARGUMENTS = ("arguments", "parameters")

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_SCALAR_SIGNS = frozenset("-+.0123456789abcdefghijklmnopqrstuvwxyzE")


def value(source: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
    """Parse a value; like all parsers here, raises BrokenCall on invalid JSON."""
    sign = yield from skip_whitespace(source, emit)
    if depth > DEEPEST:
        raise BrokenCall("too deep")
    if sign == "{":
        yield from members(source, emit, lambda _: value(source, emit, depth + 1))
    elif sign == "[":
        yield from _items(source, emit, depth)
    elif sign == '"':
        yield from string(source, emit)
    else:
        yield from _scalar(source, emit)


def members(source: AnswerText, emit: Emit, read: Callable[[str], Reading[None]]) -> Reading[None]:
    yield from sign_of(source, emit, "{")
    if (yield from skip_whitespace(source, emit)) == "}":
        emit(source.advance())
        return
    while True:
        yield from skip_whitespace(source, emit)
        key = yield from string(source, emit)
        yield from sign_of(source, emit, ":")
        yield from read(key)
        if (yield from sign_of(source, emit, ",}")) == "}":
            return


def string(source: AnswerText, emit: Emit) -> Reading[str]:
    parts: list[str] = []

    def add(part: str) -> None:
        parts.append(part)
        emit(part)

    yield from sign_of(source, add, '"')
    while True:
        while not source.ready:
            yield
        if match := _PLAIN.match(source.text, source.position):
            add(source.advance(len(match[0])))
            continue
        sign = source.sign
        if sign == "\\":
            yield from _escape(source, add)
        elif sign == '"':
            add(source.advance())
            return str(json.loads("".join(parts)))
        elif sign:
            add(json.dumps(source.advance())[1:-1])
        else:
            raise BrokenCall("a string without an end")


def sign_of(source: AnswerText, emit: Emit, signs: str) -> Reading[str]:
    sign = yield from skip_whitespace(source, emit)
    if not sign or sign not in signs:
        raise BrokenCall(f"one of {signs} is missing")
    emit(source.advance())
    return sign


def _items(source: AnswerText, emit: Emit, depth: int) -> Reading[None]:
    emit(source.advance())
    if (yield from skip_whitespace(source, emit)) == "]":
        emit(source.advance())
        return
    while True:
        yield from value(source, emit, depth + 1)
        if (yield from sign_of(source, emit, ",]")) == "]":
            return


def _escape(source: AnswerText, emit: Emit) -> Reading[None]:
    source.advance()
    while not source.ready:
        yield
    if not source.sign or source.sign not in '"\\/bfnrtu':
        raise BrokenCall("an escape that JSON does not have")
    text = "\\" + source.advance()
    for _ in range(4 if text == "\\u" else 0):
        while not source.ready:
            yield
        if not source.sign or source.sign not in "0123456789abcdefABCDEF":
            raise BrokenCall("an escape that is cut off")
        text += source.advance()
    emit(text)


def _scalar(source: AnswerText, emit: Emit) -> Reading[None]:
    text = ""
    while True:
        while not source.ready:
            yield
        if source.sign not in _SCALAR_SIGNS:  # the end, too: an empty text is in no set
            break
        text += source.advance()
        if len(text) > 400:
            raise BrokenCall("no value")
    if not _SCALAR.fullmatch(text):
        raise BrokenCall("no value")
    emit(text)


def call(source: AnswerText, out: Events) -> Reading[None]:
    """Parse a call object: its name, and its arguments under `arguments` or `parameters`."""
    state = _CallState(out)
    yield from members(source, _ignore, lambda key: _member(source, key, state))
    state.close()
    source.keep()


class _CallState:
    def __init__(self, out: Events) -> None:
        self.out = out
        self._name: str | None = None
        self._parts: list[str] | None = None
        self._begun = False

    def name(self, name: str) -> None:
        if self._name is not None:
            raise BrokenCall("a name twice")
        self.out.check(name)
        self._name = name
        if self._parts is not None:
            self._start()

    def open(self) -> None:
        if self._parts is not None:
            raise BrokenCall("arguments twice")
        self._parts = []
        if self._name is not None:
            self._start()

    def grow(self, part: str) -> None:
        if self._begun:
            self.out.arguments(part)
        elif self._parts is not None:
            self._parts.append(part)

    def close(self) -> None:
        if self._name is None:
            raise BrokenCall("a call without a name")
        if self._parts is None:
            self.open()
            self.out.arguments("{}")
        self.out.end()

    def _start(self) -> None:
        assert self._name is not None
        self.out.start(self._name)
        self._begun = True
        for part in self._parts or ():
            self.out.arguments(part)


def _member(source: AnswerText, key: str, state: _CallState) -> Reading[None]:
    sign = yield from skip_whitespace(source)
    if key == "name" and sign == '"':
        state.name((yield from string(source, _ignore)))
    elif key in ARGUMENTS and sign == "{":
        state.open()
        yield from value(source, state.grow)
    elif key in ARGUMENTS:
        state.open()
        parts: list[str] = []
        yield from value(source, parts.append)
        state.grow(arguments_text(json.loads("".join(parts))))
    else:
        yield from value(source, _ignore)


def arguments_text(arguments: object) -> str:
    r"""Return arguments as a JSON object, which is empty for None; BrokenCall if not an object.

    >>> arguments_text({"a": "é"}), arguments_text(None), arguments_text("{\"a\": 1}")
    ('{"a": "é"}', '{}', '{"a": 1}')
    """
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, dict):
        try:
            return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BrokenCall("arguments that JSON does not have") from error
    if isinstance(arguments, str):
        try:
            if isinstance(json.loads(arguments), dict):
                return arguments
        except (ValueError, RecursionError):
            pass
    raise BrokenCall("arguments that are no object")


def calls(
    source: AnswerText,
    out: Events,
    *,
    closings: tuple[str, ...] = (),
    separators: tuple[str, ...] = (),
) -> Reading[None]:
    """Parse calls: objects, or lists of objects.

    Args:
        closings: marks that end the calls, consumed if present.
        separators: marks after which another call follows.
    """
    while True:
        if (yield from accept(source, "[")):
            yield from listed(source, out)
        else:
            yield from skip_whitespace(source)
            yield from call(source, out)
        if (yield from accept(source, *closings, *separators)) not in separators:
            return


def listed(source: AnswerText, out: Events) -> Reading[None]:
    if (yield from accept(source, "]")):
        return
    while True:
        yield from skip_whitespace(source)
        yield from call(source, out)
        if (yield from expect(source, ",", "]")) == "]":
            source.keep()
            return


def _ignore(_: str) -> None: ...
