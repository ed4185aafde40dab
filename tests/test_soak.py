"""A short soak run, and that it detects faults."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock
from penstock.kv.segment import Segment
from penstock.recall import MODEL_PATH

FILE = Path(__file__).parent.parent / "tools" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@cache
def memory_limit() -> int:
    """Return a limit that evicts: steps take more where MLX has no compiler to fuse operations."""
    model, tokenizer = penstock.load(MODEL_PATH)
    with penstock.Engine(model, tokenizer, memory_limit="100MB", block_size=64) as engine:
        return engine.stats().used_bytes + 11_000_000


def run(soak: Any, requests: int = 60) -> Any:
    """Of prompts that are short, in a limit that still has some evicted."""
    return soak.soak(requests, memory_limit=memory_limit(), looks=3, shortest=126)


def test_soak_returns_every_byte(soak: ModuleType) -> None:
    outcome = run(soak, 120)
    assert outcome.faults == []
    assert len(outcome.looks) == 3
    assert outcome.repeated > 0
    assert {"stop", "length", "SettingError"} <= set(outcome.ends)
    assert outcome.evicted_nodes > 0
    assert outcome.hit_tokens > outcome.prompt_tokens // 2


def test_soak_detects_retained_arrays(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Segment] = []
    split = Segment.split

    def keeping(self: Segment, at_tokens: int) -> tuple[Segment, Segment]:
        kept.append(self)
        return split(self, at_tokens)

    monkeypatch.setattr(Segment, "split", keeping)
    outcome = run(soak)
    kept.clear()
    assert any("active_bytes" in fault for fault in outcome.faults)


def test_soak_detects_retained_objects(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    submit = penstock.Engine.submit

    def keeping(self: penstock.Engine, request: penstock.Request) -> Any:
        kept.append([[] for _ in range(10)])
        return submit(self, request)

    monkeypatch.setattr(penstock.Engine, "submit", keeping)
    outcome = run(soak)
    assert any("objects" in fault for fault in outcome.faults)


def test_soak_detects_changed_answer(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine.handle import Choice

    finished: list[int] = []
    result = soak.Soak._compare

    def altered(self: Any, asked: Any) -> None:
        finished.append(1)
        if len(finished) > 30:
            asked.handle.choices.append(Choice(tokens=[1]))
        result(self, asked)

    monkeypatch.setattr(soak.Soak, "_compare", altered)
    outcome = run(soak, 150)
    assert any("something else before" in fault for fault in outcome.faults)


def test_soak_fault_sets_exit_code(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    def faulty(requests: int, **_: Any) -> Any:
        looks: Sequence[Any] = [soak.Look(1, 2, 3, 4, 5, 6)] * 2
        return soak.Outcome(requests, looks=list(looks), faults=["one"])

    for outcome, code in (
        (faulty, 1),
        (lambda n, **more: soak.Outcome(n, looks=faulty(n).looks), 0),
    ):
        monkeypatch.setattr(soak, "soak", outcome)
        with pytest.raises(typer.Exit) as ended:
            soak.main(requests=1, memory_limit="1MB")
        assert ended.value.exit_code == code
    assert "FAULT: one" in capsys.readouterr().out
