"""Compiled selection loops against the formula, for any split of tokens."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.attention import devices
from penstock.attention.devices import using
from penstock.attention.selection.block_choice import _lacks
from penstock.attention.selection.choice_blocks import (
    BLOCK_TOKENS,
    FIRST_BLOCKS,
    HALF_NOISE,
)
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import halves
from penstock.kv.numpy_arrays import Floats
from penstock.plugins.cpu import choice_loops, compiled
from penstock.plugins.cpu.attending_loops import PLACES
from penstock.plugins.cpu.choice_loops import (
    Addresses,
    ChoiceLoops,
    Sinks,
    SpanTable,
    side_addresses,
)
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.plugins.cpu.index_products import QUERIES, block_product
from penstock.plugins.cpu.tile_products import dot_product_name

pytest.importorskip("numba")
DIMS = 64, 96
"""Sizes of a key: compiled loops are made for each, in seconds. Values have half, and 48 of the
second are held as 64."""
LOOPS = {dim: choice_loops.choice_loops(2 * dim, dim, dim // 2, with_values=True) for dim in DIMS}
WITH_VALUES = KeyIndex(frozenset({0}), with_values=True)
Array = np.ndarray[Any, Any]


def loops(dim: int) -> ChoiceLoops:
    found = LOOPS[dim]
    assert found is not None
    return found


class Spans:
    """Tokens of one layer, cut into spans of which some are views of larger arrays.

    Args:
        sides: keys, values, parts of an index, (heads, tokens, ...) each, or None.
        cuts: where spans begin.
    """

    def __init__(self, sides: Sequence[Array | None], cuts: Sequence[int]) -> None:
        tokens = next(side.shape[1] for side in sides if side is not None)
        self.starts = sorted({0, *(cut for cut in cuts if cut < tokens), tokens})
        self._held: list[Array] = []
        rows = [
            [side_addresses(self._cut(side, *ends, number)) for side in sides]
            + [side_addresses(None)] * (PLACES + 1 - len(sides))
            for number, ends in enumerate(pairwise(self.starts))
        ]
        self.table = SpanTable(np.array(self.starts, np.int64), np.array(rows, np.int64))

    def _cut(self, side: Array | None, first: int, last: int, number: int) -> Array | None:
        if side is None:
            return None
        around = np.full((side.shape[0], last - first + 5, *side.shape[2:]), 77, side.dtype)
        around[:, 2 : last - first + 2] = side[:, first:last]
        view = around[:, 2 : last - first + 2]
        self._held.append(np.ascontiguousarray(view) if number % 2 else view)
        return self._held[-1]


cuts = st.lists(st.integers(1, 300), max_size=5)


def best_by_block(whole: Array, units: Array, codes: Array, sizes: Array) -> Floats:
    """Return the largest product of each block, doubled."""
    bits = np.unpackbits(codes, axis=-1, bitorder="little").astype(np.float64) * 2 - 1
    numbers = bits[..., ::2] + 2 * bits[..., 1::2]
    with np.errstate(invalid="ignore"):
        products = (whole.astype(np.float64) @ numbers.swapaxes(1, 2)) * sizes[:, None]
        best = products.reshape(*products.shape[:2], -1, BLOCK_TOKENS).max(axis=-1) * units
    return best.astype(np.float32)


def worst_of(best: Floats, chosen: Addresses) -> float:
    """Return how much the share of the best unselected block is above the worst selected one's.

    Shares are compared by their logarithms.
    """
    wanted = np.log(-np.array(_lacks(mx.array(best))))
    inside = np.zeros(wanted.shape, bool)
    np.put_along_axis(inside, chosen - FIRST_BLOCKS, True, axis=1)
    out = np.where(inside, -np.inf, wanted).max(axis=1)
    return float((out - np.where(inside, wanted, np.inf).min(axis=1)).max())


@settings(max_examples=80)
@given(
    st.sampled_from(DIMS), st.integers(1, 3), st.integers(1, 9), st.integers(2, 15),
    cuts, st.sampled_from(["finite", "size", "query"]), st.integers(0, 99),
)  # fmt: skip
def test_selected_blocks_match_formula(
    dim: int, heads: int, m: int, blocks: int, cuts: list[int], odd: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    tokens = (FIRST_BLOCKS + blocks) * BLOCK_TOKENS
    x = np.rint(15 * draw.normal(size=(heads, m, dim))).astype(np.float32)
    x[..., draw.integers(dim)] = draw.choice([-127, 127])
    units = draw.uniform(0.01, 0.1, (heads, m, 1)).astype(np.float32)
    codes = draw.integers(0, 256, (heads, tokens, dim // 4)).astype(np.uint8)
    sizes = (1e-3 * draw.gamma(2.0, size=(heads, tokens))).astype(np.float16)
    sizes[:, ::7] *= np.float16(1e-3)  # subnormal
    if odd == "size":
        sizes[0, tokens // 2] = np.finfo(np.float16).max
    if odd == "query":
        x[0, 0] = np.nan
    count = int(draw.integers(1, blocks))
    best = best_by_block(x, units, codes, sizes)
    spans = Spans([None, None, codes.view(np.uint32), sizes], cuts)
    chosen = loops(dim).choose(x, units, spans.table, FIRST_BLOCKS + blocks, count)
    assert np.all(np.diff(chosen, axis=1) > 0) and chosen.shape == (heads, count)
    assert chosen.min() >= FIRST_BLOCKS and chosen.max() < FIRST_BLOCKS + blocks
    assert odd == "query" or worst_of(best, chosen) <= 1e-5
    of_heads = [
        loops(dim).choose(
            x[half], units[half], spans.table, FIRST_BLOCKS + blocks, count, half.start
        )
        for half in halves(heads)
    ]
    assert np.array_equal(np.concatenate(of_heads), chosen)


@pytest.mark.parametrize("words", [2, 4, 6, 8, 16])
def test_block_scores_are_bit_identical_on_any_instruction_set(words: int) -> None:
    from numba import njit

    draw = np.random.default_rng(words)
    codes = draw.integers(0, 256, (1, BLOCK_TOKENS, 4 * words)).astype(np.uint8)
    sizes = draw.gamma(2.0, size=(1, BLOCK_TOKENS)).astype(np.float16)
    whole = draw.integers(-127, 128, (1, 4, 16 * words))
    by_place = whole.reshape(4, words, 4, 4).transpose(0, 3, 1, 2)  # bytes of a shift together
    packed = np.ascontiguousarray(by_place.astype(np.int8)).view(np.uint32)
    less = 3 * whole[0].sum(axis=1).astype(np.int32)
    expected = best_by_block(whole, np.ones((1, 4, 1), np.float32), codes, sizes)[0, :, 0]
    own = dot_product_name()
    for name in {"plain", own} | ({"avx2"} if own == "vnni" else set()):
        for queries in QUERIES:
            multiply, out = block_product(words, queries, name), np.empty(4, np.float32)

            @njit
            def call(codes, sizes, x, less, into, stride):  # type: ignore[no-untyped-def]
                multiply(codes, sizes, x, less, into, stride)  # noqa: B023 - called at once

            for first in range(0, 4, queries):
                x, off, into = (
                    part[first:].ctypes.data for part in (packed.reshape(4, -1), less, out)
                )
                call(codes.ctypes.data, sizes.ctypes.data, x, off, into, np.int64(4))
            assert np.array_equal(out, expected), (name, queries)
            less[0] += 1
            call(codes.ctypes.data, sizes.ctypes.data, packed.ctypes.data, less.ctypes.data,
                 out.ctypes.data, np.int64(4))  # fmt: skip
            less[0] -= 1
            assert out[0] != expected[0], "negative control"


def test_check_detects_changed_sign_or_scale() -> None:
    draw = np.random.default_rng(1)
    tokens = 64 * BLOCK_TOKENS
    x = np.rint(15 * draw.normal(size=(1, 4, 64))).astype(np.float32)
    units = np.full((1, 4, 1), 0.05, np.float32)
    codes = draw.integers(0, 256, (1, tokens, 16)).astype(np.uint8)
    sizes = np.ones((1, tokens), np.float16)
    sizes[:, ::3] *= 2
    best = best_by_block(x, units, codes, sizes)
    rolled = np.roll(sizes, 1, axis=1)
    for wrong in ((codes, sizes), (codes ^ np.uint8(16), sizes), (codes, rolled)):
        spans = Spans([None, None, wrong[0].view(np.uint32), wrong[1]], [20])
        same = worst_of(best, loops(64).choose(x, units, spans.table, 64, 30)) <= 1e-5
        assert same == (wrong[0] is codes and wrong[1] is sizes)


@settings(max_examples=80)
@given(
    st.sampled_from(DIMS), st.integers(1, 3), st.integers(1, 5), cuts,
    st.integers(2, 20), st.integers(1, 40), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_selected_blocks_are_read_exactly(
    dim: int, heads: int, m: int, cuts: list[int], recent: int, behind: int, sunk: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    tokens = recent * BLOCK_TOKENS + behind
    keys = draw.normal(size=(heads, tokens, dim)).astype(np.float32)
    values = draw.normal(size=(heads, tokens, dim // 2)).astype(np.float32)
    queries = draw.normal(size=(heads, m, dim)).astype(np.float32)
    sinks = 3 * draw.normal(size=(heads, m)).astype(np.float32) if sunk else None
    read = int(draw.integers(1, recent - FIRST_BLOCKS + 1))
    chosen = np.stack(
        [np.sort(draw.permutation(recent - FIRST_BLOCKS)[:read]) for _ in range(heads)]
    )
    blocks = chosen + FIRST_BLOCKS
    spans = Spans([keys, values, None, None], cuts)
    below = None if sinks is None else Sinks(sinks)
    out = loops(dim).attend(queries, spans.table, blocks, recent, below)
    for head in range(heads):
        number = np.arange(tokens) // BLOCK_TOKENS
        seen = (number < FIRST_BLOCKS) | (number >= recent) | np.isin(number, blocks[head])
        scores = queries[head].astype(np.float64) @ keys[head, seen].T
        below = 0 if sinks is None else np.exp(sinks[head].astype(np.float64))[:, None]
        weights = np.exp(scores)
        true = weights @ values[head, seen] / (weights.sum(axis=1, keepdims=True) + below)
        assert np.allclose(out[head], true, atol=1e-5)
    of_heads = [
        loops(dim).attend(
            queries[half], spans.table, blocks[half], recent,
            None if sinks is None else Sinks(sinks[half]), half.start,
        )
        for half in halves(heads)
    ]  # fmt: skip
    assert np.array_equal(np.concatenate(of_heads), out)
    below = None if sinks is None else Sinks(sinks)
    check_spilled(loops(dim), queries, keys, values, cuts, blocks, recent, below)


@pytest.mark.parametrize("dim", DIMS)
def test_float16_blocks_match_same_values_in_float32(dim: int) -> None:
    draw, recent = np.random.default_rng(dim), 9
    halved = [
        draw.normal(size=(2, recent * BLOCK_TOKENS + 11, width)).astype(np.float16)
        for width in (dim, dim // 2)
    ]
    queries = draw.normal(size=(2, 6, dim)).astype(np.float32)
    blocks = np.array([[3, 5], [2, 7]])
    outputs = []
    for dtype in (np.float16, np.float32):
        sides = [side.astype(dtype) for side in halved]
        spans = Spans([*sides, None, None], [20, 75, 90])
        given = queries, spans.table, blocks, recent, None
        outputs.append(loops(dim).attend(*given, nbytes=np.dtype(dtype).itemsize))
    assert np.array_equal(*outputs)
    assert np.abs(outputs[0]).max() > 0.1


def check_spilled(
    loops: ChoiceLoops, queries: Floats, keys: Array, values: Array, cuts: Sequence[int],
    blocks: Addresses, recent: int, sinks: Sinks | None,
) -> None:  # fmt: skip
    """Check that blocks of every other span are read from their loaded copies."""
    aligned = [cut // BLOCK_TOKENS * BLOCK_TOKENS for cut in cuts]
    spans, own = Spans([keys, values], aligned), []
    count, (heads, tokens, _) = -(-keys.shape[1] // BLOCK_TOKENS), keys.shape
    expected = loops.attend(queries, spans.table, blocks, recent, sinks)
    numbers = np.arange(heads * count, dtype=np.uint64).reshape(heads, count)
    checksums = np.stack([~numbers, numbers + np.uint64(7)], axis=-1)
    for number, (first, last) in enumerate(pairwise(spans.starts)):
        if number % 2 == 0:
            inside = slice(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS))
            parts = [np.ascontiguousarray(checksums[:, inside, side]) for side in (0, 1)]
            places = np.tile(np.arange(count, dtype=np.int32)[inside], (heads, 1))
            own.append([*parts, places])
            spans.table.sides[number] = 0
            for row, part in zip((0, 1, PLACES), own[-1], strict=True):
                spans.table.sides[number, row] = side_addresses(part)
    assert spans.table.is_spilled
    located = loops.locate(spans.table, blocks, recent)
    recents = np.tile(np.arange(recent, count), (heads, 1))
    read = np.concatenate([np.tile(np.arange(FIRST_BLOCKS), (heads, 1)), blocks, recents], axis=1)
    at = np.searchsorted(spans.starts, read * BLOCK_TOKENS, "right") - 1
    assert np.array_equal(located.places, np.where(at % 2 == 0, read, -1))
    gone, of = at % 2 == 0, np.arange(heads)[:, None]
    assert np.array_equal(located.checksums[gone], checksums[of, read][gone])
    # Where they were fetched to, each block alone; what is behind the last token is never read.
    behind = ((0, 0), (0, count * BLOCK_TOKENS - tokens), (0, 0))
    fetched = [np.pad(side, behind, constant_values=np.nan) for side in (keys, values)]
    addresses = np.zeros((*read.shape, 2), np.int64)
    for side, padded in enumerate(fetched):
        start, stride = side_addresses(padded)
        addresses[..., side] = start + of * stride + read * BLOCK_TOKENS * padded.strides[1]
    addresses[~gone] = 1  # nowhere
    out = loops.attend(queries, spans.table, blocks, recent, sinks, 0, addresses)
    assert np.array_equal(out, expected)
    addresses[..., 1] = np.where(gone, addresses[..., 1].min(where=gone, initial=2**62), 1)
    wrong = loops.attend(queries, spans.table, blocks, recent, sinks, 0, addresses)
    same = len({int(block) for block in read[gone]}) <= 1 and heads == 1
    assert same or not np.array_equal(wrong, expected), "negative control"


@settings(max_examples=80)
@given(
    st.sampled_from(DIMS), st.integers(1, 3), st.integers(1, 9), cuts,
    st.integers(2, 150), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_unselected_blocks_are_read_from_index(
    dim: int, heads: int, m: int, cuts: list[int], stop: int, odd: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    tokens, value_dim = stop * BLOCK_TOKENS, dim // 2
    keys = 3 * draw.normal(size=(1, heads, tokens, dim)).astype(np.float32)
    values = draw.normal(size=(1, heads, tokens, value_dim)).astype(np.float32)
    queries = draw.normal(size=(heads, m, dim)).astype(np.float32) / dim**0.5
    with using(CPUBackend()):
        coded = WITH_VALUES.of(mx.array(keys), mx.array(values), 0, 0, devices.current())
    parts = [np.array(part)[0] for part in coded.parts]
    if odd:
        parts[1][0, -1] = np.inf
        coded = replace(coded, parts=tuple(mx.array(part)[None] for part in parts))
    spans = Spans([None, None, *parts], cuts)
    count = int(draw.integers(0, stop - FIRST_BLOCKS + 1))
    blocks = FIRST_BLOCKS + np.stack(
        [np.sort(draw.permutation(stop - FIRST_BLOCKS)[:count]) for _ in range(heads)]
    )
    squares = np.square(queries).sum(axis=-1)
    x = WITH_VALUES.transform_query(queries)
    sums, mean = loops(dim).rest(x, squares, spans.table, stop, blocks)
    mean = WITH_VALUES.inverse_transform(mean, value_dim)
    held_keys, held_values = WITH_VALUES.sides(coded, value_dim)
    near = np.array(held_keys.score(mx.array(queries), devices.current())).astype(np.float64)
    sizes = parts[1].astype(np.float64)[:, None]
    near -= HALF_NOISE * squares[..., None] * sizes**2
    wide = np.array(held_values.dequantize(devices.current()))[0]
    for head in range(heads):
        number = np.arange(tokens) // BLOCK_TOKENS
        seen = (number >= FIRST_BLOCKS) & ~np.isin(number, blocks[head])
        seen &= np.isfinite(parts[1][head])
        if not seen.any():
            assert np.all(sums[head] < -1e20) and np.isfinite(mean).all()
            continue
        weights = np.exp(near[head][:, seen])
        assert np.allclose(sums[head], np.log(weights.sum(axis=1)), atol=0.02)
        true = weights @ wide[head, seen] / weights.sum(axis=1, keepdims=True)
        assert np.allclose(mean[head], true, atol=0.02 * np.abs(wide[head]).max())
    of_heads = [
        loops(dim).rest(x[half], squares[half], spans.table, stop, blocks[half], half.start)
        for half in halves(heads)
    ]
    assert np.array_equal(np.concatenate([part[0] for part in of_heads]), sums)


def test_extra_softmax_term_is_weighted_into_result() -> None:
    draw = np.random.default_rng(3)
    keys, values = draw.normal(size=(2, 2, 64, 64)).astype(np.float32)
    queries = draw.normal(size=(2, 3, 64)).astype(np.float32) / 8
    beside = Sinks(
        draw.normal(size=(2, 3)).astype(np.float32),
        draw.normal(size=(2, 3, 32)).astype(np.float32),
    )
    spans = Spans([keys, values[..., :32], None, None, None, None], [])
    blocks = np.array([[1], [1]])
    out = loops(64).attend(queries, spans.table, blocks, 2, beside)
    weights = np.exp(queries @ keys.swapaxes(1, 2))
    term = np.exp(beside.scores)[..., None]
    assert beside.values is not None
    mixed = weights @ values[..., :32] + term * beside.values
    assert np.allclose(out, mixed / (weights.sum(axis=-1, keepdims=True) + term), atol=1e-5)
    alone = loops(64).attend(queries, spans.table, blocks, 2, Sinks(beside.scores))
    assert not np.allclose(out, alone, atol=1e-2)


def test_exp_matches_numpy() -> None:
    top = np.float32(3)
    values = 3 + np.concatenate([-np.geomspace(1e-6, 86, 5_000), [0.0]]).astype(np.float32)
    true = np.exp((values - top).astype(np.float64))
    total = compiled.exp_loop()(values, top)
    assert np.abs(values / true - 1).max() < 2e-6
    assert total == pytest.approx(true.sum(), rel=1e-5)
    ends = np.array([-88, -1e30, -np.inf], np.float32)
    compiled.exp_loop()(ends, np.float32(0))
    assert np.all((ends >= 0) & (ends < 1e-37))


def test_compiled_loops_require_numba(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None in `sys.modules` makes the import fail."""
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled.has_numba.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert choice_loops.choice_loops(128, 64, 64) is None
        assert "uses MLX's operations, not compiled loops" in caplog.text
    finally:
        compiled.has_numba.cache_clear()


