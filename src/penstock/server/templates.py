"""Traits of a model's chat template, probed by rendering short conversations.

Templates are programs. Some raise on a second or later system message, drop it, or move it to the
front, which invalidates the cached prefix. Some drop the reasoning of earlier turns, which changes
already cached text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from penstock.models.mlx_lm import rendered_text
from penstock.models.template_renderer import TemplateOverrun, TemplateRefusal, TemplateRenderer

Message: TypeAlias = Mapping[str, Any]

SYSTEM, LATER, USER, AGAIN, SAID = "Saffron.", "Tundra.", "Quartz?", "Walnut?", "Heron."
SAID_AGAIN, ARGUMENT, PROBE_NAME = "Osprey.", "Tern.", "sextant"
THOUGHT, RESULT, SECOND_THOUGHT, SECOND_RESULT = "Basalt.", "Cobalt.", "Juniper.", "Marigold."
"""Texts of the probe messages, unlikely to occur in any template."""
REASONING_KEYS = ("reasoning_content", "reasoning")
"""Message keys under which templates look for reasoning."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_ERROR_CHARACTERS = 160
PROBE_SECONDS = 60.0
"""Seconds that all probes of a template may take; known templates take about one."""
LATER_SYSTEMS = (
    ("second system message", (SYSTEM, LATER, USER)),
    ("system message at the end", (SYSTEM, USER, LATER)),
    ("system message between turns", (SYSTEM, USER, SAID, LATER, AGAIN)),
    ("system message not first", (USER, LATER, SAID, AGAIN)),
)
"""Conversations with a system message after the first message."""
LEVELS = ("none", "low", "medium", "high", "xhigh")
FOREIGN_ID, NINE_ID = "call_0aBcDeFgHiJkLmNoPq", "call00001"


EMPTY_ANSWER = ({"role": "assistant", "content": ""},)
CallIds: TypeAlias = Literal["any", "nine", "indexed"]


class TraitRow(NamedTuple):
    what: str
    outcome: str
    """Outcome: `rendered`, `left out`, `moved`, `raises` with the error, or the change."""

    @property
    def taken(self) -> bool:
        return self.outcome == "rendered"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    first_system: bool
    later_system: bool
    """Whether system messages after the first message are rendered in place."""
    consecutive_users: bool
    reasoning_effort: tuple[str, ...]
    """Accepted values of `reasoning_effort`; empty if the prompt does not depend on it."""
    reasoning_strength: tuple[str, ...]
    """Accepted values of `reasoning_strength`, used by Muse Spark's template."""
    thinking: bool
    """Whether `thinking` changes the prompt, as in DeepSeek's and Granite's templates."""
    reasoning_key: str | None
    """Message key under which reasoning is rendered; None if it never is."""
    text_arguments: bool
    """Whether call arguments must be JSON text."""
    reasoning_beside_text: bool
    """Whether a message may have reasoning, text and a call; gpt-oss's template raises."""
    tools: bool
    text_parts: bool
    """Whether content must be a list of parts, as for vision models."""
    system_alone: bool
    consecutive_assistants: bool
    assistant_first: bool
    empty_content: bool
    calls: bool
    bare_results: bool
    call_ids: CallIds
    """Form of call ids: any, nine letters or digits, or `functions.NAME:INDEX` (Kimi K2)."""
    object_arguments: bool
    """Whether call arguments must be an object, as in templates that iterate over them."""
    rows: tuple[TraitRow, ...]

    @classmethod
    def of(cls, tokenizer: Any, renderer: TemplateRenderer) -> TemplateTraits:
        """Probe a tokenizer's chat template."""
        probe = _Probe(tokenizer, renderer)
        first = probe.row("system message first", talk_of(SYSTEM, USER))
        turns = probe.row("system message first, two turns", talk_of(SYSTEM, USER, SAID, AGAIN))
        later = [probe.row(what, talk_of(*texts)) for what, texts in LATER_SYSTEMS]
        users = probe.row("two user messages in a row", talk_of(USER, AGAIN))
        alone = probe.row("only a system message", talk_of(SYSTEM))
        answers = probe.row("two answers in a row", talk_of(USER, SAID, SAID_AGAIN, AGAIN))
        answer_first = probe.row("an answer first", talk_of(SAID, AGAIN))
        empty = probe.row("empty content", [*talk_of(USER), *EMPTY_ANSWER, *talk_of(AGAIN)])
        called_row, bare = probe.calls()
        tools, ids = probe.takes_tools(), probe.call_ids()
        key = probe.reasoning_key()
        both = {**called(THOUGHT, key), "content": SAID}
        beside = probe.row("reasoning, text and a call", [*talk_of(USER), both, result_of(RESULT)])
        effort, strength = probe.levels("reasoning_effort"), probe.levels("reasoning_strength")
        thinking = probe.changes("thinking")
        rows = [first, turns, alone, *later, users, answers, answer_first, empty]
        rows += [called_row, bare, *probe.rest(key), beside]
        return cls(
            first_system=first.taken,
            later_system=all(row.taken for row in later),
            consecutive_users=users.taken,
            reasoning_effort=effort,
            reasoning_strength=strength,
            thinking=thinking,
            reasoning_key=key,
            text_arguments=probe.text_arguments(),
            tools=tools,
            reasoning_beside_text=not beside.outcome.startswith("raises"),
            text_parts=probe.text_parts,
            system_alone=alone.taken,
            consecutive_assistants=answers.taken,
            assistant_first=answer_first.taken,
            empty_content=empty.taken,
            calls=called_row.taken,
            bare_results=bare.taken,
            call_ids=ids,
            object_arguments=probe.object_arguments(),
            rows=(
                *rows,
                TraitRow("tools", "rendered" if tools else "left out"),
                TraitRow("ids of calls", ids),
                _switch("reasoning_effort", bool(effort)),
                _switch("reasoning_strength", bool(strength)),
                _switch("thinking", thinking),
                TraitRow("tools of a request", "rendered" if probe.takes_tools() else "left out"),
                TraitRow("texts", "as lists of parts" if probe.text_parts else "as they are"),
            ),
        )


