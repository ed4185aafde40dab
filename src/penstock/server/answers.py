"""What an answer's text is made of: text, reasoning, and calls of tools.

    text of the engine ──push──> [ text | reasoning | call ] ──> Delta

The marks that begin and end reasoning and calls are the model's own, as mlx-lm knows them; what
stands in a call is read by mlx-lm's parser for the model.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from penstock.engine.handle import Choice
from penstock.engine.request import Finish, Usage

__all__ = ["Delta", "Ended", "Reader", "ToolCall", "total_usage"]

Kind: TypeAlias = Literal["text", "reasoning", "call"]
Ended: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model asks for."""

    id: str
    name: str
    arguments: str
    """Arguments of the call: a JSON object, as text."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What has become certain of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class Reader:
    """Reader of one answer, which holds back a mark's possible start until it is certain.

    Args:
        tokenizer: mlx-lm's wrapper, which knows the model's marks.
        tools: what the request offers, in OpenAI's form; without any, calls are plain text.
        reasoning: whether the prompt ends inside the model's reasoning
            (`Prompts.starts_in_reasoning`).
        parallel: whether an answer may hold several calls; otherwise those after the first
            are left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Any] | None = None,
        *,
        reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        self._parse = getattr(tokenizer, "tool_parser", None)
        self._tools = list(tools) if tools else None
        self._parallel = parallel
        self._kind: Kind = "reasoning" if reasoning else "text"
        self._held = ""
        self._call: list[str] = []
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self.calls: list[ToolCall] = []
        """Calls so far."""
        self.finish: Finish | None = None
        """End of the answer, None before it."""
        self._marks = _marks(tokenizer, calls=bool(tools))
        self._call_marks = (
            getattr(tokenizer, "tool_call_start", None) or "",
            getattr(tokenizer, "tool_call_end", None) or "",
        )

    @property
    def text(self) -> str:
        """The text so far, without reasoning and calls."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasonings)

    @property
    def reason(self) -> Ended:
        """Why the answer has ended, in OpenAI's words."""
        if self.finish is not None and self.finish.reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def push(self, text: str) -> Delta:
        """Take in text of the engine; return what is certain with it."""
        if not self._marks:  # no mark to look for: all is text
            return self._note(Delta(text=text))
        parts = _DeltaParts()
        self._held += text
        while (next_mark := self._next_mark()) is not None:
            at, mark, kind = next_mark
            self._add(self._held[:at], parts)
            self._held = self._held[at + len(mark) :]
            self._enter(kind, parts)
        certain = len(self._held) - _beginning(self._held, self._marks.get(self._kind, {}))
        self._add(self._held[:certain], parts)
        self._held = self._held[certain:]
        return self._note(parts.delta())

    def end(self, finish: Finish) -> Delta:
        """Take in the end and its last text; return the delta that this makes certain."""
        self.finish = finish
        delta = self.push(finish.text)
        parts = _DeltaParts()
        self._add(self._held, parts)
        self._held = ""
        if self._kind == "call":
            self._enter("text", parts, closed=False)
        return _joined(delta, self._note(parts.delta()))

    def read(self, choice: Choice) -> Reader:
        """Take in a whole answer; return the reader."""
        assert choice.finish is not None
        whole = choice.text
        self.push(whole.removesuffix(choice.finish.text) if choice.finish.text else whole)
        self.end(choice.finish)
        return self

    def _next_mark(self) -> tuple[int, str, Kind] | None:
        """Return the place and the text of the first complete mark, and the kind that follows."""
        candidates = [
            (at, -len(mark), mark, kind)
            for mark, kind in self._marks.get(self._kind, {}).items()
            if (at := self._held.find(mark)) >= 0
        ]
        if not candidates:
            return None
        at, _, mark, kind = min(candidates)
        return at, mark, kind

    def _add(self, text: str, parts: _DeltaParts) -> None:
        if not text:
            return
        if self._kind == "call":
            self._call.append(text)
        elif self._kind == "reasoning":
            parts.reasoning += text
        else:
            parts.text += text

    def _enter(self, kind: Kind, parts: _DeltaParts, *, closed: bool = True) -> None:
        if self._kind == "call":
            called = "".join(self._call)
            self._call.clear()
            calls = self._parsed(called)
            if calls is None:  # text that is no call goes to the client as text
                start, end = self._call_marks
                parts.text += f"{start}{called}{end if closed else ''}"
            else:
                parts.calls += calls
        self._kind = kind

    def _parsed(self, text: str) -> list[ToolCall] | None:
        """Parse the text between the marks of a call; None if it is not a call."""
        assert self._parse is not None
        try:
            parsed = self._parse(text, self._tools)
            return [_tool_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        # A boundary: the text is the model's, and the parsers are mlx-lm's, one a family.
        except Exception:  # noqa: BLE001
            return None

    def _note(self, delta: Delta) -> Delta:
        if not self._parallel:
            delta = replace(delta, calls=delta.calls[: 1 - len(self.calls)])
        if delta.text:
            self._texts.append(delta.text)
        if delta.reasoning:
            self._reasonings.append(delta.reasoning)
        self.calls.extend(delta.calls)
        return delta


class _DeltaParts:
    """Parts of a delta that is not complete."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []

    def delta(self) -> Delta:
        return Delta(self.text, self.reasoning, tuple(self.calls))


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.text + second.text, first.reasoning + second.reasoning, first.calls + second.calls
    )


def join(deltas: Iterable[Delta]) -> Delta:
    """Join consecutive deltas into one."""
    whole = Delta()
    for delta in deltas:
        whole = _joined(whole, delta)
    return whole


def _marks(tokenizer: Any, *, calls: bool) -> dict[Kind, dict[str, Kind]]:
    """Return, for each kind of text, the marks that end it and what they begin."""
    marks: dict[Kind, dict[str, Kind]] = {}
    if getattr(tokenizer, "has_thinking", False):
        marks["text"] = {tokenizer.think_start: "reasoning"}
        marks["reasoning"] = {tokenizer.think_end: "text"}
    if calls and getattr(tokenizer, "has_tool_calling", False):
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        marks.setdefault("text", {})[start] = "call"
        # Some models write a mark before each call and none behind it.
        marks["call"] = {end: "text"} if end else {start: "call"}
    return marks


def _beginning(text: str, marks: Iterable[str]) -> int:
    """Return how many characters at the end of a text may be the start of a mark."""
    return max(
        (
            size
            for mark in marks
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if text.endswith(mark[:size])
        ),
        default=0,
    )


def _tool_call(parsed: Any) -> ToolCall:
    """Make a call of a parser's result; raises if it has no name."""
    arguments = parsed.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = parsed["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    return ToolCall(str(parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"), name, arguments)


def total_usage(finishes: Sequence[Finish]) -> Usage:
    """Sum up the answers of requests; several to one prompt have read it once.

    The cached tokens are those that the first answer matched: the others matched tokens that the
    first one had just computed.

    Args:
        finishes: of all answers to one prompt.
    """
    usages = [finish.usage for finish in finishes]
    return Usage(
        prompt_tokens=max((usage.prompt_tokens for usage in usages), default=0),
        cached_tokens=min((usage.cached_tokens for usage in usages), default=0),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )
