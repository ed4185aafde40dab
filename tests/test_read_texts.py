"""Help, errors and page texts have short sentences with named subjects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import commands
from typer.main import get_command

from penstock.cli.commands import app
from penstock.kv.codecs.names import FORMS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "src" / "penstock" / "server" / "page"
MOST_WORDS = 30
NO_SUBJECTS = re.compile(
    r"\b(who|whoever|nobody|somebody|anybody|what is held)\b(?![^.!]*\?)", re.IGNORECASE
)
LISTS = {FORMS}
"""Names one after the other, which are no sentence."""


def faults(text: str) -> list[str]:
    """List the sentences that are too long, and vague words."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    sentences = [s for part in paragraphs for s in re.split(r"[.!?:](?:\s|$)", part)]
    return [s for s in sentences if len(s.split()) > MOST_WORDS] + NO_SUBJECTS.findall(text)


def helps() -> Iterator[tuple[str, str]]:
    """Yield each command and option with the text of its help."""
    for words, command in commands(get_command(app)):
        name = " ".join(("penstock", *words))
        yield name, command.help or ""
        for option in command.params:
            yield f"{name} {option.name}", getattr(option, "help", None) or ""


def strings(source: str) -> Iterator[str]:
    """Yield the strings of a module except docstrings, with X for inserted values."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = [
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    ]
    alone |= {id(part) for part in parts}
    for node in ast.walk(tree):
        if id(node) in alone:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("\n", "\n\n")
        elif isinstance(node, ast.JoinedStr):
            pieces = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield "".join(map(str, pieces)).replace("\n", "\n\n")


def page_texts(file: Path) -> Iterator[str]:
    """Yield the texts of a page file: between tags, or in quotes."""
    pattern = r">([^<>{}]+)<" if file.suffix == ".html" else r'"([^"\n]*)"|`([^`]*)`'
    for match in re.finditer(pattern, file.read_text(encoding="utf-8")):
        yield next(text for text in match.groups() if text is not None)


HELPS = list(helps())
MODULES = [
    path
    for folder in (ROOT / "src" / "penstock", ROOT / "benchmarks" / "src")
    for path in sorted(folder.rglob("*.py"))
    if "recall" not in path.parts
]
PAGES = [*PAGE.glob("*.html"), *PAGE.glob("*.js")]


def test_help_sentences_are_short() -> None:
    assert len(HELPS) > 300
    assert {name: faults(text) for name, text in HELPS if faults(text)} == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_error_message_sentences_are_short(path: Path) -> None:
    texts = set(strings(path.read_text(encoding="utf-8"))) - LISTS
    assert [fault for text in texts for fault in faults(text)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_sentences_are_short(path: Path) -> None:
    assert [fault for text in page_texts(path) for fault in faults(text)] == []


def test_check_detects_long_sentences() -> None:
    long = "word " * (MOST_WORDS + 1)
    assert faults(long) == [long.strip()] and faults("Nobody reads it.") == ["Nobody"]
    assert faults(f"{'word ' * MOST_WORDS}. And more") == []
    source = f'"""{long}"""\nx = ("{long[:60]}"\n f"{{y}} {long[60:]}")\n'
    (text,) = strings(source)
    assert faults(text) != []
    assert list(page_texts(PAGE / "words.js")) != []
