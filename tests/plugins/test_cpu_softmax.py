"""In-place softmax against float64."""

from __future__ import annotations

import tracemalloc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.attention.span_attention import MASKED
from penstock.plugins.cpu.cpu_softmax import weigh_in_place

BOUND = 4e-7
"""Share of a weight: a difference of scores is rounded once, and so is its power."""


def drawn(n: int, m: int, seed: int) -> np.ndarray:
    spread = (9, 60)[seed % 2]  # of the second, most weights are zero
    return np.random.default_rng(seed).normal(size=(2, 3, n, m)).astype(np.float32) * spread


def exact(scores: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wide = scores.astype(np.float64)
    n, m = scores.shape[-2:]
    if causal:
        for query in range(n):
            wide[..., query, m - n + query + 1 :] = MASKED
    top = wide.max(axis=-1, keepdims=True)
    weights = np.exp2(wide - top)
    return top, weights, weights.sum(axis=-1, keepdims=True)


@given(n=st.integers(1, 140), before=st.integers(0, 200), seed=st.integers(0, 99))
@pytest.mark.parametrize("causal", [True, False])
def test_weights_match_float64_reference(causal: bool, n: int, before: int, seed: int) -> None:
    scores = drawn(n, before + n, seed)
    wanted = exact(scores, causal)
    found = weigh_in_place(mx.array(scores), causal=causal)
    mx.eval(*found)
    top, weights, total = (np.array(array) for array in found)
    assert np.array_equal(top, wanted[0].astype(np.float32))
    # The difference to the maximum is rounded to a share of itself: of a power, that is as much.
    rounded = 2.0**-24 * np.maximum(1.0, wanted[0] - scores) + BOUND
    assert (np.abs(weights - wanted[1]) <= rounded * wanted[1] + 2.0**-126).all()
    assert np.allclose(total, wanted[2], rtol=2.0**-24 * (before + n) + BOUND)


def test_masked_columns_have_zero_weight() -> None:
    """Exactly zero, whatever the masked values are."""
    scores = mx.random.normal((1, 1, 8, 40))
    _, weights, _ = weigh_in_place(scores, causal=True)
    own = np.array(weights)[0, 0, :, 32:]
    assert not own[np.triu_indices(8, 1)].any()
    assert own[np.tril_indices(8)].all()
    far = mx.array([[[[0.0, -126.5, MASKED, -1e9]]]])
    assert np.array(weigh_in_place(far, causal=False)[1]).tolist() == [[[[1.0, 0.0, 0.0, 0.0]]]]


def test_softmax_is_in_place() -> None:
    scores = mx.random.normal((1, 4, 64, 2_048))
    mx.eval(scores)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    top, weights, total = weigh_in_place(scores, causal=True)
    mx.eval(top, weights, total)
    assert weights is scores
    assert mx.get_peak_memory() - before < scores.nbytes // 50


def test_nan_rows_stay_nan() -> None:
    scores = mx.array([[[[0.0, float("nan"), 1.0], [0.0, 1.0, -float("inf")]]]])
    _, weights, _ = weigh_in_place(scores, causal=False)
    assert np.isnan(np.array(weights[0, 0, 0])).all()
    assert np.array(weights[0, 0, 1]).tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("before", [0, 700])
def test_no_full_mask_is_allocated(before: int) -> None:
    """A mask of all queries is quadratic; cached masks were uncounted."""
    scores = mx.random.normal((1, 1, 1_024, before + 1_024))
    mx.eval(scores)
    tracemalloc.start()
    try:
        weigh_in_place(scores, causal=True)
        assert tracemalloc.get_traced_memory()[1] < 1_024**2 // 10
    finally:
        tracemalloc.stop()


def test_numpy_warnings_as_errors_do_not_raise() -> None:
    scores = mx.array([[[[0.0, float("nan")], [200.0, -200.0]]]])
    with np.errstate(all="raise"):
        _, weights, _ = weigh_in_place(scores, causal=True)
    assert np.array(weights[0, 0]).tolist() == [[1.0, 0.0], [1.0, 0.0]]
