"""Tokenization of messages and texts with the model's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from threading import Event
from typing import Any, TypeAlias

from penstock.config import MAX_TOKENS
from penstock.engine.model.text import TextStream
from penstock.engine.request import ReasoningBudget
from penstock.errors import PenstockError
from penstock.models.byte_level import detokenizer_of, token_bytes
from penstock.models.image_reader import ImageReader
from penstock.models.mlx_lm import rendered_text
from penstock.models.template_renderer import TemplateOverrun, TemplateRefusal, TemplateRenderer
from penstock.server.access import salt_for
from penstock.server.half_pairs import whole_pairs
from penstock.server.history import fit
from penstock.server.images import Images, PromptTokens, is_image
from penstock.server.parsing.formats import HARMONY, NONE, AnswerFormat, answer_format, check_names
from penstock.server.parsing.tagged import HERMES
from penstock.server.pieces import FairLock, PieceEncoder
from penstock.server.problems import BadRequest, ClientGone, PromptTooLong
from penstock.server.prompt_memory import HOLD, PIECE_TOKEN_BYTES, UNCUT_CHARACTERS, hold_text
from penstock.server.remembered_answers import Opening, RememberedAnswers, openings_of
from penstock.server.templates import TemplateTraits

Message: TypeAlias = Mapping[str, Any]

STOP: ContextVar[Event | None] = ContextVar("stop", default=None)
"""Event set once the client of the current request has disconnected."""
REWRITTEN: ContextVar[str | None] = ContextVar("rewritten", default=None)
"""First difference between the rendered history and the generated answers, or None."""
MENDED: ContextVar[tuple[str, ...]] = ContextVar("mended", default=())
"""Changes made to the rendered conversation for the chat template."""
TAIL_TOKENS = 64
"""Number of tokens searched at a prompt's end for an open reasoning mark."""
TEXT_BYTES = 200
"""Estimated bytes of a token's text, in a list and in a response."""
TOKENS_AT_ONCE = 1_024
"""Tokens to decode before other requests get their turn."""
FAR_TOO_LONG = 2
"""Multiple of the maximum prompt length beyond which tokenization stops."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of content parts with text, under `text` or `refusal`."""

