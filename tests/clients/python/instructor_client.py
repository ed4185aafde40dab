"""`instructor`: models of pydantic by calls of tools and by JSON schemas, over both interfaces."""

from __future__ import annotations

from typing import Any

import instructor
from anthropic import Anthropic
from asked import KEY, MODEL, URL, Animal, report, user
from openai import OpenAI

openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
anthropic = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASKED: Any = {
    "model": MODEL,
    "max_retries": 0,
    "max_tokens": 200,
    "messages": [user("What have you seen?")],
}


def by(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai, mode=mode)


def chat() -> None:
    animal, answer = by(instructor.Mode.JSON_SCHEMA).create_with_completion(
        response_model=Animal, **ASKED
    )
    assert isinstance(animal, Animal), animal
    assert answer.usage.prompt_tokens > 0, answer


def stream() -> None:
    parts = list(by(instructor.Mode.TOOLS).create_partial(response_model=Animal, **ASKED))
    Animal.model_validate(parts[-1].model_dump())
    assert len(parts) > 1, "it came in parts"


def demanded() -> None:
    animal = by(instructor.Mode.TOOLS).create(response_model=Animal, **ASKED)
    assert isinstance(animal, Animal), animal


def structured() -> None:
    api = instructor.from_anthropic(anthropic, mode=instructor.Mode.TOOLS)
    animal = api.create(response_model=Animal, **ASKED)
    assert isinstance(animal, Animal), animal


report(chat=chat, stream=stream, demanded=demanded, structured=structured)
