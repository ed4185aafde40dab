"""Blocks of tokens, the unit of selection in selective attention."""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Number of tokens selected together."""
FIRST_BLOCKS = 1
"""Number of leading blocks always read, because many heads attend to them."""
ASKING = 15, 31
"""Queries of a group of a prompt's positions that the group's choice is made for."""
HALF_NOISE = 0.0518
"""Half of a score's error variance, relative to the squares of its query and its key's norm.

2-bit codes add an error of variance 0.1331 to standard normal values, whose size is then 1 /
0.8825: 0.1331 * 0.8825^2 / 2. With half of its variance subtracted, e^noise is 1 on average.
"""
