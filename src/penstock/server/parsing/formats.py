"""Answer formats by name, and their detection by chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import SettingError
from penstock.server.parsing import (
    deepseek,
    gemma,
    harmony,
    kimi,
    llama,
    mistral,
    muse,
    pythonic,
    tag_formats,
)
from penstock.server.parsing.answer_text import AnswerText
from penstock.server.parsing.events import Events
from penstock.server.parsing.parser import (
    CallFormat,
    Parser,
    ReasoningMarks,
    Tools,
    marked_answer,
    names_of,
)
from penstock.server.parsing.registry import all_of
from penstock.server.parsing.shapes import NO_MARKS, CallShape, Marks, marks_of
from penstock.server.parsing.tagged import (
    GRANITE_RESPONSE,
    GRANITE_WORDS,
    MARKED_LISTS,
    TAGGED_LISTS,
    TAGGED_OBJECTS,
)

NONE, HARMONY = "none", "harmony"
FORMATS = (
    *deepseek.FORMATS,
    *TAGGED_LISTS,
    *tag_formats.FORMATS,
    *MARKED_LISTS,
    *llama.FORMATS,
    *TAGGED_OBJECTS,
    *gemma.FORMATS,
    *kimi.FORMATS,
    *mistral.FORMATS,
    *pythonic.FORMATS,
)
"""Call formats other than harmony; the first that a chat template matches is used."""
CALL_FORMATS: Mapping[str, CallFormat] = {named.name: named.calls for named in FORMATS}
REASONING: Mapping[str, ReasoningMarks] = {
    "think": ReasoningMarks("<think>", "</think>"),
    "cohere": ReasoningMarks(
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "granite": GRANITE_RESPONSE,
    "granite_words": GRANITE_WORDS,
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    muse.MUSE: muse.REASONING,
    "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
}
"""Reasoning marks, other than harmony's and mlx-lm's."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    call_name: str = NONE
    """`none`, `harmony` or a key of `CALL_FORMATS`."""
    reasoning_name: str = NONE
    """`none`, `harmony`, `mlx_lm` or a key of `REASONING`."""
    calls: CallFormat | None = None
    reasoning: ReasoningMarks | None = None

    marks: Marks = NO_MARKS

    def unread(self, tools: Tools | None) -> Collection[int]:
        """Return the special tokens to omit from the text; none if the parser needs them."""
        reads = self.reasoning is not None or self.call_name == HARMONY or bool(tools)
        return () if reads else self.marks.special.values()

    @property
    def shape(self) -> CallShape | None:
        """Text around names and arguments of calls; None if unknown."""
        if self.call_name == HARMONY:
            return harmony.SHAPE
        return None if self.calls is None else self.calls.shape

    @property
    def free_shape(self) -> CallShape | None:
        """`shape`, if a single mark distinguishes calls from text; else None."""
        shape = self.shape
        if shape is None or not shape.opening or self.call_name == HARMONY:
            return None
        # A special token within the mark: the text before it is ambiguous.
        return None if any(mark in shape.opening[1:] for mark in self.marks.special) else shape

    def parser(self, tools: Tools | None, *, inside: bool = False) -> Parser:
        source, out = AnswerText(), Events(names_of(tools or ()))
        if self.call_name == HARMONY:
            return Parser(source, out, harmony.harmony_answer(source, out, tools or ()))
        calls = self.calls if tools else None
        if self.reasoning_name == muse.MUSE:
            return Parser(source, out, muse.muse_answer(source, out, calls, tools or ()))
        reading = marked_answer(
            source, out, reasoning=self.reasoning, inside=inside, calls=calls, tools=tools or ()
        )
        return Parser(source, out, reading)


def answer_format(
    tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerFormat:
    """Return a model's answer format; parsers set to None are chosen from the chat template."""
    check_names(tool_parser, reasoning_parser)
    template = _template(tokenizer)
    call_name, calls = _calls(tokenizer, template, tool_parser)
    reasoning_name, reasoning = _reasoning(tokenizer, template, reasoning_parser, call_name)
    return AnswerFormat(call_name, reasoning_name, calls, reasoning, marks_of(tokenizer))


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Check parser names before loading a model; SettingError lists the valid names."""
    if tool_parser is not None and tool_parser not in call_names():
        raise SettingError(f"--tool-parser {tool_parser}: it can be {', '.join(call_names())}")
    if reasoning_parser is not None and reasoning_parser not in reasoning_names():
        known = ", ".join(reasoning_names())
        raise SettingError(f"--reasoning-parser {reasoning_parser}: it can be {known}")


def call_names() -> list[str]:
    return sorted({NONE, HARMONY, *CALL_FORMATS})


def reasoning_names() -> list[str]:
    return sorted({NONE, HARMONY, *REASONING})


def template_calls(template: str) -> str | None:
    """Return the name of the call format that a template uses, or None.

    >>> template_calls("<|start|>assistant<|channel|>final<|message|>")
    'harmony'
    >>> template_calls("{{ message.content }}") is None
    True
    """
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    return next((named.name for named in FORMATS if named.shown(template)), None)


_SHOWN_REASONING = (
    ("granite", all_of("<think>", "<response>")),
    ("granite_words", all_of(GRANITE_WORDS.start)),
    ("seed", all_of("<seed:think>")),
    ("mistral", all_of("[THINK]")),
    ("cohere", all_of("<|START_THINKING|>")),
    ("think", all_of("</think>")),
)


_INVOKE = "<invoke name="


def _calls(tokenizer: Any, template: str, name: str | None) -> tuple[str, CallFormat | None]:
    if name is None:
        name = template_calls(template) or _known_to_mlx_lm(tokenizer, template)
    if name in (NONE, HARMONY):
        return name, None
    named = next(candidate for candidate in FORMATS if candidate.name == name)
    return name, named.calls if named.variant is None else named.variant(template)


def _known_to_mlx_lm(tokenizer: Any, template: str) -> str:
    """Return the call format that mlx-lm detects; `none` if it is not supported."""
    if not getattr(tokenizer, "has_tool_calling", False):
        return NONE
    name = str(tokenizer.tool_parser.__module__).rpartition(".")[2]
    if name == "json_tools" and _INVOKE in template:  # MiniMax M3's tags hold no JSON
        return NONE
    return name if name in CALL_FORMATS else NONE


def _reasoning(
    tokenizer: Any, template: str, name: str | None, call_name: str
) -> tuple[str, ReasoningMarks | None]:
    if name is None and call_name in (HARMONY, muse.MUSE):
        name = call_name
    if name is None:
        shown = (other for other, shows in _SHOWN_REASONING if shows(template))
        name = next(shown, None)
        if getattr(tokenizer, "has_thinking", False) and name in (None, "think"):
            return "mlx_lm", ReasoningMarks(tokenizer.think_start, tokenizer.think_end)
    if name in (None, NONE):
        return NONE, None
    if name == HARMONY:
        return HARMONY, ReasoningMarks(*harmony.REASONING)
    return name, REASONING[name]


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    if isinstance(template, str):
        return template
    vocabulary = tokenizer.get_vocab()
    return " ".join(mark for mark in ("｜DSML｜", "</think>") if mark in vocabulary)
