"""Seeded dialogues in the embedded model's language, with questions and the right answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from penstock_bench.recall.words import (
    ADJECTIVES,
    ATTRIBUTES,
    FACT_FORMS,
    NOTED,
    NOUNS,
    NUMBERS,
    QUESTION_FORMS,
    SLOTS,
    SYSTEM,
    TALK,
    UNKNOWN,
    VALUES,
)

START = "<|start|>"
END = "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
PIECE = r" ?[^\W\d_]+| ?\d{1,2}|[^\w\s]|_|\s"
"""Pattern of a token: a word or two digits with the preceding space, or a sign."""

Message: TypeAlias = dict[str, str]

_TALK_FORMS = tuple(
    (text, reply) for reply, texts in TALK for text in texts for _ in range(1 + text.count("{"))
)
_LETTERS = "abcdefghijklmnoprstuvwxyz"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something told once: the `attribute` of the `adjective` `noun` is `value`."""

    attribute: str
    adjective: str
    noun: str
    value: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Words that a question names; no two facts of a dialogue share all three."""
        return (self.attribute, self.adjective, self.noun)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a fact, and where in the dialogue that fact was told."""

    text: str
    answer: str
    fact: Fact
    message: int
    """Index of the message in `Dialogue.messages` that tells the fact."""
    token: int
    """Tokens of the rendered dialogue before that message."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A finished conversation, and the questions that may be asked next."""

    messages: tuple[Message, ...]
    questions: tuple[Question, ...]
    facts: tuple[Fact, ...]
    """All facts in order, including distractors (facts without a question)."""
    tokens: int
    """Length of `messages` under the model's chat template, without a generation prompt."""

    def ask(self, question: Question) -> list[Message]:
        """Return the conversation with `question` as its last, unanswered message."""
        return [*self.messages, {"role": "user", "content": question.text}]


def vocabulary() -> tuple[str, ...]:
    """Return all tokens that are words, numbers or signs, by id.

    Excludes the 256 single bytes and the special tokens, which the tokenizer adds.
    """
    texts = [*FACT_FORMS, *QUESTION_FORMS, NOTED, UNKNOWN, SYSTEM, *ATTRIBUTES]
    texts += [text for reply, forms in TALK for text in (reply, *forms)]
    plain = " ".join(re.sub(r"\{\w+\}", " ", text) for text in texts)
    words = re.findall(r"[^\W\d_]+", plain)
    for group in (ADJECTIVES, NOUNS, *VALUES.values(), *SLOTS.values()):
        words += group
    both_cases = [form for word in words for form in (word, word.capitalize())]
    numbers = [f"{n:02}" for n in range(100)]
    spaced = [f" {word}" for word in (*both_cases, *numbers, *"0123456789")]
    return tuple(dict.fromkeys([*spaced, *numbers]))


def count_tokens(messages: Sequence[Message]) -> int:
    """Count the tokens of `messages` under the model's chat template, without the tokenizer."""
    return 1 + sum(_message_tokens(message["content"]) for message in messages)


def dialogue(
    seed: int,
    *,
    tokens: int = 1000,
    facts: int = 8,
    place: tuple[float, float] = (0.0, 1.0),
    distractors: float = 0.4,
    quiz: float = 0.0,
    strangers: float = 0.0,
) -> Dialogue:
    """Generate a dialogue with `facts` facts to ask about, among other turns.

    Args:
        seed: The same seed and arguments give the same dialogue.
        tokens: Maximum length; it ends less than 48 tokens below.
        facts: Number of facts with a question each.
        place: Range in which these facts are told, as two fractions of `tokens`. (0, 0.1) is the
            start (inside `keep`), (0.9, 1) the end (inside the window).
        distractors: Share of the other turns that tell facts without a question. Half of them
            differ in one word from an earlier fact.
        quiz: Share of the other turns that ask about an earlier fact, and are answered.
        strangers: Share of quiz questions about unknown facts, answered `UNKNOWN`.

    Raises:
        ValueError: If `place` is not an interval within 0 and 1, or `tokens` cannot hold the facts.
    """
    needed = _needed_tokens(facts, tokens, place)
    writer = _Writer(Random(f"recall {seed}"))
    if writer.rng.random() < 0.25 and tokens - needed > 32:
        writer.add("system", SYSTEM)
    span = tokens - facts * _FACT_TOKENS
    due = sorted(writer.rng.uniform(*place) * span for _ in range(facts))
    told_facts: list[tuple[Fact, int, int]] = []
    while True:
        filler = writer.filler(distractors, quiz, strangers)
        room = writer.tokens + filler.tokens <= tokens - _FACT_TOKENS * len(due)
        if due and (not room or writer.tokens - _FACT_TOKENS * len(told_facts) >= due[0]):
            due.pop(0)
            fact = writer.new_fact()
            told_facts.append((fact, len(writer.messages), writer.tokens))
            writer.say(writer.telling(fact))
        elif room:
            writer.say(filler)
        else:
            break
    questions = tuple(
        Question(writer.question(fact.key), f"{fact.value}.", fact, message, token)
        for fact, message, token in told_facts
    )
    return Dialogue(tuple(writer.messages), questions, tuple(writer.facts), writer.tokens)


