"""Models with recurrent layers on the engine: text matches a plain loop."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from asking import answer, ask, cached, drain
from core_parts import cached_nodes, evict_all, pinned_nodes, retentions_of, way_of, why_of
from mlx_lm.models import cache as theirs
from parity_models import (
    RECURRENT_FAMILIES,
    Step,
    assert_same,
    generate,
    model_of,
    prompt_of,
)
from whole_blocks import drop_partial_blocks

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.retention.recurrent import RecurrentStates
from penstock.errors import SettingError
from penstock.kv.states import RecurrentState, blank
from penstock.ledger import Kind
from penstock.prefix import checkpoints
from penstock.prefix.checkpoints import Checkpoints

every_family = pytest.mark.parametrize("family", RECURRENT_FAMILIES)
SMALL = {"block_size": 16, "prefill_chunk": 32}
BASE = tuple(prompt_of(70))
"""Four whole blocks and six tokens."""


@contextmanager
def engine(model: Any, **settings: Any) -> Iterator[Core]:
    core = Core(model, **{"memory_limit": "400MB", **SMALL, **settings})
    try:
        yield core
        core.view.check()
        assert core.view.idle
        assert pinned_nodes(core) == 0
        evict_all(core)
        assert core.ledger.by_class()[Kind.CHECKPOINTS] == 0
    finally:
        core.close()


@functools.cache
def plain(family: str, prompt: tuple[int, ...], tokens: int) -> list[Step]:
    return generate(model_of(family), prompt, theirs.make_prompt_cache(model_of(family)), tokens)


def check(family: str, *handles: Handle) -> None:
    for number, handle in enumerate(handles):
        prompt, tokens = handle.request.prompt, handle.request.max_tokens
        what = f"{family}, request {number} of {len(prompt)} tokens"
        assert_same(answer(handle), plain(family, prompt, tokens), what)


@every_family
def test_text_is_equal_cold_warm_and_next_turn(family: str) -> None:
    with engine(model_of(family)) as core:
        assert way_of(core) == "shared", why_of(core)
        for hits, computed in ((0, 69), (64, 5)):
            before = core.view.stats().prefilled_tokens
            handle = ask(core, BASE, 24)
            drain(core)
            check(family, handle)
            assert cached(handle) == hits
            assert core.view.stats().prefilled_tokens - before == computed
        # 70 + 23 tokens, and the state at their end.
        turn = ask(core, (*BASE, *answer(handle), *prompt_of(4)), 24)
        drain(core)
        check(family, turn)
        assert cached(turn) == 93


@every_family
def test_diverging_prompt_resumes_at_last_checkpoint(family: str) -> None:
    """Chunks end at 32 and 64: a prompt diverging at 48 resumes at 32 and keeps state 48."""
    other = (*BASE[:50], *prompt_of(30, seed=1))
    third = (*BASE[:50], *prompt_of(30, seed=2))
    with engine(model_of(family)) as core:
        first = ask(core, BASE, 8)
        drain(core)
        found = core.view.explain(list(other))
        assert (found.held_tokens, found.reusable_tokens) == (48, 32)
        assert "32" in found.reason
        second = ask(core, other, 8)
        drain(core)
        assert core.view.explain(list(third)).reusable_tokens == 48
        last = ask(core, third, 8)
        drain(core)
        check(family, first, second, last)
        assert [cached(handle) for handle in (first, second, last)] == [0, 32, 48]


@every_family
def test_sequences_joining_and_leaving_batch_match_single_runs(family: str) -> None:
    """Also one-token prompts, which start beside others that have states."""
    rng = random.Random(3)
    with engine(model_of(family), max_batch_size=4) as core:
        handles = []
        for number in range(10):
            shared = BASE[: rng.choice((0, 20, 40, 70))]
            own = prompt_of(rng.choice((1, 2, 17, 40)), seed=number)
            handles.append(ask(core, (*shared, *own), rng.choice((1, 5, 20))))
            drain(core, rng.choice((0, 1, 3)))
        drain(core)
        check(family, *handles)


@every_family
def test_simultaneous_equal_requests_prefill_once(family: str) -> None:
    with engine(model_of(family), max_batch_size=4) as core:
        handles = [ask(core, BASE, 12) for _ in range(4)]
        drain(core)
        check(family, *handles)
        assert core.view.stats().prefilled_tokens < 69 + 3 * 16


@every_family
def test_preempted_cancelled_and_failed_sequences_free_states(family: str) -> None:
    with engine(model_of(family), max_batch_size=2) as core:
        slow = [ask(core, BASE, 30), ask(core, prompt_of(40, seed=5), 30)]
        drain(core, 8)
        urgent = ask(core, prompt_of(20, seed=6), 5, priority=1)
        gone = ask(core, prompt_of(50, seed=7), 30)
        drain(core, 4)
        gone.cancel()
        drain(core)
        check(family, *slow, urgent)
        assert core.view.stats().preemptions > 0


@every_family
def test_text_is_equal_in_little_memory(family: str) -> None:
    """Checkpoints are evicted with their nodes, and counted in the ledger."""
    with engine(model_of(family)) as core:
        need = (
            core.estimator.sequence_bytes(118)
            + core.estimator.decode_bytes(118)
            + core.estimator.prefill_bytes(118)
        )
        room = need + 6 * core.runner.state_bytes + 20_000
        core.set_limit(core.ledger.used_bytes + room)
        handles = []
        for number in range(16):
            handles.append(ask(core, (*BASE[:48], *prompt_of(60, seed=number)), 10))
            drain(core)
        check(family, *handles)
        assert core.view.stats().evicted_nodes > 0


def test_check_detects_state_of_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a state stored under another position changes the text."""
    real = Checkpoints.capture

    def stale(self: Any, path: Any, position: int, live: RecurrentState, **more: Any) -> bool:
        return real(
            self, path, position, RecurrentState(blank(live.owned()), exclusive=True), **more
        )

    monkeypatch.setattr(Checkpoints, "capture", stale)
    with engine(model_of("qwen3_next")) as core:
        for _ in range(2):
            handle = ask(core, BASE, 24)
            drain(core)
        with pytest.raises(AssertionError, match="token"):
            check("qwen3_next", handle)


