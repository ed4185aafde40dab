"""One run of a side, with the same clock and counters for penstock and mlx-lm."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from penstock import config
from penstock_bench.engine_sides import MakeSide, Prompts, Side


@dataclass(frozen=True, slots=True)
class RunMoment:
    """Memory after a step, with nothing in flight. Bytes are without the weights."""

    needed_tokens: int
    """Prompt and generated tokens of all sequences so far, whose KV is needed."""
    held_bytes: int
    peak_bytes: int
    """Peak during the step."""
    decoding: bool
    """Whether all sequences are decoding."""


@dataclass(slots=True)
class Run:
    """Figures of one run. Bytes are without the weights."""

    first_seconds: float
    """Seconds until every sequence has its first token."""
    step_seconds: list[float] = field(repr=False)
    """Seconds per token of each sequence, with all sequences decoding."""
    tokens: list[list[int]] = field(repr=False)
    """Generated tokens of every sequence; lengths differ slightly."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens not computed: cached, or shared between prompts."""
    decoded_tokens: int = 0
    """Tokens of all sequences in the timed steps."""
    before_bytes: int = 0
    """Bytes before the submission: engine buffers and cached prefixes."""
    seconds: float = 0.0
    """Seconds of the whole run."""
    model_seconds: float = 0.0
    """Seconds in the model and the sampler; 0 if not measured."""
    peak_bytes: int = 0
    """Peak bytes of the whole run."""
    moments: list[RunMoment] = field(default_factory=list, repr=False)
    """Memory after each step, if tracked. Tracking waits after every step; times are not valid."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Decoded tokens per second of all sequences."""
        return self.decoded_tokens / sum(self.step_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second, cached ones included, up to the last first token."""
        return self.prompt_tokens / self.first_seconds

    @property
    def machinery_share(self) -> float:
        """Share of the time spent outside the model."""
        return 1 - self.model_seconds / self.seconds

    @property
    def held_bytes(self) -> int:
        """Largest bytes after a step with all sequences decoding."""
        return max(moment.held_bytes for moment in self.moments if moment.decoding)


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts for both sides, and an optional cached prefix."""

    prompts: Prompts
    decode_tokens: int
    """Timed steps with all sequences decoding."""
    known: Sequence[int] = ()
    """Prefix that is prefilled before the clock starts."""
    repeats: int = 1
    """Number of times the prompts are submitted to the same engine."""
    prefill_chunk: int = config.PREFILL_CHUNK
    """Prefill chunk of our engine, in tokens."""

    @property
    def max_tokens(self) -> int:
        """Token limit per sequence: the first ones decode while others are prefilled."""
        spread = len(_common(self.prompts)) * (len(self.prompts) - 1)
        chunks = -(-(sum(map(len, self.prompts)) - spread) // self.prefill_chunk)
        return self.decode_tokens + 2 * chunks + 3 * len(self.prompts) + 8


def _common(prompts: Prompts) -> Sequence[int]:
    """Return the common prefix of all prompts."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def run_side(make: MakeSide, task: Task, *, watch: bool = False) -> list[Run]:
    """Construct a side, prefill the known prefix, run the prompts, and close it.

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
    """Free all unused memory; return the bytes left: the models' weights.

    mlx-lm computes one token ahead, whose inputs stay allocated until it is done; this waits for
    it.
    """
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def drive(side: Side, task: Task, base_bytes: int = 0, *, watch: bool = False) -> Run:
    """Submit the prompts and step until `decode_tokens` steps are timed."""
    driving = Driving(side, task, base_bytes, watch=watch)
    driving.read()
    driving.decode(task.decode_tokens)
    return driving.end()


class Driving:
    """A side with submitted prompts, and its run so far."""

    def __init__(self, side: Side, task: Task, base_bytes: int = 0, *, watch: bool = False) -> None:
        side.cancel()
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
        max_tokens = task.max_tokens  # takes milliseconds, which no side pays
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
        """Time the next `steps` tokens of all sequences, which are decoding."""
        run = self._run
        stop = len(run.step_seconds) + steps
        while len(run.step_seconds) < stop:
            tokens = self._step()
            by_row = max(1, tokens // len(run.tokens))
            timed = min(by_row, stop - len(run.step_seconds))
            run.decoded_tokens += tokens * timed // by_row
            run.step_seconds += [self._step_seconds / by_row] * timed

    def resume(self) -> None:
        """Step once, untimed, since other sides have filled the processor's caches."""
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
        """Return the run, up to now."""
        run, side = self._run, self._side
        run.seconds = self._now - self._began
        run.model_seconds = side.model_seconds - self._model_seconds
        run.peak_bytes = max(run.peak_bytes, mx.get_peak_memory() - self._base_bytes)
        run.cached_tokens = side.cached_tokens
        return run


def _moment(side: Side, tokens: list[list[int]], base_bytes: int) -> RunMoment:
    generated = sum(max(0, len(of) - 1) for of in tokens)  # the last one has not been read yet
    held_bytes = mx.get_active_memory()
    return RunMoment(
        needed_tokens=side.prompt_read + generated,
        held_bytes=held_bytes - base_bytes,
        peak_bytes=max(held_bytes, mx.get_peak_memory()) - base_bytes,
        decoding=all(tokens),
    )
