from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.encoders.encoder_tokens import Truncation
from penstock.engine.model.constraint import json_schema_grammar
from penstock.errors import SettingError
from penstock.server.problems import BadRequest
from penstock.server.tools.tool_schemas import closed

MOST_PROMPTS = 128
MOST_TEXTS = 2_048
"""Maximum number of texts in a request for embeddings or scores, as in OpenAI's API."""
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_NAMES = 4_096

T = TypeVar("T")
Each: TypeAlias = Annotated[list[T], Field(fail_fast=True)]


def _text_or_list(content: Any) -> str:
    return "[list]" if isinstance(content, list) else "[text]"


TextOrList = Discriminator(_text_or_list)
"""Discriminator of text and list, so that errors concern one form; they omit bracketed tags."""
Name = Annotated[str, Field(max_length=256)]
Id = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
"""Token id; `Service` rejects ids outside the vocabulary."""


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_NAMES:
        raise ValueError(f"at most {MOST_NAMES} names")
    return value


Biases = Annotated[dict[str, float], Field(max_length=MOST_NAMES), BeforeValidator(_few)]
Metadata = Annotated[dict[str, str], Field(max_length=MOST_NAMES), BeforeValidator(_few)]


def _prompt(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    """Parse a prompt; on failure, raise an error that names all accepted forms."""
    if isinstance(value, list) and len(value) > MOST_PROMPTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_many_prompts", f"1 to {MOST_PROMPTS} prompts")
    try:
        return parse(value)
    except ValidationError:
        raise PydanticCustomError("prompt_type", PROMPT_FORMS) from None


PROMPT_FORMS = "a prompt is a text or a list of token numbers"
OnePrompt: TypeAlias = Annotated[
    str | Annotated[Each[Id], Field(min_length=1)], WrapValidator(_prompt)
]
Prompt: TypeAlias = Annotated[str | Each[str] | Each[Id] | Each[Each[Id]], WrapValidator(_prompt)]


class RequestForm(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if isinstance(body, dict) and None in body.values():
            return {name: value for name, value in body.items() if value is not None}
        return body


TruncateForm: TypeAlias = bool | Literal["NONE", "START", "END", "none", "start", "end"]
"""Whether and where to truncate a long text, as in text-embeddings-inference or in Cohere's API."""


def truncation_of(value: TruncateForm | None) -> Truncation | None:
    """Return the end to truncate; None for no truncation.

    >>> truncation_of(True), truncation_of("START"), truncation_of("NONE"), truncation_of(None)
    ('end', 'start', None, None)
    """
    name = ("end" if value else "none") if isinstance(value, bool) else (value or "none").lower()
    return {"start": "start", "end": "end"}.get(name)  # type: ignore[return-value]


def grammar_for(schema: dict[str, Any] | bool | None, param: str) -> str:
    """Return the grammar of a JSON schema, None for any object; BadRequest if invalid. Blocking."""
    if isinstance(schema, bool):
        raise BadRequest(f"{param} must be an object", param=param)
    try:
        return json_schema_grammar(schema if schema is None else closed(schema))
    except SettingError as error:
        raise BadRequest(str(error), param=param, code="invalid_schema") from error
