"""Known prefill rates in place of measured ones."""

from __future__ import annotations


class TokenASecond:
    """Every token of every prompt takes a second."""

    def chunk_seconds(self, tokens: int, start: int) -> float:
        return tokens

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        return min(int(seconds), most)

    tokens_to_try = tokens_within

    def tokens_worth(self, start: int) -> int:
        return 0
