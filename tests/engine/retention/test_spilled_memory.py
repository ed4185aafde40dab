"""Memory of sequences that are mostly in a cold tier, while prefilled and at rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cold_engine
import mlx.core as mx
import pytest
from combinations import SOAK
from core_parts import fixed_bytes_of, placed_sequences, sequences_in
from spilled_engine import (
    ACTIVE,
    check_peak,
    others_bytes,
    prompt,
    running,
    single_layer,
    spilling_of,
)

from penstock.engine.core import Core
from penstock.engine.offload.cold_blocks import RECORD_BYTES
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.ledger import Kind
from penstock.models.loading import load
from penstock.prefix.prefixes import InsertResult
from penstock.recall import MODEL_PATH

SHORT, LONG = (4_000, 128), (32_000, 1_024)
"""Tokens of a conversation, and those of it that a step reads."""
ANSWER_TOKENS = 16


def settings_of(tokens: int, attend: int) -> dict[str, Any]:
    """Return the settings of an engine for conversations of this length."""
    chunk = 512 if tokens > SHORT[0] else 256
    return {"attend_tokens": attend, "max_kv_size": tokens + 768, "prefill_chunk": chunk}


@pytest.mark.parametrize("records", [None, 1])
def test_prompt_is_spilled_during_prefill(tmp_path: Path, records: int | None) -> None:
    """Also with free memory: a chunk is written while the next one is computed."""
    with running(tmp_path, prefill_chunk=256) as core:
        assert core.tiers is not None
        if records is not None:  # a negative control
            core.tiers._records = records
        cold_engine.submit(core, prompt(3_000), max_tokens=1)
        most = 0
        while core.step():
            for tier in core.tiers:
                assert tier.tier.flush(cold_engine.SOON)  # of what was offered
            held = core.view.stats().held_tokens - spilling_of(core).spilled_tokens
            most = max(most, held)
        allowed = ACTIVE + core.budget.in_flight_tokens
        assert (most <= allowed) == (records is None), f"{most} tokens in memory"


@pytest.mark.parametrize("again", [True, False])
def test_blocks_refused_by_tree_are_committed_before_next_chunk(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt reserves a few chunks; without a retry the rest would be unaccounted."""
    if not again:  # a negative control
        monkeypatch.setattr(SequenceKV, "commit_again", lambda self: True)
    with running(tmp_path, prefill_chunk=256) as core:
        insert, calls = core.prefixes.insert, []

        def refusing(pin: Any, blocks_done: int, *given: Any) -> InsertResult:
            calls.append(blocks_done)
            if len(calls) == 3:
                return InsertResult(blocks_done, 0, "there is no room")
            return insert(pin, blocks_done, *given)

        monkeypatch.setattr(core.prefixes, "insert", refusing)
        handle = cold_engine.submit(core, prompt(3_000), max_tokens=1)
        (sequence,) = core.admission.sequences.values()
        most = 0
        while core.step():
            own = sum(span.columns for span in sequence.kv.own_spans)
            most = max(most, own)
        assert cold_engine.said(handle)
        assert (most <= 2 * 256) is again, f"{most} tokens beside the tree"


def held_bytes(core: Core) -> int:
    """Return the bytes of KV in memory, of index and locations, and of the block cache."""
    by_class, blocks = core.ledger.by_class(), spilling_of(core).blocks
    records = RECORD_BYTES * blocks.records
    return by_class[Kind.NODES] + by_class[Kind.KEY_INDEX] + blocks.cache_bytes + records


@pytest.mark.slow
@pytest.mark.parametrize("model", [single_layer, lambda: load(MODEL_PATH)[0]])
def test_32_000_spilled_tokens_take_an_eighth_of_their_bytes(
    tmp_path: Path, model: Callable[[], Any]
) -> None:
    """Including the index, places and the block cache, from the first tokens on."""
    tokens, active = LONG
    core = Core(
        model(),
        **settings_of(*LONG),
        active_kv_size=active,
        max_batch_size=1,
        memory_limit=200_000_000,
        ssd_cache_dir=tmp_path,
    )
    try:
        cold_engine.submit(core, prompt(tokens), max_tokens=20)
        while core.counters.generated_tokens < 10:
            core.step()
        assert held_bytes(core) <= tokens * core.view.token_bytes / 8
        assert spilling_of(core).blocks.counts.lost_blocks == 0
    finally:
        core.close()


