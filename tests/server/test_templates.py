"""What templates do with system messages, found by rendering, and what each is given then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parrot import TEMPLATE, parrot

from penstock.server.problems import BadRequest
from penstock.server.prompts import Prompts

RAISES = "{{ raise_exception('System message must be at the beginning') }}"
FIRST_ONLY = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    + RAISES
    + "{% endif %}{% endfor %}"
    + TEMPLATE
)
LEAVES_OUT = (
    "{% for message in messages %}{% if loop.first or message.role != 'system' %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
TO_THE_FRONT = (
    "{% for message in messages if message.role == 'system' %}<|system|>{{ message.content }}"
    "<|end|>{% endfor %}{% for message in messages if message.role != 'system' %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
)
ALTERNATES = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "A"},
    {"role": "developer", "content": "L"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]
LATER = "<|user|><system-reminder>\nL\n</system-reminder><|end|>"
REMINDED = f"<|system|>S<|end|><|user|>A<|end|>{LATER}<|assistant|>B<|end|><|user|>C<|end|>"
RENDERED = {
    "takes it": (
        TEMPLATE.replace("<|assistant|>", ""),
        "<|system|>S<|end|><|user|>A<|end|><|system|>L<|end|><|assistant|>B<|end|><|user|>C<|end|>",
    ),
    "raises": (FIRST_ONLY.replace("<|assistant|>", ""), REMINDED),
    "leaves it out": (LEAVES_OUT, REMINDED),
    "moves it to the front": (TO_THE_FRONT, REMINDED),
    "has no system and alternates": (
        ALTERNATES,
        "<|user|><system-reminder>\nS\n</system-reminder>\n\nA\n\n"
        "<system-reminder>\nL\n</system-reminder><|end|><|assistant|>B<|end|><|user|>C<|end|>",
    ),
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_later_system_message_stays_in_its_place(name: str, tmp_path: Path) -> None:
    template, expected = RENDERED[name]
    prompts = Prompts(parrot(tmp_path, "Hello", template=template)[1])
    assert prompts.decode(prompts.render(TALK)) == expected


def test_a_reminder_is_marked_once(tmp_path: Path) -> None:
    prompts = Prompts(parrot(tmp_path, "Hello", template=LEAVES_OUT)[1])
    marked = "<system-reminder>\nL\n</system-reminder>"
    talk = [{"role": "user", "content": "A"}, {"role": "system", "content": marked}]
    assert prompts.decode(prompts.render(talk)) == f"<|user|>A<|end|><|user|>{marked}<|end|>"


def test_a_message_without_a_role_is_the_templates_to_refuse(tmp_path: Path) -> None:
    prompts = Prompts(parrot(tmp_path, "Hello", template=ALTERNATES)[1])
    with pytest.raises(BadRequest, match="alternate"):
        prompts.render([{"content": "A"}, {"content": "B"}])


def test_what_a_later_turn_begins_with_does_not_change(tmp_path: Path) -> None:
    """A system message that comes later changes nothing in front of it, whatever the template."""
    for number, (template, _) in enumerate(RENDERED.values()):
        prompts = Prompts(parrot(tmp_path / str(number), "Hello", template=template)[1])
        before = prompts.decode(prompts.render(TALK[:2], answer=False))
        after = prompts.decode(prompts.render(TALK, answer=False))
        assert after.startswith(before.removesuffix("<|end|>"))


def test_effort_is_known_where_it_changes_the_prompt(tmp_path: Path) -> None:
    plain = Prompts(parrot(tmp_path / "a", "Hello")[1])
    knows = Prompts(
        parrot(tmp_path / "b", "Hello", template="{{ reasoning_effort }}" + TEMPLATE)[1]
    )
    assert not plain.traits.reasoning_effort
    assert knows.traits.reasoning_effort


def test_an_image_in_history_is_named(tmp_path: Path) -> None:
    """Only what the user's last message asks is refused."""
    prompts = Prompts(parrot(tmp_path, "Hello")[1])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    asked = {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]}
    talk = [
        asked,
        {"role": "assistant", "content": "I cannot."},
        {"role": "user", "content": "So?"},
    ]
    assert "Look: [image left out]<|end|>" in prompts.decode(prompts.render(talk))
    for refused in ([asked], [talk[2], talk[1], asked, talk[1]]):
        with pytest.raises(BadRequest, match="'image_url' cannot be read"):
            prompts.render(refused)
