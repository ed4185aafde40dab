"""Answers are admitted on an expected length, grow, and are preempted."""

from __future__ import annotations

from typing import Any

import pytest
from core_parts import evict_all
from engine_faults import spell
from fault_setup import Setup, end_of, made, prompt_of

from penstock.engine.handle import Handle
from penstock.engine.request import Sampling
from penstock.engine.schedule import answer_lengths
from penstock.engine.schedule.admission import Admission
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence
from penstock.errors import NeverFits

ANSWER = 300
DRAWN = Sampling(temperature=1.0, seed=5)


LONG: dict[str, Any] = {"max_kv_size": 65_536, "max_batch_size": 8, "max_queue": 16}


def room_for(setup: Setup, tokens: int, sequences: int = 1) -> int:
    """Return the bytes of sequences of this length beside the fixed bytes."""
    needed = setup.core.view.sequence_bytes(tokens)
    return sequences * needed.per_sequence + needed.shared


def expect_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine expect shorter answers than requested."""
    monkeypatch.setattr(answer_lengths, "LEAST_TOKENS", 16)
    monkeypatch.setattr(answer_lengths, "LEAST_REST_TOKENS", 8)


def said(handle: Handle) -> tuple[int, ...]:
    handle.events()
    return tuple(handle.choices[0].tokens)


def alone(setup: Setup, prompt: tuple[int, ...], tokens: int, sampling: Sampling) -> Handle:
    """Answer a prompt with enough memory, and evict everything afterwards."""
    handle = setup.ask(prompt, tokens, sampling=sampling)
    while setup.core.step():
        pass
    evict_all(setup.core)
    return handle


def test_eight_answers_of_32_000_max_tokens_run_together() -> None:
    prompts = [prompt_of(60, seed) for seed in range(8)]
    with made(**LONG) as setup:
        answers = [said(alone(setup, prompt, ANSWER, DRAWN)) for prompt in prompts]
        room = room_for(setup, 60 + ANSWER + 64, 8)
        setup.core.set_limit(setup.fixed + room)
        assert room < room_for(setup, 60 + 32_000), "not even one would be promised all of it"
        handles = [
            setup.ask(prompt, 32_000, sampling=DRAWN, stop=(spell(answer[-8:]),))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        setup.core.step()
        stats = setup.core.view.stats()
        assert (stats.waiting, stats.prefilling + stats.running) == (0, 8)
        setup.drain()
        assert [said(handle) for handle in handles] == answers
        assert {end_of(handle).reason for handle in handles} == {"stop"}
        assert setup.core.view.stats().preemptions == 0


def test_short_answer_with_large_max_tokens_causes_no_eviction() -> None:
    with made(**LONG) as setup:
        for seed in range(6):
            setup.ask(prompt_of(200, seed), 1)
        asked = prompt_of(40, 9)
        answer = said(alone_beside(setup, asked))
        used = setup.core.ledger.used_bytes
        setup.core.set_limit(used + room_for(setup, len(asked) + 40))
        before = setup.core.view.stats()
        handle = setup.ask(asked, 39_200, sampling=DRAWN, stop=(spell(answer),))
        setup.drain()
        assert said(handle) == answer
        after = setup.core.view.stats()
        assert after.evicted_nodes == before.evicted_nodes
        assert after.held_tokens >= before.held_tokens


def alone_beside(setup: Setup, prompt: tuple[int, ...]) -> Handle:
    """Answer a prompt with four tokens; everything else stays cached."""
    handle = setup.ask(prompt, 4, sampling=DRAWN)
    setup.drain()
    return handle


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "seeded"])
def test_preempted_answers_match_single(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_little(monkeypatch)
    prompts = [prompt_of(50, seed) for seed in range(3)]
    with made(**LONG) as setup:
        answers = [said(alone(setup, prompt, 250, sampling)) for prompt in prompts]
        setup.core.budget.lengths = answer_lengths.AnswerLengths()
        setup.core.set_limit(setup.fixed + room_for(setup, 300) + room_for(setup, 150))
        handles = [setup.ask(prompt, 250, sampling=sampling) for prompt in prompts]
        setup.drain()
        assert setup.core.view.stats().preemptions > 0
        assert [said(handle) for handle in handles] == answers


def test_lower_priority_answer_is_preempted_for_higher() -> None:
    with made(**LONG) as setup:
        setup.core.set_limit(setup.fixed + room_for(setup, 220))
        low, high = setup.ask(prompt_of(20, 1), 150), setup.ask(prompt_of(20, 2), 150, priority=1)
        setup.until(high, State.RUNNING)
        while setup.state(high) is not State.DONE:
            assert setup.state(high) is State.RUNNING, "the highest is never preempted"
            setup.step()
        setup.drain()
        assert [len(said(handle)) for handle in (low, high)] == [150, 150]


@pytest.mark.parametrize("tokens", [95, 96, 200])
def test_answer_filling_memory_ends_with_length(tokens: int) -> None:
    with made(**LONG) as setup:
        setup.core.set_limit(setup.fixed + room_for(setup, 250))
        most = setup.core.view.fitting_tokens
        handles = [setup.ask(prompt_of(tokens, seed), 10_000) for seed in range(2)]
        setup.drain()
        for handle in handles:
            assert end_of(handle).reason == "length"
            assert tokens + len(said(handle)) in (most, most + 1)  # the index may take less


def test_prompt_one_token_above_memory_limit_is_refused() -> None:
    with made(**LONG) as setup:
        setup.ask(prompt_of(500, 7), 8)  # evicted for it
        setup.drain()
        setup.core.set_limit(setup.fixed + room_for(setup, 300))
        most = setup.core.view.fitting_tokens
        handle = setup.ask(prompt_of(most - 1), 10_000)
        setup.drain()
        assert (end_of(handle).reason, len(said(handle))) == ("length", 1)
        with pytest.raises(NeverFits, match=f"{most} tokens > {most - 1} maximum"):
            setup.ask(prompt_of(most), 1)


def test_lowered_limit_ends_running_answer() -> None:
    with made(**LONG) as setup:
        handle = setup.ask(prompt_of(100), 1_000)
        setup.step(60)
        setup.core.set_limit(setup.fixed + room_for(setup, 50))
        assert end_of(handle).reason == "length"
        assert setup.core.view.idle


class EndsInsteadOfPreempting(Admission):
    """Ends an answer that should be preempted."""

    def preempt(self, sequence: Sequence) -> None:
        self.finish(sequence, lambda s: s.end("length"))


def test_check_detects_answers_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_little(monkeypatch)
    prompts = [prompt_of(50, seed) for seed in range(3)]
    with made(**LONG) as setup:
        setup.core.admission.__class__ = EndsInsteadOfPreempting
        setup.core.set_limit(setup.fixed + room_for(setup, 300) + room_for(setup, 150))
        handles = [setup.ask(prompt, 250) for prompt in prompts]
        setup.drain()
        assert {len(said(handle)) for handle in handles} != {250}
