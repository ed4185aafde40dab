"""`penstock bench shared-prefix`: memory and speed of conversations that share a prefix."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from penstock.attention import devices
from penstock_bench.comparison import (
    Comparison,
    check_same_tokens,
    compare,
    figures,
    least,
    ratio_line,
    ratios,
    size,
    speed,
)
from penstock_bench.engine_runs import Run, Task, run_side
from penstock_bench.engine_sides import OURS, RIVAL, EngineShape, MakeSide, Ours
from penstock_bench.models import BenchModel, LlamaShape, ModelChoice, bench_model
from penstock_bench.report import Line, Report
from penstock_bench.rivals import PREFILL_BATCH, PREFILL_STEP_TOKENS, Batched

CLAIM = "A prefix is held once and read once, however many share it"

GOALS = {
    (8, 8_192): {"decode_speed": 4.0, "held_memory": 6.0, "peak_memory": 4.0},
    (8, 2_048): {"decode_speed": 3.0, "held_memory": 6.0, "peak_memory": 4.0},
}
"""Goals: times better than mlx-lm, by conversations and prefix tokens."""


@dataclass(frozen=True, slots=True)
class SharedPrefixLoad:
    """Sizes in tokens and sequences."""

    model: str = ModelChoice.RANDOM
    llama: LlamaShape = field(default_factory=LlamaShape)
    conversations: int = 8
    prefix_tokens: tuple[int, ...] = (8_192, 2_048)
    suffix_tokens: int = 32
    decode_tokens: int = 32
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5
    cold_rounds: int = 1
    """Rounds in which mlx-lm prefills the prefix for every conversation, which takes minutes."""

    def task(self, model: BenchModel, prefix_tokens: int) -> Task:
        """Return the prompts. Nothing is cached before: all conversations are submitted at once."""
        prefix = model.prompt(prefix_tokens, seed=0)
        suffixes = [model.prompt(self.suffix_tokens, seed=1 + i) for i in range(self.conversations)]
        return Task(
            [prefix + suffix for suffix in suffixes],
            self.decode_tokens,
            prefill_chunk=self.engine.prefill_chunk,
        )


class Knowing(Batched):
    """mlx-lm's side, with the prefix in its prompt cache before the clock starts.

    Its server would need an earlier request for that. Our side starts with an empty cache.
    """

    def __init__(self, model: BenchModel, load: SharedPrefixLoad, prefix_tokens: int) -> None:
        super().__init__(model.model, load.conversations)
        self.learn(model.prompt(prefix_tokens, seed=0))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Runs of both sides with one prefix length."""

    comparison: Comparison
    """Our engine cold, mlx-lm's with the prefix in its prompt cache."""
    cold: list[Run]
    """Runs of mlx-lm without the prefix, of which only the time to the first tokens is used."""
    block_size: int
    """Block size of our engine, in tokens."""

    def ratios(self) -> dict[str, float]:
        """Return the ratios; prefill is compared cold with cold if measured for mlx-lm."""
        if not self.cold:
            return {k: v for k, v in ratios(self.comparison).items() if k != "prefill_speed"}
        seconds = statistics.median(run.first_seconds for run in self.cold)
        ours = self.comparison.median(OURS, "first_seconds")
        return {**ratios(self.comparison), "prefill_speed": round(seconds / ours, 3)}

    def figures(self, side: str) -> dict[str, Any]:
        """Return the figures of one side, including the computed prompt tokens."""
        known = figures(self.comparison, side)
        cold = self.cold if side == RIVAL else self.comparison.timed[side]
        if not cold:
            return {k: v for k, v in known.items() if not k.startswith("prefill_")}
        seconds = statistics.median(run.first_seconds for run in cold)
        computed = {run.prompt_tokens - run.cached_tokens for run in cold}
        return {
            **known,
            "prefill_seconds": round(seconds, 4),
            "prefill_tokens_per_second": round(cold[0].prompt_tokens / seconds, 1),
            "computed_prompt_tokens": max(computed),
            "prompt_tokens": cold[0].prompt_tokens,
        }


def measure(load: SharedPrefixLoad) -> Report:
    """Run every prefix length on both sides in turn."""
    model = bench_model(load.model, load.llama)
    sharing = {count: _measure_one(load, model, count) for count in load.prefix_tokens}
    return report(load, model, sharing)


