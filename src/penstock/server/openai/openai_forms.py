"""OpenAI's request formats, and their conversion to engine requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag

from penstock.config import SAMPLED
from penstock.engine.request import Request, Sampling
from penstock.server.access import salt_for
from penstock.server.forms import (
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    Biases,
    Each,
    Id,
    Name,
    Prompt,
    RequestForm,
    TextOrList,
    grammar_for,
)
from penstock.server.images import PromptTokens, spans_of
from penstock.server.openai.legacy_calls import choice_of, tools_of, with_tool_calls
from penstock.server.openai.prompt_scores import MOST_TOP
from penstock.server.openai.structured import Structured
from penstock.server.parsing.formats import AnswerFormat
from penstock.server.problems import BadRequest
from penstock.server.prompts import Prompts, check_text, client_arguments
from penstock.server.reasoning_effort import effort_switches
from penstock.server.service import Service
from penstock.server.tools.allowed_tools import ToolPlan

LEAST_TOP_P = 1e-6
"""Smallest `top_p` of the engine, used for OpenAI's 0."""
MOST_STOP_TOKENS = 1_024


class StreamOptions(RequestForm):
    """Options of a streamed response."""

    include_usage: bool | None = None


class JsonSchema(RequestForm):
    """JSON schema that the answer must follow."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestForm):
    """The format of the answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(RequestForm):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestForm):
    """A tool that the model may call; only functions are supported."""

    type: Literal["function"]
    function: FunctionTool


class Sampled(RequestForm):
    """Fields common to all requests: the model, sampling, and the cache."""

    model: Name | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    """Temperature; 0 is greedy. Defaults to the server's or the model's."""
    top_p: float | None = Field(None, ge=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """Number of likeliest tokens to sample from; 0 and -1 mean all."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    logit_bias: Biases | None = None
    """Values added to logits by token id, -100 to 100."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    ignore_eos: bool | None = None
    """Continue after an end-of-sequence token, as in vLLM. Chat and completions only."""
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    """Minimum number of tokens to generate, as in vLLM. Chat and completions only."""
    include_stop_str_in_output: bool | None = None
    """Include the stop text or stop token that ended the answer. Chat and completions only."""
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=MOST_TOP)
    """Number of log-probabilities to return per prompt token; -1 means all."""
    prompt_cache_key: Annotated[str, Field(max_length=1_024)] | None = None
    """If set, the prompt's prefix is kept in the cache for longer."""
    cache_salt: Annotated[str, Field(max_length=1_024)] | None = None
    """Cache salt: only requests with equal salts share prefixes."""
    cache_prompt: bool | None = None
    """Use the prefix cache, as in llama.cpp; if false, compute the whole prompt."""

    def sampling(
        self, default: Sampling, *, logprobs: bool = False, top_logprobs: int = 0
    ) -> Sampling:
        """Return the sampling settings; `default` provides unset fields."""
        fields = {name: getattr(self, name) for name in SAMPLED}
        chosen = {name: value for name, value in fields.items() if value is not None}
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
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        stop_token_ids: Sequence[int] = (),
        **fields: Any,
    ) -> Request:
        """Return the engine request; BadRequest if a value is out of range."""
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
            spans=spans_of(prompt),
            max_tokens=max_tokens,
            stop=_stops(stop),
            stop_tokens=_stop_tokens(service, stop_token_ids),
            timeout_seconds=settings.request_timeout_seconds,
            adapter=service.adapter_of(self.model),
            salt=salt_for(self.cache_salt),
            cache_prompt=self.cache_prompt is not False,
            min_tokens=self.min_tokens or 0,
            keep_stop=bool(self.include_stop_str_in_output),
            hold_seconds=settings.hold_seconds if self.prompt_cache_key else 0.0,
            **fields,
        )


