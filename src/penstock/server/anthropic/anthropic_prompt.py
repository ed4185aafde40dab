"""Prompt of an Anthropic request, and its prefix to hold in the cache.

system, tools, messages with blocks ──> OpenAI's format, which templates read
`cache_control` of a block          ──> Hold: length of the prefix, and seconds to hold it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.server.anthropic.anthropic_forms import (
    CacheControl,
    CountRequest,
    Marked,
    Other,
    RedactedThinking,
    TextBlock,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
)
from penstock.server.images import PromptTokens
from penstock.server.problems import BadRequest
from penstock.server.prompts import Prompts, last_user
from penstock.server.reasoning_effort import level_switch, thinking_switch
from penstock.server.templates import shared

_ERROR = {"type": "text", "text": "Error: "}
BETWEEN_BLOCKS = "\n\n"
"""Separator between text blocks joined into one message text."""
BILLING_HEADER = "x-anthropic-billing-header"
"""Start of Claude Code's first prompt line, which varies, so that prompts would share no prefix."""


@dataclass(frozen=True, slots=True)
class Hold:
    seconds: float
    tokens: int | None
    """Length in tokens; None means the whole prompt."""


@dataclass(frozen=True, slots=True)
class AnthropicPrompt:
    tokens: PromptTokens
    hold: Hold | None
    in_reasoning: bool


def prompt_of(request: CountRequest, prompts: Prompts) -> AnthropicPrompt:
    """Render a prompt and find the prefix to hold; BadRequest if a field is invalid. Blocking."""
    if not prompts.keep_billing_header:
        request = without_billing_header(request)
    _check_asked(request.messages, images=prompts.images is not None)
    tokens = _render(request, prompts, request.system_blocks, request.messages)
    return AnthropicPrompt(
        tokens=tokens,
        hold=_hold(request, prompts, tokens),
        in_reasoning=prompts.starts_in_reasoning(tokens),
    )


def without_billing_header(request: CountRequest) -> CountRequest:
    """Return a copy of a request without the billing header of Claude Code's system prompt.

    The header varies between requests, so their prompts would share no cached prefix. A request
    without it is returned unchanged.
    """
    blocks = request.system_blocks
    if not blocks or not blocks[0].text.startswith(BILLING_HEADER):
        return request
    rest = blocks[0].text.partition("\n")[2].lstrip("\n")
    kept = [blocks[0].model_copy(update={"text": rest})] if rest else []
    return request.model_copy(update={"system": [*kept, *blocks[1:]]})


def _check_asked(turns: Sequence[Turn], *, images: bool) -> None:
    """Reject non-text parts of the last user message; elsewhere placeholders replace them."""
    last = last_user([{"role": turn.role} for turn in turns])
    if last < 0 or any(isinstance(block, ToolResult) for block in turns[last].blocks):
        return
    for index, block in enumerate(turns[last].blocks):
        if images and isinstance(block, Other) and block.is_image:
            continue
        if isinstance(block, Other) and block.text is None:
            place = f"messages.{last}.content.{index}"
            raise BadRequest(
                f"{place}: content of type {block.type[:40]!r} cannot be read; this server reads "
                f"{'text and images' if images else 'text only'}",
                param=place,
                code="unsupported_content",
            )


def tools_of(request: CountRequest) -> list[dict[str, Any]]:
    functions = []
    none = request.tool_choice is not None and request.tool_choice.type == "none"
    for index, tool in enumerate(() if none else request.tools or ()):
        if not tool.is_function:
            continue
        if tool.input_schema is None or not tool.name:
            missing = "name" if tool.input_schema is not None else "input_schema"
            raise BadRequest(
                f"tools.{index}.{missing} is missing: a tool has a name, a description and an "
                "input_schema",
                param=f"tools.{index}.{missing}",
            )
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": {
                key: part for key, part in tool.input_schema.items() if part is not None
            },
        }
        functions.append({"type": "function", "function": function})
    return functions


def _render(
    request: CountRequest,
    prompts: Prompts,
    system: Sequence[TextBlock],
    turns: Sequence[Turn],
    *,
    whole: bool = True,
) -> PromptTokens:
    messages: list[dict[str, Any]] = []
    if text := _text_of(system):
        messages.append({"role": "system", "content": text})
    messages += _messages(turns, images=prompts.images is not None)
    goes_on = messages[-1]["role"] == "assistant"
    more: dict[str, Any] = thinking_switch(prompts, request.thinks)
    more |= level_switch(request.effort, prompts)
    if getattr(prompts.tokenizer, "has_thinking", False):
        more["enable_thinking"] = request.thinks
    if whole and goes_on:
        more["continue_final_message"] = True
    tools = tools_of(request)
    more["salt"] = request.cache_salt
    return prompts.render(messages, tools or None, answer=whole and not goes_on, **more)


