"""Traits of a model's chat template, probed by rendering a few short conversations with it.

Templates are programs of the models' makers. Some raise on a second system message, some on one
that is not the first, some leave it out, and some move it to the front, which changes the first
token of the prompt and loses all that was cached behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SYSTEM, LATER, USER, AGAIN, SAID = "Saffron.", "Tundra.", "Quartz?", "Walnut?", "Heron."
"""Texts of the probes' messages, which no template holds."""
_TURNS = {
    SYSTEM: {"role": "system", "content": SYSTEM},
    LATER: {"role": "system", "content": LATER},
    USER: {"role": "user", "content": USER},
    AGAIN: {"role": "user", "content": AGAIN},
    SAID: {"role": "assistant", "content": SAID},
}
LATER_SYSTEMS = (
    (SYSTEM, LATER, USER),
    (SYSTEM, USER, LATER),
    (SYSTEM, USER, SAID, LATER, AGAIN),
    (USER, LATER, SAID, AGAIN),
)
"""Conversations with a system message that is not the first."""
REMINDER = "system-reminder"
"""The mark around a system message that is given as a user's, as coding agents write it."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Traits of a chat template."""

    first_system: bool
    """Whether the template renders a system message at the beginning."""
    later_system: bool
    """Whether the template renders system messages anywhere, each in its place."""
    consecutive_users: bool
    """Whether the template takes two messages of the user in a row."""
    reasoning_effort: bool
    """Whether `reasoning_effort` changes the rendered prompt."""

    @classmethod
    def of(cls, tokenizer: Any) -> TemplateTraits:
        """Probe the chat template of mlx-lm's wrapper."""
        user = _rendered(tokenizer, [USER], reasoning_effort="low")
        return cls(
            first_system=_in_place(tokenizer, (SYSTEM, USER)),
            later_system=all(_in_place(tokenizer, texts) for texts in LATER_SYSTEMS),
            consecutive_users=_in_place(tokenizer, (USER, AGAIN)),
            reasoning_effort=user != _rendered(tokenizer, [USER], reasoning_effort="high"),
        )

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a conversation as the template takes it, every message in its place.

        A system message that the template would not render there becomes the user's, marked.
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
            fitted.append(message)
        return fitted


def reminder(text: str) -> str:
    r"""Mark a system message's text, for a user's message.

    >>> reminder("Be brief.")
    '<system-reminder>\nBe brief.\n</system-reminder>'
    """
    if text.lstrip().startswith(f"<{REMINDER}>"):
        return text
    return f"<{REMINDER}>\n{text}\n</{REMINDER}>"


def _in_place(tokenizer: Any, texts: Sequence[str]) -> bool:
    """Tell whether all messages are rendered, in their order."""
    rendered = _rendered(tokenizer, texts)
    if rendered is None:
        return False
    places = [rendered.find(text) for text in texts]
    return places[0] >= 0 and places == sorted(places)


def _rendered(tokenizer: Any, texts: Sequence[str], **template_args: Any) -> str | None:
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(_TURNS[text]) for text in texts],
                tokenize=False,
                add_generation_prompt=True,
                **template_args,
            )
        )
    # A boundary: a template is a program of the model's makers, and raises anything.
    except Exception:  # noqa: BLE001
        return None
