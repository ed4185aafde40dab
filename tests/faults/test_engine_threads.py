"""The engine's thread: calls from other threads, close, and death."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from engine_faults import Alphabet, Faulty, fails, model_of
from fault_setup import SETTINGS, assert_begins_right, assert_right, end_of, error_of, prompt_of
from patience import SOON
from servers import wait_until

from penstock.engine import engine as engine_module
from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.handle import Handle
from penstock.engine.request import Event, Finish, Request
from penstock.errors import EngineStopped, NeverFits, SettingError, StepFailed


def make(tokenizer: Any = None, **settings: Any) -> Engine:
    return Engine(model_of("llama"), tokenizer or Alphabet(), **{**SETTINGS, **settings})


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make() as made:
        yield made


def ask(engine: Engine, tokens: int = 10, max_tokens: int = 12, **settings: Any) -> Handle:
    prompt = prompt_of(tokens, settings.pop("seed", 0))
    return engine.submit(Request(prompt=prompt, max_tokens=max_tokens, **settings))


def run_all(*calls: Callable[[], Any]) -> list[Any]:
    """Make concurrent calls; return their results or exceptions."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SOON) for future in [pool.submit(caught, call) for call in calls]]


# ---- many callers


def test_concurrent_requests_from_many_threads_succeed(engine: Engine) -> None:
    def client(number: int) -> list[Handle]:
        handles = [ask(engine, 10 + 30 * i, seed=number) for i in range(2)]
        handles[0].result(SOON)
        handles.append(ask(engine, 10, seed=number))
        for handle in handles:
            handle.result(SOON)
            engine.stats()
            engine.explain(handle.request.prompt)
        return handles

    # Six at a time, in a queue of 8 and 3 places: each waits for its own answers.
    found = run_all(*(lambda number=number: client(number) for number in range(3)))
    for handles in found:
        for handle in handles:
            assert_right(handle)
    engine.check()
    stats = engine.stats()
    assert (stats.requests, stats.finished, stats.failed) == (9, 9, 0)


def test_reader_ends_when_other_thread_cancels(engine: Engine) -> None:
    handle = ask(engine, max_tokens=Request.ENDLESS)
    read: list[Any] = []

    def reader() -> None:
        read.extend(handle)

    def canceller() -> None:
        while not read:
            time.sleep(0.01)
        handle.cancel()

    assert run_all(reader, canceller) == [None, None]
    assert isinstance(read[-1], Finish)
    assert read[-1].reason == "cancelled"
    engine.check()


def test_timed_out_wait_leaves_request_running(engine: Engine) -> None:
    handle = ask(engine, max_tokens=300)
    for seconds in (0, 0.001):
        with pytest.raises(TimeoutError, match="did not finish in time"):
            handle.result(timeout_seconds=seconds)
    assert handle.result(SOON)[0].finish is end_of(handle)
    assert_right(handle)


def test_events_stream_while_generating(engine: Engine) -> None:
    handle = ask(engine, max_tokens=Request.ENDLESS)
    events = iter(handle)
    for _ in range(5):
        assert not isinstance(next(events), Finish)
    handle.cancel()
    assert isinstance(list(events)[-1], Finish)


def test_abandoned_iteration_does_not_block_others(engine: Engine) -> None:
    handle = ask(engine, max_tokens=Request.ENDLESS)
    for _ in handle:
        break
    handle.cancel()
    assert handle.result(SOON)[0].finish is not None


# ---- an event loop's ways


