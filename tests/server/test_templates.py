"""System messages in templates: detected by rendering, and adapted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parrot import TEMPLATE, parrot

from penstock.server.problems import BadRequest
from penstock.server.prompts import MENDED, Prompts

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
def test_late_system_message_keeps_its_position(name: str, tmp_path: Path) -> None:
    template, expected = RENDERED[name]
    prompts = Prompts(parrot(tmp_path, "Hello", template=template)[1])
    assert prompts.decode(prompts.render(TALK)) == expected


def test_system_reminder_is_tagged_once(tmp_path: Path) -> None:
    prompts = Prompts(parrot(tmp_path, "Hello", template=LEAVES_OUT)[1])
    marked = "<system-reminder>\nL\n</system-reminder>"
    talk = [{"role": "user", "content": "A"}, {"role": "system", "content": marked}]
    assert prompts.decode(prompts.render(talk)) == f"<|user|>A<|end|><|user|>{marked}<|end|>"


def test_message_without_role_is_passed_to_template(tmp_path: Path) -> None:
    prompts = Prompts(parrot(tmp_path, "Hello", template=ALTERNATES)[1])
    with pytest.raises(BadRequest, match="alternate"):
        prompts.render([{"content": "A"}, {"content": "B"}])


def test_late_system_message_does_not_change_prefix(tmp_path: Path) -> None:
    for number, (template, _) in enumerate(RENDERED.values()):
        prompts = Prompts(parrot(tmp_path / str(number), "Hello", template=template)[1])
        before = prompts.decode(prompts.render(TALK[:2], answer=False))
        after = prompts.decode(prompts.render(TALK, answer=False))
        assert after.startswith(before.removesuffix("<|end|>"))


def test_reasoning_effort_support_is_detected_by_rendering(tmp_path: Path) -> None:
    plain = Prompts(parrot(tmp_path / "a", "Hello")[1])
    knows = Prompts(
        parrot(tmp_path / "b", "Hello", template="{{ reasoning_effort }}" + TEMPLATE)[1]
    )
    assert not plain.traits.reasoning_effort
    assert knows.traits.reasoning_effort


def test_image_in_history_is_replaced_by_placeholder(tmp_path: Path) -> None:
    """Only an image in the last user message is refused."""
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


PARTS = TEMPLATE.replace(
    "{{ message.content }}",
    "{% for part in message.content %}{{ part.text if part.type == 'text' }}{% endfor %}",
)


def test_text_parts_are_used_if_template_needs_them(tmp_path: Path) -> None:
    """Vision templates iterate over `message.content`."""
    assert PARTS != TEMPLATE
    plain, parts = (
        Prompts(parrot(tmp_path / str(number), "Hello", template=template)[1])
        for number, template in enumerate((TEMPLATE, PARTS))
    )
    raises = "{% if messages[0].content is string %}{{ raise_exception('parts') }}{% endif %}"
    strict = Prompts(parrot(tmp_path / "2", "Hello", template=raises + PARTS)[1])
    talk = [*TALK, {"role": "assistant", "content": ""}, {"role": "user", "content": "D"}]
    wanted = plain.template_text(talk)
    assert parts.template_text(talk) == strict.template_text(talk) == wanted and "A" in wanted
    assert [one.traits.text_parts for one in (plain, parts, strict)] == [False, True, True]
    assert rows(tmp_path / "3", PARTS)["texts"] == "as lists of parts"
    assert rows(tmp_path / "4", TEMPLATE)["texts"] == "as they are"


def rows(tmp_path: Path, template: str) -> dict[str, str]:
    """Return the probe's results for a template."""
    traits = Prompts(parrot(tmp_path, "Hello", template=template)[1]).traits
    return {row.what: row.outcome for row in traits.rows}


SYSTEM_ROWS = {
    "takes it": (TEMPLATE, ["rendered"] * 6),
    "raises": (
        FIRST_ONLY,
        ["rendered"] * 2 + ["raises TemplateError: System message must be at the beginning"] * 4,
    ),
    "leaves it out": (LEAVES_OUT, ["rendered"] * 2 + ["left out"] * 4),
    "moves it to the front": (TO_THE_FRONT, ["rendered"] * 3 + ["moved"] * 3),
}


@pytest.mark.parametrize("name", SYSTEM_ROWS)
def test_probe_detects_handling_of_system_messages(name: str, tmp_path: Path) -> None:
    template, outcomes = SYSTEM_ROWS[name]
    said = rows(tmp_path, template)
    assert [said[what] for what in said if what.startswith(("system", "second"))] == outcomes


def test_probe_detects_handling_of_consecutive_user_messages(tmp_path: Path) -> None:
    error = "raises TemplateError: Conversation roles must alternate user/assistant"
    said = rows(tmp_path / "a", ALTERNATES)
    assert said["two user messages in a row"] == said["call and its result"] == error
    assert rows(tmp_path / "b", TEMPLATE)["two user messages in a row"] == "rendered"


