"""Attention implementations are chosen by correctness, then speed; failing kernels are disabled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from lockstep import COMPILER, Lockstep

from penstock.attention import devices
from penstock.attention.attention_plan import plan_attention
from penstock.attention.joined_reads import join_parts
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.segment import KVSpan
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.plugins.kernels import selftest
from penstock.plugins.kernels.attend import KernelAttention, KernelCall, device_kernels
from penstock.plugins.kernels.dispatches import StepReading, dispatches
from penstock.plugins.kernels.selftest import TrialStep, WayChoice, choose
from penstock.plugins.kernels.span_forms import form_of
from penstock.plugins.kernels.ways import AttentionForm, AttentionWay, Situation, Ways

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
LAYER = AttentionForm(4, 2, 64, 64, mx.float32)
WIDE = AttentionForm(2, 1, 256, 256, mx.float32)
"""A layer of which 32 columns in `kivi4/raw` do not fit into threadgroup memory."""
ODD = AttentionForm(4, 2, 48, 48, mx.float32)
"""A layer with heads of a size that there is no kernel for."""
ROWS, TOKENS = 2, 128


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Lockstep:
    return Lockstep(folder=tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _gpu_backend() -> Iterator[None]:
    with devices.using(GPUBackend()):
        yield


class Clock:
    """A clock that advances per kernel call and per reading."""

    def __init__(self, run: Lockstep, call: float, look: float) -> None:
        self.run, self.call, self.look, self.looks = run, call, look, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * self.look + self.run.calls * self.call


def tried(run: Lockstep, *, call: float, look: float, seconds: float = 1e9) -> WayChoice:
    kernels = KernelAttention(run, run.target)
    clock = Clock(run, call, look)
    return choose([LAYER], kernels, rows=ROWS, tokens=TOKENS, seconds=seconds, clock=clock)


def test_fastest_implementation_is_chosen(cpp: Lockstep) -> None:
    """The clock stands still while kernels run."""
    choice = tried(cpp, call=-0.1, look=1.0)
    assert choice.why_off is None
    assert set(choice.ways.table.values()) == {AttentionWay.KERNEL}
    assert {situation for _, situation, _ in choice.ways.table} == set(Situation)


def test_plain_operations_are_kept_when_kernels_are_slower(cpp: Lockstep) -> None:
    choice = tried(cpp, call=1.0, look=1.0)
    assert choice.why_off is None
    assert AttentionWay.KERNEL not in choice.ways.table.values()
    assert {set(one.milliseconds) == set(AttentionWay) for one in choice.timings} == {True}


def test_equal_times_keep_plain_operations(cpp: Lockstep) -> None:
    assert not tried(cpp, call=0.0, look=1.0).ways.table


def test_expired_time_limit_keeps_plain_operations(cpp: Lockstep) -> None:
    choice = tried(cpp, call=0.0, look=1.0, seconds=0.5)
    assert not choice.timings
    assert not choice.ways.table


class Wrong(Lockstep):
    """Returns slightly wrong results, in the last row only."""

    share = 1.01

    def __call__(self, call: KernelCall) -> list[mx.array]:
        answers = super().__call__(call)
        if call.text.name == "penstock_merge":
            last = mx.arange(answers[0].shape[0]) == answers[0].shape[0] - 1
            factor = mx.where(last, self.share, 1.0).reshape(-1, 1, 1, 1)
            answers = [answers[0] * factor]
        return answers


class NotANumber(Wrong):
    share = float("nan")


class Raises(Lockstep):
    """Raises when called, or when its results are evaluated."""

    def __call__(self, call: KernelCall) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: x")


@pytest.mark.parametrize("kind", [Wrong, NotANumber, Raises])
def test_wrong_results_and_exceptions_disable_kernels(cpp: Lockstep, kind: type[Lockstep]) -> None:
    run = kind(folder=cpp.folder, libraries=cpp.libraries)
    choice = tried(run, call=0.0, look=1.0)
    assert choice.why_off is not None
    assert "\n" not in choice.why_off
    assert choice.ways.kernels is None
    assert AttentionWay.KERNEL not in choice.ways.table.values()
    assert all(AttentionWay.KERNEL not in one.milliseconds for one in choice.timings)


class Slow(Lockstep):
    """Takes seconds per call, and more to compile, by its own clock."""

    time, call_seconds, compile_seconds = 0.0, 1.0, 0.0

    def __call__(self, call: KernelCall) -> list[mx.array]:
        new = len(self.libraries)
        answers = super().__call__(call)
        self.time += self.call_seconds + self.compile_seconds * (len(self.libraries) - new)
        return answers

    def clock(self) -> float:
        return self.time


def slow(cpp: Lockstep, call: float, compiling: float, seconds: float) -> tuple[Slow, WayChoice]:
    run = Slow(folder=cpp.folder)
    run.call_seconds, run.compile_seconds = call, compiling
    kernels = KernelAttention(run, run.target)
    return run, choose([LAYER], kernels, rows=ROWS, tokens=TOKENS, seconds=seconds, clock=run.clock)


def test_slow_kernel_ends_self_test_after_current_step(cpp: Lockstep) -> None:
    """Comparisons count against the time limit: no further one begins."""
    run, choice = slow(cpp, 1.0, 0.0, selftest.SECONDS)
    step = 2  # a dispatch and its merge
    assert run.calls <= 2 * 2 * step, "without sinks and with them, each compiled and run again"
    assert choice.is_cut_short and not choice.timings and not choice.ways.table
    all_of_it = slow(cpp, 1.0, 0.0, 1e9)[0].calls
    assert all_of_it > 8 * step


def test_compile_time_is_not_counted(cpp: Lockstep) -> None:
    run, choice = slow(cpp, 0.001, 10.0, selftest.SECONDS)
    assert run.time > 50 and not choice.is_cut_short
    assert len(choice.timings) == len(Situation)


def test_no_step_is_timed_after_deadline(cpp: Lockstep) -> None:
    """Comparisons take at most half of the time; the rest is for measurements."""
    run, choice = slow(cpp, 0.003, 0.0, selftest.SECONDS)
    assert choice.is_cut_short and choice.timings
    compiled, step = 2 * len(run.libraries), selftest.AT_ONCE * 2
    assert run.calls * run.call_seconds <= selftest.SECONDS + (compiled + step) * run.call_seconds
    assert set(choice.ways.table) <= {(LAYER, one.situation, one.coded) for one in choice.timings}


def test_single_sequence_engine_times_one_row(cpp: Lockstep) -> None:
    kernels = KernelAttention(cpp, cpp.target)
    choice = choose([LAYER], kernels, rows=1, tokens=TOKENS, seconds=1e9)
    assert {one.situation for one in choice.timings} == {Situation.ONE_PART, Situation.PARTS}


class FailsAfterSelfTest(Lockstep):
    """Fails when timed, after correct results in the self-test."""

    kernels: KernelAttention

    def __call__(self, call: KernelCall) -> list[mx.array]:
        if self.kernels.only_known:  # behind the comparison
            raise RuntimeError("the device is lost")
        return super().__call__(call)


def test_implementation_without_timing_is_not_chosen(
    cpp: Lockstep, caplog: pytest.LogCaptureFixture
) -> None:
    run = FailsAfterSelfTest(folder=cpp.folder, libraries=cpp.libraries)
    kernels = run.kernels = KernelAttention(run, run.target)
    with caplog.at_level(logging.DEBUG, selftest.__name__):
        choice = choose([LAYER], kernels, rows=ROWS, tokens=TOKENS, seconds=1e9, clock=lambda: 0.0)
    assert choice.why_off is None and len(choice.timings) == len(Situation)
    assert not choice.ways.table
    assert all(AttentionWay.KERNEL not in one.milliseconds for one in choice.timings)
    assert "attention (kernel) could not be timed" in caplog.text
    assert "the device is lost" in caplog.text


def test_untested_kernel_is_not_called(cpp: Lockstep) -> None:
    choice = tried(cpp, call=-0.1, look=1.0)
    before, known = cpp.calls, set(choice.ways.kernels.known)  # type: ignore[union-attr]
    more = TrialStep.random(LAYER, Situation.SHARED, 16, TOKENS, None, seed=1)
    codes = {(form, step, True): way for (form, step, _), way in choice.ways.table.items()}
    ways = Ways(choice.ways.kernels, {**choice.ways.table, **codes})
    coded = TrialStep.random(LAYER, Situation.PARTS, 1, TOKENS, parse_scheme("affine8"), seed=1)
    for trial in (more, coded):
        found = trial.run(ways, AttentionWindow(), sinks=False)
        assert found is not None
        off, allowed = trial.error(found, AttentionWindow(), sinks=False)
        assert off <= allowed
    assert cpp.calls == before
    assert choice.ways.kernels is not None and choice.ways.kernels.known == known


def test_codec_without_kernel_does_not_disable_other_layers(cpp: Lockstep) -> None:
    """Its spans are read by plain operations, raw ones by kernels."""
    scheme, kernels = parse_scheme("kivi4/raw"), KernelAttention(cpp, cpp.target)
    sizes = {"rows": 1, "tokens": TOKENS, "seconds": 1e9}
    choice = choose([WIDE], kernels, scheme=scheme, clock=Clock(cpp, -0.1, 1.0), **sizes)  # type: ignore[arg-type]
    assert choice.why_off is None
    assert choice.unread == [f"kivi4/raw of {WIDE}"]
    assert set(choice.ways.table.values()) == {AttentionWay.KERNEL}
    assert {coded for *_, coded in choice.ways.table} == {False}
    assert {one.coded for one in choice.timings} == {False, True}
    for held, called in ((None, True), (scheme, False)):
        trial, before = TrialStep.random(WIDE, Situation.PARTS, 1, TOKENS, held, seed=1), cpp.calls
        result = trial.run(choice.ways, AttentionWindow(), sinks=False)
        assert result is not None
        off, allowed = trial.error(result, AttentionWindow(), sinks=False)
        assert off <= allowed
        assert (cpp.calls > before) == called


def test_layer_without_kernel_does_not_disable_other_layers(cpp: Lockstep) -> None:
    clock = Clock(cpp, -0.1, 1.0)
    layers = [ODD, LAYER]
    choice = choose(
        layers, KernelAttention(cpp, "lockstep"), rows=1, tokens=TOKENS, seconds=1e9, clock=clock
    )
    assert choice.why_off is None and choice.unread == [str(ODD)]
    assert {layer for layer, *_ in choice.ways.table} == {LAYER}


def test_kernels_are_off_if_no_layer_is_supported(cpp: Lockstep) -> None:
    choice = choose([ODD], KernelAttention(cpp, "lockstep"), rows=1, tokens=TOKENS)
    assert choice.why_off == "none reads 4 heads on 2 of 48, float32"
    assert choice.ways.kernels is None


def test_results_of_several_dispatches_are_merged(cpp: Lockstep) -> None:
    """The merging kernels are tried too."""
    choice = tried(cpp, call=-0.1, look=1.0)
    trial = TrialStep.random(LAYER, Situation.PARTS, 1, TOKENS, None, seed=1, parts=30)
    before = cpp.calls
    result = trial.run(choice.ways, AttentionWindow(), sinks=False)
    assert result is not None
    off, allowed = trial.error(result, AttentionWindow(), sinks=False)
    assert off <= allowed
    assert cpp.calls == before + 6, "three dispatches, each with its merge"


def test_layers_of_timed_step_share_plan(cpp: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine's layers do; planning per layer would dominate the step."""
    plans: list[object] = []

    def noted(*arguments: Any) -> Any:
        plans.append(arguments)
        return dispatches(*arguments)

    monkeypatch.setattr("penstock.plugins.kernels.attend.dispatches", noted)
    trial = TrialStep.random(LAYER, Situation.SHARED, ROWS, TOKENS, None, seed=1)
    ways = Ways(KernelAttention(cpp, cpp.target), always=AttentionWay.KERNEL)
    results = trial.run_layers(4, ways, AttentionWindow(), sinks=False)
    assert len(results) == 4 and len(plans) == 1
    for result in results:
        assert result is not None
        off, allowed = trial.error(result, AttentionWindow(), sinks=False)
        assert off <= allowed


