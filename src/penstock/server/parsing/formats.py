"""Formats of answers, by name, and the one that a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import SettingError
from penstock.models.mlx_lm import tool_parser, tool_parsers
from penstock.server.parsing import granite, harmony, muse
from penstock.server.parsing.answer_text import AnswerText
from penstock.server.parsing.deepseek import DeepSeekCalls, DeepSeekTags
from penstock.server.parsing.events import Events
from penstock.server.parsing.hermes import HERMES
from penstock.server.parsing.llama import LlamaCalls
from penstock.server.parsing.mlx_lm_calls import SEED, MlxLmCalls, written_shape
from penstock.server.parsing.nemotron import NEMOTRON
from penstock.server.parsing.parser import CallFormat, Parser, ReasoningMarks, Tools, marked_answer
from penstock.server.parsing.phi import PHI
from penstock.server.parsing.shapes import NO_MARKS, CallShape, Marks, marks_of

NONE, HARMONY = "none", "harmony"
CALL_FORMATS: Mapping[str, CallFormat] = {
    "deepseek": DeepSeekCalls(),
    "deepseek_tags": DeepSeekTags(),
    "granite": granite.GRANITE,
    "hermes": HERMES,
    "llama": LlamaCalls(),
    "nemotron": NEMOTRON,
    "phi": PHI,
    "seed": MlxLmCalls(
        tool_parser("qwen3_coder")[0], SEED.opening, SEED.closing.strip(), written=SEED
    ),
}
"""Formats of calls, beside harmony and those that mlx-lm reads."""
REASONING: Mapping[str, ReasoningMarks] = {
    "think": ReasoningMarks("<think>", "</think>"),
    "cohere": ReasoningMarks(
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "granite": granite.RESPONSE,
    "granite_words": granite.WORDED,
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    muse.MUSE: muse.REASONING,
    "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
}
"""Marks of reasoning, beside harmony's and those that mlx-lm knows."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Way in which a model writes its answers."""

    call_name: str = NONE
    """Name of the format of calls: `none`, `harmony`, one of penstock's or one of mlx-lm's."""
    reasoning_name: str = NONE
    """Name of the marks of reasoning: `none`, `harmony`, `mlx_lm`, or one of penstock's."""
    calls: CallFormat | None = None
    reasoning: ReasoningMarks | None = None

    marks: Marks = NO_MARKS
    """Special tokens of the model's tokenizer."""

    def unread(self, tools: Tools | None) -> Collection[int]:
        """Return the special tokens that may be left out of a text; none where marks are read."""
        reads = self.reasoning is not None or self.call_name == HARMONY or bool(tools)
        return () if reads else self.marks.special.values()

    @property
    def shape(self) -> CallShape | None:
        """Text around the parts of calls; None where it is not known."""
        if self.call_name == HARMONY:
            return harmony.SHAPE
        return None if self.calls is None else self.calls.shape

    @property
    def free_shape(self) -> CallShape | None:
        """The same, where a call is told from text by one mark; None elsewhere."""
        shape = self.shape
        if shape is None or not shape.opening or self.call_name == HARMONY:
            return None
        # A special token within the mark: the text in front of it could be any text's.
        return None if any(mark in shape.opening[1:] for mark in self.marks.special) else shape

    def parser(self, tools: Tools | None, *, inside: bool = False) -> Parser:
        """Make the parser of one answer.

        Args:
            tools: tools of the request, in OpenAI's form; without any, calls are plain text.
            inside: whether the prompt ends inside the model's reasoning.
        """
        source, out = AnswerText(), Events()
        if self.call_name == HARMONY:
            return Parser(source, out, harmony.harmony_answer(source, out, tools or ()))
        calls = self.calls if tools else None
        if self.reasoning_name == muse.MUSE:
            return Parser(source, out, muse.muse_answer(source, out, calls, tools or ()))
        reading = marked_answer(
            source,
            out,
            reasoning=self.reasoning,
            inside=inside,
            calls=calls,
            tools=tools or (),
        )
        return Parser(source, out, reading)


