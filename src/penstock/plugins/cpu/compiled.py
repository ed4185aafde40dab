"""What all loops that Numba compiles for the CPU have in common.

The extra `cpu` brings Numba. Where it is not installed, NumPy does the same in several passes.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)
SUMS = {"reassoc", "contract"}
"""Liberties of the compiler: sums in any order, and products added without rounding."""
FOUR = 4
"""Queries that a loop takes together. Its body has a sum for each: they cannot be more or fewer."""


@cache
def has_numba() -> bool:
    """Return whether Numba can be imported; if not, the reason is logged."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # it is not there, or does not go with this NumPy
        logger.info("choices are read by NumPy, not by compiled loops: %s", error)
        return False
    return True


@cache
def pointer() -> Any:
    """Return a function for loops that takes a number for an address."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], cgutils.voidptr_t)

        return types.voidptr(types.int64), generate

    return pointer


@cache
def half_bits_loop() -> Any:
    """Return the loop that writes float16 where float32 has its bits: 2^112 times too small."""
    from numba import int32, njit

    @njit(nogil=True)
    def write(halves, bits):  # type: ignore[no-untyped-def]
        for number in range(len(halves)):
            bits[number] = int32(halves[number]) << int32(13)

    return write


@cache
def exp_loop() -> Any:
    """Return the loop that replaces numbers by their exponentials, and returns the sum.

    They are taken less a number that none of them exceeds, so that no exponential is above 1.
    In a form that the compiler can vectorize: a power of two by its bits, and a polynomial
    (Taylor's, up to x^6) for the rest of at most half a bit.
    """
    from numba import float32, int32, njit

    most, log2_e, log_2 = float32(-87), float32(1 / math.log(2)), float32(math.log(2))

    @njit(nogil=True, fastmath=SUMS)
    def exp(values, top):  # type: ignore[no-untyped-def]
        powers = np.empty(len(values), np.int32)
        for number in range(len(values)):
            x = max(values[number] - top, most)
            power = np.rint(x * log2_e)
            powers[number] = (int32(power) + int32(127)) << int32(23)
            rest = x - power * log_2
            sum_ = float32(1 / 720) * rest + float32(1 / 120)
            for part in (float32(1 / 24), float32(1 / 6), float32(0.5), float32(1), float32(1)):
                sum_ = sum_ * rest + part
            values[number] = sum_
        scales, total = powers.view(np.float32), float32(0)
        for number in range(len(values)):
            values[number] *= scales[number]
            total += values[number]
        return total

    return exp
