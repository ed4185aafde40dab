"""Cores of tiny models that are checked at every step, and their answers."""

from __future__ import annotations

from typing import Any

import tiny_families

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request

SMALL: dict[str, Any] = {
    "block_size": 16,
    "prefill_chunk": 64,
    "max_kv_size": 1_024,
    "memory_limit": "200MB",
}


def core_of(kind: str, **settings: Any) -> Core:
    with tiny_families.uncompiled():
        return Core(tiny_families.build(kind), **{**SMALL, **settings})


def run(core: Core, *handles: Handle) -> list[tuple[int, ...]]:
    while core.step():
        core.view.check()
    return [handle.result(0.0)[0].tokens for handle in handles]


def ask(core: Core, prompt: tuple[int, ...], tokens: int = 12, **more: Any) -> tuple[int, ...]:
    request = Request(prompt=prompt, max_tokens=tokens, ignore_eos=True, **more)
    return tuple(run(core, core.submit(request))[0])
