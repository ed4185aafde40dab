"""`EngineClient`: the interface of the engine that the server uses.

The server receives an engine and imports none; a remote engine needs only these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from penstock.config import EngineSettings
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.stats import Cleared, Stats
from penstock.models.image_reader import ImageReader
from penstock.prefix.explanation import Explanation
from penstock.prefix.node import NodeView

T = TypeVar("T")


class EngineState(Protocol):
    @property
    def limits(self) -> EngineSettings: ...
    @property
    def context_tokens(self) -> int | None:
        """Context length of the model; None if its configuration has none."""

    @property
    def fitting_tokens(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    def salted(self, salt: str, adapter: str | None) -> str: ...
    def held_tokens(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def tree(self) -> list[NodeView]: ...
    def stats(self) -> Stats: ...
    def waiting_by_client(self) -> dict[str | int, int]: ...

    def explain(
        self, tokens: Sequence[int], salt: str = "", *, ask_tiers: bool = False
    ) -> Explanation: ...


class EngineClient(Protocol):
    @property
    def alive(self) -> bool: ...
    @property
    def hangs(self) -> bool: ...
    @property
    def image_reader(self) -> ImageReader | None:
        """Reader of images; None for a text-only model."""

    def open(self, request: Request) -> Handle: ...

    def enqueue(self, handles: Sequence[Handle]) -> Future[Explanation | None]:
        """Enqueue the requests of all handles or of none. Does not block."""

    def ask(self, question: Callable[[EngineState], T]) -> Future[T]: ...
    def drain(self, timeout_seconds: float) -> bool: ...
    def clear(self) -> Cleared: ...

    def set_aside_prompts(self, nbytes: int) -> int:
        """Reserve up to `nbytes` for the server's prompts; return the bytes reserved."""
