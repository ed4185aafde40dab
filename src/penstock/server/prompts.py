"""From messages and texts to the tokens of a prompt, by the model's own tokenizer and template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cached_property
from threading import Event
from typing import Any, TypeAlias

from penstock.engine.model.text import TextStream
from penstock.errors import PenstockError
from penstock.models.byte_level import detokenizer_of
from penstock.server.parsing import answer_format
from penstock.server.parsing.formats import HARMONY
from penstock.server.pieces import PIECE_CHARACTERS, FairLock, PieceEncoder
from penstock.server.problems import BadRequest, ClientGone, PromptTooLong
from penstock.server.prompt_memory import HOLD, PIECE_TOKEN_BYTES, UNCUT_CHARACTERS, hold_text
from penstock.server.remembered_answers import Opening, RememberedAnswers, openings_of
from penstock.server.templates import TemplateTraits

Message: TypeAlias = Mapping[str, Any]

STOP: ContextVar[Event | None] = ContextVar("stop", default=None)
"""Event that is set when the client of the request served here has gone."""
REWRITTEN: ContextVar[str | None] = ContextVar("rewritten", default=None)
"""First difference between the history rendered last here and the answers generated; or None."""
TAIL_TOKENS = 64
"""Tokens at a prompt's end that are read for an open mark of reasoning."""
TEXT_BYTES = 200
"""Bytes of one token's text, in a list and in a response."""
TOKENS_AT_ONCE = 1_024
"""Tokens whose texts are told one by one before others have their turn."""
FAR_TOO_LONG = 2
"""Multiple of the longest possible prompt beyond which a text is not read to its end."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of content parts that are text; their text stands under `text` or `refusal`."""

