"""Figures of recent requests, and their listeners."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(slots=True)
class Recent:
    """Figures of a request, without its text."""

    id: str
    label: str
    started: float
    state: str = "waiting"
    """`waiting`, `running`, and at the end `done`, `failed` or `cancelled`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    seconds: float | None = None
    finish: str | None = None
    explanation: dict[str, Any] | None = None
    """Explanation of the prompt's match on arrival, as `Explanation`."""

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second after the first."""
        if self.first_token_seconds is None or self.seconds is None:
            return None
        took = self.seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / took if took > 0 else None

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


class Listener(Protocol):
    def first_token(self, seconds: float) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def ended(self, recent: Recent) -> None: ...
