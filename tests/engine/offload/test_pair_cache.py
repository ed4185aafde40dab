"""The cache of spilled blocks against a dict, and its bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.offload.cold_blocks import SLOT_BYTES, PairCache

SPLIT, NBYTES = 3, 5
"""Bytes of a pair's keys, and of both."""


def checksums(numbers: list[int]) -> np.ndarray:
    """Return checksums of pairs of which many share keys or values."""
    return np.array([(n % 3 + 2**63, n // 3) for n in numbers], np.uint64).reshape(-1, 2)


def raw(numbers: list[int]) -> list[np.ndarray]:
    rows = np.array([[n + byte for byte in range(NBYTES)] for n in numbers], np.uint8)
    rows = rows.reshape(-1, NBYTES)
    return [rows[:, :SPLIT], rows[:, SPLIT:]]


@given(
    count=st.integers(1, 8),
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 14), max_size=12, unique=True), st.booleans()),
        max_size=20,
    ),
)
def test_pair_cache_is_lru(count: int, requests: list[tuple[list[int], bool]]) -> None:
    """Some reads fail after the slots were assigned."""
    cache, held = PairCache(count, NBYTES), OrderedDict[int, int]()
    for number, (asked, fails) in enumerate(requests):
        slots = cache.find(checksums(asked))
        assert [pair for pair, slot in zip(asked, slots, strict=True) if slot >= 0] == [
            pair for pair in asked if pair in held
        ]
        for pair, slot in zip(asked, slots, strict=True):
            if slot >= 0:
                assert np.array_equal(cache.room[slot], np.concatenate(raw([pair]), axis=1)[0])
                held[pair] = number
        lacking = [pair for pair in asked if pair not in held]
        free = cache.make_room(len(lacking))
        others = [pair for pair, last in held.items() if last < number]
        assert len(free) == min(len(lacking), count - len(held) + len(others))
        kept = [] if fails else lacking[: len(free)]
        if not fails:
            cache.keep(free, checksums(kept), raw(lacking))
        before = min(held.values(), default=0)
        now = {tuple(pair) for pair in cache.held_checksums().tolist()}
        gone = [pair for pair in held if tuple(checksums([pair])[0].tolist()) not in now]
        assert all(held[pair] < number for pair in gone), "what the request found stays"
        ages = sorted(held.values())[: len(gone)]
        assert sorted(held.pop(pair) for pair in gone) == ages, f"not the oldest since {before}"
        held.update(dict.fromkeys(kept, number))
        assert len(cache) == len(held) <= count
    cache.clear()
    assert len(cache) == 0 and (cache.find(checksums([1, 2])) == -1).all()


def test_empty_pair_cache_has_no_hits() -> None:
    """Not even pairs whose checksums equal the initial memory."""
    cache = PairCache(4, NBYTES)
    assert cache.find(np.zeros((2, 2), np.uint64)).tolist() == [-1, -1]


def test_pair_cache_nbytes_match_its_arrays() -> None:
    cache = PairCache(1_000, 8_192)
    cache.find(checksums(list(range(15))))
    cache.keep(cache.make_room(15), checksums(list(range(15))), [np.zeros((15, 8_192), np.uint8)])
    arrays = [value for value in vars(cache).values() if isinstance(value, np.ndarray)]
    held = sum(sys.getsizeof(array.base if array.base is not None else array) for array in arrays)
    assert cache.room.nbytes < held <= cache.room.nbytes + 1_000 * SLOT_BYTES
