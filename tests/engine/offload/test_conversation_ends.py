"""Conversation ends are delayed before they are written: few records, nothing lost."""

from __future__ import annotations

import functools
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cold_engine import SAID, SOON, files, running, said, settle, submit
from combinations import pairs
from core_parts import evict_all
from engine_faults import model_of
from safetensors import SafetensorError, safe_open
from tiny_families import VOCABULARY_TOKENS, build

from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.offload import conversation_ends as ends_module
from penstock.engine.offload.conversation_ends import ConversationEnds
from penstock.engine.request import Request
from penstock.kv import block_spans
from penstock.tiers.record import TOKENS

SCALE = 4
"""Everything is a fourth as long as it is by default."""
LARGE = 256 // SCALE
RECORD = block_spans.RECORD_TOKENS // SCALE
HYBRIDS = ("falcon_h1", "mamba2")


@pytest.fixture(autouse=True)
def conversation_ends_wait(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends_module, "LINGER_SECONDS", 1e9)
    monkeypatch.setattr(ends_module, "LAPSE_TOKENS", ends_module.LAPSE_TOKENS // SCALE)


@functools.cache
def model(family: str) -> Any:
    return build(family) if family == "mamba2" else model_of(family)


def engine(folder: Path, family: str, block: int, record_tokens: int = RECORD) -> Any:
    settings = {"block_size": block, "prefill_chunk": 512 // SCALE, "max_kv_size": 2_048}
    return running(folder, family, model(family), record_tokens=record_tokens, **settings)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY_TOKENS) for _ in range(count))


