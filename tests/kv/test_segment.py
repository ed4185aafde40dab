"""What a segment knows about its numbers; how it is cut and joined, the tree's tests show."""

from __future__ import annotations

import mlx.core as mx
import pytest

from penstock.kv.segment import Segment

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def segment(dtype: mx.Dtype, tokens: int = 70) -> Segment:
    layers = []
    for number in range(3):
        keys = mx.random.normal((1, 2, tokens, 16), key=mx.random.key(number)).astype(dtype)
        layers.append((keys, -2 * keys[..., :8]))
    mx.eval(layers)
    return Segment(tuple(layers))


@dtypes
def test_numbers_are_finite(dtype: mx.Dtype) -> None:
    assert segment(dtype).is_finite()


@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("at", [(0, 0, 0), (1, 69, 7), (1, 35, 3)])
def test_one_that_is_none_is_found_wherever_it_is(
    dtype: mx.Dtype, bad: float, side: int, at: tuple[int, int, int]
) -> None:
    for layer in range(3):
        made = segment(dtype)
        head, token, dim = at
        made.layers[layer][side][0, head, token, dim] = bad  # type: ignore[index]
        assert not made.is_finite()


@dtypes
def test_infinities_that_cancel_are_found(dtype: mx.Dtype) -> None:
    made = segment(dtype)
    made.layers[1][0][0, 0, 5, 2] = float("inf")  # type: ignore[index]
    made.layers[1][0][0, 0, 5, 3] = float("-inf")  # type: ignore[index]
    assert not made.is_finite()


def test_large_numbers_whose_sum_is_none_are_finite() -> None:
    """The quick look at sums says no, and the slow one yes."""
    made = segment(mx.float16)
    made.layers[2][1][:] = 60_000.0  # type: ignore[index]
    assert not mx.isfinite(made.layers[2][1].sum(axis=-1)).all()  # type: ignore[union-attr]
    assert made.is_finite()