RESERVED = frozenset(
    (
        *("add_generation_prompt", "answer", "chat_template", "continue_final_message"),
        *("conversation", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools"),
        *("salt", "truncation"),
    )
)
"""Template arguments that a client may not set: a `chat_template` of its own is a program."""


class Prompts:
    """Encoder of clients' messages and texts. Slow for long prompts: not for an event loop.

    Any thread may call it; one at a time does its work, because tokenizers are not all safe. A
    long text is read in pieces, between which others have their turn. `Service.work` calls it in
    threads of its own.

    Args:
        tokenizer: mlx-lm's wrapper.
        keep_billing_header: whether Claude Code's billing header stays in the prompt.
        most_tokens: tokens of the longest prompt that can be answered; None is any number.
        answers: those whose tokens later prompts begin with; None remembers none.
        tool_parser: name of the format of calls; None goes by the template.
        reasoning_parser: name of the marks of reasoning; None goes by the template.

    Raises:
        SettingError: there is no parser of such a name.
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
    ) -> None:
        self.tokenizer = tokenizer
        self._answers = answers
        self.format = answer_format(tokenizer, tool_parser, reasoning_parser)
        """Format of the model's answers: where reasoning and calls stand in them."""
        self.most_tokens = most_tokens
        """Tokens of the longest prompt that can be answered; None is any number."""
        self.keep_billing_header = keep_billing_header
        """Whether Claude Code's billing header stays in the prompt."""
        self._lock = FairLock()
        self._pieces = PieceEncoder(tokenizer, self._lock)

    @cached_property
    def traits(self) -> TemplateTraits:
        """Traits of the model's chat template, probed once. Slow, as the rest."""
        with self._lock:
            return TemplateTraits.of(self.tokenizer)

    @cached_property
    def openings(self) -> tuple[Opening, ...]:
        """Texts with which the template opens an answer."""
        traits = self.traits
        with self._lock:
            return openings_of(self.tokenizer, traits)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer: bool = True,
        salt: str = "",
        **template_args: Any,
    ) -> tuple[int, ...]:
        """Turn a conversation into tokens by the model's chat template.

        Args:
            messages: OpenAI's form: `role`, `content` (a text, or parts), and perhaps `tool_calls`,
                `tool_call_id`, `name`, `reasoning_content`. A part that is no text leaves a word in
                its place, but for the last user's: a question must be text.
            tools: OpenAI's form: `{"type": "function", "function": {...}}`.
            answer: end where the model's answer begins.
            salt: the tenant's, whose answers are remembered.
            template_args: the `chat_template_kwargs` of a client.

        Raises:
            BadRequest: naming the message that cannot be rendered.
        """
        flat = self._flat(messages)
        long = sum(len(message["content"]) for message in flat) > PIECE_CHARACTERS
        template_args["tokenize"] = not long and self._answers is None
        rendered = self._templated(flat, tools, answer, template_args)
        if isinstance(rendered, str):
            rendered = self._remembering(rendered, tools, salt)
        return self._some(rendered, "messages")

    def template_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer: bool = True,
        **template_args: Any,
    ) -> str:
        """Return the text of a conversation by the model's chat template; raises as `render`."""
        template_args["tokenize"] = False
        return str(self._templated(self._flat(messages), tools, answer, template_args))

    def _flat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as templates expect them; raises as `render`."""
        if not messages:
            raise BadRequest("messages must not be empty", param="messages", code="invalid_value")
        if not self.tokenizer.has_chat_template:
            raise BadRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        asked = last_user(messages)
        return [
            _plain(message, f"messages.{i}", strict=i == asked)
            for i, message in enumerate(messages)
        ]

    def _templated(
        self,
        flat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: bool,
        template_args: dict[str, Any],
    ) -> Any:
        """Return the chat template's text of messages, or its tokens; raises as `render`."""
        for name in ("return_dict", "return_tensors", "add_generation_prompt"):
            template_args.pop(name, None)
        fitting = self.traits.fit(flat)
        with self._lock:
            try:
                return self.tokenizer.apply_chat_template(
                    fitting,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=answer,
                    **template_args,
                )
            # A boundary: a template is a program of the model's makers, and raises anything.
            except Exception as error:
                raise BadRequest(
                    f"the model's chat template refuses these messages: {_one_line(error)}",
                    param="messages",
                    code="invalid_value",
                ) from error

    def _remembering(self, text: str, tools: Any, salt: str) -> list[int]:
        """Read the text of a conversation; tokens of remembered answers stay as they were."""
        if self._answers is None:
            return self._tokens(text, "messages", special=False)
        splice = self._answers.splice(salt, text, self.openings, self.format, tools)
        REWRITTEN.set(splice.rewritten)
        rest = self._tokens(text[splice.end :], "messages", special=False)
        tokens = [*splice.tokens, *rest]
        self._answers.note(text, tokens)
        return tokens

    def encode(self, text: str, param: str = "prompt") -> tuple[int, ...]:
        """Turn raw text into tokens, with the special tokens that the tokenizer adds by itself.

        Raises:
            BadRequest: the text is empty, or not Unicode.
        """
        check_text(text, param)
        return self._some(self._tokens(text, param, special=True), param)

    def encode_answer(self, text: str, param: str) -> tuple[int, ...]:
        """Turn a text into tokens as an answer has them, without special ones; perhaps none.

        Raises:
            BadRequest: the text is not Unicode.
        """
        return self.tokens(text, param, special=False)

    def tokens(self, text: str, param: str, *, special: bool) -> tuple[int, ...]:
        """Turn raw text into tokens, perhaps none, with or without the tokenizer's special ones.

        Raises:
            BadRequest: the text is not Unicode.
        """
        check_text(text, param)
        return self._counted(self._tokens(text, param, special=special))

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text."""
        with self._lock:
            return str(self.tokenizer.decode(list(tokens)))

    def text(self, tokens: Sequence[int]) -> str:
        """Turn tokens into a text that goes back to the client, whose memory is held.

        Raises:
            TooLarge, Unavailable: there is no memory for so long a text.
        """
        hold_text(self._pieces.count_bytes(tokens))
        return self.decode(tokens)

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that becomes certain with each token; joined, that of all.

        Raises:
            TooLarge, Unavailable: there is no memory for so many texts.
        """
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
        """Tell whether the template has opened the model's reasoning at the prompt's end."""
        if (marks := self.reasoning_marks) is not None:
            start, end = marks
            return _last(prompt, start) > _last(prompt, end)
        if (worded := self.format.reasoning) is None:
            return False
        return self.decode(prompt[-TAIL_TOKENS:]).rstrip().endswith(worded.start)

    @cached_property
    def reasoning_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Tokens that begin and end the model's reasoning; None if it has none.

        None, too, where the vocabulary has no tokens of their own for the marks.
        """
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
        """Count the tokens of an answer's reasoning, without the marks around it.

        Args:
            answer: its tokens.
            inside: whether the prompt ends inside the reasoning (`starts_in_reasoning`).
        """
        if self.reasoning_marks is None:
            return 0
        start, end = self.reasoning_marks
        count = at = 0
        while at < len(answer):
            until = _first(answer, end if inside else start, at)
            if inside:
                count += until - at
            at = until + len(end if inside else start)
            inside = not inside
        return count

    def _some(self, tokens: Any, param: str) -> tuple[int, ...]:
        if len(tokens) == 0:
            raise BadRequest(f"{param} has no tokens", param=param, code="invalid_value")
        return self._counted(tokens)

    def _counted(self, tokens: Any) -> tuple[int, ...]:
        """Return tokens whose memory is held."""
        hold = HOLD.get()
        if hold is not None:
            hold.add_tokens(len(tokens))
        return tuple(tokens)

    def _tokens(self, text: str, param: str, *, special: bool) -> list[int]:
        """Read a text in pieces; stop when it is far too long, or its client has gone."""
        most = self.most_tokens
        if most is not None and len(text) > most:
            size = len(text) if text.isascii() else len(text.encode())
            least = size // self._pieces.longest_token
            if least > most:
                raise PromptTooLong(least, most, param=param)

        def check(tokens: int, characters: int) -> None:
            if (stop := STOP.get()) is not None and stop.is_set():
                raise ClientGone("the client has closed the connection")
            if most is not None and tokens > FAR_TOO_LONG * most:
                raise PromptTooLong(tokens * len(text) // characters, most, param=param)

        try:
            return self._pieces.encode(text, special=special, check=check, large=_hold_piece)
        except PenstockError:
            raise
        # A boundary: a tokenizer is a program of the model's makers, too.
        except Exception as error:
            raise BadRequest(
                f"the tokenizer refuses this text: {_one_line(error)}", param=param
            ) from error


def _first(tokens: Sequence[int], mark: Sequence[int], start: int) -> int:
    """Return where a mark first comes from a place on; the end if it does not."""
    size = len(mark)
    for at in range(start, len(tokens) - size + 1):
        if tokens[at] == mark[0] and tuple(tokens[at : at + size]) == tuple(mark):
            return at
    return len(tokens)


def _last(tokens: Sequence[int], mark: Sequence[int]) -> int:
    """Return where a mark last comes; -1 if it does not."""
    size = len(mark)
    for at in range(len(tokens) - size, -1, -1):
        if tokens[at] == mark[0] and tuple(tokens[at : at + size]) == tuple(mark):
            return at
    return -1


def _hold_piece(characters: int) -> None:
    """Reserve memory for encoding an uncut piece larger than usual, or raise."""
    hold = HOLD.get()
    if hold is not None and characters > UNCUT_CHARACTERS:
        before = hold.nbytes
        hold.resize(before + PIECE_TOKEN_BYTES * characters)
        hold.resize(before)


def client_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `chat_template_kwargs` of a client, for the chat template.

    Raises:
        BadRequest: naming the first that is the server's own.
    """
    for name in given or {}:
        if name in RESERVED:
            place = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{place} cannot be set by a request", param=place)
    return dict(given or {})


