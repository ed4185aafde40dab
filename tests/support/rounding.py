"""Tolerances between two ways of computing the same, from dtype and codec alone.

In which order a matrix product adds up is up to the BLAS: to the shapes, the CPU and the number of
threads. So two products of other shapes differ by roundings, and where numbers are rounded to codes
a number that lies between two of them goes to either.
"""

from __future__ import annotations

import mlx.core as mx

UNIT = 2.0**-24
"""Half a unit in the last place of float32, as a share of a number."""
SCALE_UNIT = 2.0**-11
"""The same of float16, in which a group's scale and offset are held."""
LIKELY = 8.0
"""Standard deviations: what sums of roundings reach in no run."""


def product_error(a: mx.array, b: mx.array) -> float:
    """Return the maximum difference of two ways to compute `a @ b` in float32.

    Each rounds n times, and the roundings are independent (Higham and Mary 2019); they are never
    more than n.
    """
    n = a.shape[-1]
    roundings = min(float(n), LIKELY * n**0.5)
    return 2 * roundings * UNIT * float((mx.abs(a) @ mx.abs(b)).max())


def assert_same_codes(found: mx.array, wanted: mx.array, bits: int, group_size: int) -> None:
    """Raise unless two sides, dequantized, are what nearly equal numbers are in `bits` a number.

    Of a group the scale may be rounded otherwise, and with it each number by so much; a number in
    the middle between two codes may have either of them. The first is seldom, the second hardly
    ever: who read other numbers would differ everywhere.
    """
    groups = wanted.reshape(*wanted.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    # Some group may use fewer codes than there are, but never less than all but the outermost.
    step = (high - low) / (2**bits - 2)
    rescaled = 4 * SCALE_UNIT * mx.maximum(mx.abs(low), mx.abs(high))
    apart = mx.abs(found.reshape(groups.shape) - groups)
    assert bool((apart <= step + rescaled).all()), "by more than one code"
    other_code = float((apart > rescaled).astype(mx.float32).mean())
    assert other_code < 1e-3, f"{other_code:.2%} of the numbers have another code"
    other_group = float((apart > 0).any(axis=-1).astype(mx.float32).mean())
    assert other_group < 0.02, f"{other_group:.2%} of the groups differ"


def attention_error(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, power_error: float = 3e-7
) -> float:
    """Return the maximum difference of two ways to attend in float32.

    What a score is off by is what its weight is off by, as a share; the weights are divided by
    their sum, which is off by as much. `power_error` is the share that a power may be off by.
    queries: (heads, n, d), keys: (heads, m, d), values: (heads, m, dim).
    """
    scores = product_error(queries * scale, keys.swapaxes(-1, -2))
    largest = float((mx.abs(queries * scale) @ mx.abs(keys).swapaxes(-1, -2)).max())
    weights = 2 * (scores + 4 * UNIT * largest + power_error)
    sums = 4 * LIKELY * keys.shape[-2] ** 0.5 * UNIT  # of weights, and of values by weights
    return float(mx.abs(values).max()) * (weights + sums)
