"""Errors in a step, sampler, text or allocation fail only the affected requests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from core_parts import cached_nodes, evict_all, weights_bytes_of
from engine_faults import (
    Broken,
    Fault,
    decodes,
    fail_after_last_layer,
    fails,
    model_of,
    reads_a_chunk,
    return_nan_logits,
    runs_out_of_memory,
    spell,
)
from fault_setup import (
    BLOCK,
    CHUNK,
    SETTINGS,
    Setup,
    assert_begins_right,
    assert_right,
    end_of,
    error_of,
    made,
    prompt_of,
    solo,
)

from penstock.engine import memory_pressure
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model.text_decoding import TextDecoding
from penstock.engine.request import Request, Sampling
from penstock.engine.schedule.scheduler import State
from penstock.errors import NeverFits, PenstockError, QueueFull, SettingError, StepFailed
from penstock.kv.segment import Segment
from penstock.ledger import Kind
from penstock.prefix.tree import PrefixTree

LONG, SHORT = 200, 10
"""Tokens of a prompt that takes many chunks, and of one that takes one."""


def crowd(setup: Setup) -> tuple[list[Handle], Handle, Handle]:
    """Return two running answers, a prefilling one, and one that waits for a slot."""
    running = [setup.ask(SHORT), setup.ask(SHORT)]
    for handle in running:
        setup.until(handle, State.RUNNING)
    prefilling = setup.ask(LONG)
    setup.until(prefilling, State.PREFILLING)
    setup.sequence(prefilling).unmixed = True  # a failure is then of one kind of pass
    waiting = setup.ask(SHORT)
    setup.step()
    states = [setup.state(handle) for handle in (*running, prefilling, waiting)]
    assert states == [State.RUNNING, State.RUNNING, State.PREFILLING, State.WAITING]
    return running, prefilling, waiting


# ---- the model


@pytest.mark.parametrize("how", [fails, fail_after_last_layer])
def test_failed_decode_step_fails_only_its_sequences(how: Fault) -> None:
    with made() as setup:
        running, prefilling, waiting = crowd(setup)
        setup.model.arm(how, only=decodes)
        setup.step()
        assert setup.model.rows == [2]
        for handle in running:
            error = error_of(handle)
            assert isinstance(error, StepFailed)
            assert "while decoding: ValueError: a model's bug" in str(error)
            assert error.status == 500
            assert_begins_right(handle)
            with pytest.raises(StepFailed, match="a model's bug"):
                handle.result(timeout_seconds=0)
        setup.drain()
        assert_right(prefilling)
        assert_right(waiting)
        stats = setup.core.view.stats()
        assert (stats.requests, stats.finished, stats.failed) == (4, 4, 2)
        again = setup.ask(running[0].request.prompt)
        setup.drain()
        assert_right(again)


@pytest.mark.parametrize("how", [fails, fail_after_last_layer])
def test_failed_chunk_fails_only_its_prompt(how: Fault) -> None:
    with made() as setup:
        running, prefilling, waiting = crowd(setup)
        setup.model.arm(how, only=reads_a_chunk)
        setup.step()
        assert "reading its prompt: ValueError: a model's bug" in str(error_of(prefilling))
        setup.drain()
        for handle in (*running, waiting):
            assert_right(handle)
        # What was read before the failure is there for whoever asks again.
        again = setup.ask(prefilling.request.prompt)
        setup.drain()
        assert_right(again)
        assert end_of(again).usage.cached_tokens >= CHUNK


def test_shared_prompt_stays_cached_if_one_request_fails() -> None:
    with made() as setup:
        prompt = prompt_of(LONG)
        handles = [setup.ask(prompt) for _ in range(3)]
        setup.step()
        setup.model.arm(fails, only=reads_a_chunk)
        setup.drain()
        assert [isinstance(end_of(handle).error, StepFailed) for handle in handles].count(True) == 1
        for handle in handles:
            if end_of(handle).error is None:
                assert_right(handle)


def test_nan_logits_fail_only_their_rows() -> None:
    with made() as setup:
        running, prefilling, waiting = crowd(setup)
        setup.model.arm(return_nan_logits, only=decodes)
        setup.step()
        for handle in running:
            assert "logit is nan" in str(error_of(handle))
        setup.drain()
        assert_right(prefilling)
        assert_right(waiting)


def overflows(model: Any, tokens: mx.array, cache: Any) -> Any:
    """Write infinite keys, as overflowing float16 weights do."""
    update = type(cache[0]).update_and_fetch

    class Overflowing(type(cache[0])):  # type: ignore[misc]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            return update(self, keys * float("inf"), values)

    cache[0].__class__ = Overflowing
    return model(tokens, cache=cache)


def test_nan_keys_are_not_shared() -> None:
    with made() as setup:
        prompt = prompt_of(LONG)
        first = setup.ask(prompt)
        setup.step()
        setup.model.arm(overflows, only=reads_a_chunk)
        setup.step()
        assert "NaN or infinity at tokens" in str(error_of(first))
        again = setup.ask(prompt)
        setup.drain()
        assert_right(again)


@pytest.mark.parametrize(
    ("how", "only"),
    [
        (fails, decodes),
        (fails, reads_a_chunk),
        (fail_after_last_layer, decodes),
        (fail_after_last_layer, reads_a_chunk),
        (return_nan_logits, decodes),
        (overflows, reads_a_chunk),
    ],
)
def test_caught_error_retains_no_arrays(how: Fault, only: Any) -> None:
    """Not even until the garbage collector runs."""
    with made() as setup:
        handles = []
        for _ in range(3):
            handles.append(setup.ask(LONG))
            setup.model.arm(how, only=only)
            for _ in range(30):
                setup.step()
            assert not setup.model.times
            evict_all(setup.core)
            setup.check()
        for handle in handles:
            error: BaseException | None = error_of(handle)
            while error is not None:
                assert error.__traceback__ is None, "frames keep their local variables"
                error = error.__cause__ or error.__context__


# ---- one request's own faults


def break_sampler(setup: Setup, handle: Handle) -> None:
    sequence = setup.sequence(handle)
    sequence.sampler = Broken(sequence.sampler, sequence.generated_tokens + 1)


def break_stop_strings(setup: Setup, handle: Handle) -> None:
    text = setup.sequence(handle).text
    assert text is not None and text._stops is not None
    text._stops.depth = []


def break_detokenizer(setup: Setup, handle: Handle) -> None:
    text: Any = setup.sequence(handle).text
    text._detokenizer.breaks_at = text._detokenizer.count + 1


def break_finalize(setup: Setup, handle: Handle) -> None:
    text: Any = setup.sequence(handle).text
    text._detokenizer.breaks_at = -1


@pytest.mark.parametrize(
    "breaks", [break_sampler, break_stop_strings, break_detokenizer, break_finalize]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(logprobs=True)])
def test_failing_request_affects_no_other_request(
    breaks: Callable[[Setup, Handle], None], sampling: Sampling
) -> None:
    with made() as setup:
        others = [setup.ask(SHORT), setup.ask(SHORT, sampling=Sampling(logprobs=True))]
        bad = setup.ask(SHORT, stop=("never said",), sampling=sampling)
        setup.until(bad, State.RUNNING)
        breaks(setup, bad)
        setup.drain()
        error = error_of(bad)
        assert isinstance(error, StepFailed)
        assert "Error: " in str(error)
        assert_begins_right(bad)
        for handle in others:
            assert_right(handle)


def test_failed_choice_does_not_affect_other_choices() -> None:
    with made() as setup:
        setup.tokenizer.breaks = [None, 4, None]
        handle = setup.ask(SHORT, n=3)
        setup.drain()
        assert "a detokenizer's bug" in str(error_of(handle, 1))
        assert len(handle.choices[1].tokens) == 4
        assert_right(handle, 0)
        assert_right(handle, 2)
        with pytest.raises(StepFailed):
            handle.result(timeout_seconds=0)


def test_overflowing_logit_bias_fails_only_its_row() -> None:
    """An error that a real request can cause."""
    with made() as setup:
        good = setup.ask(SHORT)
        prompt = prompt_of(SHORT, 9)
        bad = setup.ask(
            prompt, sampling=Sampling(logit_bias={prompt[0]: 1e30}, repetition_penalty=1e-20)
        )
        setup.drain()
        assert "the largest logit is inf" in str(error_of(bad))
        assert type(error_of(bad)) is PenstockError
        assert_right(good)


def test_tokenizer_copy_error_is_raised_to_caller() -> None:
    with made() as setup:
        other = setup.ask(SHORT)
        intake = setup.core.intake
        text, intake.text = intake.text, TextDecoding(SimpleNamespace(eos_token_ids=()))
        with pytest.raises(AttributeError):
            setup.ask(SHORT)
        intake.text = text
        setup.drain()
        assert_right(other)


# ---- no memory


def mixes(tokens: mx.array) -> bool:
    """Return whether a pass contains decode rows and a chunk."""
    rows, width = tokens.shape
    return width == 1 and rows > SETTINGS["max_batch_size"]


def decodes_apart(tokens: mx.array) -> bool:
    return decodes(tokens) and not mixes(tokens)


def has_a_chunk(tokens: mx.array) -> bool:
    return reads_a_chunk(tokens) or mixes(tokens)


@pytest.mark.parametrize("only", [decodes_apart, has_a_chunk])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_out_of_memory_evicts_then_retries_then_fails_one_sequence(
    only: Callable[[mx.array], bool], times: int
) -> None:
    with made() as setup:
        for _ in range(4):  # what nobody reads any more
            setup.ask(2 * BLOCK + 1, max_tokens=1)
        setup.drain()
        held = setup.core.view.stats().nodes
        running, prefilling, waiting = crowd(setup)
        before = setup.core.view.stats()
        setup.model.arm(runs_out_of_memory, times, only=only)
        setup.drain()
        assert not setup.model.times
        after = setup.core.view.stats()
        if times == 1:
            assert 0 < after.evicted_nodes - before.evicted_nodes < held, "half of it goes"
        handles = [*running, prefilling, waiting]
        failed = [handle for handle in handles if end_of(handle).error is not None]
        # A chunk is tried again at once; a step is when all of it was preempted and let in again.
        assert len(failed) == after.failed == (times // 2 if only is has_a_chunk else times - 1)
        # Of a prompt that is evicted, the second time is not counted.
        assert after.out_of_memory in (times, times - len(failed))
        for handle in failed:
            error = error_of(handle)
            assert isinstance(error, StepFailed)
            assert error.status == 503
            assert "out of memory" in str(error)
        for handle in handles:
            if handle not in failed:
                assert_right(handle)


def test_longest_sequence_fails_when_out_of_memory() -> None:
    # Both prompts are computed again in one step, so no step succeeds between the two that fail.
    with made(prefill_chunk=LONG + 2 * CHUNK, max_stall_ms=0) as setup:
        short, longest = setup.ask(SHORT), setup.ask(LONG)
        setup.until(short, State.RUNNING)
        setup.until(longest, State.RUNNING)
        setup.model.arm(runs_out_of_memory, 2, only=decodes)
        setup.drain()
        assert isinstance(error_of(longest), StepFailed)
        assert_right(short)


def oversized_mlx_array(model: Any, tokens: mx.array, cache: Any) -> Any:
    """Request 2^46 numbers from MLX, more than an axis supports."""
    mx.eval(mx.zeros((1 << 46,)))


def test_request_fails_if_mlx_refuses_allocation() -> None:
    with made() as setup:
        running, prefilling, waiting = crowd(setup)
        setup.model.arm(oversized_mlx_array, only=decodes)
        setup.drain()
        for handle in running:
            assert "OverflowError" in str(error_of(handle))
        assert_right(prefilling)
        assert_right(waiting)


class NoRoom:
    """Lets the next merge of two nodes fail for lack of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self.merging = False
        self.merge, self.join = PrefixTree.merge, Segment.join
        monkeypatch.setattr(PrefixTree, "merge", lambda *nodes: self.merged(*nodes))
        monkeypatch.setattr(Segment, "join", lambda mine, *others: self.joined(mine, *others))

    def merged(self, *nodes: Any) -> Any:
        self.merging = True
        try:
            return self.merge(*nodes)
        finally:
            self.merging = False

    def joined(self, mine: Segment, *others: Segment) -> Segment:
        if self.times and self.merging:
            self.times -= 1
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return self.join(mine, *others)


