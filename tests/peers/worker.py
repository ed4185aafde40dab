"""Run one of mlx-lm's test files with one set of cache classes; write the outcomes as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import traceback
import unittest
from pathlib import Path
from typing import Any

# isort: off
import penstock  # noqa: F401  (first: it loads a fast BLAS before MLX starts)
import mlx.core as mx
import numpy as np
import stand_ins
# isort: on


class Outcomes(unittest.TestResult):
    """One word per test, and the traceback of what went wrong. Every test starts from a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.words: dict[str, str] = {}
        self.details: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        for seed in (random.seed, np.random.seed, mx.random.seed):
            seed(0)

    def _note(self, test: unittest.TestCase, word: str, detail: str = "") -> None:
        name = test.id()
        if self.words.get(name) not in ("failed", "error"):
            self.words[name], self.details[name] = word, detail

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", "".join(traceback.format_exception(*err)))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "error", "".join(traceback.format_exception(*err)))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            failed = issubclass(err[0], test.failureException)
            detail = f"{subtest}\n" + "".join(traceback.format_exception(*err))
            self._note(test, "failed" if failed else "error", detail)


def run(tests: Path, file: str, caches: str, *, broken: bool) -> dict[str, Any]:
    """Run `tests/file.py`; return {"tests": {id: {"outcome", "detail"}}, "calls": {...}}."""
    sys.path.insert(0, str(tests))
    stand_ins.add_renamed()
    module = importlib.import_module(file)
    calls = stand_ins.install(caches, broken=broken, test_module=module)
    outcomes = Outcomes()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(outcomes)
    return {
        "tests": {
            name: {"outcome": word, "detail": outcomes.details[name]}
            for name, word in outcomes.words.items()
        },
        "calls": calls.report(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path)
    parser.add_argument("file")
    parser.add_argument("caches", choices=sorted(stand_ins.HOMES))
    parser.add_argument("output", type=Path)
    parser.add_argument("--broken", action="store_true")
    args = parser.parse_args()
    result = run(args.tests, args.file, args.caches, broken=args.broken)
    args.output.write_text(json.dumps(result))
    # Without the interpreter's farewell: after tests that generate in threads, MLX 0.32.4 aborts
    # in it now and then ("terminate called without an active exception"), whatever the caches.
    os._exit(0)


if __name__ == "__main__":
    main()
