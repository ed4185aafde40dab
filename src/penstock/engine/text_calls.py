"""Text interface of the engine: converts prompts and chats to requests, and events to text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from penstock.engine.handle import Handle
from penstock.engine.request import Finish, Request, Sampling, Token
from penstock.errors import SettingError
from penstock.models.mlx_lm import encode, render
from penstock.models.template_renderer import TemplateRenderer
from penstock.plurals import counted

Message: TypeAlias = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Message roles supported by chat templates."""
_GIVEN = {"prompt", "sampling", "n", "goes_on"}
"""Fields of `Request` that `generate` and `chat` set themselves."""
NAMES = frozenset(Sampling.model_fields) | (frozenset(Request.model_fields) - _GIVEN)
"""Names of the settings of an answer: fields of `Request` and of its `Sampling`."""


def text_request(tokens: Sequence[int], *, goes_on: bool, settings: Mapping[str, Any]) -> Request:
    """Create a request from the fields of `Request` and `Sampling` in one mapping.

    Args:
        tokens: tokens of the prompt.
        goes_on: whether the answer continues the prompt's text; see `Request.goes_on`.
        settings: fields by name.

    Raises:
        SettingError: a field is unknown, or a value is invalid.
    """
    for name in settings:
        if name not in NAMES:
            near = get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            more = "; engine.submit(Request(...)) takes it" if name in _GIVEN else hint
            raise SettingError(f"{name} is not a setting of a request{more}")
    chosen = {name: value for name, value in settings.items() if name in Sampling.model_fields}
    rest = {name: value for name, value in settings.items() if name not in chosen}
    if isinstance(rest.get("stop"), str):
        rest["stop"] = (rest["stop"],)
    return Request(prompt=tuple(tokens), sampling=Sampling(**chosen), goes_on=goes_on, **rest)


def check_length(request: Request, context_tokens: int | None) -> None:
    """Raise SettingError if prompt and `max_tokens` exceed the model's context."""
    left = (context_tokens or 2**31) - len(request.prompt)
    if left < 1:
        raise SettingError(
            f"the prompt has {counted(len(request.prompt), 'token')}; the model's context has "
            f"{context_tokens:,} for prompt and answer; shorten the prompt"
        )
    if left < request.max_tokens < Request.ENDLESS:
        raise SettingError(
            f"max_tokens {request.max_tokens:,} is too many: after the prompt's "
            f"{counted(len(request.prompt), 'token')} the model's context has room for {left:,}; "
            f"lower max_tokens"
        )


def check_answer(request: Request, context_tokens: int | None, max_kv_size: int) -> None:
    """Raise SettingError if `max_tokens` is more than any answer of this engine could have."""
    most = max(context_tokens or 2**31, max_kv_size)
    if most < request.max_tokens < Request.ENDLESS:
        raise SettingError(
            f"max_tokens {request.max_tokens:,} is more than any answer has here: the model's "
            f"context is {counted(context_tokens or 0, 'token')}, and max_kv_size {max_kv_size:,}; "
            f"lower max_tokens, or set it to Request.ENDLESS"
        )


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Encode a text for the model to continue; raises SettingError if it is empty."""
    _check_tokenizer(tokenizer)
    if not isinstance(text, str):
        raise SettingError(
            f"the prompt is a {type(text).__name__}, not text; tokens go into "
            f"engine.submit(Request(prompt=...)), messages into engine.chat"
        )
    tokens = encode(tokenizer, text)
    if not tokens:
        raise SettingError("the prompt is empty; give some text to continue")
    return tokens


def chat_tokens(
    tokenizer: Any,
    messages: str | Sequence[Message],
    template_args: Mapping[str, Any],
    renderer: TemplateRenderer,
) -> list[int]:
    """Encode a conversation with the model's chat template.

    Raises:
        SettingError: a message has an unknown role, or no content.
        ModelError: there is no chat template, or it rejects the messages or does not terminate.
    """
    _check_tokenizer(tokenizer)
    talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return render(tokenizer, list(_checked(talk)), renderer=renderer, **template_args)


def _checked(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    if not messages:
        raise SettingError("messages is empty; give at least one, the user's")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise SettingError(
                f"messages[{number}] is a {type(message).__name__}; a message is a dict as "
                f"{{'role': 'user', 'content': 'Hello'}}"
            )
        role = message.get("role")
        if role not in ROLES:
            near = get_close_matches(str(role), ROLES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it is one of {', '.join(ROLES)}"
            raise SettingError(f"messages[{number}] has the role {role!r}{hint}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise SettingError(f"messages[{number}] has no content; give its text")
        yield {**message}


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        raise SettingError(
            "this engine has no tokenizer: make it with Engine(model, tokenizer), or give tokens "
            "to engine.submit"
        )


class Text(Iterator[str]):
    """Streamed text of one answer: iterate over it, or call `rest`.

    Closing or deleting the stream, or leaving it as a context manager, cancels the answer.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    @property
    def finish(self) -> Finish | None:
        """End of the answer, with reason and usage; None while it is open."""
        return self.handle.choices[0].finish

    def __next__(self) -> str:
        """Return the next non-empty piece of text.

        Raises:
            PenstockError: the error of a failed answer.
        """
        while not self.handle.done:
            event: Token | Finish = next(iter(self.handle))
            if isinstance(event, Finish) and event.error is not None:
                raise event.error
            if event.text:
                return event.text
        raise StopIteration

    def rest(self) -> str:
        """Wait for the end of the answer, and return the text not read yet."""
        return "".join(self)

    def close(self) -> None:
        if not self.handle.done:
            self.handle.cancel()

    def __enter__(self) -> Text:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
