"""Entry point of the `penstock` program.

The commands are imported only when needed: they take 0.3 s, and `penstock --version` at most 0.15.
"""

from __future__ import annotations

import sys

from penstock import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code, as `commands.main` does."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["--version"]:
        print(f"penstock {__version__}")
        return 0
    from penstock.cli import commands

    return commands.main(words)
