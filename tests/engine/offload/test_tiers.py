"""The SSD tier under the engine: blocks are restored and text never changes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cold_engine import BLOCK, SOON, ask, files, running, said, settle, ssd, submit
from core_parts import cached_nodes, evict_all, fixed_bytes_of, hash_prompt

from penstock.engine.core import Core
from penstock.engine.offload import engine_tier as tier_module
from penstock.engine.schedule import restoring as restoring_module
from penstock.errors import SettingError
from penstock.ledger import Kind
from penstock.tiers.disk import SSDStore
from penstock.tiers.disk import disk_store as store_module
from penstock.tiers.disk import index as index_module

pytestmark = pytest.mark.usefixtures("patient")


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(512) for _ in range(tokens))


def cold_text(tokens: Sequence[int], family: str = "llama", **settings: Any) -> tuple[int, ...]:
    """Return the answer of an engine with an empty cache."""
    with running(None, family, **settings) as core:
        return ask(core, tokens)


# ---- right, whatever the way


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_text_is_equal_cold_warm_and_restarted(family: str, tmp_path: Path) -> None:
    asked = prompt(200)
    expected = cold_text(asked, family)
    with running(tmp_path, family) as core:
        assert ask(core, asked) == expected
        assert ask(core, asked) == expected
        assert core.view.stats().hit_tokens == 192
        assert core.view.stats().restored_tokens == 0
    assert len(files(tmp_path)) == 207 // BLOCK
    with running(tmp_path, family) as core:
        assert ask(core, asked) == expected
        stats = core.view.stats()
        assert (stats.restored_tokens, stats.hit_tokens, stats.prefilled_tokens) == (192, 192, 7)
        assert ssd(core).counts.written_blocks == 0, "what is there is not written again"
        assert ask(core, asked) == expected
        assert core.view.stats().restored_tokens == 192, "the second time it is in RAM"


def test_check_detects_wrong_restored_kv(tmp_path: Path) -> None:
    """Negative control: wrong bytes change the text."""
    asked = prompt(200)
    expected = cold_text(asked)
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        buffer = tier_module.RestoreBuffer

        class Wrong(buffer):  # type: ignore[misc, valid-type]
            def segment(self) -> Any:
                found = super().segment()
                layers = tuple((keys * 0.5, values * -1.0) for keys, values in found.layers)
                mx.eval(layers)
                return type(found)(layers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tier_module, "RestoreBuffer", Wrong)
            assert ask(core, asked) != expected


@pytest.mark.parametrize("tokens", [15, 16, 17, 160, 161, 175])
def test_prompt_ending_near_block_boundary_is_restored(tokens: int, tmp_path: Path) -> None:
    asked = prompt(tokens)
    expected = cold_text(asked)
    for _ in range(3):
        with running(tmp_path) as core:
            assert ask(core, asked) == expected
    # The last token is computed in any case; its block is read for those before it.
    assert len(files(tmp_path)) == (tokens + 7) // BLOCK


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_blocks_of_any_size_are_restored(family: str, block_size: int, tmp_path: Path) -> None:
    """A prompt wholly on disk, one that ends inside a block, and the next turn."""
    asked = prompt(42)
    turn = (*asked, *cold_text(asked, family), *prompt(5, 1))
    prompts = (asked, asked[:41], turn)
    expected = [cold_text(tokens, family) for tokens in prompts]
    for restarted in (False, True, True):
        with running(
            tmp_path,
            family,
            block_size=block_size,
            prefill_chunk=16,
            record_tokens=block_size,
        ) as core:
            assert [ask(core, tokens) for tokens in prompts] == expected
            assert core.view.stats().failed == 0
            if restarted:
                whole = [len(tokens) // block_size * block_size for tokens in prompts]
                assert core.view.stats().restored_tokens >= min(whole[0], len(asked) - 1)
                evict_all(core)
                assert ask(core, turn) == expected[-1]


def test_memory_hits_refresh_blocks_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart needs them, so memory hits refresh the blocks on disk."""
    monkeypatch.setattr(index_module, "WORTH_OF_A_HIT", 0.0)  # recency alone
    daily, others = prompt(150), [prompt(150, seed) for seed in range(1, 6)]
    with running(tmp_path) as core:
        ask(core, daily)
    # Room for the daily prompt and two of the others.
    limit = 8_000_000 + 3 * sum(file.stat().st_size for file in files(tmp_path))
    with running(tmp_path, ssd_cache_limit=limit) as core:
        for other in others:
            ask(core, other)
            ask(core, daily)
        assert core.view.stats().restored_tokens == 144, "read once, then it was in RAM"
        assert ssd(core).counts.written_blocks == 5 * 9, "the daily ones never had to go"
    with running(tmp_path, ssd_cache_limit=limit) as core:
        ask(core, daily)
        assert core.view.stats().restored_tokens == 144
        ask(core, others[0])
        assert core.view.stats().restored_tokens == 144, "there was no room for all"