@pytest.mark.parametrize("way", [AttentionWay.FUSED, AttentionWay.KERNEL])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("situation", Situation)
def test_all_implementations_give_equal_results(
    cpp: Lockstep, way: AttentionWay, window: int | None, situation: Situation
) -> None:
    rows = 1 if situation.is_alone else ROWS
    trial = TrialStep.random(LAYER, situation, rows, TOKENS, None, seed=5)
    seen = AttentionWindow(window, 4)
    ways = Ways(KernelAttention(cpp, cpp.target), always=way)
    for sinks in (False, True):
        found = trial.run(ways, seen, sinks=sinks)
        assert found is not None
        off, allowed = trial.error(found, seen, sinks=sinks)
        assert off <= allowed


def test_late_kernel_failure_falls_back_to_plain(
    cpp: Lockstep, caplog: pytest.LogCaptureFixture
) -> None:
    choice = tried(cpp, call=-0.1, look=1.0)
    run = Raises(folder=cpp.folder)
    ways = Ways(KernelAttention(run, run.target), choice.ways.table)
    trial = TrialStep.random(LAYER, Situation.SHARED, ROWS, TOKENS, None, seed=1)
    with caplog.at_level(logging.WARNING):
        found = trial.run(ways, AttentionWindow(), sinks=False)
        trial.run(ways, AttentionWindow(), sinks=False)
    assert found is not None
    off, allowed = trial.error(found, AttentionWindow(), sinks=False)
    assert off <= allowed
    assert len(caplog.records) == 1