NEEDS_CALL = (
    "{% for message in messages %}{% if message.role == 'tool' and "
    "not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{% endfor %}" + TEMPLATE
)
NEEDS_CONTENT = (
    "{% for message in messages %}{% if not message.content and not message.tool_calls %}"
    "{{ raise_exception('empty') }}{% endif %}{% endfor %}" + TEMPLATE
)


def test_probe_detects_tool_result_and_empty_content_handling(tmp_path: Path) -> None:
    plain, calls, content = (
        rows(tmp_path / str(number), template)
        for number, template in enumerate((TEMPLATE, NEEDS_CALL, NEEDS_CONTENT))
    )
    what = ("call and its result", "tool result without a call", "empty content")
    assert [plain[one] for one in what] == ["rendered"] * 3
    assert [calls[one] for one in what] == ["rendered", "raises TemplateError: no call", "rendered"]
    assert [content[one] for one in what] == ["rendered", "rendered", "raises TemplateError: empty"]


def thinking(key: str, condition: str) -> str:
    """Return a template that renders reasoning if a condition holds."""
    return (
        "{% set last = namespace(user=0) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
        "{% for message in messages %}<|{{ message.role }}|>"
        f"{{% if message.{key} and ({condition}) %}}({{{{ message.{key} }}}}){{% endif %}}"
        "{{ message.content }}<|end|>{% endfor %}"
    )


LOOP = "reasoning in a tool loop"
EARLIER = "reasoning of an earlier turn"
GROWTHS = ("a turn is added", "a call is added", "a turn is added to a loop")
THINKING = {
    "keeps all": ("reasoning_content", "true", ("kept", "kept"), ["nothing changes"] * 3),
    "keeps the loop's": (
        "reasoning_content",
        "loop.index0 > last.user",
        ("kept", "dropped"),
        ["nothing changes", "nothing changes", "changes from message 4 on (tool)"],
    ),
    "keeps the last": (
        "reasoning",
        "loop.index0 >= messages | length - 2",
        ("kept", "kept"),
        ["nothing changes", "changes from message 4 on (tool)", "changes from message 4 on (tool)"],
    ),
    "keeps none": ("other", "true", ("dropped", "dropped"), ["nothing changes"] * 3),
}


@pytest.mark.parametrize("name", THINKING)
def test_probe_detects_handling_of_reasoning(name: str, tmp_path: Path) -> None:
    key, condition, kept, changes = THINKING[name]
    said = rows(tmp_path, thinking(key, condition))
    assert said["reasoning key"] == (key if kept[0] == "kept" else "none")
    assert (said[LOOP], said[EARLIER]) == kept
    assert [said[growth] for growth in GROWTHS] == changes


def test_probe_detects_template_counting_messages(tmp_path: Path) -> None:
    said = rows(tmp_path, "{{ messages | length }}" + TEMPLATE)
    assert {said[growth] for growth in GROWTHS} == {"changes from message 1 on (system)"}


def test_reasoning_is_passed_under_template_key(tmp_path: Path) -> None:
    prompts = Prompts(parrot(tmp_path, "Hello", template=thinking("reasoning", "true"))[1])
    talk = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", "reasoning_content": "hm"},
        {"role": "user", "content": "C"},
    ]
    rendered = prompts.decode(prompts.render(talk))
    assert rendered == "<|user|>A<|end|><|assistant|>(hm)B<|end|><|user|>C<|end|>"


def test_reasoning_is_dropped_if_template_raises(
    tmp_path: Path,
) -> None:
    """As gpt-oss does."""
    raises = (
        "{% for message in messages %}{% if message.thinking and message.content "
        "and message.tool_calls %}{{ raise_exception('both') }}{% endif %}{% endfor %}"
    )
    calls = "{% for call in message.tool_calls or [] %}({{ call.function | tojson }}){% endfor %}"
    template = raises + thinking("thinking", "true").replace("<|end|>", calls + "<|end|>")
    prompts = Prompts(parrot(tmp_path, "Hello", template=template)[1])
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    both = {"role": "assistant", "content": "B", "reasoning_content": "hm", "tool_calls": [call]}
    talk = [{"role": "user", "content": "A"}, both, {"role": "user", "content": "C"}]
    assert "<|assistant|>B({" in prompts.decode(prompts.render(talk))
    talk[1] = {**both, "content": ""}
    assert "<|assistant|>(hm)({" in prompts.decode(prompts.render(talk))


def test_arguments_are_text_if_template_requires_it(tmp_path: Path) -> None:
    """As Functionary, which concatenates the arguments' text."""
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "look", "arguments": '{"a":  "ü"}'}}
    talk: list[Any] = [*TALK[1:2], {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "R"}
    prompts = Prompts(parrot(tmp_path, "a", template=template)[1])
    assert prompts.traits.text_arguments
    assert '<call>{"a": "ü"}<|tool|>R' in prompts.template_text([*talk, result])
    plain = tmp_path / "plain"
    prompts = Prompts(parrot(plain, "a")[1])
    assert not prompts.traits.text_arguments, "the negative control"
    assert '"arguments": {"a": ' in prompts.template_text([*talk, result])


# ---- a conversation never ends for what is in its past


NINE = (
    "{% if id is not defined or id|length != 9 %}"
    "{{ raise_exception('ids of calls have nine letters or digits') }}{% endif %}"
)
IDS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% set id = m.tool_call_id %}"
    + NINE
    + "[{{ id }}]{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "{% set id = c.id %}"
    + NINE
    + "[{{ id }}]{{ c.function|tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
