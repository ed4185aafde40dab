"""One run of a side: the same clock and counter for ours and mlx-lm's."""

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
    """The state after a step, with nothing in flight. Bytes are above the weights."""

    needed_tokens: int
    """Prompt tokens read and tokens generated, of all sequences: their KV is needed."""
    held_bytes: int
    peak_bytes: int
    """Peak within the step."""
    decoding: bool
    """Whether every sequence generates by now."""


@dataclass(slots=True)
class Run:
    """Figures of one pass. Bytes are above the weights."""

    first_seconds: float
    """Seconds from the submission until every sequence has its first token."""
    step_seconds: list[float] = field(repr=False)
    """Seconds of each step after the first tokens, all sequences generating."""
    tokens: list[list[int]] = field(repr=False)
    """Tokens that every sequence generated; the counts differ by a few."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were not computed: cached before, or computed once for several prompts."""
    decoded_tokens: int = 0
    """Tokens of all sequences in the timed steps."""
    before_bytes: int = 0
    """Bytes before the submission: buffers of the engine, and learned prefixes."""
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
        """Tokens a second of all sequences together, every step counted."""
        return self.decoded_tokens / sum(self.step_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens a second of all prompts, cached ones too, up to the last first token."""
        return self.prompt_tokens / self.first_seconds

    @property
    def machinery_share(self) -> float:
        """Share of the time that was spent on anything but the model."""
        return 1 - self.model_seconds / self.seconds

    @property
    def held_bytes(self) -> int:
        """Most bytes after a step in which all sequences generate."""
        return max(moment.held_bytes for moment in self.moments if moment.decoding)


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts for both sides, and a prefix that they may know before."""

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
    """Return the tokens that all prompts begin with."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def run_side(make: MakeSide, task: Task, *, watch: bool = False) -> list[Run]:
    """Build a side, let it learn the known prefix, hand the prompts in, drop it.

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
    """Drop all unused memory; return the bytes that are left: the weights of the models.

    mlx-lm begins to compute a next token that is not asked for. This waits for it: until it is
    computed, MLX holds its inputs.
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
    """A side whose prompts were handed in, and its run so far."""

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
        """Return the run, from the submission until now."""
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
