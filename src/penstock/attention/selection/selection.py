"""Selective attention: the first, the recent and the best-scoring blocks of long sequences.

Each KV head selects its own blocks. An index of the keys (`key_index`) scores every token before
the recent ones. A block's score is that of its best token. A softmax over these blocks, the first
ones included, makes it a share. The shares are summed over the queries of the KV head. The selected
blocks are gathered and read exactly, together with the first and the recent tokens, which are read
in place.

The selection depends only on the tokens and the position, not on segment boundaries, cache hits,
or other rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import CenterLoop
from penstock.attention.span_attention import ALL_TOKENS
from penstock.kv.codecs.coded import Coded
from penstock.kv.segment import ColumnRange, KVSpan

FIRST_TOKENS = FIRST_BLOCKS * BLOCK_TOKENS
"""Number of leading tokens always read, because many heads attend to them."""
LEAST_TOKENS = 128
"""Minimum of `Selection.tokens`: the first tokens, the recent ones, and a few blocks."""
LEAST_RECENT_TOKENS = 33
"""Minimum number of recent tokens (always read): the longest tail and the new token."""
RECENT_SHARE = 4
"""One in `RECENT_SHARE` tokens read is a recent token."""
Numbers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Selection:
    """Settings of selective attention: number of tokens to read, and the key index."""

    tokens: int
    """Number of tokens that each KV head reads in total; at least `LEAST_TOKENS`."""
    index: KeyIndex
    """Key index; its layers use selective attention."""
    compiled: bool = True
    """Whether to use compiled loops for selection and reading if available."""

    @property
    def layers(self) -> frozenset[int]:
        return self.index.layers

    def recent_start(self, position: int) -> int:
        """Return the position of the first recent token for a query at `position`."""
        return max(0, position + 1 - self._least_recent) // BLOCK_TOKENS * BLOCK_TOKENS

    def blocks(self, position: int) -> int:
        """Return the number of blocks to select for a query at `position`."""
        recent = position + 1 - self.recent_start(position)
        return (self.tokens - FIRST_TOKENS - recent) // BLOCK_TOKENS

    @property
    def most_blocks(self) -> int:
        """Maximum of `blocks` for all positions."""
        return (self.tokens - FIRST_TOKENS - self._least_recent) // BLOCK_TOKENS

    @property
    def _least_recent(self) -> int:
        return max(LEAST_RECENT_TOKENS, self.tokens // RECENT_SHARE)

    def applies(self, row: DecodeRow) -> bool:
        """Return whether a row uses selective attention in indexed layers.

        A row reads all tokens if it is marked `whole`, has at most `tokens` tokens, or is not
        completely indexed.
        """
        if row.whole or row.position < self.tokens:
            return False
        stop = self.recent_start(row.position)
        covered = any(span.start < stop <= span.end for span in row.parts)
        return covered and self.indexes(row.parts, stop)

    def indexes(self, parts: Sequence[KVSpan], stop: int) -> bool:
        """Return whether the index of all tokens of `parts` before `stop` is complete."""
        return all(self._is_whole(span) for span in parts if span.start < stop)

    def center_scores(
        self,
        row: DecodeRow,
        query: Scores,
        layer: int,
        heads: slice = slice(None),
        *,
        loop: CenterLoop | None = None,
    ) -> Scores | None:
        """Return the part of the scores due to the key centers; see `KeyIndex.center_scores`."""
        blocks = 0, self.recent_start(row.position) // BLOCK_TOKENS
        return self.index.center_scores(layer, query[heads], heads, *blocks, loop=loop)

    def indexed(
        self, row: DecodeRow, layer: int, first: int = 0
    ) -> Iterator[tuple[Coded, int, int]]:
        """Yield the indexes of the tokens from `first` to the recent ones, with column ranges."""
        for segment, start, stop in pieces(row.parts, first, self.recent_start(row.position)):
            index = segment.index[layer]
            assert index is not None
            yield index, start, stop

    def _is_whole(self, span: KVSpan) -> bool:
        missing = span.segment.missing  # evicted KV of sliding-window layers
        gone = bool(missing) and any(missing[layer] for layer in self.index.layers)
        return not gone and self.index.complete(span.segment)


READ_ALL = Selection(ALL_TOKENS, KeyIndex(frozenset()))
"""Disabled selective attention: all layers read all tokens."""


def halves(count: int) -> list[slice]:
    """Split `count` heads into two slices; one slice for a single head."""
    cut = count // 2
    return [slice(0, cut), slice(cut, count)] if cut else [slice(0, count)]


def pieces(parts: Sequence[KVSpan], start: int, stop: int) -> list[ColumnRange]:
    """Return the segments' columns that hold the positions `start..stop - 1`."""
    cuts = ((part, max(start, part.start), min(stop, part.end)) for part in parts)
    return [(p.segment, a - p.start, b - p.start) for p, a, b in cuts if a < b]
