"""Common parts of the loops that Numba compiles for the CPU.

Numba is part of the extra `cpu`. Without it, the choice of tokens is made by MLX's operations.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)
SUMS = {"reassoc", "contract"}
"""Fast-math flags: sums in any order, and fused multiply-add."""
FOUR = 4
"""Number of queries that a loop processes together; fixed, because its body is unrolled."""


@cache
def has_numba() -> bool:
    """Return whether Numba can be imported; if not, log the reason."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # it is not there, or does not go with this NumPy
        logger.info("selective attention uses MLX's operations, not compiled loops: %s", error)
        return False
    return True


@cache
def pointer() -> Any:
    """Return a function for compiled loops that converts an integer to a pointer."""
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
    """Compile the conversion of float16 bits to float32 position: 2^112 times too small."""
    from numba import int32, njit

    @njit(nogil=True)
    def write(halves, bits):  # type: ignore[no-untyped-def]
        for number in range(len(halves)):
            bits[number] = int32(halves[number]) << int32(13)

    return write


@cache
def exp_loop() -> Any:
    """Compile `exp(x - max)` in place, returning the sum.

    Vectorizable: a power of two from the exponent bits, times a Taylor polynomial up to x^6 for the
    remainder of at most half a bit.
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
