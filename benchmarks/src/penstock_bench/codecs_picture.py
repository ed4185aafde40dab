"""A picture of `penstock bench-kv-cache`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from penstock_bench.codecs import RIVALS, Table

LEAST_KL = 1e-7
"""Lower limit of the KL axis, in nats; zero is drawn here."""


def draw_codecs(table: Table, file: Path) -> None:
    """Plot the KL divergence of each codec's attention over its compression ratio."""
    figure = Figure(figsize=(9, 5.5))
    pane = figure.subplots()
    for row in table.rows:
        rival = row.name.startswith(tuple(RIVALS))
        kl = max(row.kl, LEAST_KL)
        pane.scatter(row.ratio, kl, s=28, color="tab:orange" if rival else "tab:blue")
        pane.annotate(
            row.name, (row.ratio, kl), xytext=(4, 3), textcoords="offset points", fontsize=8
        )
    pane.set(
        title=f"Attention with quantized keys and values, {table.data}: lower right is better",
        xlabel=f"times less memory than {table.shape.dtype}",
        ylabel="KL of the attention weights, nats",
        yscale="log",
    )
    pane.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
