"""Tokens may be sent while the next step computes: later, but equal."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
from cold_engine import SETTINGS
from core_parts import placed_sequences
from engine_faults import Alphabet, model_of, spell

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Finish, Request, Token
from penstock.errors import StepFailed

PROMPT = tuple(range(1, 40))


@pytest.fixture
def alphabet() -> Alphabet:
    return Alphabet()


@pytest.fixture
def core(alphabet: Alphabet) -> Iterator[Core]:
    settings = {name: SETTINGS[name] for name in SETTINGS if not name.startswith("ssd")}
    small = Core(model_of("llama"), alphabet, **settings)
    yield small
    small.close()


def step(core: Core, handle: Handle) -> list[Any]:
    """Run a step as the engine's thread does; return its events."""
    core.step(send_later=True)
    return handle.events()


def until_first(core: Core, handle: Handle) -> list[Any]:
    events: list[Any] = []
    while not events:
        assert core.step(send_later=True)
        events = handle.events()
    return events


def test_first_token_is_sent_at_once_and_next_a_step_later(core: Core) -> None:
    handle = core.submit(Request(prompt=PROMPT, max_tokens=4, ignore_eos=True))
    first = until_first(core, handle)
    assert len(first) == 1, "the first token"
    assert step(core, handle) == [], "the second is computed, and waits"
    (second,) = step(core, handle)
    assert isinstance(second, Token)
    third, fourth, end = step(core, handle)
    assert isinstance(end, Finish), "with the last token the answer ends: nothing waits"
    assert end.usage.completion_tokens == 4
    assert [first[0].token, second.token, third.token, fourth.token] == generated_tokens_of(core, 4)


def generated_tokens_of(core: Core, tokens: int) -> list[int]:
    handle = core.submit(Request(prompt=PROMPT, max_tokens=tokens, ignore_eos=True))
    while core.step():
        pass
    return handle.result(timeout_seconds=0)[0].tokens


def test_delayed_token_is_sent_before_prefill(core: Core) -> None:
    """A step with a chunk sends the token first."""
    handle = core.submit(Request(prompt=PROMPT, max_tokens=20, ignore_eos=True))
    until_first(core, handle)
    assert step(core, handle) == []
    other = core.submit(Request(prompt=tuple(range(300, 420)), max_tokens=2, ignore_eos=True))
    assert len(step(core, handle)) == 2, "the one that waited, and this step's"
    other.cancel()
    handle.cancel()


def test_delayed_token_of_preempted_sequence_is_sent_at_once(core: Core) -> None:
    handle = core.submit(Request(prompt=PROMPT, max_tokens=20, ignore_eos=True))
    until_first(core, handle)
    assert step(core, handle) == []
    (sequence,) = placed_sequences(core)
    core.admission.preempt(sequence)
    assert len(step(core, handle)) == 1, "it is read again; its token does not wait for that"
    handle.cancel()
    assert isinstance(handle.events()[-1], Finish)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_finish_flushes_delayed_token(core: Core, how: str) -> None:
    handle = core.submit(Request(prompt=PROMPT, max_tokens=20, ignore_eos=True))
    until_first(core, handle)
    assert step(core, handle) == []
    handle.cancel() if how == "cancel" else core.close()
    token, end = handle.events()
    assert isinstance(token, Token)
    assert isinstance(end, Finish)
    assert end.usage.completion_tokens == 2


def answers(core: Core, stop: tuple[str, ...], *, send_later: bool) -> list[Any]:
    requests = [
        Request(prompt=(seed, *PROMPT), max_tokens=12, n=2, stop=stop, ignore_eos=True)
        for seed in (1, 2)
    ]
    handles = [core.submit(request) for request in requests]
    while core.step(send_later=send_later):
        core.view.check()
    found = [choice for handle in handles for choice in handle.result(timeout_seconds=0)]
    return [(choice.tokens, choice.text, choice.finish.reason) for choice in found]


def test_delayed_sending_does_not_change_answers(core: Core) -> None:
    """Also with a stop string, which is then searched at once."""
    whole = answers(core, (), send_later=False)
    for stop in ((), (spell(whole[0][0][5:7]),)):
        at_once = answers(core, stop, send_later=False)
        core.clear()
        assert answers(core, stop, send_later=True) == at_once
        assert at_once[0][2] == ("stop" if stop else "length")


def test_detokenizer_error_fails_only_its_answer(core: Core, alphabet: Alphabet) -> None:
    alphabet.breaks = [4]
    bad = core.submit(Request(prompt=(1, *PROMPT), max_tokens=9, ignore_eos=True))
    good = core.submit(Request(prompt=(2, *PROMPT), max_tokens=9, ignore_eos=True))
    while core.step(send_later=True):
        core.view.check()
    with pytest.raises(StepFailed, match="a detokenizer's bug"):
        bad.result(timeout_seconds=0)
    assert len(bad.choices[0].tokens) == 4
    assert len(good.result(timeout_seconds=0)[0].tokens) == 9


def test_detokenizer_error_at_end_retains_no_arrays(core: Core, alphabet: Alphabet) -> None:
    """The frames of an error would hold the step's states, uncounted."""
    alphabet.breaks = [8]
    handle = core.submit(Request(prompt=PROMPT, max_tokens=9, ignore_eos=True))
    until_first(core, handle)
    kv = ref(next(iter(core.admission.sequences.values())).kv)
    gc.collect()
    gc.disable()
    try:
        while core.step(send_later=True):
            pass
        assert kv() is None, "it waits for the garbage collector"
    finally:
        gc.enable()
    with pytest.raises(StepFailed, match="the end of the text failed"):
        handle.result(timeout_seconds=0)
