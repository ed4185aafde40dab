"""Run the contract tests on the newest mlx, mlx-lm and mlx-vlm, and say whose change fails them.

    python tools/newest_libraries.py REQUIRED NEWEST

REQUIRED and NEWEST are environments with penstock as it requires these libraries; in NEWEST they
are upgraded first. Exit code 0: nothing fails. 1: a fault of ours, with the versions that penstock
requires. 2: a library changed an assumption, each of which is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
CONTRACTS = ("tests/test_contract_mlx_lm.py", "tests/vlm/test_contract_mlx_vlm.py")
"""Tests that state each assumption about a library; a failure names it."""
BEHAVIOR = ("tests/vlm/test_vlm_reader.py", "tests/parity/test_greedy.py")
"""Tests that run models of the libraries."""
LIBRARIES = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-13", "mlx-lm", "mlx-vlm")
WORDS_LENGTH = 300


@dataclass(frozen=True)
class Results:
    """Failures of tests by name, with the first words of each."""

    contracts: Mapping[str, str]
    behavior: Mapping[str, str]

    @property
    def failures(self) -> dict[str, str]:
        return {**self.contracts, **self.behavior}


def verdict(
    required: Results, newest: Results, versions: Mapping[str, tuple[str, str]]
) -> tuple[int, list[str]]:
    """Return the exit code and what is to be said.

    Args:
        required: results with the versions that penstock requires.
        newest: results with the newest ones.
        versions: both versions of each library.
    """
    changed = {name: f"{old} -> {new}" for name, (old, new) in versions.items() if old != new}
    news = ", ".join(f"{name} {step}" for name, step in changed.items())
    if required.failures:
        return 1, [
            "a fault of ours: these fail with the versions that penstock requires",
            *_listed(required.failures),
        ]
    if not newest.failures:
        return 0, [f"nothing fails with {news or 'the newest versions, which are those required'}"]
    if not changed:
        return 1, ["unsteady: these fail with the same versions", *_listed(newest.failures)]
    lines = [f"not a fault of ours: these pass with the versions required, and fail with {news}"]
    lines += [f"assumption changed: {line}" for line in _listed(newest.contracts)]
    unnamed = {} if newest.contracts else newest.behavior
    lines += [f"no contract test names the change: {line}" for line in _listed(unnamed)]
    if newest.contracts and newest.behavior:
        lines.append(f"behind them {len(newest.behavior)} tests of behavior fail")
    return 2, lines


def _listed(failures: Mapping[str, str]) -> list[str]:
    return [f"{name}: {words}" for name, words in failures.items()]


def failures_in(report: str) -> dict[str, str]:
    """Return the failed tests of a JUnit report, with the first line of each message."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            words = (fault.get("message") or "").strip().partition("\n")[0]
            found[f"{case.get('classname')}.{case.get('name')}"] = words[:WORDS_LENGTH]
    return found


def main(required: Path, newest: Path) -> int:
    """Upgrade the libraries in `newest`, run the tests in both, and print the verdict."""
    before = _versions(required)
    names = [f"{name}" for name in _versions(newest)]
    _pip(newest, "install", "--quiet", "--upgrade", *names)
    after = _versions(newest)
    versions = {name: (before.get(name, "none"), after[name]) for name in after}
    print("\n".join(f"{name}: {old}, newest {new}" for name, (old, new) in versions.items()))
    code, lines = verdict(_results(required), _results(newest), versions)
    print("\n".join(lines))
    return code


def _versions(environment: Path) -> dict[str, str]:
    listed = json.loads(_pip(environment, "list", "--format=json"))
    return {item["name"]: item["version"] for item in listed if item["name"] in LIBRARIES}


def _pip(environment: Path, *arguments: str) -> str:
    command = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _results(environment: Path) -> Results:
    return Results(_failures(environment, CONTRACTS), _failures(environment, BEHAVIOR))


def _failures(environment: Path, tests: tuple[str, ...]) -> dict[str, str]:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [environment / "bin" / "python", "-m", "pytest", "-q", f"--junitxml={report}"]
        subprocess.run([*command, *tests], cwd=ROOT, check=False)
        if not report.exists():
            return {" ".join(tests): "pytest ended without a report"}
        return failures_in(report.read_text())


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
