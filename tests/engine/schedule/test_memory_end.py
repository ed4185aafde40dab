"""Answers that end at the memory limit reach at least the announced length."""

from __future__ import annotations

import random

import cold_engine
import pytest
from combinations import SOAK
from core_parts import evict_all, fixed_bytes_of
from spilled_engine import prompt, single_layer

from penstock.engine.core import Core
from penstock.errors import NeverFits

ROUNDS = 60 if SOAK else 2
MOST_NEW = 150


def generated(core: Core, asked: tuple[int, ...]) -> int:
    """Return the tokens of an answer that ends with "length"."""
    handle = cold_engine.submit(core, asked, max_tokens=MOST_NEW)
    while core.step():
        assert core.ledger.used_bytes <= core.ledger.limit_bytes
    return len(cold_engine.said(handle))


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("max_kv_size", [64, 1_024])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_answer_ends_with_length_at_promised_tokens(
    block_size: int, max_kv_size: int, chunk: int
) -> None:
    """Alone, and beside other nodes that share some first tokens."""
    draw = random.Random(f"{block_size} {max_kv_size} {chunk}")
    settings = {"block_size": block_size, "max_kv_size": max_kv_size, "prefill_chunk": chunk}
    with cold_engine.running(None, model=single_layer(), max_batch_size=1, **settings) as core:
        cut = 0
        for _ in range(ROUNDS):
            asked = prompt(draw.randrange(5, 120), draw.randrange(99))
            shared = draw.randrange(len(asked) + 1)
            older = asked[:shared] + prompt(draw.randrange(1, 150), 1)
            needed = core.view.sequence_bytes(len(asked) + draw.randrange(1, 60))
            limit = fixed_bytes_of(core) + needed.per_sequence + needed.shared
            limit += int(core.view.token_bytes * draw.uniform(0, 20))
            for others in ((), (older,)):
                core.set_limit(200_000_000)
                evict_all(core)
                for other in others:
                    cold_engine.ask(core, other, max_tokens=draw.choice([1, 5, 30]))
                core.set_limit(limit)
                most = core.view.fitting_tokens - len(asked)
                try:
                    tokens = generated(core, asked)
                except NeverFits:
                    assert most < 1
                    continue
                assert min(MOST_NEW, most) <= tokens <= MOST_NEW
                cut += tokens < MOST_NEW
        core.set_limit(200_000_000)
    assert cut or max_kv_size == 64, "a negative control: some end for want of memory"
