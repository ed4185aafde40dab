"""Change the code in one place at a time and ask whether a test notices: a sampled score.

    python tools/mutants.py --sample 40 --seed 1

First the tests of the pool that `make test` runs do so once, and each function that they call is
noted. Then a sample of small changes (a comparison turned round, a number off by one, a copy left
out, ...) is drawn. For each change the tests that call the changed function run, the quickest
first, until one fails or takes many times as long as before. A change that none of them notices has
survived. Nothing in the working tree is changed: each worker has a copy of its own.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Annotated

import typer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "penstock"
CODE = (*("kv", "prefix", "ledger.py", "engine/schedule", "tiers", "server/parsing"),)
"""Folders and files of the package that are changed."""
POOL = (
    *(
        "tests/kv",
        "tests/attention",
        "tests/caches",
        "tests/plugins",
        "tests/prefix",
        "tests/stateful",
        "tests/test_ledger.py",
    ),
    *("tests/engine", "tests/tiers"),
    *("tests/server/test_parsing.py", "tests/server/test_formats.py"),
    *("tests/server/test_call_rules.py", "tests/server/test_call_growth.py"),
    *("tests/server/test_call_round_trips.py", "tests/server/test_answers.py"),
    "tests/cli/test_cache_cli.py",
)
"""Folders and files of the tests that may notice."""
COPIED = ("src", "tests", "tools", "benchmarks", "docs", "pyproject.toml")
OPTIONS = (
    *("-p", "no:schemathesis", "-p", "no:xdist", "-p", "penstock_mutants"),
    *("-o", "pythonpath=src tests/support"),
)
"""Of each run; the copy is imported, also where an environment puts its own path first."""
STARTUP_SECONDS = 60.0
"""Added to the time limit of each run: imports and collection. Where more programs run than there
are cores, the limits are as many times as long."""
TEST_SECONDS = 10.0
"""Added to the time limit of one test."""
SLOWDOWN = 10.0
"""A run, and a test, may take this many times as long as it took unchanged."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
COPIES = ("concatenate", "contiguous", "copied", "copy", "deepcopy", "list", "dict", "set")
"""Calls whose result is, of one argument, a copy: the change hands on the argument itself."""
LIMITS = ("min", "max")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the bytes of a file that are replaced, and the new ones."""

    path: str
    """Of the file, from the package's folder."""
    line: int
    function_line: int
    """First line of the innermost function around it, decorators included; 0 for a module's own."""
    start: int
    end: int
    old: str
    new: str

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.path}:{self.line}"

    def applied(self, source: bytes) -> bytes:
        """Return the file's text with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


# ---- what can be changed


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """Return nodes and texts that may stand in the place of a node."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new.ops = [COMPARISONS[type(op)]()]
            yield new
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not isinstance(new.left, ast.JoinedStr):
            new.op = ARITHMETIC[type(op)]()
            yield new
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            new.op = ARITHMETIC[type(op)]()
            yield new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(new)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(
            test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            yield f"not ({ast.unparse(test)})"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]):
            if name in COPIES:
                one = first.elts[0] if isinstance(first, ast.List) and first.elts else first
                yield one.value if isinstance(one, ast.Starred) else one
            elif name in LIMITS and len(new.args) > 1:
                yield f"{LIMITS[name == 'min']}({', '.join(map(ast.unparse, new.args))})"
        case ast.Raise():
            yield "pass"
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case ast.Return(value=ast.expr() as value) if not any(map(_changes, ast.walk(value))):
            yield "return None"


def _changes(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or any(True for _ in changes(node))


class Finder(ast.NodeVisitor):
    """Walks a module and collects the changes that it allows.

    Left out: text, types, decorators, assertions, messages of errors, logs, `__repr__`.
    """

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.functions = [0]
        self.found: list[Mutant] = []

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
                return
            case ast.FunctionDef(name="__repr__"):
                return
        self._note(node)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                self.functions.append(first)
                for child in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.visit(child)
                for statement in node.body:
                    self.visit(statement)
                self.functions.pop()
            case ast.ClassDef():
                for statement in node.body:
                    self.visit(statement)
            case ast.AnnAssign():
                if node.value is not None:
                    self.visit(node.value)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                pass
            case ast.keyword(arg="strict" | "allow_nan"):
                pass
            case _:
                self.generic_visit(node)

    def _note(self, node: ast.AST) -> None:
        for new in changes(node):
            place = node.test if isinstance(node, ast.If | ast.IfExp) else node
            start, end = (
                self.starts[line - 1] + column
                for line, column in (
                    (place.lineno, place.col_offset),  # type: ignore[attr-defined]
                    (place.end_lineno, place.end_col_offset),  # type: ignore[attr-defined]
                )
            )
            text = new if isinstance(new, str) else ast.unparse(new)
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant | ast.BoolOp):
                text = f"({text})"
            line, function = place.lineno, self.functions[-1]  # type: ignore[attr-defined]
            old = self.source[start:end].decode()
            self.found.append(Mutant(self.path, line, function, start, end, old, text))


