"""Run every family of the installed mlx-lm on the engine, and write the results into a page.

    python tools/write_models_docs.py

The table of docs/models.md is replaced. `tests/parity/test_model_matrix.py` fails where the page
and the engine differ. Takes two minutes.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import penstock  # noqa: F401 - before mlx: it loads a fast BLAS on a Linux CPU

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end of families -->"
sys.path.insert(0, str(ROOT / "tests" / "support"))


def main() -> None:
    """Examine all families and replace the table."""
    import tiny_families
    from model_matrix import Row, examine
    from rich.progress import track

    rows = [examine(family) for family in track(tiny_families.families(), "families")]
    reuse = [row.reuse for row in rows]
    run = sum(each != "not run" for each in reuse)
    known = sum(each in ("yes", "walk-back") for each in reuse)
    served = sum(bool(row.way) for row in rows)
    heading = Row("family", "layers", "attention", "prefix reuse", "why").line()
    table = [
        BEGIN,
        "",
        f"mlx-lm {version('mlx-lm')}: {len(rows)} families; {run} run in mlx-lm on a Linux CPU, "
        f"{served} of them on the engine, {known} with prefix reuse.",
        "",
        heading,
        "|---" * 5 + "|",
        *(row.line() for row in rows),
        "",
        END,
    ]
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + "\n".join(table) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
