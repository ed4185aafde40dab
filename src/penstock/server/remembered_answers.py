"""Tokens of answers as they were generated, spliced into the prompts of later turns.

    prompt   text ──read──> tokens ─────────────┐
    answer                   tokens ──remember──┴──> entry, by salt and hash of the prompt's text
    later    text of the prompt | answer, as the template writes it | more text
             tokens as they were, of both                           | read

A tokenizer need not give back the tokens that a model chose, and clients write the JSON of calls
anew. So the next turn begins with the tokens that are cached, wherever its text says the same.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import RLock
from typing import Any, NamedTuple

from penstock.engine.request import Finish, Usage
from penstock.server.answers import Reader
from penstock.server.parsing import AnswerFormat
from penstock.server.parsing.formats import HARMONY
from penstock.server.parsing.harmony import END as END_OF_MESSAGE
from penstock.server.parsing.harmony import START
from penstock.server.problems import ServerError
from penstock.server.prompt_memory import PromptMemory
from penstock.server.templates import (
    RESULT,
    SAID,
    THOUGHT,
    TOOL,
    USER,
    TemplateTraits,
    called,
    result_of,
    shared,
    talk_of,
)

SHARE = 4
"""Divisor of the memory for prompts that gives the most that answers take of it."""
ENTRY_BYTES = 1_000
"""Python overhead of a prompt and its answers, at most, in bytes."""
ANSWERS = 4
"""Newest answers to one prompt that are remembered."""
_NEXT_MESSAGE = f"{END_OF_MESSAGE}{START}assistant"
"""Text between two messages of one answer, in harmony."""
SHOWN = 40
"""Characters shown of an answer that history rewrites."""
_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Mark of a template: in angle brackets, or in square ones."""
PENDING = 1_024
"""Prompts that were read and wait for their answer."""


