"""Tokens of a request's prompt, for a router in front of several servers.

A hint decides where a request goes and nothing else. A request that cannot be read here has no
hint, goes to any server, and is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.errors import PenstockError
from penstock.server import anthropic, chat_completions, completions, responses
from penstock.server.anthropic_forms import MessagesRequest
from penstock.server.anthropic_prompt import prompt_of
from penstock.server.chat_body import ChatBody
from penstock.server.forms import CompletionRequest
from penstock.server.prompts import Prompts
from penstock.server.response_forms import ResponsesRequest
from penstock.server.responses import ResponseInput


@dataclass(frozen=True, slots=True)
class Hint:
    """A prompt as the engine will see it."""

    tokens: tuple[int, ...]
    salt: str
    cache_key: str | None
    """Value of the client's `prompt_cache_key`."""


def hint_of(path: str, body: bytes, prompts: Prompts) -> Hint | None:
    """Read a request's prompt; None if it has none, or it cannot be read. Slow: not for a loop.

    Of several prompts in one request the first one counts.
    """
    read = _READERS.get(path)
    if read is None:
        return None
    try:
        return read(body, prompts)
    except (PenstockError, ValidationError):
        return None


def _chat(body: bytes, prompts: Prompts) -> Hint:
    form = ChatBody.model_validate_json(body)
    tokens = form.render(prompts, form.plan(prompts.format))
    return Hint(tokens, form.cache_salt or "", form.prompt_cache_key)


def _completion(body: bytes, prompts: Prompts) -> Hint | None:
    form = CompletionRequest.model_validate_json(body)
    given = form.prompt
    if not isinstance(given, str):
        if not given:
            return None
        first = given[0]
        if isinstance(first, int):
            tokens = tuple(token for token in given if isinstance(token, int))
            return Hint(tokens, form.cache_salt or "", form.prompt_cache_key)
        if not isinstance(first, str):
            return Hint(tuple(first), form.cache_salt or "", form.prompt_cache_key)
        given = first
    return Hint(prompts.encode(given), form.cache_salt or "", form.prompt_cache_key)


def _responses(body: bytes, prompts: Prompts) -> Hint:
    form = ResponsesRequest.model_validate_json(body)
    tokens = ResponseInput.of(form).render(form, prompts)
    return Hint(tokens, form.cache_salt or "", form.prompt_cache_key)


def _messages(body: bytes, prompts: Prompts) -> Hint:
    form = MessagesRequest.model_validate_json(body)
    return Hint(prompt_of(form, prompts).tokens, form.cache_salt, None)


_READERS: dict[str, Callable[[bytes, Prompts], Hint | None]] = {
    chat_completions.CHAT: _chat,
    completions.COMPLETIONS: _completion,
    responses.PATH: _responses,
    anthropic.LABEL: _messages,
}
