"""Picture of `penstock bench remember`: recall over length, a pane per selection size."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock_bench.report import Report

LOOKS = {
    "all": ("all tokens", "#8a9aa8", "--"),
    "index": ("choice by the index", "#1593ad", "-"),
    "quest": ("choice by Quest's bound", "#efa83c", "-"),
    "window": ("window of as many bytes", "#c92a35", "-"),
}
"""Label, color and line of each side."""


def draw(report: Report, file: Path) -> None:
    """Plot the share of known facts over the length of the dialogue."""
    outcomes = report.raw["outcomes"]
    sizes = report.raw["load"]["attend"]
    figure = Figure(figsize=(5 * len(sizes), 3.8))
    panes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for pane, size in zip(panes, sizes, strict=True):
        for side, (label, color, line) in LOOKS.items():
            known: dict[int, list[bool]] = {}
            for outcome in outcomes:
                if outcome["side"] == side and outcome["attend"] in (0, size):
                    known.setdefault(outcome["length"], []).extend(outcome["known"])
            lengths = sorted(known)
            percent = [100 * sum(known[length]) / len(known[length]) for length in lengths]
            pane.plot(lengths, percent, line, color=color, label=label, marker="o")
        pane.set_title(f"{size} tokens read a step")
        pane.set_xlabel("tokens of the dialogue")
        pane.set_xscale("log", base=2)
        pane.set_xticks(report.raw["load"]["lengths"], map(str, report.raw["load"]["lengths"]))
        pane.set_ylim(-4, 104)
        pane.grid(alpha=0.3)
    panes[0].set_ylabel("facts known, %")
    panes[0].legend(loc="center left", fontsize=8)
    figure.savefig(file, dpi=130, bbox_inches="tight")