def _messages(turns: Sequence[Turn], *, images: bool) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    names = {
        block.id: block.name
        for turn in turns
        for block in turn.blocks
        if isinstance(block, ToolUse)
    }
    for role, group in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.blocks]
        texts = [block for block in blocks if isinstance(block, TextBlock | Other)]
        for block in blocks:
            if isinstance(block, ToolResult):
                name = names.get(block.tool_use_id)
                converted.append(_result(block, name, images=images))
        message: dict[str, Any] = {"role": role, "content": _content_of(texts, images=images)}
        thoughts = [b.words for b in blocks if isinstance(b, Thinking | RedactedThinking)]
        if any(thoughts) and role == "assistant":
            message["reasoning_content"] = BETWEEN_BLOCKS.join(filter(None, thoughts))
        if calls := [_call(block) for block in blocks if isinstance(block, ToolUse)]:
            message["tool_calls"] = calls
        elif not texts and any(isinstance(block, ToolResult) for block in blocks):
            continue
        converted.append(message)
    return converted


def _text_of(blocks: Sequence[TextBlock | Other]) -> str:
    return BETWEEN_BLOCKS.join(b.text if isinstance(b, TextBlock) else b.words for b in blocks)


def _content_of(blocks: Sequence[TextBlock | Other], *, images: bool) -> str | list[dict[str, Any]]:
    """Join blocks to one text, or to a list of text and image parts if images are read."""
    if not (images and any(isinstance(block, Other) and block.is_image for block in blocks)):
        return _text_of(blocks)
    parts: list[dict[str, Any]] = []
    rows = groupby(blocks, key=lambda block: isinstance(block, Other) and block.is_image)
    for is_image, row in rows:
        if is_image:
            parts += ({"type": "image", "source": getattr(block, "source", None)} for block in row)
        else:
            parts.append({"type": "text", "text": _text_of(list(row))})
    return parts


def _call(block: ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResult, name: str | None, *, images: bool) -> dict[str, Any]:
    blocks: list[TextBlock | Other] = (
        [TextBlock(type="text", text=block.content)]
        if isinstance(block.content, str)
        else list(block.content)
    )
    content = _content_of(blocks, images=images)
    if block.is_error:
        content = f"Error: {content}" if isinstance(content, str) else [_ERROR, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}


# ---- the prefix to hold


@dataclass(frozen=True, slots=True)
class _Mark:
    control: CacheControl
    system: Sequence[TextBlock]
    turns: Sequence[Turn]


def _marks(request: CountRequest) -> Iterator[_Mark]:
    system = request.system_blocks
    for tool in request.offered:
        if tool.cache_control is not None:
            # Templates write tools before or after the system prompt: both are held.
            yield _Mark(tool.cache_control, system, ())
    for index, block in enumerate(system):
        if block.cache_control is not None:
            yield _Mark(block.cache_control, system[: index + 1], ())
    for index, turn in enumerate(request.messages):
        blocks = turn.blocks
        for place, said in enumerate(blocks):
            control = said.cache_control if isinstance(said, Marked) else None
            if control is not None:
                cut = Turn(role=turn.role, content=blocks[: place + 1])
                yield _Mark(control, system, [*request.messages[:index], cut])


def _hold(request: CountRequest, prompts: Prompts, tokens: PromptTokens) -> Hold | None:
    """Find the prefix up to the last `cache_control`; hold it for the longest requested time."""
    marks, whole = list(_marks(request)), request.cache_control
    controls = [mark.control for mark in marks] + ([] if whole is None else [whole])
    if not controls:
        return None
    seconds = max(control.seconds for control in controls)
    if whole is not None:
        return Hold(seconds, None)
    try:
        before = _up_to(request, prompts, _deepest(marks))
    except BadRequest:  # the template rejects the truncated conversation, though not the whole one
        return None
    common = shared(tokens, before)
    return Hold(seconds, common) if common else None


def _deepest(marks: Sequence[_Mark]) -> _Mark:
    """Return the mark with the longest prefix; a mark on tools covers the whole system prompt."""
    last = marks[-1]
    return last if last.turns else max(marks, key=lambda mark: len(mark.system))


def _up_to(request: CountRequest, prompts: Prompts, mark: _Mark) -> tuple[int, ...]:
    # Templates may require a user message: this one's text differs from the prompt's at its start.
    turns = mark.turns or [Turn(role="user", content=_other(request))]
    return _render(request, prompts, mark.system, turns, whole=False)


def _other(request: CountRequest) -> str:
    first = _text_of([b for b in request.messages[0].blocks if isinstance(b, TextBlock)])
    return "1" if first.startswith("0") else "0"
