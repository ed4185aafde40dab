"""Where a sequence's KV lies: one writer, and columns that are not accepted leave nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_faults import model_of

import penstock
from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.schedule.scheduler import State

FIELDS = {"pin", "num_cached_tokens", "own_spans", "slot", "tail", "recurrent_state"}
SOURCE = Path(str(penstock.__file__)).parent / "engine"


def writers(source: str) -> list[int]:
    """List the lines that assign one of the fields to something."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and part.attr in FIELDS:
                    lines.append(part.lineno)
    return lines


def test_only_sequence_kv_writes_where_kv_lies() -> None:
    found = {path.name: writers(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert len(found.pop("cached_path.py")) > 8
    assert len(found.pop("sequence_kv.py")) > 15
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source", ["s.kv.tail = 0", "s.kv.tail += 1", "a, s.pin = b", "s.kv.own_spans: list = []"]
)
def test_another_writer_is_found(source: str) -> None:
    assert writers(source) == [1]


def answer(core: Core, handle: Handle) -> tuple[int, ...]:
    while core.step():
        core.view.check()
    return handle.result(0.0)[0].tokens


@pytest.fixture
def core() -> Any:
    small = {"block_size": 16, "prefill_chunk": 64, "max_batch_size": 2, "max_kv_size": 512}
    with_room = Core(model_of("llama"), memory_limit="40MB", **small)
    yield with_room
    with_room.close()


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_columns_that_are_not_accepted_leave_nothing(core: Core, accepted: int) -> None:
    """Garbage written behind the visible end, as rejected proposals are, changes no text."""
    request = Request(prompt=tuple(range(1, 40)), max_tokens=24)
    expected = answer(core, core.submit(request))
    core.clear()
    handle = core.submit(request)
    while not core.scheduler.sequences(State.RUNNING):
        core.step()
    core.step()
    (sequence,) = core.admission.sequences.values()
    kv = sequence.kv
    while kv.tail + 3 > core.tails.columns - 1 or not kv.tail:
        core.step()
    assert kv.slot is not None
    shape = core.runner.shapes[0]
    noise = mx.full((1, shape.kv_heads, 1, shape.key_dim), 7.0)
    for layer in range(len(core.runner.shapes)):
        for column in range(kv.tail, kv.tail + 3):
            core.tails.write_block(layer, kv.slot, column, noise, noise)
    before = kv.position
    kv.append_tokens(written=3, accepted=0)
    assert kv.position == before
    if accepted:  # the negative control: what is accepted is read
        kv.append_tokens(written=3, accepted=accepted)
        assert kv.position == before + accepted
        return
    assert answer(core, handle) == expected


@pytest.mark.parametrize(("written", "accepted"), [(1, 2), (1, -1), (0, 1)])
def test_no_more_is_accepted_than_was_written(core: Core, written: int, accepted: int) -> None:
    handle = core.submit(Request(prompt=(1, 2, 3), max_tokens=4))
    core.step()
    (sequence,) = core.admission.sequences.values()
    with pytest.raises(ValueError, match="accepted of"):
        sequence.kv.append_tokens(written, accepted)
    core.cancel(handle)


def running_core(core: Core, prompt_tokens: int, generated: int) -> Any:
    """Return the KV of a sequence that has decoded so many tokens, in `core`."""
    core.submit(Request(prompt=tuple(range(1, prompt_tokens + 1)), max_tokens=100, ignore_eos=True))
    while not core.scheduler.sequences(State.RUNNING):
        core.step()
    for _ in range(generated):
        core.step()
    (sequence,) = core.admission.sequences.values()
    return sequence.kv


@pytest.mark.parametrize("generated", [1, 20, 40, 70])
def test_the_whole_blocks_of_an_answer_are_committed_at_its_end(core: Core, generated: int) -> None:
    """Where it ends in the middle of a span, its blocks are not held twice."""
    kv = running_core(core, 40, generated)
    committed, end = kv.num_cached_tokens, kv.committed_end
    kv.keep_end()
    assert kv.num_cached_tokens == end // 16 * 16
    assert (kv.num_cached_tokens > committed) == (generated >= 20)
    spans = kv.spans()
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    kv.check()


def test_without_room_for_a_copy_the_end_of_an_answer_is_not_committed(core: Core) -> None:
    kv = running_core(core, 40, 40)
    before = kv.spans(), kv.num_cached_tokens, kv.position
    core.ledger.set_limit(core.ledger.used_bytes)
    kv.keep_end()
    assert (kv.spans(), kv.num_cached_tokens, kv.position) == before


@pytest.mark.parametrize("keep", [0, 12, 32])
def test_spans_behind_a_window_are_let_go_of(keep: int) -> None:
    """What is kept stays, what no layer sees goes, and nothing is visible twice."""
    window, columns = 48, 16
    core = Core(
        model_of("llama"),
        memory_limit="40MB",
        block_size=columns,
        prefill_chunk=64,
        max_batch_size=2,
        max_kv_size=window,
        keep=keep,
    )
    try:
        kv = running_core(core, 30, 1)
        while core.step() and core.admission.sequences:
            spans, nearest = kv.spans(), core.runner.nearest(kv.position)
            covered = [at for span in spans for at in range(span.start, span.end)]
            assert len(set(covered)) == len(covered)
            end = kv.committed_end
            assert {*range(min(keep, end)), *range(nearest, end)} <= set(covered)
            # Whole spans go when a full tail becomes a span and nothing of them is seen.
            seen = nearest - core.tails.columns
            assert all(span.end > seen or span.start < keep for span in spans[1:-1])
            kv.check()
            core.view.check()
        stats = core.view.stats()
        assert (stats.finished, stats.failed, kv.position) == (1, 0, 0)
    finally:
        core.close()


def test_a_sequence_that_decodes_does_not_move_on_to_what_others_have_committed(
    core: Core,
) -> None:
    """Its spans lie behind the cached tokens: the same blocks would be visible twice."""
    first = Request(prompt=tuple(range(1, 41)), max_tokens=100, ignore_eos=True)
    answer(core, core.submit(first))
    kv = running_core(core, 40, 20)
    kv.hash_blocks()
    held = core.prefixes.match(kv.block_hashes).tokens
    assert held > kv.num_cached_tokens and kv.own_spans
    before = kv.spans(), kv.position
    assert kv.extend() == 0
    assert (kv.spans(), kv.position) == before


@pytest.mark.parametrize(("tokens", "cached"), [(47, 32), (48, 47), (49, 48)])
def test_the_last_token_of_a_prompt_cached_to_its_end_is_computed(
    core: Core, tokens: int, cached: int
) -> None:
    """Its logits are needed; of whole blocks nothing else is computed a second time."""
    request = Request(prompt=tuple(range(1, tokens + 1)), max_tokens=24, ignore_eos=True)
    expected = answer(core, core.submit(request))
    handle = core.submit(request)
    assert answer(core, handle) == expected
    (choice,) = handle.result(0.0)
    assert choice.finish is not None and choice.finish.usage.cached_tokens == cached
