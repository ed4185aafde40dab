"""Run an engine without a thread, and check its ledger after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request


def ask(core: Core, prompt: Sequence[int], tokens: int = 8, **more: Any) -> Handle:
    return core.submit(Request(prompt=tuple(prompt), max_tokens=tokens, **more))


def recount(core: Core) -> None:
    core.view.check()
    stats = core.view.stats()
    assert stats.held_bytes <= stats.used_bytes <= stats.limit_bytes


def drain(core: Core, steps: int | None = None) -> None:
    """Run to the end, or for some steps, with a recount after every step."""
    while steps != 0 and core.step():
        recount(core)
        steps = None if steps is None else steps - 1


def answer(handle: Handle, choice: int = 0) -> list[int]:
    return handle.result(timeout_seconds=0)[choice].tokens


def cached(handle: Handle) -> int:
    """Return the number of cached prompt tokens of the first answer."""
    finish = handle.result(timeout_seconds=0)[0].finish
    assert finish is not None
    return finish.usage.cached_tokens
