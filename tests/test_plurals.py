"""Texts write singulars as such: `1 token`, not `1 tokens`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.plurals import counted

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src" / "penstock", ROOT / "benchmarks" / "src" / "penstock_bench")
NOUNS = re.compile(
    r" (tokens|blocks|bytes|requests|sequences|files|entries|characters|rows|heads|texts|nodes)\b"
    r"(?![/-])"
)
NEVER_ONE = {
    "tokens + 1": "of a prompt and of an answer",
    "tier_tokens": "more than are in memory, and whole blocks",
    "usage.foreign": "files and folders together",
    "others": "entries in which vocabularies differ",
    "runner.vocabulary_size": "of a model",
    "count": "texts that are more than a file has bytes",
}


def fixed_plurals(source: str) -> Iterator[str]:
    """Yield the formatted numbers of a source's f-strings that precede a fixed plural."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                continue
            form = "" if value.format_spec is None else ast.unparse(value.format_spec)
            name = ast.unparse(value.value)
            if form == "f','" and NOUNS.match(str(text.value)) and not name.isupper():
                yield name


def test_no_text_has_fixed_plural_after_number() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in SOURCES
        for file in sorted(folder.rglob("*.py"))
        for name in fixed_plurals(file.read_text())
        if name not in NEVER_ONE
    ]
    assert not wrong, f"write them with penstock.plurals.counted: {wrong}"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('f"{n:,} tokens are here"', ["n"]),
        ('f"{MOST:,} bytes at most"', []),
        ('f"{n:,} tokens/s"', []),
        ("f\"{counted(n, 'token')} are here\"", []),
    ],
)
def test_check_detects_fixed_plural(source: str, wrong: list[str]) -> None:
    assert list(fixed_plurals(source)) == wrong


def test_nouns_have_plurals() -> None:
    nouns = ("block", "entry", "hash", "process", "branch")
    assert [counted(2, noun) for noun in nouns] == [
        "2 blocks",
        "2 entries",
        "2 hashes",
        "2 processes",
        "2 branches",
    ]
    assert counted(1, "entry") == "1 entry"
