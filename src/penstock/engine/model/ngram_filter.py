"""Filter of the runs of tokens in a text: it is searched only for those it seems to have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST_NGRAM = 3
"""Tokens that must have occurred before, in this order, for a proposal."""
BITS_A_TOKEN = 16
"""Bits of a filter for each token of a full text."""
FACTORS = (0x1D83_C5E9_4F2B, 0x0B17_93AF_E6D5, 0x16C9_2D78_5A8F)
"""Factors of a run's tokens in its hash."""
LOW_BITS = 20
"""Lowest bits of a hash, which are left out: they depend on the lowest bits of tokens alone."""
MANY_TOKENS = 64
"""Tokens from which runs are added together."""
PIECE_TOKENS = 4_096
"""Tokens whose runs are added together."""


class NgramFilter:
    """Bloom filter of the runs of `LEAST_NGRAM` tokens that were added.

    It misses none of them, and takes at most one in sixteen others for one of them.

    Args:
        tokens: length of the text for which it is made.
    """

    def __init__(self, tokens: int) -> None:
        self.clear(tokens)

    @staticmethod
    def nbytes_of(tokens: int) -> int:
        """Return the bytes of a filter for so many tokens: less than four for each."""
        return BITS_A_TOKEN // 8 << (tokens - 1).bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self._bits)

    def clear(self, tokens: int) -> None:
        """Forget all runs, and be made for a text of so many tokens."""
        self._bits = bytearray()  # the old bits go before the new ones come
        self._bits = bytearray(self.nbytes_of(tokens))
        self._mask = 8 * len(self._bits) - 1
        self.tokens = len(self._bits) * 8 // BITS_A_TOKEN
        """Length of a text that fills it."""

    def add(self, tokens: Sequence[int]) -> bool:
        """Add all runs of some tokens.

        Returns:
            False if the last run was new. True where there is no run at all.
        """
        if len(tokens) > MANY_TOKENS:
            self._add_many(tokens[:-1])
            tokens = tokens[-LEAST_NGRAM:]
        bits, known = self._bits, 1
        for run in zip(tokens, tokens[1:], tokens[2:], strict=False):
            place = self._place(*run)
            byte, bit = place >> 3, 1 << (place & 7)
            known = bits[byte] & bit
            bits[byte] |= bit
        return known != 0

    def __contains__(self, run: Sequence[int]) -> bool:
        """Tell whether a run seems to have been added."""
        place = self._place(*run)
        return bool(self._bits[place >> 3] & 1 << (place & 7))

    def _add_many(self, tokens: Sequence[int]) -> None:
        """Add all runs of many tokens."""
        bits = np.frombuffer(self._bits, np.uint8)
        for start in range(0, len(tokens) + 1 - LEAST_NGRAM, PIECE_TOKENS):
            piece = np.array(tokens[start : start + PIECE_TOKENS + LEAST_NGRAM - 1], np.uint64)
            places = self._place(piece[:-2], piece[1:-1], piece[2:])
            for bit in range(8):
                bits[places[places & 7 == bit] >> 3] |= 1 << bit

    def _place(self, first: Any, second: Any, third: Any) -> Any:
        """Return the bit of a run, or of each of some runs.

        Arrays of 64 bits leave the highest bits of a hash out, which the mask does as well.
        """
        one, two, three = FACTORS
        return (first * one + second * two + third * three >> LOW_BITS) & self._mask
