"""Picture of `penstock bench million`: time and memory of a step over the length of a sequence."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock_bench.report import Report

STEP, RESIDENT, ACCOUNT, GOAL = "#1593ad", "#8a9aa8", "#1593ad", "#c92a35"


def draw(report: Report, file: Path) -> None:
    """Plot a step's processor time, and the memory held, over the tokens before it."""
    rows = report.raw["rows"]
    tokens = [row["tokens"] for row in rows]
    figure = Figure(figsize=(10, 3.6))
    time, memory = figure.subplots(1, 2)
    time.plot(tokens, [statistics.median(row["step_cpu_ms"]) for row in rows], "o-", color=STEP)
    time.set_title("a step that reads 1,024 tokens")
    time.set_ylabel("processor time, ms")
    time.set_ylim(bottom=0)

    for label, name, color in (
        ("the whole process, at most", "resident_bytes", RESIDENT),
        ("of it in the account", "used_bytes", ACCOUNT),
    ):
        memory.plot(tokens, [row[name] / 1e9 for row in rows], "o-", color=color, label=label)
    limit = report.goal["limit_bytes"] / 1e9
    memory.axhline(limit, color=GOAL, linestyle="--", label="limit")
    memory.set_title(f"memory, the rest of it on a disk, limit {limit:g} GB")
    memory.set_ylabel("GB")
    memory.set_ylim(0, 1.1 * limit)
    memory.legend(loc="center left", bbox_to_anchor=(0, 0.62), fontsize=8)
    for pane in (time, memory):
        pane.set_xscale("log")
        pane.set_xticks(tokens, [f"{count / 1000:,g}" for count in tokens])
        pane.minorticks_off()
        pane.set_xlabel("thousand tokens of one sequence")
        pane.grid(alpha=0.3)
    figure.savefig(file, dpi=130, bbox_inches="tight")
