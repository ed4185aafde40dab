"""Retention of layers that compress: rows for every few tokens, beside a short window."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine.retention.retention import Retention
from penstock.kv.compressed import Rows, completed
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState


class CompressedRows(Retention):
    """Keeps the rows of compressing layers in whole blocks.

    Args:
        rows: of the layers, by their number.
    """

    def __init__(self, rows: Mapping[int, Rows]) -> None:
        self._rows = rows

    @property
    def ends_blocks(self) -> bool:
        """Whether each block is committed alone: its rows are complete at its end."""
        return True

    @property
    def resumes_inside(self) -> bool:
        """Whether a sequence can resume inside a block: its last rows would be missing."""
        return False

    def completed(self, segment: Segment, state: RecurrentState) -> tuple[Segment, RecurrentState]:
        """Move the rows that were kept beside a block, until it was full, into its segment."""
        return completed(segment, state, self._rows)
