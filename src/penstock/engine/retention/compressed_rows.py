"""Retention of compressed layers: one row per few tokens, and a short window."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine.retention.retention import Retention
from penstock.kv.compressed import Rows, completed
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState


class CompressedRows(Retention):
    def __init__(self, rows: Mapping[int, Rows]) -> None:
        self._rows = rows

    @property
    def ends_blocks(self) -> bool:
        """Whether blocks are committed one by one: True, as rows are complete at block ends."""
        return True

    @property
    def resumes_inside(self) -> bool:
        """False: inside a block, the last rows would be missing."""
        return False

    def completed(self, segment: Segment, state: RecurrentState) -> tuple[Segment, RecurrentState]:
        return completed(segment, state, self._rows)
