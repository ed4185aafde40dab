"""The speculation bench on a model of a few kilobytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from penstock_bench import speculate
from penstock_bench.engine_sides import RIVAL
from penstock_bench.models import LlamaShape
from penstock_bench.script import Script
from penstock_bench.speculate import DRAFT, DRAFTED, OFF, ON, ScriptedTask, SpeculateLoad

SMALL = SpeculateLoad(
    llama=LlamaShape(
        layers=2,
        hidden_size=64,
        intermediate_size=64,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
    ),
    proposed=8,
    file=80,
    answer=60,
    batch=2,
    steps=4,
    call=16,
    result=8,
    rounds=1,
)


@pytest.fixture(scope="module")
def small() -> Any:
    return speculate.measure(SMALL)


def test_every_task_is_measured_on_both_sides(small: Any) -> None:
    names = ["repeats its prompt", "2 x repeats its prompt", "agent of 4 steps"]
    assert list(small.goal) == [*names, "without repetition"]
    for name in small.goal:
        others = {OFF, RIVAL} if name.startswith("2 x") else {OFF, RIVAL, DRAFT}
        others |= {DRAFTED} if name == "without repetition" else set()
        assert {key for key in small.ratio if key.startswith(f"{name}: ")} == {
            f"{name}: {side}" for side in others
        }
        assert all(value is not None and value > 0 for value in small.ratio.values())


def test_repeated_text_is_proposed(small: Any) -> None:
    repeating = small.penstock["repeats its prompt"]
    assert repeating["accepted_tokens"] > 20
    assert repeating["decode_steps"] < 40
    assert small.penstock["agent of 4 steps"]["accepted_tokens"] > 10
    assert small.penstock["without repetition"]["accepted_tokens"] < 5


def test_tasks_have_expected_repetition() -> None:
    def draw(seed: int, tokens: int) -> list[int]:
        return [seed] * tokens

    made = {task.name: task for task in speculate.tasks(SpeculateLoad(), draw, 3_000)}
    agent = made["agent of 40 steps"]
    assert len(agent.answers) == 40
    for start, end in agent.answers:
        changed = sum(token != 6 for token in agent.text[start:end])
        assert end - start == 32
        assert changed <= 3
    (span,) = made["repeats its prompt"].answers
    start, end = span
    text = made["repeats its prompt"].text
    same = sum(one == other for one, other in zip(text[start:end], text, strict=False))
    assert 370 < same < 384


def test_script_forces_tokens_by_position() -> None:
    script, logits = Script(), mx.zeros((2, 3, 50))
    assert script.forced(logits, 0) is logits
    script.set([7, 8, 9, 10, 11])
    assert script.forced(logits, 1).argmax(-1).tolist() == [[9, 10, 11]] * 2
    assert script.forced(logits, mx.array([0, 2])).argmax(-1).tolist() == [[8, 9, 10], [10, 11, 11]]


def test_check_detects_deviation_from_script() -> None:
    with pytest.raises(AssertionError, match="token 1: 5 was generated, the script has 2"):
        speculate.check([1, 5, 3], [1, 2, 3])


def test_ratios_are_medians_of_paired_rounds() -> None:
    task = ScriptedTask("t", [1] * 12, [(1, 12)])
    found = speculate.Measured(task, {ON: [1.0, 2.0, 9.0], OFF: [2.0, 8.0, 9.0]}, {})
    assert found.ratio(ON, OFF) == 2.0
    assert found.speed(OFF) == pytest.approx(10 / 8)
    assert replace(task, batch=3).answer_tokens == 30