def ask(core: Core, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the answer once all offered blocks are written; conversation ends stay queued."""
    handle = submit(core, prompt)
    assert core.tiers is not None
    while core.step() or core.tiers.tiers["disk"].tier.is_busy:
        core.view.check()
    return said(handle)


def agents(core: Core, turns: int = 3) -> list[tuple[int, ...]]:
    """Run four conversations with a common beginning in turn; return them."""
    shared = tokens(375, 0)
    talks = [(*shared, *tokens(25, 1 + number)) for number in range(4)]
    for turn in range(turns):
        for number, talk in enumerate(talks):
            talks[number] = (*talk, *ask(core, talk), *tokens(50, 10 * turn + number + 10))
    return [talk[:-50] for talk in talks]


def alone(core: Core) -> list[tuple[int, ...]]:
    """Run one conversation of four turns; return it."""
    talk = tokens(375, 0)
    for turn in range(4):
        talk = (*talk, *ask(core, talk), *tokens(150, turn + 1))
    return [talk[:-150]]


def written(core: Core) -> int:
    return core.view.stats().tiers["disk"].counts.written_blocks


def stored_tokens(folder: Path) -> int:
    """Return the number of tokens in all records of a folder."""
    count = 0
    for path in files(folder):
        with safe_open(path, "numpy") as record, suppress(SafetensorError):  # states have none
            count += len(record.get_tensor(TOKENS))
    return count


def measured(folder: Path, family: str, block: int, record_tokens: int = RECORD) -> float:
    """Return what the worse of two workloads writes, in records of blocks of `LARGE` tokens.

    Of those there is one for every `LARGE` tokens, and of a hybrid one for every turn's states.
    """
    shares = []
    for work, turns in ((alone, 4), (agents, 12)):
        place = folder / work.__name__
        with engine(place, family, block, record_tokens) as core:
            work(core)
            settle(core)
            records = written(core)
        most = stored_tokens(place) / LARGE + turns * (family in HYBRIDS)
        assert len(files(place)) <= records
        shares.append(records / most)
    return max(shares)


@pytest.mark.parametrize(
    "family, block", pairs(["llama", "gemma2", "falcon_h1", "mamba2"], [4, 8, 16])
)
def test_writes_per_token_do_not_grow_for_small_blocks(
    family: str, block: int, tmp_path: Path
) -> None:
    assert measured(tmp_path, family, block) <= 1.0


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_check_detects_ends_written_without_delay(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_module, "LINGER_SECONDS", 0.0)
    assert measured(tmp_path, family, 8) > 1.0


def test_check_detects_too_small_records(tmp_path: Path) -> None:
    assert measured(tmp_path, "llama", 8, LARGE) > 1.0


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "mamba2"])
def test_conversations_resume_near_their_end_after_restart(family: str, tmp_path: Path) -> None:
    with engine(tmp_path, family, 8) as core:
        talks = agents(core)
    with engine(tmp_path, family, 8) as core:
        for number, talk in enumerate(talks):
            before = core.view.stats().prefilled_tokens
            ask(core, (*talk, *tokens(20, 90 + number)))
            computed = core.view.stats().prefilled_tokens - before
            answer = SAID if family in HYBRIDS else 0  # its states are those in front of it
            assert computed <= 20 + 8 + answer


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
@pytest.mark.parametrize("saved", [True, False])
def test_conversation_ends_are_written_before_eviction(
    family: str, saved: bool, tmp_path: Path
) -> None:
    talk = tokens(150, 3)
    with engine(tmp_path, family, 8) as core:
        if not saved:
            core.prefixes._beside.evicting.clear()
        turn = (*talk, *ask(core, talk), *tokens(9, 4))
        before = written(core)
        evict_all(core)
        settle(core)
        assert written(core) - before == saved * (4 if family in HYBRIDS else 1)
    with engine(tmp_path, family, 8) as core:
        ask(core, turn)
        assert (core.view.stats().restored_tokens >= 144) == saved


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_clear_drops_queued_conversation_ends(family: str, tmp_path: Path) -> None:
    with engine(tmp_path, family, 8) as core:
        ask(core, tokens(150, 3))
        before = core.view.stats().tiers["disk"]
        core.clear()
        after = core.view.stats().tiers["disk"]
        assert after.queued_bytes == 0 and after.dropped_blocks == before.dropped_blocks
        settle(core)
        assert written(core) == before.counts.written_blocks and not files(tmp_path)


def test_idle_engine_writes_due_conversation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_module, "LINGER_SECONDS", 1.0)
    settings = {"memory_limit": "200MB", "block_size": 8, "max_kv_size": 1_024}
    with Engine(model("llama"), ssd_cache_dir=tmp_path, ssd_cache_limit="1GB", **settings) as made:
        made.ask(lambda view: None).result(SOON)
        made._core.prefill_rate.prefill_seconds = lambda count: 1.0 * count  # type: ignore[method-assign]
        made.submit(Request(prompt=tokens(150, 3), max_tokens=2)).result(SOON)
        until = time.monotonic() + 20.0
        while not files(tmp_path) and time.monotonic() < until:
            time.sleep(0.05)
        assert len(files(tmp_path)) == 1


# ---- the list of ends alone


def ends(max_ends: int = 10) -> tuple[ConversationEnds, list[float]]:
    now = [0.0]
    return ConversationEnds(8, max_ends, lambda: now[0]), now


def chain(blocks: int, first: bytes = b"") -> list[bytes]:
    return [first + bytes([number]) for number in range(blocks)]


def test_conversation_end_replaces_queued_ends_of_its_prefixes() -> None:
    lingering, _ = ends()
    assert not lingering.add(chain(3), b"") and not lingering.add(chain(3), b"")
    assert not lingering.add(chain(4), b"", answered=True), "of one turn both stay"
    assert not lingering.add(chain(4, b"other"), b"")
    assert [len(end.block_hashes) for end in lingering] == [3, 4, 4]
    assert not lingering.add(chain(6), b"")
    assert [len(end.block_hashes) for end in lingering] == [4, 6]


def test_requested_end_is_not_replaced_by_longer_conversation() -> None:
    lingering, _ = ends()
    lingering.add(chain(3), b"", requested=True)
    lingering.add(chain(5), b"")
    assert [len(end.block_hashes) for end in lingering.take_all()] == [5, 3], "the longest first"
    lingering.add(chain(3), b"", requested=True)
    lingering.drop_passed(chain(4))
    assert not list(lingering)


def test_end_is_written_after_2048_unwritten_tokens() -> None:
    lingering, _ = ends()
    far = ends_module.LAPSE_TOKENS // 8
    lengths = [10, 12, 10 + far, 13 + far, 9 + 2 * far, 13 + 2 * far]
    due = [lingering.add(chain_of(blocks), b"") for blocks in lengths]
    assert [[len(end.block_hashes) for end in some] for some in due] == [
        [], [], [], [10 + far], [], [9 + 2 * far]
    ]  # fmt: skip


def chain_of(blocks: int) -> list[bytes]:
    return [number.to_bytes(2, "big") for number in range(blocks)]


def test_conversation_ends_are_due_by_age_or_count() -> None:
    lingering, now = ends(max_ends=2)
    assert not lingering.add(chain(1), b"")
    now[0] = 5.0
    assert not lingering.add(chain(1, b"b"), b"")
    (oldest,) = lingering.add(chain(1, b"c"), b"")
    assert oldest.block_hashes == tuple(chain(1))
    few = ConversationEnds(8, 10, lambda: 0.0, max_blocks=5)
    assert not few.add(chain(3), b"") and len(few.add(chain(3, b"b"), b"")) == 1
    now[0] += ends_module.LINGER_SECONDS
    assert len(lingering.take_due()) == 2 and not list(lingering)
