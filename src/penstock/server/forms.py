"""OpenAI's wire format: fields of requests, checked once, and their meaning for the engine.

Fields that are not known are passed over, as OpenAI does; those that are known have their type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.config import SAMPLED
from penstock.engine.model.constraint import json_schema_grammar
from penstock.engine.request import Request, Sampling
from penstock.errors import SettingError
from penstock.server.problems import BadRequest
from penstock.server.prompt_scores import MOST_TOP
from penstock.server.prompts import check_text
from penstock.server.service import Service
from penstock.server.tool_schemas import closed

LEAST_TOP_P = 1e-6
"""Smallest `top_p` of the engine; OpenAI allows 0, which means the likeliest token."""
MOST_PROMPTS = 128
"""Limit of prompts in one request."""
MOST_STOPS = 16
MOST_STOP_TOKENS = 1_024
MOST_STOP_CHARACTERS = 256
MOST_NAMES = 4_096

T = TypeVar("T")
Each: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""List whose validation stops at the first wrong element: a body may hold millions, and pydantic
would keep an error for every one."""


def _text_or_list(content: Any) -> str:
    return "[list]" if isinstance(content, list) else "[text]"


TextOrList = Discriminator(_text_or_list)
"""Discriminator of the two forms, so that an error names one of them alone. An error's place
leaves out names in brackets."""
Name = Annotated[str, Field(max_length=256)]
Id = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
"""Number of a token; the service, which knows the vocabulary, refuses unknown ones."""


def _few(given: Any) -> Any:
    """Refuse an object with too many names before each of them is looked at."""
    if isinstance(given, dict) and len(given) > MOST_NAMES:
        raise ValueError(f"at most {MOST_NAMES} names")
    return given


Biases = Annotated[dict[str, float], Field(max_length=MOST_NAMES), BeforeValidator(_few)]
Metadata = Annotated[dict[str, str], Field(max_length=MOST_NAMES), BeforeValidator(_few)]


def _prompt(given: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    """Read a prompt; the error of a wrong form names all forms.

    Pydantic would name the first form alone. More prompts than may be are not looked at.
    """
    if isinstance(given, list) and len(given) > MOST_PROMPTS and not isinstance(given[0], int):
        raise PydanticCustomError("too_many_prompts", f"1 to {MOST_PROMPTS} prompts")
    try:
        return parse(given)
    except ValidationError:
        raise PydanticCustomError("prompt_type", PROMPT_FORMS) from None


PROMPT_FORMS = "a prompt is a text or a list of token numbers"
"""Text of the error; several prompts are a list of these."""
OnePrompt: TypeAlias = Annotated[
    str | Annotated[Each[Id], Field(min_length=1)], WrapValidator(_prompt)
]
Prompt: TypeAlias = Annotated[
    str | Each[str] | Each[Id] | Each[Each[Id]],
    WrapValidator(_prompt),
]


class RequestForm(BaseModel):
    """Base of all that clients send: strict about types, lenient about names."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leave fields out that are null, as clients write those that are not set."""
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given


class StreamOptions(RequestForm):
    """Options of a stream."""

    include_usage: bool | None = None
    """Whether a last chunk has the usage."""


class JsonSchema(RequestForm):
    """A schema that the answer must keep to."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestForm):
    """The form of the answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(RequestForm):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestForm):
    """A tool that the model may call; there are functions alone."""

    type: Literal["function"]
    function: FunctionTool


