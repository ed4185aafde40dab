"""Eviction policy: the arithmetic against its definition, the queue against sorting."""

from __future__ import annotations

import gc
import random
import tracemalloc
from math import inf, log2

import pytest

from penstock.prefix import HalfLife, PrefillCost
from penstock.prefix.eviction import EvictionQueue
from penstock.prefix.policy import COLD


def pressed(half_life: float, **more: int) -> HalfLife:
    """Return the policy of a small cache: a node was evicted right after its use."""
    policy = HalfLife(half_life, **more)
    policy.used(COLD, 0.0)
    policy.forget(b"any", 0.0, 0.0)
    policy.recall(b"any")
    return policy


def test_recency_score_is_log_of_decayed_uses() -> None:
    policy, uses, heat = pressed(10.0), [0.0, 3.0, 3.0, 17.0, 40.0], COLD
    for now in uses:
        heat = policy.used(heat, now)
    assert heat == pytest.approx(log2(sum(2 ** (at / 10) for at in uses)))


def test_unix_times_do_not_overflow() -> None:
    """Unix time, for which 2^(t / half life) would overflow."""
    policy, now = pressed(1.0), 1.8e9
    once = policy.used(COLD, now)
    assert once == now
    assert policy.used(once, now) == now + 1
    assert policy.used(once, now + 1) == pytest.approx(now + 1 + log2(1.5), abs=1e-6)


def test_eviction_value_is_seconds_saved_per_byte() -> None:
    policy = HalfLife(10.0, cost=PrefillCost(2.0, 0.5))
    base = policy.worth(7.0, 0, 10, 100)
    assert base == pytest.approx(7 + log2((2.0 * 10 + 0.5 * 10**2 / 2) / 100))
    assert policy.worth(7.0, 0, 10, 200) == pytest.approx(base - 1)
    assert policy.worth(8.0, 0, 10, 100) == pytest.approx(base + 1)
    assert policy.worth(7.0, 10, 20, 100) > base
    assert policy.worth(7.0, 0, 10, 0) < inf


def test_prefill_cost_is_additive_over_positions() -> None:
    cost = PrefillCost(1.0, 0.01)
    assert cost.seconds(0, 30) == pytest.approx(30 + 0.01 * 30**2 / 2)
    assert cost.seconds(0, 12) + cost.seconds(12, 30) == pytest.approx(cost.seconds(0, 30))


def test_long_idle_time_reduces_policy_to_lru() -> None:
    policy = HalfLife(10.0)
    assert policy.most_added == 0
    assert policy.used(1e9, 50.0) == 5.0
    policy.forget(b"a", 0.0, 50.0)
    assert policy.most_added == 4
    assert policy.used(1e9, 60.0) == 10.0
    for _ in range(10_000):
        policy.forget(b"a", 0.0, 50.0)
    assert policy.most_added == pytest.approx(2)
    for _ in range(10_000):
        policy.forget(b"a", 0.0, 30.0)
    assert policy.most_added == 0


def test_idle_time_before_eviction_is_a_moving_average() -> None:
    policy = pressed(10.0)
    policy.used(COLD, 20.0)
    policy.forget(b"a", 0.0, 0.0)
    assert policy.most_added == pytest.approx(4 * (1 - 20 / 256 / 20))


def test_recency_score_of_merged_nodes_is_weighted_by_bytes() -> None:
    policy = HalfLife()
    assert 2 ** policy.joined(3.0, 100, 5.0, 300) == pytest.approx((8 + 3 * 32) / 4)
    assert policy.joined(COLD, 100, 5.0, 300) == pytest.approx(5 + log2(3 / 4))
    assert policy.joined(3.0, 0, 5.0, 300) == pytest.approx(5.0)
    assert policy.joined(3.0, 7, 5.0, 0) == pytest.approx(3.0)


def test_recency_of_evicted_node_is_recalled_once() -> None:
    policy = HalfLife(remembered_nodes=2)
    for key, heat in ((b"a", 1.0), (b"b", 2.0), (b"a", 3.0), (b"c", 4.0)):
        policy.forget(key, heat, 0.0)
    assert policy.recall(b"b") == COLD
    assert policy.recall(b"a") == 3.0
    assert policy.recall(b"a") == COLD
    assert len(policy._remembered) == 1
    forgetful = HalfLife(remembered_nodes=0)
    forgetful.forget(b"a", 1.0, 0.0)
    assert forgetful.recall(b"a") == COLD


def test_history_nbytes_match_measured_memory() -> None:
    gc.collect()
    tracemalloc.start()
    policy = HalfLife(remembered_nodes=5_000)
    for i in range(6_000):
        policy.forget(i.to_bytes(16, "big"), i + 0.5, 0.0)
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert measured <= policy.nbytes <= 1.5 * measured


@pytest.mark.parametrize("wrong", [{"half_life_seconds": 0.0}, {"remembered_nodes": -1}])
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HalfLife(**wrong)  # type: ignore[arg-type]


def test_queue_returns_least_valuable_item_after_changes() -> None:
    draw, queue = random.Random(3), EvictionQueue()
    worths: dict[int, float] = {}
    barred: set[int] = set()
    for step in range(6_000):
        act = draw.random()
        if act < 0.3 or not worths:
            worths[step] = draw.random()
            queue.offer(step, worths[step])
        elif act < 0.6:
            item = draw.choice(list(worths))
            lower = draw.random() < 0.3
            worths[item] += -0.3 if lower else 0.3
            if lower:  # a rise need not be told
                queue.offer(item, worths[item])
        elif act < 0.7:
            item = draw.choice(list(worths))
            barred ^= {item}
            if item not in barred:
                queue.offer(item, worths[item])
        else:
            free = [item for item in worths if item not in barred]
            allowed = {item: worths[item] for item in free}
            first = queue.first(allowed.get)
            assert first == min(free, key=lambda item: (worths[item], item), default=None)
            if first is not None and draw.random() < 0.8:
                queue.drop(first)
                del worths[first]
                assert first not in queue
        assert len(queue._heap) <= 2 * len(queue._queued) + 65 + step


def test_queue_length_is_bounded_when_items_are_dropped() -> None:
    queue = EvictionQueue()
    for item in range(10_000):
        queue.offer(item, -float(item))
        queue.drop(item)
    assert len(queue._heap) <= 64


def test_queue_is_ordered_after_compaction() -> None:
    queue = EvictionQueue()
    for item in range(1_000):
        queue.offer(item, -float(item))
    for item in range(1, 1_000, 2):
        queue.drop(item)
    for item in range(500, 1_000, 2):
        queue.drop(item)
    assert len(queue._heap) < 1_000
    left = []
    while (first := queue.first(lambda item: -float(item))) is not None:
        left.append(first)
        queue.drop(first)
    assert left == list(range(498, -1, -2))


def test_requeued_item_is_queued_once() -> None:
    queue = EvictionQueue()
    for worth in (5.0, 7.0, 5.0, inf, -inf, -inf):
        queue.offer(1, worth)
    assert len(queue._heap) == 2
    assert queue.first(lambda item: -inf) == 1
    assert queue.first(lambda item: None) is None
    assert 1 not in queue