def _measure_one(load: SharedPrefixLoad, model: BenchModel, prefix_tokens: int) -> Sharing:
    task = load.task(model, prefix_tokens)
    makers: dict[str, MakeSide] = {
        OURS: lambda: Ours(model, load.conversations, load.engine),
        RIVAL: lambda: Knowing(model, load, prefix_tokens),
    }
    comparison = compare(makers, task, load.rounds, alike=load.engine.exact and model.exact)
    batch = fitting_batch(model, prefix_tokens + load.suffix_tokens)
    first = Task(task.prompts, 1)
    cold = [
        run
        for _ in range(load.cold_rounds)
        for run in run_side(
            lambda: Batched(model.model, load.conversations, prefill_batch=batch), first
        )
    ]
    check_same_tokens({RIVAL: comparison.watched[RIVAL], f"{RIVAL}, cold": cold})
    return Sharing(comparison, cold, load.engine.block_size or model.block_size)


def fitting_batch(model: BenchModel, tokens: int) -> int:
    """Return mlx-lm's prefill batch size: its server's default, or smaller if memory requires.

    On the CPU its attention holds all scores twice: 17 GB for 8 prompts of 8,192 tokens. Smaller
    batches are no slower there.
    """
    if devices.current().facts.fuses_attention:
        return PREFILL_BATCH
    scores = model.query_heads * min(tokens, PREFILL_STEP_TOKENS) * tokens * 4
    room = psutil.virtual_memory().available // 2
    return max(1, min(PREFILL_BATCH, room // (2 * scores)))


def report(load: SharedPrefixLoad, model: BenchModel, sharing: Mapping[int, Sharing]) -> Report:
    """Compare both sides with each other and with the goals."""
    names = {count: f"{load.conversations} x {count:,}" for count in sharing}
    ratio = {names[count]: sharing_.ratios() for count, sharing_ in sharing.items()}
    lines = [
        line
        for count, sharing_ in sharing.items()
        for line in _lines(load, names[count], sharing_, GOALS.get((load.conversations, count), {}))
    ]
    return Report(
        name="shared-prefix",
        claim=CLAIM,
        rival=RIVAL,
        penstock={names[count]: sharing_.figures(OURS) for count, sharing_ in sharing.items()},
        rival_figures={
            names[count]: sharing_.figures(RIVAL) for count, sharing_ in sharing.items()
        },
        ratio=least(ratio),
        goal={
            **{f"{n} x {count:,}": goal for (n, count), goal in GOALS.items()},
            "prefix_computed": "once",
        },
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(replace(load, model=model.name)),
            "model": model.as_object(),
            "runs": {
                names[count]: sharing_.comparison.as_object() for count, sharing_ in sharing.items()
            },
            "cold": {
                names[count]: [run.first_seconds for run in sharing_.cold]
                for count, sharing_ in sharing.items()
            },
        },
        dtype=model.dtype,
    )


def _lines(
    load: SharedPrefixLoad, shape: str, runs: Sharing, goal: Mapping[str, float]
) -> list[Line]:
    ours, theirs, ratio = runs.figures(OURS), runs.figures(RIVAL), runs.ratios()
    computed = ours["computed_prompt_tokens"]
    prefix = max(0, len(runs.comparison.task.prompts[0]) - load.suffix_tokens)
    # Each conversation reads for itself its suffix, and its share of a block.
    once = prefix + load.conversations * (load.suffix_tokens + runs.block_size)

    def line(figure: str, name: str, key: str) -> Line:
        write = size if key.endswith("bytes") else speed
        texts = write(ours[key]), write(theirs[key])
        return ratio_line(f"{shape}: {figure}", texts, ratio[name], goal.get(name))

    prefill = ("prefill cold, tokens/s", "prefill_speed", "prefill_tokens_per_second")
    return [
        line("decode, tokens/s", "decode_speed", "decode_tokens_per_second"),
        *([line(*prefill)] if runs.cold else []),
        line("KV held", "held_memory", "held_bytes"),
        line("peak", "peak_memory", "peak_bytes"),
        Line(
            f"{shape}: prompt tokens computed",
            f"{computed:,}",
            f"{theirs['computed_prompt_tokens']:,}" if runs.cold else "not measured",
            f"<= {once:,}",
            computed <= once,
        ),
    ]
