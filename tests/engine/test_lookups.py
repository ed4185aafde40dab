"""Tree lookups and prompt hashes per admission are counted.

The real functions run; they are wrapped to be counted. A look-up is a walk down the tree: a
question that is asked again while the tree has not changed is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cold_engine import BLOCK, SETTINGS, ask, running, settle, submit
from core_parts import evict_all, placed_sequences
from engine_faults import model_of

from penstock.engine.core import Core
from penstock.engine.engine import _enqueue
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence as Answer
from penstock.prefix import prefixes as prefixes_module
from penstock.prefix.tree import PrefixTree

PROMPT = tuple(range(1, 101))
"""Six whole blocks and four tokens."""


class Calls:
    """Blocks per look-up and tokens per hashing since `clear`."""

    def __init__(self) -> None:
        self.lookups: list[int] = []
        self.hashed: list[tuple[int, ...]] = []

    def clear(self) -> None:
        self.lookups.clear()
        self.hashed.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counted = Calls()
    match, hash_blocks = PrefixTree.match, prefixes_module.hash_blocks

    def counting_match(tree: PrefixTree[Any], block_hashes: Sequence[bytes]) -> Any:
        counted.lookups.append(len(block_hashes))
        return match(tree, block_hashes)

    def counting_hash(tokens: Any, block_size: int, root: bytes) -> list[bytes]:
        counted.hashed.append(tuple(int(token) for token in tokens))
        return hash_blocks(tokens, block_size, root)

    monkeypatch.setattr(PrefixTree, "match", counting_match)
    monkeypatch.setattr(prefixes_module, "hash_blocks", counting_hash)
    return counted


@pytest.fixture
def core() -> Any:
    settings = {key: SETTINGS[key] for key in SETTINGS if not key.startswith("ssd")}
    made = Core(model_of("llama"), **settings)
    yield made
    made.close()


def admit(core: Core) -> list[Answer]:
    """Run the first call of a step, and return the sequences with a slot."""
    core.planner.schedule(core.clock())
    return placed_sequences(core)


def whole(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens[: len(tokens) // BLOCK * BLOCK])


@pytest.mark.parametrize("warm", [False, True])
def test_request_takes_one_lookup_and_one_hashing(core: Core, calls: Calls, warm: bool) -> None:
    if warm:
        ask(core, PROMPT)
    calls.clear()
    submit(core, PROMPT)
    (sequence,) = admit(core)
    assert sequence.cached_tokens == (96 if warm else 0)
    assert calls.lookups == [6]
    assert calls.hashed == [whole(PROMPT)]


def test_choices_take_one_lookup_and_one_hashing(core: Core, calls: Calls) -> None:
    submit(core, PROMPT, n=3)
    assert len(admit(core)) == 3
    assert calls.lookups == [6]
    assert calls.hashed == [whole(PROMPT)]


def test_queued_requests_are_looked_up_once_each(core: Core, calls: Calls) -> None:
    prompts = [tuple(range(first, first + 100)) for first in (1, 101, 201)]
    for prompt in prompts:
        submit(core, prompt)
    assert len(admit(core)) == 3
    assert calls.lookups == [6, 6, 6]
    assert calls.hashed == [whole(prompt) for prompt in prompts]


def test_explanation_on_enqueue_shares_lookup_with_request(core: Core, calls: Calls) -> None:
    """As `Engine.enqueue` does on the engine's thread."""
    ask(core, PROMPT)
    calls.clear()
    explanation = _enqueue(core, [Handle(Request(prompt=PROMPT, max_tokens=4), core.cancel)])
    assert explanation is not None and explanation.held_tokens == 96
    assert len(admit(core)) == 1
    assert calls.lookups == [6]
    assert calls.hashed == [whole(PROMPT)]


@pytest.mark.usefixtures("reads_all")
@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_restore_takes_one_lookup_and_one_hashing(
    tmp_path: Path, calls: Calls, family: str
) -> None:
    with running(tmp_path, family) as core:
        ask(core, PROMPT)
    with running(tmp_path, family) as core:
        calls.clear()
        submit(core, PROMPT)
        (sequence,) = admit(core)
        while not sequence.restores:
            admit(core)
        assert sequence.state is State.RESTORING
        assert calls.lookups == [6]
        assert calls.hashed == [whole(PROMPT)]
        settle(core)
        assert core.view.stats().restored_tokens > 0


def test_resumed_answer_is_looked_up_once(core: Core, calls: Calls) -> None:
    handle = submit(core, PROMPT, max_tokens=60)
    (sequence,) = admit(core)
    while sequence.generated_tokens < 37:
        core.step()
    before = sum(map(len, calls.hashed))
    core.admission.preempt(sequence)
    calls.clear()
    assert admit(core) == [sequence]
    blocks = len(sequence.tokens) // BLOCK
    assert calls.lookups == [blocks]
    while core.step():
        pass
    assert len(handle.result(0.0)[0].tokens) == 60
    # Prompt and answer are hashed once, each token by itself.
    assert before + sum(map(len, calls.hashed)) <= 160 // BLOCK * BLOCK


# ---- negative controls


def test_request_is_looked_up_again_after_tree_changed(tmp_path: Path, calls: Calls) -> None:
    """The tier looks up on arrival; the tree changes before admission."""
    with running(tmp_path) as core:
        ask(core, PROMPT)
        ask(core, PROMPT[::-1])
        calls.clear()
        submit(core, PROMPT)
        evict_all(core)
        admit(core)
        assert calls.lookups == [6, 6]


def test_check_detects_second_hashing(core: Core, calls: Calls) -> None:
    handle = submit(core, PROMPT)
    core.view.explain(PROMPT)
    admit(core)
    assert calls.hashed == [whole(PROMPT), PROMPT]
    core.cancel(handle)
