"""Models with windows on the engine: nodes hold only resumable KV; text matches."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from core_parts import (
    cached_match,
    cached_nodes,
    evict_all,
    free_beside_tree,
    layer_shapes,
    placed_sequences,
    retention_of,
    retentions_of,
    shrink,
    way_of,
)
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as theirs
from mlx_lm.models import gemma3_text
from parity_models import SLIDING_WINDOW, Step, assert_same, generate, model_of, prompt_of
from test_cold_parity import restored, with_disk
from test_engine import (
    BASE,
    Guest,
    answer,
    ask,
    bounded_text,
    cached,
    check,
    drain,
    engine,
    plain_text,
    receive,
)
from whole_blocks import drop_partial_blocks

from penstock.attention.span_attention import AttentionWindow
from penstock.engine.core import Core
from penstock.engine.offload import conversation_ends
from penstock.engine.offload import engine_tier as tier_module
from penstock.engine.offload.tier_group import TierGroup
from penstock.engine.retention.recurrent import RecurrentStates
from penstock.engine.retention.requantize import Requantizer
from penstock.engine.retention.windows import Windows, resume, windows_of
from penstock.errors import PenstockError
from penstock.kv.segment import Segment

FAMILIES = ("gemma3", "gpt_oss", "gear")
every_family = pytest.mark.parametrize("family", FAMILIES)
BLOCK = 16
SMALL = {"block_size": BLOCK, "prefill_chunk": 32}
FORK = (*BASE[:50], *prompt_of(30, 3))
"""Parts from `BASE` inside its fourth block."""
ALL = 10**12


def thin(core: Core) -> int:
    """Drop all droppable window KV; return the bytes."""
    freed = free_beside_tree(core, ALL)
    core.view.check()
    assert free_beside_tree(core, ALL) == 0
    return freed


def needed_bytes(core: Core, end: int, first: int | None = None) -> int:
    """Return the node bytes needed to resume a conversation at its end and at `first`."""
    stays = end - max(0, (first or end) - SLIDING_WINDOW) // BLOCK * BLOCK
    windows, shapes = retention_of(core, Windows), enumerate(layer_shapes(core))
    assert windows is not None
    return sum(shape.nbytes * (stays if i in windows.windows else end) for i, shape in shapes)


def node_bytes(core: Core) -> int:
    return core.prefixes.tree.nbytes - core.prefixes.tree.checkpoint_bytes


@every_family
def test_only_last_window_of_conversation_is_resumed(family: str) -> None:
    with engine(model_of(family), **SMALL) as core:
        assert way_of(core) == ("joined" if family == "gear" else "shared")
        first = ask(core, BASE, 24)
        drain(core)
        drop_partial_blocks(core)
        assert node_bytes(core) == 80 * core.view.token_bytes
        before = node_bytes(core)
        assert thin(core) == before - node_bytes(core) > 0
        assert node_bytes(core) == needed_bytes(core, 80)
        turn = ask(core, (*BASE, *answer(first), *prompt_of(4)), 24)
        drain(core)
        check(family, first, turn)
        assert cached(turn) == 80
        thin(core)
        for hits, computed in ((0, 69), (64, 5)):
            explained = core.view.explain(list(BASE))
            assert explained.held_tokens == 64
            assert explained.reusable_tokens == (0 if computed > 64 else None)
            assert ("layers can resume only at token 0" in explained.reason) == (computed > 64)
            before = core.view.stats().prefilled_tokens
            again = ask(core, BASE, 24)
            drain(core)
            check(family, again)
            assert cached(again) == hits
            assert core.view.stats().prefilled_tokens - before == computed


def test_prompt_end_is_retained_after_full_prefill() -> None:
    """A prompt cancelled before its last tokens retains nothing there."""
    with engine(model_of("gemma3"), **SMALL) as core:

        def ends() -> list[int]:
            return [mark.offset for node in cached_nodes(core) for mark in node.segment.checkpoints]

        ask(core, BASE, 24)
        while core.view.stats().prefilled_tokens < 64:
            core.step()
        assert (core.view.stats().held_tokens, ends()) == (64, [])
        drain(core)
        assert ends() == [64]


@every_family
def test_prompt_end_window_is_dropped_last(family: str) -> None:
    """Another answer, or a shorter next turn: the newest prompt end is dropped last."""
    with engine(model_of(family), **SMALL) as core:
        first = ask(core, BASE, 40)
        drain(core)
        drop_partial_blocks(core)
        assert core.view.stats().held_tokens == 96
        excess = node_bytes(core) - needed_bytes(core, 96, 64)
        assert free_beside_tree(core, excess) == excess
        again = ask(core, BASE, 40)
        drain(core)
        drop_partial_blocks(core)
        assert cached(again) == 64
        turn = ask(core, (*BASE, *answer(first), *prompt_of(40)), 8)
        drain(core)
        check(family, first, again)
        assert cached(turn) == 96
        drop_partial_blocks(core)
        assert core.view.stats().held_tokens == 144, "150 tokens and an answer"
        excess = node_bytes(core) - needed_bytes(core, 144)
        assert free_beside_tree(core, excess) == excess, "of its first prompt nothing is left"
        assert core.view.explain(list(turn.request.prompt)).reusable_tokens is None
        assert core.view.explain(list(BASE)).reusable_tokens == 0


@every_family
def test_branch_inside_dropped_tokens_refills_nodes(
    family: str,
) -> None:
    with engine(model_of(family), **SMALL) as core:
        first = ask(core, BASE, 24)
        drain(core)
        thin(core)
        fork = ask(core, FORK, 12)
        drain(core)
        assert cached(fork) == 0
        thin(core)  # but where the two part is a place to go on, now
        assert cached_match(core, list(BASE)).tokens == 64
        third = ask(core, (*BASE[:48], *prompt_of(20, 8)), 12)
        long = ask(core, (*BASE, *answer(first), *prompt_of(4)), 12)
        drain(core)
        assert (cached(third), cached(long)) == (48, 93)
        check(family, first, fork, third, long)


@every_family
def test_concurrent_mixed_requests_match_plain(family: str) -> None:
    """One walks back, one continues, one diverges, and two are equal."""
    with engine(model_of(family), **SMALL, max_batch_size=6) as core:
        first = ask(core, BASE, 24)
        drain(core)
        thin(core)
        turn = (*BASE, *answer(first), *prompt_of(4))
        prompts = (BASE, turn, FORK, BASE, BASE[:64], turn)
        handles = [ask(core, prompt, 20) for prompt in prompts]
        steps = 0
        while core.step():
            steps += 1
            if steps % 3 == 0:
                thin(core)
        check(family, *handles)
        # What the two that ask for the same share is computed once.
        assert core.view.stats().prefilled_tokens < 69 + 69 + 3 + 32 + 2 * 14


def crowd_reference(family: str) -> Callable[[Guest], list[Step]]:
    return lambda guest: plain_text(family, guest.prompt, guest.tokens)


@every_family
@pytest.mark.parametrize("places", [2, 8])
def test_random_arrivals_match_plain_with_all_droppable_kv_dropped(
    family: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps, and wherever room is made within one."""
    with engine(model_of(family), **SMALL, max_batch_size=places) as core:
        make_room, step = core.prefixes.make_room, core.step

        def drop_first(*given: Any) -> bool:
            free_beside_tree(core, ALL)
            return make_room(*given)

        def step_and_drop() -> bool:
            busy = step()
            thin(core)
            return busy

        monkeypatch.setattr(core.prefixes, "make_room", drop_first)
        monkeypatch.setattr(core, "step", step_and_drop)
        receive(core, random.Random(places), 12, crowd_reference(family))