def mutants_of(path: Path) -> list[Mutant]:
    """Return every change of a file; a few are no Python."""
    source = path.read_bytes()
    finder = Finder(path.relative_to(PACKAGE).as_posix(), source)
    finder.visit(ast.parse(source))
    return finder.found


def compiles(mutant: Mutant) -> bool:
    """Tell whether a change leaves a module that Python reads."""
    try:
        compile(mutant.applied((PACKAGE / mutant.path).read_bytes()), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def drawn_of(every: Sequence[Mutant], sample: int, seed: int, at: Sequence[str]) -> list[Mutant]:
    """Return the changes to try: a sample, or those of the lines that `at` names."""
    if at:
        spans = [(path, *_span(lines)) for path, _, lines in (place.partition(":") for place in at)]
        found = [m for m in every if any(m.path == p and a <= m.line <= z for p, a, z in spans)]
        return [mutant for mutant in found if compiles(mutant)]
    mixed = Random(seed).sample(every, len(every))
    return list(islice(filter(compiles, mixed), sample or len(every)))


def _span(lines: str) -> tuple[int, int]:
    first, _, last = lines.partition("-")
    return int(first), int(last or first)


def files(code: Sequence[str]) -> list[Path]:
    """Return the files of the package that the names stand for."""
    found = []
    for name in code:
        path = PACKAGE / name
        if not path.exists():
            raise SystemExit(f"{path.relative_to(ROOT)} is not there; see CODE in {__file__}")
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return found


# ---- who calls what

PLUGIN = '''
"""Runs tests in the order of a file, which names the processor seconds that each may take. Notes
for every test which functions of the package it calls, and how long it takes."""

import json, os, signal, sys, threading, time
import pytest

MARK = os.sep + os.path.join("src", "penstock") + os.sep
places, called, found, failed, limits = {}, set(), {}, set(), {}


def trace(frame, event, argument):
    code = frame.f_code
    place = places.get(code)
    if place is None:
        _, mark, name = code.co_filename.partition(MARK)
        place = places[code] = f"{name}:{code.co_firstlineno}" if mark else ""
    if place:
        called.add(place)


noting = "CALLS" in os.environ
if noting:
    sys.settrace(trace)  # of the modules that the tests import


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if "LIMITS" in os.environ:
        with open(os.environ["LIMITS"]) as file:
            limits.update(json.load(file))
        order = list(limits)
        items.sort(key=lambda item: order.index(item.nodeid))


def pytest_collection_finish(session):
    if noting:
        sys.settrace(None)
        found[""] = [0.0, sorted(called)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if not noting:  # the signal ends the process
        signal.setitimer(signal.ITIMER_PROF, limits.get(item.nodeid, 0))
        return (yield)
    called.clear()
    threading.settrace(trace)
    sys.settrace(trace)
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        found[item.nodeid] = [time.perf_counter() - began, sorted(called)]


def pytest_runtest_logreport(report):
    if report.failed:
        failed.add(report.nodeid)


def pytest_sessionfinish(session):
    if noting:
        with open(os.environ["CALLS"], "w") as file:
            json.dump({name: found[name] for name in found if name not in failed}, file)
'''


@dataclass(frozen=True, slots=True)
class Test:
    """A test of the pool, as it ran on the unchanged code."""

    name: str
    """Empty for what is called while modules are imported."""
    seconds: float
    calls: frozenset[str]
    """Functions of the package, as file and first line."""


class Workplace:
    """A copy of the working tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)
        (folder / "plugin").mkdir()
        (folder / "plugin" / "penstock_mutants.py").write_text(PLUGIN)

    def pytest(self, *arguments: str, seconds: float | None = None, **variables: str) -> int | None:
        """Run pytest here; return its exit status, None if it took too long."""
        paths = os.pathsep.join(str(self.folder / name) for name in ("src", "plugin"))
        settings = {
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "",
            "OPENBLAS_NUM_THREADS": "1",
            "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "default"),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *OPTIONS, *arguments],
            cwd=self.folder,
            env={**os.environ, **settings, **variables},
            stdout=(self.folder / "output").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # what tests started outlives one that hangs
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def output(self, lines: int = 20) -> str:
        """Return the end of the last run's output."""
        return "\n".join((self.folder / "output").read_text().splitlines()[-lines:])

    def baseline(self, pool: Sequence[str]) -> list[Test]:
        """Run tests on the unchanged code; return those that pass, and tell of the others."""
        calls = self.folder / "calls.json"
        if self.pytest("--quick", *pool, CALLS=str(calls)):
            print(f"left out, they fail on the unchanged code:\n{self.output()}", file=sys.stderr)
        found = json.loads(calls.read_text()) if calls.exists() else {}
        if not any(found):
            raise SystemExit("no test passes")
        return [Test(name, took, frozenset(places)) for name, (took, places) in found.items()]

    def notices(self, mutant: Mutant, tests: Sequence[Test]) -> str:
        """Make the change, run tests until one fails, and take the change back.

        Returns the test that noticed it, or `time`; an empty text if none did.
        """
        if not tests:
            return ""
        file = self.folder / "src" / "penstock" / mutant.path
        source = file.read_bytes()
        names, limits = self.folder / "names", self.folder / "limits"
        names.write_text("\n".join(test.name for test in tests))
        limits.write_text(
            json.dumps({test.name: TEST_SECONDS + SLOWDOWN * test.seconds for test in tests})
        )
        others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        limit = others * (STARTUP_SECONDS + SLOWDOWN * sum(test.seconds for test in tests))
        longest = others * (TEST_SECONDS + SLOWDOWN * max(test.seconds for test in tests))
        try:
            _write(file, mutant.applied(source))
            status = self.pytest(
                *("-x", f"@{names}", "-o", f"faulthandler_timeout={longest}"),
                seconds=limit,
                LIMITS=str(limits),
            )
        finally:
            _write(file, source)
        timeouts = status in (None, -signal.SIGPROF)
        if timeouts or "\nTimeout (" in (self.folder / "output").read_text():
            return "time"
        return self._blamed() if status else ""

    def _blamed(self) -> str:
        for line in self.output(5).splitlines():
            kind, _, test = line.partition(" ")
            if kind in ("FAILED", "ERROR"):
                return test.split(" - ")[0]
        return "pytest"


def _write(file: Path, source: bytes) -> None:
    """Write a module without the bytecode of another text, which a time in seconds may not tell."""
    file.write_bytes(source)
    Path(cache_from_source(str(file))).unlink(missing_ok=True)


def those_that_call(mutant: Mutant, tests: Sequence[Test], most_seconds: float) -> list[Test]:
    """Return the tests that call the changed function, the quickest first, within a time.

    A module's own lines, those of a class, and functions called while modules are imported count
    for every test that calls into that file; after those come tests that call into its folder.
    """
    place, file = f"{mutant.path}:{mutant.function_line}", f"{mutant.path}:"
    folder = mutant.path.rpartition("/")[0]
    imported = not mutant.function_line or any(
        place in test.calls for test in tests if not test.name
    )

    def distance(test: Test) -> int:
        """0: it calls the function, or its file; 1: the folder; 2: neither."""
        if place in test.calls:
            return 0
        if not imported:
            return 2
        if any(call.startswith(file) for call in test.calls):
            return 0
        return 1 if folder and any(call.startswith(f"{folder}/") for call in test.calls) else 2

    calling = [
        (away, test.seconds, test) for test in tests if test.name and (away := distance(test)) < 2
    ]
    chosen, taken = [], 0.0
    for _, seconds, test in sorted(calling, key=lambda found: found[:2]):
        taken += seconds
        if chosen and taken > most_seconds:
            break
        chosen.append(test)
    return chosen


# ---- the command


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one mutant."""

    place: str
    old: str
    new: str
    noticed_by: str
    """A test, `time` if the run never ended, nothing if the mutant survived."""
    tests: int
    calling: int
    """Tests that call the function; more than `tests` if there was no time for all."""


def main(
    code: Annotated[
        list[str] | None, typer.Argument(help="Files and folders of the package to change.")
    ] = None,
    sample: Annotated[int, typer.Option(help="How many changes to try; 0: all of them.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    at: Annotated[
        list[str] | None,
        typer.Option(help="FILE:LINE or FILE:FROM-TO: try all changes there instead."),
    ] = None,
    pool: Annotated[list[str] | None, typer.Option(help="Tests that may notice.")] = None,
    most_seconds: Annotated[float, typer.Option(help="Of tests for each change.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Changes tried at the same time.")] = 2,
    calls: Annotated[
        Path | None, typer.Option(help="Keep which test calls what here; read it if it is there.")
    ] = None,
    goal: Annotated[float, typer.Option(help="Exit with 1 below this score.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Draw changes, try each, and print those that no test notices, and the score."""
    every = [mutant for file in files(code or CODE) for mutant in mutants_of(file)]
    drawn = drawn_of(every, sample, seed, at or ())
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        places: SimpleQueue[Workplace] = SimpleQueue()
        for number in range(workers):
            places.put(Workplace(Path(folder) / str(number)))
        tests = _measured(places, workers, pool or POOL, calls)

        def tried(mutant: Mutant) -> Verdict:
            place = places.get()
            try:
                chosen = those_that_call(mutant, tests, most_seconds)
                noticed = place.notices(mutant, chosen)
            finally:
                places.put(place)
            calling = len(those_that_call(mutant, tests, float("inf")))
            verdict = Verdict(mutant.place, mutant.old, mutant.new, noticed, len(chosen), calling)
            if not as_json:
                print(_line(verdict), flush=True)
            return verdict

        with ThreadPoolExecutor(workers) as threads:
            verdicts = list(threads.map(tried, drawn))
    noticed = sum(bool(verdict.noticed_by) for verdict in verdicts)
    score = noticed / max(len(verdicts), 1)
    if as_json:
        found = [asdict(verdict) for verdict in verdicts]
        print(json.dumps({"seed": seed, "of": len(every), "score": score, "mutants": found}))
    else:
        error = (score * (1 - score) / max(len(verdicts), 1)) ** 0.5
        print(
            f"{noticed} of {len(verdicts)} noticed: {score:.2f} ± {error:.2f} "
            f"(seed {seed}, drawn from {len(every)})"
        )
    raise SystemExit(int(score < goal))


def _measured(
    places: SimpleQueue[Workplace], workers: int, pool: Sequence[str], calls: Path | None
) -> list[Test]:
    """Return the tests of the pool with the functions they call, from a file if there is one."""

    def measured(share: Sequence[str]) -> list[Test]:
        place = places.get()
        try:
            return place.baseline(share)
        finally:
            places.put(place)

    if calls is None or not calls.exists():
        names = [name for each in pool for name in _test_files(each)]
        shares = [share for first in range(workers) if (share := names[first::workers])]
        with ThreadPoolExecutor(workers) as threads:
            tests = [test for found in threads.map(measured, shares) for test in found]
        if calls is not None:
            kept = {test.name: [test.seconds, sorted(test.calls)] for test in tests}
            calls.write_text(json.dumps(kept))
        return tests
    found = json.loads(calls.read_text())
    return [Test(name, seconds, frozenset(made)) for name, (seconds, made) in found.items()]


def _test_files(name: str) -> list[str]:
    """Return the files of tests in a folder of the working tree, or the one that is named."""
    place = ROOT / name
    if not place.is_dir():
        return [name]
    return [file.relative_to(ROOT).as_posix() for file in sorted(place.rglob("test_*.py"))]


def _line(verdict: Verdict) -> str:
    old, new = (" ".join(text.split())[:60] for text in (verdict.old, verdict.new))
    if verdict.noticed_by:
        return f"noticed   {verdict.place}  {old}  ->  {new}  by {verdict.noticed_by}"
    ran = f"{verdict.tests} of {verdict.calling} tests that call it"
    return f"SURVIVED  {verdict.place}  {old}  ->  {new}  ({ran})"


if __name__ == "__main__":
    typer.run(main)