async def read_all(handle: Handle) -> list[Event]:
    """Read a handle as a server does: woken by the listener, without blocking."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    handle.listen(lambda: loop.call_soon_threadsafe(woken.set))
    found: list[Event] = []
    while not handle.done:
        await asyncio.wait_for(woken.wait(), SOON)
        woken.clear()
        found += handle.events()
    return found


def test_event_loop_reads_many_answers_without_blocking(engine: Engine) -> None:
    async def one(seed: int) -> Handle:
        handle = engine.open(Request(prompt=prompt_of(20, seed), max_tokens=12))
        await asyncio.wrap_future(engine.enqueue([handle]))
        events = await read_all(handle)
        assert len(events) == 13
        return handle

    async def everybody() -> list[Handle]:
        return await asyncio.gather(*(one(seed) for seed in range(6)))

    for handle in asyncio.run(everybody()):
        assert_right(handle)
        assert handle.unread == 0
    engine.check()


def test_late_listener_is_called_at_once(engine: Engine) -> None:
    handle = ask(engine, max_tokens=3)
    while handle.unread < 4:  # three tokens and the end
        time.sleep(0.01)
    called: list[threading.Thread] = []
    handle.listen(lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()]
    assert len(handle.events()) == 4
    handle.listen(lambda: called.append(threading.current_thread()))
    assert len(called) == 1, "nothing was there to tell of"


def test_exception_in_listener_does_not_end_answer(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    stalled = stall(engine)
    handle = engine.open(Request(prompt=prompt_of(10), max_tokens=12))
    calls = []

    def broken() -> None:
        calls.append(1)
        raise RuntimeError("Event loop is closed")

    handle.listen(broken)
    asked = engine.enqueue([handle])
    stalled.set()
    asked.result(SOON)
    handle.result(SOON)
    assert_right(handle)
    assert calls == [1]
    assert "will not be called again" in caplog.text
    engine.check()


def test_enqueue_errors_are_raised_in_future(engine: Engine) -> None:
    handle = engine.open(Request(prompt=(100_000,)))
    with pytest.raises(SettingError, match="the model knows 512 tokens"):
        engine.enqueue([handle]).result(SOON)
    assert engine.ask(lambda view: view.idle).result(SOON)


def test_cancel_before_enqueue_completes(engine: Engine) -> None:
    handle = engine.open(Request(prompt=prompt_of(10), max_tokens=Request.ENDLESS))
    asked = engine.enqueue([handle])
    handle.cancel()
    asked.result(SOON)
    assert handle.result(SOON)[0].finish is not None
    assert end_of(handle).reason == "cancelled"


def test_bad_grammar_is_refused_before_submit(engine: Engine) -> None:
    with pytest.raises(SettingError, match="cannot be followed"):
        engine.open(Request(prompt=(1,), grammar="none"))


# ---- draining


def test_drain_finishes_open_requests_and_refuses_new(engine: Engine) -> None:
    handle = ask(engine, max_tokens=200)
    assert engine.drain(SOON)
    assert_right(handle)
    with pytest.raises(EngineStopped, match="shutting down"):
        ask(engine)
    assert engine.stats().requests == 1


def test_drain_times_out() -> None:
    with make() as engine:
        handle = ask(engine, max_tokens=700)
        go_on = stall(engine)
        threading.Timer(0.2, go_on.set).start()
        assert not engine.drain(0.0)
        assert not handle.done
        started = time.monotonic()
        handle.cancel()
        assert engine.drain(SOON)
        assert time.monotonic() - started < SOON / 2


def test_drain_of_closed_engine_returns_at_once() -> None:
    engine = make()
    engine.close()
    assert engine.drain(SOON)


def test_calls_during_close_complete_or_raise() -> None:
    engine = make()
    futures: list[Future[bool]] = []

    def many() -> None:
        for _ in range(2_000):
            futures.append(engine.ask(lambda view: view.idle))

    run_all(many, many, engine.close)
    for future in futures:
        error = future.exception(SOON)
        assert error is None or isinstance(error, EngineStopped)


# ---- closing


def test_close_cancels_open_requests() -> None:
    engine = make()
    handles = [ask(engine, 10 + i, Request.ENDLESS, n=2) for i in range(3)]
    next(iter(handles[0]))
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < SOON
    assert not engine.alive
    for handle in handles:
        assert [end_of(handle, i).reason for i in range(2)] == ["cancelled"] * 2
        for choice in range(2):
            assert len(handle.choices[choice].tokens) < Request.ENDLESS
        assert handle.result(SOON) == handle.choices
        handle.cancel()
    engine.close()  # again does nothing


def test_close_wakes_waiters() -> None:
    engine = make()
    handle = ask(engine, max_tokens=Request.ENDLESS)
    other = ask(engine, max_tokens=Request.ENDLESS)

    def close() -> None:
        time.sleep(0.3)
        engine.close()

    choices, events, _ = run_all(handle.result, lambda: list(other), close)
    assert choices[0].finish.reason == "cancelled"
    assert events[-1].reason == "cancelled"


def test_closed_engine_refuses_calls() -> None:
    engine = make()
    handle = ask(engine)
    handle.result(SOON)
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: ask(engine),
        engine.stats,
        engine.check,
        engine.clear,
        lambda: engine.explain([1, 2, 3]),
        lambda: engine.set_limit(10**9),
    ]
    for call in calls:
        with pytest.raises(EngineStopped):
            call()
    assert_right(handle)


def test_close_frees_memory() -> None:
    model_of("llama")
    gc.collect()
    before = mx.get_active_memory()
    with make() as engine:
        ask(engine, 200, Request.ENDLESS)
        assert engine.stats().held_bytes > 0
    del engine
    gc.collect()
    assert mx.get_active_memory() == before


def test_exception_in_with_block_closes_engine() -> None:
    with pytest.raises(ZeroDivisionError), make() as engine:
        ask(engine, max_tokens=Request.ENDLESS)
        raise ZeroDivisionError
    assert not engine.alive


@pytest.mark.parametrize("time_of_day", range(3))
def test_calls_concurrent_with_close_complete_or_raise(time_of_day: int) -> None:
    engine = make()

    def wait() -> Any:
        return ask(engine, max_tokens=3).result(SOON)

    found = run_all(engine.stats, wait, engine.stats, engine.close, wait, wait, engine.stats)
    wrong = [x for x in found if isinstance(x, Exception) and not isinstance(x, EngineStopped)]
    assert not wrong
    assert not engine.alive


# ---- bad days


def test_failed_step_leaves_engine_alive(engine: Engine) -> None:
    runner = engine._core.runner
    faulty = Faulty(runner.model)
    faulty.arm(fails)
    runner.model = faulty
    handle = ask(engine)
    with pytest.raises(StepFailed):
        handle.result(SOON)
    after = ask(engine)
    after.result(SOON)
    assert_right(after)
    engine.check()


def test_failed_detokenizer_finalize_leaves_engine_alive() -> None:
    tokenizer = Alphabet()
    with make(tokenizer) as engine:
        good = ask(engine, max_tokens=100)
        tokenizer.breaks = [-1]
        bad = ask(engine, seed=1)
        with pytest.raises(StepFailed, match="in finalize"):
            bad.result(SOON)
        good.result(SOON)
        assert_right(good)
        assert engine.stats().finished == 2


def test_errors_are_raised_in_calling_thread(engine: Engine) -> None:
    with pytest.raises(SettingError, match="the model knows 512 tokens"):
        engine.submit(Request(prompt=(100_000,)))
    with pytest.raises(NeverFits):
        engine.set_limit(1_000)
    engine.check()


class Dies(BaseException):
    """Exception that ends the engine's thread in these tests."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_engine_thread_does_not_hang_callers() -> None:
    engine = make()
    try:
        running = [ask(engine, max_tokens=Request.ENDLESS, seed=i) for i in range(2)]
        next(iter(running[0]))

        def dies(**how: bool) -> bool:
            raise Dies

        def wait(handle: Handle) -> Any:
            return handle.result(SOON)

        engine._core.step = dies  # type: ignore[method-assign]
        started = time.monotonic()
        found = run_all(lambda: wait(running[0]), lambda: list(running[1]), engine.stats)
        assert time.monotonic() - started < SOON / 2
        assert not any(isinstance(each, TimeoutError) for each in found)
        for handle in running:
            assert_begins_right(handle)
        for call in (lambda: ask(engine), engine.stats, engine.check):
            with pytest.raises(EngineStopped):
                call()
    finally:
        engine.close()
    assert not engine.alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_running_requests_fail_when_engine_thread_dies() -> None:
    """A truncated answer must not look like one that the caller cancelled."""
    engine = make()
    try:
        handle = ask(engine, max_tokens=Request.ENDLESS)
        next(iter(handle))

        def dies(**how: bool) -> bool:
            raise Dies

        engine._core.step = dies  # type: ignore[method-assign]
        with pytest.raises(EngineStopped):
            handle.result(SOON)
    finally:
        engine.close()


