"""Compressed rows stored as token columns: they round trip from any position."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.compressed import CompressedReads, RowReads, Rows, completed
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import RecurrentState

RATIO = 4


def rows_of(width: int = 16, ratio: int = RATIO) -> Rows:
    return Rows("compress_kv", ratio, width, mx.float32, state=0, place=3)


def numbers(count: int, width: int, first: int = 0) -> mx.array:
    """Return rows (1, count, width) of distinct numbers."""
    return mx.arange(first * width, (first + count) * width, dtype=mx.float32).reshape(1, -1, width)


@given(
    width=st.integers(1, 40),
    ratio=st.integers(1, 9),
    count=st.integers(1, 6),
    behind=st.integers(0, 5),
)
def test_rows_round_trip_through_kv_columns(
    width: int, ratio: int, count: int, behind: int
) -> None:
    rows = rows_of(width, ratio)
    tokens = count * ratio + behind
    keys, values = rows.columns(numbers(count, width), tokens)
    shape = rows.shape
    assert keys.shape == (1, shape.kv_heads, tokens, shape.key_dim)
    assert values.shape == (1, shape.kv_heads, tokens, shape.value_dim)
    stop = count * ratio
    found = rows.rows(keys[:, :, :stop], values[:, :, :stop])
    assert mx.array_equal(found, numbers(count, width))
    assert mx.abs(keys[:, :, stop:]).sum() == 0


def test_bytes_per_token_are_share_of_row() -> None:
    assert rows_of(512, 4).shape.nbytes == 512 // 4 * 4
    assert rows_of(3, 4).shape.nbytes == 2 * 4  # at least one number each side


class Kept:
    """A state with the interface of mlx-lm's array cache."""

    def __init__(self, *loose: mx.array | None) -> None:
        self.cache: list[Any] = [None, None, None, *loose]


def step(
    parts: list[KVSpan], position: int, new: int, loose: mx.array | None, *, chunk: bool
) -> tuple[Segment, tuple[mx.array | None, ...], mx.array | None]:
    """Run a step that adds `new` rows, numbered on, as a model would; return the columns of
    twelve tokens, the state that is left, and the rows that the model was given."""
    reads = RowReads(rows_of(), 0, parts, position, chunk=chunk)
    cache = CompressedReads(2, reads, Kept(loose))
    given_rows = cache.compress_kv
    before = 0 if given_rows is None else given_rows.shape[1]
    if new:
        more = numbers(new, 16, before)
        every = more if given_rows is None else mx.concatenate([given_rows, more], axis=1)
        cache.compress_kv = every
    state = cache.leave()
    return Segment((reads.columns(12),), length=12), state, given_rows


def test_aligned_chunk_stores_rows_in_its_kv_columns() -> None:
    first, state, _ = step([], 0, 3, None, chunk=True)
    assert state == (None, None, None, None)
    _, _, found = step([KVSpan(first, 0, 12)], 12, 0, None, chunk=True)
    assert found is not None
    assert mx.array_equal(found, numbers(3, 16))


def test_decoded_rows_are_pending_until_block_is_full() -> None:
    first, _, _ = step([], 0, 1, None, chunk=True)  # six tokens: a row, and two that wait
    parts = [KVSpan(first, 0, 6)]
    _, state, found = step(parts, 7, 1, None, chunk=False)
    assert found is not None and found.shape[1] == 1
    _, state, found = step(parts, 11, 1, state[3], chunk=False)
    assert found is not None and mx.array_equal(found, numbers(2, 16))
    loose = state[3]
    assert loose is not None and mx.array_equal(loose, numbers(2, 16, 1))
    live = RecurrentState((tuple(state),), exclusive=True)
    whole, left = completed(first, live, {0: rows_of()})
    assert left.states == ((None, None, None, None),)
    _, _, found = step([KVSpan(whole, 0, 12)], 12, 0, None, chunk=True)
    assert found is not None and mx.array_equal(found, numbers(3, 16))


def test_rows_of_unaligned_chunk_are_pending() -> None:
    first, _, _ = step([], 0, 0, None, chunk=True)  # two tokens
    _, state, found = step([KVSpan(first, 0, 2)], 2, 2, None, chunk=True)
    assert found is None
    assert state[3] is not None and state[3].shape[1] == 2


def test_step_without_new_rows_has_no_pending_rows() -> None:
    first, _, _ = step([], 0, 3, None, chunk=True)
    _, state, _ = step([KVSpan(first, 0, 12)], 12, 0, None, chunk=False)
    assert state[3] is None


def test_too_many_pending_rows_raise_error() -> None:
    segment, _, _ = step([], 0, 0, None, chunk=True)
    live = RecurrentState(((None, None, None, numbers(4, 16)),), exclusive=True)
    with pytest.raises(AssertionError, match="4 loose rows of 12 tokens"):
        completed(segment, live, {0: rows_of()})


def test_window_cache_keeps_last_tokens() -> None:
    cache = CompressedReads(2, Kept())
    first = cache.update_window(numbers(1, 4))
    second = cache.update_window(numbers(3, 4, 1))
    assert (first.shape[1], second.shape[1]) == (1, 4)
    assert mx.array_equal(cache.window, numbers(2, 4, 2))
    assert cache.offset == 4
