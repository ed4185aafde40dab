"""Routing policies: the router's index against plain sets."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import WORTH
from penstock.prefix import hash_blocks, root_hash
from penstock.routing import (
    COMMON,
    MOST_ASKED,
    POLICIES,
    RECENT,
    RoutedPrompt,
    Router,
    Summary,
    short,
)

ROOT = root_hash("model")
NAMES = tuple(f"replica {i}" for i in range(4))


def block_hashes(*tokens: int) -> list[bytes]:
    """Return the keys of a prompt of one token a block."""
    return hash_blocks(tokens, 1, ROOT)


def router_of(policy: str, names: tuple[str, ...] = NAMES, seed: int = 0) -> Router:
    made = Router(policy, seed=seed)  # type: ignore[arg-type]
    for name in names:
        made.join(name)
    return made


# ---- summaries


@settings(deadline=None)
@given(st.sets(st.integers(0, 2**32 - 1)))
def test_summary_round_trips(blocks: set[int]) -> None:
    summary = Summary(frozenset(blocks))
    assert Summary.from_bytes(summary.to_bytes()) == summary
    assert len(summary.to_bytes()) == summary.nbytes == 4 * len(blocks)


def test_truncated_summary_is_refused() -> None:
    with pytest.raises(ValueError, match="6 are none"):
        Summary.from_bytes(b"123456")


def test_false_positives_of_summary_are_rare() -> None:
    """200,000 other blocks are looked up among 200,000: 9.3 false hits are expected."""
    held = Summary.of(block_hashes(*range(200_000))).blocks
    others = hash_blocks(range(200_000), 1, root_hash("another"))
    assert sum(short(key) in held for key in others) < 40


# ---- the index, against plain sets

Paths = st.lists(st.integers(0, 2), min_size=0, max_size=5)
Acts = st.lists(
    st.one_of(
        st.tuples(st.just("tell"), st.sampled_from(NAMES), st.lists(Paths, max_size=4)),
        st.tuples(st.just("sent"), st.sampled_from(NAMES), st.lists(Paths, min_size=1, max_size=1)),
        st.tuples(st.just("leave"), st.sampled_from(NAMES), st.just([])),
    ),
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(acts=Acts, asked=st.lists(Paths, max_size=4), policy=st.sampled_from(POLICIES))
def test_router_tracks_reported_and_sent_blocks(
    acts: list[tuple[str, str, list[list[int]]]], asked: list[list[int]], policy: str
) -> None:
    router = router_of(policy)
    told: dict[str, set[bytes]] = {name: set() for name in NAMES}
    sent: dict[str, list[set[bytes]]] = {name: [set(), set()] for name in NAMES}
    for act, name, paths in acts:
        named = {key for path in paths for key in block_hashes(*path)}
        if act == "leave":
            router.leave(name)
            router.join(name)
            told[name], sent[name] = set(), [set(), set()]
        elif act == "tell":
            router.update(name, Summary.of(named))
            told[name], sent[name] = named, [set(), sent[name][0] - named]
        else:
            router.sent(name, block_hashes(*paths[0]))
            sent[name][0] |= named - told[name]
        router.check()
    for path in asked:
        wanted = block_hashes(*path)
        expected = {}
        for name in NAMES:
            held = told[name] | sent[name][0] | sent[name][1]
            known = next((i for i, key in enumerate(wanted) if key not in held), len(wanted))
            if known:
                expected[name] = known
        assert router.known(wanted) == expected
        routed = router.choose(RoutedPrompt(wanted), {})
        assert routed.known_blocks == expected.get(routed.replica, 0)


def test_check_detects_wrong_index() -> None:
    router = router_of("prefix")
    router.update(NAMES[0], Summary.of(block_hashes(1, 2)))
    router.check()
    router._index.pop(short(block_hashes(1)[0]))
    with pytest.raises(AssertionError, match="1 blocks indexed, 2 are held"):
        router.check()


# ---- the policies


@settings(deadline=None)
@given(
    held=st.lists(st.lists(Paths, max_size=3), min_size=4, max_size=4),
    path=Paths,
    loads=st.lists(st.integers(0, 50), min_size=4, max_size=4),
)
def test_prefix_and_load_policy_minimizes_work(
    held: list[list[list[int]]], path: list[int], loads: list[int]
) -> None:
    router = router_of("prefix+load")
    for name, paths in zip(NAMES, held, strict=True):
        router.update(name, Summary.of(key for one in paths for key in block_hashes(*one)))
    wanted = block_hashes(*path)
    known = router.known(wanted)
    by_name = dict(zip(NAMES, map(float, loads), strict=True))
    cost = {name: by_name[name] + WORTH * (len(wanted) - known.get(name, 0)) for name in NAMES}
    routed = router.choose(RoutedPrompt(wanted), by_name)
    assert cost[routed.replica] == min(cost.values())


def test_conversation_sticks_to_replica_and_system_prompt_spreads() -> None:
    """Of equal length, and at equal load."""
    system, own = block_hashes(*range(10)), block_hashes(*range(100, 110))
    loads = {NAMES[0]: 5 * WORTH}
    places = {}
    for what, wanted in (("system", system), ("own", own)):
        router = router_of("prefix+load", NAMES[:2])
        for number in range(RECENT):  # all of its prompts begin so, or one of them does
            others = (
                [*wanted, *block_hashes(number)]
                if what == "system"
                else block_hashes(1_000 + number)
            )
            router.sent(NAMES[0], others if number else wanted)
        router.update(NAMES[0], Summary.of(wanted))
        places[what] = router.choose(RoutedPrompt(wanted), loads).replica
        router.check()
    assert places == {"system": NAMES[1], "own": NAMES[0]}


def test_block_is_not_common_once_its_prompts_are_not_recent() -> None:
    router, common = router_of("prefix+load"), block_hashes(1)
    for _ in range(COMMON - 1):
        router.sent(NAMES[0], common)
    assert router.prices(common) == [WORTH, 0.0]
    router.sent(NAMES[0], common)
    assert router.prices(common) == [1.0, 0.0]
    for number in range(RECENT - 1):
        router.sent(NAMES[0], block_hashes(10 + number))
        assert len(router._uses) <= RECENT + 1
    assert router.prices(common) == [WORTH, 0.0]


@settings(deadline=None)
@given(held=st.lists(st.lists(Paths, max_size=3), min_size=4, max_size=4), path=Paths)
def test_prefix_policy_ignores_load(held: list[list[list[int]]], path: list[int]) -> None:
    router = router_of("prefix")
    for name, paths in zip(NAMES, held, strict=True):
        router.update(name, Summary.of(key for one in paths for key in block_hashes(*one)))
    known = router.known(block_hashes(*path))
    routed = router.choose(RoutedPrompt(block_hashes(*path)), dict.fromkeys(NAMES, 1e9))
    assert routed.known_blocks == max(known.values(), default=0)
    assert routed == router.choose(RoutedPrompt(block_hashes(*path)), {})  # nothing is drawn


@settings(deadline=None)
@given(st.text(max_size=8), st.integers(2, 40), st.data())
def test_hash_policy_moves_only_keys_of_removed_replica(
    cache_key: str, count: int, data: st.DataObject
) -> None:
    names = tuple(f"r{i}" for i in range(count))
    router, other = router_of("hash", names), router_of("hash", names[::-1], seed=1)
    prompt = RoutedPrompt(block_hashes(1, 2, 3), cache_key)
    first = router.choose(prompt, {}).replica
    assert other.choose(prompt, {}).replica == first  # routers agree, in whatever order they heard
    gone = data.draw(st.sampled_from(names))
    router.leave(gone)
    after = router.choose(prompt, {}).replica
    assert after != gone
    assert after == first or gone == first


def test_hash_policy_spreads_keys_evenly() -> None:
    router = router_of("hash")
    drawn = Counter(router.choose(RoutedPrompt([], f"user {i}"), {}).replica for i in range(4_000))
    assert len(drawn) == 4
    assert min(drawn.values()) > 850  # 5 standard deviations


def test_prompt_without_cache_key_hashes_first_blocks() -> None:
    router = Router("hash", hash_blocks=2)
    for name in NAMES:
        router.join(name)
    places = {router.choose(RoutedPrompt(block_hashes(1, 2, i)), {}).replica for i in range(50)}
    assert len(places) == 1
    assert (
        len({router.choose(RoutedPrompt(block_hashes(1, i, 2)), {}).replica for i in range(50)})
        == 4
    )


def test_round_robin_takes_turns() -> None:
    router = router_of("round-robin")
    drawn = [router.choose(RoutedPrompt(block_hashes(1)), {}).replica for _ in range(8)]
    assert drawn == [*NAMES, *NAMES]


def test_unknown_prompts_use_less_loaded_of_two() -> None:
    names = tuple(f"r{i}" for i in range(4 * MOST_ASKED))
    router = router_of("prefix+load", names)
    loads = {name: float(i) for i, name in enumerate(names)}
    rng = random.Random(1)
    drawn = [
        router.choose(RoutedPrompt(block_hashes(rng.randrange(10**6))), loads).replica
        for _ in range(2_000)
    ]
    mean = sum(loads[name] for name in drawn) / len(drawn)
    # The less of two uniform draws is a third of the way up; one draw would be a half.
    assert mean == pytest.approx(len(names) / 3, rel=0.08)


def test_ties_are_broken_by_cached_blocks() -> None:
    router = router_of("prefix+load", NAMES[:2])
    router.update(NAMES[0], Summary.of(block_hashes(*range(50))))
    assert {router.choose(RoutedPrompt(block_hashes(99)), {}).replica for _ in range(20)} == {
        NAMES[1]
    }


def test_empty_router_raises() -> None:
    router = Router("prefix")
    with pytest.raises(LookupError, match="no replica"):
        router.choose(RoutedPrompt(block_hashes(1)), {})
    with pytest.raises(KeyError):
        router.update("nobody", Summary.of(block_hashes(1)))
    with pytest.raises(ValueError, match="round-robin, hash"):
        Router("best")  # type: ignore[arg-type]
    router.leave("nobody")


def test_removed_replica_is_forgotten_and_replaceable() -> None:
    router = router_of("prefix")
    router.update(NAMES[1], Summary.of(block_hashes(1, 2)))
    router.leave(NAMES[1])
    assert router.known(block_hashes(1, 2)) == {}
    assert NAMES[1] not in router.replicas
    router.join("new")
    assert router.known(block_hashes(1, 2)) == {}
    router.update("new", Summary.of(block_hashes(1)))
    assert router.known(block_hashes(1, 2)) == {"new": 1}
    router.check()
