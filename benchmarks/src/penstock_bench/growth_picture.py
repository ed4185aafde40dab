"""Picture of `penstock bench growth`: memory over tokens, and the time of each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock_bench.growth import TRACK_TOKENS
from penstock_bench.report import Report

COLORS = ("tab:blue", "tab:orange")


def draw(report: Report, file: Path) -> None:
    """Plot the first round: peak bytes for decode and chunked prefill, step times for decode."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = report.raw["runs"]
    shape = report.raw["shape"]
    figure = Figure(figsize=(13, 3.6))
    titles = {
        "decode": "one token at a time",
        "prefill": f"chunks of {shape['chunk_tokens']} tokens",
    }
    panes = figure.subplots(1, 3)
    for pane, (load, title) in zip(panes, titles.items(), strict=False):
        for side, color in zip(("penstock", report.rival), COLORS, strict=True):
            track = runs[load][side][0]["peak_track"]
            tokens = [TRACK_TOKENS * i for i in range(len(track))]
            pane.plot(tokens, [n / 1e6 for n in track], label=side, color=color)
        pane.axvline(shape["window_tokens"], color="grey", lw=0.8, ls=":")
        pane.set(title=f"peak MB, {title}", xlabel="tokens read", ylim=(0, None))
    for side, color in reversed(list(zip(("penstock", report.rival), COLORS, strict=True))):
        steps = runs["decode"][side][0]["step_ms"]
        panes[2].plot(range(len(steps)), steps, label=side, color=color, lw=0.7)
    panes[2].set(title="ms a step, one token at a time", xlabel="tokens read", yscale="log")
    panes[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
