"""vLLM's structured outputs: a JSON schema, a regular expression, choices or a grammar.

guided_json, guided_regex, guided_choice, guided_grammar ──┐
structured_outputs: {json, regex, choice, grammar, ...} ───┴──> one grammar for decoding
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from penstock.engine.model.constraint import check_grammar
from penstock.errors import SettingError
from penstock.server.forms import Each, RequestForm, grammar_for
from penstock.server.openai.response_tools import regex_grammar
from penstock.server.problems import BadRequest

MOST_CHOICES = 1_024
MOST_CHARACTERS = 65_536

Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Choices = Annotated[Each[Text], Field(min_length=1, max_length=MOST_CHOICES)]


class StructuredOutputs(RequestForm):
    """Constraint on the answer; exactly one field is set."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    """JSON schema, as an object or text."""
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Structured(RequestForm):
    """vLLM's fields for structured outputs; older clients send the `guided_` ones."""

    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None

    def structure(self) -> str | None:
        structures = self._given()
        if len(structures) > 1:
            names = " and ".join(structures)
            raise BadRequest(f"{names} cannot be combined", param=next(iter(structures)))
        return next((_grammar(name, value) for name, value in structures.items()), None)

    @property
    def structured(self) -> bool:
        return bool(self._given())

    def _given(self) -> dict[str, Any]:
        structures = {
            name: getattr(self, name)
            for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        }
        newer = self.structured_outputs
        if newer is not None:
            for name in ("json_", "regex", "choice", "grammar", "json_object"):
                structures[f"structured_outputs.{name.rstrip('_')}"] = getattr(newer, name)
        return {name: value for name, value in structures.items() if value not in (None, False)}


def one_grammar(grammar: str | None, structure: str | None) -> str | None:
    if grammar is not None and structure is not None:
        raise BadRequest(
            "structured_outputs and guided_json, guided_regex, ... cannot be combined with "
            "response_format or a required tool call",
            param="structured_outputs",
        )
    return grammar or structure


def _grammar(name: str, value: Any) -> str:
    match name.removeprefix("guided_").removeprefix("structured_outputs."):
        case "json":
            return grammar_for(_schema(name, value), name)
        case "json_object":
            return grammar_for(None, name)
        case "regex":
            return _checked(name, regex_grammar(value))
        case "choice":
            # A JSON string is also a Lark string.
            texts = " | ".join(json.dumps(choice) for choice in value)
            return _checked(name, f"start: {texts}\n")
        case _:
            return _checked(name, str(value))


def _checked(name: str, grammar: str) -> str:
    try:
        check_grammar(grammar, name)
    except SettingError as error:
        raise BadRequest(str(error), param=name, code="invalid_grammar") from error
    return grammar


def _schema(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise BadRequest(f"{name} must be a JSON schema, or its text", param=name)
    return schema
