"""Blocks of tokens, the unit of selection in selective attention."""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Number of tokens selected together."""
FIRST_BLOCKS = 1
"""Number of leading blocks always read, because many heads attend to them."""
LEAST_SHARE = 2.0**-66
"""Added to the shares of blocks, so that shares below its rounding are equal on all devices."""
ASKING = 15, 31
"""Indices, within a group of prompt positions, of the queries that select blocks for the group."""
HALF_NOISE = 0.0518
"""Half of a score's error variance, relative to the squared norms of its query and its key.

The error of 2-bit codes has variance 0.1331 for standard normal values, which are scaled by
0.8825: 0.1331 * 0.8825^2 / 2. With half of its variance subtracted, e^noise is 1 on average.
"""