class Prediction(RequestForm):
    """Expected text of the answer."""

    type: Literal["content"]
    content: str | Each[dict[str, Any]]

    @property
    def text(self) -> str:
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
    name: str | None = None
    tool_calls: Each[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Sampled, Structured):
    messages: Each[ChatMessage] = Field(min_length=1, max_length=16_384)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: str | Each[str] | None = None
    stop_token_ids: Each[Id] | None = Field(None, max_length=MOST_STOP_TOKENS)
    n: int | None = Field(None, ge=1, le=128)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """Stream prompt progress, as llama.cpp does."""
    response_format: ResponseFormat | None = None
    tools: Each[Tool] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    modalities: Each[Name] | None = Field(None, max_length=8)
    prediction: Prediction | None = None
    """Expected answer; its tokens are used for speculative decoding."""
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Each[FunctionTool] | None = Field(None, max_length=512)
    """Deprecated form of `tools`; ignored if `tools` is set."""
    function_call: str | dict[str, Any] | None = None
    continue_final_message: bool | None = None
    """Continue the final assistant message, as in vLLM."""
    add_generation_prompt: bool | None = None
    """Must be false with `continue_final_message`, as in vLLM."""
    reasoning_effort: Name | None = None

    @property
    def legacy(self) -> bool:
        return self.tools is None and self.functions is not None

    def plan(self, form: AnswerFormat) -> ToolPlan:
        if self.legacy:
            functions = [f.model_dump(exclude_none=True) for f in self.functions or ()]
            return ToolPlan.of(form, tools_of(functions), choice_of(self.function_call))
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return ToolPlan.of(form, tools, self.tool_choice)

    def render(self, prompts: Prompts, plan: ToolPlan) -> PromptTokens:
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        arguments = effort_switches(self.reasoning_effort, prompts)
        arguments |= client_arguments(self.chat_template_kwargs)
        salt = self.cache_salt or ""
        goes_on = self.goes_on
        if goes_on:
            arguments["continue_final_message"] = True
        return prompts.render(
            with_tool_calls(messages), plan.prompt, answer=not goes_on, salt=salt, **arguments
        )

    @property
    def goes_on(self) -> bool:
        """Whether to continue the last message; BadRequest if it is not an assistant message."""
        goes_on = bool(self.continue_final_message)
        if goes_on and (self.messages[-1].role != "assistant" or not self.messages[-1].content):
            raise BadRequest(
                "continue_final_message: the last message is not the assistant's, or is empty",
                param="continue_final_message",
            )
        if self.add_generation_prompt is not None and self.add_generation_prompt is goes_on:
            raise BadRequest(
                "add_generation_prompt must be false with continue_final_message, else true",
                param="add_generation_prompt",
            )
        return goes_on


class CompletionRequest(Sampled, Structured):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """Maximum number of tokens per answer; 0 only processes the prompt."""
    stop: str | Each[str] | None = None
    stop_token_ids: Each[Id] | None = Field(None, max_length=MOST_STOP_TOKENS)
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    logprobs: int | None = Field(None, ge=0, le=20)
    """Number of log-probabilities to return per generated token."""
    echo: bool | None = None
    """Return the prompt before the answer, in the text and in `logprobs`."""
    suffix: str | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None


def grammar_of(response_format: ResponseFormat | None) -> str | None:
    """Return the grammar of a `response_format`; None if it allows any text. Blocking."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return grammar_for(None, "response_format")
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise BadRequest(
            "response_format.json_schema.schema is missing", param="response_format.json_schema"
        )
    return grammar_for(response_format.json_schema.schema_, "response_format.json_schema.schema")


def _bias(logit_bias: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise BadRequest(f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise BadRequest("logit_bias: a bias must be -100 to 100", param="logit_bias")
        biases[int(token)] = bias
    return biases


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MOST_STOPS:
        raise BadRequest(f"stop: at most {MOST_STOPS} texts", param="stop")
    for text in stops:
        if not 0 < len(text) <= MOST_STOP_CHARACTERS:
            raise BadRequest(
                f"stop: a text must have 1 to {MOST_STOP_CHARACTERS} characters", param="stop"
            )
    return tuple(stops)


def _stop_tokens(service: Service, tokens: Sequence[int]) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < service.vocabulary_size:
            raise BadRequest(
                f"stop_token_ids: the model has no token {token}", param="stop_token_ids"
            )
    return tuple(tokens)
