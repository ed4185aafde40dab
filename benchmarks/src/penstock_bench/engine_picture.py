"""Pictures of the engine benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared
from matplotlib.ticker import LogLocator

from penstock_bench.report import Report

COLORS = {"penstock": "tab:blue", "mlx-lm": "tab:orange"}
DPI = 110
RATIOS = ("decode_speed", "prefill_speed", "held_memory", "peak_memory")
Runs = Mapping[str, Mapping[str, Any]]


def draw_shared_prefix(report: Report, file: Path) -> None:
    """Plot the ratios of every prefix length, and the memory of the first."""
    figure = Figure(figsize=(11, 3.8))
    left, right = figure.subplots(1, 2)
    _ratios(left, report, list(report.raw["runs"]))
    shape, runs = _first(report)
    _memory(right, runs, f"{shape}: KV and buffers held, MB")
    right.set_xlabel("step; mlx-lm begins with the prefix known, penstock with nothing")
    _save(figure, file)


def draw_ragged(report: Report, file: Path) -> None:
    """Plot the memory of every shape over steps, and the KV that its tokens need."""
    shapes: Mapping[str, Runs] = report.raw["runs"]
    figure = Figure(figsize=(4.4 * (1 + len(shapes)), 3.8))
    first, *panes = figure.subplots(1, 1 + len(shapes))
    _ratios(first, report, list(shapes))
    token_bytes = report.raw["model"]["kv_bytes_per_token"]
    for pane, (shape, runs) in zip(panes, shapes.items(), strict=True):
        _memory(pane, runs, f"{shape}: KV and buffers held, MB")
        needed = _column(runs["penstock"]["watched"][0], "needed_tokens")
        need = [token_bytes * tokens / 1e6 for tokens in needed]
        pane.plot(need, color="black", lw=1, ls="--", label="KV of the tokens read")
        pane.legend(fontsize="small", loc="center right")
    _save(figure, file)


def draw_hit(report: Report, file: Path) -> None:
    """Plot the first token of a hit and the steps after it, and its memory."""
    runs: Runs = report.raw["runs"]
    figure = Figure(figsize=(11, 3.8))
    left, right = figure.subplots(1, 2)
    for side, color in COLORS.items():
        hits = [[run["first_seconds"], *run["step_seconds"]] for run in runs[side]["timed"]]
        for seconds in hits:
            left.plot([1e3 * s for s in seconds], color=color, lw=0.5, alpha=0.3)
        middle = [1e3 * median(of_token) for of_token in zip(*hits, strict=True)]
        left.plot(middle, color=color, lw=2, label=f"{side}, median of {len(hits)} hits")
    left.set(title="ms a token, from the submission of a hit", xlabel="token", yscale="log")
    left.legend()
    for side, color in COLORS.items():
        watched = runs[side]["watched"][0]
        peaks = [watched["before_bytes"], *_column(watched, "peak_bytes")]
        right.plot([n / 1e6 for n in peaks], color=color, label=f"{side}, peak of the step")
        held_bytes = [watched["before_bytes"], *_column(watched, "held_bytes")]
        right.plot([n / 1e6 for n in held_bytes], color=color, ls="--", lw=1, label=f"{side}, held")
    right.set(title="MB; 0 is before the hit", xlabel="token", ylim=(0, None))
    right.legend(fontsize="small")
    _save(figure, file)


def draw_single(report: Report, file: Path) -> None:
    """Plot the ratios, and the time of a step over the tokens it reads."""
    curve, shapes = report.raw["curve"], list(report.raw["runs"])
    count = bool(shapes) + bool(curve)
    figure = Figure(figsize=(1 + 5 * count, 3.8))
    panes = figure.subplots(1, count, squeeze=False)[0]
    if shapes:
        _ratios(panes[0], report, shapes, ("decode_speed", "prefill_speed"))
    if curve:
        for side, color in COLORS.items():
            panes[-1].plot(curve["tokens"], curve["step_ms"][side], "o-", color=color, label=side)
        panes[-1].set(
            title="ms a decode step, one sequence",
            xlabel="tokens read",
            xlim=(0, None),
            ylim=(0, None),
        )
        panes[-1].legend()
    _save(figure, file)


def draw_restore(report: Report, file: Path) -> None:
    """Plot the first token of a prompt: computed, and after a restart."""
    sides = {"penstock": report.penstock, "mlx-lm": report.rival_figures}
    names = ["computed", *(f"restored, files in {files}" for files in ("disk", "memory"))]
    figure = Figure(figsize=(7, 3.8))
    pane = figure.subplots()
    for i, (side, figures) in enumerate(sides.items()):
        seconds = [figures["prefill_seconds"], *figures["first_token_seconds"].values()]
        places = [group + (i - 0.5) * 0.4 for group in range(len(names))]
        bars = pane.bar(places, seconds, 0.4, color=COLORS[side], label=side)
        pane.bar_label(bars, fmt="%.3g", fontsize="small")
    pane.set_xticks(range(len(names)), names)
    pane.set(yscale="log", title="s to the first token of a known prompt")
    pane.legend()
    _save(figure, file)


def draw_quantized(report: Report, file: Path) -> None:
    """Plot peak memory and decode speed over the prompt's length, raw and quantized."""
    figure = Figure(figsize=(11, 3.8))
    panes = zip(
        figure.subplots(1, 2),
        (("peak_bytes", 1e6, "peak, MB"), ("decode_tokens_per_second", 1, "decode, tokens/s")),
        strict=True,
    )
    for pane, (name, unit, title) in panes:
        for side, pairs in (("penstock", report.penstock), ("mlx-lm", report.rival_figures)):
            lengths = [int(tokens) for tokens in pairs]
            for form, line in zip(next(iter(pairs.values())), ("--", "-"), strict=True):
                values = [pair[form][name] / unit for pair in pairs.values()]
                label = form if form.startswith(side) else f"{side} {form}"
                pane.plot(lengths, values, line, marker=".", color=COLORS[side], label=label)
        pane.set(title=title, xlabel="tokens of the prompt", xscale="log", yscale="log")
        pane.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        pane.minorticks_off()
        pane.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        pane.yaxis.set_major_formatter("{x:g}")
        pane.legend(fontsize="small")
    _save(figure, file)


