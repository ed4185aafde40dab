"""Attention over spans, merged, against the formula."""

from __future__ import annotations

from itertools import pairwise

import attention_reference as reference
import mlx.core as mx
import numpy as np
import pytest
from attention_reference import Numbers, numbers
from hypothesis import given
from hypothesis import strategies as st

from penstock.attention import devices, span_attention
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.attention_plan import DecodeRow, in_order
from penstock.attention.reads import decode_reads
from penstock.attention.span_attention import (
    LOG2_E,
    MASKED,
    AttentionWindow,
    Partial,
    grouped,
    in_base_2,
    merged,
    ungrouped,
    weigh,
)
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.plugins.cpu import cpu_backend
from penstock.plugins.cpu.cpu_backend import CPUBackend

CPU = CPUBackend()
WIDTH = 8
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def segment(tokens: int, seed: int, dtype: mx.Dtype) -> Segment:
    shape = (1, 1, tokens, WIDTH)
    keys, values = (normal(*shape, seed=seed + side, dtype=dtype) for side in (0, 1))
    mx.eval(keys, values)
    return Segment(((keys, values),))


def decode(
    rows: list[DecodeRow], tails: Tails, attention_window: AttentionWindow, dtype: mx.Dtype
) -> mx.array:
    """Attend once with random queries, rows in the order of `in_order`; (b, 2, 1, WIDTH)."""
    ordered = [rows[i] for i in in_order(rows)]
    (reads,) = decode_reads(DecodeStep.of(devices.current(), ordered, tails), [attention_window])
    new = normal(len(rows), 1, 1, WIDTH, seed=9, dtype=dtype)
    queries = normal(len(rows), 2, 1, WIDTH, seed=10, dtype=dtype)
    given = reads.update_and_fetch(new, -new)
    return reads.attend(queries, *given, 0.3, reads.make_mask(1))


def all_finite(x: mx.array) -> bool:
    return bool(mx.all(mx.isfinite(x)).item())


@dtypes
def test_decode_is_finite_when_window_has_left_shared_span(dtype: mx.Dtype) -> None:
    """One row's window has left the shared span; the other row still reads it."""
    shared = KVSpan(segment(16, 1, dtype), 0, 16)
    own = KVSpan(segment(32, 3, dtype), 16, 32)
    tails = Tails(2, 4, [LayerShape(1, WIDTH, WIDTH, dtype)])
    tails.ready()
    rows = [DecodeRow((shared,), 16, 0, 0), DecodeRow((shared, own), 48, 1, 0)]
    assert all_finite(decode(rows, tails, AttentionWindow(window=20), dtype))


@dtypes
@pytest.mark.parametrize(("columns", "value"), [(70_000, 1.0), (8_192, 10.0)])
def test_sum_over_many_equal_scores_does_not_overflow(
    dtype: mx.Dtype, columns: int, value: float
) -> None:
    """Sums over the columns exceed float16's 65,504; the result does not."""
    queries = mx.zeros((1, 2, WIDTH), dtype)
    keys = mx.zeros((1, columns, WIDTH), dtype)
    values = mx.full((1, columns, WIDTH), value, dtype)
    found = [merged([CPU.attend_decode(queries, [keys], [values])])]
    found.append(
        CPU.prefill(
            queries[None],
            keys[None],
            values[None],
            columns=None,
            start=columns - 2,
            scale=1.0,
            attention_window=AttentionWindow(),
        )
    )
    for result in found:
        assert mx.allclose(result.astype(mx.float32), mx.array(value), rtol=1e-2).item()


@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
def test_stale_slot_contents_are_ignored(stale: float) -> None:
    """A longer neighboring tail masks in columns past this row's tail, at weight 0."""
    tails = Tails(2, 4, [LayerShape(1, WIDTH, WIDTH, mx.float32)])
    tails.ready()
    bad = mx.full((1, 1, 1, WIDTH), stale)
    tails.write_block(0, 0, 1, bad, bad)
    rows = [DecodeRow((), 0, 0, 0), DecodeRow((), 2, 1, 2)]
    assert not all_finite(decode(rows, tails, AttentionWindow(), mx.float32))  # the wipe is needed
    tails.wipe(0)
    assert all_finite(decode(rows, tails, AttentionWindow(), mx.float32))


