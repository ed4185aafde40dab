"""KV spilled to a cold tier: equal text in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cold_engine
import mlx.core as mx
import numpy as np
import pytest
import xxhash
from core_parts import cached_match, cached_nodes, evict_all, fixed_bytes_of, layer_shapes
from engine_faults import VOCABULARY_TOKENS, model_of
from small_models import BASE
from small_models import build as small_model
from spilled_engine import (
    ACTIVE,
    SPILLED,
    check_peak,
    others_bytes,
    prompt,
    running,
    single_layer,
    spilling_of,
)

from penstock.attention import layer_decode
from penstock.attention.selection import selected_reads, selection
from penstock.cli import top_screen
from penstock.engine import stores
from penstock.engine.core import Core
from penstock.engine.offload import cold_blocks, tier_writer
from penstock.engine.offload.cold_blocks import ColdBlocks
from penstock.engine.request import Request, Sampling
from penstock.engine.retention.spilling import is_spilled, places_of
from penstock.engine.schedule.budget import MemoryBudget
from penstock.engine.schedule.sequence import Sequence as EngineSequence
from penstock.engine.schedule.sequence_kv import SequenceKV as EngineSequenceKV
from penstock.errors import LedgerFull, NeverFits, SettingError
from penstock.kv.block_format import BlockFormat
from penstock.kv.block_spans import SPILLED_MERGE_TOKENS
from penstock.kv.codecs import spilled
from penstock.kv.codecs.spilled import BlockPairs, HeldPairs
from penstock.ledger import Kind
from penstock.plugins.cpu import choice_reader
from penstock.prefix.prefixes import InsertResult
from penstock.server.metrics import EngineMetrics
from penstock.tiers.disk import SSDStore
from penstock.tiers.record import ArrayPart
from penstock.tiers.worker import ColdTier

LONG, OTHER = prompt(900), prompt(700, 1)
CODEC: dict[str, Any] = {
    "kv_cache_quantization": "turbo2",
    "kv_cache_min_quantize_tokens": 0,
    "kv_cache_raw_first_tokens": 32,
}


def whole(tmp_path: Path, family: str, *prompts: Sequence[int], **more: Any) -> list[Any]:
    """Return the answers of an engine with all KV in memory."""
    with running(tmp_path / "whole", family, **{**more, "active_kv_size": None}) as core:
        return [cold_engine.ask(core, asked, max_tokens=40) for asked in prompts]


def test_chain_longer_than_pending_hashes_limit_is_spilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_writer, "PENDING_HASHES", 8)
    with running(tmp_path) as core:
        cold_engine.ask(core, prompt(900), max_tokens=4)
        assert spilling_of(core).spilled_tokens > 400


def test_long_chain_is_spilled_if_another_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_writer, "PENDING_HASHES", 30)
    with running(tmp_path) as core:
        (writer,) = (tier.writer for tier in core.tiers)
        queued = list[int]()

        def queue_another() -> list[Any]:
            longest = max((len(chain.block_hashes) for chain in writer._pending), default=0)
            if longest > 25 and not queued:
                queued.append(longest)
                writer._wait([bytes([number]) * 32 for number in range(20)], b"", 0)
            return []

        monkeypatch.setattr(writer._ends, "take_due", queue_another)
        cold_engine.ask(core, prompt(1_400), max_tokens=4)
        assert queued and spilling_of(core).spilled_tokens > 600


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attend_full_layers": (1,)}),
        ("llama", {"block_size": 48}),
        ("llama", {"attend_rest": True}),
        ("falcon_h1", {"attend_rest": True}),
        ("falcon_h1", {}),
        ("cohere2", {}),
    ],
)
def test_spilling_does_not_change_text(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    def turns(core: Core) -> list[tuple[int, ...]]:
        first = cold_engine.ask(core, LONG, max_tokens=40)
        return [first, cold_engine.ask(core, (*LONG, *first, 7, 8, 9), max_tokens=40)]

    with running(tmp_path / "whole", family, **{**more, "active_kv_size": None}) as core:
        expected = turns(core)
    with running(tmp_path / "spilled", family, **more) as core:
        assert turns(core) == expected
        spilling, index = spilling_of(core), core.ledger.by_class()[Kind.KEY_INDEX]
        gone = spilling.spilled_tokens
        assert gone > len(LONG) - ACTIVE - 400, "most of it is in the tier"
        assert index >= gone * core.view.index_token_bytes
        stats = core.view.stats()
        assert stats.spilling is not None
        assert stats.spilling.spilled_tokens == gone
        assert stats.spilling.active_tokens + gone == stats.held_tokens
        counts = stats.spilling.counts
        assert counts.read_blocks > 0 and counts.cached_blocks > 0 and counts.streamed_blocks > 0
        assert counts.lost_blocks == 0
        assert 0 < stats.spilling.hit_rate < 1
        assert stats.by_kind["key_index"] == index


@pytest.mark.parametrize(
    ("codec", "family", "more"),
    [
        ("turbo2", "llama", {}),
        ("turbo2", "llama", {"kernels": "off", "kv_cache_skip_layers": (0,)}),
        ("turbo2/raw", "llama", {"attend_rest": True}),
        ("turbo4", "falcon_h1", {}),
        ("turbo2", "cohere2", {}),
        ("turbo2.5", "heads of 64", {}),
        ("rot2", "heads of 64", {}),
        ("affine2", "heads of 64", {}),
        ("affine8", "heads of 64", {}),
    ],
)
def test_spilling_with_codecs_does_not_change_text(
    tmp_path: Path, codec: str, family: str, more: dict[str, Any]
) -> None:
    """Later turns read codes of blocks spilled raw, and of resident blocks."""
    if family == "heads of 64":
        family, more = "llama", {**more, "model": single_layer()}
    settings = {**CODEC, **more, "kv_cache_quantization": codec}

    def turns(core: Core) -> list[tuple[int, ...]]:
        text, said = LONG[:400], []
        for turn in range(3):
            said.append(cold_engine.ask(core, text, max_tokens=24))
            text = (*text, *said[-1], *prompt(300, turn))
        return said

    with running(tmp_path / "raw", family, **more) as core:
        raw = turns(core)
    with running(tmp_path / "whole", family, **{**settings, "active_kv_size": None}) as core:
        expected = turns(core)
    with running(tmp_path / "spilled", family, **settings) as core:
        assert turns(core) == expected
        spilling = spilling_of(core)
        assert spilling.spilled_tokens > 500, "most of it is in the tier"
        assert spilling.blocks.counts.lost_blocks == 0
    assert codec in ("affine8", "turbo4") or expected != raw, "the codec changes the text"


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: flip(path)])
def test_codes_missing_on_disk_are_written_before_spilling(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    settings = {**CODEC, "kv_cache_raw_first_tokens": 0, "model": single_layer()}

    with running(tmp_path / "whole", **settings, active_kv_size=None) as core:
        first = cold_engine.ask(core, LONG, max_tokens=40)
        text = (*LONG, *first, *prompt(300, 3))
        second = cold_engine.ask(core, text, max_tokens=40)
    with running(tmp_path / "spilled", **settings, active_kv_size=1_024) as core:
        assert cold_engine.ask(core, LONG, max_tokens=40) == first
        assert spilling_of(core).spilled_tokens == 0, "all blocks are in memory, in codes"
        for path in cold_engine.files(tmp_path / "spilled"):
            harm(path)
        spilling_of(core).active_tokens = ACTIVE
        assert cold_engine.ask(core, text, max_tokens=40) == second
        assert spilling_of(core).spilled_tokens > 500
        assert core.counters.preemptions == 0


def test_batched_and_parallel_choices_match_single(tmp_path: Path) -> None:
    expected = whole(tmp_path, "llama", LONG, OTHER)
    with running(tmp_path / "spilled") as core:
        handles = [cold_engine.submit(core, asked, max_tokens=40) for asked in (LONG, OTHER)]
        twice = core.submit(Request(prompt=LONG, max_tokens=40, ignore_eos=True, n=2))
        cold_engine.settle(core)
        assert [cold_engine.said(handle) for handle in handles] == expected
        assert [tuple(choice.tokens) for choice in twice.result(0.0)] == [expected[0]] * 2


def test_short_prompt_reads_spilled_prefix_with_full_attention(tmp_path: Path) -> None:
    """It shares its beginning with a longer prompt, whose first tokens are spilled."""
    short = (*LONG[:64], 3, 4)
    (expected,) = whole(tmp_path, "llama", short)
    with running(tmp_path / "spilled") as core:
        cold_engine.ask(core, LONG)
        assert is_spilled(cached_match(core, short).path[0].segment)
        assert cold_engine.ask(core, short, max_tokens=40) == expected


def first_scores(core: Core, *prompts: Sequence[int]) -> list[dict[int, float]]:
    """Return the log-probabilities of the first tokens of concurrent answers."""
    sampling = Sampling(logprobs=True, top_logprobs=5)
    handles = [cold_engine.submit(core, p, max_tokens=3, sampling=sampling) for p in prompts]
    cold_engine.settle(core)
    firsts = [handle.result(0.0)[0].logprobs[0] for handle in handles]
    return [dict((*first.top, (first.token, first.logprob))) for first in firsts]


def test_first_token_uses_full_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spilled KV is streamed piece by piece, also beside selective rows."""
    both = LONG[:897], OTHER[:689]  # whole blocks and a token: cached, nothing is computed again
    with running(tmp_path / "whole", attend_tokens=None, active_kv_size=None) as core:
        expected = [first_scores(core, asked)[0] for asked in both]
    with running(tmp_path / "spilled") as core:
        counts = spilling_of(core).blocks.counts
        for asked, scores in zip(both, expected, strict=True):
            (cold,) = first_scores(core, asked)
            assert cold == pytest.approx(scores, abs=1e-4)
            path = cached_match(core, asked).path
            gone = sum(len(node.tokens) for node in path if is_spilled(node.segment))
            spilling_of(core).blocks.forget_cached()
            streamed, prefilled = counts.streamed_blocks, core.counters.prefilled_tokens
            (cached,) = first_scores(core, asked)
            assert cached == pytest.approx(scores, abs=1e-4)
            assert core.counters.prefilled_tokens == prefilled
            # At least: what is due leaves memory meanwhile. 2 layers have 2 key heads.
            assert counts.streamed_blocks - streamed >= 8 * gone // 16 > 0
        beside = cold_engine.submit(core, prompt(600, 7), max_tokens=40)
        while core.counters.generated_tokens < 16:
            core.step()
        for found, scores in zip(first_scores(core, *both), expected, strict=True):
            assert found == pytest.approx(scores, abs=1e-4)
        assert len(cold_engine.said(beside)) == 40
        monkeypatch.setattr(EngineSequence, "follows_prompt", False)
        for found, scores in zip(first_scores(core, *both), expected, strict=True):
            assert found != pytest.approx(scores, abs=1e-4), "negative control"