def answer_format(
    tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerFormat:
    """Return the format of a model's answers.

    Args:
        tokenizer: mlx-lm's wrapper, with the model's chat template.
        tool_parser: name of a format of calls; None goes by the template.
        reasoning_parser: name of marks of reasoning; None goes by the template.

    Raises:
        SettingError: there is no such name.
    """
    check_names(tool_parser, reasoning_parser)
    template = _template(tokenizer)
    call_name, calls = _calls(tokenizer, template, tool_parser)
    reasoning_name, reasoning = _reasoning(tokenizer, template, reasoning_parser, call_name)
    return AnswerFormat(call_name, reasoning_name, calls, reasoning, marks_of(tokenizer))


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Check names before a model is loaded.

    Raises:
        SettingError: there is no parser of such a name.
    """
    if tool_parser is not None and tool_parser not in call_names():
        raise SettingError(f"--tool-parser {tool_parser}: it can be {', '.join(call_names())}")
    if reasoning_parser is not None and reasoning_parser not in reasoning_names():
        known = ", ".join(reasoning_names())
        raise SettingError(f"--reasoning-parser {reasoning_parser}: it can be {known}")


def call_names() -> list[str]:
    """Return the names that `--tool-parser` takes."""
    return sorted({NONE, HARMONY, *CALL_FORMATS, *tool_parsers()})


def reasoning_names() -> list[str]:
    """Return the names that `--reasoning-parser` takes."""
    return sorted({NONE, HARMONY, *REASONING})


def template_calls(template: str) -> str | None:
    """Return the name of the format that a template shows; None if it shows none of ours.

    >>> template_calls("<|start|>assistant<|channel|>final<|message|>")
    'harmony'
    >>> template_calls("{{ message.content }}") is None
    True
    """
    return next((name for name, shown in _SHOWN_CALLS if shown(template)), None)


def _all(*signs: str) -> Any:
    return lambda template: all(sign in template for sign in signs)


_SHOWN_CALLS = (
    (HARMONY, _all(harmony.CHANNEL, harmony.MESSAGE)),
    ("deepseek_tags", _all("｜DSML｜")),
    ("deepseek", _all("<｜tool▁calls▁begin｜>")),
    ("nemotron", _all("<TOOLCALL>")),
    ("seed", _all(SEED.opening, "<function=")),
    ("phi", _all("<|tool_call|>", "<|/tool_call|>")),
    ("phi", _all("functools[")),
    ("granite", _all("<|start_of_role|>", "<|tool_call|>")),
    ("granite", _all("<|tool_call|>", "Granite")),
    ("llama", _all("<|python_start|>")),
    ("llama", _all('{"name": function name, "parameters":')),
    ("hermes", lambda template: _json_tags(template)),
)
_SHOWN_REASONING = (
    ("granite", _all("<think>", "<response>")),
    ("granite_words", _all(granite.WORDED.start)),
    ("seed", _all("<seed:think>")),
    ("mistral", _all("[THINK]")),
    ("cohere", _all("<|START_THINKING|>")),
    ("think", _all("</think>")),
)


_INVOKE = "<invoke name="


def _json_tags(template: str) -> bool:
    """Tell whether calls are JSON between tags, and not XML."""
    others = (
        *("<function=", _INVOKE, "<arg_key>", "[TOOL_CALLS]", "<tool_call>\\n<function"),
        *("<start_function_call>", "<atem:"),
    )
    return "<tool_call>" in template and not any(sign in template for sign in others)


def _calls(tokenizer: Any, template: str, name: str | None) -> tuple[str, CallFormat | None]:
    if name is None:
        name = template_calls(template)
    if name is None:
        if not getattr(tokenizer, "has_tool_calling", False):
            return NONE, None
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end or ""
        parse = tokenizer.tool_parser
        name = parse.__module__.rpartition(".")[2]
        if name == "json_tools" and _INVOKE in template:  # MiniMax M3's tags hold no JSON
            return NONE, None
        return name, MlxLmCalls(parse, start, end, written=written_shape(name, template))
    if name in (NONE, HARMONY):
        return name, None
    if name == "deepseek":
        return name, DeepSeekCalls(fenced="```json" in template or not template)
    if name == "deepseek_tags" and "tool_calls>" in template:
        return name, DeepSeekTags(DeepSeekTags().openings[::-1])
    if name in CALL_FORMATS:
        return name, CALL_FORMATS[name]
    return name, MlxLmCalls(*tool_parser(name), written=written_shape(name, template))


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
    """Return the text of the chat template; of a template that is a program, its tokens."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    if isinstance(template, str):
        return template
    vocabulary = tokenizer.get_vocab()
    return " ".join(mark for mark in ("｜DSML｜", "</think>") if mark in vocabulary)