class Sampled(RequestForm):
    """Fields common to all requests: the model, sampling, and the cache."""

    model: Name | None = None
    """Name of the model; the one model of the server answers to any name."""
    temperature: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    """Temperature; 0 takes the likeliest token. The default is the server's or the model's."""
    top_p: float | None = Field(None, ge=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """Number of likeliest tokens to draw from; 0 and -1 draw from all."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    logit_bias: Biases | None = None
    """Additions to logits by token id, -100 to 100."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    ignore_eos: bool | None = None
    """Whether an answer goes on after the end of sequence, as at vLLM; chat and completions."""
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    """Tokens of an answer before it may end, as at vLLM; chat and completions, like the next."""
    include_stop_str_in_output: bool | None = None
    """Whether the answer has the text of `stop` or `stop_token_ids` that ended it."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the answer."""
    prompt_logprobs: int | None = Field(None, ge=-1, le=MOST_TOP)
    """Number of likeliest tokens that are reported beside each token of the prompt, as vLLM does,
    -1 for all; chat and completions alone."""
    prompt_cache_key: Annotated[str, Field(max_length=1_024)] | None = None
    """Cache key; prefixes of requests with a key are kept longer than others."""
    cache_salt: Annotated[str, Field(max_length=1_024)] | None = None
    """Salt: only requests of one salt share prefixes."""
    cache_prompt: bool | None = None
    """Whether prefixes are looked up and kept, as at llama.cpp; false computes the whole prompt."""

    def sampling(
        self, default: Sampling, *, logprobs: bool = False, top_logprobs: int = 0
    ) -> Sampling:
        """Return the rules by which tokens are chosen.

        Args:
            default: of the service, for fields that the request leaves out.
            logprobs: whether tokens come with their log-probabilities.
            top_logprobs: likeliest tokens that are reported beside them.

        Raises:
            BadRequest: a bias that is none.
        """
        given = {name: getattr(self, name) for name in SAMPLED}
        chosen = {name: value for name, value in given.items() if value is not None}
        if "top_p" in chosen:
            chosen["top_p"] = max(chosen["top_p"], LEAST_TOP_P)
        if "top_k" in chosen:
            chosen["top_k"] = max(0, chosen["top_k"])
        return Sampling(
            **{**{name: getattr(default, name) for name in SAMPLED}, **chosen},
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_bias(self.logit_bias or {}),
            seed=self.seed,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )

    def request(
        self,
        service: Service,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        stop_token_ids: Sequence[int] = (),
        n: int = 1,
        grammar: str | None = None,
        goes_on: bool = False,
        prediction: Sequence[int] = (),
        ignore_eos: bool = False,
        prompt_logprobs: int | None = None,
        silent_tokens: Iterable[int] = (),
    ) -> Request:
        """Return the engine's request."""
        settings = service.settings
        if max_tokens is None:
            max_tokens = service.rest_tokens(len(prompt))
        if (self.min_tokens or 0) > max_tokens:
            raise BadRequest(
                f"min_tokens {self.min_tokens} is more than max_tokens {max_tokens}",
                param="min_tokens",
            )
        if self.cache_salt is not None:
            check_text(self.cache_salt, "cache_salt")
        return Request(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            stop=_stops(stop),
            stop_tokens=_stop_tokens(service, stop_token_ids),
            n=n,
            timeout_seconds=settings.request_timeout_seconds,
            salt=self.cache_salt or "",
            cache_prompt=self.cache_prompt is not False,
            grammar=grammar,
            goes_on=goes_on,
            prediction=tuple(prediction),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
            min_tokens=self.min_tokens or 0,
            keep_stop=bool(self.include_stop_str_in_output),
            silent_tokens=frozenset(silent_tokens),
            hold_seconds=settings.hold_seconds if self.prompt_cache_key else 0.0,
        )


class Prediction(RequestForm):
    """A text that is expected as the answer."""

    type: Literal["content"]
    content: str | Each[dict[str, Any]]
    """A text, or parts of which each is a text."""

    @property
    def text(self) -> str:
        """The text, of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text") or "") for part in self.content)


class ChatMessage(RequestForm):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: (
        Annotated[
            Annotated[str, Tag("[text]")] | Annotated[Each[dict[str, Any] | str], Tag("[list]")],
            TextOrList,
        ]
        | None
    ) = None
    """A text, or parts of which each is a text."""
    name: str | None = None
    tool_calls: Each[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Sampled):
    """The body of `POST /v1/chat/completions`."""

    messages: Each[ChatMessage] = Field(min_length=1, max_length=16_384)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: str | Each[str] | None = None
    stop_token_ids: Each[Id] | None = Field(None, max_length=MOST_STOP_TOKENS)
    """Tokens that end an answer, as vLLM names them."""
    n: int | None = Field(None, ge=1, le=128)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """Whether a stream says how much of the prompt is read, as llama.cpp's server does."""
    response_format: ResponseFormat | None = None
    tools: Each[Tool] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    modalities: Each[Name] | None = Field(None, max_length=8)
    prediction: Prediction | None = None
    """Text that is expected as the answer; its tokens are proposed."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the model's chat template."""


class CompletionRequest(Sampled):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    """A text or its tokens, or several of them."""
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """Most tokens of an answer; 0 reads the prompt and generates nothing."""
    stop: str | Each[str] | None = None
    stop_token_ids: Each[Id] | None = Field(None, max_length=MOST_STOP_TOKENS)
    """Tokens that end an answer, as vLLM names them."""
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    logprobs: int | None = Field(None, ge=0, le=20)
    """Number of likeliest tokens that are reported beside each chosen one."""
    echo: bool | None = None
    """Whether the text begins with the prompt, and `logprobs` with those of its tokens."""
    suffix: str | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """Whether a stream says how much of the prompts is read, as llama.cpp's server does."""


def grammar_for(schema: dict[str, Any] | bool | None, param: str) -> str:
    """Return the grammar of a JSON schema, or of any JSON object. Slow: not in an event loop.

    Raises:
        BadRequest: the schema is none, or of a kind that cannot be kept to.
    """
    if isinstance(schema, bool):
        raise BadRequest(f"{param} must be an object", param=param)
    try:
        return json_schema_grammar(schema if schema is None else closed(schema))
    except SettingError as error:
        raise BadRequest(str(error), param=param, code="invalid_schema") from error


def grammar_of(wanted: ResponseFormat | None) -> str | None:
    """Return the grammar of a `response_format`; None if any text will do. Slow, as above."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return grammar_for(None, "response_format")
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise BadRequest(
            "response_format.json_schema.schema is missing", param="response_format.json_schema"
        )
    return grammar_for(wanted.json_schema.schema_, "response_format.json_schema.schema")


def _bias(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise BadRequest(f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise BadRequest("logit_bias: a bias is -100 to 100", param="logit_bias")
        biases[int(token)] = bias
    return biases


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MOST_STOPS:
        raise BadRequest(f"stop: at most {MOST_STOPS} texts", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MOST_STOP_CHARACTERS:
            raise BadRequest(
                f"stop: a text has 1 to {MOST_STOP_CHARACTERS} characters", param="stop"
            )
    return tuple(stops)


def _stop_tokens(service: Service, given: Sequence[int]) -> tuple[int, ...]:
    for token in given:
        if not 0 <= token < service.vocabulary_size:
            raise BadRequest(
                f"stop_token_ids: the model has no token {token}", param="stop_token_ids"
            )
    return tuple(given)
