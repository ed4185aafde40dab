"""Tokens of answers as generated, reused in the prompts of later turns.

    prompt   text ──read──> tokens ─────────────┐
    answer                   tokens ──remember──┴──> entry, by salt and hash of the prompt's text
    later    text of the prompt | answer, as the template writes it | more text
             tokens of both, reused                                 | read

Tokenizing an answer's text may give tokens other than those generated, and clients may reformat
the JSON of calls. Reusing the generated tokens lets the next turn match the cache.
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
from penstock.errors import ModelError
from penstock.models.mlx_lm import rendered_text
from penstock.models.template_renderer import TemplateRenderer
from penstock.server.answers import Reader
from penstock.server.history import fit
from penstock.server.parsing.formats import HARMONY, AnswerFormat
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
"""Divisor of the prompt memory that gives the limit for answers."""
ENTRY_BYTES = 1_000
ANSWERS = 4
_NEXT_MESSAGE = f"{END_OF_MESSAGE}{START}assistant"
SHOWN = 40
_MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
PENDING = 1_024
"""Maximum number of prompts remembered while waiting for their answers."""


@dataclass(slots=True)
class Remembered:
    prompt: array[int]
    answers: list[array[int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + 4 * (len(self.prompt) + sum(map(len, self.answers)))


class Opening(NamedTuple):
    text: str
    bare: str
    """Beginning of `text` that the template also writes in history."""


@dataclass(frozen=True, slots=True)
class Splice:
    """First tokens of a prompt, as tokenized and generated in an earlier turn."""

    tokens: list[int]
    end: int
    """Number of characters that the tokens cover; 0 if no answer matches."""
    rewritten: str | None = None
    """Description of the first rewritten answer; None if there is none."""


class RememberedAnswers:
    """LRU cache of answers by salt and preceding text, held in the prompt memory. Thread-safe."""

    def __init__(self, memory: PromptMemory, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._memory = memory
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
        return self._hold.nbytes

    def note(self, text: str, prompt: Sequence[int]) -> None:
        with self._lock:
            self._pending[_digest_of(prompt)] = blake2b(text.encode(), digest_size=16).digest()
            while len(self._pending) > PENDING:
                self._pending.popitem(last=False)

    def remember(self, salt: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        with self._lock:
            digest = self._pending.get(_digest_of(prompt))
            if digest is None or not answer:
                return
            entry = self._entries.setdefault((salt, digest), Remembered(array("I", prompt)))
            entry.answers = [array("I", answer), *entry.answers][:ANSWERS]
            self._entries.move_to_end((salt, digest))
            self._settle(self._most_bytes)

    def close(self) -> None:
        """Forget all answers and release their memory."""
        self._memory.reliefs.remove(self.shrink)
        self.shrink(self.nbytes)

    def shrink(self, nbytes: int) -> None:
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
        """Return the tokens up to the end of the last remembered answer in a prompt's history.

        Args:
            salt: salt of the request, including its key's.
            text: text of the prompt.
            openings: texts with which the chat template opens answers.
            form: format of the model's answers.
            tools: tools of the request.
        """
        rewritten = None
        start = form.reasoning.start if form.reasoning is not None else ""
        places = [place for opening in openings for place in _openings(text, opening, start)]
        for position, digest, left_out in sorted(places, reverse=True):
            with self._lock:
                entry = self._entries.get((salt, digest))
                answers = [] if entry is None else [list(answer) for answer in entry.answers]
                if entry is None:
                    continue
                self._entries.move_to_end((salt, digest))
            ends = list(self._ends_of_answer(text, position, form))
            for end in () if left_out else ends:
                for answer in answers:
                    if self._same(text[position:end], answer, form, tools):
                        return Splice([*entry.prompt, *answer], end, rewritten)
            if answers:
                written = text[position : ends[-1] if ends else len(text)]
                before = len(entry.prompt)
                rewritten = self._difference(before, written, answers[0], left_out, form)
        return Splice([], 0, rewritten)

    def _ends_of_answer(self, text: str, start: int, form: AnswerFormat) -> Iterator[int]:
        """Yield the positions where an answer may end: before end marks."""
        harmony = form.call_name == HARMONY
        marks = [self._tokenizer.decode([token]) for token in self._tokenizer.eos_token_ids]
        marks += [END_OF_MESSAGE] if harmony else []
        while True:
            places = [i for mark in marks if mark and (i := text.find(mark, start)) >= 0]
            if not places:
                return
            yield (end := min(places))
            start = end + len(END_OF_MESSAGE)
            if not harmony or not text.startswith(_NEXT_MESSAGE, end):
                return

    def _same(self, written: str, answer: Sequence[int], form: AnswerFormat, tools: Any) -> bool:
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
        generated, mark = str(self._tokenizer.decode(list(answer))), ""
        if form.reasoning is not None:  # harmony ends reasoning like any message
            harmony = form.reasoning_name == HARMONY
            mark = form.reasoning.start if harmony else form.reasoning.end
        if mark and mark in generated and mark not in written:
            what = "its reasoning is left out, as templates do with earlier turns"
        elif left_out:
            what = f"{left_out!r} is left out, with which the template had started it"
        else:
            pairs = enumerate(zip(generated, written, strict=False))
            shorter = min(len(generated), len(written))
            first = next((i for i, (ours, theirs) in pairs if ours != theirs), shorter)
            what = f"{generated[first : first + SHOWN]!r} became {written[first : first + SHOWN]!r}"
        return f"History rewrites the answer after token {prompt_tokens:,}: {what}"

    def _settle(self, most_bytes: int) -> None:
        """Evict the oldest entries down to `most_bytes`, and hold the memory of the rest."""
        nbytes = sum(entry.nbytes for entry in self._entries.values())
        while self._entries and nbytes > most_bytes:
            nbytes -= self._entries.popitem(last=False)[1].nbytes
        try:
            self._hold.resize(nbytes)
        except ServerError:  # open requests hold all of the memory
            self._entries.clear()
            self._hold.resize(0)


def openings_of(
    tokenizer: Any, traits: TemplateTraits, renderer: TemplateRenderer
) -> tuple[Opening, ...]:
    """Return the texts with which a chat template opens answers to users and tool results."""
    talks = (talk_of(USER), [*talk_of(USER), called(THOUGHT, None), result_of(RESULT)])
    openings = [_opening(tokenizer, traits, renderer, talk, [TOOL]) for talk in talks]
    if plain := _opening(tokenizer, traits, renderer, talks[0]):  # some templates require a tool
        openings[0] = plain
    return tuple(dict.fromkeys(opening for opening in openings if opening and opening.bare))


def _opening(
    tokenizer: Any,
    traits: TemplateTraits,
    renderer: TemplateRenderer,
    talk: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> Opening | None:
    def rendered(talk: list[dict[str, Any]], *, opened: bool) -> str:
        fitted = fit(traits, talk, tools)
        return rendered_text(
            tokenizer, fitted.messages, renderer, tools=fitted.tools, answer=opened
        )

    with suppress(ModelError):
        closed, opened = rendered(talk, opened=False), rendered(talk, opened=True)
        text = opened.removeprefix(closed)
        if text in ("", opened):
            _, separator, text = opened.rpartition(str(talk[-1]["content"]))
            text = text if separator else ""
        history = rendered([*talk, *talk_of(SAID)], opened=False).rpartition(SAID)[0]
        kept = len(text) - len(opened) + shared(opened, history)
        return Opening(text, text[: _outside(text, max(0, kept))])
    return None


def _outside(text: str, position: int) -> int:
    """Return `position`, moved to the beginning of a mark that contains it.

    >>> _outside("<a><think>", 4), _outside("<a><think>", 3), _outside("[INST] x", 1)
    (3, 3, 0)
    """
    inside = (mark.start() for mark in _MARK.finditer(text) if mark.start() < position < mark.end())
    return next(inside, position)


def _openings(text: str, opening: Opening, start: str) -> Iterator[tuple[int, bytes, str]]:
    """Yield the end of each opening but the last, its prompt's hash, and the omitted text.

    `start` is the start mark of reasoning, which openings in history may lack.
    """
    whole_text, bare = opening
    if start and start in whole_text:
        bare = whole_text.partition(start)[0]
    hasher, seen = blake2b(digest_size=16), 0
    position = text.find(bare) if bare else -1
    while position >= 0 and position + len(whole_text) < len(text):
        end = position + len(bare)
        hasher.update(text[seen:end].encode())
        seen = end
        prompt = hasher.copy()
        prompt.update(whole_text[len(bare) :].encode())
        whole = text.startswith(whole_text, position)
        left_out = "" if whole else whole_text[len(bare) :]
        yield position + len(whole_text) if whole else end, prompt.digest(), left_out
        position = text.find(bare, end)


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
