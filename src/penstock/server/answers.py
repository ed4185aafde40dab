"""Parts of an answer: text, reasoning and tool calls.

    text of the engine ──push──> [ text | reasoning | call ] ──> Delta

A parser of the model's format splits the text (`penstock.server.parsing`). A delta has complete
calls, each when it ends, and separately the events that stream their arguments.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from penstock.engine.handle import Choice
from penstock.engine.request import Finish, Usage
from penstock.server.parsing.events import (
    ArgumentsPart,
    CallBroken,
    CallEnd,
    CallStart,
    ParsedEvent,
    ReasoningPart,
    TextPart,
)
from penstock.server.parsing.formats import AnswerFormat

__all__ = ["Delta", "Ended", "Reader", "ToolCall", "total_usage"]

Ended: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON object, as text."""

    @property
    def object(self) -> dict[str, Any]:
        """Parsed arguments; text that is no JSON object is kept under the key `arguments`.

        >>> ToolCall("1", "f", '{"x": 1').object
        {'arguments': '{"x": 1'}
        """
        parsed = None
        with suppress(ValueError, RecursionError):
            parsed = json.loads(self.arguments or "{}")
        return parsed if isinstance(parsed, dict) else {"arguments": self.arguments}


@dataclass(frozen=True, slots=True)
class Delta:
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    growth: tuple[CallStart | ArgumentsPart | CallEnd | CallBroken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class Reader:
    """Incremental parser of one answer; holds back text that may begin a tag.

    Args:
        tools: tools that the model may call; without any, calls are plain text.
        reasoning: whether the prompt ends inside the model's reasoning.
        parallel: whether to keep more than the first call.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tools: Sequence[Any] | None = None,
        *,
        reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        self._parser = form.parser(tools, inside=reasoning)
        self._parallel = parallel
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._call: CallStart | None = None
        self._arguments: list[str] = []
        self.calls: list[ToolCall] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    @property
    def reason(self) -> Ended:
        if self.finish is not None and self.finish.reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def push(self, text: str) -> Delta:
        return self._note(self._parser.feed(text))

    def end(self, finish: Finish) -> Delta:
        self.finish = finish
        cut = finish.reason != "stop" or isinstance(finish.stop, str)
        return self._note([*self._parser.feed(finish.text), *self._parser.end(cut=cut)])

    def read(self, choice: Choice) -> Reader:
        assert choice.finish is not None
        whole = choice.text
        self.push(whole.removesuffix(choice.finish.text) if choice.finish.text else whole)
        self.end(choice.finish)
        return self

    def _note(self, events: Sequence[ParsedEvent]) -> Delta:
        texts = [event.text for event in events if isinstance(event, TextPart)]
        reasonings = [event.text for event in events if isinstance(event, ReasoningPart)]
        before = len(self.calls)
        growth = [grown for event in events for grown in self._grow(event)]
        self._texts += texts
        self._reasonings += reasonings
        calls = tuple(self.calls[before:])
        return Delta("".join(texts), "".join(reasonings), calls, tuple(growth))

    def _grow(
        self, event: ParsedEvent
    ) -> Iterator[CallStart | ArgumentsPart | CallEnd | CallBroken]:
        if isinstance(event, TextPart | ReasoningPart) or (self.calls and not self._parallel):
            return
        if isinstance(event, CallStart):
            event = self._call = replace(event, id=event.id or f"call_{uuid.uuid4().hex[:24]}")
            self._arguments.clear()
        elif isinstance(event, ArgumentsPart):
            self._arguments.append(event.text)
        elif isinstance(event, CallEnd) and self._call is not None:
            id = self._call.id or ""
            self.calls.append(ToolCall(id, self._call.name, "".join(self._arguments)))
        yield event


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.text + second.text,
        first.reasoning + second.reasoning,
        first.calls + second.calls,
        first.growth + second.growth,
    )


def join(deltas: Iterable[Delta]) -> Delta:
    whole = Delta()
    for delta in deltas:
        whole = _joined(whole, delta)
    return whole


def total_usage(finishes: Sequence[Finish]) -> Usage:
    """Sum the usage of all answers to one prompt, counting the prompt once."""
    usages = [finish.usage for finish in finishes]
    return Usage(
        prompt_tokens=max((usage.prompt_tokens for usage in usages), default=0),
        cached_tokens=min((usage.cached_tokens for usage in usages), default=0),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        rejected_tokens=sum(usage.rejected_tokens for usage in usages),
    )
