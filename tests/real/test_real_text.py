"""Stop strings, grammars and streaming with a real byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from real_answers import engine_of

from penstock import Engine, Request
from penstock.engine.handle import Choice
from penstock.engine.model.constraint import json_schema_grammar
from penstock.engine.request import Token
from penstock.models.mlx_lm import Loaded, render

FAMILY = "\U0001f469\u200d\U0001f467\U0001f44d\U0001f3fd\U0001f600"
"""Woman and girl joined, a thumb with a skin tone, a smile: 23 bytes."""


@pytest.fixture(scope="module")
def engine(real: Loaded) -> Iterator[Engine]:
    with engine_of(real) as made:
        yield made
        made.check()


def prompt(real: Loaded, text: str) -> tuple[int, ...]:
    return tuple(render(real.tokenizer, [{"role": "user", "content": text}]))


def streamed(engine: Engine, request: Request) -> tuple[list[str], Choice]:
    """Return the streamed pieces of text, and the whole answer."""
    handle = engine.submit(request)
    pieces = [event.text for event in handle if isinstance(event, Token)]
    return pieces, handle.result()[0]


def test_stop_string_inside_tokens_ends_answer(real: Loaded, engine: Engine) -> None:
    asked = prompt(real, "What is the capital of France? Tell me about it.")
    whole = engine.submit(Request(prompt=asked, max_tokens=20)).result()[0]
    words = [real.tokenizer.decode([token]) for token in whole.tokens]
    ends = [len("".join(words[: number + 1])) for number in range(len(words))]
    tried = 0
    for number in range(2, len(words) - 3):
        if min(map(len, words[number : number + 2])) < 4:
            continue
        start, stop = ends[number] - 2, ends[number] + 2  # two characters of each of two tokens
        text = whole.text[start:stop]
        first = whole.text.index(text)
        request = Request(prompt=asked, max_tokens=20, stop=(text,))
        pieces, choice = streamed(engine, request)
        assert choice.text == whole.text[:first] == "".join(pieces)
        assert choice.finish is not None and choice.finish.reason == "stop"
        tried += 1
    assert tried >= 3


def test_emoji_are_streamed_whole(real: Loaded, engine: Engine) -> None:
    """Each takes several tokens, most of which end inside a character."""
    schema = {"enum": [f"{FAMILY} déjà 東京"]}
    grammar = json_schema_grammar(schema)
    request = Request(prompt=prompt(real, "Smile!"), max_tokens=60, grammar=grammar)
    pieces, choice = streamed(engine, request)
    cut = [token for token in choice.tokens if "\ufffd" in real.tokenizer.decode([token])]
    assert len(cut) >= 6, "tokens end inside characters"
    assert json.loads(choice.text) == f"{FAMILY} déjà 東京"
    assert "".join(pieces) == choice.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stop_string_inside_emoji_sequence_ends_answer(real: Loaded, engine: Engine) -> None:
    grammar = json_schema_grammar({"enum": [f"a{FAMILY}b"]})
    request = Request(
        prompt=prompt(real, "Smile!"), max_tokens=60, grammar=grammar, stop=("\U0001f44d",)
    )
    pieces, choice = streamed(engine, request)
    assert choice.text == '"a\U0001f469\u200d\U0001f467' == "".join(pieces)


def test_answers_follow_schema(real: Loaded, engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    asked = [f"Name a city in {land}, as JSON." for land in ("France", "Japan", "Peru", "Mali")]
    handles = [
        engine.submit(
            Request(prompt=prompt(real, text), max_tokens=60, grammar=json_schema_grammar(schema))
        )
        for text in asked
    ]
    for handle in handles:
        found = json.loads(handle.result()[0].text)
        assert set(found) == {"city", "people"}
        assert isinstance(found["people"], int) and len(found["city"]) <= 20
