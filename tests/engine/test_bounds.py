"""Memory stays within the limit, measured by MLX, and the ledger is exact.

Everything MLX has allocated in this process before the engine is taken off. Where a limit is
said to be tight it is the least at which the longest request is taken in.
"""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from combinations import SOAK
from core_parts import evict_all, weights_bytes_of
from small_models import BASE, build

from penstock.attention import devices
from penstock.attention.mlx_backend import GPUBackend
from penstock.engine import fixed_memory
from penstock.engine import parts as parts_module
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.model import step_trials
from penstock.engine.request import Request, Sampling
from penstock.engine.run import measured_steps
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.view import EngineView
from penstock.ledger import Kind
from penstock.models.loading import load
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.recall import MODEL_PATH

EVERYTHING = Sampling(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=True,
    top_logprobs=20,
    seed=1,
)


@dataclass(frozen=True)
class Case:
    """A model, and requests of the maximum length."""

    name: str
    prompt_tokens: int
    requests: int = 3
    config: tuple[tuple[str, Any], ...] = ()
    """Of a random model; the embedded one if there is none."""
    settings: tuple[tuple[str, Any], ...] = ()
    sampling: Sampling = Sampling()
    family: str = ""
    """Of a tiny random model, in place of the others."""
    least_tokens: int = 0
    """With shorter prompts, what is rounded up by MLX is more than some percent of so little."""

    def model(self) -> Any:
        return tiny(self.family) if self.family else model_of(self.config)

    def request(self, number: int) -> Request:
        """Return a request with a prompt of its own."""
        tokens = tiny_families.VOCABULARY_TOKENS if self.family else 512
        prompt = tuple(token % tokens for token in prompt_of(self.prompt_tokens, number))
        return Request(prompt=prompt, max_tokens=12, ignore_eos=True, sampling=self.sampling)


def case(
    name: str, prompt_tokens: int, /, requests: int = 3, least_tokens: int = 0, **more: Any
) -> Case:
    """Return a case of a random model; upper-case names are the engine's settings."""
    settings = tuple((key.lower(), value) for key, value in more.items() if key.isupper())
    config = tuple((key, value) for key, value in more.items() if key.islower())
    return Case(name, prompt_tokens, requests, config, settings, least_tokens=least_tokens)


@functools.cache
def model_of(config: tuple[tuple[str, Any], ...]) -> Any:
    if not config:
        return load(MODEL_PATH)[0]
    mx.random.seed(1)
    given = {"hidden_size": 128, "vocab_size": 512, "torch_dtype": "float32", **dict(config)}
    size = {"max_position_embeddings": 8_192}
    size["head_dim"] = given["hidden_size"] // given.get("num_attention_heads", 4)
    return build({**BASE, "model_type": "llama", **size, **given})


@functools.cache
def tiny(family: str) -> Any:
    return tiny_families.build(family)


def prompt_of(tokens: int, number: int) -> tuple[int, ...]:
    draw = random.Random(number)
    return tuple(draw.randrange(512) for _ in range(tokens))


