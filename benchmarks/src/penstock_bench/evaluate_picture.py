"""A picture of `penstock eval`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure  # not pyplot: no screen is needed, no state is shared

from penstock_bench.report import Report

LEAST_KL = 1e-7
"""Lower limit of the KL axis, in nats; zero is drawn here."""
NOT_ASKED = "white"


def draw(report: Report, file: Path) -> None:
    """Plot the KL of every setting without a window over its compression ratio.

    The color is the worst recall, white without questions.
    """
    rows = [row for row in report.penstock["rows"] if "window" not in row["setting"]]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    figure = Figure(figsize=(4.6 * len(forms) + 1.2, 4.8), layout="constrained")
    colors = ScalarMappable(Normalize(0, 1), "viridis")
    panes = figure.subplots(1, len(forms), sharey=True, squeeze=False)[0]
    for pane, form in zip(panes, forms, strict=True):
        for row in (row for row in rows if row["form"] == form):
            kl = max(row["kl"]["mean"], LEAST_KL)
            recall = [estimate["mean"] for estimate in row["recall"].values()]
            color = colors.to_rgba(min(recall)) if recall else NOT_ASKED
            pane.scatter(row["ratio"], kl, s=34, color=[color], edgecolors="0.4")
            pane.annotate(
                row["setting"],
                (row["ratio"], kl),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=7,
            )
        pane.set(
            title=form,
            xlabel=f"times less memory than {report.penstock['baseline']}",
            yscale="log",
        )
        pane.grid(alpha=0.3)
    panes[0].set_ylabel("KL of the next token, nats: lower right is better")
    figure.colorbar(colors, ax=list(panes), label="recall, at its worst length")
    figure.savefig(file, dpi=110)
