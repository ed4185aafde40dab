"""Picture of the server benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock.plurals import counted
from penstock_bench.report import Report

COLORS = {"penstock": "tab:blue", "mlx-lm": "tab:orange", "llama.cpp": "tab:green"}
DPI = 110
SIDE_STEP = 0.16
"""Horizontal offset between the dots of two servers."""


def draw(report: Report, file: Path) -> None:
    """Plot memory over time, the first token of every turn, and the gaps between tokens."""
    rounds: Mapping[str, Sequence[Mapping[str, Any]]] = report.raw["sessions"]
    figure = Figure(figsize=(13, 3.8))
    memory, first, gaps = figure.subplots(1, 3)
    for place, (side, phases) in enumerate(rounds.items()):
        color = COLORS[side]
        replies = [reply for phase in phases for reply in phase["replies"]]
        _draw_memory(memory, phases[0], side, color)
        _draw_first(first, replies, side, color, (2 * place - 1) * SIDE_STEP)
        _draw_gaps(gaps, replies, side, color)
    for pane in (memory, first, gaps):
        pane.legend(fontsize="small")
    load = report.raw["load"]
    memory.set(xlabel="seconds", ylim=(0, None))
    memory.set_title("resident memory of the server, MB", fontsize="medium")
    first.set(xlabel="turn", yscale="log", xticks=range(1, load["turns"] + 1))
    first.set_title(
        f"seconds to the first token, {load['sessions']} sessions with a prompt of "
        f"{counted(load['system_tokens'], 'token')}",
        fontsize="medium",
    )
    gaps.set(xlabel="ms between two pieces of text", ylabel="share below", xscale="log")
    gaps.set_title("gaps between tokens", fontsize="medium")
    figure.tight_layout()
    figure.savefig(file, dpi=DPI)


def _draw_memory(pane: Axes, phase: Mapping[str, Any], side: str, color: str) -> None:
    times, nbytes = zip(*phase["memory"], strict=True)
    pane.plot(times, [n / 1e6 for n in nbytes], color=color, label=side)
    pane.axhline(phase["idle_bytes"] / 1e6, color=color, lw=0.7, ls=":", label=f"{side}, idle")


def _draw_first(
    pane: Axes, replies: Sequence[Mapping[str, Any]], side: str, color: str, aside: float
) -> None:
    answered = [reply for reply in replies if reply["text_times"]]
    turns = [reply["turn"] + 1 + aside for reply in answered]
    seconds = [max(1e-3, reply["text_times"][0] - reply["sent"]) for reply in answered]
    pane.plot(turns, seconds, "o", color=color, alpha=0.6, label=side)


def _draw_gaps(pane: Axes, replies: Sequence[Mapping[str, Any]], side: str, color: str) -> None:
    times = sorted(
        1e3 * (after - before)
        for reply in replies
        for before, after in zip(reply["text_times"], reply["text_times"][1:], strict=False)
    )
    shares = [(place + 1) / len(times) for place in range(len(times))]
    pane.plot([max(0.1, gap) for gap in times], shares, color=color, label=side)