def test_call_already_started_at_timeout_is_awaited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ANSWER_SECONDS", 0.05)

    def slow(core: Core) -> int:
        time.sleep(0.3)
        return 7

    assert engine._wait(engine._later(slow)) == 7


def stall(engine: Engine) -> threading.Event:
    """Block the engine's thread in a step until the event is set."""
    step, stands, go_on = engine._core.step, threading.Event(), threading.Event()

    def slow(**how: bool) -> bool:
        stands.set()
        go_on.wait(SOON)
        return step(**how)

    engine._core.step = slow  # type: ignore[method-assign]
    assert stands.wait(SOON)
    return go_on


def test_hung_engine_is_reported_as_dead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither answers, nor pending calls, nor `close` wait for it."""
    handle = ask(engine, max_tokens=400)
    go_on = stall(engine)
    try:
        assert engine.alive and not engine.hangs
        monkeypatch.setattr(engine_module, "STEP_SECONDS", 0.2)
        with pytest.raises(EngineStopped, match="before this request ended"):
            handle.result(SOON)
        assert engine.hangs and not engine.alive
    finally:
        go_on.set()
    wait_until(lambda: engine.alive)  # it was only slow
    monkeypatch.setattr(engine_module, "ANSWER_SECONDS", 0.2)
    ends = threading.Event()
    try:
        begun = engine.ask(lambda view: ends.wait(SOON))
        with pytest.raises(TimeoutError, match=r"within 0 s; a step may be hung"):
            engine._wait(begun)
        wait_until(lambda: engine.hangs)
        monkeypatch.setattr(engine_module, "ANSWER_SECONDS", SOON)
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < SOON / 2
    finally:
        ends.set()


def test_timed_out_call_is_never_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ask(engine, max_tokens=400)
    go_on = stall(engine)
    try:
        monkeypatch.setattr(engine_module, "ANSWER_SECONDS", 0.4)
        with pytest.raises(TimeoutError, match="did not respond"):
            ask(engine, seed=1)
    finally:
        monkeypatch.undo()
        go_on.set()
    handle.result(SOON)
    assert_right(handle)
    assert engine.stats().requests == 1, "who asked thinks that it was not taken in"


def test_close_works_after_timed_out_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the engine closes before it looked at the call."""
    engine = make()
    handle = ask(engine, max_tokens=Request.ENDLESS)
    go_on = stall(engine)
    try:
        monkeypatch.setattr(engine_module, "ANSWER_SECONDS", 0.4)
        with pytest.raises(TimeoutError):
            engine.stats()
        monkeypatch.undo()
    finally:
        assert run_all(engine.close, go_on.set) == [None, None]
    assert end_of(handle).reason == "cancelled"


