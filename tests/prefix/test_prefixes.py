"""The prefix tree inside a ledger: operations of sequences, and the limit."""

from __future__ import annotations

import gc
import re
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from typing import Any, ClassVar, Self

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from text_segment import Text

from penstock.errors import LedgerFull, NeverFits
from penstock.kv.segment import Segment
from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory import format_bytes
from penstock.prefix import InsertResult, Match, Pin, Prefixes
from penstock.prefix.beside import Beside, NoRelief
from penstock.prefix.divergence import explain, tokens_held_at
from penstock.prefix.explanation import Eviction, EvictionLog, Why
from penstock.prefix.prefixes import REMEMBERED_MATCHES
from penstock.prefix.tree import PrefixTree

SIZE = 4
TOKEN_BYTES = Text.token_bytes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(limit_bytes: int = 1_000_000, **settings: Any) -> Prefixes[Text]:
    return Prefixes(Ledger(limit_bytes), block_size=SIZE, **settings)


def commit(
    prefixes: Prefixes[Text], pin: Pin[Text], tokens: Sequence[int], start: int, stop: int
) -> InsertResult:
    """Insert the blocks start..stop-1, charged as a sequence's own."""
    own = tuple(tokens[start * SIZE : stop * SIZE])
    with prefixes.reserve(Kind.TAILS, TOKEN_BYTES * len(own)) as paid:
        committed = prefixes.insert(pin, start, prefixes.block_hashes(tokens), own, Text(own), paid)
        prefixes.check()
        prefixes.ledger.check({**prefixes.ledger.by_class(), **prefixes.recount()})
    return committed


