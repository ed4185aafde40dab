"""Calls that a chat template writes into history, read back by the reader of its format."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

from penstock.models.template_renderer import TemplateRenderer
from penstock.server.history import fit
from penstock.server.parsing.events import ArgumentsPart, CallEnd, CallStart, TextPart
from penstock.server.parsing.formats import AnswerFormat, answer_format
from penstock.server.templates import SAID, USER, TemplateTraits, shared, talk_of

RENDERER = TemplateRenderer()
CALLS = 40
"""Calls that are drawn for each template."""
PROPERTIES = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "scale": {"type": "number"},
    "deep": {"type": "boolean"},
    "parts": {"type": "array"},
    "options": {"type": "object"},
    "content": {"type": "string"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "put_file",
        "description": "Put a file.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["path"]},
    },
}
TEXTS = (
    *("", "a.txt", " x ", "\n", "    return x\n", "a\r\nb\r\n", "\ttab", "null", "None", "true"),
    *(
        "1",
        "1e-7",
        'say "so"',
        "it's",
        "back\\slash \\n",
        '{"a": 1}',
        "[1]",
        "x: y, z",
        "\U0001f9ab",
    ),
    *("<b>&amp;</b>", "]]>", "a = b)", "}}", "```\ncode\n```", "\u65e5\u672c"),
)


def round_trips(made: Any) -> Counter[str]:
    """Count the calls that are parsed as written, kept as text, or parsed wrong.

    Args:
        made: mlx-lm's wrapper of a tokenizer with the template.
    """
    form, traits = answer_format(made), TemplateTraits.of(made, RENDERER)
    if form.calls is None and form.shape is None:
        return Counter(["no calls"])
    if not traits.calls:
        return Counter(["calls are not rendered"])
    outcomes: Counter[str] = Counter()
    for seed in range(CALLS):
        arguments = _drawn(form, Random(seed))
        try:
            text = _written(made, traits, arguments)
        except Exception as error:  # noqa: BLE001 - a template raises anything
            outcomes[f"raises {type(error).__name__}"] += 1
            continue
        whole, pieces = _read(form, [text]), _read(form, list(text))
        if whole != pieces:
            outcomes["WRONG: pieces are read otherwise"] += 1
        elif whole == [("put_file", arguments)]:
            outcomes["equal"] += 1
        elif not whole:
            outcomes["text"] += 1
        else:
            outcomes[f"WRONG: {arguments} became {whole}"] += 1
    return outcomes


def _drawn(form: AnswerFormat, random: Random) -> dict[str, Any]:
    """Draw the arguments of a call; texts may contain markers of the format."""
    shape = form.shape
    marks = [] if shape is None else [shape.opening, shape.closing.strip(), shape.after.strip()]
    if shape is not None and shape.tags is not None:
        marks += [shape.tags.end, f"one {shape.tags.end} two", f"{shape.tags.end}\nso"]
    texts = [*TEXTS, *(mark for mark in marks if mark)]
    drawn = {
        "path": random.choice(texts),
        "count": random.choice((0, -7, 2**53 + 1, 10**18)),
        "scale": random.choice((1e-7, 0.5, -3)),
        "deep": random.random() < 0.5,
        "parts": random.choice(([], ["a", 1, None], [{"k": "v"}])),
        "options": random.choice(({}, {"k": 1}, {"k": ["x", True]})),
        "content": "".join(random.choices(texts, k=2)),
    }
    kept = {key for key in drawn if key == "path" or random.random() < 0.6}
    return {key: value for key, value in drawn.items() if key in kept}


def _written(made: Any, traits: TemplateTraits, arguments: dict[str, Any]) -> str:
    """Return the call as the template renders it in an answer."""
    function = {"name": "put_file", "arguments": arguments}
    call = {"type": "function", "id": "call00001", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}

    def rendered(*answers: Any, opens: bool = False) -> str:
        talk = [*talk_of(USER), *answers]
        messages = fit(traits, talk, [TOOL]).messages
        return str(
            made.apply_chat_template(
                messages, tools=[TOOL], tokenize=False, add_generation_prompt=opens
            )
        )

    called, plain = rendered(said), rendered(*talk_of(SAID))
    # What stands behind every answer ends it, and is none of it.
    called = called[: len(called) - shared(called[::-1], plain[::-1])]
    opening = rendered(opens=True)
    if called.startswith(opening):
        return called[len(opening) :]
    # The two may begin alike: a mark is not cut within.
    return called[max(called.rfind(USER), shared(called, plain) - 40) :].removeprefix(USER)


def _read(form: AnswerFormat, pieces: list[str]) -> list[tuple[str, Any]]:
    """Return the calls of a text that arrives in pieces."""
    parser = form.parser([TOOL])
    events = [event for piece in pieces for event in parser.feed(piece)]
    calls: list[tuple[str, Any]] = []
    name, grown = "", ""
    for event in [*events, *parser.end()]:
        if isinstance(event, CallStart):
            name, grown = event.name, ""
        elif isinstance(event, ArgumentsPart):
            grown += event.text
        elif isinstance(event, CallEnd):
            calls.append((name, json.loads(grown)))
        elif not isinstance(event, TextPart):
            continue
    return calls
