"""Detokenization of answers, with a tokenizer or without one."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

from penstock.engine.model.constraint import Grammars, NoGrammars, pool_bytes
from penstock.engine.model.text import Detokenizer, NoText, TextStream
from penstock.engine.request import Request
from penstock.models.byte_level import compact, detokenizer_of

TEXT_BEFORE_TOKENS = 16
"""Number of last prompt tokens needed to continue the prompt's text."""


class TokensOnly:
    ends: frozenset[int] = frozenset()

    def grammars(self, vocabulary_size: int, limit_bytes: int) -> Grammars | NoGrammars:
        return NoGrammars()

    def stream(self, request: Request) -> TextStream:
        return TextStream(NoText())

    def decoded(self, tokens: Sequence[int]) -> str:
        return ""


class TextDecoding(TokensOnly):
    """Decodes answers with mlx-lm's tokenizer wrapper."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        compact(getattr(tokenizer, "_detokenizer", None))  # before memory is given back
        self.ends = frozenset(tokenizer.eos_token_ids)

    def grammars(self, vocabulary_size: int, limit_bytes: int) -> Grammars | NoGrammars:
        return Grammars(self._tokenizer, vocabulary_size, pool_bytes(limit_bytes))

    def stream(self, request: Request) -> TextStream:
        return TextStream(
            self._new_detokenizer(),
            request.stop,
            request.prompt[-TEXT_BEFORE_TOKENS:] if request.goes_on else (),
            keep_stop=request.keep_stop,
            min_tokens=0 if request.grammar is not None else request.min_tokens,
            silent=request.silent_tokens,
        )

    def decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        detokenizer: Detokenizer = detokenizer_of(self._tokenizer)
        return detokenizer

    def _new_detokenizer(self) -> Detokenizer:
        detokenizer: Detokenizer = copy(self._detokenizer)
        detokenizer.reset()
        return detokenizer


def text_of(tokenizer: Any) -> TokensOnly:
    """Return the decoding for mlx-lm's tokenizer wrapper; if it is None, answers have no text."""
    return TokensOnly() if tokenizer is None else TextDecoding(tokenizer)
