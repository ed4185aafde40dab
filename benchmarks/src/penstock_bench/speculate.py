"""`penstock bench speculate`: speculative decoding of text that repeats and text that does not.

Answers are scripted (`script`), so that all sides generate the same text on any model. mlx-lm's
draft model has an eighth of the layers and is always accepted: its best case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from random import Random
from typing import Any

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from penstock.engine.core import Core
from penstock.engine.request import Request
from penstock.errors import SettingError
from penstock.models.loading import load
from penstock.models.mlx_lm import encode
from penstock_bench.engine_sides import MEMORY_SHARE, RIVAL
from penstock_bench.models import LlamaShape, ModelChoice, bench_model, packed_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import (
    Batched,
    make_caches,
    plain_tokens,
    random_llama,
    speculative_tokens,
)
from penstock_bench.script import Script, scripted
from penstock_bench.serve_model import real_folder
from penstock_bench.serve_words import words_of

CLAIM = "Checking proposed tokens pays where text repeats, and costs nothing where it does not"
ON, OFF, DRAFT = "speculating", "one token a step", "mlx-lm with a draft model"
DRAFTED = "speculating with that draft model"
TASKS = 4
"""Number of tasks that share the time budget."""
MARKS = 4
"""Tokens that a chat template writes before each answer."""
CHANGE_EVERY = 48
"""Interval of changed tokens in a repeated text."""


@dataclass(frozen=True, slots=True)
class SpeculateLoad:
    """Sizes, in tokens unless noted."""

    model: str = "random"
    """`random`, `embedded`, or a model with real weights as for `real_folder`."""
    llama: LlamaShape = field(default_factory=LlamaShape)
    proposed: int = 16
    """Maximum proposed tokens per step."""
    draft_proposed: int = 4
    packed: bool = False
    """Whether weights are multiplied by their codes; then mlx-lm is not measured."""
    file: int = 1_500
    """Tokens of the text in the prompt that the answer repeats."""
    answer: int = 384
    batch: int = 4
    """Sequences of the batch task."""
    steps: int = 40
    """Requests of the agent."""
    call: int = 32
    """Tokens of a tool call; three of them change from step to step."""
    result: int = 64
    rounds: int = 5
    budget_seconds: float = 400.0
    """Seconds after which no further round starts, all tasks together."""

    def for_real(self) -> SpeculateLoad:
        """Return a load with shorter answers, which takes minutes per round with real weights."""
        if self.model in ("random", "embedded"):
            return self
        return replace(self, answer=192)


@dataclass(frozen=True, slots=True)
class ScriptedTask:
    """Text for all sides, and the spans that are answers."""

    name: str
    text: Sequence[int]
    answers: Sequence[tuple[int, int]]
    """Start and end of each answer, in order; the text before it is its prompt."""
    batch: int = 1
    goal: float | None = None
    """Goal: speed with proposals over the speed without."""
    repeats: bool = True
    """Whether the text repeats; otherwise our draft model is measured, too."""

    @property
    def answer_tokens(self) -> int:
        """Timed tokens: all tokens of the answers but the first ones."""
        return self.batch * sum(end - start - 1 for start, end in self.answers)


def tasks(
    load: SpeculateLoad, draw: Callable[[int, int], Sequence[int]], size: int
) -> list[ScriptedTask]:
    """Generate the texts.

    Args:
        load: sizes.
        draw: returns text by seed and length.
        size: vocabulary size of the model.
    """
    pick = Random(0)
    file = list(draw(1, load.file))
    repeated = [
        pick.randrange(size) if place % CHANGE_EVERY == CHANGE_EVERY - 1 else token
        for place, token in enumerate(file[: load.answer])
    ]
    question = [*file, *draw(2, 16)]
    quoting = [*question, *repeated]
    spans = [(len(question), len(quoting))]
    new = [*draw(3, 512), *draw(4, load.answer)]
    return [
        ScriptedTask("repeats its prompt", quoting, spans, goal=2.5),
        ScriptedTask(f"{load.batch} x repeats its prompt", quoting, spans, load.batch, 1.8),
        _agent(load, draw, pick, size),
        ScriptedTask("without repetition", new, [(512, len(new))], goal=0.97, repeats=False),
    ]


def _agent(
    load: SpeculateLoad, draw: Callable[[int, int], Sequence[int]], pick: Random, size: int
) -> ScriptedTask:
    """Return an agent's conversation, whose answers are tool calls with few changing tokens."""
    text, call, marks = list(draw(5, 600)), list(draw(6, load.call)), draw(7, MARKS)
    answers = []
    for step in range(load.steps):
        text += marks
        start = len(text)
        text += call
        for place in pick.sample(range(len(call)), min(3, len(call))):
            text[start + place] = pick.randrange(size)
        answers.append((start, len(text)))
        text += draw(100 + step, load.result)
    return ScriptedTask(f"agent of {load.steps} steps", text, answers, goal=1.8)


