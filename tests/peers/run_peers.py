"""Run mlx-lm's own tests twice, with its caches and with penstock's, and compare.

    python tests/peers/run_peers.py --mlx-lm CHECKOUT
    python tests/peers/run_peers.py                # the tests of the installed version's sdist

None of mlx-lm's code is part of this project: the tests are read where they lie, and run against
the mlx-lm that is installed. Exit code 0: every test that passes with mlx-lm's classes passes
with penstock's, and calls did reach them. 1: not so. 2: the tests could not be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("test_prompt_cache", "test_generate", "test_models", "test_server")
OUTCOMES = ("passed", "failed", "error", "skipped")


class PeersError(Exception):
    """The tests could not be run; the message says why."""


@dataclass(frozen=True)
class Run:
    """One test file with one set of caches."""

    file: str
    caches: str
    broken: bool = False

    @property
    def label(self) -> str:
        return f"{self.file} with {self.caches}" + (", broken" if self.broken else "")


def fetch_sdist(folder: Path) -> Path:
    """Download the source of the installed mlx-lm into `folder`; return the tests in it."""
    wanted = f"mlx-lm=={version('mlx-lm')}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        raise PeersError(f"pip could not download {wanted}: {done.stderr.strip()[-400:]}")
    return unpack(archives[0], folder)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an sdist into `folder`; return the tests in it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.glob("*/tests"))


def find_tests(source: Path | None, folder: Path) -> Path:
    """Return the folder with mlx-lm's tests: in a checkout, in an sdist, or downloaded."""
    if source is None:
        return fetch_sdist(folder)
    if source.is_file():
        return unpack(source, folder)
    tests = source / "tests"
    missing = [file for file in FILES if not (tests / f"{file}.py").is_file()]
    if missing:
        raise PeersError(f"{tests} lacks {', '.join(missing)}; MLX_LM must name a checkout")
    return tests


def execute(run: Run, tests: Path, folder: Path, limit_seconds: int) -> dict[str, Any]:
    """Run one worker process; return its report."""
    output = folder / f"{run.file}-{run.caches}-{run.broken}.json"
    command = [sys.executable, str(HERE / "worker.py"), str(tests), run.file, run.caches]
    command += [str(output)] + (["--broken"] if run.broken else [])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired as error:
        raise PeersError(f"{run.label} took more than {limit_seconds} s") from error
    if done.returncode != 0 or not output.exists():
        raise PeersError(f"{run.label} ended with {done.returncode}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def execute_all(runs: list[Run], tests: Path, jobs: int, limit_seconds: int) -> dict[Run, Any]:
    """Run all workers, `jobs` at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        reports = pool.map(lambda run: execute(run, tests, Path(folder), limit_seconds), runs)
        return dict(zip(runs, reports, strict=True))


def counts(tests: dict[str, Any]) -> dict[str, int]:
    """Count outcomes, all four always present."""
    seen = Counter(test["outcome"] for test in tests.values())
    return {outcome: seen[outcome] for outcome in OUTCOMES}


def regressions(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, str]:
    """Return the tests that pass with their caches and not with ours, with what went wrong."""
    missing = {"outcome": "missing", "detail": "the test did not run"}
    return {
        name: f"{after['outcome']}: {after['detail']}"
        for name, before in theirs.items()
        if before["outcome"] == "passed"
        and (after := ours.get(name, missing))["outcome"] != "passed"
    }


def add_calls(reports: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Add up the calls of several runs."""
    total: dict[str, Counter[str]] = {}
    for report in reports:
        for owner, methods in report["calls"].items():
            total.setdefault(owner, Counter()).update(methods)
    return {owner: dict(sorted(methods.items())) for owner, methods in sorted(total.items())}


def compare(
    tests: Path, files: tuple[str, ...], jobs: int, limit_seconds: int, *, broken: bool = False
) -> dict[str, Any]:
    """Run `files` with both sets of caches; return counts, calls and regressions."""
    before = [Run(file, "mlx-lm") for file in files]
    after = [Run(file, "penstock", broken) for file in files]
    reports = execute_all(
        [r for pair in zip(before, after, strict=True) for r in pair], tests, jobs, limit_seconds
    )
    rows, lost = {}, {}
    for file, theirs, ours in zip(files, before, after, strict=True):
        rows[file] = {
            "mlx-lm": counts(reports[theirs]["tests"]),
            "penstock": counts(reports[ours]["tests"]),
        }
        lost |= regressions(reports[theirs]["tests"], reports[ours]["tests"])
    calls = add_calls([reports[run] for run in after])
    reached = sum(sum(methods.values()) for methods in calls.values())
    neither = sorted(
        name
        for run in before
        for name, test in reports[run]["tests"].items()
        if test["outcome"] in ("failed", "error")
    )
    return {
        "mlx_lm": version("mlx-lm"),
        "files": rows,
        "calls_total": reached,
        "calls": calls,
        "fails_with_mlx_lm_too": neither,
        "regressions": lost,
        "met": not lost and reached > 0,
    }


def show(result: dict[str, Any]) -> None:
    """Print the comparison for people."""
    print(f"mlx-lm {result['mlx_lm']}: its own tests, with its caches and with penstock's\n")
    print(f"{'':22}{'':10}" + "".join(f"{word:>9}" for word in OUTCOMES))
    for file, sides in result["files"].items():
        for side, row in sides.items():
            print(f"{file:22}{side:10}" + "".join(f"{row[word]:>9}" for word in OUTCOMES))
    print(f"\n{result['calls_total']} calls reached penstock")
    for owner, methods in result["calls"].items():
        listed = ", ".join(f"{name} {calls}" for name, calls in methods.items())
        print(f"  {owner}: {listed}")
    for name in result["fails_with_mlx_lm_too"]:
        print(f"fails with mlx-lm's own caches too: {name}")
    for name, detail in result["regressions"].items():
        print(f"\nPASSES WITH mlx-lm, NOT WITH penstock: {name}\n{detail}")
    print("\nok" if result["met"] else "\nnot ok")


def self_check(tests: Path, jobs: int, limit_seconds: int) -> bool:
    """Break a class on purpose; return whether the comparison notices, and only then objects."""
    files = ("test_prompt_cache", "test_generate")
    whole = compare(tests, files, jobs, limit_seconds)
    broken = compare(tests, files, jobs, limit_seconds, broken=True)
    print(f"penstock's caches as they are: {len(whole['regressions'])} tests object")
    print(f"a KVCache that forgets its first token: {len(broken['regressions'])} tests object")
    return bool(whole["met"]) and not broken["met"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mlx-lm", type=Path, help="checkout or sdist; default: download")
    parser.add_argument("--templates", type=Path, help="folder of chat templates, probed first")
    parser.add_argument("--gguf", type=Path, help="folder of GGUF vocabularies, compared first")
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time")
    parser.add_argument("--limit-seconds", type=int, default=1800, help="for one test file")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--self-check", action="store_true", help="break a class, expect to fail")
    args = parser.parse_args()
    others = (("real_templates.py", args.templates), ("real_tokens.py", args.gguf))
    for program, given in others:
        if given is None:
            continue
        code = subprocess.run([sys.executable, str(HERE / program), given]).returncode
        if code:
            return code
    try:
        with tempfile.TemporaryDirectory() as folder:
            tests = find_tests(args.mlx_lm, Path(folder))
            if args.self_check:
                return 0 if self_check(tests, args.jobs, args.limit_seconds) else 1
            result = compare(tests, tuple(args.files), args.jobs, args.limit_seconds)
    except PeersError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
