"""Compiled loops of a choice against NumPy's passes and the formula, however tokens are cut."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv import choice_loops, sign_products
from penstock.kv.backend import CPUBackend
from penstock.kv.choice_loops import BLOCK_TOKENS, ArrayAddress, ChoiceLoops, SpanAddresses
from penstock.kv.selection import halves

pytest.importorskip("numba")
LOOPS = {dim: choice_loops.choice_loops(dim, dim // 2) for dim in (32, 64, 96, 128)}


def loops(dim: int) -> ChoiceLoops:
    found = LOOPS[dim]
    assert found is not None
    return found


def spans(array: np.ndarray[Any, Any], cuts: Sequence[int], start: int = 0) -> SpanAddresses:
    """Cut an array (heads, tokens, ...) into several, some of which are views of larger ones."""
    ends = sorted({0, *(cut for cut in cuts if cut < array.shape[1]), array.shape[1]})
    pieces = []
    for number, (first, last) in enumerate(pairwise(ends)):
        around = np.zeros((array.shape[0], last - first + 5, *array.shape[2:]), array.dtype)
        around[:, 2 : last - first + 2] = array[:, first:last]
        view = around[:, 2 : last - first + 2]
        pieces.append(ArrayAddress.of(np.ascontiguousarray(view) if number % 2 else view))
    return SpanAddresses.of(pieces, [start + end for end in ends])


cuts = st.lists(st.integers(1, 300), max_size=5)


@settings(max_examples=60)
@given(
    st.sampled_from([32, 64, 96, 128]), st.integers(1, 3), st.integers(1, 9), st.integers(1, 15),
    cuts, st.sampled_from(["finite", "size", "query"]), st.integers(0, 99),
)  # fmt: skip
def test_scores_of_blocks_have_the_bits_of_numpy(
    dim: int, heads: int, m: int, blocks: int, cuts: list[int], odd: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    tokens = blocks * BLOCK_TOKENS
    x = draw.normal(size=(heads, m, dim)).astype(np.float32)
    codes = draw.integers(0, 256, (heads, tokens, dim // 8)).astype(np.uint8)
    sizes = draw.gamma(2.0, size=(heads, tokens)).astype(np.float16)
    if odd == "size":
        sizes[0, tokens // 2] = np.inf
    if odd == "query":
        x[0, 0, :2] = np.nan, np.inf
    true = sign_products.best_by_block(x, codes, sizes, BLOCK_TOKENS)
    parts = spans(codes.view(np.uint32), cuts), spans(sizes, cuts)
    found = loops(dim).best_by_block(x, *parts)
    assert np.array_equal(found, true, equal_nan=True)
    of_heads = [
        loops(dim).best_by_block(x[half], *(part.of_heads(half) for part in parts))
        for half in halves(heads)
    ]
    assert np.array_equal(np.concatenate(of_heads), true, equal_nan=True)


def test_the_comparison_sees_a_sign_and_a_size() -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(1, 4, 64)).astype(np.float32)
    codes = draw.integers(0, 256, (1, 64, 8)).astype(np.uint8)
    sizes = np.ones((1, 64), np.float16)
    true = sign_products.best_by_block(x, codes, sizes, BLOCK_TOKENS)
    other, larger = codes ^ np.uint8(1), sizes * np.float16(1.5)
    for wrong in ((other, sizes), (codes, larger)):
        parts = spans(wrong[0].view(np.uint32), [20]), spans(wrong[1], [20])
        assert not np.array_equal(loops(64).best_by_block(x, *parts), true)


@settings(max_examples=60)
@given(
    st.sampled_from([32, 64, 96, 128]), st.integers(1, 3), st.integers(1, 5), cuts,
    st.integers(1, 300), st.integers(0, 99),
)  # fmt: skip
def test_blocks_are_read_exactly_where_they_lie(
    dim: int, heads: int, m: int, cuts: list[int], tokens: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    keys = draw.normal(size=(heads, tokens, dim)).astype(np.float32)
    values = draw.normal(size=(heads, tokens, dim // 2)).astype(np.float32)
    queries = draw.normal(size=(heads, m, dim)).astype(np.float32)
    count = -(-tokens // BLOCK_TOKENS)
    read = draw.integers(1, count + 1)
    blocks = np.stack([np.sort(draw.permutation(count)[:read]) for _ in range(heads)])
    scores = loops(dim).score(queries, spans(keys, cuts), blocks)
    columns = (blocks[..., None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(heads, 1, -1)
    there = np.broadcast_to(columns < tokens, scores.shape)
    wide = np.einsum("hqd,htd->hqt", queries.astype(np.float64), keys.astype(np.float64))
    true = np.take_along_axis(wide, np.minimum(columns, tokens - 1), axis=2)
    assert np.allclose(scores[there], true[there], atol=1e-4)
    assert np.all(np.isneginf(scores[~there]))
    weights = np.where(there, draw.random(scores.shape), 0).astype(np.float32)
    mixed = loops(dim).mix(weights, spans(values, cuts), blocks)
    taken = values[np.arange(heads)[:, None], np.minimum(columns[:, 0], tokens - 1)]
    assert np.allclose(mixed, weights.astype(np.float64) @ taken, atol=1e-4)


def test_without_numba_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None in the place of a module is an import that fails."""
    monkeypatch.setitem(sys.modules, "numba", None)
    choice_loops._has_numba.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert choice_loops.choice_loops(64, 64) is None
        assert "read by NumPy" in caplog.text
    finally:
        choice_loops._has_numba.cache_clear()


@pytest.mark.parametrize("lanes", [1, 2])
def test_tasks_are_divided_and_keep_their_order(lanes: int) -> None:
    device = CPUBackend(lanes=lanes)
    for count in range(5):
        assert device.divide(lambda x: x * x, range(count)) == [x * x for x in range(count)]
    with pytest.raises(ZeroDivisionError):
        device.divide(lambda x: 1 // x, [1, 0])