# ---------------------------------------------------------------- sides


class OurSide:
    """Penstock's engine; every sequence has its own salt, so that none shares a prefix."""

    def __init__(
        self, model: Any, tokenizer: Any, proposed: int, batch: int, draft: Any = None
    ) -> None:
        limit = int(MEMORY_SHARE * psutil.virtual_memory().total)
        self._core = Core(
            model,
            tokenizer,
            memory_limit=limit,
            max_batch_size=batch,
            speculative_tokens=proposed,
            max_stall_ms=0,
            draft_model=None if draft is None else (draft, None),
        )
        self._batch = batch

    def run(self, task: ScriptedTask) -> float:
        """Return the seconds of all tokens but the first ones.

        Raises:
            AssertionError: an answer differs from the script.
        """
        seconds = 0.0
        for start, end in task.answers:
            handles = [
                self._core.submit(
                    Request(
                        prompt=tuple(task.text[:start]),
                        max_tokens=end - start,
                        ignore_eos=True,
                        salt=str(number),
                    )
                )
                for number in range(self._batch)
            ]
            while any(not handle.choices[0].tokens for handle in handles):
                self._core.step()
                _take(handles)
            extra = sum(len(handle.choices[0].tokens) - 1 for handle in handles)
            began, whole = time.perf_counter(), self._batch * (end - start - 1)
            while self._core.step():
                pass
            # The first answers went on while the others' prompts were read.
            seconds += (time.perf_counter() - began) * whole / max(1, whole - extra)
            _take(handles)
            for handle in handles:
                check(handle.choices[0].tokens, task.text[start:end])
        return seconds

    def figures(self) -> dict[str, int]:
        """Return the counts of proposals since the start."""
        stats = self._core.view.stats()
        return {
            "proposed_tokens": stats.proposed_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "drafted_tokens": stats.drafted_tokens,
            "decode_steps": stats.decode.count,
        }

    def close(self) -> None:
        self._core.close()


