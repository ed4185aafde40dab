"""The embedded model's language: its words, its templates, and seeded dialogues.

The model in `penstock.recall.MODEL_PATH` remembers facts ("The code of the amber falcon is
4821.") and answers questions about them. A dialogue of any length, with the questions and the
right answers, comes from `dialogue`; the same seed gives the same dialogue on every machine.
Trainer, tests and benches all draw from here, so a cache fault shows up as a wrong answer.

>>> told = dialogue(7, tokens=300, facts=3)
>>> len(told.questions), told.tokens <= 300
(3, True)
>>> told == dialogue(7, tokens=300, facts=3)
True
"""

from penstock_bench.recall.dialogues import (
    END,
    PIECE,
    ROLES,
    START,
    Dialogue,
    Fact,
    Message,
    Question,
    count_tokens,
    dialogue,
    vocabulary,
    without,
)
from penstock_bench.recall.words import ADJECTIVES, ATTRIBUTES, NOTED, NOUNS, UNKNOWN, VALUES

__all__ = [
    "ADJECTIVES",
    "ATTRIBUTES",
    "END",
    "NOTED",
    "NOUNS",
    "PIECE",
    "ROLES",
    "START",
    "UNKNOWN",
    "VALUES",
    "Dialogue",
    "Fact",
    "Message",
    "Question",
    "count_tokens",
    "dialogue",
    "vocabulary",
    "without",
]
