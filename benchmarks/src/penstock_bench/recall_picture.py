"""Picture of `penstock bench recall`: one strip per setting, bright where facts are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock_bench.report import Report

BIN_TOKENS = 100


def draw(report: Report, file: Path) -> None:
    """Plot the share of known facts in each interval of `BIN_TOKENS` tokens, by setting."""
    rows = {(t["max_kv_size"], t["keep"], t["side"]): t["rows"] for t in report.raw["trials"]}
    settings = list(dict.fromkeys((size, keep) for size, keep, _ in rows))
    count = -(-report.raw["load"]["tokens"] // BIN_TOKENS)
    figure = Figure(figsize=(11, 0.42 * len(settings) + 1.6))
    panes = figure.subplots(1, 2, sharey=True)
    for pane, side in zip(panes, ("penstock", report.rival), strict=True):
        strips = [_strip(rows[*setting, side], count) for setting in settings]
        image = pane.imshow(
            strips,
            aspect="auto",
            cmap="viridis",
            vmin=0,
            vmax=1,
            interpolation="nearest",
            extent=(0, count * BIN_TOKENS, len(settings) - 0.5, -0.5),
        )
        pane.set_title(side)
        pane.set_xlabel("where the fact was told, tokens from the start")
    panes[0].set_yticks(range(len(settings)), [f"{size:,}, keep {keep}" for size, keep in settings])
    panes[0].set_ylabel("max_kv_size")
    figure.colorbar(image, ax=panes, label="share known")
    figure.savefig(file, dpi=130, bbox_inches="tight")


def _strip(rows: list[Any], count: int) -> list[float]:
    """Return the share of known facts in each interval, NaN without questions."""
    bins: list[list[bool]] = [[] for _ in range(count)]
    for told_at, _, known in rows:
        bins[min(count - 1, told_at // BIN_TOKENS)].append(known)
    return [sum(known) / len(known) if known else float("nan") for known in bins]
