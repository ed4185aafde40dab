"""`penstock bench weights`: speed of native weights and of weights in float32.

Native weights are so slow on a Linux CPU that few tokens are timed: by default 8 of a prompt and 2
steps. In float32 the same tokens are timed, and a whole question. With texts, both also read their
beginnings, to compare what they generate.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from penstock import Engine, Request
from penstock.models.loading import load_all
from penstock.models.mlx_lm import Loaded, load_tokenizer, render
from penstock.plugins.gguf.header import is_gguf
from penstock_bench import weights_text
from penstock_bench.comparison import least, ratio_line, speed
from penstock_bench.report import Line, Notify, Report
from penstock_bench.rivals import make_caches
from penstock_bench.serve_model import model_source, write_gguf
from penstock_bench.weights_text import TextRun

CLAIM = "Weights that become float32 answer where the same weights as they come do not"
AUTO, NATIVE = "--weights-dtype float32", "--weights-dtype native"
GOALS = {"prefill_speed": 50.0, "decode_speed": 5.0}
"""Goals: speed over native weights."""
FIRST_TOKEN_SECONDS = 2.0
"""Goal: seconds to the first token of the question in a new engine."""
QUESTION = "Explain in one sentence why the sky is blue at noon and red when the sun goes down."
FILE, FOLDER = "GGUF file", "MLX folder"


@dataclass(frozen=True, slots=True)
class WeightsLoad:
    """Sizes in tokens."""

    model: str = "smollm2"
    """Name or path; a GGUF file is also measured as an MLX folder with its codes."""
    prompt_tokens: int = 8
    """Prompt tokens of both sides."""
    decode_tokens: int = 2
    """Timed decode steps of both sides."""
    rounds: int = 3
    """Runs in float32. Native weights run once."""
    texts: int = 0
    """Number of texts that both sides read, `prompt_tokens` tokens of each."""


@dataclass(frozen=True, slots=True)
class WeightsRun:
    """Seconds of one pass over a few tokens."""

    prefill_seconds: float
    step_seconds: list[float]


def measure(load: WeightsLoad, notify: Notify = lambda *_: None) -> Report:
    """Load every form of the model both ways, one after the other, and time each.

    Raises:
        ModelError: the model cannot be read or downloaded.
        SettingError: there are fewer texts.
    """
    with model_forms(load.model) as forms:
        folder = forms[FOLDER]  # all forms have the same codes
        tokenizer = load_tokenizer(folder)
        prompts = weights_text.beginnings(tokenizer, load.texts, load.prompt_tokens)
        timed = {name: _measure_one(load, path) for name, path in forms.items()}
        read = _read_both(folder, prompts, notify) if prompts else []
    return report(load, timed, read)


def _read_both(folder: Path, prompts: list[list[int]], notify: Notify) -> list[TextRun]:
    float32, native = (
        load_all(folder, weights_dtype=dtype).model for dtype in ("float32", "native")
    )
    return weights_text.read_both(float32, native, prompts, notify)


@contextmanager
def model_forms(name: str) -> Iterator[dict[str, Path]]:
    """Yield a model's paths: its own, and for a GGUF file a folder with the same codes.

    Raises:
        ModelError: the model cannot be read or downloaded.
    """
    source = model_source(name)
    if not is_gguf(source):
        yield {FOLDER: source}
        return
    with TemporaryDirectory(prefix="penstock-bench-") as place:
        write_gguf(source, Path(place), float32=False)
        yield {FILE: source, FOLDER: Path(place)}


@dataclass(frozen=True, slots=True)
class FormRuns:
    """Runs of one form of the model."""

    auto: list[WeightsRun]
    native: list[WeightsRun]
    question_tokens: int
    first_token_seconds: list[float]
    """Seconds of the whole question in float32, each in a new engine."""


def _measure_one(load: WeightsLoad, path: Path) -> FormRuns:
    float32 = load_all(path, weights_dtype="float32")
    question = render(float32.tokenizer, [{"role": "user", "content": QUESTION}])
    few = question[: load.prompt_tokens]
    auto = [_run(float32.model, few, load.decode_tokens) for _ in range(load.rounds)]
    first = [_first_token_seconds(float32, question) for _ in range(load.rounds)]
    del float32
    gc.collect()
    model = load_all(path, weights_dtype="native").model
    return FormRuns(auto, [_run(model, few, load.decode_tokens)], len(question), first)


def _run(model: Any, prompt: Sequence[int], steps: int) -> WeightsRun:
    """Prefill a prompt and decode greedily, as a plain mlx-lm loop does."""
    caches = make_caches(model).caches
    began = time.perf_counter()
    model(mx.array(list(prompt))[None], cache=caches)  # the head is not computed
    mx.eval([cache.state for cache in caches])
    prefill_seconds = time.perf_counter() - began
    token, seconds = mx.array([[prompt[-1]]]), []
    for _ in range(steps):
        began = time.perf_counter()
        token = mx.argmax(model(token, cache=caches)[:, -1], axis=-1)[None]
        mx.eval(token)
        seconds.append(time.perf_counter() - began)
    return WeightsRun(prefill_seconds, seconds)


def _first_token_seconds(loaded: Loaded, question: Sequence[int]) -> float:
    """Return the seconds to the first token of a new engine with an empty cache."""
    with Engine(loaded.model, loaded.tokenizer) as engine:
        began = time.perf_counter()
        engine.submit(Request(prompt=tuple(question), max_tokens=1)).result()
        return time.perf_counter() - began


def report(load: WeightsLoad, timed: dict[str, FormRuns], read: Sequence[TextRun] = ()) -> Report:
    """Compare both ways of each form with each other and with the goals."""
    auto = {name: {**_figures(load, runs.auto), **_question(runs)} for name, runs in timed.items()}
    native = {name: _figures(load, runs.native) for name, runs in timed.items()}
    ratios = {name: _ratios(auto[name], native[name]) for name in timed}
    lines = [line for name in timed for line in _lines(name, auto[name], native[name])]
    lines += weights_text.lines(read) if read else []
    return Report(
        name="weights",
        claim=CLAIM,
        rival=NATIVE,
        penstock=auto | ({"texts": weights_text.figures(read)} if read else {}),
        rival_figures=native,
        ratio=least(ratios),
        goal={**GOALS, "first_token_seconds": FIRST_TOKEN_SECONDS},
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "runs": {name: asdict(runs) for name, runs in timed.items()},
            "texts": [asdict(run) for run in read],
        },
        dtype="float32",
    )


def _figures(load: WeightsLoad, runs: Sequence[WeightsRun]) -> dict[str, float]:
    prefill = statistics.median(run.prefill_seconds for run in runs)
    step = statistics.median(seconds for run in runs for seconds in run.step_seconds)
    return {
        "prefill_tokens_per_second": round(load.prompt_tokens / prefill, 5),
        "decode_tokens_per_second": round(1 / step, 5),
    }


def _question(runs: FormRuns) -> dict[str, float]:
    return {
        "question_tokens": runs.question_tokens,
        "first_token_seconds": round(statistics.median(runs.first_token_seconds), 3),
    }


def _ratios(auto: dict[str, float], native: dict[str, float]) -> dict[str, float]:
    return {
        f"{name}_speed": round(
            auto[f"{name}_tokens_per_second"] / native[f"{name}_tokens_per_second"], 1
        )
        for name in ("prefill", "decode")
    }


def _lines(form: str, auto: dict[str, float], native: dict[str, float]) -> list[Line]:
    ratio, first = _ratios(auto, native), auto["first_token_seconds"]
    lines = []
    for name in ("prefill", "decode"):
        key = f"{name}_tokens_per_second"
        texts = speed(auto[key]), f"{native[key]:.2f}"
        goal = GOALS[f"{name}_speed"]
        lines.append(ratio_line(f"{form}: {name}, tokens/s", texts, ratio[f"{name}_speed"], goal))
    figure = f"{form}: first token of {auto['question_tokens']:.0f} tokens"
    goal_met = first <= FIRST_TOKEN_SECONDS
    return [*lines, Line(figure, f"{first:.2f} s", "", f"<= {FIRST_TOKEN_SECONDS:g} s", goal_met)]