CASES = [
    Case("embedded", 3_000),
    Case("embedded, sampling", 2_000, sampling=EVERYTHING),
    Case("embedded, a window", 2_000, settings=(("max_kv_size", 512), ("keep", 64))),
    Case("embedded, large blocks", 3_000, settings=(("block_size", 256), ("prefill_chunk", 512))),
    Case(
        "embedded, in codes",
        3_000,
        settings=(("kv_cache_quantization", "kivi8/turbo4"), ("kv_cache_quantize_when", "active")),
    ),
    Case(
        "embedded, in codes at rest",
        2_000,
        settings=(("kv_cache_quantization", "8"), ("kv_cache_quantize_when", "at-rest")),
    ),
    case("llama", 1_500, num_key_value_heads=4),
    case("llama, bfloat16", 1_000, torch_dtype="bfloat16", num_attention_heads=8),
    Case(
        "llama, a large vocabulary, sampling",
        300,
        requests=6,
        config=(("vocab_size", 60_000), ("num_hidden_layers", 2)),
        settings=(("max_batch_size", 6),),
        sampling=EVERYTHING,
    ),
    case("joined", 900, least_tokens=450, model_type="gemma2", num_hidden_layers=3),
    case("joined, float16", 900, 2, least_tokens=450, model_type="gemma2", torch_dtype="float16"),
    Case("latents", 900, family="deepseek_v3"),
    Case("latents, by an index of the model's own", 900, family="deepseek_v32"),
    Case("compressed", 700, family="deepseek_v41"),
    Case(
        "as mlx-lm cuts a prompt",
        2_100,
        requests=2,
        settings=(("memory_limit", 900_000_000),),
        family="phi3small",
        least_tokens=1_050,
    ),
]
if not SOAK:  # with prompts of a third of the length
    CASES = [
        replace(case, prompt_tokens=max(case.least_tokens, case.prompt_tokens // 3))
        for case in CASES
    ]
cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@dataclass
class Watch:
    """A core, and the bytes that MLX had allocated before it."""

    core: Core
    others: int
    steps: int = 0
    peak_bytes: int = 0
    """The largest, weights included."""
    ledger_over_peak: float = 0.0
    """In the step of the largest peak: what the ledger counted of MLX's memory, over it."""
    unheld: float = 0.0
    """The most, as a share of what MLX says, by which `held_bytes` was off between steps."""

    def step(self) -> bool:
        """Run a step, and see that the limit holds in it.

        The index is Python's memory and no part of what MLX measures, so it is taken off.
        """
        core = self.core
        before = core.ledger.used_bytes
        mx.reset_peak_memory()
        more = core.step()
        peak = mx.get_peak_memory() - self.others
        index = core.ledger.by_class()[Kind.INDEX]
        limit = core.ledger.limit_bytes
        assert peak + index <= limit, (
            f"step {self.steps} took {peak:,} bytes and an index of {index:,}: "
            f"{peak + index - limit:,} over the limit of {limit:,}"
        )
        if peak > self.peak_bytes:
            self.peak_bytes = peak
            self.ledger_over_peak = (max(before, core.ledger.used_bytes) - index) / peak
        active = mx.get_active_memory() - self.others
        self.unheld = max(self.unheld, abs(active - core.view.held_bytes) / active)
        self.steps += more
        return more

    def drain(self) -> None:
        while self.step():
            pass
        assert self.core.view.idle

    def tighten(self, request: Request) -> None:
        """Lower the limit to the least that a request needs."""
        tokens = len(request.prompt) + request.max_tokens - 1
        sequence = self.core.view.sequence_bytes(tokens)
        self.core.set_limit(self.core.ledger.used_bytes + sequence.per_sequence + sequence.shared)


@contextmanager
def watched(case: Case, **settings: Any) -> Iterator[Watch]:
    """Open an engine for a case, without garbage collection until it is closed."""
    model = case.model()
    gc.collect()
    gc.disable()
    mx.clear_cache()  # what others left there would be handed out, larger than it need be
    before = mx.get_active_memory()
    given = {
        "memory_limit": 200_000_000,
        "max_kv_size": 8_192,
        "block_size": 64,
        "prefill_chunk": 256,
        "max_batch_size": 4,
        **dict(case.settings),
        **settings,
    }
    with pytest.MonkeyPatch.context() as patch:
        for bound in ("MOST_SECONDS", "LEAST_SECONDS"):  # on a busy machine, too
            patch.setattr(step_trials, bound, math.inf)
        made = Core(model, None, **given)
    try:
        yield Watch(made, before - made.budget.weights_bytes)
    finally:
        gc.enable()
        made.close()


def finished(handles: Sequence[Handle]) -> bool:
    return all(handle.result(0)[0].finish is not None for handle in handles)


# ---- the limit


@cases
def test_memory_stays_within_limit_in_every_step(case: Case) -> None:
    """With the smallest limit that admits one request, so that they take turns."""
    with watched(case) as watch:
        requests = [case.request(number) for number in range(case.requests)]
        watch.tighten(requests[0])
        handles = [watch.core.submit(request) for request in requests]
        watch.drain()
        assert finished(handles)
        watch.core.view.check()
        # The worst estimate of these is the joined model's, whose scores are all counted.
        assert 1.0 <= watch.ledger_over_peak < 5.0
        print(f"{case.name}: the ledger is {watch.ledger_over_peak:.2f} x the largest peak")


@cases
def test_memory_stays_within_limit_with_room_for_several_requests(case: Case) -> None:
    """They run together, and cached prefixes are evicted in time."""
    with watched(case) as watch:
        requests = [case.request(number) for number in range(case.requests + 2)]
        watch.tighten(requests[0])
        own = watch.core.ledger.limit_bytes - watch.core.ledger.used_bytes
        watch.core.set_limit(watch.core.ledger.limit_bytes + own * 3 // 2)
        handles = [watch.core.submit(request) for request in requests]
        watch.drain()
        assert finished(handles)
        watch.core.view.check()


WIDE = {"intermediate_size": 4_096, "num_hidden_layers": 2}
CROSSED = [
    case("a window below a chunk", 300, MAX_KV_SIZE=64, BLOCK_SIZE=32, **WIDE),
    case("a block above a chunk", 300, BLOCK_SIZE=256, PREFILL_CHUNK=16, **WIDE),
    Case(
        "a block above a chunk, recurrent",
        300,
        settings=(("block_size", 256), ("prefill_chunk", 16)),
        family="jamba",
    ),
    Case("a choice of latents", 300, settings=(("attend_tokens", 128),), family="deepseek_v3"),
    case("a block above a window", 450, MAX_KV_SIZE=32, BLOCK_SIZE=128, PREFILL_CHUNK=128),
]
"""Settings that cross each other."""


@pytest.mark.parametrize("case", CROSSED, ids=[case.name for case in CROSSED])
def test_memory_stays_within_limit_for_window_and_chunk_settings(case: Case) -> None:
    with watched(case) as watch:
        watch.tighten(case.request(0))
        handles = [watch.core.submit(case.request(number)) for number in range(2)]
        while watch.step():
            watch.core.view.check()
        assert finished(handles)


def test_tokens_dropped_after_keep_are_freed() -> None:
    """Of a span across the keep boundary only the first tokens are held."""
    with watched(CROSSED[-1]) as watch:
        core = watch.core
        handle = core.submit(CROSSED[-1].request(0))
        while not core.view.stats().running:
            watch.step()
        (sequence,) = core.admission.sequences.values()
        assert [(run.start, run.end) for run in sequence.kv.own_spans] == [(0, 16), (384, 449)]
        watch.drain()
        assert finished([handle])


def test_recurrent_model_leaves_no_memory_after_close() -> None:
    """Initial states are allocated for the step and counted in its ledger."""
    case = Case("recurrent", 1, family="mamba2")
    with watched(case):  # what the model makes when it runs first stays
        pass
    gc.collect()
    before = mx.get_active_memory()
    with watched(case) as watch:
        core = watch.core
        assert mx.get_active_memory() - before == core.view.held_bytes - weights_bytes_of(core)
        handle = core.submit(case.request(0))
        watch.drain()
        assert finished([handle])
    mx.synchronize()
    assert mx.get_active_memory() == before, "something outlives the engine, which is still there"
    assert core.closed


def test_step_peak_ignores_reused_buffers() -> None:
    """MLX reuses cached buffers that are larger than needed."""

    def run() -> None:
        mx.eval(mx.zeros((40_000,), mx.uint8) + 1)

    before = mx.set_cache_limit(10_000_000)  # an engine that was closed may have left less
    try:
        mx.clear_cache()
        taken, _ = step_trials.peak_of(run)
        mx.eval([mx.ones((60_000 + number,), mx.uint8) for number in range(4)])
        assert mx.get_cache_memory() >= 240_000
        assert step_trials.peak_of(run)[0] == taken
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(("limit_seconds", "rounds"), [(1e-9, 1), (math.inf, step_trials.ROUNDS)])
def test_peak_measurement_runs_a_fixed_number_of_times(limit_seconds: float, rounds: int) -> None:
    """A rank that ran it once more would hang waiting for the others."""
    runs: list[None] = []
    step_trials.peak_of(lambda: runs.append(mx.eval(mx.zeros(8))), limit_seconds)
    assert len(runs) == rounds


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 1), (2, step_trials.RANK_ROUNDS)])
def test_slow_step_is_measured_equally_often_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int, rounds: int
) -> None:
    """Ranks cannot agree on when it is slow, so all of them repeat it equally often."""
    core = Core(build(dict(BASE, model_type="llama")), memory_limit="300MB", max_kv_size=256)
    runs: list[int] = []
    prefill = core.runner.prefill

    def noting(tokens: Sequence[int], *given: Any, **more: Any) -> Any:
        if len(tokens) > step_trials.TRIAL_TOKENS:
            runs.append(len(tokens))
        return prefill(tokens, *given, **more)

    monkeypatch.setattr(core.runner, "prefill", noting)
    monkeypatch.setattr(core.runner, "ranks", ranks)
    monkeypatch.setattr(step_trials, "ROUNDS_SECONDS", 1e-9)
    monkeypatch.setattr(step_trials, "LEAST_SECONDS", step_trials.MOST_SECONDS)
    try:
        measured_steps.run_steps(core.runner, core.limits, core.stores.tails)
    finally:
        core.close()
    assert len(runs) == rounds