def _needed_tokens(facts: int, tokens: int, place: tuple[float, float]) -> int:
    """Return the tokens that the facts need; raises as `dialogue`."""
    first, last = place
    if not 0.0 <= first <= last <= 1.0:
        raise ValueError(f"place must be two fractions 0 <= first <= last <= 1, not {place}")
    if facts < 0:
        raise ValueError(f"facts must not be negative, not {facts}")
    if tokens < (needed := 1 + facts * _FACT_TOKENS):
        raise ValueError(f"{facts} facts need {needed} tokens or more, not {tokens}")
    return needed


def without(dialogue: Dialogue, question: Question) -> Dialogue:
    """Return `dialogue` without the fact of `question`: the negative control."""
    gone = (question.message, question.message + 1)
    kept = tuple(m for i, m in enumerate(dialogue.messages) if i not in gone)
    facts = tuple(fact for fact in dialogue.facts if fact != question.fact)
    return Dialogue(kept, (question,), facts, count_tokens(kept))


_FACT_TOKENS = 20
"""Tokens of the longest form of a fact and its acknowledgement."""
_PIECE = re.compile(PIECE)
_Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Turn:
    """User text, reply, and the fact told, if any."""

    text: str
    reply: str
    fact: Fact | None = None

    @property
    def tokens(self) -> int:
        return _message_tokens(self.text) + _message_tokens(self.reply)


class _Writer:
    """Dialogue under construction: messages, facts and length so far."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.messages: list[Message] = []
        self.facts: list[Fact] = []
        self.keys: set[_Key] = set()
        self.tokens = 1

    def add(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})
        self.tokens += _message_tokens(text)

    def say(self, turn: _Turn) -> None:
        """Append a turn and record its fact."""
        self.add("user", turn.text)
        self.add("assistant", turn.reply)
        if turn.fact is not None:
            self.facts.append(turn.fact)
            self.keys.add(turn.fact.key)

    def new_key(self) -> _Key:
        """Draw an unused key; every second one differs from a used one in a single word."""
        choose = self.rng.choice
        while True:
            attribute, adjective, noun = choose(ATTRIBUTES), choose(ADJECTIVES), choose(NOUNS)
            if self.facts and self.rng.random() < 0.5:
                twin = choose(self.facts)
                attribute, adjective, noun = choose(
                    (
                        (attribute, twin.adjective, twin.noun),
                        (twin.attribute, adjective, twin.noun),
                        (twin.attribute, twin.adjective, noun),
                    )
                )
            if (attribute, adjective, noun) not in self.keys:
                return attribute, adjective, noun

    def new_fact(self) -> Fact:
        key = self.new_key()
        if key[0] in NUMBERS:
            return Fact(*key, str(self.rng.randrange(1000, 10000)))
        return Fact(*key, self.rng.choice(VALUES[key[0]]))

    def telling(self, fact: Fact) -> _Turn:
        form = self.rng.choice(FACT_FORMS)
        return _Turn(_filled(form, fact.key).replace("{value}", fact.value), NOTED, fact)

    def question(self, key: _Key) -> str:
        return _filled(self.rng.choice(QUESTION_FORMS), key)

    def filler(self, distractors: float, quiz: float, strangers: float) -> _Turn:
        """Draw a turn: a distractor, a question about an earlier fact, or small talk."""
        kind = self.rng.random()
        if kind < distractors:
            return self.telling(self.new_fact())
        if kind < distractors + quiz and self.facts:
            if self.rng.random() < strangers:
                return _Turn(self.question(self.new_key()), UNKNOWN)
            fact = self.rng.choice(self.facts)
            return _Turn(self.question(fact.key), f"{fact.value}.")
        text, reply = self.rng.choice(_TALK_FORMS)
        return _Turn(re.sub(r"\{(\w+)\}", lambda slot: self._word(slot[1]), text), reply)

    def _word(self, slot: str) -> str:
        if slot == "unheard":
            return "".join(self.rng.choices(_LETTERS, k=self.rng.randrange(3, 9)))
        if slot == "few":
            return str(self.rng.randrange(2, 100))
        if slot == "any":
            return self.rng.choice(SLOTS[self.rng.choice(list(SLOTS))])
        return self.rng.choice(SLOTS[slot])


def _filled(form: str, key: _Key) -> str:
    attribute, adjective, noun = key
    return form.replace("{attribute}", attribute).replace("{key}", f"{adjective} {noun}")


def _message_tokens(content: str) -> int:
    """Count the tokens of a message: role, space, text and end."""
    pieces = _PIECE.findall(f" {content}")
    return 2 + sum(1 if piece in _WORDS else len(piece.encode()) for piece in pieces)


_WORDS = frozenset(vocabulary())
