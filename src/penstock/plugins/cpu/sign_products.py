"""Sums of sign vectors on the CPU, from lookup tables of whole numbers.

The numbers of four queries are packed into a word. Their sums for all 256 values of an octet are
tabulated. The sum of a token is then one lookup an octet, each adding for all four queries.
"""

from __future__ import annotations

import numpy as np

from penstock.kv.numpy_arrays import Floats

LANES = 4
"""Number of queries of a KV head whose sums are packed into one 64-bit word."""
LANE_BITS = 16
MOST = 2 ** (LANE_BITS - 1) - 1
"""Maximum sum of a row's values."""
HIDDEN = np.int64(-(2**63) + 2**47 + 2**31 + 2**15)
"""Half of every lane's range, added so that lanes are read as unsigned integers."""


def units_of(x: Floats) -> Floats:
    """Return the unit of each query's integers, (heads, m, 1), for x (heads, m, n)."""
    total = np.abs(x).sum(axis=-1, keepdims=True)
    # Rounded, each number may be half a unit more.
    units: Floats = np.maximum(total, 1e-30) / np.float32(MOST - x.shape[-1] / 2)
    return units