@pytest.mark.parametrize(
    ("slots", "neighbors"), [((0, 1), True), ((1, 2), True), ((1, 0), False), ((0, 2), False)]
)
def test_only_adjacent_ascending_slots_are_read_as_slice(
    slots: tuple[int, int], neighbors: bool
) -> None:
    """Read as one slice, descending slots would be the wrong ones."""
    tails = Tails(3, 4, [LayerShape(1, WIDTH, WIDTH, mx.float32)])
    rows = [DecodeRow((), 2, slot, 2) for slot in slots]
    assert DecodeStep.of(devices.current(), rows, tails).neighbors == neighbors


# ---- sight

attention_windows = st.builds(AttentionWindow, st.none() | st.integers(1, 12), st.integers(0, 6))


@given(attention_windows, st.integers(0, 30))
def test_window_methods_match_mask(attention_window: AttentionWindow, position: int) -> None:
    columns = range(position + 3)
    (mask,) = attention_window.mask(mx.array([position]), mx.arange(len(columns))).tolist()
    assert mask == [reference.sees(attention_window, position, column) for column in columns]
    start = attention_window.starts_at(position)
    assert all(mask[start : position + 1])
    assert not any(mask[attention_window.keep : start])
    assert attention_window.sees_all(position) == all(mask[: position + 1])


@given(attention_windows, st.none() | st.integers(1, 12), st.integers(0, 30))
def test_narrower_window_hides_kept_tokens(
    attention_window: AttentionWindow, window: int | None, position: int
) -> None:
    columns = mx.arange(position + 1)
    (both,) = attention_window.within(window).mask(mx.array([position]), columns).tolist()
    (seen,) = attention_window.mask(mx.array([position]), columns).tolist()
    if window is not None and (attention_window.window is None or window < attention_window.window):
        seen = [column > position - window for column in range(position + 1)]
    assert both == seen


# ---- powers of two


either_way = pytest.mark.parametrize(
    "device",
    [CPUBackend(polynomial_from=1), CPUBackend(polynomial_from=2**40)],
    ids=["polynomial", "power"],
)


def exponents() -> mx.array:
    """Return evenly spread exponents, with values on both sides of the rounding points."""
    turns = np.arange(-252, 1, dtype=np.float32) / 2
    near = [np.nextafter(turns, np.float32(side)) for side in (-200, 0)]
    spread = np.linspace(-126, 0, 2**17, dtype=np.float32)
    return mx.array(np.clip(np.concatenate([spread, turns, *near]), -126, 0))


def exp2_error(device: AttentionBackend) -> float:
    x = exponents()
    true = np.exp2(numbers(x))
    return float(np.abs(numbers(device.exp2(x)) / true - 1).max())


@either_way
def test_exp2_error_below_3e_7(device: AttentionBackend) -> None:
    assert exp2_error(device) < 3e-7


def test_exp2_error_check_detects_wrong_coefficient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, *others = cpu_backend._EXP2
    monkeypatch.setattr(cpu_backend, "_EXP2", (one, others[0] + 1e-6, *others[1:]))
    assert exp2_error(CPUBackend(polynomial_from=1)) > 3e-7


@either_way
def test_exp2_handles_range_limits_and_nan(device: AttentionBackend) -> None:
    x = mx.array([0.0, -0.0, -1.0, -125.0, -126.0])
    assert device.exp2(x).tolist() == [1.0, 1.0, 0.5, 2.0**-125, 2.0**-126]
    hidden = device.exp2(
        mx.array([-126.5, -150.0, -1e6, MASKED, MASKED - 1e4, -float("inf")])
    ).tolist()
    assert all(0.0 <= weight <= 2.0**-126 for weight in hidden)
    assert np.isnan(device.exp2(mx.array([float("nan"), 0.0])).tolist()[0])


def test_exp2_of_short_or_half_precision_input_uses_plain_path() -> None:
    """The polynomial works on float32 bits."""
    for dtype in (mx.float16, mx.bfloat16):
        x = mx.full((CPU.polynomial_from,), -3.0, dtype)
        assert CPU.exp2(x).dtype == dtype
        assert CPU.exp2(x)[0].item() == 0.125


# ---- parts and chunks against the formula

