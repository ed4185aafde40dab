"""`penstock eval --attend --task`: answers about long texts with selective attention.

The engine answers with full attention, with each number of selected tokens, and with a window of as
many bytes that keeps its first tokens. The first token of an answer always reads the whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from penstock.attention import devices
from penstock.engine.model.runner import Runner
from penstock.models.loading import load
from penstock.plurals import counted
from penstock_bench.attend_text import KEPT_TOKENS, window_tokens
from penstock_bench.eval_load import UNCHANGED, EvalLoad, KVSetting
from penstock_bench.eval_texts import AskedDialogue, EvalTask, questions
from penstock_bench.evaluate import Estimate, Progress, serve
from penstock_bench.key_forms import KeyForm
from penstock_bench.report import Line, Notify, Report

CLAIM = "Answers that read a choice of a long text are as right as those that read all"
RIVAL = "window"
MOST_POINTS = 1.0
"""Goal: fewer right answers than with full attention, in percentage points."""
Answers = dict[int | str, list[list[float]]]
"""Scores of answers, 0 to 1, by task and text."""


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Answers with selected tokens, and with a window of as many bytes."""

    window_tokens: int
    choice: Answers
    window: Answers


def measure(load_: EvalLoad, attend: Sequence[int], notify: Notify = lambda *_: None) -> Report:
    """Ask all questions with full attention, each number of tokens, and each window."""
    model, tokenizer = load(load_.model)
    dialogues = questions(tokenizer, load_)
    task = EvalTask(KeyForm.PLAIN, model, tokenizer, dialogues, [])
    sizes = sorted(set(attend))
    texts = sum(map(len, dialogues.values()))
    progress = Progress(notify, texts * (1 + 2 * len(sizes)))

    def answered(setting: KVSetting) -> Answers:
        step = partial(progress.step, f"asking: {setting}")
        return serve(task, load_, setting, step).right

    whole = answered(UNCHANGED)
    longest = _longest(dialogues)
    outcomes: dict[int, TaskOutcome] = {}
    for size in sizes:
        window = _window(model, size, longest, rest=load_.attend_rest)
        outcomes[size] = TaskOutcome(
            window,
            answered(KVSetting(UNCHANGED.codec, attend=size)),
            answered(KVSetting(UNCHANGED.codec, window, KEPT_TOKENS)),
        )
    return report(load_, whole, outcomes)


def _longest(dialogues: dict[int | str, list[AskedDialogue]]) -> int:
    texts = [text for group in dialogues.values() for text in group]
    return max(len(prompt) for text in texts for prompt in text.prompts)


def _window(model: Any, attend: int, length: int, *, rest: bool) -> int:
    """Return the window size, in tokens, that takes the bytes of the selection and its index."""
    runner = Runner(model, devices.current(), max_kv_size=length, keep=0)
    layers = sorted(runner.selectable_layers)
    return window_tokens(runner.shapes, layers, attend, length, rest=rest)


def report(load_: EvalLoad, whole: Answers, outcomes: dict[int, TaskOutcome]) -> Report:
    """Compare the shares of right answers with the goal."""
    lines: list[Line] = []
    met = True
    for task, ours in whole.items():
        lines.append(Line(f"{task}: all tokens read", _share(Estimate.of_shares(ours)), ""))
        for size, outcome in outcomes.items():
            below = fewer(ours, outcome.choice[task])
            reached = below.mean <= MOST_POINTS / 100
            met = met and reached
            name = f"{task}: {counted(size, 'token')} read"
            window = _share(Estimate.of_shares(outcome.window[task]))
            right = _share(Estimate.of_shares(outcome.choice[task]))
            theirs = f"{window} ({counted(outcome.window_tokens, 'token')})"
            lines.append(Line(name, right, theirs))
            goal = f"<= {MOST_POINTS:g}"
            lines.append(Line(f"{name}: points fewer", _share(below), "", goal, reached))
    return Report(
        name="eval_attend_tasks",
        claim=CLAIM,
        rival=RIVAL,
        penstock={
            "all": _shares(whole),
            "choice": {str(size): _shares(outcome.choice) for size, outcome in outcomes.items()},
        },
        rival_figures={
            "tokens": {str(size): outcome.window_tokens for size, outcome in outcomes.items()},
            "keep": KEPT_TOKENS,
            "right": {str(size): _shares(outcome.window) for size, outcome in outcomes.items()},
        },
        ratio={},
        goal={"points_below_all": MOST_POINTS},
        met=met,
        lines=lines,
        raw={
            "all": _by_name(whole),
            "choice": {str(size): _by_name(outcome.choice) for size, outcome in outcomes.items()},
            "window": {str(size): _by_name(outcome.window) for size, outcome in outcomes.items()},
            "load": load_.model_dump(mode="json", exclude={"settings", "texts", "model"}),
        },
        dtype="float32",
    )


def fewer(whole: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> Estimate:
    """Return how much lower the scores of answers are than those with full attention."""
    return Estimate.of_shares(
        [
            [a - b for a, b in zip(theirs, scores, strict=True)]
            for theirs, scores in zip(whole, ours, strict=True)
        ]
    )


def _shares(answers: Answers) -> dict[str, dict[str, Any]]:
    return {str(task): asdict(Estimate.of_shares(groups)) for task, groups in answers.items()}


def _by_name(answers: Answers) -> dict[str, list[list[float]]]:
    return {str(task): groups for task, groups in answers.items()}


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f}+-{100 * estimate.standard_error:.1f} of {estimate.n}"