DRAWINGS: dict[str, Callable[[Report, Path], None]] = {
    "shared-prefix": draw_shared_prefix,
    "hit": draw_hit,
    "ragged": draw_ragged,
    "single": draw_single,
    "restore": draw_restore,
    "quantized": draw_quantized,
}


def draw(report: Report, file: Path) -> None:
    """Draw the picture of the report's benchmark."""
    DRAWINGS[report.name](report, file)


def _ratios(
    pane: Axes, report: Report, shapes: Sequence[str], names: Sequence[str] = RATIOS
) -> None:
    """Plot a group of bars for every shape: how many times better penstock is."""
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [report.ratio[f"{shape}: {name}"] or 0.0 for shape in shapes]
        places = [shape + (i - (len(names) - 1) / 2) * width for shape in range(len(shapes))]
        bars = pane.bar(places, values, width, label=name.replace("_", " "))
        pane.bar_label(bars, fmt="%.1f", fontsize="x-small")
    pane.axhline(1, color="grey", lw=0.8)
    pane.set_xticks(range(len(shapes)), shapes, fontsize="small")
    pane.set_title("times better than mlx-lm", fontsize="medium")
    pane.legend(fontsize="small")


def _memory(pane: Axes, runs: Runs, title: str) -> None:
    """Plot the bytes after every step and its peak, without the weights."""
    for side, color in COLORS.items():
        watched = runs[side]["watched"][0]
        held_bytes, peak = (_column(watched, name) for name in ("held_bytes", "peak_bytes"))
        pane.plot([n / 1e6 for n in held_bytes], color=color, label=f"{side}, held")
        pane.plot([n / 1e6 for n in peak], color=color, lw=0.7, alpha=0.5, label=f"{side}, peak")
    pane.set_yscale("log")
    pane.set_title(title, fontsize="medium")
    pane.set_xlabel("step")
    pane.legend(fontsize="small")


def _first(report: Report) -> tuple[str, Runs]:
    shapes: Mapping[str, Runs] = report.raw["runs"]
    return next(iter(shapes.items()))


def _column(watched: Mapping[str, Any], name: str) -> list[float]:
    """Return one figure of all steps of a run."""
    index = watched["moment_columns"].index(name)
    return [moment[index] for moment in watched["moments"]]


def _save(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=DPI)
