"""`EngineView` compared with the engine's later behavior."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cold_engine import BLOCK, SETTINGS, ask, running
from core_parts import evict_all, fixed_bytes_of, hash_prompt
from engine_faults import model_of

from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.view import EngineView
from penstock.errors import NeverFits, SettingError
from penstock.ledger import Kind

PROMPT = tuple(range(5, 5 + 6 * BLOCK))


def test_sequence_bytes_match_admission() -> None:
    """With exactly this room it is admitted; with one index block less it is refused."""
    with running(None) as core:
        sequence = core.view.sequence_bytes(len(PROMPT))
        fits = fixed_bytes_of(core) + sequence.per_sequence + sequence.shared
        core.set_limit(fits - core.prefixes.index_bytes(1) - 1)
        with pytest.raises(NeverFits):
            core.submit(Request(prompt=PROMPT, max_tokens=1))
        core.set_limit(fits)
        assert len(ask(core, PROMPT)) > 0


def test_claimed_share_excludes_evictable_nodes() -> None:
    with running(None) as core:
        empty = core.view.claimed_share
        handle = core.submit(Request(prompt=PROMPT, max_tokens=50, ignore_eos=True))
        core.step()
        core.step()
        assert core.view.claimed_share > empty, "a path is read"
        handle.cancel()
        assert core.view.held_tokens(PROMPT) > 0
        assert core.view.claimed_share == empty, "all that is in the tree can be evicted"


def test_block_hashes_cover_all_blocks() -> None:
    with running(None) as core:
        ask(core, PROMPT)
        chain = hash_prompt(core, [*PROMPT])
        assert set(chain) <= set(core.view.block_hashes())
        assert len(core.view.block_hashes()) == core.view.stats().held_tokens // BLOCK
        assert core.view.held_tokens(PROMPT) == len(PROMPT)
        assert core.view.held_tokens(PROMPT, "other") == 0


def test_clear_reports_evicted_nodes() -> None:
    with running(None) as core:
        ask(core, PROMPT)
        before = core.view.stats()
        cleared, _ = core.clear()
        assert cleared.nodes == before.nodes > 0
        assert cleared.nbytes == before.by_kind["nodes"] > 0
        again, removed = core.clear()
        assert again.nodes == again.nbytes == len(removed) == 0


def test_model_seconds_are_part_of_step_seconds() -> None:
    with running(None) as core:
        ask(core, PROMPT)
        stats = core.view.stats()
        steps = sum(core.counters.decode_seconds) + sum(core.counters.prefill_seconds)
        assert 0 < stats.model_seconds <= steps


def test_view_reports_codec_name_and_bytes() -> None:
    model = model_of("llama")
    core = Core(model, **{**SETTINGS, "kv_cache_quantization": "turbo8", "block_size": 64})
    try:
        assert core.view.codec_name == "turbo8"
        assert core.view.coded_token_bytes < core.view.token_bytes
    finally:
        core.close()
    with running(None) as raw:
        assert raw.view.codec_name is None
        assert raw.view.coded_token_bytes == raw.view.token_bytes


def test_refused_enqueue_queues_no_request() -> None:
    with Engine(model_of("llama"), **SETTINGS) as engine:
        good, bad = Request(prompt=PROMPT, max_tokens=2), Request(prompt=(10**6,), max_tokens=2)
        handles = [engine.open(good), engine.open(bad)]
        with pytest.raises(SettingError):
            engine.enqueue(handles).result()
        assert engine.ask(lambda view: view.idle).result()
        explanation = engine.enqueue([engine.open(good)]).result()
        assert explanation is not None
        assert explanation.prompt_tokens == len(PROMPT)


def test_failed_explanation_does_not_fail_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **more: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(EngineView, "explain", fails)
    with Engine(model_of("llama"), **SETTINGS) as engine:
        handle = engine.open(Request(prompt=PROMPT, max_tokens=2, ignore_eos=True))
        assert engine.enqueue([handle]).result() is None
        assert len(handle.result(60)[0].tokens) == 2


def test_held_bytes_match_array_sizes() -> None:
    with running(None) as core:
        ask(core, PROMPT)
        held = core.view.held_bytes
        nodes = core.ledger.by_class()[Kind.NODES]
        core.clear()
        mx.clear_cache()
        assert core.view.held_bytes == held - nodes


def test_shared_partial_block_is_counted_once() -> None:
    """They resume inside a block, whose leaf is evicted while in use."""
    with running(None) as core:
        half = PROMPT[: BLOCK // 2]
        end = (*half, *ask(core, half, max_tokens=4))
        handle = core.submit(Request(prompt=end, max_tokens=3, n=3, ignore_eos=True))
        core.step()
        before = core.view.held_bytes
        leaf_bytes = core.prefixes.tree.nbytes
        evict_all(core)
        spans = [s.kv.own_spans for s in core.admission.sequences.values()]
        assert [len(own) for own in spans] == [1, 1, 1]
        assert len({id(own[0].segment.layers) for own in spans}) == 1 < len(spans)
        assert 0 < leaf_bytes == spans[0][0].segment.nbytes
        assert core.view.held_bytes == before
        handle.cancel()
