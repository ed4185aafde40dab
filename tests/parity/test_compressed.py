"""DeepSeek 4.1, with one row per few tokens: text matches a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from asking import ask, cached, drain
from cold_engine import running, settle
from core_parts import pinned_nodes
from tiny_families import plain_greedy, prompt_of

from penstock.attention import devices
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model.runner import Runner
from penstock.engine.retention import compressed_rows
from penstock.engine.schedule import restoring as restoring_module
from penstock.errors import NeverFits, SettingError
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState, StateForm
from penstock.ledger import Kind
from penstock.models import mlx_lm as seam

FAMILY = "deepseek_v41"
SMALL: dict[str, Any] = {
    "memory_limit": "400MB",
    "block_size": 16,
    "prefill_chunk": 32,
    "max_batch_size": 4,
}
BASE = prompt_of(70, seed=1)
"""Four whole blocks and six tokens; a row is made of four."""


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with tiny_families.uncompiled():
        yield


@functools.cache
def model() -> Any:
    return tiny_families.build(FAMILY)


@contextmanager
def engine(**settings: Any) -> Iterator[Core]:
    core = Core(model(), **{**SMALL, **settings})
    try:
        yield core
        core.view.check()
        assert core.view.idle
        assert pinned_nodes(core) == 0
    finally:
        core.close()


@functools.cache
def plain(prompt: tuple[int, ...], tokens: int) -> list[int]:
    return plain_greedy(model(), prompt, tokens)[0]


def said(handle: Handle) -> list[int]:
    """Return an answer after comparing it with a plain loop."""
    (choice,) = handle.result(timeout_seconds=0)
    request = handle.request
    assert choice.tokens == plain(request.prompt, request.max_tokens)
    return choice.tokens


@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_prompts_and_chunks_of_any_size_match_plain(chunk: int) -> None:
    with engine(prefill_chunk=chunk) as core:
        lengths = (1, 3, 4, 5, 15, 16, 17, 65, 131)
        handles = [ask(core, prompt_of(tokens, seed=tokens)) for tokens in lengths]
        drain(core)
        for handle in handles:
            said(handle)


def test_decoded_blocks_are_reused_by_next_turn() -> None:
    """Their rows were loose until the block was full."""
    with engine() as core:
        first = ask(core, BASE, 45)  # a block from a prompt's end, and two of the answer alone
        drain(core)
        turn = [*BASE, *said(first), *prompt_of(5, seed=2)]
        second = ask(core, turn)
        drain(core)
        assert cached(second) == 112
        said(second)


def test_diverging_prompts_resume_at_checkpoints() -> None:
    with engine() as core:
        ask(core, BASE)
        drain(core)
        others = [ask(core, [*BASE[:cut], *prompt_of(20, seed=cut)]) for cut in (64, 50, 33, 9)]
        drain(core)
        for handle in others:
            said(handle)
        assert cached(others[0]) == 64


def test_sequences_joining_and_leaving_batch_match_single_runs() -> None:
    with engine() as core:
        handles = [ask(core, BASE, 30), ask(core, BASE[:33], 9)]
        drain(core, 4)
        handles += [ask(core, BASE[:50], 20), ask(core, prompt_of(3, seed=8), 25)]
        gone = ask(core, BASE[:20], 60)
        drain(core, 6)
        core.cancel(gone)
        drain(core)
        for handle in handles:
            said(handle)


def test_preempted_sequence_matches_plain() -> None:
    with engine(max_batch_size=1) as core:
        first = ask(core, BASE, 40)
        drain(core, 12)  # in the middle of a block, with loose rows
        urgent = ask(core, prompt_of(30, seed=5), priority=1)
        drain(core)
        assert core.counters.preemptions == 1
        said(first)
        said(urgent)


def test_compressed_rows_and_states_are_restored_after_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring_module, "ASK_SECONDS", 30.0)
    for restored in (0, 64):
        with running(tmp_path, model=model(), **SMALL) as core:
            handle = ask(core, BASE, 20)
            settle(core)
            said(handle)
            assert core.view.stats().restored_tokens == restored


def test_compressed_rows_of_shared_prompt_are_stored_once() -> None:
    shared = prompt_of(160, seed=3)
    with engine() as core:
        alone = ask(core, [*shared, 5])
        drain(core)
        once = core.ledger.by_class()[Kind.NODES]
        assert once == 160 * core.view.token_bytes  # ten blocks, and nothing beside them
        more = [ask(core, [*shared, 6 + i]) for i in range(4)]
        drain(core)
        assert core.ledger.by_class()[Kind.NODES] == once
        for handle in (alone, *more):
            said(handle)
        assert [cached(handle) for handle in more] == [160] * 4


def test_token_bytes_match_mlx_lm_caches() -> None:
    """Two layers, rows of 16 float32 per 4 tokens, for attention and for its index."""
    with engine() as core:
        tokens = 64
        caches = seam.plain_caches(model())
        model()(mx.array([prompt_of(tokens)]), cache=caches)
        kept = sum(
            rows.nbytes
            for cache in caches
            for rows in (cache.compress_kv, cache.index_k)
            if rows is not None
        )
        assert kept == tokens * core.view.token_bytes


def test_states_stay_within_reserved_bytes() -> None:
    """Compared with mlx-lm's own caches after as many tokens."""
    runner = Runner(model(), devices.current(), max_kv_size=128, keep=0)
    for tokens in (1, 3, 11, 12, 13, 64, 66, 127):
        caches = seam.plain_caches(model())
        model()(mx.array([prompt_of(tokens)]), cache=caches)
        points = [
            array
            for cache in caches
            for array in (cache.window, cache.pending_kv, cache.pending_gate)
            if array is not None
        ]
        mx.eval(points)
        assert sum(array.nbytes for array in points) <= runner.state_bytes
        if tokens >= 12 and tokens % 4 == 0:
            held = tuple((cache.window,) for cache in caches)
            assert StateForm.of(held).arrays == runner.state_form.arrays


def test_no_token_is_dropped_past_window_and_all_are_reserved() -> None:
    with engine(max_kv_size=32, keep=4) as core:
        handle = ask(core, BASE, 30)
        needed = core.estimator.sequence_bytes(len(BASE) + 29)
        assert needed >= 99 * core.view.token_bytes
        drain(core)
        said(handle)
        with pytest.raises(NeverFits):
            ask(core, [5] * core.view.fitting_tokens, 1)


def test_unsupported_settings_are_refused_with_reason() -> None:
    with pytest.raises(SettingError, match="make one of 4 tokens; use a multiple"):
        Core(model(), **{**SMALL, "block_size": 18})
    with pytest.raises(SettingError, match="compress what they keep"):
        Core(model(), **{**SMALL, "kv_cache_quantization": "affine8"})


def test_check_detects_compressed_rows_missing_from_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def forgotten(
        segment: Segment, live: RecurrentState, rows: Any
    ) -> tuple[Segment, RecurrentState]:
        states = [list(state) for state in live.states]
        for each in rows.values():
            states[each.state][each.place] = None
        return segment, RecurrentState(tuple(map(tuple, states)), exclusive=live.exclusive)

    monkeypatch.setattr(compressed_rows, "completed", forgotten)
    with engine() as core:
        first = ask(core, BASE, 45)
        drain(core)
        (choice,) = first.result(timeout_seconds=0)
        expected, _ = plain_greedy(model(), BASE, 45)
        assert choice.tokens != expected
