"""An engine with a cache folder that writes every block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_faults import model_of
from patience import SOON

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.kv import block_spans
from penstock.tiers.worker import TierStats

BLOCK = 16
SAID = 8
"""Tokens of an answer."""
SETTINGS: dict[str, Any] = {
    "memory_limit": "200MB",
    "block_size": BLOCK,
    "prefill_chunk": 64,
    "max_batch_size": 4,
    "max_kv_size": 1_024,
    "ssd_cache_limit": "1GB",
}


@contextmanager
def running(
    folder: Path | None,
    family: str = "llama",
    model: Any = None,
    *,
    record_tokens: int = BLOCK,
    **settings: Any,
) -> Iterator[Core]:
    """Run a core of a model or of a small family; check its ledger at the end.

    Its records hold a block each, or more with `record_tokens`: as many as 8 in an engine.
    """
    model = model_of(family) if model is None else model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_spans, "SPAN_TOKENS", record_tokens)
        patch.setattr(block_spans, "RECORD_TOKENS", record_tokens)
        core = Core(model, ssd_cache_dir=folder, **{**SETTINGS, **settings})
    if core.tiers is not None:
        core.prefill_rate.prefill_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    try:
        yield core
        settle(core)
        core.view.check()
    finally:
        core.close()
        core.view.check()


def settle(core: Core) -> None:
    """Run the core and the disk until idle."""
    while core.step():
        core.view.check()
        assert core.ledger.used_bytes <= core.ledger.limit_bytes
    if core.tiers is not None:
        assert core.tiers.flush(SOON)


def submit(core: Core, tokens: Sequence[int], **more: Any) -> Handle:
    asked = {"max_tokens": SAID, "ignore_eos": True, **more}
    return core.submit(Request(prompt=tuple(tokens), **asked))


def said(handle: Handle) -> tuple[int, ...]:
    (found,) = handle.result(0.0)
    assert found.finish is not None and found.finish.reason == "length", found
    return tuple(found.tokens)


def ask(core: Core, tokens: Sequence[int], **more: Any) -> tuple[int, ...]:
    """Return the answer once all pending blocks are written."""
    handle = submit(core, tokens, **more)
    settle(core)
    return said(handle)


def ssd(core: Core) -> TierStats:
    return core.view.stats().tiers["disk"]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))
