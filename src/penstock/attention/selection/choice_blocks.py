"""Blocks of tokens, of which a decode step reads a choice."""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Tokens that are chosen together."""
FIRST_BLOCKS = 1
"""First blocks, which are always read: many heads rest on them."""
HALF_NOISE = 0.0518
"""Half of the variance of a score, over the squares of its query and of its key's size.

A code of two bits adds to normal numbers of variance 1 an error of 0.1331, and their size is then
1 / 0.8825: 0.1331 * 0.8825^2 / 2. e^noise is 1 on average once half of its variance is taken off.
"""
CHOSEN = 1e30
"""Score of a block with a key too large for the index: above all others."""