@every_family
def test_random_arrivals_match_plain_in_little_memory(family: str) -> None:
    with engine(model_of(family), **SMALL, max_batch_size=4, max_kv_size=256) as core:
        room = (
            core.estimator.sequence_bytes(120)
            + core.estimator.decode_bytes(120)
            + core.estimator.prefill_bytes(120)
        )
        core.set_limit(core.view.stats().used_bytes + room + 120 * core.view.token_bytes)
        receive(core, random.Random(5), 16, crowd_reference(family))
        assert core.view.stats().evicted_nodes > 0


@pytest.mark.parametrize("family", ["gemma3", "gear"])
def test_random_arrivals_match_plain_past_window(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reference(guest: Guest) -> list[Step]:
        return bounded_text(family, guest.prompt, guest.tokens, 48, 12)

    settings = {"max_kv_size": 48, "keep": 12, "block_size": 8, "prefill_chunk": 16}
    with engine(model_of(family), **settings, max_batch_size=4) as core:
        step = core.step
        monkeypatch.setattr(core, "step", lambda: (step(), thin(core))[0])
        receive(core, random.Random(4), 9, reference)


# ---- under pressure


def test_window_kv_is_dropped_before_nodes_are_evicted() -> None:
    """Least recently used first, only as many as needed; held nodes are left alone."""
    prompts = [tuple(prompt_of(100, seed)) for seed in range(3)]
    with engine(model_of("gemma3"), **SMALL) as core:
        for prompt in prompts:
            ask(core, prompt, 1, hold_seconds=600.0 if prompt is prompts[1] else 0.0)
            drain(core)
        whole = 96 * core.view.token_bytes
        spare = whole - needed_bytes(core, 96)
        core.set_limit(core.ledger.used_bytes - spare // 2)

        def held() -> list[int]:
            found = [cached_match(core, prompt).path for prompt in prompts]
            return [sum(node.segment.kv_nbytes for node in path) for path in found]

        assert whole - spare < held()[0] <= whole - spare // 2
        assert held()[1:] == [whole, whole]
        core.set_limit(core.ledger.used_bytes - spare // 2 - spare // 4)
        assert held()[:2] == [whole - spare, whole]
        assert whole > held()[2] > whole - spare
        assert core.view.stats().evicted_nodes == 0
        core.set_limit(core.ledger.used_bytes - whole)
        assert core.view.stats().evicted_nodes > 0
        core.view.check()


def test_nodes_that_cannot_be_resumed_are_evicted_at_once() -> None:
    """A thinned prompt end evicts all of its path, except what others read."""
    with engine(model_of("gemma3"), **SMALL) as core:
        core.prefixes.tree.max_merge_tokens = 32
        ask(core, (*BASE, *prompt_of(60)), 1)
        drain(core)
        drop_partial_blocks(core)
        thin(core)
        assert core.view.stats().nodes > 2
        shrink(core, 1)
        assert core.view.stats().nodes == 0


def test_window_kv_in_use_is_dropped_to_admit_waiting_request() -> None:
    """The freed bytes are promised before."""
    prompts = [tuple(prompt_of(150, seed)) for seed in range(2)]
    with engine(model_of("gemma3"), **SMALL, max_batch_size=2) as core:
        first = ask(core, prompts[0], 20)
        drain(core, 7)
        assert core.view.stats().running == 1
        own = core.estimator.sequence_bytes(159) + core.estimator.decode_bytes(159)
        frees = core.prefixes._beside.relief.pinned_bytes
        assert frees > 100 * core.view.token_bytes / 3
        core.set_limit(core.ledger.used_bytes + own - frees // 2)
        second = ask(core, prompts[1], 10)
        drain(core, 1)
        assert len(placed_sequences(core)) == 2
        drain(core)
        check("gemma3", first, second)


@functools.cache
def large() -> Any:
    """Return a random model like Gemma 3: five of six layers have a window of 128 tokens."""
    mx.random.seed(1)
    model = gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            num_hidden_layers=6,
            head_dim=32,
            query_pre_attn_scalar=32,
            hidden_size=32,
            intermediate_size=32,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=64,
            sliding_window=128,
            sliding_window_pattern=6,
        )
    )
    mx.eval(model.parameters())
    return model


def test_long_conversation_retains_little_more_than_its_windows() -> None:
    prompt = [token % 64 for token in prompt_of(2_048)]
    settings = {"block_size": 16, "prefill_chunk": 512, "max_kv_size": 4_096}
    with engine(large(), **settings) as core:
        first = ask(core, prompt, 8)
        drain(core)
        drop_partial_blocks(core)
        whole = node_bytes(core)
        assert whole == 2_048 * core.view.token_bytes
        goes_on_with = layer_shapes(core)[0].nbytes * (2_048 + 5 * 128)
        core.set_limit(core.ledger.used_bytes - (whole - goes_on_with))
        assert core.view.stats().evicted_nodes == 0
        assert node_bytes(core) <= 1.15 * goes_on_with < 0.26 * whole
        core.set_limit(400_000_000)
        told = [*prompt, *answer(first), *(token % 64 for token in prompt_of(100))]
        turn = ask(core, told, 8)
        drain(core)
        assert cached(turn) == 2_048
        for handle in (first, turn):
            tokens = handle.request.prompt
            plain = generate(large(), tokens, theirs.make_prompt_cache(large()), 8)
            assert_same(answer(handle), plain, f"{len(tokens)} tokens")


# ---- beside other things


@pytest.mark.parametrize("scheme", ["8", "k8v4"])
def test_windowed_layers_match_plain_with_codecs(scheme: str) -> None:
    """Recomputed codes are bit-identical, so answers are equal."""
    settings = {
        "block_size": 64,
        "prefill_chunk": 64,
        "kv_cache_quantization": scheme,
        "kv_cache_quantize_when": "active",
    }
    prompt = (*prompt_of(200, 7), *BASE)
    with engine(model_of("gemma3"), **settings, kv_cache_min_quantize_tokens=64) as core:
        assert retention_of(core, Requantizer) is not None

        def said(prompt: Sequence[int], hits: int) -> list[int]:
            handle = ask(core, prompt, 24)
            drain(core)
            assert cached(handle) == hits
            return answer(handle)

        first = said(prompt, 0)
        whole = node_bytes(core)
        thin(core)
        assert node_bytes(core) < 0.8 * whole
        turn = (*prompt, *first, *prompt_of(30))
        later = said(turn, 293)
        thin(core)
        assert said(prompt[:100], 0) == said(prompt[:100], 64)
        thin(core)
        assert said(turn, 320) == later
        evict_all(core)
        assert said(prompt, 0) == first


@pytest.mark.parametrize("name", ["baichuan_m1", "recurrent_gemma", "gear"])
def test_windowed_and_recurrent_layers_resume_together(name: str) -> None:
    """A resume position needs both."""
    with tiny_families.uncompiled():
        model = tiny_families.build(name)
        base = tiny_families.prompt_of(70)
        fork, other = ([*base[:50], *tiny_families.prompt_of(20, seed)] for seed in (3, 5))
        with engine(model, **SMALL) as core:
            assert retentions_of(core, RecurrentStates)
            first = ask(core, base, 12)
            drain(core)
            # Its last block is full now: where a conversation went on before, nobody goes on.
            longer = ask(core, [*base, *answer(first), *tiny_families.prompt_of(40, 4)], 12)
            drain(core)
            thin(core)
            handles = [first, longer]
            for prompt in (fork, base, other, base):
                assert core.view.explain(prompt).reusable_tokens is not None
                handles.append(ask(core, prompt, 12))
                drain(core)
                thin(core)
            for handle in handles:
                expected, _ = tiny_families.plain_greedy(model, handle.request.prompt, 12)
                assert answer(handle) == expected
            assert cached(handles[2]) == 0
            assert cached(handles[4]) == 48, "where they part there are states and windows"


@every_family
def test_windowed_layers_resume_from_disk(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped KV is restored into the nodes; incomplete blocks are not written."""
    monkeypatch.setattr(tier_module, "LEAST_PATIENCE_SECONDS", 20.0)
    with with_disk(model_of(family), tmp_path, record_tokens=16) as core:
        first = ask(core, BASE, 24)
        drain(core)
        thin(core)
        again = ask(core, BASE, 24)
        drain(core)
        assert (cached(again), restored(core)) == (64, 64)
        thin(core)
        fork = ask(core, FORK, 12)
        drain(core)
        assert (cached(fork), restored(core)) == (48, 112)
        check(family, first, again, fork)


@pytest.mark.parametrize("waits", [True, False])
def test_window_kv_queued_for_disk_is_dropped_last(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although least recently used; the negative control drops and never writes it."""
    monkeypatch.setattr(tier_module, "LEAST_PATIENCE_SECONDS", 20.0)
    monkeypatch.setattr(conversation_ends, "LINGER_SECONDS", 0.0)
    if not waits:
        monkeypatch.setattr(TierGroup, "waiting_nodes", lambda self: set())
    model, other = model_of("gemma3"), tuple(reversed(BASE))
    with with_disk(model, tmp_path, record_tokens=16) as core:
        assert core.tiers is not None
        ask(core, other, 24)
        drain(core)
        work = core.tiers.work
        core.tiers.work = lambda *, busy: False  # type: ignore[method-assign]
        ask(core, BASE, 24)
        drain(core)
        ask(core, other, 24)  # is used last, and written
        drain(core)
        assert free_beside_tree(core, 1)
        thinned = [node for node in cached_nodes(core) if node.segment.missing]
        keys = cached_match(core, BASE).path
        assert any(node in keys for node in thinned) is not waits
        core.tiers.work = work  # type: ignore[method-assign]
        drain(core)
    with with_disk(model, tmp_path, record_tokens=16) as core:
        after = ask(core, BASE, 24)
        drain(core)
        check("gemma3", after)
        assert (restored(core) == 64) is waits


@every_family
def test_window_kv_dropped_before_write_is_recomputed(family: str, tmp_path: Path) -> None:
    with with_disk(model_of(family), tmp_path, record_tokens=16) as core:
        assert core.tiers is not None
        work = core.tiers.work
        core.tiers.work = lambda *, busy: False  # type: ignore[method-assign]
        ask(core, BASE, 24)
        drain(core)
        thin(core)
        core.tiers.work = work  # type: ignore[method-assign]
        again = ask(core, (*BASE[:66], 7), 12)
        drain(core)
        check(family, again)
    with with_disk(model_of(family), tmp_path, record_tokens=16) as core:
        after = ask(core, BASE, 24)
        drain(core)
        check(family, after)


def test_refilled_blocks_stay_private_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine(model_of("gemma3"), **SMALL) as core:
        first = ask(core, BASE, 24)
        drain(core)
        thin(core)
        monkeypatch.setattr(core.prefixes, "cut", lambda *_: False)
        short = [node.segment for node in cached_nodes(core)]
        again = ask(core, FORK, 24)
        drain(core, 4)
        assert [node.segment for node in cached_nodes(core)] == short
        drain(core)
        monkeypatch.undo()
        last = ask(core, FORK, 24)
        drain(core)
        check("gemma3", first, again, last)


# ---- where to go on


@dataclasses.dataclass
class Place:
    """The fields of a node that are read."""

    start: int
    segment: Segment


@given(st.data())
def test_resume_position_matches_brute_force(data: st.DataObject) -> None:
    """Compared with a token-by-token search."""
    windows = {0: data.draw(st.integers(2, 9)), 2: data.draw(st.integers(2, 9))}
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    path, start, held = [], 0, set[tuple[int, int]]()
    for length in lengths:
        gone = (data.draw(st.integers(0, length)), 0, data.draw(st.integers(0, length)))
        segment = Segment((), length=length, missing=gone if any(gone) else ())
        path.append(Place(start, segment))
        held |= {(layer, start + at) for layer in windows for at in range(gone[layer], length)}
        start += length
    most = data.draw(st.integers(0, start))

    def whole(position: int) -> bool:
        return all(
            (layer, at) in held
            for layer, window in windows.items()
            for at in range(max(0, position - window + 1), position)
        )

    deepest = max(position for position in range(most + 1) if whole(position))
    assert resume(path, most, windows) == deepest  # type: ignore[arg-type]


def test_windows_of_layers_ignore_unreached_bounds() -> None:
    attention_windows = [
        AttentionWindow(4),
        AttentionWindow(100, 4),
        AttentionWindow(8),
        AttentionWindow(104),
        AttentionWindow(4, 2),
        AttentionWindow(),
    ]
    assert windows_of(attention_windows, 104) == {0: 4, 2: 8}


# ---- negative controls


@contextmanager
def drop_one_block_too_many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = Windows._nearest
    with monkeypatch.context() as patch:
        patch.setattr(
            Windows,
            "_nearest",
            lambda self, readers, *, turns: {
                node: at + BLOCK for node, at in real(self, readers, turns=turns).items()
            },
        )
        yield


@every_family
def test_check_detects_one_dropped_block_too_many(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recount, by a read, and by the text."""
    core = Core(model_of(family), memory_limit="400MB", **SMALL)
    handle = ask(core, BASE[:65], 12)
    drain(core, 2)  # all but the last token are read
    with drop_one_block_too_many(monkeypatch):
        free_beside_tree(core, ALL)
    with pytest.raises(AssertionError, match="is seen from"):
        core.view.check()
    with monkeypatch.context() as patch:
        patch.setattr(Windows, "check", lambda *_: None)
        drain(core)
    with pytest.raises(PenstockError, match="no longer has its first"):
        answer(handle)
    core.close()


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_check_detects_read_of_dropped_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(model_of(family), memory_limit="400MB", **SMALL)
    real = Segment.columns

    def columns(self: Segment, layer: int, start: int, stop: int) -> tuple[int, int]:
        gone = self.missing[layer]
        return (0, stop - start) if start < gone else real(self, layer, start, stop)

    monkeypatch.setattr(Segment, "columns", columns)
    monkeypatch.setattr(Windows, "check", lambda *_: None)
    handle = ask(core, BASE[:65], 24)
    drain(core, 2)
    with drop_one_block_too_many(monkeypatch):
        free_beside_tree(core, ALL)
    drain(core)
    with pytest.raises((AssertionError, PenstockError), match=r"which led by|broadcast"):
        check(family, handle)
    core.close()