def test_checkpoints_take_a_quarter_of_prefix_bytes() -> None:
    """Their spacing grows with the distance from the end."""
    with engine(model_of("qwen3_next"), max_kv_size=4_096, keep=16) as core:
        ask(core, prompt_of(2_000), 40)
        drain(core)
        (path,) = [node.path() for node in cached_nodes(core) if not node.children]
        places = [node.start + each.offset for node in path for each in node.segment.checkpoints]
        assert places[-2:] == [2_032, 2_039] and 1_984 in places
        drop_partial_blocks(core)
        gaps = [after - before for before, after in pairwise(places)]
        assert max(gaps[: len(gaps) // 2]) > 2 * max(gaps[-3:])
        kinds = core.ledger.by_class()
        assert kinds[Kind.CHECKPOINTS] <= 0.25 * kinds[Kind.NODES]


@pytest.mark.parametrize("tip", range(16, 3_000, 160))
def test_checkpoint_selection_is_idempotent(tip: int) -> None:
    """However often it is repeated."""
    size = 16
    places = list(range(size, tip + 1, size))
    once = checkpoints.retained(places, tip, size)
    kept: set[int] = set()
    for end in places:
        kept = checkpoints.retained({*kept, end}, end, size)
    assert kept == once
    assert len(once) <= 2 * checkpoints.NEAR * (1 + (tip // size).bit_length())
    assert max(once) == max(places)


def test_checkpoint_count_is_bounded() -> None:
    places = range(16, 3_000, 16)
    for most in (0, 1, 5, 10):
        kept = checkpoints.retained(places, 2_992, 16, {160, 320}, most)
        assert {160, 320, 2_992} <= kept
        assert len(kept) <= max(3, most)


def test_states_are_not_copied_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged batch passes its arrays on."""
    from penstock.engine.model import runner

    given: list[bool] = []
    real = runner.stacked

    def counted(recurrent_states: Sequence[RecurrentState]) -> Any:
        made = real(recurrent_states)
        given.append(made is recurrent_states[0].states)
        return made

    monkeypatch.setattr(runner, "stacked", counted)
    with engine(model_of("falcon_h1")) as core:
        handles = [ask(core, prompt_of(20, seed=number), 10) for number in range(3)]
        drain(core)
        check("falcon_h1", *handles)
    assert sum(given) >= 6


def test_nan_states_are_not_stored() -> None:
    live = RecurrentState(((mx.array([[1.0, float("inf")]]), None),))
    with engine(model_of("mamba2")) as core:
        ask(core, BASE, 2)
        drain(core)
        (path,) = [node.path() for node in cached_nodes(core) if not node.children]
        (recurrent,) = retentions_of(core, RecurrentStates)
        with core.prefixes.pin(core.prefixes.match(path[-1].block_hashes[:1])):
            for node in path:
                recurrent.checkpoints._replace(node, [], range(1_000))
            assert not recurrent.checkpoints.capture(path, 16, live, turn_end=False)


def test_codec_without_kv_layers_is_refused() -> None:
    with pytest.raises(SettingError, match="the model has no KV"):
        Core(model_of("mamba2"), memory_limit="400MB", kv_cache_quantization="4", **SMALL)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_quantized_kv_and_raw_states_are_resumed(family: str) -> None:
    """States stay raw, the ledger is exact, and warm requests resume."""
    with engine(
        model_of(family),
        kv_cache_quantization="8",
        kv_cache_min_quantize_tokens=0,
        block_size=64,
        prefill_chunk=64,
    ) as core:
        prompt = prompt_of(150)
        for hits in (0, 128):
            handle = ask(core, prompt, 8)
            drain(core)
            assert cached(handle) == hits
            assert len(answer(handle)) == 8
