"""How benches of the engine run a side: ours and mlx-lm's through the same clock and counter."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx
import psutil

from penstock import config
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Event, Request, Token
from penstock.engine.stats import Stats
from penstock_bench.models import BenchModel
from penstock_bench.report import Line

OURS = "penstock"
RIVAL = "mlx-lm"

MEMORY_SHARE = 0.8
"""Share of the machine's memory that is the engine's limit: no bench is about running out of it."""
BLOCK_STEPS = 8
"""Timed at a time of sides that decode in turn."""
STRAY_BYTES = 1 << 20
"""Bytes that a dropped side may leave behind; more would be counted as the other side's."""

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """An engine under test. Sequences are numbered as their prompts were handed in."""

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompts that are in caches by now."""

    @property
    def cached_tokens(self) -> int:
        """Of them, those that were not computed: known before, or computed for another."""

    @property
    def model_seconds(self) -> float:
        """What model and choice of tokens took so far; 0 where that is not told apart."""

    def learn(self, prefix: Sequence[int]) -> None:
        """Read `prefix` and keep it for prompts that begin with it."""

    def submit(self, prompts: Prompts, max_tokens: int) -> None:
        """Hand all prompts in at once."""

    def give_up(self) -> None:
        """Let go of the prompts that were handed in, and of all that was read for them alone."""

    def step(self) -> Sequence[tuple[int, int]]:
        """Run one step and return (sequence, token) of all that came out."""

    def settle(self) -> None:
        """Wait until nothing is in flight."""

    def close(self) -> None:
        """Stop. What is held goes with the object."""


MakeSide = Callable[[], Side]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Settings of our engine, in tokens; None is the default for the model."""

    block_size: int | None = None
    prefill_chunk: int = config.PREFILL_CHUNK
    kv_cache_quantization: str | None = None
    kv_cache_min_quantize_tokens: int = config.MIN_QUANTIZE_TOKENS
    kv_cache_raw_first_tokens: int = config.RAW_FIRST_TOKENS

    @property
    def exact(self) -> bool:
        """Whether keys and values are held as they are, so that texts are mlx-lm's."""
        return self.kv_cache_quantization is None

    @property
    def codec_settings(self) -> dict[str, Any]:
        """What the engine is told of codecs."""
        names = (
            "kv_cache_quantization",
            "kv_cache_min_quantize_tokens",
            "kv_cache_raw_first_tokens",
        )
        return {} if self.exact else {name: getattr(self, name) for name in names}


class Ours:
    """Penstock's engine without its thread: one `Core.step` a step."""

    def __init__(
        self, model: BenchModel, batch_size: int, shape: EngineShape, **settings: Any
    ) -> None:
        self._core = Core(
            model.model,
            model.tokenizer,
            memory_limit=int(MEMORY_SHARE * psutil.virtual_memory().total),
            max_batch_size=batch_size,
            block_size=shape.block_size,
            prefill_chunk=shape.prefill_chunk,
            **{**shape.codec_settings, **settings},
        )
        self._handles: list[Handle] = []
        self._before = self.stats()

    def stats(self) -> Stats:
        """Return the engine's figures."""
        return self._core.view.stats()

    @property
    def prefilled_tokens(self) -> int:
        """Prefilled tokens since the submission."""
        return self.stats().prefilled_tokens - self._before.prefilled_tokens

    @property
    def prompt_read(self) -> int:
        """Hits and prefilled tokens; a prompt's last token is read by its first decode step."""
        return self.cached_tokens + self.prefilled_tokens

    @property
    def cached_tokens(self) -> int:
        """Hits since the submission."""
        return self.stats().hit_tokens - self._before.hit_tokens

    @property
    def model_seconds(self) -> float:
        """What the model and the choice of tokens took, of all steps since the construction.

        The rest is the machinery: names of blocks, tree, ledger, scheduler, copies of KV, text.
        """
        return self.stats().model_seconds

    def learn(self, prefix: Sequence[int]) -> None:
        """Serve a request for one token after `prefix`: its whole blocks stay."""
        self.give_up()
        self.submit([prefix], 1)
        while self._core.step():
            pass

    def submit(self, prompts: Prompts, max_tokens: int) -> None:
        """Submit one request a prompt."""
        self._before = self.stats()
        self._handles = [
            self._core.submit(Request(prompt=tuple(prompt), max_tokens=max_tokens, ignore_eos=True))
            for prompt in prompts
        ]

    def answers(self) -> list[list[int]]:
        """Run steps until every request has ended, and return the tokens of each."""
        while self._core.step():
            pass
        ended, self._handles = self._handles, []
        return [handle.result(0.0)[0].tokens for handle in ended]

    def give_up(self) -> None:
        """Cancel the requests."""
        for handle in self._handles:
            handle.cancel()
        self._handles = []

    def step(self) -> Sequence[tuple[int, int]]:
        """Run one step of the core and take the events of every handle."""
        self._core.step()
        return [
            (place, _token_of(event))
            for place, handle in enumerate(self._handles)
            for event in handle.events()
        ]

    def settle(self) -> None:
        """Nothing is ever in flight after a step of the core."""

    def close(self) -> None:
        """Close the core."""
        self._core.close()


