"""Run every family of the installed mlx-lm or mlx-vlm on the engine, and write the results.

    python tools/write_models_docs.py [mlx-vlm]

That library's table of benchmarks/notes/families.md is replaced.
`tests/parity/test_model_matrix.py` and `tests/vlm/test_vlm_matrix.py` fail where the page and the
engine differ. Takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import penstock  # noqa: F401 - before mlx: it loads a fast BLAS on a Linux CPU

if TYPE_CHECKING:
    from model_matrix import Row

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "notes" / "families.md"
END = "<!-- end of families -->"
sys.path.insert(0, str(ROOT / "tests" / "support"))


def main() -> None:
    """Examine all families of a library and replace its table."""
    import tiny_families
    from model_matrix import MLX_LM, examine
    from rich.progress import track

    zoo, families = MLX_LM, tiny_families.families()
    if sys.argv[1:] == ["mlx-vlm"]:
        import tiny_vlm_families

        zoo, families = tiny_vlm_families.MLX_VLM, tiny_vlm_families.families()
    rows = [examine(family, zoo) for family in track(families, "families")]
    write_table(zoo.name, rows)


def write_table(library: str, rows: Sequence[Row]) -> None:
    """Replace the table of a library in the page."""
    from model_matrix import Row

    reuse = [row.reuse for row in rows]
    run = sum(each != "not run" for each in reuse)
    known = sum(each in ("yes", "walk-back") for each in reuse)
    served = sum(bool(row.way) for row in rows)
    heading = Row("family", "layers", "attention", "prefix reuse", "why").line()
    begin = f"<!-- families of {library} -->"
    table = [
        begin,
        "",
        f"{library} {version(library)}: {len(rows)} families; {run} run in {library} on a Linux "
        f"CPU, {served} of them on the engine, {known} with prefix reuse.",
        "",
        heading,
        "|---" * 5 + "|",
        *(row.line() for row in rows),
        "",
        END,
    ]
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(before + "\n".join(table) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