def test_idle_engine_evicts_under_memory_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0.1

    def memory() -> Any:
        return SimpleNamespace(total=10**9, available=int((1 - used) * 10**9))

    monkeypatch.setattr("penstock.engine.memory_pressure.psutil.virtual_memory", memory)
    with make(memory_threshold=0.5) as engine:
        ask(engine, 200).result(SOON)
        assert engine.stats().nodes > 0
        used = 0.9
        until = time.monotonic() + 4.0
        while engine.stats().nodes and time.monotonic() < until:
            time.sleep(0.1)
        assert engine.stats().nodes == 0


# ---- making one


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"memory_limit": 1_000}, NeverFits),
        ({"memory_limit": "much"}, SettingError),
        ({"max_batch_size": 0}, SettingError),
        ({"nonsense": 1}, SettingError),
    ],
    ids=str,
)
def test_failed_construction_leaves_no_thread(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    before = set(threading.enumerate())  # of which one of an earlier engine may just end
    with pytest.raises(error):
        make(**wrong)
    assert set(threading.enumerate()) <= before


def test_two_engines_run_side_by_side(engine: Engine) -> None:
    with make() as second:
        handles = [ask(each, 60, 30, seed=i) for i in range(3) for each in (engine, second)]
        for handle in handles:
            handle.result(SOON)
            assert_right(handle)
        second.check()
    engine.check()


# ---- processes

SCRIPT = """
import sys
import penstock
from penstock.recall import MODEL_PATH

engine = penstock.Engine(*penstock.load(MODEL_PATH), memory_limit="100MB", block_size=64)
handle = engine.submit(penstock.Request(prompt=(5, 6, 7), max_tokens=10_000, ignore_eos=True))
for event in handle:
    break
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("del engine, handle", 0),
        ("engine.close()", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", 130),
        ("engine._core.step = None", 0),  # the thread dies
    ],
)
def test_process_exits_without_closing_engine(end: str, code: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
        cwd=Path(__file__).parent,
    )
    codes = {code, -2} if code == 130 else {code}  # -2: ended by SIGINT
    assert found.returncode in codes, found.stderr
    if code in (0, 3) and "None" not in end:
        assert found.stderr == ""


def test_error_is_readable_after_close() -> None:
    tokenizer = Alphabet(breaks=[2])
    with make(tokenizer) as engine:
        handle = ask(engine)
        while not handle.done:
            handle.events()
            time.sleep(0.01)
    assert "a detokenizer's bug" in str(error_of(handle))
