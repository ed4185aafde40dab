"""Figures of single requests: one entry for each of the last ones, and their observers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(slots=True)
class Recent:
    """Figures remembered of a request, without its text."""

    id: str
    label: str
    """Path of the request, as "/v1/chat/completions"."""
    started: float
    """Start of the request, in seconds since 1970."""
    state: str = "waiting"
    """State: `waiting`, `running`, and at the end `done`, `failed` or `cancelled`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    """Seconds from the request to its first token."""
    seconds: float | None = None
    """Seconds from the request to its end."""
    finish: str | None = None
    """Reason of the end."""
    explanation: dict[str, Any] | None = None
    """Explanation of the prompt's match on arrival, in the form of `Explanation`."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all its answers after the first one, by the time they took."""
        if self.first_token_seconds is None or self.seconds is None:
            return None
        took = self.seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / took if took > 0 else None

    def record(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


class Listener(Protocol):
    """Observer of requests' times; called in the event loop, it must be quick."""

    def first_token(self, seconds: float) -> None:
        """Note a request's first token, `seconds` after its arrival."""

    def next_token(self, seconds: float) -> None:
        """Note another token of an answer, `seconds` after the one before."""

    def ended(self, recent: Recent) -> None:
        """Note the end of a request."""
