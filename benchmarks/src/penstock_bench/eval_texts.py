"""Texts and questions of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from penstock.errors import SettingError
from penstock.models.loading import load
from penstock.models.mlx_lm import encode, render
from penstock.models.template_renderer import TemplateRenderer
from penstock.recall import MODEL_PATH
from penstock_bench.eval_load import (
    ANSWER_TOKENS,
    FIRST_SEED,
    LEAST_BLOCKS,
    EvalLoad,
)
from penstock_bench.key_forms import KeyForm, reform
from penstock_bench.long_tasks import Haystack, LongTask, score, write
from penstock_bench.recall import END, ROLES, dialogue


@dataclass(frozen=True, slots=True)
class AskedDialogue:
    """Tokenized dialogue or text, with questions and their answers."""

    context: tuple[int, ...]
    """Common prefix of all prompts."""
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[str, ...], ...]
    answer_tokens: int = ANSWER_TOKENS
    whole: bool = True
    """Whether an answer must equal the expected text instead of containing it."""

    def score(self, number: int, text: str) -> float:
        """Return the score of the answer to question `number`, 0 to 1."""
        expected = self.answers[number]
        return float((text.strip(),) == expected) if self.whole else score(text, expected)


def dialogues(tokenizer: Any, load_: EvalLoad, length: int) -> Iterator[AskedDialogue]:
    """Yield dialogues of one length until there are enough questions."""
    facts = max(1, min(load_.per_dialogue, length // 64))
    with TemplateRenderer() as renderer:
        for number in range(-(-load_.questions // facts)):
            talk = dialogue(FIRST_SEED + number, tokens=length, facts=facts)
            yield AskedDialogue(
                tuple(render(tokenizer, talk.messages, answer=False, renderer=renderer)),
                tuple(
                    tuple(render(tokenizer, talk.ask(question), renderer=renderer))
                    for question in talk.questions
                ),
                tuple((question.answer,) for question in talk.questions),
            )


def long_texts(
    tokenizer: Any, load_: EvalLoad, task: LongTask, length: int
) -> Iterator[AskedDialogue]:
    """Yield texts of one task and length until there are enough questions."""
    haystack = _haystack(tokenizer, load_)
    num_questions = 0
    for seed in count():
        text = write(task, haystack, length, seed)
        prompts = [
            _prompt(tokenizer, text.context, question.text, question.lead)
            for question in text.questions
        ]
        expected = tuple(question.expected for question in text.questions)
        yield AskedDialogue(
            _shared(prompts), tuple(prompts), expected, task.answer_tokens, whole=False
        )
        num_questions += len(prompts)
        if num_questions >= load_.questions:
            return


def _shared(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common prefix of all prompts, at most all but the last token of the shortest."""
    places = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return tuple(place[0] for place in takewhile(lambda place: len(set(place)) == 1, places))


def _haystack(tokenizer: Any, load_: EvalLoad) -> Haystack:
    """Return the paragraphs of the text; raises SettingError if there is none."""
    if not load_.texts:
        raise SettingError("--task needs a text: add --text")
    return Haystack("\n\n".join(load_.texts), lambda text: len(encode(tokenizer, text)))


def _prompt(tokenizer: Any, context: str, question: str, lead: str) -> tuple[int, ...]:
    """Return the prompt of a question after a text, with the first words of the answer."""
    said = [{"role": "user", "content": f"{context}\n\n{question}"}]
    first = tokenizer.encode(lead, add_special_tokens=False)
    return (*render(tokenizer, said), *first)