RESERVED = frozenset(
    (
        *("add_generation_prompt", "answer", "chat_template", "continue_final_message"),
        *("conversation", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools"),
        *("salt", "truncation"),
    )
)
"""Template arguments that clients may not set; a `chat_template` is a program."""


class Prompts:
    """Tokenizer of messages and texts. Thread-safe, blocking for long prompts.

    Calls are serialized, as not all tokenizers are thread-safe; long texts are tokenized in
    pieces, with other calls in between. `Service.work` runs the methods in worker threads.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        keep_billing_header: whether to keep Claude Code's billing header in the prompt.
        most_tokens: maximum prompt length; None means unlimited.
        answers: store of answers whose tokens later prompts reuse.
        tool_parser: name of the call format; None detects it from the template.
        reasoning_parser: name of the reasoning marks; None detects them from the template.
        refuses_tools: whether to reject tools if the template does not render them.
        system: system message of conversations that have none.
        images: reader of images; None for a text-only model.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        keep_billing_header: bool = False,
        most_tokens: int | None = None,
        answers: RememberedAnswers | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        refuses_tools: bool = False,
        system: str | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.images = images
        self.tokenizer = tokenizer
        self._answers = answers
        self._parsers = tool_parser, reasoning_parser
        self._refuses_tools = refuses_tools
        self._system = system
        check_names(tool_parser, reasoning_parser)
        self.most_tokens = most_tokens
        self.keep_billing_header = keep_billing_header
        self._lock = FairLock()
        self._renderer = TemplateRenderer()
        self._pieces = PieceEncoder(tokenizer, self._lock)

    @cached_property
    def format(self) -> AnswerFormat:
        tool_parser, reasoning_parser = self._parsers
        form = answer_format(self.tokenizer, tool_parser, reasoning_parser)
        known = form.calls is not None or form.call_name != NONE or tool_parser is not None
        if known or not self.tokenizer.has_chat_template or self.traits.tools:
            return form
        # Tools are described in the system message, in Hermes' format.
        return replace(form, call_name="hermes", calls=HERMES)

    @cached_property
    def traits(self) -> TemplateTraits:
        """Traits of the model's chat template, probed once. Blocking."""
        return TemplateTraits.of(self.tokenizer, self._renderer)

    @cached_property
    def openings(self) -> tuple[Opening, ...]:
        return openings_of(self.tokenizer, self.traits, self._renderer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer: bool = True,
        salt: str = "",
        **template_args: Any,
    ) -> PromptTokens:
        """Render a conversation with the chat template, and tokenize it. Blocking.

        Args:
            messages: messages of the conversation, oldest first.
            tools: tools that the template describes.
            answer: whether to add the template's generation prompt.
            salt: cache salt of the request, for answers remembered from earlier turns.
            template_args: further variables of the template.

        Raises:
            BadRequest: a message is invalid.
        """
        images = self._new_images()
        flat = self._flat(messages, images)
        rendered = self._templated(flat, tools, answer, template_args, images)
        tokens = self._some(self._remembering(rendered, tools, salt), "messages")
        return PromptTokens.of(tokens, [] if images is None else images.spans(tokens))

    def _new_images(self) -> Images | None:
        return None if self.images is None else Images(self.images)

    def described_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
        if not tools or self.traits.tools:
            return []
        return [str(tool.get("function", tool).get("name")) for tool in tools]

    def template_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer: bool = True,
        **template_args: Any,
    ) -> str:
        images = self._new_images()
        return self._templated(self._flat(messages, images), tools, answer, template_args, images)

    def _flat(self, messages: Sequence[Message], images: Images | None) -> list[dict[str, Any]]:
        if not messages:
            raise BadRequest("messages must not be empty", param="messages", code="invalid_value")
        if not self.tokenizer.has_chat_template:
            raise BadRequest(
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                param="messages",
            )
        last = last_user(messages)
        flat = [
            _plain(message, f"messages.{i}", strict=i == last, images=images)
            for i, message in enumerate(messages)
        ]
        if images is not None:
            images.check_fetched()
        if self._system is not None and all(m.get("role") != "system" for m in flat):
            flat.insert(0, {"role": "system", "content": self._system})
        return flat

    def _templated(
        self,
        flat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: bool,
        template_args: dict[str, Any],
        images: Images | None,
    ) -> str:
        for name in ("return_dict", "return_tensors", "add_generation_prompt", "tokenize"):
            template_args.pop(name, None)
        if self._refuses_tools and self.described_tools(tools):
            raise BadRequest(
                "this model's chat template takes no tools, and the server was started with "
                "--tools-without-template refuse: leave tools out",
                param="tools",
                code="unsupported_parameter",
            )
        fitting = fit(self.traits, flat, tools)
        MENDED.set(fitting.mended)
        stop = STOP.get()
        render = partial(
            rendered_text,
            self.tokenizer,
            renderer=self._renderer,
            tools=fitting.tools,
            answer=answer,
            gone=lambda: stop is not None and stop.is_set(),
            template_args=template_args,
        )
        try:
            if images is None or not images.placed:
                return render(fitting.messages)
            return self._with_images(render, fitting.messages, images)
        except TemplateRefusal as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}",
                param="messages",
                code="invalid_value",
            ) from error
        except TemplateOverrun as error:
            raise BadRequest(str(error), param="messages", code="invalid_value") from None

    def _with_images(
        self, render: Callable[..., str], messages: Sequence[Message], images: Images
    ) -> str:
        """Render images by the template's markers, or at their placeholders if it has none."""
        parts = images.in_parts(messages)
        if parts is not None:
            with suppress(TemplateRefusal):
                rendered = images.in_markers(render(parts))
                if rendered is not None:
                    return rendered
        return images.in_text(render(messages))

    def close(self) -> None:
        self._renderer.close()

    def start_renderer(self) -> None:
        if self.tokenizer is not None and self.tokenizer.has_chat_template:
            self._renderer.start()

    def _remembering(self, text: str, tools: Any, salt: str) -> list[int]:
        if self._answers is None:
            return self._tokens(text, "messages", special=False)
        splice = self._answers.splice(salt_for(salt), text, self.openings, self.format, tools)
        REWRITTEN.set(splice.rewritten)
        rest = self._tokens(text[splice.end :], "messages", special=False)
        tokens = [*splice.tokens, *rest]
        self._answers.note(text, tokens)
        return tokens

    def encode(self, text: str, param: str = "prompt") -> tuple[int, ...]:
        check_text(text, param)
        return self._some(self._tokens(text, param, special=True), param)

    def tokens(self, text: str, param: str, *, special: bool) -> tuple[int, ...]:
        """Tokenize raw text, which may be empty, with or without special tokens."""
        check_text(text, param)
        return self._counted(self._tokens(text, param, special=special))

    def decode(self, tokens: Sequence[int]) -> str:
        with self._lock:
            return str(self.tokenizer.decode(list(tokens)))

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is part of a character."""
        with self._lock:
            return token_bytes(self.tokenizer, token)

    def text(self, tokens: Sequence[int]) -> str:
        hold_text(self._pieces.count_bytes(tokens))
        return self.decode(tokens)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        hold = HOLD.get()
        if hold is not None:
            hold.keep(TEXT_BYTES * len(tokens))
        with self._lock:
            stream = TextStream(detokenizer_of(self.tokenizer))
        texts: list[str] = []
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            with self._lock:
                texts += map(stream.push, tokens[start : start + TOKENS_AT_ONCE])
        if texts:
            with self._lock:
                texts[-1] += stream.finish()
        return texts

    def starts_in_reasoning(self, prompt: Sequence[int]) -> bool:
        if (marks := self.reasoning_marks) is not None:
            start, end = marks
            return _last(prompt, start) > _last(prompt, end)
        if (worded := self.format.reasoning) is None:
            return False
        return self.decode(prompt[-TAIL_TOKENS:]).rstrip().endswith(worded.start)

    def open_reasoning(self, prompt: Sequence[int]) -> ReasoningBudget | None:
        """Return a budget for reasoning that the prompt opens; a grammar starts after it."""
        if self.reasoning_marks is None or not self.starts_in_reasoning(prompt):
            return None
        start, end = self.reasoning_marks
        return ReasoningBudget(max_tokens=MAX_TOKENS, start=start, end=end, inside=True)

    @cached_property
    def reasoning_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Token sequences that begin and end reasoning; None if there are none."""
        marks = self.format.reasoning
        if marks is None:
            return None
        with self._lock:
            read = [
                tuple(self.tokenizer.encode(mark, add_special_tokens=False))
                for mark in (marks.start, marks.end)
            ]
            vocabulary = self.tokenizer.get_vocab()
        known = getattr(self.tokenizer, "think_start", None) == marks.start
        whole = self.format.reasoning_name == HARMONY or marks.end in vocabulary
        return (read[0], read[1]) if known or whole else None

    def reasoning_tokens(self, answer: Sequence[int], *, inside: bool = False) -> int:
        """Count an answer's reasoning tokens, without marks; `inside` if it starts in reasoning."""
        if self.reasoning_marks is None:
            return 0
        start, end = self.reasoning_marks
        count = position = 0
        while position < len(answer):
            until = _first(answer, end if inside else start, position)
            if inside:
                count += until - position
            position = until + len(end if inside else start)
            inside = not inside
        return count

    def _some(self, tokens: Any, param: str) -> tuple[int, ...]:
        if len(tokens) == 0:
            raise BadRequest(f"{param} has no tokens", param=param, code="invalid_value")
        return self._counted(tokens)

    def _counted(self, tokens: Any) -> tuple[int, ...]:
        hold = HOLD.get()
        if hold is not None:
            hold.add_tokens(len(tokens))
        return tuple(tokens)

    def _tokens(self, text: str, param: str, *, special: bool) -> list[int]:
        max_tokens = self.most_tokens
        if max_tokens is not None and len(text) > max_tokens:
            size = len(text) if text.isascii() else len(text.encode())
            least = size // self._pieces.longest_token
            if least > max_tokens:
                raise PromptTooLong(least, max_tokens, param=param)

        def check(tokens: int, characters: int) -> None:
            if (stop := STOP.get()) is not None and stop.is_set():
                raise ClientGone("the client has closed the connection")
            if max_tokens is not None and tokens > FAR_TOO_LONG * max_tokens:
                raise PromptTooLong(tokens * len(text) // characters, max_tokens, param=param)

        try:
            return self._pieces.encode(text, special=special, check=check, large=_hold_piece)
        except PenstockError:
            raise
        # A boundary: a tokenizer may run the model's own code.
        except Exception as error:
            raise BadRequest(
                f"the tokenizer refuses this text: {_one_line(error)}", param=param
            ) from error


def _first(tokens: Sequence[int], mark: Sequence[int], start: int) -> int:
    size = len(mark)
    for index in range(start, len(tokens) - size + 1):
        if tokens[index] == mark[0] and tuple(tokens[index : index + size]) == tuple(mark):
            return index
    return len(tokens)


def _last(tokens: Sequence[int], mark: Sequence[int]) -> int:
    size = len(mark)
    for index in range(len(tokens) - size, -1, -1):
        if tokens[index] == mark[0] and tuple(tokens[index : index + size]) == tuple(mark):
            return index
    return -1


def _hold_piece(characters: int) -> None:
    hold = HOLD.get()
    if hold is not None and characters > UNCUT_CHARACTERS:
        before = hold.nbytes
        hold.resize(before + PIECE_TOKEN_BYTES * characters)
        hold.resize(before)


def client_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in arguments or {}:
        if name in RESERVED:
            place = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{place} cannot be set by a request", param=place)
    return dict(arguments or {})


def last_user(messages: Sequence[Message]) -> int:
    roles = [message.get("role") for message in messages]
    return len(roles) - 1 - roles[::-1].index("user") if "user" in roles else -1


def left_out(kind: str) -> str:
    """Return the placeholder for a non-text content part.

    >>> left_out("input_image"), left_out("image_url"), left_out("document")
    ('[image left out]', '[image left out]', '[document left out]')
    """
    words = kind[:40].removeprefix("input_").removesuffix("_url").replace("_", " ")
    return f"[{words} left out]"


def flatten(content: Any, where: str, *, strict: bool = True, images: Images | None = None) -> str:
    """Return a message's text, with placeholders of `images`.

    Other parts raise BadRequest if `strict`; else they are replaced by `left_out`.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, where)
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.{index}"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise BadRequest(f"{place} must be an object", param=place)
        kind = part.get("type")
        if images is not None and is_image(part):
            texts.append(_image_text(part, place, images, strict=strict))
            continue
        if kind not in TEXT_PARTS:
            if not strict and isinstance(kind, str):
                check_text(kind, f"{place}.type")
                texts.append(left_out(kind))
                continue
            raise BadRequest(
                f"{place}: content of type {str(kind)[:40]!r} cannot be read; this server reads "
                f"{'text only' if images is None else 'text and images'}",
                param=place,
                code="unsupported_content",
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise BadRequest(f"{place}.text must be a text", param=f"{place}.text")
        check_text(text, f"{place}.text")
        texts.append(text)
    return "".join(texts)


def _image_text(part: Message, place: str, images: Images, *, strict: bool) -> str:
    """Return an image's placeholder, or, unless `strict`, `left_out` if it cannot be read."""
    try:
        return images.sign(part, place)
    except BadRequest:
        if strict:
            raise
        return left_out(str(part.get("type")))


def check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{where} is not Unicode text: U+{ord(text[error.start]):04X} at character "
            f"{error.start} is a lone surrogate",
            param=where,
            code="invalid_unicode",
        ) from None


def _plain(message: Message, where: str, *, strict: bool, images: Images | None) -> dict[str, Any]:
    """Normalize a message for templates: content as text, call arguments as an object."""
    plain = {name: value for name, value in message.items() if value is not None}
    content, place = message.get("content"), f"{where}.content"
    plain["content"] = flatten(content, place, strict=strict, images=images)
    if plain.get("role") == "developer":  # OpenAI's newer name; templates drop or refuse it
        plain["role"] = "system"
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            _call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)
        ]
    return plain


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.function must have a name", param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Arguments of an incomplete call stay text in the history; templates accept text, too.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(whole_pairs(arguments) or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
