"""The remote tier under the engine and beside a folder: text never changes.

What a real store does is tested by `make test-scale`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cold_engine import BLOCK, SOON, ask, files, running, said, settle, ssd, submit
from core_parts import evict_all
from engine_faults import VOCABULARY_TOKENS
from objects_in_memory import InMemory
from spilled_engine import SPILLED, prompt, spilling_of

from penstock.engine.core import Core
from penstock.engine.schedule import restoring as restoring_module
from penstock.plugins.remote import remote_tier
from penstock.plugins.remote.remote_store import COPIES, SEEN_KEY_BYTES, SEEN_KEYS
from penstock.tiers.store import READERS
from penstock.tiers.worker import TierStats

PROMPT = tuple((7 * i + 3) % VOCABULARY_TOKENS for i in range(200))
WHOLE = 12 * BLOCK
FAMILIES = ("llama", "gemma2", "falcon_h1")


@pytest.fixture(autouse=True)
def values(patient: None, monkeypatch: pytest.MonkeyPatch) -> InMemory:
    """Return the in-memory store that every URL refers to."""
    made = InMemory()
    monkeypatch.setattr(remote_tier, "check_url", lambda url: None)
    monkeypatch.setattr(remote_tier, "open_objects", lambda url, **settings: made)
    return made


def shared(folder: Path | None = None, family: str = "llama", **settings: Any) -> Any:
    given = {"remote_cache": "redis://somewhere", "remote_cache_timeout_seconds": 2 * SOON}
    return running(folder, family, **{**given, **settings})


def alone(family: str = "llama") -> tuple[int, ...]:
    with running(None, family) as core:
        return ask(core, PROMPT)


def remote(core: Core) -> TierStats:
    return core.view.stats().tiers["remote"]


@pytest.mark.parametrize("family", FAMILIES)
def test_second_engine_restores_blocks_of_first(family: str) -> None:
    expected = alone(family)
    with shared(family=family) as core:
        assert ask(core, PROMPT) == expected
    with shared(family=family) as core:
        assert ask(core, PROMPT) == expected
        assert core.view.stats().restored_tokens == WHOLE
        assert list(core.view.stats().tiers) == ["remote"]


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_missing_in_one_tier_are_restored_from_other(
    values: InMemory, family: str, tmp_path: Path
) -> None:
    expected = alone(family)
    with shared(tmp_path / "a", family) as core:
        assert ask(core, PROMPT) == expected
    assert len(files(tmp_path / "a")) == len(values.values) >= 12
    with shared(tmp_path / "b", family) as core:
        for _ in range(2):
            assert ask(core, PROMPT) == expected
        assert remote(core).counts.read_blocks >= 12
    values.values.clear()
    with shared(tmp_path / "b", family) as core:
        for _ in range(2):
            assert ask(core, PROMPT) == expected
        assert core.view.stats().restored_tokens == WHOLE
        assert remote(core).counts.read_blocks == 0
    with shared(family=family) as core:
        assert ask(core, PROMPT) == expected
        assert core.view.stats().restored_tokens == WHOLE, "what was lost came back from the folder"


def spoil(path: Path) -> None:
    """Change bytes of a record in a way that reading a part does not detect."""
    raw = bytearray(path.read_bytes())
    raw[3_000::100] = bytes(255 - byte for byte in raw[3_000::100])
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [Path.unlink, spoil])
def test_spilled_blocks_lost_in_one_tier_are_read_from_other(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    """Both selected blocks and those streamed for a first token."""
    asked, settings = prompt(897), {**SPILLED, "record_tokens": 64}
    with running(None, **{**settings, "active_kv_size": None}) as core:
        expected = ask(core, asked, max_tokens=40)
    with shared(tmp_path, **settings) as core:
        blocks = spilling_of(core).blocks
        for _ in range(2):
            assert ask(core, asked, max_tokens=40) == expected
            for path in files(tmp_path):
                harm(path)
            blocks.forget_cached()
            streamed = blocks.counts.streamed_blocks
        assert ask(core, asked, max_tokens=40) == expected
        assert blocks.counts.streamed_blocks > streamed
        assert blocks.counts.lost_blocks == core.view.stats().preemptions == 0
        damage = ssd(core).counts
        assert damage.damaged_blocks + damage.missing_blocks > 0


def test_fastest_tier_is_read(tmp_path: Path) -> None:
    with shared(tmp_path) as core:
        ask(core, PROMPT)
        assert core.tiers is not None
        tiers = core.tiers.tiers
        for slow, quick in (("disk", "remote"), ("remote", "disk")):
            tiers[slow].read_rate.seconds = lambda nbytes: 2e-9 * nbytes  # type: ignore[method-assign]
            tiers[quick].read_rate.seconds = lambda nbytes: 1e-9 * nbytes  # type: ignore[method-assign]
            found = dict.fromkeys(tiers.values(), 12)
            assert core.tiers.fastest(found, 0) == (tiers[quick], 12)
            assert core.tiers.fastest({**found, tiers[slow]: 13}, 0) == (tiers[slow], 13)
            assert core.tiers.fastest(found, 12) is None


def test_hanging_store_does_not_block_folder_hits(values: InMemory, tmp_path: Path) -> None:
    expected = alone()
    with shared(tmp_path) as core:
        ask(core, PROMPT)
    with shared(tmp_path) as core:
        settle(core)
        values.go.clear()
        longer = (*PROMPT, *PROMPT[:40])  # of which the folder has not all
        for asked in (PROMPT, longer):
            evict_all(core)
            began = time.monotonic()
            handle = submit(core, asked)
            while not handle.ends:
                core.step()
            assert time.monotonic() - began < SOON / 2, "it was not waited for"
            if asked == PROMPT:
                assert said(handle) == expected
        assert core.view.stats().restored_tokens == 2 * WHOLE
        assert ssd(core).off is None
        values.go.set()


def test_hanging_store_is_awaited_once_then_switched_off(
    values: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring_module, "ASK_SECONDS", 0.3)
    expected = alone()
    with shared(remote_cache_timeout_seconds=0.2) as core:
        settle(core)
        values.seconds = 0.5
        took = []
        for _ in range(4):
            evict_all(core)
            began = time.monotonic()
            assert ask(core, PROMPT) == expected
            took.append(time.monotonic() - began)
        assert "0.2 s" in str(remote(core).off)
        assert remote(core).faults == 1
        asked = len(values.asked)
        ask(core, PROMPT[::-1])
        assert len(values.asked) == asked, "while it is off nothing is asked"
        values.seconds = 0.0


def test_remote_buffers_are_in_ledger() -> None:
    with shared() as core:
        assert core.tiers is not None
        pieces = READERS * COPIES * core.tiers.tiers["remote"]._most_record_bytes
        assert core.tiers.nbytes > pieces + SEEN_KEYS * SEEN_KEY_BYTES
        core.view.check()  # of which that is a part
        with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.tiers.tiers["remote"]._buffers, "nbytes", 0)
            core.view.check()


def test_clear_keeps_remote_blocks(values: InMemory) -> None:
    with shared() as core:
        ask(core, PROMPT)
        core.clear()
        settle(core)
        assert len(values.values) == 207 // BLOCK


def test_explain_mentions_both_tiers(tmp_path: Path) -> None:
    with shared(tmp_path) as core:
        ask(core, PROMPT)
        evict_all(core)
        found = core.view.explain(PROMPT, ask_tiers=True)
        assert found.tier_tokens == WHOLE
        assert "192 tokens are on the disk or in the remote cache" in found.reason