@dataclass(frozen=True, slots=True)
class EvalPiece:
    """Tokens of a text, and a mask of the predictions that count."""

    tokens: tuple[int, ...]
    counts: tuple[bool, ...]

    def ends(self, count: int) -> list[int]:
        """Return up to `count` positions at which continuations start: at answers, or anywhere."""
        begins = [i for i in range(1, len(self.tokens)) if self.counts[i] > self.counts[i - 1]]
        places = begins or range(1, len(self.tokens) + 1)
        count = min(count, len(places))
        return [places[len(places) * (i + 1) // count - 1] for i in range(count)]


def pieces(tokenizer: Any, load_: EvalLoad) -> list[EvalPiece]:
    """Split the text into pieces, or generate dialogues.

    Raises:
        SettingError: no piece has two blocks.
    """
    least = LEAST_BLOCKS * load_.block_size
    if load_.text_tokens < least:
        raise SettingError(
            f"--text-tokens {load_.text_tokens}: a piece needs {least} or more, {LEAST_BLOCKS} "
            f"blocks of {load_.block_size}"
        )
    size = min(load_.piece_tokens, load_.text_tokens)
    if load_.texts:
        cut = _in_turn([encode(tokenizer, text) for text in load_.texts], size, load_.text_tokens)
    else:
        talks = [
            dialogue(FIRST_SEED - 1 - number, tokens=size, facts=0, quiz=0.3, strangers=0.1)
            for number in range(load_.text_tokens // size)
        ]
        if load_.model == str(MODEL_PATH):
            with TemplateRenderer() as renderer:
                written = [
                    render(tokenizer, talk.messages, answer=False, renderer=renderer)
                    for talk in talks
                ]
            cut = [_spoken(tokenizer, tokens) for tokens in written]
        else:
            texts = ["\n".join(message["content"] for message in talk.messages) for talk in talks]
            cut = [_whole(encode(tokenizer, text)) for text in texts]
    long = [piece for piece in cut if len(piece.tokens) >= least]
    if not long:
        longest = max((len(piece.tokens) for piece in cut), default=0)
        raise SettingError(
            f"the text has {longest} tokens, or pieces of so many; a piece needs {least} or more"
        )
    return long


def _in_turn(texts: Sequence[Sequence[int]], size: int, max_tokens: int) -> list[EvalPiece]:
    """Split texts into pieces, one of each in turn, up to `max_tokens` in total."""
    cut = []
    for start in range(0, max(map(len, texts)), size):
        for tokens in texts:
            piece = tokens[start : start + min(size, max_tokens)]
            max_tokens -= len(piece)
            cut.append(_whole(piece))
    return [piece for piece in cut if piece.tokens]


def _whole(tokens: Sequence[int]) -> EvalPiece:
    return EvalPiece(tuple(tokens), (True,) * len(tokens))


def _spoken(tokenizer: Any, tokens: Sequence[int]) -> EvalPiece:
    """Return a dialogue in which only the assistant's tokens count, the end of turn included."""
    names = (ROLES["assistant"], END)
    begin, end = (int(tokenizer.convert_tokens_to_ids(name)) for name in names)
    counts, speaks = [], False
    for token in tokens:
        counts.append(speaks)
        speaks = token == begin or (speaks and token != end)
    return EvalPiece(tuple(tokens), tuple(counts))


def questions(tokenizer: Any, load_: EvalLoad) -> dict[int | str, list[AskedDialogue]]:
    """Return all questions, by length of the dialogue, or by task and length."""
    if not load_.tasks:
        return {length: list(dialogues(tokenizer, load_, length)) for length in load_.lengths}
    return {
        f"{task} {length:,}": list(long_texts(tokenizer, load_, task, length))
        for task in load_.tasks
        for length in load_.lengths
    }


@dataclass(frozen=True, slots=True)
class EvalTask:
    """Model in one form, with its questions and its text."""

    form: KeyForm
    model: Any
    tokenizer: Any
    questions: dict[int | str, list[AskedDialogue]]
    """Questions by length of the dialogue, or by task and length."""
    text: list[EvalPiece]

    @classmethod
    def of(cls, load_: EvalLoad, form: KeyForm) -> EvalTask:
        """Load the model and prepare its questions; raises as `measure` does."""
        model, tokenizer = load(load_.model)
        reform(model, form, load_.outlier_scale)
        text = pieces(tokenizer, load_)  # which refuses what is too short before the rest is made
        return cls(form, model, tokenizer, questions(tokenizer, load_), text)

    def steps(self, settings: int, passes: int, *, continues: bool) -> int:
        """Return the number of steps that `Progress` will count.

        Args:
            settings: number of measured settings.
            passes: number of passes over all pieces of the text.
            continues: whether pieces are continued.
        """
        dialogues = sum(len(conversations) for conversations in self.questions.values())
        return settings * (dialogues + continues * len(self.text) + passes)
