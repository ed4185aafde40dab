"""Ordered attention: a softmax that is bit-identical for any chunks and batches."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.plugins.cpu.attention_tiles import BLOCK_TOKENS
from penstock.plugins.cpu.compiled import has_numba
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.plugins.cpu.ordered_attention import attend_buffer, attend_step
from penstock.plugins.cpu.ordered_loops import BLOCKS_OF_WAVE, item_groups

pytestmark = pytest.mark.skipif(not has_numba(), reason="the loop is compiled by Numba")
HEADS, KV_HEADS, DIM, VALUE_DIM, COLUMNS = 6, 2, 40, 24, 275
SCALE = 0.2
ALL, NEAR = AttentionWindow(), AttentionWindow(20)
KEEPING = [AttentionWindow(20, keep=6), AttentionWindow(30, keep=140)]
"""Windows that keep columns of the first block, and of the second one, too."""


def drawn(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape, np.float32))


QUERIES = drawn(1, HEADS, COLUMNS, DIM)
KEYS, VALUES = drawn(1, KV_HEADS, COLUMNS, DIM), drawn(1, KV_HEADS, COLUMNS, VALUE_DIM)


def whole(window: AttentionWindow = ALL, soft_cap: float = 0.0) -> np.ndarray:
    mixed = attend_buffer(QUERIES, KEYS, VALUES, SCALE, window=window, soft_cap=soft_cap)
    assert mixed is not None
    return np.array(mixed)


def step_over(
    cuts: list[list[int]], ends: list[int], width: int, window: AttentionWindow
) -> np.ndarray:
    """Attend with rows to their first `ends` columns in spans, then `width` new ones."""
    tails = Tails(len(cuts), 16, (LayerShape(KV_HEADS, DIM, VALUE_DIM, mx.float32),))
    tails.ready()
    rows, queries = [], []
    for slot, (inner, end) in enumerate(zip(cuts, ends, strict=True)):
        parts, at = [], 0
        for cut in inner:
            layer = tuple(mx.contiguous(side[:, :, at:cut]) for side in (KEYS, VALUES))
            parts.append(KVSpan(Segment((layer,)), at, cut - at))  # type: ignore[arg-type]
            mx.eval(*layer)
            at = cut
        own = slice(at, end + width)
        tails.write_block(0, slot, 0, KEYS[:, :, own], VALUES[:, :, own])
        rows.append(DecodeRow(tuple(parts), end, slot, end - at))
        queries.append(QUERIES[:, :, end : end + width])
    step = DecodeStep.of(CPUBackend(), rows, tails, width)
    mixed = attend_step(step, 0, window, mx.concatenate(queries), SCALE)
    assert mixed is not None
    return np.array(mixed)


@pytest.mark.parametrize("window", [ALL, NEAR, *KEEPING])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_attention_matches_causal_softmax(window: AttentionWindow, soft_cap: float) -> None:
    keys, values = (np.repeat(np.array(side), HEADS // KV_HEADS, axis=1) for side in (KEYS, VALUES))
    scores = np.einsum("bhnd,bhmd->bhnm", np.array(QUERIES, np.float64), keys) * SCALE
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    at = mx.arange(COLUMNS)
    scores[..., ~np.array(window.mask(at, at))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = np.einsum("bhnm,bhmd->bhnd", weights / weights.sum(axis=-1, keepdims=True), values)
    assert np.abs(whole(window, soft_cap) - expected).max() < 1e-5


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_chunks_are_bit_identical_to_whole(soft_cap: float) -> None:
    for start, stop in ((0, 1), (0, 40), (40, 41), (33, 275), (250, 252), (128, 160)):
        part = QUERIES[:, :, start:stop], KEYS[:, :, :stop], VALUES[:, :, :stop]
        mixed = attend_buffer(*part, SCALE, soft_cap=soft_cap)
        assert np.array_equal(np.array(mixed), whole(ALL, soft_cap)[:, :, start:stop])


def test_windowed_result_is_independent_of_earlier_columns() -> None:
    for start, stop, first in ((40, 41, 21), (33, 75, 14), (30, 40, 3), (140, 275, 121)):
        sides = (side[:, :, first:stop] for side in (KEYS, VALUES))
        mixed = attend_buffer(QUERIES[:, :, start:stop], *sides, SCALE, first=first, window=NEAR)
        assert np.array_equal(np.array(mixed), whole(NEAR)[:, :, start:stop])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("window", [ALL, NEAR, *KEEPING])
def test_decode_steps_are_bit_identical_to_whole(width: int, window: AttentionWindow) -> None:
    cuts = [[], [32, 64, 200, 264], [5, 8, 41, 130, 260], [7], [130], [256]]
    ends = [4, 270, 271, 17, 136, 256]
    mixed = step_over(cuts, ends, width, window)
    for row, end in enumerate(ends):
        assert np.array_equal(mixed[row], whole(window)[0, :, end : end + width]), row
        alone = step_over([cuts[row]], [end], width, window)[0]
        assert np.array_equal(alone, mixed[row]), row


def test_check_detects_other_summation_order() -> None:
    """MLX's own attention differs in the last bits."""
    theirs = mx.fast.scaled_dot_product_attention(QUERIES, KEYS, VALUES, scale=SCALE, mask="causal")
    assert np.abs(np.array(theirs) - whole()).max() < 1e-5
    assert not np.array_equal(np.array(theirs), whole())


