"""Whose change makes a test fail: ours or a library's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "tools" / "newest_libraries.py"
SAME = {"mlx": ("0.32.4", "0.32.4"), "mlx-lm": ("0.32.2", "0.32.2")}
NEWER = {**SAME, "mlx-lm": ("0.32.2", "0.33.0")}
CONTRACT = {"tests.test_contract_mlx_lm.test_kv_cache_state": "KVCache.state is not (keys, ...)"}
BEHAVIOR = {"tests.parity.test_greedy.test_text": "other tokens"}


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("newest_libraries_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_failure_with_pinned_versions_is_our_fault(newest: ModuleType) -> None:
    ours = newest.Results({}, BEHAVIOR)
    code, lines = newest.verdict(ours, newest.Results(CONTRACT, BEHAVIOR), NEWER)
    assert code == 1 and "a fault of ours" in lines[0]


def test_verdict_on_changed_assumption_names_library_and_test(newest: ModuleType) -> None:
    nothing = newest.Results({}, {})
    code, lines = newest.verdict(nothing, newest.Results(CONTRACT, BEHAVIOR), NEWER)
    assert code == 2
    assert "mlx-lm 0.32.2 -> 0.33.0" in lines[0] and "mlx 0" not in lines[0]
    assert lines[1].startswith("assumption changed: tests.test_contract_mlx_lm.test_kv_cache_state")


def test_behavior_change_without_contract_test_is_reported(newest: ModuleType) -> None:
    nothing = newest.Results({}, {})
    code, lines = newest.verdict(nothing, newest.Results({}, BEHAVIOR), NEWER)
    assert code == 2 and "no contract test names the change" in lines[1]


def test_failure_with_equal_versions_is_reported_as_flaky(newest: ModuleType) -> None:
    nothing = newest.Results({}, {})
    code, lines = newest.verdict(nothing, newest.Results({}, BEHAVIOR), SAME)
    assert code == 1 and "unsteady" in lines[0]
    assert newest.verdict(nothing, nothing, NEWER)[0] == 0


def test_report_names_failed_tests(newest: ModuleType) -> None:
    report = """<testsuites><testsuite><testcase classname="tests.a" name="test_one"/>
    <testcase classname="tests.a" name="test_two"><failure message="lost ['trim']&#10;more"/>
    </testcase></testsuite></testsuites>"""
    assert newest.failures_in(report) == {"tests.a.test_two": "lost ['trim']"}
