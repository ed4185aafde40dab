"""A step is three calls; the second has no effect; the core stays small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunk_speeds import TokenASecond
from cold_engine import SETTINGS, said, submit
from core_parts import placed_sequences, sequences_in
from engine_faults import STATES, model_of

from penstock.engine import core as core_module
from penstock.engine.core import Core
from penstock.engine.request import Request
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.step_time import StepTime

PROMPT = tuple(range(1, 151))
"""Three chunks."""
MOST_LINES, MOST_IMPORTS = 250, 14


@pytest.fixture(params=["llama", *STATES])
def core(request: pytest.FixtureRequest) -> Iterator[Core]:
    settings = {name: SETTINGS[name] for name in SETTINGS if not name.startswith("ssd")}
    small = Core(model_of(request.param), **settings)
    yield small
    small.close()


def counted(core: Core, sequence: Sequence) -> list[Any]:
    """Return the state that a step changes."""
    kv, tree = sequence.kv, core.prefixes.tree
    return [
        list(sequence.tokens),
        sequence.position,
        (kv.num_cached_tokens, kv.tail, kv.slot, len(kv.own_spans)),
        kv.recurrent_state,
        (sequence.state, sequence.served_tokens, sequence.handle.unread),
        (core.ledger.used_bytes, tree.version, tree.tokens),
    ]


@pytest.mark.parametrize("state", [State.PREFILLING, State.RUNNING])
def test_forward_pass_changes_nothing_before_postprocess(core: Core, state: State) -> None:
    expected = submit(core, PROMPT)
    while core.step():
        pass
    core.clear()
    handle = submit(core, PROMPT)
    core.step()
    (sequence,) = placed_sequences(core)
    while sequence.state is not state:
        core.step()
    for _ in range(2):  # as often as you like
        plan = core.planner.schedule(core.clock())
        before = counted(core, sequence)
        computed = next(core.executor.run(plan, core.postprocessor.send))
        assert computed.error is None
        assert counted(core, sequence) == before
        core.view.check()
    core.postprocessor.postprocess(plan, iter([computed]))
    assert counted(core, sequence) != before
    while core.step():
        core.view.check()
    assert said(handle) == said(expected)


def test_core_has_few_lines_and_step_three_calls() -> None:
    source = Path(str(core_module.__file__)).read_text()
    tree = ast.parse(source)
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("penstock")
    ]
    assert len(source.splitlines()) <= MOST_LINES
    assert 0 < len(imports) <= MOST_IMPORTS
    (step,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    (attempt,) = (node for node in step.body if isinstance(node, ast.Try))
    assert [ast.unparse(line) for line in attempt.body] == [
        "plan = self.planner.schedule(self.clock(), shared=shared)",
        "output = self.executor.run(plan, self.postprocessor.send, pending=pending)",
        "return self.postprocessor.postprocess(plan, output, send_later=send_later)",
    ]


def test_prompts_are_prefilled_block_by_block_during_decodes() -> None:
    """At 1 ms no chunk fits between two tokens; a block is still prefilled."""
    settings = {name: SETTINGS[name] for name in SETTINGS if not name.startswith("ssd")}
    expected: dict[int, str] = {}
    for max_stall_ms, most in ((0, 64), (1, 16)):
        core = Core(model_of("llama"), **settings, max_stall_ms=max_stall_ms)
        first = core.submit(Request(prompt=(5, 6, 7), max_tokens=40, ignore_eos=True))
        core.step()
        second = submit(core, PROMPT)
        chunks = []
        while core.step():
            plan = core.planner.schedule(core.clock())
            chunks += [chunk.tokens for chunk in plan.prefill if plan.decode]
        assert 0 < max(chunks) <= most
        third = submit(core, tuple(range(200, 350)))
        core.step()
        assert core.planner.schedule(core.clock()).prefill[0].tokens == 64, "alone"
        shared = core.planner.schedule(core.clock(), shared=True)
        assert shared.prefill[0].tokens <= most, "other models wait"
        while core.step():
            pass
        for number, handle in enumerate((first, second, third)):
            assert expected.setdefault(number, said(handle)) == said(handle)
        core.close()


def test_partial_block_prefill_does_not_change_text(core: Core) -> None:
    prompts = (PROMPT * 2, (*PROMPT, *range(50, 150)), PROMPT * 2)
    texts: list[list[str]] = []
    for time in (None, StepTime(3, TokenASecond())):
        core.clear()
        core.planner.time = time
        core.submit(Request(prompt=(5, 6, 7), max_tokens=500, ignore_eos=True))
        core.step()
        handles = [submit(core, prompt) for prompt in prompts]
        parts = 0
        while len(core.scheduler) > 1:
            core.step()
            placed = sequences_in(core, State.PREFILLING)
            parts += any(sequence.position % core.limits.block_size for sequence in placed)
            core.view.check()
        assert (parts > 50) == (time is not None)
        texts.append([said(handle) for handle in handles])
        while core.step():
            pass
    assert texts[0] == texts[1]