def test_cpu_has_no_kernels() -> None:
    assert device_kernels(CPUBackend()) is None
    assert device_kernels(GPUBackend()) is None


def test_self_test_bytes_are_an_upper_bound(cpp: Lockstep) -> None:
    kernels = KernelAttention(cpp, cpp.target)
    kept = mx.set_cache_limit(0)
    try:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        choose([LAYER], kernels, rows=ROWS, tokens=TOKENS, seconds=1e9)
        taken = mx.get_peak_memory() - before
    finally:
        mx.set_cache_limit(kept)
    assert 0 < taken <= selftest.nbytes([LAYER], ROWS, TOKENS)


@pytest.mark.parametrize(("length", "called"), [(64, True), (1, False)])
def test_unreserved_partial_results_are_not_allocated(
    cpp: Lockstep, length: int, called: bool
) -> None:
    """Many one-token branches: plain operations read them, with equal results."""
    trial = TrialStep.random(LAYER, Situation.PARTS, 1, TOKENS, None, seed=1, parts=24)
    (row,) = trial.rows
    parts = [KVSpan(p.segment, i * length, length) for i, p in enumerate(row.parts)]
    row = replace(row, parts=tuple(parts), position=24 * length + row.tail)
    trial = replace(trial, rows=[row])
    ways = Ways(
        KernelAttention(cpp, cpp.target), {(LAYER, Situation.PARTS, False): AttentionWay.KERNEL}
    )
    reading = StepReading(trial.rows, AttentionWindow(), 1, LAYER.kv_heads, 2)
    layout = plan_attention(trial.rows, AttentionWindow(), 1)
    form = form_of(trial.tails.layer(0), mx.float32)
    assert form is not None
    planned = dispatches(reading, layout, 0, (form, trial.tails.columns))
    counted = ways.nbytes(row.position + 1, 1)
    assert (reading.result_bytes(planned) <= counted) == called
    before = cpp.calls
    assert trial.run(ways, AttentionWindow(), sinks=False) is not None
    assert (cpp.calls > before) == called


