"""Three-turn conversations through real chat templates: how history changes the tokens.

Every answer is generated in other tokens than its text is read as. A later prompt must begin with
the tokens of the prompt before and of its answer, or it must be said where and why the template
rewrites history.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.models.template_renderer import TemplateRenderer
from penstock.server.cache_routes import rewritten_in_front
from penstock.server.history import fit
from penstock.server.prompt_memory import PromptMemory
from penstock.server.prompts import REWRITTEN, Prompts
from penstock.server.remembered_answers import RememberedAnswers, openings_of
from penstock.server.templates import TemplateTraits, shared

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "It."}},
        },
    },
}
RENDERER = TemplateRenderer()
MERGES = (("e", "r"), ("e", "a"), ("o", "n"), ("i", "n"), ("t", "h"))
"""Pairs that are read as one token; an answer is generated without them."""
_MARK = re.compile(r"\s*(<[^<>\s]{2,40}>|\[/?[A-Z_]{2,20}\]|\[e~\[|</s>)")
_MARKS = re.compile(
    r"</?(?:think|tool_call|seed:think)>|<[|｜][^<>\s]{1,40}[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>"
)
_TOLD: Message = {"role": "assistant", "content": "Heron, then."}
POOL_BYTES = 10_000_000


@dataclass(frozen=True)
class Outcome:
    """Outcome of the turns of one conversation."""

    kept: int
    """Turns whose prompt begins with all tokens of the one before and its answer."""
    said: tuple[str, ...]
    """What is said of the turns that do not."""
    silent: tuple[str, ...]
    """Turns of which nothing is said, though they do not."""


def talks() -> dict[str, list[Message]]:
    """Return three-turn conversations; each answer is a separate message."""
    call = {"id": "call00001", "type": "function"}
    function = {"name": "look_up", "arguments": {"text": "Tern."}}
    calling: Message = {"role": "assistant", "content": ""}
    calling["tool_calls"] = [{**call, "function": function}]
    result: Message = {
        "role": "tool",
        "content": "Cobalt.",
        "tool_call_id": "call00001",
        "name": "look_up",
    }
    begin, *asked = (
        {"role": "user", "content": text} for text in ("Quartz?", "Walnut?", "Larch?", "Elm?")
    )
    first: Message = _TOLD
    second, third = ({"role": "assistant", "content": text} for text in ("Basalt.", "Marigold."))
    text = [begin, first, asked[0], second, asked[1], third, asked[2]]
    tools = [begin, calling, result, first, asked[0], calling, result, second, asked[1]]
    thought = {"reasoning_content": "Juniper is near."}
    reasoned = [{**one, **thought} if one["role"] == "assistant" else one for one in text]
    return {"text": text, "calls": tools, "reasoning": reasoned}


def outcome(template: str, talk: Sequence[Message], folder: Path) -> Outcome | str:
    """Run a conversation; return the outcome of its turns, or why it is impossible."""
    try:
        made = _tokenizer(template, _ends(template, talk, folder), folder)
        return _replayed(made, talk)
    except Exception as error:  # noqa: BLE001 - a template raises anything
        return f"cannot be rendered: {str(error)[:80]}"


def _replayed(made: Any, talk: Sequence[Message]) -> Outcome | str:
    answers = RememberedAnswers(PromptMemory(POOL_BYTES), made)
    prompts = Prompts(made, answers=answers)
    tools = _tools(made, talk)
    kept, said, silent = 0, list[str](), list[str]()
    before: list[int] = []
    for at in _asked(talk):
        REWRITTEN.set(None)
        prompt = list(prompts.render(talk[: at + 1], tools))
        if before and prompt[: len(before)] == before:
            kept += 1
        elif before:
            why = REWRITTEN.get() or rewritten_in_front(prompts, talk[: at + 1], tools)
            (said if why else silent).append(why or f"message {at}")
        if at + 1 < len(talk):
            text = _generated(prompts, talk[: at + 1], talk[at + 1], tools)
            answer = _one_by_one(made, text)
            answers.remember("", prompt, answer)
            before = [*prompt, *answer]
    return Outcome(kept, tuple(said), tuple(silent))


def _tools(made: Any, talk: Sequence[Message]) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation: those it uses or the template demands."""
    if any(message["role"] == "tool" for message in talk):
        return [TOOL]
    try:
        made.apply_chat_template(list(talk[:1]), tokenize=False)
    except Exception:  # noqa: BLE001 - a template raises anything
        return [TOOL]
    return None


def _asked(talk: Sequence[Message]) -> list[int]:
    """Return the numbers of the messages that an answer follows."""
    roles = [*(message["role"] for message in talk), "assistant"]
    return [at for at, role in enumerate(roles[1:]) if role == "assistant"]