def test_blocks_lost_during_first_token_are_recomputed(tmp_path: Path) -> None:
    with running(tmp_path / "whole", attend_tokens=None, active_kv_size=None) as core:
        (expected,) = first_scores(core, LONG)
    with running(tmp_path / "spilled") as core:
        first_scores(core, LONG)
        spilling = spilling_of(core)
        spilling.blocks.forget_cached()
        for path in cold_engine.files(tmp_path / "spilled"):
            path.unlink()
        (found,) = first_scores(core, LONG)
        assert spilling.blocks.counts.lost_blocks > 0 and core.counters.failed == 0
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("reads_all")
def test_spilled_conversation_resumes_after_restart(tmp_path: Path) -> None:
    (expected,) = whole(tmp_path, "llama", LONG)
    with running(tmp_path / "spilled") as core:
        assert cold_engine.ask(core, LONG, max_tokens=40) == expected
    with running(tmp_path / "spilled") as core:
        assert cold_engine.ask(core, LONG, max_tokens=40) == expected
        assert core.counters.restored_tokens > len(LONG) - 100
        assert spilling_of(core).spilled_tokens > 300


class Requests:
    """What each decode step asks the tier for.

    Args:
        core: its steps are taken here.
        patch: notes what is asked for.
    """

    def __init__(self, core: Core, patch: pytest.MonkeyPatch) -> None:
        self.core = core
        self.asked: list[Mapping[bytes, Sequence[ArrayPart]]] = []
        read = ColdTier.read_parts

        def noting(tier: ColdTier, wanted: Mapping[bytes, Sequence[ArrayPart]]) -> Any:
            self.asked.append(wanted)
            return read(tier, wanted)

        patch.setattr(ColdTier, "read_parts", noting)

    def of_decode_steps(self) -> Iterator[list[Mapping[bytes, Sequence[ArrayPart]]]]:
        """Take all steps; yield the requests of those that read no prompt, and no first token."""
        steps, prompts = self.core.counters.decode_steps, self.core.counters.prefill_steps
        busy = True
        while busy:
            begins = any(s.follows_prompt for s in self.core.admission.sequences.values())
            busy = self.core.step()
            now = self.core.counters.decode_steps, self.core.counters.prefill_steps
            if now[0] > steps and now[1] == prompts and not begins:
                yield self.asked
            (steps, prompts), self.asked = now, []


