"""`penstock bench hybrid`: the next turn of a conversation with recurrent layers.

    a conversation ──> its next turn         mlx-lm: recomputes; its server's cache: resumes
                   └─> another last question mlx-lm and its server's cache: recompute

mlx-lm's prompt cache resumes only at the end of a stored prompt: states cannot be trimmed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from penstock import config
from penstock.plurals import counted
from penstock_bench.comparison import size
from penstock_bench.engine_sides import OURS, RIVAL, EngineShape, Ours
from penstock_bench.models import BenchModel
from penstock_bench.report import Line, Report
from penstock_bench.rivals import Solo, random_hybrid

CLAIM = "With recurrent layers, too, the next turn computes its new text, and no more than a block"
SERVER = f"{RIVAL} server's cache"
TIMES = 10.0
"""Goal: speedup of the second turn's first token over mlx-lm's loop."""
GOAL_TOKENS = 4_096
SHARE = 0.25
"""Goal: bytes of checkpoints over the bytes of keys and values."""


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Shape of the random hybrid model.

    A state takes the bytes of 115 tokens of KV; in Qwen3-Next 80B, of 3,000.
    """

    layers: int = 4
    hidden_size: int = 256
    full_every: int = 4
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    state_heads: int = 8
    state_dim: int = 32
    experts: int = 4
    vocabulary_size: int = 4_096


@dataclass(frozen=True, slots=True)
class HybridLoad:
    """Sizes in tokens."""

    shape: HybridShape = field(default_factory=HybridShape)
    known_tokens: int = GOAL_TOKENS
    """Length of the first turn's prompt, in tokens."""
    answer_tokens: int = 40
    new_tokens: int = 64
    """Length of the second turn, in tokens."""
    engine: EngineShape = field(default_factory=EngineShape)
    rounds: int = 5


@dataclass(slots=True)
class TurnTimes:
    """Times and bytes of all rounds."""

    next_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds to the first token of the next turn, by side."""
    other_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds to the first token of another last question, by side."""
    computed_tokens: list[int] = field(default_factory=list)
    """Tokens of the next turn that our engine computes."""
    kv_bytes: int = 0
    checkpoint_bytes: int = 0


def measure(load: HybridLoad) -> Report:
    """Run the same conversation on all sides, round by round."""
    model = _model(load.shape)
    turns = TurnTimes()
    for turn in range(load.rounds):
        prompt = model.prompt(load.known_tokens, seed=3 * turn)
        others = [model.prompt(load.new_tokens, seed=3 * turn + i) for i in (1, 2)]
        said = _ours(load, model, prompt, others, turns)
        _theirs(model, [*prompt, *said], others, load, turns)
    return report(load, model, turns)


def _ours(
    load: HybridLoad,
    model: BenchModel,
    prompt: list[int],
    new: Sequence[list[int]],
    turns: TurnTimes,
) -> list[int]:
    """Run the first turn, time the turns after it, and return the first answer."""
    side = Ours(model, 1, load.engine)
    try:
        side.submit([prompt], load.answer_tokens)
        said = _answer(side, load.answer_tokens)
        by_kind = side.stats().by_kind
        turns.kv_bytes, turns.checkpoint_bytes = by_kind["nodes"], by_kind["checkpoints"]
        _time(turns.next_seconds, OURS, side, [*prompt, *said, *new[0]])
        turns.computed_tokens.append(side.prefilled_tokens)
        _time(turns.other_seconds, OURS, side, [*prompt[: -load.new_tokens], *new[1]])
    finally:
        side.close()
    return said


def _theirs(
    model: BenchModel,
    history: list[int],
    new: Sequence[list[int]],
    load: HybridLoad,
    turns: TurnTimes,
) -> None:
    other = [*history[: load.known_tokens - load.new_tokens], *new[1]]
    for name, learns in ((RIVAL, False), (SERVER, True)):
        side = Solo(model.model)
        try:
            if learns:
                side.learn(history)
            _time(turns.next_seconds, name, side, [*history, *new[0]])
            _time(turns.other_seconds, name, side, other)
        finally:
            side.close()