def _generated(prompts: Prompts, talk: Sequence[Message], answer: Message, tools: Any) -> str:
    """Return an answer's text as a model would have generated it, by its template."""

    def rendered(messages: Sequence[Message], *, opened: bool) -> str:
        fitting = fit(prompts.traits, messages, tools)
        return str(
            prompts.tokenizer.apply_chat_template(
                fitting.messages,
                tools=fitting.tools,
                tokenize=False,
                add_generation_prompt=opened,
            )
        )

    prompt = rendered(talk, opened=True)
    written = rendered([*talk, answer], opened=False)
    if not written.startswith(prompt):  # the prompt opens the reasoning, or history drops it
        return _spoken(prompts, prompt, written, answer)
    return _cut(prompts.tokenizer, written[len(prompt) :])


def _spoken(prompts: Prompts, prompt: str, written: str, answer: Message) -> str:
    """Return an answer as generated after a prompt that its template rewrites."""
    marks = prompts.format.reasoning
    if answer.get("tool_calls"):
        return _called(prompts, prompt, written)
    thought = answer.get("reasoning_content")
    if marks is None:
        return str(answer["content"])
    opened = prompt.rstrip().endswith(marks.start)
    start = "" if opened else marks.start
    return f"{start}{thought or ''}{marks.end}{answer['content']}"


def _called(prompts: Prompts, prompt: str, written: str) -> str:
    """Return a call as history writes it, behind the end of the reasoning that the prompt opens."""
    marks = prompts.format.reasoning
    call = _cut(prompts.tokenizer, _behind_opening(prompts, prompt, written))
    if marks is None or not prompt.rstrip().endswith(marks.start):
        return call
    return marks.end + call.removeprefix(marks.start).lstrip().removeprefix(marks.end)


def _behind_opening(prompts: Prompts, prompt: str, written: str) -> str:
    """Return the text of history behind what opens its last answer.

    That is the opening of the prompt without the reasoning that it begins. Where history has
    another text in front of the answer, it is the prompt's last mark, or the first difference.
    """
    marks = prompts.format.reasoning
    for opening in openings_of(prompts.tokenizer, prompts.traits, RENDERER):
        bares = [opening.bare, *([opening.text.partition(marks.start)[0]] if marks else [])]
        for bare in (prompt.removesuffix(opening.text) + bare for bare in bares):
            if prompt.endswith(opening.text) and written.startswith(bare):
                return written[len(bare) :]
    mark = prompt[prompt.rfind("<") :]
    _, found, behind = written.rpartition(mark)
    return behind if found else written[shared(prompt, written) :]


def _cut(made: Any, text: str) -> str:
    """Return a text up to the first marker that ends an answer."""
    ends = [made.decode([token]) for token in made.eos_token_ids]
    places = [at for end in ends if (at := text.find(end)) >= 0]
    return text[: min(places, default=len(text))]


def _one_by_one(made: Any, text: str) -> list[int]:
    """Tokenize a text character by character, with whole markers."""
    tokens: list[int] = []
    for part in re.split(f"({_MARKS.pattern})", text):
        known = _MARKS.fullmatch(part) is not None
        for piece in [part] if known else part:
            tokens += made.encode(piece, add_special_tokens=False)
    return tokens


def _ends(template: str, talk: Sequence[Message], folder: Path) -> tuple[str, ...]:
    """Return the markers that a template writes after answers."""
    made = _tokenizer(template, (), folder)
    turns = [talk[0], dict(_TOLD), talk[0]]  # some end an answer with the next turn's mark alone
    tools, called = _tools(made, talk), talk[1].get("tool_calls")
    traits = TemplateTraits.of(made, RENDERER)

    def rendered(messages: Sequence[Message]) -> str:
        fitted = fit(traits, messages, tools)
        return str(made.apply_chat_template(fitted.messages, tools=fitted.tools, tokenize=False))

    behind = [rendered(turns).rpartition(_TOLD["content"])[2]]
    behind.append(rendered(turns[:2]).rpartition(_TOLD["content"])[2])
    if called:
        call = rendered(talk[:2])
        behind += [rendered(talk[:3]).removeprefix(call), call[call.rfind("<|") :]]
    found = [_MARK.match(text) for text in behind]
    return ("</s>", *dict.fromkeys(one[1] for one in found if one is not None))


def _tokenizer(template: str, ends: Sequence[str], folder: Path) -> Any:
    """Make a tokenizer of bytes and a few pairs of them, with this template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *map("".join, MERGES)]
    raw = Tokenizer(models.BPE({text: at for at, text in enumerate(texts)}, list(MERGES)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    marks = dict.fromkeys(["<s>", "</s>", *ends, *_MARKS.findall(template)])
    raw.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    fast.save_pretrained(folder)
    numbers = [raw.token_to_id(end) for end in dict.fromkeys(("</s>", *ends))]
    return load(folder, eos_token_ids=numbers)


def histories(template: str, folder: Path) -> Mapping[str, Outcome | str]:
    """Return the outcome of each conversation with a template."""
    return {name: outcome(template, talk, folder) for name, talk in talks().items()}
