"""Log-probabilities of tokens in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.request import Token
from penstock.server.prompts import Prompts

MOST_TEXTS = 65_536
"""Limit of tokens with a remembered text."""


class Logprobs:
    """Writer of tokens' texts and log-probabilities.

    Args:
        prompts: knows the tokenizer.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the text of one token, by itself."""
        text = self._texts.get(token)
        if text is None:
            text = self._prompts.decode([token])
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
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def echoed(self, scores: PromptLogprobs, top: int) -> list[Token]:
        """Return the tokens of a prompt in the form of an answer's. Slow for long prompts.

        Args:
            scores: those of the prompt.
            top: likeliest tokens beside each.
        """
        texts = self._prompts.token_texts(scores.tokens)
        return [
            Token(0, one.token, text, one.logprob, one.top[:top])
            for one, text in zip(scores, texts, strict=True)
        ]

    def prompt(self, scores: PromptLogprobs, top: int | None = None) -> list[Any]:
        """Return the `prompt_logprobs` of vLLM: None for the first token. Slow for long prompts.

        Args:
            scores: those of the prompt.
            top: likeliest tokens beside each; by default all that there are.
        """
        written: list[Any] = []
        for one in scores:
            if one.logprob is None:
                written.append(None)
                continue
            ranked = [(one.token, one.logprob, one.rank)]
            likely = one.top if top is None else one.top[:top]
            ranked += [(token, value, rank) for rank, (token, value) in enumerate(likely, 1)]
            written.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self.text(token)}
                    for token, value, rank in ranked
                }
            )
        return written

    def _top(self, token: Token) -> dict[str, float] | None:
        """Return the likeliest tokens by their text; the first of those with the same text."""
        if token.logprob is None:
            return None
        values: dict[str, float] = {}
        for other, value in token.top:
            values.setdefault(self.text(other), value)
        return values

    def _one(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.text(token)
        # A part of a character has no text of its own, and its bytes are not known here.
        known = "\ufffd" not in text
        return {
            "token": text,
            "logprob": value,
            "bytes": list(text.encode(errors="replace")) if known else None,
        }