def _token_of(event: Event) -> int:
    if isinstance(event, Token):
        return event.token
    raise AssertionError(f"a sequence ended while it was measured: {event}")


# ---------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class RunMoment:
    """The state after a step, with nothing in flight. Bytes are those above the weights."""

    needed_tokens: int
    """Prompt tokens read and tokens generated, of all sequences: whose KV must be there."""
    held_bytes: int
    peak_bytes: int
    """The most within the step."""
    decoding: bool
    """Whether every sequence generates by now."""


@dataclass(slots=True)
class Run:
    """What one pass showed. Bytes are those above the weights."""

    first_seconds: float
    """Seconds from the submission until every sequence has its first token."""
    step_seconds: list[float] = field(repr=False)
    """The steps after that, all sequences generating."""
    tokens: list[list[int]] = field(repr=False)
    """Tokens that every sequence generated; the counts differ by a few."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were not computed: cached before, or computed once for several prompts."""
    decoded_tokens: int = 0
    """Came out in the timed steps, of all sequences."""
    before_bytes: int = 0
    """Held before the submission: what the engine keeps ready, and what was learned."""
    seconds: float = 0.0
    """Seconds from the submission to the end."""
    model_seconds: float = 0.0
    """Seconds in the model and the sampler; 0 where they are not measured."""
    peak_bytes: int = 0
    """Peak from the submission to the end, in bytes."""
    moments: list[RunMoment] = field(default_factory=list, repr=False)
    """One a step if the run was watched. Watching waits after every step: times do not count."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of all sequences together, every step counted."""
        return self.decoded_tokens / sum(self.step_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of all prompts, known ones too, up to the last first token."""
        return self.prompt_tokens / self.first_seconds

    @property
    def machinery_share(self) -> float:
        """Share of the time that was spent on anything but the model."""
        return 1 - self.model_seconds / self.seconds

    @property
    def held_bytes(self) -> int:
        """The most that was held after a step in which all generate."""
        return max(moment.held_bytes for moment in self.moments if moment.decoding)


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides are given: prompts, and what they may know before."""

    prompts: Prompts
    decode_tokens: int
    """Steps that are timed with all sequences generating."""
    known: Sequence[int] = ()
    """A prefix that is read before the clock starts."""
    repeats: int = 1
    """Times that the prompts are submitted to the same engine."""
    prefill_chunk: int = config.PREFILL_CHUNK
    """Tokens of prompts that our engine reads in a step."""

    @property
    def max_tokens(self) -> int:
        """Tokens a sequence may generate: the first goes on while the others' prompts are read."""
        spread = len(_common(self.prompts)) * (len(self.prompts) - 1)
        chunks = -(-(sum(map(len, self.prompts)) - spread) // self.prefill_chunk)
        return self.decode_tokens + 2 * chunks + 3 * len(self.prompts) + 8


def _common(prompts: Prompts) -> Sequence[int]:
    """Return what all prompts begin with."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def run_side(make: MakeSide, task: Task, *, watch: bool = False) -> list[Run]:
    """Build a side, let it learn what is known, hand the prompts in, drop it.

    Raises:
        AssertionError: a sequence ended early.
    """
    base_bytes = clean()
    side = make()
    try:
        if task.known:
            side.learn(task.known)
        return [drive(side, task, base_bytes, watch=watch) for _ in range(task.repeats)]
    finally:
        side.close()


def clean() -> int:
    """Drop what nobody holds, and return the bytes that are left: the weights of the models.

    What mlx-lm has begun to compute for a next token nobody asks for is waited for: until it is
    computed, MLX holds all that it is computed from.
    """
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def drive(side: Side, task: Task, base_bytes: int = 0, *, watch: bool = False) -> Run:
    """Hand the prompts in and step until `decode_tokens` steps were timed."""
    driving = Driving(side, task, base_bytes, watch=watch)
    driving.read()
    driving.decode(task.decode_tokens)
    return driving.end()


class Driving:
    """A side whose prompts were handed in, and what it has shown so far."""

    def __init__(self, side: Side, task: Task, base_bytes: int = 0, *, watch: bool = False) -> None:
        side.give_up()
        side.settle()
        gc.collect()
        self._side, self._base_bytes, self._watch = side, base_bytes, watch
        self._run = Run(
            first_seconds=0.0,
            step_seconds=[],
            tokens=[[] for _ in task.prompts],
            prompt_tokens=sum(map(len, task.prompts)),
            before_bytes=mx.get_active_memory() - base_bytes,
        )
        mx.reset_peak_memory()
        max_tokens = task.max_tokens  # takes milliseconds, which are nobody's
        self._steps_left = 4 * max_tokens
        self._model_seconds = side.model_seconds
        self._began = self._since = self._now = time.perf_counter()
        side.submit(task.prompts, max_tokens)

    def read(self) -> None:
        """Step until every sequence has its first token."""
        while not all(self._run.tokens):
            self._step()
        self._run.first_seconds = self._now - self._began

    def decode(self, steps: int) -> None:
        """Time so many steps, with all sequences generating."""
        for _ in range(steps):
            self._run.decoded_tokens += self._step()
            self._run.step_seconds.append(self._step_seconds)

    def resume(self) -> None:
        """Step once, untimed: other sides have filled the caches of the processor."""
        self._step()
        self._since = time.perf_counter()

    def _step(self) -> int:
        run, side = self._run, self._side
        if self._steps_left == 0:
            raise AssertionError(f"only {len(run.step_seconds)} steps with all generating")
        self._steps_left -= 1
        tokens = side.step()
        if self._watch:
            side.settle()
        self._now = time.perf_counter()
        self._step_seconds = self._now - self._since
        for place, token in tokens:
            run.tokens[place].append(token)
        if self._watch:
            run.moments.append(_moment(side, run.tokens, self._base_bytes))
            run.peak_bytes = max(run.peak_bytes, run.moments[-1].peak_bytes)
            mx.reset_peak_memory()
        self._since = time.perf_counter() if self._watch else self._now
        return len(tokens)

    def end(self) -> Run:
        """Return what it has shown, from the submission until now."""
        run, side = self._run, self._side
        run.seconds = self._now - self._began
        run.model_seconds = side.model_seconds - self._model_seconds
        run.peak_bytes = max(run.peak_bytes, mx.get_peak_memory() - self._base_bytes)
        run.cached_tokens = side.cached_tokens
        return run


def _moment(side: Side, tokens: list[list[int]], base_bytes: int) -> RunMoment:
    generated = sum(max(0, len(of) - 1) for of in tokens)  # nobody has read the last one yet
    held_bytes = mx.get_active_memory()
    return RunMoment(
        needed_tokens=side.prompt_read + generated,
        held_bytes=held_bytes - base_bytes,
        peak_bytes=max(held_bytes, mx.get_peak_memory()) - base_bytes,
        decoding=all(tokens),
    )


# ---------------------------------------------------------------- both sides


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of one task, by side."""

    task: Task
    timed: Mapping[str, Sequence[Run]]
    watched: Mapping[str, Sequence[Run]]
    """One more on an engine of its own; as many runs as the task has repeats."""

    def median(self, who: str, name: str) -> float:
        """Return the median over the timed runs of a figure of `Run`."""
        return float(statistics.median(getattr(run, name) for run in self.timed[who]))

    def as_object(self) -> dict[str, Any]:
        """Return every run, for the record."""
        return {
            who: {
                "timed": [_recorded(run) for run in runs],
                "watched": [_recorded(run) for run in self.watched[who]],
            }
            for who, runs in self.timed.items()
        }


def _recorded(run: Run) -> dict[str, Any]:
    stored = asdict(run)
    stored["step_seconds"] = [round(seconds, 6) for seconds in run.step_seconds]
    columns = list(RunMoment.__dataclass_fields__)
    stored["moments"] = [[getattr(moment, name) for name in columns] for moment in run.moments]
    return {**stored, "moment_columns": columns}


def compare(
    makers: Mapping[str, MakeSide], task: Task, rounds: int, *, alike: bool = True
) -> Comparison:
    """Watch each side once, which warms it up, then time them turn by turn.

    MLX keeps no freed buffers while a run is watched: what is held is what is needed.

    Args:
        makers: of the sides.
        task: of all of them.
        rounds: how often each is timed.
        alike: whether all sides generate the same; else each does so in all of its runs.

    Raises:
        AssertionError: the sides do not generate the same tokens; or one of them left bytes
            behind that would be counted as the other's.
    """
    base_bytes = clean()
    watched = _watched(makers, task, base_bytes)
    timed: dict[str, list[Run]] = {who: [] for who in makers}
    for turn in range(rounds):
        for who in list(makers) if turn % 2 == 0 else list(makers)[::-1]:
            timed[who] += run_side(makers[who], task)
            _check_base(who, base_bytes)
    return _found(task, timed, watched, alike=alike)


def compare_in_turn(
    makers: Mapping[str, MakeSide], task: Task, rounds: int, *, alike: bool = True
) -> Comparison:
    """Watch each side as `compare` does, then let all decode in turn, a few steps at a time.

    A disturbance of the machine for a second slows all of them.

    The one timed run of a side has the steps of all rounds; its peak and its seconds are those of
    its prompts. MLX keeps as many freed buffers as our engines let it while they are at work, and
    as it does by itself while others are.

    Args:
        task: without what is `known`, and without repeats.
    """
    base_bytes = clean()
    watched = _watched(makers, task, base_bytes)
    blocks = rounds * max(1, task.decode_tokens // BLOCK_STEPS)
    more = replace(task, decode_tokens=blocks * (BLOCK_STEPS + 1))
    sides: dict[str, Side] = {}
    driven: dict[str, Driving] = {}
    timed = {}
    usual = shared = _cache_limit()
    sharing = set()
    try:
        for who, make in makers.items():
            before_bytes, before = clean(), _cache_limit()
            sides[who] = make()
            if _cache_limit() != before:
                shared = _cache_limit()
                sharing.add(who)
            mx.set_cache_limit(shared if who in sharing else usual)
            driven[who] = Driving(sides[who], more, before_bytes)
            driven[who].read()
            sides[who].settle()
            timed[who] = [driven[who].end()]
        for block in range(blocks):
            for who in list(makers) if block % 2 == 0 else list(makers)[::-1]:
                mx.set_cache_limit(shared if who in sharing else usual)
                driven[who].resume()
                driven[who].decode(BLOCK_STEPS)
                sides[who].settle()
    finally:
        for side in sides.values():
            side.close()
        mx.set_cache_limit(usual)
    sides.clear()
    driven.clear()
    del side
    _check_base("all together", base_bytes)
    return _found(task, timed, watched, alike=alike)


def _cache_limit() -> int:
    """Return how many freed bytes MLX keeps; it tells when it is told another number."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


def in_turn(comparison: Comparison, who: str, other: str) -> float:
    """Return the decode speed of a side over that of another, which decoded in turn with it.

    The ratio is the median over neighboring blocks of steps.
    """

    def blocks(name: str) -> list[float]:
        return [
            sum(run.step_seconds[first : first + BLOCK_STEPS])
            for run in comparison.timed[name]
            for first in range(0, len(run.step_seconds), BLOCK_STEPS)
        ]

    pairs = zip(blocks(who), blocks(other), strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


def _watched(makers: Mapping[str, MakeSide], task: Task, base_bytes: int) -> dict[str, list[Run]]:
    """Watch each side; MLX keeps no freed buffers meanwhile."""
    watched = {}
    limit = mx.set_cache_limit(0)
    try:
        for who, make in makers.items():
            watched[who] = run_side(make, task, watch=True)
            _check_base(who, base_bytes)
    finally:
        mx.set_cache_limit(limit)
    return watched


def _found(
    task: Task, timed: Mapping[str, list[Run]], watched: Mapping[str, list[Run]], *, alike: bool
) -> Comparison:
    """Put runs together; their tokens are looked at."""
    everything = {who: [*watched[who], *runs] for who, runs in timed.items()}
    for together in [everything] if alike else [{who: of} for who, of in everything.items()]:
        check_same_tokens(together)
    return Comparison(task, timed, watched)


def _check_base(who: str, base_bytes: int) -> None:
    stray = clean() - base_bytes
    if stray > STRAY_BYTES:
        raise AssertionError(f"{who} left {stray:,} bytes behind")


def check_same_tokens(runs: Mapping[str, Iterable[Run]]) -> None:
    """Raise AssertionError unless all runs generated the same, as far as all of them went."""
    flat = [(who, run) for who, of in runs.items() for run in of]
    (first_who, first), *others = flat
    for who, run in others:
        for place, (wanted, got) in enumerate(zip(first.tokens, run.tokens, strict=True)):
            same = min(len(wanted), len(got))
            if wanted[:same] != got[:same]:
                at = next(i for i in range(same) if wanted[i] != got[i])
                raise AssertionError(
                    f"sequence {place}, token {at}: {first_who} generated {wanted[at]}, "
                    f"{who} {got[at]}"
                )


# ---------------------------------------------------------------- figures


def figures(comparison: Comparison, who: str) -> dict[str, Any]:
    """Return the medians of one side by name; bytes above the weights."""
    timed, watched = comparison.timed[who], comparison.watched[who][0]
    steps = [1e3 * seconds for run in timed for seconds in run.step_seconds]
    return {
        "prefill_seconds": round(comparison.median(who, "first_seconds"), 4),
        "prefill_tokens_per_second": round(comparison.median(who, "prefill_tokens_per_second"), 1),
        "decode_tokens_per_second": round(comparison.median(who, "decode_tokens_per_second"), 2),
        "median_step_ms": round(statistics.median(steps), 3),
        "worst_step_ms": round(max(steps), 3),
        "held_bytes": watched.held_bytes,
        "peak_bytes": round(comparison.median(who, "peak_bytes")),
        "cached_tokens": watched.cached_tokens,
    }


def ratios(comparison: Comparison) -> dict[str, float]:
    """Return how many times better ours is, by the names that every bench uses."""
    ours, theirs = figures(comparison, OURS), figures(comparison, RIVAL)

    def times(name: str, *, more_is_better: bool) -> float:
        better, worse = (ours, theirs) if more_is_better else (theirs, ours)
        return round(float(better[name] / worse[name]), 3)

    return {
        "decode_speed": times("decode_tokens_per_second", more_is_better=True),
        "prefill_speed": times("prefill_tokens_per_second", more_is_better=True),
        "peak_memory": times("peak_bytes", more_is_better=False),
        "held_memory": times("held_bytes", more_is_better=False),
    }


def least(of_shapes: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Return the least of every ratio over all shapes under its own name, and all of them."""
    names = list(dict.fromkeys(name for of in of_shapes.values() for name in of))
    return {
        **{name: min(of[name] for of in of_shapes.values() if name in of) for name in names},
        **{f"{shape}: {name}": x for shape, of in of_shapes.items() for name, x in of.items()},
    }


def ratio_line(figure: str, texts: tuple[str, str], ratio: float, goal: float | None) -> Line:
    """Lay out ours and theirs, with how many times better ours is, and the goal for that."""
    ours, theirs = texts
    figure = f"{figure} ({ratio:.2f}x)"
    if goal is None:
        return Line(figure, ours, theirs)
    return Line(figure, ours, theirs, f">= {goal:g}x", ratio >= goal)


def size(nbytes: float) -> str:
    """Write bytes as decimal megabytes."""
    return f"{nbytes / 1e6:,.1f} MB"


def speed(per_second: float) -> str:
    """Write tokens per second."""
    return f"{per_second:,.1f}"
