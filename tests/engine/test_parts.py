"""Small blocks cause no more spans or checkpoints than large ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean
from typing import Any

import pytest
from core_parts import cached_nodes, weights_bytes_of
from engine_faults import model_of

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.core import Core
from penstock.engine.fixed_memory import POOL_SHARE
from penstock.engine.model.runner import Runner
from penstock.engine.request import Request

AGENTS, TURNS, SYSTEM_TOKENS = 4, 3, 1_500
PARTS_OF_LARGE_BLOCKS = 5.24
"""Parts that a sequence read in a step, tail included, with blocks of 256 tokens, when nodes were
merged by the binary counter alone; with blocks of 32 it was 6.23."""


def conversations(core: Core) -> None:
    """Run concurrent conversations of agents that share a system prompt."""
    draw = random.Random(0)

    def words(least: int, most: int) -> list[int]:
        return [draw.randrange(512) for _ in range(draw.randrange(least, most))]

    system = [draw.randrange(512) for _ in range(SYSTEM_TOKENS)]
    talks = [system + words(60, 120) for _ in range(AGENTS)]
    for _ in range(TURNS):
        handles = [
            core.submit(
                Request(prompt=tuple(talk), max_tokens=draw.randrange(60, 140), ignore_eos=True)
            )
            for talk in talks
        ]
        while core.step():
            pass
        for talk, handle in zip(talks, handles, strict=True):
            talk += [*handle.result(0.0)[0].tokens, *words(30, 80)]


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_small_blocks_do_not_increase_spans_or_checkpoints(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    real = Runner.decode

    def counted(self: Runner, tokens: Any, rows: Sequence[DecodeRow], *more: Any) -> Any:
        parts.extend(len(row.parts) + 1 for row in rows)
        return real(self, tokens, rows, *more)

    settings: dict[str, Any] = {"block_size": 32, "max_kv_size": 4_096, "max_batch_size": AGENTS}
    # A busy machine would end chunks elsewhere.
    core = Core(model_of(family), memory_limit="600MB", max_stall_ms=0, **settings)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "decode", counted)
            conversations(core)
        core.view.check()
        assert mean(parts) < PARTS_OF_LARGE_BLOCKS
        checkpoints = sum(len(node.segment.checkpoints) for node in cached_nodes(core))
        # Of each agent the ends of two turns, the last to the token as well, and of what all share
        # one a span of 256 tokens.
        assert checkpoints <= 3 * AGENTS + 2 * (SYSTEM_TOKENS // 256)
    finally:
        core.close()


@pytest.mark.parametrize(("feed_forward", "columns"), [(128, 8), (16_384, 16)])
def test_tails_are_longer_if_small_relative_to_weights(feed_forward: int, columns: int) -> None:
    """Tails of twice the length are copied half as often."""
    model = model_of("llama", feed_forward=feed_forward)
    core = Core(model, max_batch_size=8, block_size=32, memory_limit="1GB")
    try:
        share = 128 * core.view.token_bytes / weights_bytes_of(core)
        assert (share <= POOL_SHARE) == (columns == 16)
        assert core.tails.columns == columns
    finally:
        core.close()
