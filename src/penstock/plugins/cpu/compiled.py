"""Functions shared by the loops that Numba compiles for the CPU.

Numba is part of the extra `cpu`. Without it, MLX's operations select the tokens to read.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)
SUMS = {"reassoc", "contract"}
"""Fast-math flags that allow any order of sums, and fused multiply-add."""
FOUR = 4
"""Number of queries that a loop processes together; its body is unrolled for it."""


@cache
def has_numba() -> bool:
    """Return whether Numba can be imported; log the reason if not."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # not installed, or incompatible with this NumPy
        logger.info("selective attention uses MLX's operations, not compiled loops: %s", error)
        return False
    return True


@cache
def pointer() -> Any:
    """Return a Numba intrinsic that converts an integer to a pointer."""
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
    """Compile a shift of float16 bits to their places in float32, giving values 2^-112 as large."""
    from numba import int32, njit

    @njit(nogil=True)
    def write(halves, bits):  # type: ignore[no-untyped-def]
        for number in range(len(halves)):
            bits[number] = int32(halves[number]) << int32(13)

    return write


@cache
def exp_loop() -> Any:
    """Compile the computation of `exp(x - top)` in place, returning the sum.

    It can be vectorized: a power of two, by the exponent bits, times a Taylor polynomial of degree
    6 for the remainder.
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
