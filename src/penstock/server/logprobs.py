"""Log-probabilities of tokens in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.request import Token

MOST_TEXTS = 65_536
"""Limit of tokens with a remembered text."""


class Logprobs:
    """Writer of tokens' texts and log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the text of one token, by itself."""
        text = self._texts.get(token)
        if text is None:
            text = str(self._tokenizer.decode([token]))
            if len(self._texts) >= MOST_TEXTS:
                self._texts.clear()
            self._texts[token] = text
        return text

    def chat(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """Return the `content` of a chat choice's logprobs."""
        return [
            {
                **self._one(token.token, token.logprob),
                "top_logprobs": [self._one(other, value) for other, value in token.top],
            }
            for token in tokens
        ]

    def completion(self, tokens: Sequence[Token], offset: int = 0) -> dict[str, Any]:
        """Return the logprobs of a completion's choice; joined, its tokens are its text.

        Args:
            tokens: of this choice, or of this chunk of it.
            offset: characters of the text before them.
        """
        texts = [token.text for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self.text(other): value for other, value in token.top} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _one(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.text(token)
        # A part of a character has no text of its own, and its bytes are not known here.
        known = "\ufffd" not in text
        return {
            "token": text,
            "logprob": value,
            "bytes": list(text.encode(errors="replace")) if known else None,
        }