def _take(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.events()


def check(got: Sequence[int], expected: Sequence[int]) -> None:
    """Raise AssertionError unless an answer equals the script."""
    if list(got) != list(expected):
        index = next(
            i for i, (token, other) in enumerate(zip(got, expected, strict=False)) if token != other
        )
        raise AssertionError(
            f"token {index}: {got[index]} was generated, the script has {expected[index]}"
        )


def rival_seconds(model: Any, task: ScriptedTask, draft: Any = None, proposed: int = 0) -> float:
    """Return the seconds of mlx-lm's tokens but the first ones, for one sequence."""
    caches, seconds = make_caches(model, draft), 0.0
    for start, end in task.answers:
        rest = caches.rest(task.text[:start])
        if draft is None:
            tokens = plain_tokens(rest, model, caches.caches, end - start)
        else:
            tokens = speculative_tokens(rest, model, draft, caches.caches, end - start, proposed)
        first = next(tokens)
        began = time.perf_counter()
        answer = [first, *islice(tokens, end - start - 1)]
        seconds += time.perf_counter() - began
        check(answer, task.text[start:end])
        tokens.close()
    return seconds


def rival_batch_seconds(model: Any, task: ScriptedTask) -> float:
    """Return the seconds of mlx-lm's batch, all sequences decoding."""
    ((start, end),) = task.answers
    side, answers = Batched(model, task.batch), [list[int]() for _ in range(task.batch)]
    try:
        side.submit([task.text[:start]] * task.batch, end - start)
        began = 0.0
        while any(len(answer) < end - start for answer in answers):
            for place, token in side.step():
                answers[place].append(token)
            if not began and all(answers):
                side.settle()
                began, extra = time.perf_counter(), sum(map(len, answers)) - task.batch
        side.settle()
        whole = task.answer_tokens
        seconds = (time.perf_counter() - began) * whole / max(1, whole - extra)
    finally:
        side.close()
    for answer in answers:
        check(answer, task.text[start:end])
    return seconds


# ---------------------------------------------------------------- the bench


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of every round, by side, and the proposals of the last one."""

    task: ScriptedTask
    seconds: Mapping[str, Sequence[float]]
    proposals: Mapping[str, int]

    def speed(self, side: str) -> float:
        """Return the median tokens per second of a side."""
        return self.task.answer_tokens / statistics.median(self.seconds[side])

    def ratio(self, side: str, other: str) -> float:
        """Return the median over the rounds of a side's speed over another's."""
        pairs = zip(self.seconds[side], self.seconds[other], strict=True)
        return round(statistics.median(theirs / ours for ours, theirs in pairs), 3)

    def ratios(self) -> dict[str, float]:
        """Return our speed with proposals over each other side's."""
        return {side: self.ratio(ON, side) for side in self.seconds if side != ON}


@dataclass(frozen=True, slots=True)
class ScriptedModels:
    """Models of all sides, which follow one script."""

    model: Any
    draft: Any
    tokenizer: Any
    script: Script
    draw: Callable[[int, int], Sequence[int]]
    """Source of text, by seed and length."""
    name: str


@contextmanager
def scripted_models(load_of: SpeculateLoad) -> Iterator[ScriptedModels]:
    """Load the models of all sides."""
    if load_of.packed and load_of.model == ModelChoice.EMBEDDED:
        raise SettingError("--packed: the embedded model has float32 weights; take smollm2")
    if load_of.model in list(ModelChoice):
        shape = load_of.llama
        chosen = packed_model(shape) if load_of.packed else bench_model(load_of.model, shape)
        model, tokenizer, name = chosen.model, chosen.tokenizer, chosen.name
        draw: Callable[[int, int], Sequence[int]] = chosen.draw
    else:
        with real_folder(load_of.model) as served:
            source = load_of.model if load_of.packed else served.path
            model, tokenizer = load(source, weights_dtype="packed" if load_of.packed else "auto")
            name, draw = served.name, _text_of(tokenizer, words_of(served.path, ()))
    script, heads = Script(), load_of.llama.kv_heads
    draft = random_llama(
        layers=max(1, load_of.llama.layers // 8),
        hidden_size=load_of.llama.hidden_size // 2,
        intermediate_size=load_of.llama.intermediate_size // 2,
        query_heads=heads,
        kv_heads=heads,
        head_dim=load_of.llama.head_dim,
        vocabulary_size=int(model.args.vocab_size),
    )
    with scripted(model, script), scripted(draft, script):
        yield ScriptedModels(model, draft, tokenizer, script, draw, name)


def _text_of(tokenizer: Any, words: Any) -> Callable[[int, int], Sequence[int]]:
    """Return a source of real text: every seed gives another piece, without overlap."""
    whole = list(encode(tokenizer, words.system(20_000)))
    starts: dict[int, int] = {}
    drawn = 0

    def draw(seed: int, tokens: int) -> Sequence[int]:
        nonlocal drawn
        if seed not in starts:
            starts[seed], drawn = drawn, drawn + tokens
        start = starts[seed]
        if start + tokens > len(whole):
            raise AssertionError(f"{drawn} tokens are drawn of a text of {len(whole)}")
        return whole[start : start + tokens]

    return draw


def measure(load_of: SpeculateLoad) -> Report:
    """Run every task on all sides in turn."""
    with scripted_models(load_of) as models:
        size = int(models.model.args.vocab_size)
        measured = [
            _measure_one(load_of, task, models) for task in tasks(load_of, models.draw, size)
        ]
        described: dict[str, Any] = {"name": models.name}
        dtype = "packed"
        if not load_of.packed:
            weights: Any = tree_flatten(models.model.parameters())
            described["parameters"] = sum(array.size for _, array in weights)
            dtype = str(weights[0][1].dtype).rpartition(".")[2]
    return report(load_of, measured, described, dtype)


def _measure_one(load_of: SpeculateLoad, task: ScriptedTask, models: ScriptedModels) -> Measured:
    script = models.script
    proposals: dict[str, int] = {}

    def ours(proposed: int, of: Any = None) -> float:
        script.set(None)  # the engine tries the models
        side = OurSide(models.model, models.tokenizer, proposed, task.batch, of)
        try:
            script.set(task.text)
            seconds = side.run(task)
            if proposed and of is None:
                proposals.update(side.figures())
            return seconds
        finally:
            side.close()
            mx.clear_cache()

    sides: dict[str, Callable[[], float]] = {
        ON: lambda: ours(load_of.proposed),
        OFF: lambda: ours(0),
    }
    if load_of.packed:
        pass  # mlx-lm has other weights
    elif task.batch > 1:
        sides[RIVAL] = lambda: rival_batch_seconds(models.model, task)
    else:
        sides[RIVAL] = lambda: rival_seconds(models.model, task)
        sides[DRAFT] = lambda: rival_seconds(
            models.model, task, models.draft, load_of.draft_proposed
        )
        if not task.repeats:
            sides[DRAFTED] = lambda: ours(load_of.draft_proposed, models.draft)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    began, share = time.perf_counter(), load_of.budget_seconds / TASKS
    for turn in range(load_of.rounds):
        taken = time.perf_counter() - began
        if turn and taken * (turn + 1) / turn > share:
            break
        for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            script.set(task.text)
            seconds[side].append(sides[side]())
    script.set(None)
    return Measured(task, seconds, proposals)


def report(
    load_of: SpeculateLoad, measured: Sequence[Measured], model: dict[str, Any], dtype: str
) -> Report:
    """Format the speeds, each next to ours."""
    lines = [line for entry in measured for line in _lines(entry)]
    ours = {
        entry.task.name: {
            "tokens_per_second": round(entry.speed(ON), 2),
            "without_proposals": round(entry.speed(OFF), 2),
            **entry.proposals,
        }
        for entry in measured
    }
    rival = {
        entry.task.name: {
            side: round(entry.speed(side), 2)
            for side in (RIVAL, DRAFT, DRAFTED)
            if side in entry.seconds
        }
        for entry in measured
    }
    return Report(
        name="speculate",
        claim=CLAIM,
        rival=OFF if load_of.packed else RIVAL,
        penstock={"model": model, **ours},
        rival_figures=rival,
        ratio={
            f"{entry.task.name}: {side}": ratio
            for entry in measured
            for side, ratio in entry.ratios().items()
        },
        goal={entry.task.name: entry.task.goal for entry in measured},
        met=all(line.met is not False for line in lines),
        lines=lines,
        raw={
            "load": asdict(load_of),
            "seconds": {entry.task.name: entry.seconds for entry in measured},
        },
        dtype=dtype,
    )


def _lines(entry: Measured) -> list[Line]:
    """Return a line for each other side; the goal applies to proposals alone."""
    lines = []
    for side, ratio in entry.ratios().items():
        goal = entry.task.goal if side == OFF else None
        lines.append(
            Line(
                f"{entry.task.name}, beside {side} ({ratio:.2f}x)",
                f"{entry.speed(ON):,.1f} tokens/s",
                f"{entry.speed(side):,.1f} tokens/s",
                "" if goal is None else f">= {goal:g}x",
                None if goal is None else ratio >= goal,
            )
        )
    return lines