def last_user(messages: Sequence[Message]) -> int:
    """Return the number of the user's last message; -1 if there is none."""
    roles = [message.get("role") for message in messages]
    return len(roles) - 1 - roles[::-1].index("user") if "user" in roles else -1


def left_out(kind: str) -> str:
    """Return the words that stand in a prompt for a part that this server cannot read.

    >>> left_out("input_image"), left_out("image_url"), left_out("document")
    ('[image left out]', '[image left out]', '[document left out]')
    """
    words = kind[:40].removeprefix("input_").removesuffix("_url").replace("_", " ")
    return f"[{words} left out]"


def flatten(content: Any, where: str, *, strict: bool = True) -> str:
    """Return the text of a message's content: a text, or a list of parts.

    Args:
        content: as the client sent it.
        where: its place in the request, for errors.
        strict: refuse parts that are no text; otherwise words stand for them.

    Raises:
        BadRequest: naming the first part that cannot be read.
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
        if kind not in TEXT_PARTS:
            if not strict and isinstance(kind, str):
                check_text(kind, f"{place}.type")
                texts.append(left_out(kind))
                continue
            raise BadRequest(
                f"{place}: content of type {str(kind)[:40]!r} cannot be read; this server reads "
                "text only",
                param=place,
                code="unsupported_content",
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise BadRequest(f"{place}.text must be a text", param=f"{place}.text")
        check_text(text, f"{place}.text")
        texts.append(text)
    return "".join(texts)


def check_text(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{where} is not Unicode text: U+{ord(text[error.start]):04X} at character "
            f"{error.start} is half of a pair",
            param=where,
            code="invalid_unicode",
        ) from None


def _plain(message: Message, where: str, *, strict: bool) -> dict[str, Any]:
    """Return a message as templates expect it: content a text, arguments of calls an object."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = flatten(message.get("content"), f"{where}.content", strict=strict)
    if plain.get("role") == "developer":  # OpenAI's newer word; templates leave it out or refuse it
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
        # A call that the model broke off stays in history as text; templates write texts, too.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