def test_memory_stays_within_lowered_limit() -> None:
    case = CASES[0]
    with watched(case) as watch:
        requests = [case.request(number) for number in range(case.requests)]
        watch.tighten(requests[0])
        least = watch.core.ledger.limit_bytes
        watch.core.set_limit(3 * least)
        handles = [watch.core.submit(request) for request in requests]
        steps = case.prompt_tokens // 75
        for step in range(steps):
            watch.step()
            watch.core.set_limit(3 * least - 2 * least * step // steps)
        watch.core.set_limit(least)
        watch.drain()
        assert finished(handles)
        assert watch.core.counters.preemptions


def test_memory_stays_within_limit_with_half_precision_and_one_kv_head() -> None:
    """In such a model steps are nearly all of the memory."""
    small = case("half", 2_000, torch_dtype="float16", num_key_value_heads=1, num_hidden_layers=2)
    with watched(small) as watch:
        watch.tighten(small.request(0))
        handles = [watch.core.submit(small.request(number)) for number in range(2)]
        watch.drain()
        assert finished(handles)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_stays_within_limit_with_many_scores_per_token(
    dtype: str,
) -> None:
    """As of 32 heads and 100,000 tokens; with smaller tiles, 2,500 tokens suffice."""
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 1, "num_hidden_layers": 2}
    long = case("long", 2_500, torch_dtype=dtype, PREFILL_CHUNK=64, MAX_BATCH_SIZE=1, **sizes)
    with devices.using(CPUBackend(scores_at_once=2**12)), watched(long) as watch:
        watch.tighten(long.request(0))
        handle = watch.core.submit(long.request(0))
        watch.drain()
        assert finished([handle])


