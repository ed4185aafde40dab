"""An engine with a cache folder, for tests of disk faults.

Run as a script it is one of several processes that share a folder, until it is killed:
`cold_setup.py FOLDER SEED ROUNDS`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cold_engine
import pytest
from blocks_on_disk import size_of
from cold_engine import BLOCK, SAID, files, ssd
from core_parts import evict_all
from fault_setup import prompt_of, solo

from penstock.engine.core import Core
from penstock.tiers.disk import SSDStore
from penstock.tiers.record import FORMAT
from penstock.tiers.worker import ColdTier

BLOCKS = 40
PROMPT = prompt_of(BLOCKS * BLOCK + 10)
"""A long conversation: its whole blocks are read back; its answer fills one more."""
SMALL_LIMIT = 8_000_000 + 600_000
"""Room for some 60 blocks beside the index."""


@contextmanager
def running(folder: Path | None, **settings: Any) -> Iterator[Core]:
    """Run a core that soon retries a failed folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ColdTier.__init__.__kwdefaults__, "retry_seconds", 0.05)
        with cold_engine.running(folder, **{"prefill_chunk": 128, **settings}) as core:
            yield core


def ask(core: Core, tokens: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return cold_engine.ask(core, tokens)


def assert_right(core: Core, tokens: Sequence[int] = PROMPT) -> int:
    """Check that the answer matches plain mlx-lm; return the restored tokens."""
    before = core.view.stats().restored_tokens
    assert ask(core, tokens) == solo(tuple(tokens), SAID)
    return core.view.stats().restored_tokens - before


def assert_in_order(folder: Path, limit_bytes: int) -> None:
    """Check that index and files agree, and no files of killed processes remain."""
    assert size_of(folder) <= limit_bytes
    store = SSDStore(folder, limit_bytes, fingerprint="nobody's")
    try:
        store.reconcile()
        found = {path.name.partition(".")[0]: path.stat().st_size for path in files(folder)}
        assert {entry.key.hex(): entry.nbytes for entry in store.index.entries()} == found
        assert store.nbytes == sum(found.values()) <= store.payload_bytes
        assert all(entry.owner is None for entry in store.index.entries())
        assert list((folder / FORMAT / "aside").iterdir()) == []
    finally:
        store.close()


# ---- many prompts that have much in common


def family(count: int = 12) -> list[tuple[int, ...]]:
    """Return prompts of up to 14 blocks: four prefixes with several ends each."""
    begins = [prompt_of(8 * BLOCK, seed) for seed in range(4)]
    return [begins[i % 4] + prompt_of(2 * BLOCK * (i % 3) + 5, 50 + i) for i in range(count)]


def serve(folder: Path, seed: int, rounds: int, limit: int = SMALL_LIMIT) -> None:
    """Answer prompts in random order and compare them; print the counts."""
    dice = random.Random(seed)
    prompts = family()
    with running(folder, ssd_cache_limit=limit) as core:
        for number in range(rounds):
            for prompt in dice.sample(prompts, 3):
                assert_right(core, prompt)
            evict_all(core)
            print(number, flush=True)
        assert ssd(core).counts.damaged_blocks == 0
        print("written", ssd(core).counts.written_blocks, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
