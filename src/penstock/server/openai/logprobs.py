"""Log-probabilities in the formats of OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.request import Token
from penstock.server.prompts import Prompts

MOST_TEXTS = 65_536


class Logprobs:
    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._prompts.decode([token])
            if len(self._texts) >= MOST_TEXTS:
                self._texts.clear()
            self._texts[token] = text
        return text

    def chat(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return [
            {
                **self._one(token.token, token.logprob),
                "top_logprobs": [self._one(other, value) for other, value in token.top],
            }
            for token in tokens
        ]

    def completion(self, tokens: Sequence[Token], offset: int = 0) -> dict[str, Any]:
        """Return the `logprobs` of a choice or chunk that starts at character `offset`."""
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
        """Return a prompt's tokens for an echo, each with `top` alternatives. Blocking."""
        texts = self._prompts.token_texts(scores.tokens)
        return [
            Token(0, score.token, text, score.logprob, score.top[:top])
            for score, text in zip(scores, texts, strict=True)
        ]

    def prompt(self, scores: PromptLogprobs, top: int | None = None) -> list[Any]:
        """Return vLLM's `prompt_logprobs`, which is None for the first token. Blocking."""
        written: list[Any] = []
        for score in scores:
            if score.logprob is None:
                written.append(None)
                continue
            ranked = [(score.token, score.logprob, score.rank)]
            likely = score.top if top is None else score.top[:top]
            ranked += [(token, value, rank) for rank, (token, value) in enumerate(likely, 1)]
            written.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self.text(token)}
                    for token, value, rank in ranked
                }
            )
        return written

    def _top(self, token: Token) -> dict[str, float] | None:
        """Return the likeliest tokens by text; for equal texts, the likeliest token counts."""
        if token.logprob is None:
            return None
        values: dict[str, float] = {}
        for other, value in token.top:
            values.setdefault(self.text(other), value)
        return values

    def _one(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.text(token)
        encoded: bytes | None = text.encode(errors="replace")
        if "\ufffd" in text:  # a part of a character has no text of its own
            encoded = self._prompts.token_bytes(token)
        return {
            "token": text,
            "logprob": value,
            "bytes": None if encoded is None else list(encoded),
        }