@dataclass(slots=True)
class Remembered:
    """A prompt's tokens, and those of its answers."""

    prompt: array[int]
    answers: list[array[int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, at most."""
        return ENTRY_BYTES + 4 * (len(self.prompt) + sum(map(len, self.answers)))


class Opening(NamedTuple):
    """Text with which a template opens an answer."""

    text: str
    bare: str
    """First part of it, which history has as well."""


@dataclass(frozen=True, slots=True)
class Splice:
    """First tokens of a prompt, as they were read and generated before."""

    tokens: list[int]
    end: int
    """Characters of the prompt's text that they stand for; 0 if no answer was remembered."""
    rewritten: str | None = None
    """Position of the first answer that history rewrites, and the difference; None without one."""


class RememberedAnswers:
    """Answers by salt and the text in front of them. Any thread may call it.

    The one that was not asked for the longest goes first.

    Args:
        memory: the server's for prompts, which counts them, and takes them when it is short.
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(self, memory: PromptMemory, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = memory.pool_bytes // SHARE
        self._hold = memory.hold(relieves=False)
        self._entries: OrderedDict[tuple[str, bytes], Remembered] = OrderedDict()
        self._pending: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = RLock()
        memory.reliefs.append(self.shrink)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that they take of the memory for prompts."""
        return self._hold.nbytes

    def note(self, text: str, prompt: Sequence[int]) -> None:
        """Note the text that a prompt was read from, until its answer comes."""
        with self._lock:
            self._pending[_digest_of(prompt)] = _hasher(text).digest()
            while len(self._pending) > PENDING:
                self._pending.popitem(last=False)

    def remember(self, salt: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember the answer to a prompt, unless there is no memory for it."""
        with self._lock:
            digest = self._pending.get(_digest_of(prompt))
            if digest is None or not answer:
                return
            entry = self._entries.setdefault((salt, digest), Remembered(array("I", prompt)))
            entry.answers = [array("I", answer), *entry.answers][:ANSWERS]
            self._entries.move_to_end((salt, digest))
            self._settle(self._most_bytes)

    def shrink(self, nbytes: int) -> None:
        """Forget answers until so many bytes are free, or none is left."""
        with self._lock:
            self._settle(max(0, self._hold.nbytes - nbytes))

    def splice(
        self,
        salt: str,
        text: str,
        openings: Sequence[Opening],
        form: AnswerFormat,
        tools: Any = None,
    ) -> Splice:
        """Find the last remembered answer of a prompt's history, and the tokens before it.

        Args:
            salt: the tenant's.
            text: the whole prompt.
            openings: with which the template opens an answer.
            form: of the model's answers.
            tools: those that are offered, in OpenAI's form.
        """
        rewritten = None
        start = form.reasoning.start if form.reasoning is not None else ""
        places = [place for opening in openings for place in _openings(text, opening, start)]
        for at, digest, left_out in sorted(places, reverse=True):
            with self._lock:
                entry = self._entries.get((salt, digest))
                answers = [] if entry is None else [list(answer) for answer in entry.answers]
                if entry is None:
                    continue
                self._entries.move_to_end((salt, digest))
            ends = list(self._ends_of_answer(text, at, form))
            for end in () if left_out else ends:
                for answer in answers:
                    if self._same(text[at:end], answer, form, tools):
                        return Splice([*entry.prompt, *answer], end, rewritten)
            if answers:
                written = text[at : ends[-1] if ends else len(text)]
                before = len(entry.prompt)
                rewritten = self._difference(before, written, answers[0], left_out, form)
        return Splice([], 0, rewritten)

    # ---- parts

    def _ends_of_answer(self, text: str, start: int, form: AnswerFormat) -> Iterator[int]:
        """Yield where an answer may end: at the first mark of an end.

        In harmony each message has an end, and an answer may be several messages.
        """
        harmony = form.call_name == HARMONY
        marks = [self._tokenizer.decode([token]) for token in self._tokenizer.eos_token_ids]
        marks += [END_OF_MESSAGE] if harmony else []
        while True:
            places = [at for mark in marks if mark and (at := text.find(mark, start)) >= 0]
            if not places:
                return
            yield (end := min(places))
            start = end + len(END_OF_MESSAGE)
            if not harmony or not text.startswith(_NEXT_MESSAGE, end):
                return

    def _same(self, written: str, answer: Sequence[int], form: AnswerFormat, tools: Any) -> bool:
        """Tell whether a text of history and an answer say the same."""
        generated = str(self._tokenizer.decode(list(answer)))
        if written.strip() == generated.strip():
            return True
        if not tools:
            return False
        return _read(written, form, tools) == _read(generated, form, tools)

    def _difference(
        self,
        prompt_tokens: int,
        written: str,
        answer: Sequence[int],
        left_out: str,
        form: AnswerFormat,
    ) -> str:
        """Say how history rewrites an answer, and where."""
        generated, mark = str(self._tokenizer.decode(list(answer))), ""
        if form.reasoning is not None:  # harmony ends its reasoning as any message
            harmony = form.reasoning_name == HARMONY
            mark = form.reasoning.start if harmony else form.reasoning.end
        if mark and mark in generated and mark not in written:
            what = "its reasoning is left out, as templates do with earlier turns"
        elif left_out:
            what = f"{left_out!r} is left out, with which the template had opened it"
        else:
            pairs = enumerate(zip(generated, written, strict=False))
            shorter = min(len(generated), len(written))
            at = next((i for i, (ours, theirs) in pairs if ours != theirs), shorter)
            what = f"{generated[at : at + SHOWN]!r} became {written[at : at + SHOWN]!r}"
        return f"History rewrites the answer behind token {prompt_tokens:,}: {what}"

    def _settle(self, most_bytes: int) -> None:
        """Forget the oldest until no more is held, and have the rest counted."""
        held = sum(entry.nbytes for entry in self._entries.values())
        while self._entries and held > most_bytes:
            held -= self._entries.popitem(last=False)[1].nbytes
        try:
            self._hold.resize(held)
        except ServerError:  # open requests have all of the memory
            self._entries.clear()
            self._hold.resize(0)


def openings_of(tokenizer: Any, traits: TemplateTraits) -> tuple[Opening, ...]:
    """Return the texts with which a chat template opens an answer: to a user, and to a tool.

    Where it writes nothing of its own in front of an answer, it is the text that ends the message
    before.
    """
    talks = (talk_of(USER), [*talk_of(USER), called(THOUGHT, None), result_of(RESULT)])
    openings = [_opening(tokenizer, traits, talk, [TOOL]) for talk in talks]
    if plain := _opening(tokenizer, traits, talks[0]):  # some want a tool always
        openings[0] = plain
    return tuple(dict.fromkeys(opening for opening in openings if opening and opening.bare))


def _opening(
    tokenizer: Any,
    traits: TemplateTraits,
    talk: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> Opening | None:
    """Return the opening of the answer to a conversation; None if it cannot be told."""

    def rendered(talk: list[dict[str, Any]], *, opened: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                traits.fit(talk), tools=tools, tokenize=False, add_generation_prompt=opened
            )
        )

    # A boundary: a template is a program of the model's makers, and raises anything.
    with suppress(Exception):
        closed, opened = rendered(talk, opened=False), rendered(talk, opened=True)
        text = opened.removeprefix(closed)
        if text in ("", opened):
            _, asked, text = opened.rpartition(str(talk[-1]["content"]))
            text = text if asked else ""
        history = rendered([*talk, *talk_of(SAID)], opened=False).rpartition(SAID)[0]
        kept = len(text) - len(opened) + shared(opened, history)
        return Opening(text, text[: _outside(text, max(0, kept))])
    return None


def _outside(text: str, at: int) -> int:
    """Return a place in a text; if it is inside a mark, that of the mark's begin.

    >>> _outside("<a><think>", 4), _outside("<a><think>", 3), _outside("[INST] x", 1)
    (3, 3, 0)
    """
    inside = (mark.start() for mark in _MARK.finditer(text) if mark.start() < at < mark.end())
    return next(inside, at)


def _openings(text: str, opening: Opening, start: str) -> Iterator[tuple[int, bytes, str]]:
    """Yield the end of each opening but the last, the hash of its prompt, and its missing text.

    Where an opening begins the reasoning, history may have it without that mark.

    Args:
        text: the whole prompt.
        opening: with which the template opens an answer.
        start: mark with which reasoning begins; empty if there is none.
    """
    whole_text, bare = opening
    if start and start in whole_text:
        bare = whole_text.partition(start)[0]
    hasher, seen = blake2b(digest_size=16), 0
    at = text.find(bare) if bare else -1
    while at >= 0 and at + len(whole_text) < len(text):
        end = at + len(bare)
        hasher.update(text[seen:end].encode())
        seen = end
        prompt = hasher.copy()
        prompt.update(whole_text[len(bare) :].encode())
        whole = text.startswith(whole_text, at)
        left_out = "" if whole else whole_text[len(bare) :]
        yield at + len(whole_text) if whole else end, prompt.digest(), left_out
        at = text.find(bare, end)


def _hasher(text: str) -> Any:
    return blake2b(text.encode(), digest_size=16)


def _digest_of(tokens: Sequence[int]) -> bytes:
    return blake2b(array("I", tokens).tobytes(), digest_size=16).digest()


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read(text: str, form: AnswerFormat, tools: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = Reader(form, tools)
    reader.push(text)
    reader.end(Finish(0, "stop", "", None, Usage(0, 0, 0)))
    calls = [(call.name, _arguments(call.arguments)) for call in reader.calls]
    return reader.text.strip(), reader.reasoning.strip(), calls