def put(prefixes: Prefixes[Text], tokens: Sequence[int]) -> Pin[Text]:
    """Insert a prompt as one more node, and return its pin."""
    match = prefixes.find(tokens)
    pin = prefixes.pin(match)
    if len(tokens) // SIZE > match.tokens // SIZE:
        assert (
            commit(prefixes, pin, tokens, match.tokens // SIZE, len(tokens) // SIZE).refused is None
        )
    return pin


def spelled(pin: Pin[Text]) -> list[int]:
    return [token for node in pin.path for token in node.segment.content]


# ---- reading and writing


def test_committed_blocks_match_immediately() -> None:
    prefixes = make()
    tokens = list(range(20))
    pin = prefixes.pin(prefixes.find(tokens))
    assert commit(prefixes, pin, tokens, 0, 2) == InsertResult(2, 8)
    assert prefixes.find(tokens).tokens == 8
    assert commit(prefixes, pin, tokens, 2, 5) == InsertResult(5, 12)
    assert spelled(pin) == tokens
    assert (prefixes.tree.pins, prefixes.counts.stored_tokens) == (1, 20)
    assert prefixes.find(tokens, salt="another tenant").tokens == 0


def test_longest_partial_block_matches_and_is_in_ledger() -> None:
    prefixes = make()
    tokens = list(range(11))
    pin = put(prefixes, tokens[:8])
    root = prefixes.block_hashes(tokens)[-1]
    nodes = len(prefixes.tree)
    leaves = []
    for stop in (9, 11):
        own = tuple(tokens[8:stop])
        with prefixes.reserve(Kind.TAILS, 100 + TOKEN_BYTES * len(own)) as paid:
            for _ in range(2):  # the second time it is there already
                leaf = prefixes.insert_partial(pin, 2, root, own, Text(own), paid)
                assert paid.nbytes == 100
                assert leaf is not None and leaf.tokens.tolist() == list(own)
                prefixes.check()
                prefixes.ledger.check({**prefixes.ledger.by_class(), **prefixes.recount()})
        leaves.append(leaf)
    assert len(prefixes.tree) == nodes + 2
    match = prefixes.find(tokens)
    found = [prefixes.find_partial(match, root, tokens[8:stop]) for stop in (8, 9, 10, 11)]
    assert found == [None, leaves[0], leaves[0], leaves[1]]
    assert prefixes.find_partial(prefixes.find(tokens[:4]), root, tokens[8:]) is None
    for reads, stays in ((1, False), (2, True)):
        leaf = leaves.pop()
        assert leaf is not None
        for _ in range(reads):
            prefixes.use_partial(leaf)
        assert leaf.hits == reads
        prefixes.drop_partial(leaf)
        assert (leaf in prefixes.tree) == stays
        prefixes.drop_partial(leaf)
        prefixes.check()


def test_partial_block_without_memory_is_not_inserted() -> None:
    prefixes = make(4_000)
    pin = put(prefixes, range(8))
    own = (8, 9)
    with prefixes.reserve(Kind.TAILS, TOKEN_BYTES * len(own)) as paid:
        held = prefixes.reserve(Kind.TAILS, prefixes.ledger.room_bytes)
        root = prefixes.block_hashes(range(8))[-1]
        assert prefixes.insert_partial(pin, 2, root, own, Text(own), paid) is None
        assert (paid.nbytes, len(prefixes.tree)) == (TOKEN_BYTES * len(own), 1)
        held.release()
        assert prefixes.insert_partial(pin, 2, root, own, Text(own), paid) is not None
        assert paid.nbytes == 0


def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the look-ups of all trees, each as its number of blocks."""
    counted: list[int] = []
    match = PrefixTree.match

    def counting(self: PrefixTree[Any], block_hashes: Sequence[bytes]) -> Match[Any]:
        counted.append(len(block_hashes))
        return match(self, block_hashes)

    monkeypatch.setattr(PrefixTree, "match", counting)
    return counted


def test_lookups_are_cached_until_tree_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = looked_up(monkeypatch)
    prefixes = make()
    tokens, other = list(range(20)), list(range(8))
    put(prefixes, tokens).release()
    changes: list[Callable[[], object]] = [
        lambda: put(prefixes, [*tokens[:8], *range(50, 58)]).release(),  # cut and inserted
        lambda: prefixes.exchange(next(iter(prefixes.tree)), lambda text: text, 0),
        lambda: prefixes.shrink(1),
        prefixes.clear,
    ]
    for change in changes:
        before = prefixes.find(tokens)
        del counted[:]
        assert [prefixes.find(tokens), prefixes.find(tokens)] == [before] * 2
        assert counted == []
        assert prefixes.find(other).tokens <= 8
        assert counted == [2]
        change()
        del counted[:]
        assert prefixes.find(tokens) == prefixes.tree.match(prefixes.block_hashes(tokens))
        assert counted == [5, 5]
    assert before.tokens > prefixes.find(tokens).tokens == 0


def test_cached_match_does_not_retain_segments() -> None:
    prefixes = make()
    tokens = list(range(20))
    put(prefixes, tokens).release()
    segment = weakref.ref(prefixes.find(tokens).path[0].segment)
    assert segment() is not None
    prefixes.clear()
    assert segment() is None


def test_match_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = looked_up(monkeypatch)
    prefixes = make()
    for number in range(3 * REMEMBERED_MATCHES):
        prefixes.find([number] * SIZE)
        assert len(prefixes._matches) <= REMEMBERED_MATCHES
    assert len(counted) == 3 * REMEMBERED_MATCHES


def test_eviction_history_is_small_share_of_limit() -> None:
    assert make().policy.remembered_nodes == 50
    assert make().fixed_bytes == 25_000
    assert make(10**12).policy.remembered_nodes == 16_384
    assert make(remembered=3).policy.remembered_nodes == 3


def test_block_hashes_continue_from_last_hash() -> None:
    prefixes = make()
    tokens = list(range(20))
    first = prefixes.block_hashes(tokens[:8], "tenant")
    more = prefixes.block_hashes(tokens[8:], after=first[-1])
    assert [*first, *more] == prefixes.block_hashes(tokens, "tenant")


def test_insert_moves_reserved_bytes_to_nodes() -> None:
    prefixes = make()
    tokens = list(range(12))
    pin = prefixes.pin(prefixes.find(tokens))
    paid = prefixes.reserve(Kind.TAILS, 1_500)
    before = prefixes.ledger.used_bytes
    prefixes.insert(pin, 0, prefixes.block_hashes(tokens), tokens, Text(tuple(tokens)), paid)
    held = prefixes.ledger.by_class()
    assert (paid.nbytes, held[Kind.TAILS], held[Kind.NODES]) == (300, 300, 1_200)
    assert prefixes.ledger.used_bytes == before + prefixes.index_bytes(3)


def test_follow_adopts_blocks_committed_by_others() -> None:
    """Two sequences prefill one prompt; the second takes over the first's blocks."""
    prefixes = make()
    tokens = list(range(20))
    block_hashes = prefixes.block_hashes(tokens)
    first, second = prefixes.pin(prefixes.find(tokens)), prefixes.pin(prefixes.find(tokens))
    assert prefixes.follow(second, block_hashes, 0) == 0
    commit(prefixes, first, tokens, 0, 2)
    assert prefixes.follow(second, block_hashes, 0) == 2
    commit(prefixes, first, tokens, 2, 4)
    assert prefixes.follow(second, block_hashes[:3], 2) == 3
    assert prefixes.follow(second, block_hashes, 3) == 4
    assert [node.pins for node in second.path] == [2, 2]
    assert [node.hits for node in second.path] == [1, 1]
    assert commit(prefixes, second, tokens, 4, 5) == InsertResult(5, 4)
    assert prefixes.follow(first, block_hashes, 4) == 5
    assert spelled(first) == spelled(second) == tokens


def test_equal_blocks_are_inserted_once() -> None:
    """The second sequence finds them and pays only for its own."""
    prefixes = make()
    tokens = list(range(12))
    first, second = prefixes.pin(prefixes.find(tokens)), prefixes.pin(prefixes.find(tokens))
    commit(prefixes, first, tokens, 0, 3)
    paid = prefixes.reserve(Kind.TAILS, 1_200)
    committed = prefixes.insert(
        second, 0, prefixes.block_hashes(tokens), tokens, Text(tuple(tokens)), paid
    )
    assert committed == InsertResult(3, 0)
    assert paid.nbytes == 1_200
    assert len(prefixes.tree) == 1
    assert spelled(second) == tokens
    prefixes.check()


def test_only_new_blocks_are_inserted() -> None:
    prefixes = make()
    tokens = list(range(20))
    first, second = prefixes.pin(prefixes.find(tokens)), prefixes.pin(prefixes.find(tokens))
    commit(prefixes, first, tokens, 0, 2)
    assert commit(prefixes, second, tokens, 0, 5) == InsertResult(5, 12)
    assert [node.end for node in second.path] == [8, 20]
    assert spelled(second) == tokens
    assert prefixes.tree.tokens == 20


def test_diverging_path_splits_node() -> None:
    prefixes = make()
    tokens = list(range(20))
    other = [*range(8), *range(50, 62)]
    long = put(prefixes, tokens)
    pin = prefixes.pin(prefixes.find(other))
    assert [node.end for node in pin.path] == [20], "nothing is split for a reader"
    assert commit(prefixes, pin, other, 2, 5) == InsertResult(5, 12)
    assert ([node.end for node in pin.path], spelled(pin)) == ([8, 20], other)
    assert ([node.end for node in long.path], spelled(long)) == ([8, 20], tokens)
    assert [node.pins for node in long.path] == [2, 1]
    assert prefixes.counts.copied_bytes == 20 * TOKEN_BYTES


def test_follow_continues_below_split_node() -> None:
    """It ends inside a node that is split, and continues below the other half."""
    prefixes = make()
    other = [*range(8), *range(50, 62)]
    put(prefixes, list(range(20))).release()
    block_hashes = prefixes.block_hashes(other)
    waiting = prefixes.pin(prefixes.find(other))
    put(prefixes, other)
    assert prefixes.follow(waiting, block_hashes, 2) == 5
    assert spelled(waiting) == other
    assert [node.pins for node in waiting.path] == [2, 2]
    (rest,) = [node for node in prefixes.tree if node not in waiting.path]
    assert rest.pins == 0, "what the path has left is not kept"


def test_follow_unpins_split_half_that_is_not_read() -> None:
    """After a split, a pin that ended inside a node keeps only the half that it reads."""
    prefixes = make()
    tokens = list(range(20))
    put(prefixes, tokens).release()
    pin = prefixes.pin(prefixes.find(tokens[:8]))
    put(prefixes, [*range(8), *range(50, 62)]).release()
    assert [node.end for node in pin.path] == [8, 20]
    assert prefixes.follow(pin, prefixes.block_hashes(tokens[:8]), 2) == 2
    assert [node.end for node in pin.path] == [8]


def test_inconsistent_inserts_are_refused_without_change() -> None:
    prefixes = make()
    tokens = list(range(20))
    block_hashes = prefixes.block_hashes(tokens)
    pin = put(prefixes, tokens[:8])
    own = tuple(tokens[8:16])
    paid = prefixes.reserve(Kind.TAILS, 800)
    poor = prefixes.reserve(Kind.TAILS, 799)
    other = prefixes.block_hashes(list(range(50, 70)))
    for blocks, chain, values, segment, pays, message in [
        (2, block_hashes, own[:4], Text(own), paid, "do not make blocks"),
        (2, block_hashes, own, Text(own[:7]), paid, "do not make blocks"),
        (2, block_hashes, (), Text(()), paid, "do not make blocks"),
        (2, block_hashes[:3], own, Text(own), paid, "do not make blocks"),
        (2, block_hashes, own, Text(own), poor, "does not count the segment's 800"),
        (3, block_hashes, own, Text(own), paid, "^2 blocks of the chain are held"),
        (2, other, own, Text(own), paid, "^0 blocks of the chain are held"),
    ]:
        with pytest.raises(ValueError, match=message):
            prefixes.insert(pin, blocks, chain, values, segment, pays)
    with pytest.raises(ValueError, match="not on this chain"):
        prefixes.follow(pin, other, 1)
    pin.release()
    with pytest.raises(ValueError, match="not on the path"):
        prefixes.insert(pin, 2, block_hashes, own, Text(own), paid)
    assert (len(prefixes.tree), prefixes.tree.tokens, paid.nbytes) == (1, 8, 800)
    prefixes.check()


class Small(Text):
    """A segment of the same tokens in a quarter of the bytes."""

    form = "small"

    @property
    def nbytes(self) -> int:
        return TOKEN_BYTES * len(self.content) // 4


def small(text: Text) -> Small:
    return Small(text.content)


def test_segment_of_pinned_node_can_be_exchanged() -> None:
    prefixes = make()
    tokens = list(range(16))
    pin = put(prefixes, tokens)
    match, (node,) = prefixes.find(tokens), pin.path
    before = prefixes.ledger.used_bytes
    assert prefixes.exchange(node, small, 400)
    prefixes.check()
    assert before - prefixes.ledger.used_bytes == 1_200
    assert prefixes.find(tokens).path == match.path == pin.path
    assert pin.path[-1].segment.content == tuple(tokens)
    pin.release()
    assert prefixes.shrink(1) == 400 + node.index_bytes
    prefixes.check()


def test_exchange_needs_memory_for_both_forms_without_eviction() -> None:
    prefixes = make()
    node, _ = (put(prefixes, [seed, *range(11)]).path[-1] for seed in (50, 60))
    with prefixes.reserve(Kind.TAILS, prefixes.ledger.free_bytes - 299):
        assert not prefixes.exchange(node, small, 300)
        assert len(prefixes.tree) == 2
    with prefixes.reserve(Kind.TAILS, prefixes.ledger.free_bytes - 300):
        assert prefixes.exchange(node, small, 300)
    prefixes.check()


def test_failed_exchange_changes_nothing() -> None:
    prefixes = make()
    node = put(prefixes, list(range(8))).path[-1]
    before = prefixes.ledger.used_bytes

    def fails(_: Text) -> Text:
        raise MemoryError

    with pytest.raises(MemoryError):
        prefixes.exchange(node, fails, 100)
    with pytest.raises(ValueError, match="cannot hold 4 tokens"):
        prefixes.exchange(node, lambda text: text.split(4)[0], 400)
    prefixes.check()
    assert prefixes.ledger.used_bytes == before


def test_nodes_of_different_codec_are_not_merged() -> None:
    prefixes = make()
    tokens = list(range(24))
    pin = prefixes.pin(prefixes.find(tokens))
    commit(prefixes, pin, tokens, 0, 2)
    commit(prefixes, pin, tokens, 2, 4)
    first, second = pin.path
    assert prefixes.exchange(first, small, 200)
    assert prefixes.tidy(pin) == 0
    assert prefixes.exchange(second, small, 200)
    assert prefixes.tidy(pin) == 1
    prefixes.check()
    (node,) = pin.path
    assert isinstance(node.segment, Small)


class BreaksApart(Text):
    """A segment that raises out of memory when it is cut or joined."""

    def split(self, at_tokens: int) -> tuple[Self, Self]:
        raise MemoryError

    def join(self, *others: Text) -> Self:
        raise MemoryError


def test_failed_copy_keeps_ledger_exact() -> None:
    prefixes = make()
    tokens = list(range(24))
    block_hashes = prefixes.block_hashes(tokens)
    pin = prefixes.pin(prefixes.find(tokens))
    with prefixes.reserve(Kind.TAILS, 800) as paid:
        prefixes.insert(pin, 0, block_hashes, tokens[:8], BreaksApart(tuple(tokens[:8])), paid)
    commit(prefixes, pin, tokens, 2, 6)
    with pytest.raises(MemoryError):
        prefixes.tidy(pin)
    other = [*range(4), *range(50, 58)]
    with pytest.raises(MemoryError):
        put(prefixes, other)
    prefixes.check()
    prefixes.ledger.check(prefixes.recount())
    assert prefixes.counts.copied_bytes == 0


# ---- room


def fill(prefixes: Prefixes[Text], prompts: int, blocks: int = 1) -> list[Pin[Text]]:
    """Insert unrelated prompts, the least valuable first."""
    return [put(prefixes, [1_000 * i + t for t in range(blocks * SIZE)]) for i in range(prompts)]


NODE = SIZE * TOKEN_BYTES + Prefixes(Ledger(0), block_size=SIZE).index_bytes(1)
"""What a node of one block takes in all."""


def test_make_room_frees_exactly_what_is_evictable() -> None:
    prefixes = make(10 * NODE, remembered=0)
    pins = fill(prefixes, 10)
    assert (prefixes.ledger.free_bytes, prefixes.evictable_bytes) == (0, 0)
    assert prefixes.make_room(0)
    assert not prefixes.make_room(1)
    pins[0].release()
    assert prefixes.evictable_bytes == NODE
    assert not prefixes.make_room(NODE + 1)
    assert prefixes.counts.evicted_nodes == 0, "what cannot succeed costs nobody anything"
    assert prefixes.make_room(NODE)
    assert (prefixes.counts.evicted_nodes, prefixes.counts.evicted_bytes) == (1, 400)
    assert prefixes.make_room(NODE)
    assert prefixes.counts.evicted_nodes == 1, "room that is there is not made again"
    prefixes.check()


class Trimming(NoRelief):
    """Frees parts of pinned nodes, up to a number of bytes."""

    def __init__(self, prefixes: Prefixes[Text], nbytes: int) -> None:
        self._parts = prefixes.ledger.reserve(Kind.TAILS, nbytes)

    @property
    def pinned_bytes(self) -> int:  # type: ignore[override]
        return self._parts.nbytes

    def relieve(self, nbytes: int) -> int:
        freed = min(nbytes, self._parts.nbytes)
        self._parts.resize(self._parts.nbytes - freed)
        return freed


def test_bytes_trimmed_from_pinned_nodes_count_as_room() -> None:
    beside = Beside[Text]()
    prefixes = make(10 * NODE, remembered=0, beside=beside)
    fill(prefixes, 8)
    beside.relief = Trimming(prefixes, 100)
    room = prefixes.ledger.room_bytes
    assert not prefixes.make_room(room + 101)
    assert beside.relief.pinned_bytes == 100
    assert prefixes.make_room(room + 100)
    assert beside.relief.pinned_bytes == 0


@pytest.mark.parametrize(("missing", "split"), [(0, True), (1, False)])
def test_split_needs_memory_for_copy(missing: int, split: bool) -> None:
    prefixes = make(remembered=0)
    put(prefixes, range(20)).release()
    match = prefixes.find(range(8))
    with prefixes.pin(match) as pin:
        needed = 2_000 + prefixes.index_bytes(5) + prefixes.index_bytes(0)
        taken = prefixes.ledger.free_bytes - needed + missing
        with prefixes.ledger.reserve(Kind.WEIGHTS, taken):
            assert prefixes.split(pin, match) is split
            prefixes.ledger.check({**prefixes.recount(), Kind.WEIGHTS: taken})
        assert [node.end for node in pin.path] == ([8] if split else [20])


def test_least_used_is_evicted_first_and_pinned_never() -> None:
    clock = Clock()
    prefixes = make(10 * NODE, remembered=0, clock=clock)
    pins = []
    for i in range(10):
        clock.now += 1
        pins.append(put(prefixes, [1_000 * i + t for t in range(SIZE)]))
    for pin in pins[:4]:
        pin.release()
    clock.now += 1
    prefixes.pin(prefixes.find(range(SIZE))).release()
    assert prefixes.make_room(2 * NODE)
    held = {node.tokens[0] for node in prefixes.tree}
    assert held == {0, *range(3_000, 10_000, 1_000)}


def rows(clock: Clock, count: int = 6) -> tuple[Prefixes[Text], list[list[int]]]:
    """Fill a ledger with unpinned prompts of a node each, one per second."""
    prefixes = make(count * NODE, remembered=0, clock=clock)
    prompts = [[1_000 * i + t for t in range(SIZE)] for i in range(count)]
    for prompt in prompts:
        clock.now += 1
        put(prefixes, prompt).release()
    return prefixes, prompts


def hold(prefixes: Prefixes[Text], prompt: Sequence[int], seconds: float) -> None:
    """Insert a prompt and hold it for some seconds."""
    with prefixes.pin(prefixes.find(prompt)) as pin:
        prefixes.hold(pin, len(prompt), seconds)
    prefixes.check()


def left(prefixes: Prefixes[Text], prompts: list[list[int]]) -> list[int]:
    return [i for i, prompt in enumerate(prompts) if prefixes.find(prompt).tokens]


@pytest.mark.parametrize("held", [True, False])
def test_nodes_on_hold_are_evicted_last(held: bool) -> None:
    """With the negative control: not held, it is evicted first."""
    clock = Clock()
    prefixes, prompts = rows(clock)
    hold(prefixes, prompts[0], 100.0 if held else -1.0)
    for prompt in prompts[1:]:  # ten uses of all others
        for _ in range(10):
            clock.now += 1
            prefixes.pin(prefixes.find(prompt)).release()
    assert prefixes.make_room(NODE)
    assert left(prefixes, prompts) == ([0, 2, 3, 4, 5] if held else [1, 2, 3, 4, 5])
    assert prefixes.make_room(5 * NODE)
    assert left(prefixes, prompts) == ([0] if held else [5])
    assert prefixes.make_room(6 * NODE), "held is a preference: the limit comes first"
    assert len(prefixes.tree) == 0


def test_expired_hold_restores_eviction_order() -> None:
    clock = Clock()
    prefixes, prompts = rows(clock)
    hold(prefixes, prompts[0], 10.0)
    hold(prefixes, prompts[0], 5.0)  # a shorter one takes nothing away
    end = clock.now + 10.0
    for prompt in prompts[1:]:
        clock.now += 1
        prefixes.pin(prefixes.find(prompt)).release()
    clock.now = end - 0.5
    assert prefixes.make_room(NODE)
    assert left(prefixes, prompts) == [0, 2, 3, 4, 5]
    clock.now = end
    assert prefixes.make_room(2 * NODE)
    assert left(prefixes, prompts) == [2, 3, 4, 5]
    prefixes.check()


def test_least_used_node_on_hold_is_evicted_first() -> None:
    clock = Clock()
    prefixes, prompts = rows(clock, 3)
    for prompt in (prompts[1], prompts[0], prompts[2]):
        clock.now += 1
        hold(prefixes, prompt, 100.0)
    assert prefixes.make_room(NODE)
    assert left(prefixes, prompts) == [0, 2]


def test_hold_prevents_merge_and_survives_split() -> None:
    clock = Clock()
    prefixes = make(clock=clock)
    tokens = list(range(40))
    pin = put(prefixes, tokens[:16])
    prefixes.hold(pin, 9, 100.0)  # inside the node: all of it
    assert commit(prefixes, pin, tokens, 4, 10).refused is None
    assert prefixes.tidy(pin) == 0
    pin.release()
    put(prefixes, [*tokens[:8], 99, 99, 99, 99]).release()  # cuts the held node
    prefixes.check()
    views = {(view.start, view.end): view for view in prefixes.views()}
    held = {place: view.held_seconds for place, view in views.items()}
    assert held == {(0, 8): 100.0, (8, 16): 100.0, (8, 12): 0.0, (16, 40): 0.0}
    clock.now = 200.0
    prefixes.shrink(1)
    assert {view.held_seconds for view in prefixes.views()} == {0.0}


def test_merged_node_keeps_later_hold_expiry() -> None:
    clock = Clock()
    prefixes = make(clock=clock)
    tokens = list(range(40))
    pin = put(prefixes, tokens[:16])
    prefixes.hold(pin, 16, 100.0)
    commit(prefixes, pin, tokens, 4, 10)
    prefixes.hold(pin, 40, 50.0)
    assert prefixes.tidy(pin) == 1
    prefixes.check()
    assert [view.held_seconds for view in prefixes.views()] == [100.0]


def test_views_list_parents_before_children() -> None:
    clock = Clock()
    prefixes = make(clock=clock)
    pin = put(prefixes, range(100))
    other = put(prefixes, [*range(48), *range(500, 540)])
    clock.now = 3.0
    views = prefixes.views()
    seen: set[int | None] = {None}
    for view in views:
        assert view.parent in seen
        seen.add(view.id)
    assert sorted((view.start, view.end, view.pins) for view in views) == [
        (0, 48, 2),
        (48, 88, 1),
        (48, 100, 1),
    ]
    assert sum(view.nbytes for view in views) == prefixes.nbytes - prefixes.fixed_bytes
    assert {view.idle_seconds for view in views} == {3.0}
    (head,) = [view for view in views if view.start == 0]
    assert head.tokens == tuple(range(32))
    pin.release(), other.release()


def test_reserve_makes_room_or_reports_missing_bytes() -> None:
    prefixes = make(10 * NODE, remembered=0)
    pins = fill(prefixes, 10)
    pins[0].release()
    with pytest.raises(LedgerFull, match="tails need"):
        prefixes.reserve(Kind.TAILS, NODE + 1)
    with pytest.raises(NeverFits, match="can never fit"):
        prefixes.reserve(Kind.TAILS, 10 * NODE + 1)
    assert prefixes.counts.evicted_nodes == 0
    paid = prefixes.reserve(Kind.TAILS, NODE)
    assert (paid.nbytes, len(prefixes.tree), prefixes.ledger.free_bytes) == (NODE, 9, 0)


def test_insert_without_room_is_refused_with_numbers() -> None:
    prefixes = make(10 * NODE, remembered=0)
    fill(prefixes, 9)
    tokens = list(range(50_000, 50_000 + SIZE))
    block_hashes = prefixes.block_hashes(tokens)
    pin = prefixes.pin(prefixes.find(tokens))
    other = prefixes.ledger.reserve(Kind.WEIGHTS, 1)
    with prefixes.ledger.reserve(Kind.TAILS, 400) as paid:
        index = prefixes.index_bytes(1)
        committed = prefixes.insert(pin, 0, block_hashes, tokens, Text(tuple(tokens)), paid)
        assert (committed.blocks_readable, committed.new_tokens) == (0, 0)
        assert f"{format_bytes(index)} do not fit in the limit" in str(committed.refused)
        assert (paid.nbytes, prefixes.counts.refused) == (400, 1)
        prefixes.check()
        other.release()
        committed = prefixes.insert(pin, 0, block_hashes, tokens, Text(tuple(tokens)), paid)
        assert committed == InsertResult(1, SIZE)
    assert prefixes.ledger.free_bytes == 0


def test_refused_insert_unpins_blocks_not_read() -> None:
    """Blocks that others committed later are released, since they cannot be used."""
    prefixes = make(1_000_000)
    tokens = list(range(24))
    pin = put(prefixes, tokens[:8])
    put(prefixes, tokens[:16]).release()
    own = tuple(tokens[8:])
    with prefixes.ledger.reserve(Kind.TAILS, 1_600) as paid:
        with prefixes.ledger.reserve(Kind.WEIGHTS, prefixes.ledger.free_bytes):
            block_hashes = prefixes.block_hashes(tokens)
            committed = prefixes.insert(pin, 2, block_hashes, own, Text(own), paid)
        assert committed.blocks_readable == 2
        assert "do not fit" in str(committed.refused)
    assert [node.end for node in pin.path] == [8]
    assert prefixes.find(tokens).tokens == 16
    assert prefixes.counts.evicted_nodes == 0
    prefixes.check()


def test_shrink_returns_freed_bytes() -> None:
    prefixes = make(10 * NODE, remembered=0)
    pins = fill(prefixes, 10)
    assert prefixes.shrink(1) == 0, "all is being read"
    for pin in pins[:5]:
        pin.release()
    assert prefixes.shrink(0) == 0
    assert prefixes.shrink(NODE) == NODE
    assert prefixes.shrink(NODE + 1) == 2 * NODE
    assert prefixes.ledger.free_bytes == 3 * NODE
    assert prefixes.shrink(10 * NODE) == 2 * NODE
    assert len(prefixes.tree) == 5
    prefixes.check()


def test_lowered_limit_evicts_nodes() -> None:
    prefixes = make(10 * NODE, remembered=0)
    for pin in fill(prefixes, 10)[:7]:
        pin.release()
    over = prefixes.ledger.set_limit(5 * NODE)
    assert over == 5 * NODE
    assert prefixes.make_room(0)
    assert (prefixes.ledger.free_bytes, len(prefixes.tree)) == (0, 5)
    prefixes.ledger.set_limit(2 * NODE)
    assert not prefixes.make_room(0), "three are being read"
    assert len(prefixes.tree) == 5


def test_other_reservations_reduce_room() -> None:
    prefixes = make(10 * NODE, remembered=0)
    prefixes.ledger.reserve(Kind.WEIGHTS, 7 * NODE)
    for pin in fill(prefixes, 3):
        pin.release()
    put(prefixes, list(range(9_000, 9_000 + SIZE)))
    assert len(prefixes.tree) == 3
    prefixes.ledger.check({**prefixes.recount(), Kind.WEIGHTS: 7 * NODE})
    with pytest.raises(AssertionError, match="weights"):
        prefixes.ledger.check(prefixes.recount())


def test_clear_keeps_pinned_nodes() -> None:
    prefixes = make()
    pins = fill(prefixes, 5)
    pins[0].release()
    pins[1].release()
    prefixes.clear()
    assert len(prefixes.tree) == 3
    for pin in pins:
        pin.release()
    prefixes.clear()
    assert prefixes.nbytes == prefixes.ledger.used_bytes == prefixes.fixed_bytes


def test_check_detects_wrong_ledger_bytes() -> None:
    prefixes = make()
    fill(prefixes, 2)
    for reservation in (prefixes._nodes, prefixes._index):
        reservation.resize(reservation.nbytes + 1)
        with pytest.raises(AssertionError, match="counted"):
            prefixes.check()
        reservation.resize(reservation.nbytes - 1)
    next(iter(prefixes.tree)).segment = Text((1,) * 8)
    with pytest.raises(AssertionError):
        prefixes.check()


# ---- tidying


def test_growing_sequence_leaves_few_nodes_and_copies_little() -> None:
    blocks = 256
    prefixes = make(10_000_000, max_merge_tokens=10_000)
    tokens = list(range(blocks * SIZE))
    pin = prefixes.pin(prefixes.find(tokens))
    most = 0
    for i in range(blocks):
        assert commit(prefixes, pin, tokens, i, i + 1).refused is None
        prefixes.tidy(pin)
        most = max(most, len(pin.path))
    assert most <= log2(blocks) + 1
    assert len(pin.path) == 1
    assert spelled(pin) == tokens
    # A block that completes 2^k copies those: every other one none, the last one all.
    assert prefixes.counts.copied_bytes == blocks * SIZE * TOKEN_BYTES * (log2(blocks) + 1) / 2
    prefixes.ledger.check(prefixes.recount())


def grown(prefixes: Prefixes[Text], *sizes: int) -> Pin[Text]:
    """Return a path of nodes of this number of blocks."""
    tokens = list(range(sum(sizes) * SIZE))
    pin = prefixes.pin(prefixes.find(tokens))
    at = 0
    for blocks in sizes:
        commit(prefixes, pin, tokens, at, at + blocks)
        at += blocks
    return pin


def blocks_of(pin: Pin[Text]) -> list[int]:
    return [len(node.block_hashes) for node in pin.path]


@pytest.mark.parametrize(
    ("sizes", "after", "merges"),
    [
        ((2, 1), [2, 1], 0),
        ((1, 1), [2], 1),
        ((1, 2), [3], 1),
        ((4, 2, 1, 1), [8], 3),
        ((5, 2, 1, 1), [5, 4], 2),
        ((1, 1, 4, 2), [6, 2], 2),
        ((8, 8), [8, 8], 0),
        ((7, 8), [15], 1),
    ],
)
def test_node_merges_into_parent_of_equal_or_smaller_length(
    sizes: tuple[int, ...], after: list[int], merges: int
) -> None:
    prefixes = make(max_merge_tokens=15 * SIZE)
    pin = grown(prefixes, *sizes)
    assert prefixes.tidy(pin) == merges
    assert blocks_of(pin) == after
    assert prefixes.tidy(pin.node) == prefixes.tidy(None) == 0
    prefixes.check()


@pytest.mark.parametrize(
    ("sizes", "after"),
    [
        ((3, 1), [4]),
        ((4, 1), [4, 1]),
        ((8, 2, 1, 1), [8, 4]),
        ((8, 3, 2), [8, 3, 2]),
        ((2, 1, 2), [5]),
    ],
)
def test_node_merges_into_longer_parent_within_span(
    sizes: tuple[int, ...], after: list[int]
) -> None:
    """Small blocks leave no more spans than blocks of a span's size would."""
    prefixes = make(max_merge_tokens=15 * SIZE, span_tokens=4 * SIZE)
    pin = grown(prefixes, *sizes)
    prefixes.tidy(pin)
    assert blocks_of(pin) == after
    prefixes.check()


def test_node_with_other_readers_is_not_merged() -> None:
    prefixes = make()
    pin = grown(prefixes, 1, 1, 1)
    tokens = list(range(3 * SIZE))
    stops = prefixes.pin(prefixes.find(tokens[: 2 * SIZE]))
    assert prefixes.tidy(pin) == 1
    assert blocks_of(pin) == [2, 1]
    branch = put(prefixes, [*tokens[: 2 * SIZE], 9, 9, 9, 9])
    stops.release()
    assert prefixes.tidy(pin) == 0
    branch.release()
    prefixes.shrink(1)
    pin = grown(prefixes, 1, 1, 1, 1)
    assert spelled(pin) == list(range(4 * SIZE))


def test_merge_waits_for_room_without_eviction() -> None:
    prefixes = make(10 * NODE, remembered=0)
    pin = grown(prefixes, 1, 1)
    for other in fill(prefixes, 8):
        other.release()
    spare = prefixes.ledger.free_bytes
    prefixes.shrink(2 * NODE - spare)
    with prefixes.ledger.reserve(Kind.TAILS, 1):
        evicted = prefixes.counts.evicted_nodes
        assert prefixes.tidy(pin) == 0
        assert prefixes.counts.evicted_nodes == evicted
    assert prefixes.ledger.free_bytes == 2 * NODE
    assert prefixes.tidy(pin) == 1
    prefixes.ledger.check(prefixes.recount())


# ---- explaining


def test_explain_reports_eviction_time_and_reason() -> None:
    clock = Clock()
    prefixes = make(20 * NODE, clock=clock, remembered=8)
    tokens = list(range(12))
    most = prefixes.ledger.free_bytes
    acts: dict[Why, tuple[str, Callable[[], object]]] = {
        "limit": ("raise memory_limit", lambda: prefixes.reserve(Kind.TAILS, most).release()),
        "pressure": ("short of memory", lambda: prefixes.shrink(1)),
        "cleared": ("the cache was cleared", prefixes.clear),
    }
    for why, (words, act) in acts.items():
        put(prefixes, tokens).release()
        told = explain(prefixes, [*tokens, 1])
        assert (told.held_tokens, told.evicted_for, told.evicted_seconds_ago) == (12, None, None)
        act()
        clock.now += 30
        told = explain(prefixes, [*tokens, 1])
        assert (told.held_tokens, told.evicted_for, told.evicted_seconds_ago) == (0, why, 30.0)
        assert re.search(f"evicted 30 s ago .*{words}", told.reason)
        other = explain(prefixes, [*tokens, 1], "other").reason
        assert other == "the cache is empty: all of this prompt is new"
    prefixes.ledger.check(prefixes.recount())


def test_explain_knows_every_evicted_block() -> None:
    """A shorter prompt returns; the rest of the longer one is missing."""
    prefixes = make()
    put(prefixes, range(20)).release()
    prefixes.clear()
    put(prefixes, range(8))
    told = explain(prefixes, range(20))
    assert (told.held_tokens, told.evicted_for) == (8, "cleared")
    told = explain(prefixes, [*range(8), 5, 5, 5, 5])
    assert (told.held_tokens, told.evicted_for) == (8, None)
    assert told.reason == "this part is new: 4 tokens from token 8 on, never cached"


def test_explain_says_that_prompt_is_shorter_than_a_block() -> None:
    prefixes = make()
    put(prefixes, range(8)).release()
    short = explain(prefixes, [0, 1, 9])
    assert (short.held_tokens, short.diverges_at) == (0, 2)
    assert short.reason == (
        "the prompt has 3 tokens, and prompts share whole blocks of 4 tokens: "
        "it is too short for one"
    )
    assert explain(prefixes, [0, 1, 9, 9]).reason.startswith("token 2 differs")


def test_explain_names_first_of_equal_branches() -> None:
    prefixes = make()
    for branch in ([5, 5, 5, 5], [6, 6, 6, 6], [5, 7, 7, 7]):
        put(prefixes, [1, 1, 1, 1, *branch])
    none_shared = explain(prefixes, [1, 1, 1, 1, 9, 9, 9, 9])
    assert (none_shared.diverges_at, none_shared.held_token, none_shared.given_token) == (4, 5, 9)
    one_shared = explain(prefixes, [1, 1, 1, 1, 5, 9, 9, 9])
    assert (one_shared.diverges_at, one_shared.held_token) == (5, 5)
    assert explain(prefixes, [1, 1, 1, 1, 6, 6, 9, 9]).held_token == 6


def test_explain_counts_partial_block_only_before_last_token() -> None:
    """The last token is always computed."""
    prefixes = make()
    pin = put(prefixes, range(8))
    root = prefixes.block_hashes(range(8))[-1]
    with prefixes.reserve(Kind.TAILS, 2 * TOKEN_BYTES) as paid:
        prefixes.insert_partial(pin, 2, root, (8, 9), Text((8, 9)), paid)
    held = [explain(prefixes, range(stop)).held_tokens for stop in (10, 11, 12)]
    assert held == [8, 10, 10]


def test_explain_is_uncertain_after_evictions_are_forgotten() -> None:
    prefixes = make(remembered=3)
    put(prefixes, range(20)).release()
    prefixes.clear()
    put(prefixes, range(8))
    told = explain(prefixes, [*range(8), 5, 5, 5, 5])
    assert told.reason.endswith("never cached, or evicted too long ago to be remembered")


def test_eviction_log_is_bounded() -> None:
    evictions = EvictionLog(4)
    block_hashes = [bytes([i]) * 16 for i in range(12)]
    evictions.note(block_hashes[:3], 1.0, "limit")
    evictions.note(block_hashes[4:7], 2.0, "cleared")
    known = [i for i in range(12) if evictions.find(block_hashes[i])]
    assert known == [0, 4, 5, 6], "of a run, its first block is forgotten last"
    evictions.note(block_hashes[:1], 3.0, "pressure")
    assert evictions.find(block_hashes[0]) == Eviction(3.0, "pressure")
    evictions.note(block_hashes, 4.0, "limit")
    assert [i for i in range(12) if evictions.find(block_hashes[i])] == [0, 1, 2, 3]
    nothing = EvictionLog(0)
    nothing.note(block_hashes, 1.0, "limit")
    assert (nothing.nbytes, nothing.find(block_hashes[0])) == (0, None)


@pytest.mark.parametrize("run", [1, 32])
def test_eviction_log_nbytes_match_measured_memory(run: int) -> None:
    gc.collect()
    tracemalloc.start()
    evictions = EvictionLog(5_000)
    for i in range(0, 12_000, run):
        block_hashes = [(i + j).to_bytes(16, "little") for j in range(run)]
        evictions.note(block_hashes, i + 0.5, "limit")
    gc.collect()
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.4 * evictions.nbytes < measured <= evictions.nbytes


# ---- arrays


def columns(first: int, count: int) -> Segment:
    """Return two layers whose keys and values are the token numbers."""
    side = mx.arange(first, first + count, dtype=mx.float32).reshape(1, 1, -1, 1)
    side = mx.repeat(side, 64, axis=3)
    return Segment.cut([(side, side), (side, side)], 0, count)


def test_mlx_memory_stays_within_limit() -> None:
    """Commit, branch inside nodes, merge and evict, and compare MLX's peak."""
    limit = 3_000_000
    prefixes: Prefixes[Segment] = Prefixes(Ledger(limit), block_size=16, max_merge_tokens=256)
    bytes_per_token = columns(0, 16).nbytes // 16
    gc.collect()
    mx.clear_cache()  # what others left there would be handed out, larger than it need be
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    for round_ in range(24):
        first = 10_000 * (round_ // 3)
        tokens = [
            *range(first, first + 64 * (1 + round_ % 3)),
            *range(90_000 + 512 * round_, 10**6),
        ]
        tokens = tokens[:512]
        block_hashes = prefixes.block_hashes(tokens)
        match = prefixes.find(tokens)
        done = match.tokens // 16
        with prefixes.pin(match) as pin:
            del match
            while done < len(block_hashes):
                blocks = min(3, len(block_hashes) - done)
                # Three times: `columns` builds what it cuts the segment from.
                with prefixes.reserve(Kind.TAILS, 3 * blocks * 16 * bytes_per_token) as paid:
                    own = tokens[done * 16 : (done + blocks) * 16]
                    segment = columns(own[0], len(own))
                    paid.resize(segment.nbytes)
                    assert (
                        prefixes.insert(pin, done, block_hashes, own, segment, paid).refused is None
                    )
                    del segment
                done += blocks
                prefixes.tidy(pin)
                prefixes.check()
        prefixes.ledger.check(prefixes.recount())
    assert prefixes.counts.evicted_nodes > 10
    assert prefixes.counts.copied_bytes > limit
    assert mx.get_peak_memory() - start <= limit
    held = prefixes.ledger.by_class()[Kind.NODES]
    assert held <= mx.get_active_memory() - start <= 1.05 * held
    prefixes.clear()
    assert mx.get_active_memory() - start <= 4_096


# ---- many sequences at once, at random


class Account:
    """Compares the bytes of all existing segments with the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.live_bytes = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        held = self.ledger.by_class()
        counted = held[Kind.NODES] + held[Kind.TAILS] + held[Kind.BUFFERS]
        assert self.live_bytes <= counted, f"{self.live_bytes} exist, {counted} are counted"


class Live(Text):
    """Text whose bytes are counted from its creation until Python frees it."""

    account: ClassVar[Account]

    def __init__(self, content: tuple[int, ...]) -> None:
        super().__init__(content)
        self.on = self.account
        self.on.add(self.nbytes)

    def __del__(self) -> None:
        if hasattr(self, "on"):
            self.on.live_bytes -= self.nbytes


@dataclass(eq=False)
class Sequence_:
    """A sequence that prefills: `done` blocks in the tree, then private ones."""

    prompt: tuple[int, ...]
    block_hashes: list[bytes]
    pin: Pin[Live]
    done: int
    paid: Reservation
    run: Live | None = None


BLOCK = 2
LIMIT = 9_000
BRANCHES = [
    tuple(range(16)),
    (*range(6), *range(50, 60)),
    (*range(10), *range(70, 76)),
    *(tuple(range(start, start + 16)) for start in (100, 200, 300, 400)),
]
prompts = st.builds(
    lambda branch, blocks: branch[: blocks * BLOCK], st.sampled_from(BRANCHES), st.integers(1, 8)
)
crowds = st.sampled_from([*[LIMIT] * 5, 0, 199, 200, 399, 1_200, 2_400])


def fours(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=4, max_size=4)


class Machine(RuleBasedStateMachine):
    """Four sequences that read, commit, follow, leave and restart, within one ledger."""

    make: ClassVar[type[Prefixes]] = Prefixes

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = Ledger(LIMIT)
        Live.account = Account(self.ledger)
        self.prefixes: Prefixes[Live] = self.make(
            self.ledger, block_size=BLOCK, clock=self.clock, remembered=1, max_merge_tokens=8
        )
        self.sequences = [self.begin(BRANCHES[0]) for _ in range(4)]

    def begin(self, prompt: tuple[int, ...]) -> Sequence_:
        self.clock.now += 1
        block_hashes = self.prefixes.block_hashes(prompt)
        match = self.prefixes.match(block_hashes)
        told = explain(self.prefixes, prompt)
        assert told.held_tokens == match.tokens
        pin = self.prefixes.pin(match)
        paid = self.ledger.reserve(Kind.TAILS, 0)
        return Sequence_(prompt, block_hashes, pin, match.tokens // BLOCK, paid)

    @rule(at=st.integers(0, 3), prompt=prompts)
    def begin_anew(self, at: int, prompt: tuple[int, ...]) -> None:
        """Finish, abort or preempt a sequence; committed blocks stay."""
        self.leave(self.sequences[at])
        self.sequences[at] = self.begin(prompt)

    def leave(self, one: Sequence_) -> None:
        one.pin.release()
        one.run = None
        one.paid.release()

    @rule(blocks=fours(st.integers(0, 4)), commit=fours(st.booleans()), left=crowds)
    def step(self, blocks: list[int], commit: list[bool], left: int) -> None:
        """Adopt blocks committed by others, compute some, and commit them now or later."""
        for one, count, at_once in zip(self.sequences, blocks, commit, strict=True):
            if one.run is None:
                self._follow(one)
                own = one.prompt[one.done * BLOCK : (one.done + count) * BLOCK]
                with self.crowded(left):
                    self._read(one, own)
            if at_once:
                with self.crowded(left):
                    self._seal(one)

    def _read(self, one: Sequence_, own: tuple[int, ...]) -> None:
        if not own:
            return
        nbytes = TOKEN_BYTES * len(own)
        possible = self.ledger.used_bytes + nbytes - self.prefixes.evictable_bytes
        evicted = self.prefixes.counts.evicted_nodes
        if self.prefixes.make_room(nbytes):
            assert possible <= self.ledger.limit_bytes
            one.paid.resize(nbytes)
            one.run = Live(own)
        else:
            assert possible > self.ledger.limit_bytes
            assert self.prefixes.counts.evicted_nodes == evicted

    def _seal(self, one: Sequence_) -> None:
        if one.run is None:
            return
        run, counts = one.run, self.prefixes.counts
        before = self.prefixes.tree.tokens, counts.evicted_nodes
        known = self.prefixes.match(one.block_hashes).tokens // BLOCK
        committed = self.prefixes.insert(
            one.pin, one.done, one.block_hashes, run.content, run, one.paid
        )
        end = one.done + run.tokens // BLOCK
        if committed.refused is not None:
            assert (committed.blocks_readable, committed.new_tokens) == (one.done, 0)
            assert (self.prefixes.tree.tokens, counts.evicted_nodes) == before
            assert one.paid.nbytes == run.nbytes
            return
        assert committed.blocks_readable == end
        assert committed.new_tokens == max(0, end - known) * BLOCK
        assert one.paid.nbytes == (run.nbytes if known > one.done else 0)
        one.done, one.run = end, None
        del run
        one.paid.resize(0)

    def _follow(self, one: Sequence_) -> None:
        known = self.prefixes.match(one.block_hashes).tokens // BLOCK
        one.done = self.prefixes.follow(one.pin, one.block_hashes, one.done)
        assert one.done == known
        start = one.pin.node.start if one.pin.node else -1
        assert start < one.done * BLOCK, "a node that is not read is pinned"

    @rule(left=crowds)
    def tidy(self, left: int) -> None:
        with self.crowded(left):
            self._tidy()

    def _tidy(self) -> None:
        evicted = self.prefixes.counts.evicted_nodes
        for one in self.sequences:
            nodes = len(self.prefixes.tree)
            while merged := self.prefixes.tidy(one.pin):  # one merge may make room for another
                nodes -= merged
            assert nodes == len(self.prefixes.tree)
            for node in one.pin.path[1:]:
                assert node.parent is not None
                short = len(node.parent.tokens) <= len(node.tokens)
                if short and self.prefixes.tree.can_merge(node.parent):
                    copy = node.parent.held_bytes + node.held_bytes
                    assert self.ledger.free_bytes < copy, "there was room to merge"
        assert self.prefixes.counts.evicted_nodes == evicted

    @rule(at=st.integers(0, 3), blocks=st.integers(0, 8), seconds=st.integers(0, 20))
    def hold(self, at: int, blocks: int, seconds: int) -> None:
        self.prefixes.hold(self.sequences[at].pin, blocks * BLOCK, seconds)

    @rule(nbytes=st.integers(0, 4_000))
    def shrink(self, nbytes: int) -> None:
        used, possible = self.ledger.used_bytes, self.prefixes.evictable_bytes
        freed = self.prefixes.shrink(nbytes)
        assert freed == used - self.ledger.used_bytes >= min(nbytes, possible)

    @contextmanager
    def crowded(self, left: int) -> Iterator[None]:
        """Let other users of the ledger leave only these bytes free, if possible."""
        self.clock.now += 1
        taken = max(0, self.ledger.free_bytes - left)
        with self.ledger.reserve(Kind.CHECKPOINTS, taken):
            yield

    @rule(limit=st.integers(3_000, LIMIT))
    def lower_the_limit(self, limit: int) -> None:
        self.prefixes.shrink(self.ledger.set_limit(limit), "limit")
        over = self.ledger.used_bytes > limit
        assert self.prefixes.evictable_bytes == 0 or not over
        self._seal(self.sequences[0])
        self.all_is_counted()
        assert self.ledger.used_bytes <= limit or over
        self.ledger.set_limit(LIMIT)

    @invariant()
    def all_is_counted(self) -> None:
        self.prefixes.check()
        paid = sum(one.paid.nbytes for one in self.sequences)
        self.ledger.check({**self.prefixes.recount(), Kind.TAILS: paid})
        held = self.ledger.by_class()
        assert Live.account.live_bytes == held[Kind.NODES] + held[Kind.TAILS]
        assert self.prefixes.tree.pins == len(self.sequences)

    @invariant()
    def everyone_reads_its_own_prompt(self) -> None:
        for one in self.sequences:
            read = tuple(t for node in one.pin.path for t in node.segment.content)
            read = read[: one.done * BLOCK]
            assert len(read) == one.done * BLOCK
            run = one.run.content if one.run else ()
            assert (*read, *run) == one.prompt[: len(read) + len(run)]

    def teardown(self) -> None:
        for one in self.sequences:
            self.leave(one)
        self.sequences.clear()
        self.prefixes.clear()
        assert self.ledger.used_bytes == self.prefixes.fixed_bytes
        assert Live.account.live_bytes == 0


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
OFTEN = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=QUIET,
)
HUNT = settings(OFTEN, max_examples=10_000, phases=[Phase.generate])


def test_state_machine_of_many_sequences_keeps_tree_and_ledger_exact() -> None:
    run_state_machine_as_test(Machine, settings=OFTEN)


class CopiesWithoutRoom(Prefixes):
    """Splits and joins without counting the copy."""

    def _copying(self, nbytes: int, index_bytes: int) -> Any:
        return super()._copying(0, 0)


class EvictsInVain(Prefixes):
    """Evicts nodes without checking first whether that suffices."""

    def make_room(self, nbytes: int, why: Any = "limit") -> bool:
        short = self.ledger.used_bytes + nbytes - self.ledger.limit_bytes
        return short <= 0 or self.shrink(short, why) >= short


class StopsOneByteEarly(Prefixes):
    def make_room(self, nbytes: int, why: Any = "limit") -> bool:
        return super().make_room(max(0, nbytes - 1), why)


class ForgetsToSettle(Prefixes):
    """Evicts nodes but still counts them."""

    def _evict(self, node: Any, why: Any) -> int:
        self.tree.remove(node)
        return int(node.held_bytes)


class KeepsPayersBytes(Prefixes):
    """Does not subtract a segment's bytes from the sequence's reservation."""

    def _hang(
        self, pin: Any, block_hashes: Any, values: Any, segment: Any, paid: Reservation
    ) -> None:
        before = paid.nbytes
        super()._hang(pin, block_hashes, values, segment, paid)
        paid.resize(before)


class FollowsToTheEnd(Prefixes):
    """Pins the whole path without releasing the dropped part."""

    def _lead(self, pin: Any, path: Any) -> None:
        for node in path[len(pin.path) :]:
            pin.extend(node)


class FollowsTooFar(Prefixes):
    """Counts the whole last node as read."""

    def follow(self, pin: Any, block_hashes: Any, blocks_done: int) -> int:
        super().follow(pin, block_hashes, blocks_done)
        return int(pin.node.end // self.block_size) if pin.node else 0


class InsertsKnownBlocksAgain(Prefixes):
    """Ignores blocks that others have committed meanwhile."""

    def _match_at_least(self, block_hashes: Any, blocks: int) -> Match[Any]:
        return super()._match_at_least(
            block_hashes[:blocks] if len(block_hashes) < 9 else block_hashes, blocks
        )


class HoldsForEver(Prefixes):
    """Never expires a hold."""

    def hold(self, pin: Any, tokens: int, seconds: float) -> None:
        for node in pin.path:
            node.held_until_seconds = self.clock() + seconds


class NeverTidies(Prefixes):
    def _run_to_merge(self, last: Any) -> list[Any]:
        return [last]


BROKEN = [each for each in Prefixes.__subclasses__() if each.__module__ == __name__]


@pytest.mark.parametrize("broken", BROKEN)
def test_state_machine_detects_defects(broken: type[Prefixes]) -> None:
    machine = type("Broken", (Machine,), {"make": broken})
    with pytest.raises((AssertionError, ValueError, MemoryError, KeyError)):
        run_state_machine_as_test(machine, settings=HUNT)


def test_error_of_refused_insert_mentions_limit() -> None:
    assert re.search(r"2\.00 kB.*limit of 1\.00 MB.*raise memory_limit", make().no_room(2_000))


def test_cached_continuation_is_returned_within_salt() -> None:
    prefixes = make()
    put(prefixes, [*range(12), *range(50, 58)])
    put(prefixes, [*range(8), *range(70, 78)])

    def held_at(tokens: list[int], position: int, salt: str = "") -> list[int]:
        hashes = prefixes.block_hashes(tokens, salt)
        return tokens_held_at(prefixes, tokens, position, hashes, salt).tolist()

    assert held_at([*range(12), 50, 51, 9], 14) == [*range(52, 58)]
    assert held_at([*range(8), 70, 9], 9) == [*range(71, 78)]
    assert held_at([*range(3), 9], 3)[:9] == [*range(3, 8)]
    assert held_at([*range(3), 9], 2) == []
    assert held_at([*range(3), 9], 3, "another tenant") == []