INDEXED = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.id }}<arguments>{{ c.function.arguments|tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}<result of {{ m.tool_call_id }}>{% endif %}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}>{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v }}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FOLDS = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles take turns') }}{% endif %}<{{ m.role }}>"
    "{{ first if loop.first else '' }}{{ m.content }}{% endfor %}"
)


def called_with(id: str | None, arguments: Any = "{}", name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "function": function} | ({"id": id} if id else {})
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(id: str | None, text: str = "R") -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({"tool_call_id": id} if id else {})


def prompts_of(folder: Path, template: str) -> Prompts:
    return Prompts(parrot(folder, "Hello", template=template)[1])


@pytest.mark.parametrize("id", ["call_1", "toolu_01AbCdEf", "a", "é" * 300, None, "aB3dE6gH9"])
def test_call_ids_follow_template_format(id: str | None, tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, IDS)
    assert prompts.traits.call_ids == "nine"
    text = prompts.template_text([*TALK[1:2], called_with(id), result(id)])
    first, second = re.findall(r"\[([A-Za-z0-9]{9})\]", text)
    assert id is None or first == second, "a result has the id of its call"
    assert id != "aB3dE6gH9" or first == id, "an id that fits stays"
    assert text == prompts.template_text([*TALK[1:2], called_with(id), result(id)])


def test_call_ids_include_tool_name_if_template_needs_it(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, INDEXED)
    assert prompts.traits.call_ids == "indexed"
    talk = [*TALK[1:2], called_with("call_x"), result("call_x"), called_with("y", name="find")]
    text = prompts.template_text([*talk, result("y"), called_with("functions.go:7")])
    assert re.findall(r"<(?:call>|result of )([^<>]+)", text) == [
        *("functions.look:0", "functions.look:0", "functions.find:1", "functions.find:1"),
        "functions.go:7",
    ]
    assert prompts_of(tmp_path / "2", TEMPLATE).traits.call_ids == "any"


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        *((empty, "<look>") for empty in ("", "{}", "null", "[]", None)),
        ('{"text": "x"}', "<look><text>x"),
        ('{"text": "unfinis', '<look><arguments>{"text": "unfinis'),
        ('"x"', "<look><arguments>x"),
        ("{'text': 'x'}", "<look><arguments>{'text': 'x'}"),
        ('{"text": "cut \\ud83d"}', "<look><text>cut \ufffd"),
    ],
)
def test_non_object_arguments_are_rendered(given: Any, rendered: str, tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, ITEMS)
    talk = [{"role": "user", "content": "A"}, called_with("c", given), result("c")]
    assert prompts.template_text(talk) == f"A{rendered}R"


def said_by(role: str) -> Callable[[str], dict[str, Any]]:
    return lambda text: {"role": role, "content": text}


U, A, S = said_by("user"), said_by("assistant"), said_by("system")


@pytest.mark.parametrize(
    "talk",
    [
        [S("one"), U("two")],
        [U("one"), U("two")],
        [S("one")],
        [S("one"), S("two")],
        [A("one"), U("two")],
        [S("one"), A("two"), U("three")],
        [U("one"), A("two"), A("three"), U("four")],
        [U("one"), called_with("c", '{"k": "two"}'), result("c", "three"), U("four")],
        [U("one"), result("c", "two")],
        [A("one"), A("two")],
        [U("one"), U(""), A(""), U("two")],
    ],
)
@pytest.mark.parametrize("template", [FOLDS, PLAIN, ALTERNATES, TEMPLATE, IDS, ITEMS, FIRST_ONLY])
def test_every_message_is_rendered_in_order(
    template: str, talk: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = prompts_of(tmp_path, template).template_text(talk)
    words = ("one", "two", "three", "four")
    said = json.dumps(talk)
    places = [text.find(word) for word in words if word in said]
    assert min(places) >= 0 and places == sorted(places), text


def test_unsupported_tools_are_described_in_system_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(tmp_path, PLAIN)
    # The tokenizer of these tests comes with a parser, whatever its template says.
    monkeypatch.setattr(type(prompts.tokenizer), "has_tool_calling", False)
    tools = [{"type": "function", "function": {"name": "look", "description": "Finds {x}."}}]
    traits = prompts.traits
    assert not traits.tools and not traits.calls
    text = prompts.template_text([S("Be brief."), U("A")], tools)
    assert text.startswith("<system>Be brief.\n\n# Tools") and "Finds {x}." in text
    assert prompts.format.call_name == "hermes", "and calls are read in that form"
    assert prompts_of(tmp_path / "2", TEMPLATE).traits.tools


def test_repairs_of_messages_are_reported(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, ITEMS)
    prompts.template_text([U("A"), called_with("c", "[1]"), result("c")])
    assert MENDED.get() == ("arguments that were no object were wrapped in one",)
    prompts.template_text([U("A")])
    assert MENDED.get() == ()