@pytest.mark.parametrize("lanes", [1, 2])
def test_divided_tasks_return_results_in_order(lanes: int) -> None:
    device = CPUBackend(lanes=lanes)
    for count in range(5):
        assert device.divide(lambda x: x * x, range(count)) == [x * x for x in range(count)]
    with pytest.raises(ZeroDivisionError):
        device.divide(lambda x: 1 // x, [1, 0])


@pytest.mark.parametrize("device", [CPUBackend(lanes=2), CPUBackend(lanes=1)])
def test_lane_runs_tasks_while_caller_is_busy(device: CPUBackend) -> None:
    """All tasks if the caller takes long; an error on either side waits for the other."""
    begun, caller = threading.Event(), threading.current_thread()
    threads: list[threading.Thread] = []

    def note(number: int) -> int:
        threads.append(threading.current_thread())
        begun.set()
        return number

    def meanwhile() -> None:
        assert device.lanes == 1 or begun.wait(10.0)

    assert device.divide(note, [7], meanwhile) == [7]
    assert (threads == [caller]) is (device.lanes == 1)
    threads.clear()
    with pytest.raises(ZeroDivisionError):
        device.divide(note, range(40), lambda: 1 // 0)
    assert len(threads) == (40 if device.lanes == 2 else 0), "it is done with what it was given"
