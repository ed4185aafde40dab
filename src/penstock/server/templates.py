"""Traits of a model's chat template, probed by rendering a few short conversations with it.

Templates are programs of the models' makers. Some raise on a second system message, or on one that
is not the first. Some leave it out. Some move it to the front, which changes the first token of the
prompt and loses all that was cached behind it. Some drop the reasoning of earlier turns, and so
change text that has been read already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SYSTEM, LATER, USER, AGAIN, SAID = "Saffron.", "Tundra.", "Quartz?", "Walnut?", "Heron."
THOUGHT, RESULT, SECOND_THOUGHT, SECOND_RESULT = "Basalt.", "Cobalt.", "Juniper.", "Marigold."
"""Texts of the probes' messages, which no template holds."""
REASONING_KEYS = ("reasoning_content", "reasoning")
"""Keys under which templates look for reasoning; transformers fills `thinking` from the first."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_ERROR_CHARACTERS = 160
LATER_SYSTEMS = (
    ("second system message", (SYSTEM, LATER, USER)),
    ("system message at the end", (SYSTEM, USER, LATER)),
    ("system message between turns", (SYSTEM, USER, SAID, LATER, AGAIN)),
    ("system message not first", (USER, LATER, SAID, AGAIN)),
)
"""Conversations with a system message that is not the first."""
LEVELS = ("none", "low", "medium", "high", "xhigh")
"""Levels of reasoning that templates are asked for."""
REMINDER = "system-reminder"
"""The mark around a system message that is given as a user's, as coding agents write it."""


class TraitRow(NamedTuple):
    """A template's treatment of a conversation."""

    what: str
    outcome: str
    """Its fate: `rendered`, `left out`, `moved`, `raises` with the error, or the change."""

    @property
    def taken(self) -> bool:
        """Whether all messages are rendered, each in its place."""
        return self.outcome == "rendered"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Traits of a chat template."""

    first_system: bool
    """Whether the template renders a system message at the beginning."""
    later_system: bool
    """Whether the template renders system messages anywhere, each in its place."""
    consecutive_users: bool
    """Whether the template takes two messages of the user in a row."""
    reasoning_effort: tuple[str, ...]
    """Levels that the template takes as `reasoning_effort`; none where they change nothing."""
    reasoning_strength: tuple[str, ...]
    """The same for `reasoning_strength`, as Muse Spark's template calls it."""
    thinking: bool
    """Whether `thinking` changes the rendered prompt, as DeepSeek's and Granite's templates read it
    in the place of `enable_thinking`."""
    reasoning_key: str | None
    """Key of a message under which the template looks for reasoning; None if it never does."""
    text_arguments: bool
    """Whether the template takes the arguments of calls as JSON text alone."""
    reasoning_beside_text: bool
    """Whether a message may have reasoning, text and a call; gpt-oss's template raises on it."""
    text_parts: bool
    """Whether the template takes texts as lists of parts alone, as those of models that see do."""
    rows: tuple[TraitRow, ...]
    """All that was tried."""

    @classmethod
    def of(cls, tokenizer: Any) -> TemplateTraits:
        """Probe the chat template of mlx-lm's wrapper."""
        probe = _Probe(tokenizer)
        first = probe.row("system message first", talk_of(SYSTEM, USER))
        turns = probe.row("system message first, two turns", talk_of(SYSTEM, USER, SAID, AGAIN))
        later = [probe.row(what, talk_of(*texts)) for what, texts in LATER_SYSTEMS]
        users = probe.row("two user messages in a row", talk_of(USER, AGAIN))
        key = probe.reasoning_key()
        both = {**called(THOUGHT, key), "content": SAID}
        beside = probe.row("reasoning, text and a call", [*talk_of(USER), both, result_of(RESULT)])
        effort, strength = probe.levels("reasoning_effort"), probe.levels("reasoning_strength")
        thinking = probe.changes("thinking")
        rows = [first, turns, *later, users, *probe.rest(key), beside]
        return cls(
            first_system=first.taken,
            later_system=all(row.taken for row in later),
            consecutive_users=users.taken,
            reasoning_effort=effort,
            reasoning_strength=strength,
            thinking=thinking,
            reasoning_key=key,
            text_arguments=probe.text_arguments(),
            reasoning_beside_text=not beside.outcome.startswith("raises"),
            text_parts=probe.text_parts,
            rows=(
                *rows,
                _switch("reasoning_effort", bool(effort)),
                _switch("reasoning_strength", bool(strength)),
                _switch("thinking", thinking),
                TraitRow("texts", "as lists of parts" if probe.text_parts else "as they are"),
            ),
        )

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a conversation as the template takes it, every message in its place.

        A system message that the template would not render there becomes the user's, marked.
        Reasoning stands under the key that the template reads, or is left out where it raises.
        """
        fitted: list[Mapping[str, Any]] = []
        for index, message in enumerate(messages):
            taken = self.later_system if index else self.first_system
            role = message.get("role")
            if role == "system" and not taken:
                role = "user"
                message = {"role": "user", "content": reminder(message["content"])}
            follows = bool(fitted) and fitted[-1].get("role") == role == "user"
            if follows and not self.consecutive_users:
                content = f"{fitted.pop()['content']}\n\n{message['content']}"
                message = {"role": "user", "content": content}
            fitted.append(self._with_arguments(self._with_reasoning(message)))
        return [_in_parts(message) for message in fitted] if self.text_parts else fitted

    def _with_reasoning(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its reasoning where the template reads it."""
        key, given = self.reasoning_key, REASONING_KEYS[0]
        if key is None or given not in message:
            return message
        rest = {name: value for name, value in message.items() if name != given}
        if message.get("content") and message.get("tool_calls") and not self.reasoning_beside_text:
            return rest
        return {**rest, key: message[given]}

    def _with_arguments(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with the arguments of its calls as the template takes them."""
        if not self.text_arguments or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    function = call["function"]
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its text as a list of one part; none where it is empty."""
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}] if text else []}


