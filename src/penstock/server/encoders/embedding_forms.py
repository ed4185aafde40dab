"""Request bodies of the embedding routes, OpenAI's and Ollama's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from penstock.server.forms import MOST_TEXTS, Each, Id, Name, RequestForm, TruncateForm

TEXT_FORMS = "a text, a list of texts, a list of token numbers, or a list of such lists"


def _texts(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    """Parse texts or tokens; on failure, raise an error that names all accepted forms."""
    if isinstance(value, list) and not value:
        raise PydanticCustomError("input_empty", "the list is empty")
    if isinstance(value, list) and len(value) > MOST_TEXTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_many_texts", f"1 to {MOST_TEXTS:,} texts")
    try:
        return parse(value)
    except ValidationError:
        raise PydanticCustomError("input_type", TEXT_FORMS) from None


Tokens: TypeAlias = Annotated[Each[Id], Field(min_length=1)]
Texts: TypeAlias = Annotated[str | Each[str] | Tokens | Each[Tokens], WrapValidator(_texts)]


def texts_of(value: str | Sequence[Any]) -> list[str | Sequence[int]]:
    """Return the texts of a request, each a string or a list of token ids."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return list(value)


class EmbeddingsRequest(RequestForm):
    """The body of `POST /v1/embeddings`."""

    model: Name | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    truncate: TruncateForm | None = None
    user: Name | None = None


class OllamaEmbedRequest(RequestForm):
    """The body of `POST /api/embed`."""

    model: Name = ""
    input: str | Each[str] = Field([], max_length=None)
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)


class OllamaEmbeddingsRequest(RequestForm):
    """The body of `POST /api/embeddings`, which Ollama keeps for old clients."""

    model: Name = ""
    prompt: str = ""