@pytest.mark.parametrize("after", [0, 5, 30])
def test_failed_merge_affects_no_request(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Merging happens in a chunk, when a block fills, and when an answer ends."""
    with made() as setup:
        no_room = NoRoom(monkeypatch)
        handle = setup.ask(3 * BLOCK, max_tokens=4 * BLOCK)
        setup.step(after)
        no_room.times = 1
        setup.drain()
        assert no_room.times == 0, "nothing was merged"
        assert_right(handle)
        assert setup.core.view.stats().out_of_memory == 1
        again = setup.ask(handle.request.prompt)
        setup.drain()
        assert_right(again)


def test_failed_block_copy_fails_only_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    with made() as setup:
        first, second = setup.ask(BLOCK - 6), setup.ask(SHORT)
        setup.until(first, State.RUNNING)
        setup.until(second, State.RUNNING)
        slot = setup.sequence(first).kv.slot
        cut = setup.core.tails.cut

        def without_room(of: int, stop: int, behind: Segment | None = None) -> Segment:
            if of == slot:
                raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
            return cut(of, stop, behind)

        monkeypatch.setattr(setup.core.tails, "cut", without_room)
        setup.drain()
        assert isinstance(error_of(first), StepFailed)
        assert_right(second)


# ---- what can never be, or not now


def test_oversized_request_is_refused_with_numbers() -> None:
    with made() as setup:
        setup.core.set_limit(setup.fixed + 100_000)
        with pytest.raises(
            NeverFits, match=r"KV for 500 tokens needs .* kB; the limit of"
        ) as caught:
            setup.ask(499, max_tokens=12)
        error = caught.value
        assert (error.room_bytes, error.limit_bytes) == (100_000, setup.fixed + 100_000)
        assert error.needed_bytes > 499 * setup.core.view.token_bytes
        assert error.status == 413
        assert setup.core.view.idle
        assert setup.core.view.stats().requests == 0
        setup.check()
        # One byte decides.
        handle = None
        for more in (0, 1):
            setup.core.set_limit(setup.fixed + error.needed_bytes - 1 + more)
            if more:
                handle = setup.ask(499, max_tokens=1)
            else:
                with pytest.raises(NeverFits):
                    setup.ask(499, max_tokens=12)
        assert handle is not None
        setup.drain()
        assert_right(handle)


def test_waiting_request_fails_when_it_can_never_fit() -> None:
    with made() as setup:
        running = [setup.ask(SHORT) for _ in range(3)]
        setup.step()
        waiting, small = setup.ask(LONG), setup.ask(SHORT)
        setup.core.set_limit(setup.fixed + 100_000)
        assert isinstance(error_of(waiting), NeverFits)
        setup.drain()
        for handle in (*running, small):
            assert_right(handle)


def test_limit_below_fixed_bytes_is_refused() -> None:
    with made() as setup:
        handle = setup.ask(SHORT)
        setup.step(2)
        before = setup.core.ledger.limit_bytes
        with pytest.raises(NeverFits):
            setup.core.set_limit(setup.fixed - 1)
        assert setup.core.ledger.limit_bytes == before
        setup.drain()
        assert_right(handle)


def test_full_queue_refuses_all_choices_of_request() -> None:
    with made(max_queue=4) as setup:
        waiting = setup.ask(SHORT, n=3)
        with pytest.raises(QueueFull, match="3 waiting, 2 more requested, max_queue 4"):
            setup.ask(SHORT, n=2)
        last = setup.ask(SHORT)
        with pytest.raises(QueueFull) as caught:
            setup.ask(SHORT)
        assert (caught.value.waiting, caught.value.added, caught.value.max_queue) == (4, 1, 4)
        assert caught.value.status == 429
        assert setup.core.view.stats().requests == 4
        setup.step()
        after = setup.ask(SHORT)  # three have a place now
        setup.drain()
        for choice in range(3):
            assert_right(waiting, choice)
        assert_right(last)
        assert_right(after)


def test_token_beyond_vocabulary_is_refused() -> None:
    with made() as setup:
        with pytest.raises(SettingError, match="token 512; the model knows 512 tokens"):
            setup.ask((5, 512))
        with pytest.raises(SettingError, match="logit_bias names token 512"):
            setup.ask((5,), sampling=Sampling(logit_bias={512: 1.0}))
        assert setup.core.view.idle


# ---- leaving early


def in_state(setup: Setup, state: State, **settings: Any) -> tuple[Handle, list[Handle]]:
    """Return an answer in a state, and the other answers needed to get there."""
    if state is State.PREFILLING:
        handle = setup.ask(LONG, **settings)
        setup.step(2)
        return handle, []
    if state is State.WAITING:
        others = [setup.ask(SHORT) for _ in range(3)]
        return setup.ask(SHORT, **settings), others
    handle = setup.ask(BLOCK + 3, 30, **settings)
    setup.step(7)
    if state is not State.PREEMPTED:
        return handle, []
    others = [setup.ask(SHORT, priority=1) for _ in range(3)]
    setup.step()
    return handle, others


OPEN = [State.WAITING, State.PREFILLING, State.RUNNING, State.PREEMPTED]


@pytest.mark.parametrize("state", OPEN)
def test_cancel_frees_everything_at_once(state: State) -> None:
    with made() as setup:
        handle, others = in_state(setup, state)
        assert setup.state(handle) is state
        handle.cancel()
        finish = end_of(handle)
        assert (finish.reason, finish.error) == ("cancelled", None)
        assert_begins_right(handle)
        assert handle.choices[0].text == spell(handle.choices[0].tokens), "said, and not told"
        assert (len(handle.choices[0].tokens) > 0) == (state in (State.RUNNING, State.PREEMPTED))
        setup.check()
        handle.cancel()  # again does nothing
        assert handle.events() == []
        assert handle.result(timeout_seconds=0)[0].finish is finish
        setup.drain()
        for other in others:
            assert_right(other)
        again = setup.ask(handle.request.prompt, handle.request.max_tokens)
        setup.drain()
        assert_right(again)
        assert (end_of(again).usage.cached_tokens > 0) == (state is not State.WAITING)


def test_cancel_leaves_finished_choices_unchanged() -> None:
    with made() as setup:
        handle = setup.ask(SHORT, n=3)
        setup.step(3)
        setup.sequence(handle).request = handle.request.model_copy(update={"max_tokens": 3})
        setup.step(2)
        assert end_of(handle, 2).reason == "length"
        handle.cancel()
        assert [end_of(handle, i).reason for i in range(3)] == ["cancelled", "cancelled", "length"]


def test_request_can_be_cancelled_while_iterating_events() -> None:
    with made() as setup:
        handle, other = setup.ask(SHORT), setup.ask(SHORT)
        setup.step(5)
        for event in handle:
            if event.__class__.__name__ == "Token" and len(handle.choices[0].tokens) == 2:
                handle.cancel()
        assert end_of(handle).reason == "cancelled"
        setup.drain()
        assert_right(other)


@pytest.mark.parametrize("state", OPEN)
def test_request_times_out_in_every_state(state: State) -> None:
    with made() as setup:
        handle, others = in_state(setup, state, timeout_seconds=5.0)
        assert setup.state(handle) is state
        setup.now = 4.999
        setup.step()
        assert not handle.done
        setup.now = 5.0
        setup.step()
        finish = end_of(handle)
        assert (finish.reason, finish.error) == ("timeout", None)
        assert_begins_right(handle)
        setup.drain()
        for other in others:
            assert_right(other)


# ---- priorities


def test_higher_priority_preempts_latest_of_lowest_priority() -> None:
    with made() as setup:
        low = [setup.ask(BLOCK + i, 25, priority=p) for i, p in enumerate((0, 1, 0))]
        setup.step(6)
        high = setup.ask(SHORT, priority=2)
        setup.step()
        states = [setup.state(handle) for handle in low]
        assert states == [State.RUNNING, State.RUNNING, State.PREEMPTED]
        setup.until(high, State.DONE)
        assert [handle.done for handle in low] == [False] * 3
        setup.drain()
        for handle in (*low, high):
            assert_right(handle)
        assert setup.core.view.stats().preemptions == 1
        assert end_of(low[2]).usage.cached_tokens == 0, "its own work is no hit"


def test_repeated_preemption_keeps_answer() -> None:
    with made(max_batch_size=1) as setup:
        low = setup.ask(BLOCK + 5, 40)
        high = []
        for _ in range(10):
            setup.step(4)
            high.append(setup.ask(SHORT, 2, priority=1))
        setup.drain()
        assert setup.core.view.stats().preemptions == 10
        for handle in (low, *high):
            assert_right(handle)


def test_preemption_during_prefill_keeps_answer() -> None:
    with made() as setup:
        long = setup.ask(LONG)
        setup.step(2)
        high = [setup.ask(SHORT, 3, priority=1) for _ in range(3)]
        setup.step()
        assert setup.state(long) is State.PREEMPTED
        setup.drain()
        for handle in (long, *high):
            assert_right(handle)
        stats = setup.core.view.stats()
        assert (stats.preemptions, stats.hit_tokens) == (1, 0)
        assert stats.prompt_tokens == LONG + 3 * SHORT
        assert stats.prefilled_tokens == LONG - 1 + 3 * (SHORT - 1), "what was read is read again"


def test_equal_priorities_do_not_preempt() -> None:
    with made() as setup:
        first = [setup.ask(SHORT) for _ in range(3)]
        setup.step()
        later = setup.ask(SHORT)
        setup.step()
        assert setup.state(later) is State.WAITING
        setup.drain()
        assert setup.core.view.stats().preemptions == 0
        for handle in (*first, later):
            assert_right(handle)


# ---- the machine's memory


def test_least_valuable_nodes_are_evicted_under_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    used = 0.4

    def memory() -> Any:
        looks.append(used)
        return SimpleNamespace(total=1_000_000, available=int((1 - used) * 1_000_000))

    monkeypatch.setattr("penstock.engine.memory_pressure.psutil.virtual_memory", memory)
    with made(memory_threshold=0.5) as setup:
        old, cold, warm = (prompt_of(5 * BLOCK, seed) for seed in (1, 2, 3))
        for prompt in (old, cold, warm, old):  # `cold` was used least recently
            setup.ask(prompt, 1)
            setup.drain()
            setup.now += 100.0
        assert len(looks) >= 4
        used = 0.501
        looks.clear()
        running = setup.ask(SHORT)
        setup.step()
        found = {p: setup.core.view.explain(p) for p in (old, cold, warm)}
        assert {p for p in found if found[p].held_tokens < 5 * BLOCK} == {cold}
        assert found[cold].evicted_for == "pressure"
        assert "memory" in found[cold].reason
        setup.step(3)
        assert looks == [0.501], "once a second, not once a step"
        used = 0.9
        setup.now += 1.0
        setup.step()
        own = {node for node in cached_nodes(setup.core) if node.pins}
        assert set(cached_nodes(setup.core)) == own, "all that nobody reads is gone"
        setup.drain()
        assert_right(running)


def test_cache_is_evicted_when_process_memory_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test process exceeds the small limit; at least half of it always remains."""
    with made() as setup:
        ledger, prompt = setup.core.prefixes.ledger, prompt_of(5 * BLOCK, 1)
        setup.ask(prompt, 1)
        setup.drain()
        rss = psutil.Process().memory_info().rss
        monkeypatch.setattr(memory_pressure, "SPARE_BYTES", rss // 2)
        assert 0.3 * rss < memory_pressure.resident_over(0, 10**12) < 0.7 * rss
        assert memory_pressure.resident_over(0, 70) == 70
        assert memory_pressure.resident_over(100, 70) == 20
        assert memory_pressure.resident_over(10**12, 10**12) < 0

        def later() -> None:
            setup.now += 1.0
            setup.ask(SHORT, 1)
            setup.drain()

        setup.core.set_limit(int(1.1 * ledger.used_bytes))
        later()
        assert setup.core.view.explain(prompt).held_tokens > 0, "of a library's user"
        setup.core.bound_process()
        later()
        assert setup.core.view.explain(prompt).held_tokens == 0
        assert setup.core.view.explain(prompt).evicted_for == "pressure"


@pytest.mark.parametrize("fault", [OSError(24, "Too many open files"), KeyError("MemTotal:")])
def test_unreadable_memory_statistics_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    """No file can be opened, so free memory is unknown."""

    def memory() -> Any:
        raise fault

    monkeypatch.setattr("penstock.engine.memory_pressure.psutil.virtual_memory", memory)
    with made(memory_threshold=0.5) as setup:
        handle = setup.ask(SHORT)
        for _ in range(3):
            setup.step()
            setup.now += 1.0
        setup.drain()
        assert_right(handle)
    said = [r for r in caplog.records if type(fault).__name__ in r.getMessage()]
    assert len(said) <= 1, "once, not once a second"


def test_threshold_of_one_disables_memory_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory() -> Any:
        raise AssertionError("looked")

    monkeypatch.setattr("penstock.engine.memory_pressure.psutil.virtual_memory", memory)
    with made(memory_threshold=1.0) as setup:
        handle = setup.ask(SHORT)
        setup.drain()
        assert_right(handle)


# ---- what is given back


def test_released_arrays_are_freed_without_garbage_collector() -> None:
    """Reference cycles once held whole segments, uncounted and above the limit."""
    with made() as setup:
        for _ in range(4):
            handles = [setup.ask(LONG, 3) for _ in range(2)]
            setup.drain()
            for handle in handles:
                assert_right(handle)
            evict_all(setup.core)
            setup.check()
            assert (
                setup.core.view.held_bytes == weights_bytes_of(setup.core) + setup.core.tails.nbytes
            )


def test_no_reference_cycle_retains_arrays() -> None:
    with made() as setup:
        crowd(setup)
        setup.drain()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            crowd(setup)
            setup.drain()
            gc.collect()
            assert not [kept for kept in gc.garbage if isinstance(kept, (mx.array, Segment))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def test_closed_engine_counts_only_weights_and_empty_index() -> None:
    with made() as setup:
        handles = crowd(setup)
        setup.core.close()
        for handle in (*handles[0], *handles[1:]):
            assert end_of(handle).reason == "cancelled"
            assert_begins_right(handle)
        left = {kind: n for kind, n in setup.core.ledger.by_class().items() if n}
        weights, index = weights_bytes_of(setup.core), setup.core.prefixes.fixed_bytes
        assert left == {Kind.WEIGHTS: weights, Kind.INDEX: index}
        assert setup.core.view.idle
        setup.fixed = weights + index


# ---- making one


def fixed_bytes() -> dict[Kind, int]:
    core = Core(model_of("llama"), None, **SETTINGS)
    try:
        return core.ledger.by_class()
    finally:
        core.close()


@pytest.fixture
def cache_limit() -> Any:
    """Return MLX's cache limit, which a failed construction must not change."""
    gc.collect()  # cores that other tests have left open
    before = mx.set_cache_limit(123_456_789)
    yield 123_456_789
    mx.set_cache_limit(before)


def test_engine_beyond_limit_is_refused(cache_limit: int) -> None:
    found = fixed_bytes()
    weights, tails = found[Kind.WEIGHTS], found[Kind.TAILS]
    buffers = found[Kind.BUFFERS]
    gc.collect()
    active = mx.get_active_memory()
    steps = [1_000, weights, weights + tails, weights + tails + buffers // 2]
    for limit in steps:
        with pytest.raises(NeverFits) as caught:
            Core(model_of("llama"), None, **{**SETTINGS, "memory_limit": limit})
        error = caught.value
        assert error.limit_bytes == limit
        assert error.needed_bytes > error.room_bytes
        assert "limit" in str(error)
        del caught, error
        assert mx.set_cache_limit(cache_limit) == cache_limit
        gc.collect()
        assert mx.get_active_memory() == active, "something of it is still there"


def test_close_restores_mlx_cache_limit(cache_limit: int) -> None:
    core = Core(model_of("llama"), None, **SETTINGS)
    core.close()
    assert mx.set_cache_limit(cache_limit) == cache_limit


def test_mlx_memory_limit_covers_all_open_engines() -> None:
    """MLX allocates up to a hundred operations ahead."""
    before = mx.set_memory_limit(10**15)
    other = mx.zeros(1_000_000)  # of this process, and of no engine
    mx.eval(other)
    try:
        first = Core(model_of("llama"), None, **SETTINGS)
        limit, more = first.ledger.limit_bytes, memory_limit_now()
        assert limit + other.nbytes <= more < 10**12
        second = Core(model_of("llama"), None, **SETTINGS)
        assert memory_limit_now() >= more + limit
        second.close()
        assert memory_limit_now() == more
        first.set_limit(limit - 1_000_000)
        assert memory_limit_now() == more - 1_000_000
        first.close()
        assert memory_limit_now() == 10**15
    finally:
        mx.set_memory_limit(before)


def test_closing_engine_while_opening_another_does_not_deadlock() -> None:
    """An unclosed core may be collected on the thread that holds the lock."""
    limits, share = memory_pressure.MLXLimits(), memory_pressure.MLXShare(1_000, 10**9)

    class Collecting(dict[int, Any]):
        def values(self) -> Any:
            found = list(super().values())
            if 2 in self:
                limits.share(2, None)
            return found

    before = mx.set_memory_limit(10**15)
    limits._shares = Collecting({2: share})
    try:
        work = threading.Thread(target=limits.share, args=(1, share), daemon=True)
        work.start()
        work.join(10.0)
        assert not work.is_alive(), "it waits for itself"
        assert memory_limit_now() == 10**9, "the other one has ended"
        limits.share(1, None)
        assert memory_limit_now() == 10**15
    finally:
        mx.set_memory_limit(before)


def memory_limit_now() -> int:
    limit: int = mx.set_memory_limit(0)
    mx.set_memory_limit(limit)
    return limit


def test_two_engines_restore_mlx_cache_limit(cache_limit: int) -> None:
    first = Core(model_of("llama"), None, **SETTINGS)
    second = Core(model_of("llama"), None, **{**SETTINGS, "max_batch_size": 5})
    first.close()
    second.close()
    assert mx.set_cache_limit(cache_limit) == cache_limit


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_limit": "abc"},
        {"memory_limit": 1e9},
        {"memory_limit": True},
        {"memory_limit": 0},
        {"memory_limit": -1},
        {"keep": "a"},
        {"keep": 1.5},
        {"keep": True},
        {"keep": -1},
        {"keep": 1_024},
        {"max_kv_size": 1},
        {"max_batch_size": 0},
        {"block_size": 0},
        {"prefill_chunk": 0},
        {"max_queue": 0},
        {"memory_threshold": "x"},
        {"memory_threshold": 0.0},
        {"memory_threshold": 1.5},
        {"memory_threshold": float("nan")},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_invalid_setting_is_named_in_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        Core(model_of("llama"), None, **{**SETTINGS, **wrong})
    (name,) = wrong
    assert name in str(caught.value) or name == "memory_limit"
    assert "\n" not in str(caught.value)


def test_invalid_request_is_refused() -> None:
    for wrong in ({"prompt": ()}, {"prompt": (-1,)}, {"max_tokens": -1}, {"n": 129}):
        with pytest.raises(SettingError):
            Request(**{"prompt": (1,), **wrong})


def test_check_detects_wrong_text() -> None:
    """Negative control: another prompt gives another text."""
    with made() as setup:
        handle = setup.ask(SHORT)
        setup.drain()
        assert_right(handle)
        handle.choices[0].tokens[-1] ^= 1
        with pytest.raises(AssertionError):
            assert_right(handle)
        assert solo(prompt_of(SHORT, 1), 12) != solo(prompt_of(SHORT, 2), 12)


def test_check_detects_retained_array() -> None:
    """Negative control: one array beside those of the engine."""
    with made() as setup:
        setup.ask(LONG)
        setup.step(3)
        kept = mx.zeros((1,))
        mx.eval(kept)
        with pytest.raises(AssertionError):
            setup.check()
        del kept
        setup.check()


# ---- a chunk in the pass of a decode step


def joined(setup: Setup) -> tuple[list[Handle], Handle]:
    """Return two running answers, and one whose last chunk is prefilled beside them."""
    running = [setup.ask(SHORT, 40), setup.ask(SHORT, 40)]
    for handle in running:
        setup.until(handle, State.RUNNING)
    return running, setup.ask(CHUNK + SHORT)


def test_prefill_chunk_and_decode_rows_share_a_pass() -> None:
    with made() as setup:
        running, prefilling = joined(setup)
        setup.model.arm(fails, only=mixes)
        with pytest.MonkeyPatch.context() as patch:
            passes: list[tuple[int, ...]] = []
            patch.setattr(setup.model, "only", lambda tokens: passes.append(tokens.shape))
            setup.until(prefilling, State.RUNNING)
        assert (2 + SHORT - 1, 1) in passes and (1, SHORT - 1) not in passes
        setup.model.times = 0
        setup.drain()
        for handle in (*running, prefilling):
            assert_right(handle)


@pytest.mark.parametrize("how", [fails, fail_after_last_layer, runs_out_of_memory])
def test_failed_mixed_pass_is_retried_separately(how: Fault) -> None:
    """Nothing says whose fault it was: all are computed again, each chunk in a pass of its own."""
    with made() as setup:
        running, prefilling = joined(setup)
        setup.model.arm(how, 100, only=mixes)
        setup.drain()
        assert len(setup.model.rows) == 1, "behind it each of them is computed apart"
        for handle in (*running, prefilling):
            assert_right(handle)
        stats = setup.core.view.stats()
        assert (stats.requests, stats.finished, stats.failed) == (3, 3, 0)
        assert stats.preemptions >= 2


def test_faulty_prompt_in_mixed_pass_fails_alone() -> None:
    with made() as setup:
        running, prefilling = joined(setup)
        chunk = setup.sequence(prefilling).tokens[CHUNK]
        setup.model.arm(fails, 100, only=lambda tokens: chunk in np.array(tokens))
        setup.drain()
        assert "reading its prompt: ValueError: a model's bug" in str(error_of(prefilling))
        for handle in running:
            assert_right(handle)


def test_faulty_answer_fails_while_new_prompts_arrive() -> None:
    """A pass with a chunk says not whose fault it was; the next one of the answer has none."""
    with made() as setup:
        bad = setup.ask(SHORT, 40)
        setup.until(bad, State.RUNNING)
        setup.step(2)
        token = setup.sequence(bad).tokens[-1]

        def breaks(tokens: mx.array) -> bool:
            return decodes(tokens) and token in np.array(tokens)

        setup.model.arm(fails, 100, only=breaks)
        prompts: list[Handle] = []
        while not bad.done and len(prompts) < 12:
            prompts.append(setup.ask(SHORT, 1))
            setup.step()
        assert setup.model.mixed == [True, False], "once with a chunk, then without"
        assert "while decoding: ValueError: a model's bug" in str(error_of(bad))
        beside = setup.model.rows[-1] - 1
        setup.model.times = 0
        setup.drain()
        right = [handle for handle in prompts if end_of(handle).error is None]
        assert len(prompts) - len(right) == beside, "as in every failed decode step"
        for handle in right:
            assert_right(handle)