def test_cached_blocks_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[int] = []
    monkeypatch.setattr(store_module, "read_ahead", ahead.append)
    asked = prompt(160)
    with running(tmp_path) as core:
        ask(core, asked[:80])
    with running(tmp_path) as core:
        ask(core, asked[:80])
        assert len(ahead) == 5
        ask(core, asked)
        ask(core, asked)
        assert len(ahead) == 5
        core.view.explain(asked)
        evict_all(core)
        ask(core, asked)
        assert len(ahead) == 5 + 10


def test_evicted_blocks_are_restored(tmp_path: Path) -> None:
    asked = prompt(300)
    expected = cold_text(asked)
    with running(tmp_path) as core:
        assert ask(core, asked) == expected
        evict_all(core)
        assert ask(core, asked) == expected
        assert core.view.stats().restored_tokens == 288


def test_conversation_continues_after_restart(tmp_path: Path) -> None:
    """Answers are written too."""
    turn = list(prompt(100))
    with running(tmp_path) as core:
        turn += ask(core, turn, max_tokens=60)
    turn += prompt(20, seed=1)
    expected = cold_text(turn)
    with running(tmp_path) as core:
        assert ask(core, turn) == expected
        assert core.view.stats().restored_tokens == 144, "of 160, but for the last token's block"


def test_branching_prompts_share_records_on_disk(tmp_path: Path) -> None:
    common = prompt(128)
    branches = [common + prompt(64, seed) for seed in (1, 2, 3)]
    expected = [cold_text(branch) for branch in branches]
    with running(tmp_path) as core:
        assert [ask(core, branch) for branch in branches] == expected
    assert len(files(tmp_path)) == 8 + 3 * 4
    with running(tmp_path) as core:
        assert ask(core, branches[1]) == expected[1]
        before = ssd(core).counts.read_blocks
        assert ask(core, branches[2]) == expected[2]
        assert ssd(core).counts.read_blocks == before + 4, "the common part is in RAM"
        other = common + prompt(64, 9)
        assert ask(core, other) == cold_text(other)


def test_simultaneous_requests_share_one_restore(tmp_path: Path) -> None:
    asked = [prompt(200) + prompt(10, seed) for seed in range(1, 5)]
    expected = [cold_text(tokens) for tokens in asked]
    with running(tmp_path) as core:
        ask(core, asked[0])
    with running(tmp_path) as core:
        handles = [submit(core, tokens) for tokens in asked]
        settle(core)
        assert [said(handle) for handle in handles] == expected
        assert ssd(core).counts.read_blocks == 13, "12 in common, and the first one's own"
        assert core.view.stats().hit_tokens == 192 * 4 + 16


def test_choices_share_restored_prompt(tmp_path: Path) -> None:
    asked = prompt(200)
    expected = cold_text(asked)
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        handle = submit(core, asked, n=3)
        settle(core)
        assert [tuple(found.tokens) for found in handle.result(0.0)] == [expected] * 3
        assert ssd(core).counts.read_blocks == 12


def test_tenants_are_isolated_on_disk(tmp_path: Path) -> None:
    asked = prompt(200)
    with running(tmp_path) as core:
        ask(core, asked, salt="a")
    with running(tmp_path) as core:
        ask(core, asked, salt="b")
        assert core.view.stats().hit_tokens == 0
        ask(core, asked, salt="a")
        assert core.view.stats().hit_tokens == 192


def test_requests_with_cache_prompt_false_are_not_written(tmp_path: Path) -> None:
    asked = prompt(200)
    with running(tmp_path) as core:
        ask(core, asked, cache_prompt=False)
        assert ssd(core).counts.written_blocks == 0
    with running(tmp_path) as core:
        ask(core, asked)
        assert core.view.stats().hit_tokens == 0
    with running(tmp_path) as core:
        ask(core, asked, cache_prompt=False)
        assert core.view.stats().hit_tokens == 0 and ssd(core).counts.read_blocks == 0
        ask(core, asked)
        assert core.view.stats().hit_tokens == 192


def test_other_model_of_same_name_finds_nothing(tmp_path: Path) -> None:
    asked = prompt(200)
    with running(tmp_path, "llama") as core:
        ask(core, asked)
    expected = cold_text(asked, "gemma2")
    with running(tmp_path, "gemma2") as core:
        assert ask(core, asked) == expected
        assert core.view.stats().hit_tokens == 0
    with running(tmp_path, "llama", max_kv_size=512) as core:
        ask(core, asked)
        assert core.view.stats().hit_tokens == 0, "another window is another fingerprint"


