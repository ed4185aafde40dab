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
from penstock.cli.foreign_names import foreign_table

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
NAMES_PAGE = PAGE.with_name("compare.md")
NAMES = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.DOTALL)
MARKED = re.compile(r"(<!-- help:(?P<command>[^>]*)-->\n)(```text\n.*?^```\n)?", re.DOTALL | re.M)


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


def with_names(page: str) -> str:
    """Return the page with the tables of other programs' names brought up to date."""
    return NAMES.sub(lambda found: f"{found[1]}\n{foreign_table()}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    NAMES_PAGE.write_text(with_names(NAMES_PAGE.read_text()))