def _time(seconds: dict[str, list[float]], name: str, side: Any, prompt: list[int]) -> None:
    """Time a prompt's first token, and cancel the rest of the answer."""
    began = time.perf_counter()
    side.submit([prompt], 2)
    while not side.step():
        pass
    seconds.setdefault(name, []).append(time.perf_counter() - began)
    side.cancel()
    side.settle()


def _answer(side: Ours, count: int) -> list[int]:
    (tokens,) = side.answers()
    if len(tokens) != count:
        raise AssertionError(f"{len(tokens)} tokens came, {count} were asked for")
    return tokens


def _model(shape: HybridShape) -> BenchModel:
    sizes = asdict(shape)
    model = random_hybrid(**sizes)

    def draw(seed: int, tokens: int) -> list[int]:
        pick = Random(seed)
        return [pick.randrange(shape.vocabulary_size) for _ in range(tokens)]

    full = shape.layers // shape.full_every
    return BenchModel(
        "random Qwen3-Next",
        model,
        None,
        shape.layers,
        full * shape.kv_heads * shape.head_dim * 2 * 4,
        shape.query_heads,
        config.BLOCK_SIZE,
        draw,
    )


Medians = dict[str, dict[str, float]]
"""Median seconds to the first token, by question and side."""


def report(load: HybridLoad, model: BenchModel, turns: TurnTimes) -> Report:
    """Compare with mlx-lm's loop, and with its server's cache."""
    medians = _medians(turns)
    judged = load.known_tokens >= GOAL_TOKENS
    lines = [
        _time_line(medians, "next turn", "next", RIVAL, judged),
        _time_line(medians, f"next turn, {SERVER}", "next", SERVER, False),
        _time_line(medians, "another last question", "other", RIVAL, judged),
        _time_line(medians, f"another last question, {SERVER}", "other", SERVER, False),
        *_held_lines(load, turns),
    ]
    share = turns.checkpoint_bytes / turns.kv_bytes
    return Report(
        name="hybrid",
        claim=CLAIM,
        rival=RIVAL,
        penstock={
            **medians,
            "computed_tokens": max(turns.computed_tokens),
            "checkpoint_share": round(share, 4),
        },
        rival_figures={},
        ratio={
            "second_turn_ttft": _times(medians, "next", RIVAL),
            "second_turn_ttft_server": _times(medians, "next", SERVER),
            "other_question_ttft": _times(medians, "other", RIVAL),
            "other_question_ttft_server": _times(medians, "other", SERVER),
        },
        goal={"second_turn_ttft": TIMES, "other_question_ttft": TIMES, "checkpoint_share": SHARE},
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "model": model.as_object(),
            "runs": [asdict(turns)],
        },
        dtype=model.dtype,
    )


def _medians(turns: TurnTimes) -> Medians:
    return {
        question: {side: statistics.median(seconds) for side, seconds in by_side.items()}
        for question, by_side in (("next", turns.next_seconds), ("other", turns.other_seconds))
    }


def _times(medians: Medians, question: str, rival: str) -> float:
    """Return the speedup of our first token."""
    return round(medians[question][rival] / medians[question][OURS], 3)


def _time_line(medians: Medians, heading: str, question: str, rival: str, has_goal: bool) -> Line:
    value = _times(medians, question, rival)
    ours, theirs = (f"{1e3 * medians[question][side]:,.1f}" for side in (OURS, rival))
    return Line(
        f"{heading}, ms to the first token ({value:.1f}x)",
        ours,
        theirs,
        f">= {TIMES:g}x" if has_goal else "",
        value >= TIMES if has_goal else None,
    )


def _held_lines(load: HybridLoad, turns: TurnTimes) -> list[Line]:
    """Judge the tokens computed for the next turn, and the bytes of checkpoints."""
    computed = max(turns.computed_tokens)
    max_tokens = load.new_tokens + (load.engine.block_size or config.BLOCK_SIZE)
    share = turns.checkpoint_bytes / turns.kv_bytes
    checkpoints = size(turns.checkpoint_bytes)
    return [
        Line(
            "computed for the next turn",
            f"{counted(computed, 'token')}",
            "",
            f"<= {max_tokens}",
            computed <= max_tokens,
        ),
        Line("keys and values held", size(turns.kv_bytes), ""),
        Line(f"checkpoints ({share:.0%})", checkpoints, "", f"<= {SHARE:.0%}", share <= SHARE),
    ]