# ---- bounded


def test_decoding_continues_during_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, other = prompt(300), prompt(40, 7)
    expected = [cold_text(asked), cold_text(other)]
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        with stalled(core):
            slow = submit(core, asked)
            for _ in range(3):
                core.step()
            assert core.view.stats().restoring == 1
            monkeypatch.setattr(restoring_module, "ASK_SECONDS", 0.02)  # nobody answers now
            quick = submit(core, other)
            while not quick.ends:
                core.step()
                core.view.check()
            assert said(quick) == expected[1]
            assert core.view.stats().restoring == 1
            held = core.view.stats().by_kind[Kind.TAILS.value]
            assert held > 288 * core.view.token_bytes, "counted before it is there"
        settle(core)
        assert said(slow) == expected[0]


def test_hanging_disk_falls_back_to_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the tier's thread to begin, on a busy machine too.
    monkeypatch.setattr(tier_module, "LEAST_PATIENCE_SECONDS", 0.5)
    asked = prompt(300)
    expected = cold_text(asked)
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        with stalled(core):
            handle = submit(core, asked)
            while not handle.ends:
                core.step()
                core.view.check()
            assert said(handle) == expected
            assert core.view.stats().restored_tokens == 0
            assert core.tiers is not None
            assert core.tiers.paid_bytes == 288 * core.view.token_bytes, "it is there still"
        settle(core)
        assert core.tiers.paid_bytes == 0


def test_cancelled_restore_frees_everything(tmp_path: Path) -> None:
    asked = prompt(300)
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        before = core.ledger.used_bytes
        with stalled(core):
            handle = submit(core, asked)
            for _ in range(3):
                core.step()
            assert core.view.stats().restoring == 1
            handle.cancel()
            core.view.check()
        settle(core)
        assert core.ledger.used_bytes == before


def test_restore_peak_memory_is_bounded(tmp_path: Path) -> None:
    asked = prompt(900)
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        handle = submit(core, asked, max_tokens=1)
        core.admission.admit()
        until = time.monotonic() + SOON
        while core.view.stats().restored_tokens < 896:  # a step without the model's part
            assert time.monotonic() < until
            core.restoring.take()
            core.restoring.begin()
        restored = 896 * core.view.token_bytes
        assert mx.get_peak_memory() - before <= 1.1 * restored
        handle.cancel()


def test_restore_evicts_to_make_room(tmp_path: Path) -> None:
    """Memory holds one prompt: each evicts the other and is restored."""
    asked = [prompt(300, seed) for seed in range(3)]
    expected = [cold_text(tokens) for tokens in asked]
    with running(tmp_path) as core:
        core.set_limit(fixed_bytes_of(core) + 340 * core.view.token_bytes + 400_000)
        for turn in range(3):
            assert [ask(core, tokens) for tokens in asked] == expected, turn
        assert core.view.stats().evicted_nodes > 0
        assert core.view.stats().restored_tokens > 0


# ---- on bad days


@pytest.mark.parametrize("block", [0, 5, 11])
def test_only_blocks_after_damage_are_recomputed(block: int, tmp_path: Path) -> None:
    asked = prompt(200)
    expected = cold_text(asked)
    with running(tmp_path) as core:
        ask(core, asked)
        keys = hash_prompt(core, asked)
    path = next(path for path in files(tmp_path) if keys[block].hex() in path.name)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    with running(tmp_path) as core:
        assert ask(core, asked) == expected
        assert core.view.stats().restored_tokens == block * BLOCK
        assert ssd(core).counts.damaged_blocks == 1
    with running(tmp_path) as core:
        assert ask(core, asked) == expected
        assert core.view.stats().restored_tokens == 192, "it was computed, and written again"