@pytest.mark.parametrize("tokens", [300, 900])
def test_memory_stays_within_limit_without_tiled_attention(tokens: int) -> None:
    """As on a GPU for head sizes without a kernel: all scores of a chunk are alive at once."""
    fused = case("fused", tokens, num_attention_heads=8, num_hidden_layers=2)
    with devices.using(GPUBackend()), watched(fused) as watch:
        watch.tighten(fused.request(0))
        handle = watch.core.submit(fused.request(0))
        watch.drain()
        assert finished([handle])


def test_memory_stays_within_limit_beyond_calibrated_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compressed layers; the calibrated length is lowered so that 900 tokens exceed it."""
    monkeypatch.setattr(measured_steps, "FAR_TOKENS", 128)
    far = Case("compressed, far", 900, family="deepseek_v41")
    with watched(far) as watch:
        watch.tighten(far.request(0))
        handles = [watch.core.submit(far.request(number)) for number in range(2)]
        watch.drain()
        assert finished(handles)


# ---- what is held


@cases
def test_ledger_matches_mlx_memory_within_3_percent(case: Case) -> None:
    with watched(case) as watch:
        mx.set_cache_limit(0)  # a buffer that is used again may be larger than it need be
        handles = [watch.core.submit(case.request(number)) for number in range(case.requests)]
        watch.drain()
        assert finished(handles)
        print(f"{case.name}: off by {watch.unheld:.2%}")
        assert watch.unheld <= 0.03, f"off by {watch.unheld:.1%}"


def test_eight_conversations_store_shared_prompt_once() -> None:
    """And their own tokens: within 10 %, at every decode step."""
    shared, own, said = 2_000, 100, 40
    case = CASES[0]
    with watched(case, max_batch_size=8, max_stall_ms=0) as watch:
        core = watch.core
        token_bytes = core.view.token_bytes
        beside = weights_bytes_of(core) + core.tails.nbytes
        prompt = prompt_of(shared, 0)
        handles = [
            core.submit(
                Request(prompt=prompt + prompt_of(own, i), max_tokens=said, ignore_eos=True)
            )
            for i in range(1, 9)
        ]
        whole = shared // core.limits.block_size * core.limits.block_size
        found = []
        while watch.step():
            if core.view.stats().running == 8:
                ends = [sequence.kv.committed_end for sequence in core.admission.sequences.values()]
                ideal = whole + sum(end - whole for end in ends)
                active = mx.get_active_memory() - watch.others - beside
                found.append(active / (ideal * token_bytes))
        assert finished(handles)
        assert len(found) > said // 2
        assert 0.99 < min(found) <= max(found) <= 1.1, f"{max(found):.2f} times what they need"
        stats = core.view.stats()
        assert stats.hit_tokens >= 7 * whole
        assert stats.prefilled_tokens < shared + 8 * (own + core.limits.block_size)
        one = (shared + own + said) * token_bytes
        assert mx.get_active_memory() - watch.others - beside < 2 * one < 8 * one


def test_no_leak_after_many_different_prompts() -> None:
    """Bytes allocated between steps are exactly equal, round by round."""
    case = CASES[0]
    with watched(case) as watch:
        left = []
        mx.set_cache_limit(0)  # a buffer that is used again may be larger than it need be
        for number in range(4):
            watch.core.submit(case.request(number))
            watch.drain()
            evict_all(watch.core)
            left.append(mx.get_active_memory() - watch.others - watch.core.view.held_bytes)
        assert len(set(left)) == 1, left


def test_queued_choices_share_prompt_token_list() -> None:
    """128 choices of a long prompt would otherwise be 128 lists of tokens."""
    hot = Sampling(temperature=2.0, seed=3)
    with watched(CASES[0]) as watch:
        core = watch.core
        request = Request(
            prompt=prompt_of(500, 0), max_tokens=6, n=6, sampling=hot, ignore_eos=True
        )
        handle = core.submit(request)
        sequences = list(core.admission.sequences.values())
        assert len({id(sequence.tokens) for sequence in sequences}) == 1
        assert len({id(sequence.block_hashes) for sequence in sequences}) == 1
        watch.drain()
        answers = [tuple(choice.tokens) for choice in handle.result(0)]
        assert [len(answer) for answer in answers] == [6] * 6
        assert len(set(answers)) > 1


# ---- negative controls


class MeasuresThird(MemoryEstimator):
    """Measures a third of a step's peak."""

    @property
    def step_bytes(self) -> int:
        return super().step_bytes // 3


class CountsHalfTheTree(EngineView):
    """Counts half of the tree's bytes."""

    @property
    def held_bytes(self) -> int:
        return super().held_bytes - self._prefixes.tree.nbytes // 2


@pytest.mark.parametrize("sampling", [Sampling(), EVERYTHING], ids=["greedy", "sampling"])
def test_check_detects_step_without_reservation(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 512, which dominate the reserved bytes."""
    large = next(case for case in CASES if "large blocks" in case.name)
    case = replace(large, prompt_tokens=1_000, sampling=sampling)
    monkeypatch.setattr(fixed_memory, "MemoryEstimator", MeasuresThird)
    with watched(case) as watch:
        watch.tighten(case.request(0))
        watch.core.submit(case.request(0))
        with pytest.raises(AssertionError, match="over the limit"):
            watch.drain()


def test_check_detects_unreserved_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "EngineView", CountsHalfTheTree)
    with watched(CASES[0]) as watch:
        watch.core.submit(CASES[0].request(0))
        watch.drain()
        assert watch.unheld > 0.03