@pytest.mark.parametrize("joined", [True, False])
def test_layer_waits_for_tier_at_most_once_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """Blocks wanted by several rows, heads, sides and nodes are read once, in order."""
    if not joined:  # a negative control
        together = choice_reader.held_for

        @contextmanager
        def one_by_one(rows: Any, located: Any, layer: int) -> Iterator[list[Any]]:
            with ExitStack() as stack:
                given = [(rows, [one], layer) for one in located]
                yield [stack.enter_context(together(*one))[0] for one in given]

        monkeypatch.setattr(choice_reader, "held_for", one_by_one)
        monkeypatch.setattr(selected_reads, "loaded", lambda choice, rows, blocks, layer: rows)
    prompts = [OTHER, (*OTHER[:500], 5, 6, 7)]
    with running(tmp_path, max_stall_ms=0) as core:
        requests, most = Requests(core, monkeypatch), 0
        handles = [cold_engine.submit(core, asked, max_tokens=16) for asked in prompts]
        for asked in requests.of_decode_steps():
            most = max(most, len(asked))
            for parts in (parts for wanted in asked for parts in wanted.values() if joined):
                assert list(parts) == sorted(parts), "in the order of their bytes"
                assert not any(map(are_adjacent, parts, parts[1:]))
        texts = [cold_engine.said(handle) for handle in handles]
        counts = spilling_of(core).blocks.counts
        assert counts.lost_blocks == 0 and counts.cached_blocks > 0
    assert (most == 2) is joined, "there are two layers"
    if joined:
        assert texts == [text[:16] for text in whole(tmp_path, "llama", *prompts)]


