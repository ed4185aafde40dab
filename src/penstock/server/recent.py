"""Statistics of recent requests, and the interface of their listeners."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

TRACED = ("traceparent", "phases")
"""Fields used only for traces."""


@dataclass(slots=True)
class Recent:
    id: str
    label: str
    started: float
    state: str = "waiting"
    """State: `waiting`, `running`, and finally `done`, `failed` or `cancelled`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    seconds: float | None = None
    finish: str | None = None
    explanation: dict[str, Any] | None = None
    """Fields of the `Explanation` of the prompt's cache match on arrival."""
    request_id: str = ""
    """The response's `x-request-id`."""
    traceparent: str = ""
    """Header `traceparent` of the request; empty if it has none."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    """States of the first answer, each with the `time.time` at which it was entered."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens generated per second after the first token; None until the request has ended."""
        if self.first_token_seconds is None or self.seconds is None:
            return None
        took = self.seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / took if took > 0 else None

    def record(self) -> dict[str, Any]:
        """Return the statistics shown by `/v1/live` and by the status page."""
        shown = {name: value for name, value in asdict(self).items() if name not in TRACED}
        return {**shown, "tokens_per_second": self.tokens_per_second}


class Listener(Protocol):
    def first_token(self, seconds: float) -> None: ...
    def next_token(self, seconds: float) -> None: ...
    def ended(self, recent: Recent) -> None: ...