@pytest.mark.parametrize("tokens", [64, 700, 5_000])
def test_ledger_counts_bytes_of_every_implementation(tokens: int) -> None:
    """Partial results of the planned step, and joined KV of a row."""
    ways = {
        way: Ways(None, {(LAYER, Situation.ONE_PART, False): way})
        for way in (AttentionWay.KERNEL, AttentionWay.FUSED)
    }
    trial = TrialStep.random(LAYER, Situation.ONE_PART, 1, tokens, None, seed=1)
    (row,) = trial.rows
    reading = StepReading(trial.rows, AttentionWindow(), 1, LAYER.kv_heads, 2)
    layout = plan_attention(trial.rows, AttentionWindow(), 1)
    form = form_of(trial.tails.layer(0), mx.float32)
    assert form is not None
    (planned,) = dispatches(reading, layout, 0, (form, trial.tails.columns))
    results = LAYER.heads * LAYER.value_dim * 4
    counted = ways[AttentionWay.KERNEL].nbytes(row.position + 1, 1)
    assert planned.nbytes(LAYER.kv_heads) + results <= counted < 300 * (tokens + 1_000)
    joined = join_parts(
        row.parts,
        0,
        AttentionWindow(),
        row.position,
        trial.tails.read_block(0, 0, 1, row.tail + 1),
        devices.current(),
    )
    held = sum(side.nbytes for side in joined[:2])
    assert held <= ways[AttentionWay.FUSED].nbytes(row.position + 1, 1) <= 2 * held + 8_000
    assert Ways().nbytes(tokens, 1) == 0
