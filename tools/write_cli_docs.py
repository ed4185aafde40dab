"""Write the text of every --help into docs/cli.md, and other programs' flags into docs/compare.md.

    python tools/write_cli_docs.py

A marker is a line `<!-- help: generate -->`; the fenced block after it is replaced. The tables of
names stand between two markers. `tests/test_docs.py` fails where page and program differ.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from penstock.cli import main
from penstock.cli.foreign_names import (
    FOREIGN_FLAGS,
    FOREIGN_VALUES,
    FOREIGN_VARIABLES,
    VLLM,
    VLLM_MLX,
    ForeignFlag,
)

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
NAMES_PAGE = PAGE.with_name("compare.md")
NAMES = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.DOTALL)
MARKED = re.compile(r"(<!-- help:(?P<command>[^>]*)-->\n)(```text\n.*?^```\n)?", re.DOTALL | re.M)

FOREIGN_CONSTANTS = (
    ("`MAX_KV_SIZE`", "exo", "`--max-kv-size`; a constant of exo's source, 3,200 tokens"),
    ("`KEEP_KV_SIZE`", "exo", "`--keep-kv-size`; a constant of exo's source, 1,600 tokens"),
    ("`TinyKvFullCache`", "Tiny-LLM", "`penstock.KVCache`"),
    ("`BatchingKvCache`", "Tiny-LLM", "`penstock.KVCacheManager`, or the engine"),
    ("`max_active_requests`", "Tiny-LLM", "`max_batch_size`"),
    ("`max_seq_len`", "Tiny-LLM", "`max_kv_size`"),
    ("`rewind`", "Tiny-LLM", "`trim`"),
    ("`prefill_step`", "Tiny-LLM", "`prefill_chunk`"),
    ("`page_size`, page", "Tiny-LLM", "`block_size`, block"),
)
"""Names in other programs' source code, with their counterparts here."""


def help_text(command: str) -> str:
    """Return the output of `penstock COMMAND --help` on a terminal of 80 columns."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main([*command.split(), "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    return printed.getvalue()


def written(page: str) -> str:
    """Return the page with the block below each marker brought up to date."""
    return MARKED.sub(lambda found: f"{found[1]}```text\n{help_text(found['command'])}```\n", page)


def flag_row(flag: ForeignFlag) -> str:
    """Return the row of a flag."""
    names = ", ".join(f"`{name}`" for name in flag.names)
    here = flag.ours.format("...")
    here = f"`{here}`" if flag.meaning == "same" else here
    taken = "yes"
    if flag.meaning == "other":
        taken = f"only {', '.join(flag.harmless)}" if flag.harmless else "no: an error"
    return f"| {names} | {', '.join(flag.programs)} | {here} | {taken} |"


def foreign_table() -> str:
    """Return the tables of other programs' flags and constants."""
    lines = [
        "| flag | of | here | taken |",
        "|---|---|---|---|",
        *(flag_row(flag) for flag in FOREIGN_FLAGS),
        *(
            f"| `{flag} {theirs}` | {VLLM}, {VLLM_MLX} | `{flag} {ours}` | yes |"
            for flag, values in FOREIGN_VALUES.items()
            for theirs, ours in values.items()
        ),
        "",
        "| name | of | here |",
        "|---|---|---|",
        *(
            f"| `{name}` | {program} | `{ours}`, taken with one line |"
            for ours, (name, program) in FOREIGN_VARIABLES.items()
        ),
        *(f"| {name} | {program} | {here} |" for name, program, here in FOREIGN_CONSTANTS),
    ]
    return "\n".join(lines) + "\n"


def with_names(page: str) -> str:
    """Return the page with the tables of other programs' names brought up to date."""
    return NAMES.sub(lambda found: f"{found[1]}\n{foreign_table()}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    NAMES_PAGE.write_text(with_names(NAMES_PAGE.read_text()))