@pytest.mark.parametrize("joined", [True, False])
def test_short_row_over_spilled_prefix_waits_once_per_layer_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """It is shorter than the budget, and its beginning is spilled for others."""
    short = (*LONG[:90], 3, 4)
    (expected,) = whole(tmp_path, "llama", short)
    if not joined:  # a negative control
        monkeypatch.setattr(layer_decode, "whole", lambda row, layer: row)
    with running(tmp_path / "spilled") as core:
        cold_engine.ask(core, LONG)
        requests = Requests(core, monkeypatch)
        handle = cold_engine.submit(core, short, max_tokens=30)
        asked = [len(step) for step in requests.of_decode_steps()]
        assert len(short) + 30 <= core.limits.attend_tokens
        assert cold_engine.said(handle) == expected[:30]
    if joined:
        assert asked == [2] + [0] * (len(asked) - 1), "of each layer once, and then they are cached"
    else:
        assert min(asked) >= 4, "two layers have two sides each"


def are_adjacent(part: ArrayPart, following: ArrayPart) -> bool:
    """Return whether two ranges touch or overlap."""
    return part.name == following.name and part.start + part.nbytes >= following.start


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for at in range(2_500, len(raw), 100):
        raw[at] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3_000])


def harmed(folder: Path, harm: Callable[[Path], object]) -> tuple[int, ...]:
    """Damage all records in the middle of an answer, and return it."""
    with running(folder) as core:
        handle = cold_engine.submit(core, LONG, max_tokens=40)
        while core.counters.generated_tokens < 20:
            core.step()
        spilling = spilling_of(core)
        assert core.tiers is not None and core.tiers.flush(cold_engine.SOON)
        assert spilling.spilled_tokens > 300
        spilling.blocks.forget_cached()
        files = cold_engine.files(folder)
        for path in files:
            harm(path)
        cold_engine.settle(core)
        assert spilling.blocks.counts.lost_blocks > 0
        assert core.counters.preemptions == 1, "its path was computed again"
        assert core.counters.failed == 0
        stats = cold_engine.ssd(core).counts
        assert stats.damaged_blocks + stats.missing_blocks > 0
        return cold_engine.said(handle)


