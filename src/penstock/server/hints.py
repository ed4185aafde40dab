"""Prompt tokens of a request, for a router that distributes requests over several servers.

An invalid request has no hint; the server that receives it rejects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.errors import PenstockError
from penstock.models.input_spans import with_keys
from penstock.server.access import salt_for
from penstock.server.anthropic import messages
from penstock.server.anthropic.anthropic_forms import MessagesRequest
from penstock.server.anthropic.anthropic_prompt import prompt_of
from penstock.server.images import ImagesToFetch, spans_of
from penstock.server.openai import chat_completions, completions, responses
from penstock.server.openai.openai_forms import ChatRequest, CompletionRequest
from penstock.server.openai.response_forms import ResponsesRequest
from penstock.server.openai.response_input import ResponseInput
from penstock.server.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Hint:
    tokens: tuple[int, ...]
    """Tokens of the prompt; those of images are replaced by the image's key, as in block hashes."""
    salt: str
    cache_key: str | None


def hint_of(path: str, body: bytes, prompts: Prompts) -> Hint | None:
    """Tokenize a request's first prompt; None if it has none or is invalid. Blocking."""
    read = _READERS.get(path)
    if read is None:
        return None
    try:
        return read(body, prompts)
    except (PenstockError, ValidationError, ImagesToFetch):
        return None


def _chat(body: bytes, prompts: Prompts) -> Hint:
    form = ChatRequest.model_validate_json(body)
    tokens = form.render(prompts, form.plan(prompts.format))
    return Hint(_keyed(tokens), salt_for(form.cache_salt), form.prompt_cache_key)


def _completion(body: bytes, prompts: Prompts) -> Hint | None:
    form = CompletionRequest.model_validate_json(body)
    prompt = form.prompt
    if not isinstance(prompt, str):
        if not prompt:
            return None
        first = prompt[0]
        if isinstance(first, int):
            tokens = tuple(token for token in prompt if isinstance(token, int))
            return Hint(tokens, salt_for(form.cache_salt), form.prompt_cache_key)
        if not isinstance(first, str):
            return Hint(tuple(first), salt_for(form.cache_salt), form.prompt_cache_key)
        prompt = first
    return Hint(prompts.encode(prompt), salt_for(form.cache_salt), form.prompt_cache_key)


def _responses(body: bytes, prompts: Prompts) -> Hint:
    form = ResponsesRequest.model_validate_json(body)
    read = ResponseInput.of(form, images=prompts.images is not None)
    tokens = read.render(form, prompts)
    return Hint(_keyed(tokens), salt_for(form.cache_salt), form.prompt_cache_key)


def _messages(body: bytes, prompts: Prompts) -> Hint:
    form = MessagesRequest.model_validate_json(body)
    return Hint(_keyed(prompt_of(form, prompts).tokens), salt_for(form.cache_salt), None)


def _keyed(tokens: Sequence[int]) -> tuple[int, ...]:
    return with_keys(tuple(tokens), spans_of(tokens))


_READERS: dict[str, Callable[[bytes, Prompts], Hint | None]] = {
    chat_completions.CHAT: _chat,
    completions.COMPLETIONS: _completion,
    responses.PATH: _responses,
    messages.LABEL: _messages,
}