def _switch(name: str, read: bool) -> TraitRow:
    return TraitRow(name, "read" if read else "ignored")


class _Probe:
    """Prober of a template."""

    _tools: list[dict[str, Any]] | None = None
    text_parts = False
    """Whether a text is rendered as a list of parts, and is left out or raises as it is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        forms = talk_of(USER), [dict(_in_parts(message)) for message in talk_of(USER)]
        if all(self._render(talk)[1] for talk in forms):
            self._tools = [TOOL]  # some want one always
        as_it_is, in_parts = (USER in self._render(talk)[0] for talk in forms)
        self.text_parts = in_parts and not as_it_is

    def row(self, what: str, talk: list[dict[str, Any]]) -> TraitRow:
        """Describe the fate of a conversation."""
        rendered, error = self._render(talk)
        if error is not None:
            return TraitRow(what, f"raises {error}")
        texts = [text for message in talk if (text := message["content"])]
        places = [rendered.find(text) for text in texts]
        if min(places, default=0) < 0:
            return TraitRow(what, "left out")
        return TraitRow(what, "rendered" if places == sorted(places) else "moved")

    def rest(self, key: str | None) -> list[TraitRow]:
        """Return the rows that need no answer of `TemplateTraits`."""
        loop = [*talk_of(USER), called(THOUGHT, key), result_of(RESULT)]
        bare = [*talk_of(USER), {"role": "assistant", "content": ""}, *talk_of(AGAIN)]
        turn = [*talk_of(USER), {**talk_of(SAID)[0], **_thought(THOUGHT, key)}, *talk_of(AGAIN)]
        return [
            self.row("call and its result", loop),
            self.row("tool result without a call", [*talk_of(USER), result_of(RESULT)]),
            self.row("empty content", bare),
            TraitRow("reasoning key", key or "none"),
            self._reasoning("reasoning in a tool loop", loop, key),
            self._reasoning("reasoning of an earlier turn", turn, key),
            *self._growths(key),
        ]

    def reasoning_key(self) -> str | None:
        """Return the first key under which reasoning is rendered, in a loop or in a turn."""
        for key in REASONING_KEYS:
            loop = [*talk_of(USER), called(THOUGHT, key), result_of(RESULT)]
            turn = [*talk_of(USER), {**talk_of(SAID)[0], **_thought(THOUGHT, key)}, *talk_of(AGAIN)]
            if any(THOUGHT in self._render(talk)[0] for talk in (loop, turn)):
                return key
        return None

    def text_arguments(self) -> bool:
        """Tell whether a call is rendered with its arguments as text, and raises with an object."""
        call, result = called(THOUGHT, None), result_of(RESULT)
        if self._render([*talk_of(USER), call, result])[1] is None:
            return False
        texts = {**call, "tool_calls": [_as_text(one) for one in call["tool_calls"]]}
        return self._render([*talk_of(USER), texts, result])[1] is None

    def changes(self, name: str) -> bool:
        """Tell whether the two values of a template's switch are rendered differently."""
        one, other = (self._render(talk_of(USER), **{name: value})[0] for value in (False, True))
        return one != other

    def levels(self, name: str) -> tuple[str, ...]:
        """Return the levels that a template's switch takes; none where all render the same."""
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
        """Name the change in the text that was read when a conversation grows."""
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
            at = first.rfind(message["content"])
            if message["content"] and at + len(message["content"]) > common:
                return TraitRow(what, f"changes from message {number} on ({message['role']})")
        return TraitRow(what, "changes where the answer begins")

    def _render(self, talk: list[dict[str, Any]], **switches: Any) -> tuple[str, str | None]:
        """Render a conversation; return the text and no error, or no text and the error."""
        calls = any(message["role"] == "tool" for message in talk)
        tools = [TOOL] if calls else self._tools
        given = [_in_parts(message) if self.text_parts else message for message in talk]
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in given],
                tokenize=False,
                add_generation_prompt=True,
                tools=tools,
                **switches,
            )
        # A boundary: a template is a program of the model's makers, and raises anything.
        except Exception as error:  # noqa: BLE001
            line = (str(error).strip().splitlines() or [""])[0]
            return "", f"{type(error).__name__}: {line[:_ERROR_CHARACTERS]}".removesuffix(": ")
        return str(rendered), None