@pytest.mark.parametrize("harm", [Path.unlink, flip, cut])
def test_damaged_or_missing_blocks_are_recomputed(
    tmp_path: Path, harm: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = whole(tmp_path, "llama", LONG)
    said = harmed(tmp_path / "harmed", harm)
    assert said[:20] == expected[:20]
    # Behind them it is that of an engine that was stopped there, and read all of them as a prompt.
    (rest,) = whole(tmp_path / "again", "llama", (*LONG, *expected[:20]))
    assert said[20:] == rest[:20]
    if harm is flip:
        monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: 0)
        with pytest.raises(AssertionError):  # without checksums the answer would be wrong
            harmed(tmp_path / "unchecked", harm)


def test_blocks_of_slow_tier_count_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (expected,) = whole(tmp_path, "llama", LONG)
    with running(tmp_path / "late") as core:
        handle = cold_engine.submit(core, LONG, max_tokens=40)
        while core.counters.generated_tokens < 20:
            core.step()
        blocks = spilling_of(core).blocks
        blocks.forget_cached()
        monkeypatch.setattr(cold_blocks, "LATE_SECONDS", 0.0)
        cold_engine.settle(core)
        assert blocks.counts.lost_blocks > 0 and core.counters.failed == 0
        assert cold_engine.said(handle)[:20] == expected[:20]
        assert "could not read spilled blocks" in caplog.text and "TimeoutError" in caplog.text


def test_store_error_retains_no_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames would hold the step's arrays as long as a log or an answer holds the error."""
    errors: list[ValueError] = []

    def fails(store: SSDStore, key: bytes, parts: object) -> None:
        errors.append(ValueError("a store's bug"))
        raise errors[-1]

    with running(tmp_path) as core:
        handle = cold_engine.submit(core, LONG, max_tokens=40)
        while core.counters.generated_tokens < 20:
            core.step()
        spilling_of(core).blocks.forget_cached()
        with monkeypatch.context() as patch:
            patch.setattr(SSDStore, "read_parts", fails)
            while not errors:
                core.step()
        cold_engine.settle(core)
        assert len(cold_engine.said(handle)) == 40
        assert spilling_of(core).blocks.counts.lost_blocks > 0
    assert all(error.__traceback__ is None for error in errors)


def test_prompt_longer_than_memory_stays_within_limit(tmp_path: Path) -> None:
    """MLX's peak above the baseline fits the ledger's account."""
    asked = prompt(4_000, 5)
    # Records of 320 tokens, as they are outside of tests.
    settings = {**SPILLED, "max_kv_size": 4_352, "max_batch_size": 1, "prefill_chunk": 256}
    (expected,) = whole(tmp_path, "llama", asked, **settings)
    model = model_of("llama")
    limit, unspilled = 0, {**settings, "active_kv_size": None}
    for guess in (200_000_000, 40_000_000, 38_000_000):  # the memory of evictions is a share of it
        folder = tmp_path / f"least {guess}"
        least = Core(model, **settings, memory_limit=guess, ssd_cache_dir=folder)
        taken = least.view.sequence_bytes(len(asked) + 40)
        limit = least.budget.fixed_bytes + taken.per_sequence + taken.shared
        least.close()
    with pytest.raises(NeverFits):
        core = Core(model, **unspilled, memory_limit=limit, ssd_cache_dir=tmp_path / "unspilled")
        core.submit(Request(prompt=asked, max_tokens=40))
    others = others_bytes(model)
    core = Core(model, **settings, memory_limit=limit, ssd_cache_dir=tmp_path / "spilled")
    mx.set_cache_limit(0)  # a freed buffer that is handed out again is larger than what asks for it
    try:
        handle = core.submit(Request(prompt=asked, max_tokens=40, ignore_eos=True))
        mx.reset_peak_memory()
        while core.step():
            assert core.ledger.used_bytes <= limit
            check_peak(core, others)
            core.view.check()
        assert tuple(handle.result(0.0)[0].tokens) == expected
        resident = core.ledger.by_class()[Kind.NODES]
        assert resident < len(asked) * core.view.token_bytes / 2
    finally:
        core.close()


