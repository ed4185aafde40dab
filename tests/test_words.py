"""Words of the source: docstrings, local names, class and file names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
BENCHES = ROOT / "benchmarks" / "src" / "penstock_bench"

# A local is called after what it holds.
VAGUE = {"found", "made", "told", "each", "some"}
# "Of the whole value." continues a sentence that the reader does not see.
_OPENINGS = """
about across after against among and around as at before behind below between beyond by during for
from how in inside into like near of off on onto or outside over per since than that through to
toward under until up upon via what when where which who whose with within without whoever nobody
somebody
"""
OPENINGS = frozenset(_OPENINGS.split())


def sources() -> Iterator[tuple[str, str]]:
    """Yield the path within the package, and the text, of every module; benches come last."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(BENCHES.rglob("*.py")):
        yield path.relative_to(BENCHES.parent).as_posix(), path.read_text(encoding="utf-8")


def bad_attribute_docstrings(source: str) -> list[str]:
    """List the docstrings of attributes that begin in lower case, or in mid-sentence."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        for before, after in zip(node.body, node.body[1:], strict=False):
            if not isinstance(before, ast.Assign | ast.AnnAssign):
                continue
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    first = text.split()[0].rstrip(",.:;") if text.strip() else ""
                    if first.lower() in OPENINGS or first[:1].islower():
                        faults.append(f"{after.lineno}: {text[:60]}")
    return faults


def vague_names(source: str) -> list[str]:
    """List the locals and parameters whose names say nothing."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE:
                faults.append(f"{node.lineno}: {name}")
    return faults


BRITISH = re.compile(
    r"(?i)colour|neighbour|behaviour|favour|honour|licence|spelt|cancell(?!ation|ed|ing)|"
    r"(?:quant|penal|initial|normal|serial|optim|organ|recogn|general|special|maxim|minim|summar)is(?=e|at|ing)"
)


def british(text: str) -> list[str]:
    """List the words of a text in British spelling; the embedded model knows colours by theirs."""
    return BRITISH.findall(text.replace("colour of the ", ""))


def repeated(names: list[str]) -> list[str]:
    """Return the names that are there more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


MODULES = list(sources())


@pytest.mark.parametrize(("name", "text"), MODULES, ids=[name for name, _ in MODULES])
def test_attribute_docstrings_are_sentences(name: str, text: str) -> None:
    assert bad_attribute_docstrings(text) == []


DIALECT = {"tell", "told", "say", "parked", "sealing", "landing"}
"""Words of our own for emit, notify, preempted, commit and buffer."""


def dialect(source: str) -> list[str]:
    """List the definitions, variables, attributes and parameters with a name of the dialect."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append(name)
            case ast.arg(arg=name):
                names.append(name)
    return [name for name in names if DIALECT & {*name.lower().split("_")}]


@pytest.mark.parametrize(("name", "text"), MODULES, ids=[name for name, _ in MODULES])
def test_local_names_are_specific(name: str, text: str) -> None:
    assert vague_names(text) == []


@pytest.mark.parametrize(("name", "text"), MODULES, ids=[name for name, _ in MODULES])
def test_names_avoid_project_dialect(name: str, text: str) -> None:
    assert "recall" in name or dialect(text) == []


OTHERS = {"recall", "marked", "uplot"}
"""Folders of the embedded model, which has learned the British spelling, and of other projects."""
WRITTEN = [
    path
    for folder in (SOURCE, BENCHES, ROOT / "docs", ROOT / "tools")
    for path in folder.rglob("*")
    if path.suffix in {".py", ".js", ".css", ".html", ".md", ".h"} and not OTHERS & {*path.parts}
]


def test_spelling_is_american() -> None:
    records = (ROOT / "benchmarks" / "results").iterdir()
    assert british(" ".join(path.name for path in (*WRITTEN, *records))) == []
    faults = {path.name: british(path.read_text(encoding="utf-8")) for path in WRITTEN}
    assert len(faults) > 300
    assert {name: words for name, words in faults.items() if words} == {}
    assert british("colour of the rose, the colours, quantised") == ["colour", "quantis"]
    assert british("spelt out, spelling, penalised, penalized") == ["spelt", "penalis"]


def test_class_names_are_unique() -> None:
    """Nested classes of one module may repeat a name."""
    classes = []
    for _, text in sources():
        tree = ast.parse(text)
        classes += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 100
    assert repeated(classes) == []


def test_file_names_are_unique() -> None:
    files = [Path(name).name for name, _ in sources()]
    files = [name for name in files if name not in ("__init__.py", "__main__.py")]
    assert len(files) > 100
    assert repeated(files) == []


def test_word_checks_detect_faults() -> None:
    source = (
        'bytes = 1\n"""Of the whole value."""\nsize = 2\n"""bytes of it."""\n'
        'good = 3\n"""Bytes of the value."""\nalso = 4\n"""`int` of it."""\n'
        "def f(told):\n    for each in told:\n        found = each\n    return found\n"
    )
    assert [fault.split(":")[0] for fault in bad_attribute_docstrings(source)] == ["2", "4"]
    assert sorted(vague_names(source)) == ["10: each", "11: found", "9: told"]
    assert repeated(["a", "b", "a"]) == ["a"]
    assert dialect("def _tell_all(say: int): self.told = say.told") == ["_tell_all", "say", "told"]