def test_result_is_bit_identical_for_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads divide the blocks of few rows; many rows, or one thread, take them in order."""
    row = QUERIES[:, :, 270:271], KEYS[:, :, :271], VALUES[:, :, :271]
    divided = attend_buffer(*row, SCALE)
    assert np.array_equal(np.array(divided), whole()[:, :, 270:271])
    monkeypatch.setattr(team(), "threads", 1)
    assert np.array_equal(np.array(attend_buffer(*row, SCALE)), np.array(divided))


@pytest.mark.parametrize(("groups", "heads"), [(9, 4), (7, 3), (5, 4), (14, 3), (9, 1), (6, 2)])
def test_items_are_divided_evenly_between_threads(groups: int, heads: int) -> None:
    """Nine tokens with four queries per KV head are 9 groups, with three they are 7."""
    size = item_groups(groups, heads, 2)
    items = -(-groups // size)
    loads = [
        sum(min(size, groups - item % items * size) for item in range(thread, heads * items, 2))
        for thread in range(2)
    ]
    assert sum(loads) == groups * heads and abs(loads[0] - loads[1]) <= 1
    assert item_groups(groups, heads, 1) == min(groups, 8), "alone, items read as much as they may"
    assert item_groups(128, heads, 2) == 8, "many items need no division"


def test_long_rows_match_reference_and_whole_chunk() -> None:
    columns = (2 * BLOCKS_OF_WAVE + 1) * BLOCK_TOKENS + 5
    queries = drawn(1, HEADS, 70, DIM)
    keys, values = drawn(1, KV_HEADS, columns, DIM), drawn(1, KV_HEADS, columns, VALUE_DIM)
    many = attend_buffer(queries, keys, values, SCALE)
    single = attend_buffer(queries[:, :, -1:], keys, values, SCALE)
    assert many is not None and single is not None
    assert np.array_equal(np.array(single), np.array(many)[:, :, -1:])
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask="causal")
    assert np.abs(np.array(theirs) - np.array(many)).max() < 1e-5


@pytest.mark.parametrize("side", [0, 1, 2])
def test_nan_propagates_to_rows_that_attend_it(side: int) -> None:
    arrays = [np.array(x) for x in (QUERIES, KEYS, VALUES)]
    arrays[side][0, 0, 150, 3] = np.nan
    mixed = attend_buffer(*map(mx.array, arrays), SCALE)
    assert mixed is not None
    seen = np.isnan(np.array(mixed)[0, 0]).any(axis=-1)
    assert not seen[:150].any()
    assert seen[150]
    assert seen[151:].all() == (side > 0)


def test_tokens_between_keep_and_window_are_not_needed() -> None:
    window, layer = KEEPING[0], (KEYS, VALUES)
    spans = []
    for start, stop in ((0, 10), (225, 255)):
        sides = tuple(mx.contiguous(side[:, :, start:stop]) for side in layer)
        mx.eval(*sides)
        spans.append(KVSpan(Segment((sides,)), start, stop - start))  # type: ignore[arg-type]
    tails = Tails(1, 16, (LayerShape(KV_HEADS, DIM, VALUE_DIM, mx.float32),))
    tails.ready()
    tails.write_block(0, 0, 0, *(side[:, :, 255:261] for side in layer))
    step = DecodeStep.of(CPUBackend(), [DecodeRow(tuple(spans), 260, 0, 5)], tails)
    mixed = attend_step(step, 0, window, QUERIES[:, :, 260:261], SCALE)
    assert np.array_equal(np.array(mixed), whole(window)[:, :, 260:261])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)])
def test_float16_input_matches_same_values_in_float32(dims: tuple[int, int]) -> None:
    queries = drawn(1, HEADS, 150, dims[0])
    sides = [drawn(1, KV_HEADS, 150, dim).astype(mx.float16) for dim in dims]
    subnormal, largest = 3e-6, 65_504.0
    sides[0][..., 7, 3], sides[1][..., 9, 2], sides[1][..., 9, 3] = subnormal, largest, -subnormal
    wide = [side.astype(mx.float32) for side in sides]
    mixed, expected = attend_buffer(queries, *sides, SCALE), attend_buffer(queries, *wide, SCALE)
    assert mixed is not None and expected is not None
    assert np.array_equal(np.array(mixed), np.array(expected))
    assert float(mx.abs(mixed).max()) > 1_000, "the largest number is read"


def test_unsupported_dtypes_are_not_handled() -> None:
    half = [side.astype(mx.float16) for side in (QUERIES, KEYS, VALUES)]
    assert attend_buffer(*half, SCALE) is None
    assert attend_buffer(QUERIES, *half[1:], SCALE) is None, "40 numbers are not whole vectors"
    assert attend_buffer(QUERIES, KEYS, VALUES.astype(mx.bfloat16), SCALE) is None
