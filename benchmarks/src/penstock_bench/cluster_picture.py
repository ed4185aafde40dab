"""The picture of `penstock bench cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock_bench.report import Report

DPI = 110
COLORS = {
    "round-robin": "tab:orange",
    "hash": "tab:green",
    "prefix": "tab:red",
    "prefix+load": "tab:blue",
}


def draw(report: Report, file: Path) -> None:
    """Plot hits, waits and gossip against the number of replicas, a line per policy."""
    runs: list[dict[str, Any]] = report.raw["runs"]
    counts = [run["replicas"] for run in runs]
    figure = Figure(figsize=(13, 3.8))
    hits, waits, gossip = figure.subplots(1, 3)
    large = [100 * run["one_large_hit_rate"] for run in runs]
    hits.plot(counts, large, color="black", lw=1, ls="--", label="one engine, all the memory")
    for policy in report.raw["load"]["policies"]:
        of = [run["outcomes"][policy] for run in runs]
        style = {"color": COLORS[policy], "marker": "o", "ms": 3, "label": policy}
        hits.plot(counts, [100 * outcome["hit_rate"] for outcome in of], **style)
        waits.plot(counts, [outcome["wait_p95_seconds"] for outcome in of], **style)
        if any(outcome["whole_bytes_per_second"] for outcome in of):
            changes = [outcome["gossip_bytes_per_second"] / 1e3 for outcome in of]
            gossip.plot(counts, changes, **{**style, "label": f"{policy}: what changed"})
            whole = [outcome["whole_bytes_per_second"] / 1e3 for outcome in of]
            gossip.plot(counts, whole, **{**style, "label": f"{policy}: whole", "ls": ":"})
    hits.set(title="prompt tokens found, %", ylim=(0, None))
    waits.set(title="seconds to the first token, p95", yscale="log")
    gossip.set(title="summaries to one router, kB/s", yscale="log")
    for pane in (hits, waits, gossip):
        pane.set(xlabel="replicas", xscale="log")
        if pane.get_legend_handles_labels()[0]:
            pane.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(file, dpi=DPI)