def _switch(name: str, read: bool) -> TraitRow:
    return TraitRow(name, "read" if read else "ignored")


class _Probe:
    _tools: list[dict[str, Any]] | None = None
    text_parts = False

    def __init__(self, tokenizer: Any, renderer: TemplateRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._overrun: TemplateOverrun | None = None
        self._until = time.monotonic() + PROBE_SECONDS
        forms = talk_of(USER), [dict(in_parts(message)) for message in talk_of(USER)]
        if all(self._render(talk)[1] for talk in forms):
            self._tools = [TOOL]  # some templates always require a tool
        as_it_is, as_parts = (USER in self._render(talk)[0] for talk in forms)
        self.text_parts = as_parts and not as_it_is

    def row(self, what: str, talk: list[dict[str, Any]]) -> TraitRow:
        rendered, error = self._render(talk)
        if error is not None:
            return TraitRow(what, f"raises {error}")
        texts = [text for message in talk if (text := message["content"])]
        places = [rendered.find(text) for text in texts]
        if min(places, default=0) < 0:
            return TraitRow(what, "left out")
        return TraitRow(what, "rendered" if places == sorted(places) else "moved")

    def rest(self, key: str | None) -> list[TraitRow]:
        """Return the rows about reasoning and cached prefixes, which have no fields."""
        loop = [*talk_of(USER), called(THOUGHT, key), result_of(RESULT)]
        turn = [*talk_of(USER), {**talk_of(SAID)[0], **_thought(THOUGHT, key)}, *talk_of(AGAIN)]
        return [
            TraitRow("reasoning key", key or "none"),
            self._reasoning("reasoning in a tool loop", loop, key),
            self._reasoning("reasoning of an earlier turn", turn, key),
            *self._growths(key),
        ]

    def reasoning_key(self) -> str | None:
        """Return the first key whose reasoning is rendered, in a tool loop or an earlier turn."""
        for key in REASONING_KEYS:
            loop = [*talk_of(USER), called(THOUGHT, key), result_of(RESULT)]
            turn = [*talk_of(USER), {**talk_of(SAID)[0], **_thought(THOUGHT, key)}, *talk_of(AGAIN)]
            if any(THOUGHT in self._render(talk)[0] for talk in (loop, turn)):
                return key
        return None

    def calls(self) -> tuple[TraitRow, TraitRow]:
        arguments = json.dumps({"text": ARGUMENT}) if self.text_arguments() else None
        text, error = self._called(arguments=arguments)
        outcome = f"raises {error}" if error is not None else "rendered"
        if error is None and not (ARGUMENT in text and RESULT in text):
            outcome = "left out"
        row = TraitRow("call and its result", outcome)
        bare = self.row("tool result without a call", [*talk_of(USER), result_of(RESULT)])
        return row, bare

    def call_ids(self) -> CallIds:
        rendered, error = self._called(id=FOREIGN_ID, name=PROBE_NAME)
        if error is not None:
            return "nine" if self._called(id=NINE_ID, name=PROBE_NAME)[1] is None else "any"
        named = PROBE_NAME in rendered
        return "indexed" if FOREIGN_ID in rendered and not named else "any"

    def text_arguments(self) -> bool:
        if self._called()[1] is None:
            return False
        return self._called(arguments=json.dumps({"text": ARGUMENT}))[1] is None

    def object_arguments(self) -> bool:
        forms: tuple[Any, ...] = (ARGUMENT, [ARGUMENT])
        return any(ARGUMENT not in self._called(arguments=arguments)[0] for arguments in forms)

    def _called(
        self, *, id: str = NINE_ID, name: str = "look_up", arguments: Any = None
    ) -> tuple[str, str | None]:
        call, result = called(THOUGHT, None), {**result_of(RESULT), "tool_call_id": id}
        function = {"name": name, "arguments": arguments or {"text": ARGUMENT}}
        call = {**call, "tool_calls": [{"type": "function", "id": id, "function": function}]}
        return self._render([*talk_of(USER), call, {**result, "name": name}])

    def takes_tools(self) -> bool:
        talks = (talk_of(USER), talk_of(SYSTEM, USER))
        name = TOOL["function"]["name"]
        return any(name in self._render(talk, tools=[TOOL])[0] for talk in talks)

    def changes(self, name: str) -> bool:
        off, on = (self._render(talk_of(USER), **{name: value})[0] for value in (False, True))
        return off != on

    def levels(self, name: str) -> tuple[str, ...]:
        """Return the accepted values of a template argument; empty if all render the same."""
        rendered = {level: self._render(talk_of(USER), **{name: level}) for level in LEVELS}
        if len({text for text, _ in rendered.values()}) == 1:
            return ()
        return tuple(level for level, (_, error) in rendered.items() if error is None)

    def _reasoning(self, what: str, talk: list[dict[str, Any]], key: str | None) -> TraitRow:
        rendered, error = self._render(talk)
        if error is not None:
            return TraitRow(what, f"raises {error}")
        return TraitRow(what, "kept" if key and THOUGHT in rendered else "dropped")

    def _growths(self, key: str | None) -> list[TraitRow]:
        start = talk_of(SYSTEM, USER)
        said = {**talk_of(SAID)[0], **_thought(THOUGHT, key)}
        loop = [*start, called(THOUGHT, key), result_of(RESULT)]
        called_again = [*loop, called(SECOND_THOUGHT, key), result_of(SECOND_RESULT)]
        return [
            self._growth("a turn is added", start, [*start, said, *talk_of(AGAIN)]),
            self._growth("a call is added", loop, called_again),
            self._growth("a turn is added to a loop", loop, [*loop, *talk_of(SAID, AGAIN)]),
        ]

    def _growth(
        self, what: str, before: list[dict[str, Any]], after: list[dict[str, Any]]
    ) -> TraitRow:
        (first, first_error), (second, second_error) = self._render(before), self._render(after)
        error = first_error or second_error
        if error is not None:
            return TraitRow(what, f"raises {error}")
        common = shared(first, second)
        if common == len(first):
            return TraitRow(what, "nothing changes")
        for number, message in enumerate(before, 1):
            position = first.rfind(message["content"])
            if message["content"] and position + len(message["content"]) > common:
                return TraitRow(what, f"changes from message {number} on ({message['role']})")
        return TraitRow(what, "changes where the answer begins")

    def _render(self, talk: list[dict[str, Any]], **switches: Any) -> tuple[str, str | None]:
        calls = any(message["role"] == "tool" for message in talk)
        tools = switches.pop("tools", [TOOL] if calls else self._tools)
        plain = [in_parts(message) if self.text_parts else message for message in talk]
        if self._overrun is not None:  # the next one would probably time out, too
            return "", _error_of(self._overrun)
        try:
            text = rendered_text(
                self._tokenizer,
                [dict(message) for message in plain],
                self._renderer,
                tools=tools,
                gone=lambda: time.monotonic() > self._until,
                template_args=switches,
            )
        except TemplateRefusal as error:
            return "", _error_of(error)
        except TemplateOverrun as error:
            self._overrun = error
            return "", _error_of(error)
        return text, None


def _error_of(error: Exception) -> str:
    return str(error)[:_ERROR_CHARACTERS]


def in_parts(message: Message) -> Message:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}] if text else []}


def shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or lists.

    >>> shared((1, 2, 3), (1, 2, 4, 5))
    2
    """
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def talk_of(*texts: str) -> list[dict[str, Any]]:
    roles = {SYSTEM: "system", LATER: "system", SAID: "assistant", SAID_AGAIN: "assistant"}
    return [{"role": roles.get(text, "user"), "content": text} for text in texts]


def _thought(text: str, key: str | None) -> dict[str, str]:
    return {key: text} if key else {}


def called(thought: str, key: str | None) -> dict[str, Any]:
    call = {"type": "function", "id": NINE_ID}
    call_of = {**call, "function": {"name": "look_up", "arguments": {"text": ARGUMENT}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call_of]}
    return {**message, **_thought(thought, key)}


def result_of(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": NINE_ID, "name": "look_up"}
