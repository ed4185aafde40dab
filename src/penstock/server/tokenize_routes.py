"""Tokenization routes of vLLM and llama.cpp."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.disconnect import until_gone
from penstock.server.forms import Each, Id, Name, RequestForm
from penstock.server.openai.legacy_calls import with_tool_calls
from penstock.server.openai.openai_forms import ChatMessage, Tool
from penstock.server.openai.openai_objects import ERRORS, Json
from penstock.server.prompts import Prompts, client_arguments
from penstock.server.reasoning_effort import effort_switches
from penstock.server.request_body import reading_aside
from penstock.server.service import Service

MOST_DECODED = 2**20


class TemplateRequest(RequestForm):
    """Messages to render with the model's chat template."""

    model: Name | None = None
    messages: Each[ChatMessage] = Field(min_length=1, max_length=16_384)
    tools: Each[Tool] | None = Field(None, max_length=512)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None

    def render(self, prompts: Prompts) -> tuple[int, ...]:
        messages, tools, arguments = self._given(prompts)
        return prompts.render(messages, tools, answer=self._opens, **arguments)

    def text(self, prompts: Prompts) -> str:
        messages, tools, arguments = self._given(prompts)
        return prompts.template_text(messages, tools, answer=self._opens, **arguments)

    @property
    def _opens(self) -> bool:
        return self.add_generation_prompt is not False

    def _given(
        self, prompts: Prompts
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        arguments = effort_switches(self.reasoning_effort, prompts)
        arguments |= client_arguments(self.chat_template_kwargs)
        return with_tool_calls(messages), tools, arguments


class TokenizeRequest(RequestForm):
    """The body of `POST /tokenize`: `prompt` or `messages` as for vLLM, `content` for llama.cpp."""

    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Each[ChatMessage] | None = Field(None, min_length=1, max_length=16_384)
    tools: Each[Tool] | None = Field(None, max_length=512)
    add_special_tokens: bool | None = None
    """Add special tokens to `prompt`; true by default."""
    add_special: bool | None = None
    """Add special tokens to `content`; false by default."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None
    return_token_strs: bool | None = None
    """Return the text of each token as `token_strs`."""
    with_pieces: bool | None = None
    """Return each token as an object with its text, as llama.cpp does."""

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if sum(text is not None for text in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give one of prompt, messages and content")
        return self

    def read(self, prompts: Prompts) -> tuple[int, ...]:
        if self.messages is not None:
            return TemplateRequest.model_validate(self, from_attributes=True).render(prompts)
        if self.content is not None:
            return prompts.tokens(self.content, "content", special=bool(self.add_special))
        special = self.add_special_tokens is not False
        return prompts.tokens(self.prompt or "", "prompt", special=special)


class DetokenizeRequest(RequestForm):
    """The body of `POST /detokenize`."""

    model: Name | None = None
    tokens: Each[Id] = Field(max_length=MOST_DECODED)


class Tokenized(BaseModel):
    """Tokens of a text."""

    tokens: list[int] | list[dict[str, Any]]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """Special tokens of the tokenizer, as text."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class Detokenized(BaseModel):
    """Text of tokens, under the field names of vLLM and llama.cpp."""

    prompt: str
    content: str


class TemplateText(BaseModel):
    """Text of a conversation, as rendered for the model."""

    prompt: str


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["tokens"], responses=ERRORS, route_class=reading_aside(service))
    prompts = service.prompts

    @routes.post("/tokenize", response_model=Tokenized)
    async def tokenize(body: TokenizeRequest, http: HttpRequest) -> Response:
        """Return the tokens of a text or a conversation."""
        return await until_gone(http, service.work(_tokenized, service, body))

    @routes.get("/tokenizer_info", response_model=TokenizerInfo)
    async def tokenizer_info() -> Response:
        """Return the tokenizer's special tokens, as lm-eval expects."""
        tokenizer = service.tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return Json({name: getattr(tokenizer, name, None) for name in names})

    @routes.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest, http: HttpRequest) -> Response:
        """Return the text of tokens."""
        return await until_gone(http, service.work(_text, service, body))

    @routes.post("/apply-template", response_model=TemplateText)
    async def apply_template(body: TemplateRequest, http: HttpRequest) -> Response:
        """Render a conversation with the chat template."""
        return await until_gone(http, service.work(lambda: Json({"prompt": body.text(prompts)})))

    return routes


def _text(service: Service, body: DetokenizeRequest) -> Response:
    service.check_tokens(body.tokens, "tokens")
    text = service.prompts.text(body.tokens)
    return Json({"prompt": text, "content": text})


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    tokens = body.read(service.prompts)
    written: dict[str, Any] = {"count": len(tokens), "max_model_len": service.context_tokens}
    texts = None
    if body.return_token_strs or body.with_pieces:
        texts = service.prompts.token_texts(tokens)
    written["tokens"] = list(tokens)
    if body.with_pieces and texts is not None:
        pairs = zip(tokens, texts, strict=True)
        written["tokens"] = [{"id": token, "piece": text} for token, text in pairs]
    if body.return_token_strs:
        written["token_strs"] = texts
    return Json(written)