def opened(folder: Path, limit: int, **settings: Any) -> Core:
    return Core(
        single_layer(), **settings, max_batch_size=10, memory_limit=limit, ssd_cache_dir=folder
    )


def room_of_one(folder: Path, tokens: int, active: int, **settings: Any) -> int:
    """Return a limit that fits one conversation whose KV stays in memory."""
    whole = opened(folder / "whole", 400_000_000, **settings)
    taken = whole.view.sequence_bytes(tokens + ANSWER_TOKENS)
    whole.close()
    limit = 200_000_000
    for number in range(3):  # the memory of evictions is a share of it
        core = opened(folder / f"guess {number}", limit, active_kv_size=active, **settings)
        limit = fixed_bytes_of(core) + taken.per_sequence + taken.shared
        core.close()
    return limit


@pytest.mark.parametrize("size", [SHORT, LONG] if SOAK else [SHORT])
def test_ten_spilled_conversations_fit_in_memory_of_one(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    """Texts match an engine with room for all; several run at a time and none is preempted."""
    tokens, active = size
    settings = settings_of(*size)
    prompts = [prompt(tokens, seed) for seed in range(10)]
    core = opened(tmp_path / "all", 400_000_000, **settings)
    handles = [cold_engine.submit(core, asked, max_tokens=ANSWER_TOKENS) for asked in prompts]
    cold_engine.settle(core)
    expected = [cold_engine.said(handle) for handle in handles]
    core.close()
    assert len(set(expected)) == 10

    limit = room_of_one(tmp_path, tokens, active, **settings)
    others = others_bytes(single_layer())
    core = opened(tmp_path / "one", limit, active_kv_size=active, **settings)
    mx.set_cache_limit(0)  # a freed buffer that is handed out again is larger than what asks for it
    try:
        handles = [cold_engine.submit(core, asked, max_tokens=ANSWER_TOKENS) for asked in prompts]
        together = 0
        mx.reset_peak_memory()
        while core.step():
            assert core.ledger.used_bytes <= limit
            check_peak(core, others)
            together = max(together, len(placed_sequences(core)))
        assert [cold_engine.said(handle) for handle in handles] == expected
        assert together >= (2 if size is SHORT else 6)
        assert core.counters.failed == core.counters.preemptions == 0
    finally:
        core.close()


def test_later_turns_stay_within_limit(tmp_path: Path) -> None:
    """Memory holds one conversation in codes; each continues twice, mostly from the tier."""
    tokens, active = SHORT
    codec = {"kv_cache_quantization": "affine8", "kv_cache_min_quantize_tokens": 0}
    settings = {**settings_of(*SHORT), **codec}
    limit = room_of_one(tmp_path, tokens + 200, active, **settings)
    others = others_bytes(single_layer())
    core = opened(tmp_path / "one", limit, active_kv_size=active, **settings)
    mx.set_cache_limit(0)  # see above
    try:
        texts = [prompt(tokens - 300, seed) for seed in range(3)]
        mx.reset_peak_memory()
        for turn in range(3):
            for number, text in enumerate(texts):
                handle = cold_engine.submit(core, text, max_tokens=ANSWER_TOKENS)
                while core.step():
                    assert core.ledger.used_bytes <= limit
                    check_peak(core, others)
                texts[number] = (*text, *cold_engine.said(handle), *prompt(100, turn))
        assert core.counters.failed == 0
        assert core.counters.hit_tokens > 0 and spilling_of(core).spilled_tokens > 0
    finally:
        core.close()


def test_committing_decoded_blocks_keeps_reservation_for_rest(tmp_path: Path) -> None:
    """The index takes a node's bytes for each block, until the block is merged."""
    with running(tmp_path, "falcon_h1", kernels="off") as core:
        handle = cold_engine.submit(core, prompt(40), max_tokens=250)
        while core.step():
            for sequence in sequences_in(core, State.RUNNING):
                kv = sequence.kv
                assert kv.reservation is not None
                ahead = sequence.reserved_tokens - kv.num_cached_tokens
                assert kv.reservation.nbytes >= ahead * core.budget.token_bytes
        assert handle.result(0.0)[0].finish.reason == "length"
