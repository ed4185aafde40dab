"""Prefixes held on request, and the tree view."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from core_parts import evict_all, fixed_bytes_of
from engine_faults import model_of

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.errors import SettingError

BLOCK = 16


def prompt(seed: int, tokens: int = 160) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(512) for _ in range(tokens))


class Held:
    """A core with room for a few prompts, and a clock that does not advance by itself."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        small: dict[str, Any] = {"block_size": BLOCK, "prefill_chunk": 64, "max_batch_size": 2}
        small |= {"max_kv_size": 512, **settings}
        self.core = Core(model_of("llama"), memory_limit="40MB", clock=lambda: self.now, **small)
        self.core.set_limit(fixed_bytes_of(self.core) + 500_000)

    def ask(self, tokens: tuple[int, ...], **settings: Any) -> Handle:
        handle = self.core.submit(Request(prompt=tokens, **{"max_tokens": 4, **settings}))
        while self.core.step():
            self.core.view.check()
        handle.result(0.0)
        return handle

    def crowd(self, first: int = 100) -> None:
        """Send unrelated prompts, more than fit, twice each."""
        for seed in range(first, first + 12):
            self.now += 1
            self.ask(prompt(seed))
            self.ask(prompt(seed))
        assert self.core.view.stats().evicted_nodes > 0

    def found(self, tokens: tuple[int, ...], salt: str = "") -> int:
        return self.core.view.explain(tokens, salt).held_tokens


@pytest.fixture
def small() -> Iterator[Held]:
    made = Held()
    yield made
    made.core.close()


@pytest.mark.parametrize("seconds", [0.0, 1_000.0])
def test_prompt_on_hold_is_evicted_last(small: Held, seconds: float) -> None:
    """With the negative control: not held, it is evicted."""
    small.ask(prompt(0), hold_seconds=seconds)
    small.crowd()
    assert small.found(prompt(0)) == (160 if seconds else 0)


def test_hold_expires(small: Held) -> None:
    small.ask(prompt(0), hold_seconds=60.0)
    small.crowd()
    assert small.found(prompt(0)) == 160
    small.now += 60.0
    small.crowd(200)
    assert small.found(prompt(0)) == 0


def test_every_request_renews_hold(small: Held) -> None:
    for _ in range(3):
        small.ask(prompt(0), hold_seconds=60.0)
        small.now += 40.0
    small.crowd()
    assert small.found(prompt(0)) == 160
    small.ask(prompt(0))  # reads it, and asks for nothing
    small.now += 3_000.0
    small.crowd(200)
    assert small.found(prompt(0)) == 0


def test_hold_covers_only_requested_first_tokens(small: Held) -> None:
    """As whole nodes: of chunks of 64 tokens, the second holds token 65."""
    small.ask(prompt(0), hold_seconds=1_000.0, hold_tokens=65)
    held = {view.start: view.held_seconds for view in small.core.view.tree()}
    assert held == {0: 1_000.0, 128: 0.0, 160: 0.0}, "the last is the end of the sequence"
    small.crowd()
    assert small.found(prompt(0)) == 128


def test_nodes_on_hold_are_evicted_for_running_requests(small: Held) -> None:
    """Everything is held, and a prompt that needs the room gets it."""
    for seed in range(30):
        small.now += 1
        small.ask(prompt(seed), hold_seconds=10_000.0)
        assert small.core.ledger.used_bytes <= small.core.ledger.limit_bytes
    counts = small.core.prefixes.counts
    assert counts.evicted_nodes > 0
    assert small.found(prompt(29)) == 160
    assert small.found(prompt(0)) == 0, "of held ones the one not used for longest"
    evict_all(small.core)
    assert len(small.core.view.tree()) == 0


def test_cancelled_answer_keeps_hold(small: Held) -> None:
    wish = Request(prompt=prompt(0), max_tokens=200, hold_seconds=1_000.0)
    handle = small.core.submit(wish)
    for _ in range(8):
        small.core.step()
    handle.cancel()
    small.crowd()
    assert small.found(prompt(0)) == 160


def test_hold_lasts_when_answer_exceeds_window() -> None:
    small = Held(max_kv_size=128, keep=32)
    small.ask(prompt(0, 100), max_tokens=200, hold_seconds=1_000.0)
    assert small.core.view.tree()
    assert all(view.held_seconds > 0 for view in small.core.view.tree() if view.start < 100)
    small.core.close()


def test_holds_are_per_tenant(small: Held) -> None:
    small.ask(prompt(0), hold_seconds=1_000.0, salt="a")
    small.ask(prompt(0), salt="b")
    small.crowd()
    assert (small.found(prompt(0), "a"), small.found(prompt(0), "b")) == (160, 0)


@pytest.mark.parametrize("shares", [False, True])
def test_request_with_cache_prompt_false_leaves_nothing_cached(small: Held, shares: bool) -> None:
    """Its choices share the prompt. The negative control caches its answers."""
    small.core.set_limit(fixed_bytes_of(small.core) + 4_000_000)
    first = small.ask(prompt(0)).result(0.0)
    before, held = small.core.view.stats(), small.core.view.stats().held_tokens
    again = small.ask(prompt(0), n=2, cache_prompt=shares, max_tokens=40).result(0.0)
    after = small.core.view.stats()
    assert [choice.tokens[:4] for choice in again] == [first[0].tokens] * 2
    cached = [choice.finish.usage.cached_tokens for choice in again if choice.finish is not None]
    assert (cached[0] > 150) is shares
    assert after.prefilled_tokens - before.prefilled_tokens < 200, "once for both"
    assert (small.core.view.stats().held_tokens > held) is shares
    if not shares:
        assert after.used_bytes == before.used_bytes
        assert small.found(prompt(0)) == 160


def test_cancelled_request_with_cache_prompt_false_is_not_cached(small: Held) -> None:
    handle = small.core.submit(Request(prompt=prompt(0), max_tokens=200, cache_prompt=False))
    for _ in range(8):
        small.core.step()
    assert small.core.view.stats().held_tokens > 0
    handle.cancel()
    while small.core.step():
        small.core.view.check()
    assert small.core.view.stats().held_tokens == 0


def test_private_salt_is_generated_once_per_request() -> None:
    """Other ranks rebuild a request from its fields."""
    own, other = (Request(prompt=(1,), salt="a", cache_prompt=False) for _ in range(2))
    assert own.salt.startswith("a\0") and own.salt != other.salt
    assert Request(**own.model_dump(mode="json")) == own
    assert Request(prompt=(1,), salt="a").salt == "a"


@pytest.mark.parametrize(
    "wrong", [{"hold_seconds": -1.0}, {"hold_seconds": float("inf")}, {"hold_tokens": -1}]
)
def test_invalid_hold_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Request(prompt=(1,), **wrong)


def test_tree_view_shows_pins_and_nodes() -> None:
    core = Held().core
    core.submit(Request(prompt=prompt(0), max_tokens=60))
    core.submit(Request(prompt=(*prompt(0)[:80], *prompt(1)[:80]), max_tokens=60))
    for _ in range(12):
        core.step()
    views = core.view.tree()
    ends = {view.id: view.end for view in views}
    for view in views:
        assert view.start == (0 if view.parent is None else ends[view.parent])
        assert len(view.tokens) == min(32, view.end - view.start)
    (head,) = [view for view in views if view.parent is None]
    assert (head.pins, head.tokens) == (2, prompt(0)[:32])
    assert sum(view.nbytes for view in views) == core.prefixes.nbytes - core.prefixes.fixed_bytes
    core.close()
    assert core.view.tree() == []