def reminder(text: str) -> str:
    r"""Mark a system message's text, for a user's message.

    >>> reminder("Be brief.")
    '<system-reminder>\nBe brief.\n</system-reminder>'
    """
    if text.lstrip().startswith(f"<{REMINDER}>"):
        return text
    return f"<{REMINDER}>\n{text}\n</{REMINDER}>"


def shared(one: str, other: str) -> int:
    """Return how many signs two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def talk_of(*texts: str) -> list[dict[str, Any]]:
    """Return a conversation of the probes' texts."""
    roles = {SYSTEM: "system", LATER: "system", SAID: "assistant"}
    return [{"role": roles.get(text, "user"), "content": text} for text in texts]


def _thought(text: str, key: str | None) -> dict[str, str]:
    return {key: text} if key else {}


def called(thought: str, key: str | None) -> dict[str, Any]:
    """Return a message of the assistant that calls the tool, without any text."""
    call = {"type": "function", "id": "call00001"}
    call_of = {**call, "function": {"name": "look_up", "arguments": {"text": "Tern."}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call_of]}
    return {**message, **_thought(thought, key)}


def result_of(text: str) -> dict[str, Any]:
    """Return a message with the result of that call."""
    return {"role": "tool", "content": text, "tool_call_id": "call00001", "name": "look_up"}