HEADS, KV_HEADS, VALUE_WIDTH = 4, 2, 6
TOLERANCE = {mx.float32: 2e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Largest error of a mix of values of about 1."""
FORMS = {
    "everything": AttentionWindow(),
    "window": AttentionWindow(window=5),
    "window of 1": AttentionWindow(window=1),
    "window and kept": AttentionWindow(window=5, keep=3),
}
forms = pytest.mark.parametrize("attention_window", FORMS.values(), ids=FORMS)
sinks_or_not = pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])


def assert_close(ours: mx.array, true: Numbers, dtype: mx.Dtype) -> None:
    np.testing.assert_allclose(numbers(ours), true, rtol=0, atol=TOLERANCE[dtype])


def test_group_queries_round_trip() -> None:
    queries = normal(3, HEADS, 5, WIDTH, seed=1)
    stacked = grouped(queries, KV_HEADS)
    assert stacked.shape == (KV_HEADS, 3 * 2 * 5, WIDTH)
    assert mx.array_equal(ungrouped(stacked, 3, HEADS), queries)
    assert mx.array_equal(stacked[1, :10].reshape(2, 5, WIDTH), queries[0, 2:])


@dtypes
@forms
@sinks_or_not
@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 9), (3, 3 + 6, 14)], ids=str)
def test_merged_spans_match_reference(
    dtype: mx.Dtype, attention_window: AttentionWindow, with_sinks: bool, cuts: tuple[int, ...]
) -> None:
    """One query per head at position 15; some spans are fully masked."""
    tokens, position = 16, 15
    queries = normal(1, HEADS, 1, WIDTH, seed=1, dtype=dtype)
    keys = normal(KV_HEADS, tokens, WIDTH, seed=2, dtype=dtype)
    values = normal(KV_HEADS, tokens, VALUE_WIDTH, seed=3, dtype=dtype)
    sinks = normal(HEADS, seed=4) if with_sinks else None
    stacked = grouped(in_base_2(queries, 0.3), KV_HEADS)
    parts = []
    for start, stop in pairwise((0, *cuts, tokens)):
        seen = attention_window.mask(mx.array([position]), mx.arange(start, stop))
        half = (start + stop) // 2  # each in two pieces, under one softmax
        spans = [slice(start, half), slice(half, stop)]
        pieces = [[side[:, span] for span in spans] for side in (keys, values)]
        parts.append(CPU.attend_decode(stacked, *pieces, seen))
    sunk = None if sinks is None else (sinks * LOG2_E).reshape(KV_HEADS, -1, 1)
    ours = ungrouped(merged(parts, sunk), 1, HEADS)
    assert ours.dtype == mx.float32
    true = reference.attention(
        numbers(queries[0]),
        numbers(keys),
        numbers(values),
        queries_at=[position],
        columns_at=range(tokens),
        attention_window=attention_window,
        scale=0.3,
        sinks=None if sinks is None else numbers(sinks),
    )
    assert_close(ours[0], true, dtype)


@pytest.mark.parametrize("columns", [1, 63, 64, 1_000, 1_024, 1_088, 4_096])
@pytest.mark.parametrize("shape", [(3,), (2, 2, 3)], ids=str)
def test_softmax_weights_of_long_rows_match_numpy(columns: int, shape: tuple[int, ...]) -> None:
    """The largest score is in the first, a middle, or the last column."""
    scores = numbers(normal(*shape, columns, seed=1))
    for row, at in enumerate((0, columns // 2, columns - 1)):
        scores[..., row, at] = 9.0
    scores[..., 1, : columns // 3] = MASKED
    top, weights, total = weigh(mx.array(scores.astype(np.float32)), CPU)
    assert top.shape == total.shape == (*shape, 1)
    assert mx.all(top == 9.0)
    true = np.exp2(scores - 9.0)
    np.testing.assert_allclose(numbers(weights), true, rtol=0, atol=3e-7)
    np.testing.assert_allclose(numbers(total)[..., 0], true.sum(axis=-1), rtol=1e-5)


@pytest.mark.parametrize("columns", [8, 4_096])
def test_nan_scores_propagate(columns: int) -> None:
    scores = mx.zeros((2, columns))
    scores[0, columns // 2] = float("nan")
    _, weights, total = weigh(scores, CPU)
    assert np.isnan(total.tolist()[0][0])
    assert total.tolist()[1] == [columns]
    assert mx.all(weights[1] == 1)


def test_widely_spread_scores_neither_overflow_nor_vanish() -> None:
    """One span's scores are 2^10 above the other's, so it alone counts."""
    low, high = (mx.full((1, 3, 1), value) for value in (-1e3, 24.0))
    query = mx.ones((1, 1, 1))
    parts = [
        CPU.attend_decode(query, [keys], [mx.full((1, 3, 2), keys[0, 0, 0])])
        for keys in (low, high)
    ]
    for order in (parts, parts[::-1]):
        assert merged(order).tolist() == [[[24.0, 24.0]]]
        assert merged(order, mx.array([[[5e3]]])).tolist() == [[[0.0, 0.0]]]


@dtypes
@forms
@sinks_or_not
@pytest.mark.parametrize("scores_at_once", [1, 3 * HEADS * 19, 2**20], ids=str)
@pytest.mark.parametrize("past", [0, 12], ids="{} before".format)
def test_chunk_matches_reference(
    dtype: mx.Dtype,
    attention_window: AttentionWindow,
    with_sinks: bool,
    scores_at_once: int,
    past: int,
) -> None:
    """Seven queries: all at once, in threes, and one by one."""
    device = CPUBackend(scores_at_once=scores_at_once)
    check_chunk(dtype, attention_window, with_sinks, list(range(past + 7)), past, device)


@dtypes
@sinks_or_not
@pytest.mark.parametrize("scores_at_once", [1, 2**20], ids=str)
def test_chunk_after_gap_matches_reference(
    dtype: mx.Dtype, with_sinks: bool, scores_at_once: int
) -> None:
    """Kept tokens followed by the window: column positions are passed explicitly."""
    columns = [0, 1, 2, *range(27, 37)]
    device = CPUBackend(scores_at_once=scores_at_once)
    check_chunk(dtype, AttentionWindow(window=4, keep=3), with_sinks, columns, 30, device)


def check_chunk(
    dtype: mx.Dtype,
    attention_window: AttentionWindow,
    with_sinks: bool,
    columns: list[int],
    start: int,
    device: AttentionBackend = CPU,
) -> None:
    """Attend with queries from `start` on to the columns at these positions."""
    n, m = columns[-1] + 1 - start, len(columns)
    queries = normal(1, HEADS, n, WIDTH, seed=1, dtype=dtype)
    keys = normal(1, KV_HEADS, m, WIDTH, seed=2, dtype=dtype)
    values = normal(1, KV_HEADS, m, VALUE_WIDTH, seed=3, dtype=dtype)
    sinks = normal(HEADS, seed=4, dtype=dtype) if with_sinks else None
    ours = device.prefill(
        queries,
        keys,
        values,
        columns=None if columns == list(range(m)) else mx.array(columns),
        start=start,
        scale=0.3,
        attention_window=attention_window,
        sinks=sinks,
    )
    assert ours.dtype == dtype
    true = reference.attention(
        numbers(queries[0]),
        numbers(keys[0]),
        numbers(values[0]),
        queries_at=range(start, start + n),
        columns_at=columns,
        attention_window=attention_window,
        scale=0.3,
        sinks=None if sinks is None else numbers(sinks),
    )
    assert_close(ours[0], true, dtype)


def mask_with_next_column(
    attention_window: AttentionWindow, queries: mx.array, columns: mx.array
) -> mx.array:
    return columns[None] <= queries[:, None] + 1


def test_check_detects_extra_column(monkeypatch: pytest.MonkeyPatch) -> None:
    check_chunk(mx.float32, AttentionWindow(window=5), False, list(range(19)), 12)
    monkeypatch.setattr(AttentionWindow, "mask", mask_with_next_column)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_chunk(mx.float32, AttentionWindow(window=5), False, list(range(19)), 12)


def test_check_detects_unmerged_maxima() -> None:
    """Negative control: one span's maximum is used for all."""
    query, keys = normal(1, 1, WIDTH, seed=1), normal(1, 8, WIDTH, seed=2)
    parts = [CPU.attend_decode(query, [some], [some]) for some in (keys[:, :3], keys[:, 3:])]
    whole = merged([CPU.attend_decode(query, [keys], [keys])])
    assert mx.allclose(merged(parts), whole, atol=1e-6)
    alike = [Partial(mx.zeros_like(part.top), part.total, part.mixed) for part in parts]
    assert not mx.allclose(merged(alike), whole, atol=1e-2)


@pytest.mark.parametrize("columns", [1, 64, 1023, 1024, 1040, 1088, 2080, 4160])
def test_maximum_score_is_exact_at_any_column(columns: int) -> None:
    """From 1,024 columns on, the maximum is taken over rows of 64 columns."""
    scores = normal(2, 3, columns, seed=columns)
    for at in {0, columns // 2, columns - 1}:
        marked = scores.at[:, :, at].add(100.0)
        assert span_attention._largest(marked).tolist() == marked[:, :, at : at + 1].tolist()