def test_unusable_cache_folder_does_not_affect_answers(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("no folder")
    asked = prompt(200)
    expected = cold_text(asked)
    with running(occupied) as core:
        assert ask(core, asked) == expected
        assert ssd(core).off is not None


def test_aborted_prefill_keeps_finished_blocks(tmp_path: Path) -> None:
    asked = prompt(300)
    with running(tmp_path) as core:
        handle = submit(core, asked)
        while core.view.stats().prefilled_tokens < 128:
            core.step()
        handle.cancel()
        settle(core)
    assert len(files(tmp_path)) == 8
    with running(tmp_path) as core:
        assert ask(core, asked) == cold_text(asked)
        assert core.view.stats().restored_tokens == 128


def test_cheaply_recomputed_blocks_are_written_on_second_use(tmp_path: Path) -> None:
    asked = prompt(200)
    with running(tmp_path) as core:
        core.prefill_rate.prefill_seconds = lambda tokens: 0.0  # type: ignore[method-assign]
        ask(core, asked)
        assert not files(tmp_path)
        ask(core, asked)
        assert len(files(tmp_path)) == 12


def test_write_budget_persists_across_restarts(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        ask(core, prompt(200))
        each = ssd(core).counts.written_bytes // 12
    budget = 18 * each + each // 2  # 12 of them are spent
    for seed in (1, 2):
        with running(tmp_path, ssd_write_budget=budget) as core:
            ask(core, prompt(200, seed))
            assert ssd(core).counts.written_blocks == (6 if seed == 1 else 0)
            assert ssd(core).counts.refused_blocks > 0


def test_clear_empties_disk(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        ask(core, prompt(200))
        core.clear()
        settle(core)
        assert not files(tmp_path)
        ask(core, prompt(200))
        assert core.view.stats().hit_tokens == 0


def test_clear_during_restore_does_not_change_text(tmp_path: Path) -> None:
    asked = prompt(300)
    expected = cold_text(asked)
    with running(tmp_path) as core:
        ask(core, asked)
    with running(tmp_path) as core:
        with stalled(core):
            handle = submit(core, asked)
            while core.view.stats().restoring == 0:
                core.step()
            core.clear()
        settle(core)
        assert said(handle) == expected
        core.clear()
        settle(core)
        assert not files(tmp_path)


def test_most_valuable_blocks_are_preloaded_first(tmp_path: Path) -> None:
    common = prompt(128)
    branches = [common + prompt(64, seed) for seed in (1, 2)]
    expected = [cold_text(branch) for branch in branches]
    with running(tmp_path) as core:
        for branch in branches:
            ask(core, branch)
        ask(core, prompt(300, 5))
        evict_all(core)
        ask(core, branches[0])  # is used last
    with running(tmp_path) as core:
        assert core.preload() == 192 + 64 + 304, "and answers are there, too"
        core.view.check()
        reads = ssd(core).counts.read_blocks
        assert [ask(core, branch) for branch in branches] == expected
        assert ssd(core).counts.read_blocks == reads
        assert core.view.stats().hit_tokens == 2 * 191
    with running(tmp_path) as core:
        core.set_limit(fixed_bytes_of(core) + 240 * core.view.token_bytes)
        assert core.preload() == 192, "the one that was used last; nothing gives way for others"
        core.view.check()
        core.set_limit(200_000_000)
    with running(None) as core:
        assert core.preload() == 0


def test_explain_reports_blocks_on_disk(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        ask(core, prompt(200))
        evict_all(core)
        found = core.view.explain(prompt(200), ask_tiers=True)
        assert (found.held_tokens, found.tier_tokens) == (0, 192)
        assert "192 tokens are on the disk" in found.reason
        assert core.view.explain(prompt(200)).tier_tokens is None, "nobody asked"
        assert core.view.explain(prompt(200, 9), ask_tiers=True).tier_tokens == 0


def test_memory_hit_allocates_nothing_and_eviction_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stored arrays are the ones that are read."""
    caplog.set_level(logging.DEBUG, "penstock")
    with running(None, hot_cache_only=True) as core:
        ask(core, prompt(200))
        before = {id(node.segment.layers[0][0]) for node in cached_nodes(core)}
        copied = core.view.stats().copied_bytes
        ask(core, prompt(200))
        after = {id(node.segment.layers[0][0]) for node in cached_nodes(core)}
        assert before == after
        assert core.view.stats().copied_bytes == copied
        evict_all(core)
    assert "evicting a node of 192 tokens (cleared)" in caplog.text


def test_hot_cache_only_setting_disables_tiers(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with running(None, hot_cache_only=True) as core:
        ask(core, prompt(200))
        ask(core, prompt(200))
        assert not core.tiers
        assert core.view.stats().tiers == {}
        assert set(threading.enumerate()) <= threads
    with (
        pytest.raises(SettingError, match="hot_cache_only"),
        running(tmp_path, hot_cache_only=True),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_too_small_ssd_limit_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingError, match="ssd_cache_limit"),
        running(tmp_path, ssd_cache_limit="1MB"),
    ):
        pass


@contextmanager
def stalled(core: Core) -> Iterator[None]:
    """Block all reads of the cold tier in a `with` block; look-ups still work."""
    assert core.tiers is not None
    go = threading.Event()
    whole = SSDStore.restore

    def waits(self: SSDStore, *arguments: Any) -> int:
        assert go.wait(SOON)
        return whole(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SSDStore, "restore", waits)
        try:
            yield
        finally:
            go.set()