def test_spill_locations_of_evicted_nodes_are_dropped(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        cold_engine.ask(core, LONG)
        spilling = spilling_of(core)
        blocks, before = spilling.blocks, spilling.blocks.nbytes
        held = set().union(*(places_of(node.segment) for node in cached_nodes(core)))
        assert len({place // blocks.record_blocks for place in held}) == blocks.records > 0
        core.clear()
        blocks.retain(())
        assert blocks.records == 0 and blocks.nbytes < before


def test_spilling_statistics_are_exported_as_metrics(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        cold_engine.ask(core, LONG)
        stats = core.view.stats()
    metrics = EngineMetrics()
    metrics.stats = stats
    shown = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    assert stats.spilling is not None
    counts = stats.spilling.counts
    assert shown["penstock_kv_tokens", "memory"] == stats.spilling.active_tokens
    assert shown["penstock_kv_tokens", "tier"] == stats.spilling.spilled_tokens > 0
    for outcome in ("cached", "read", "streamed", "lost"):
        value = shown["penstock_spilled_blocks_total", outcome]
        assert value == getattr(counts, f"{outcome}_blocks")
    assert shown["penstock_spilled_read_bytes_total",] == counts.read_bytes > 0
    assert shown["penstock_memory_used_bytes", "key_index"] == stats.by_kind["key_index"] > 0
    (line, *_) = top_screen._spilled(asdict(stats))
    step = counts.read_blocks / stats.decode.count
    assert f"{step:,.0f} blocks read a step, {stats.spilling.hit_rate:.0%} found" in line


def test_blocks_refused_by_tree_leave_reservation_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of their index, too, which are spared where the tree finds them."""
    with running(tmp_path) as core:
        handle = cold_engine.submit(core, LONG, max_tokens=4)
        core.step()
        (sequence,) = core.admission.sequences.values()
        kv, size = sequence.kv, core.limits.block_size
        assert kv.reservation is not None and kv.num_cached_tokens % size == 0
        before = kv.reservation.nbytes
        segment = BlockFormat.of(layer_shapes(core)).blank(size)
        assert kv._reserved_index(segment)
        with monkeypatch.context() as patch:
            refusal = InsertResult(kv.num_cached_tokens // size, 0, "there is no room")
            patch.setattr(core.prefixes, "insert", lambda *given: refusal)
            assert not kv.splice(segment)
        assert kv.reservation.nbytes == before
        core.cancel(handle)
        cold_engine.settle(core)


@pytest.mark.parametrize("refused", [2, 99])
def test_single_prompt_without_memory_restarts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """The tree may hold more of the prompt than it reads, in a shared node."""
    (expected,) = whole(tmp_path, "llama", LONG)
    top_up, calls = MemoryBudget.top_up, []

    def tops_up(budget: MemoryBudget, sequence: EngineSequence) -> bool:
        calls.append(sequence)
        return len(calls) > refused and top_up(budget, sequence)

    monkeypatch.setattr(MemoryBudget, "top_up", tops_up)
    with running(tmp_path / "spilled") as core:
        handle = cold_engine.submit(core, LONG, max_tokens=40)
        cold_engine.settle(core)
        assert core.counters.preemptions == 1
        if refused == 2:
            assert cold_engine.said(handle) == expected
            return
        with pytest.raises(LedgerFull, match="the cold tiers did not write the KV"):
            handle.result(0.0)


@pytest.mark.parametrize("drops", [True, False])
def test_large_node_with_shared_prefix_does_not_block_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """The node fits beside the prompt's reservation, but a copy to split it does not."""
    if not drops:  # a negative control
        monkeypatch.setattr(EngineSequenceKV, "drop_unread", lambda self: None)
    older = prompt(SPILLED_MERGE_TOKENS + 1, 1)
    asked = older[:16] + prompt(2_200, 2)
    settings = {"prefill_chunk": 64, "active_kv_size": 128, "max_kv_size": 2_304, "kernels": "off"}
    ends: set[int | str] = set()
    with running(tmp_path, model=single_layer(), max_batch_size=1, **settings) as core:
        node_bytes = SPILLED_MERGE_TOKENS * core.runner.held_token_bytes
        for room in (1.1, 1.3, 1.5, 1.7, 1.9):
            core.set_limit(200_000_000)
            evict_all(core)
            own = core.view.sequence_bytes(len(asked) + 3)
            limit = fixed_bytes_of(core) + own.per_sequence + own.shared + int(room * node_bytes)
            cold_engine.ask(core, older, max_tokens=1)
            core.set_limit(limit)
            handle = cold_engine.submit(core, asked, max_tokens=4)
            cold_engine.settle(core)
            try:
                ends.add(len(cold_engine.said(handle)))
            except LedgerFull:
                ends.add("full")
        core.set_limit(200_000_000)
    assert (ends == {4}) is drops, ends


@pytest.mark.parametrize("nbytes", [1 << 20, 0])
def test_nodes_of_spilled_kv_grow_beside_kv_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Memory keeps the KV behind a window while it has room; each node costs time per step."""
    monkeypatch.setattr(stores, "SPILLED_MERGE_TOKENS", 64)
    monkeypatch.setattr(stores, "SPILLED_MERGE_BYTES", nbytes)
    layers = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_window": 32,
    }
    mx.random.seed(3)
    model = small_model({**BASE, **layers, "vocab_size": VOCABULARY_TOKENS})
    (expected,) = whole(tmp_path, "llama", LONG, model=model)
    with running(tmp_path / "spilled", model=model) as core:
        assert cold_engine.ask(core, LONG, max_tokens=40) == expected
        sizes = {True: [0], False: [0]}
        for node in cached_nodes(core):
            assert not node.segment.missing
            sizes[is_spilled(node.segment)].append(len(node.tokens))
    assert max(sizes[False]) <= 128
    assert (max(sizes[True]) > 256) is (nbytes > 0), sizes


def test_blocks_in_use_are_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops read raw addresses: blocks without a cache slot have to be held."""
    (expected,) = whole(tmp_path, "llama", LONG)
    memory: list[Any] = []

    class Watched(HeldPairs):
        def __del__(self) -> None:
            for part in self.memory:
                part.fill(255)  # no number

    hold = ColdBlocks.hold

    def copied(blocks: ColdBlocks, wanted: Sequence[BlockPairs]) -> HeldPairs:
        held = hold(blocks, wanted)
        memory.append([part.copy() for part in held.memory])
        return Watched(memory[-1], held.rows, held.key_bytes)

    monkeypatch.setattr(ColdBlocks, "hold", copied)
    with running(tmp_path / "spilled") as core:
        assert cold_engine.ask(core, LONG, max_tokens=40) == expected
    assert len(memory) > 20


def test_selection_with_single_kv_head_is_cached(tmp_path: Path) -> None:
    settings = {"num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 16}
    config = {"model_type": "llama", "vocab_size": VOCABULARY_TOKENS, "torch_dtype": "float32"}
    mx.random.seed(3)
    model = small_model({**BASE, **config, **settings})
    with running(tmp_path, model=model) as core:
        cold_engine.ask(core, LONG, max_tokens=40)
        counts = spilling_of(core).blocks.counts
        assert counts.read_blocks > 0 and counts.cached_blocks > 0


def test_record_spilled_again_gets_new_location(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        cold_engine.ask(core, LONG)
        blocks = spilling_of(core).blocks
        key, number = next(iter(blocks._numbers.items()))
        first = number * blocks.record_blocks
        blocks.forget({first})
        again = blocks.place(key)
        assert again is not None and again != first
        blocks.retain({again})  # nothing reads the first any more
        assert blocks.place(key) == again and blocks.records == 1
        blocks.forget({again})
        blocks.retain(())
        assert blocks.records == 0
        core.clear()


def test_resident_bytes_of_spilled_block_match_arrays(tmp_path: Path) -> None:
    with running(tmp_path) as core:
        codec = spilled.Spilled(spilling_of(core).blocks, 0, 0, mx.float32)
        side = mx.random.normal((1, 2, 1_600, 8))
        mx.eval(side)
        mx.clear_cache()
        before = mx.get_active_memory()
        coded = codec.spilled(side, np.arange(100, dtype=np.int32))
        assert mx.get_active_memory() - before == coded.nbytes == 2 * 100 * codec.block_bytes


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"attend_tokens": None}, "set attend_tokens"),
        ({"attend_tokens": 512}, "at most as many"),
        ({"ssd_cache_dir": None}, "no cold tier"),
        ({"kv_cache_quantization": "kivi4", "block_size": 64}, "encodes 64 tokens together"),
        ({**CODEC, "kv_cache_quantize_when": "active"}, "use at-rest"),
        ({"block_size": 24}, "not a multiple of 16"),
        ({"attend_full_layers": (0, 1)}, "no layer that selects"),
    ],
)
def test_unsupported_settings_are_refused_at_start(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    given = {**cold_engine.SETTINGS, **SPILLED, "ssd_cache_dir": tmp_path, **more}
    with pytest.raises(SettingError, match=says):
        Core(model_of("llama"), **given)


def test_spill_and_selection_blocks_have_equal_length() -> None:
    assert spilled.BLOCK_TOKENS == selection.BLOCK_TOKENS
