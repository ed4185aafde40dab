"""What the new tokens of a decode step select, and the tables of its jobs; see `choice_jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import TABLE_BLOCKS
from penstock.attention.selection.selection import Selection
from penstock.kv.codecs.rotation import signs_of
from penstock.kv.codecs.turbo import padded
from penstock.kv.numpy_arrays import Floats, Integers
from penstock.plugins.cpu.attending_loops import PLACES
from penstock.plugins.cpu.choice_jobs import ChoiceTable
from penstock.plugins.cpu.choice_loops import segment_addresses
from penstock.plugins.cpu.ordered_loops import AttendTable


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Selection of the new tokens of a step, for all layers that choose."""

    selection: Selection
    choices: Integers
    """(rows, 4), see `ChoiceTable`."""
    index: Integers
    """(layers, spans, 7, 2): addresses of the index of all layers of the step."""
    most: int
    """Maximum number of spans that a row reads."""
    stop: int
    """Index after the last selectable block of all rows."""
    moves: bool
    """Whether recent tokens are indexed, too, so that later steps may select them."""

    @classmethod
    def of(
        cls, step: DecodeStep, firsts: Integers, index: Integers, numbers: Sequence[int]
    ) -> StepChoice:
        """Return the choice of a step's new tokens with these indices; the others read all."""
        selection, choices = step.selection, []
        for number, row in enumerate(step.new_tokens):
            start, blocks = 0, 0
            if number in numbers:
                start = selection.recent_start(row.position) // BLOCK_TOKENS
                blocks = selection.blocks(row.position)
            choices.append([start, blocks, 0, row.position + 1])
        own = np.array(choices)
        spans = int(np.diff(firsts).max())
        # A block may be cut by the end of each span.
        most = FIRST_BLOCKS + selection.most_blocks + 1 + spans
        moves = all(
            selection.indexes(row.parts, row.position)
            for row, chooses in zip(step.new_tokens, own[:, 1] > 0, strict=True)
            if chooses
        )
        return cls(selection, own, index, most, int(own[:, 0].max()), moves)

    def ahead(self, positions: Sequence[int]) -> Integers | None:
        """Return `choices` of the next decode step, of the same rows; None if tables would change.

        Args:
            positions: position of the new token of each row.
        """
        selection, choices = self.selection, []
        for position, chooses in zip(positions, self.choices[:, 1] > 0, strict=True):
            start, blocks = 0, 0
            if chooses:
                start = selection.recent_start(position) // BLOCK_TOKENS
                blocks = selection.blocks(position)
            elif position >= selection.tokens:
                return None
            choices.append([start, blocks, 0, position + 1])
        ahead = np.array(choices)
        if not self.moves and (ahead[:, 0] != self.choices[:, 0]).any():
            return None
        return ahead if int(ahead[:, 0].max()) <= self.tables * TABLE_BLOCKS else None

    def fits(self, other: StepChoice) -> bool:
        """Return whether tables with another choice of the same spans hold for this one, too."""
        alike = self.index is other.index and self.selection is other.selection
        return alike and self.most == other.most and other.tables <= self.tables

    @property
    def tables(self) -> int:
        """Number of tables of rotations that the centers of all blocks need."""
        return -(-self.stop // TABLE_BLOCKS)


def index_of(step: DecodeStep) -> Integers:
    """Return the addresses of the index of all spans of a step; see `StepChoice.index`."""
    tail = np.zeros((len(step.tails.shapes), PLACES + 1, 2), np.int64)
    index = [
        part
        for row in step.rows
        for part in (*(p.segment.derived(segment_addresses) for p in row.parts), tail)
    ]
    return np.stack(index, axis=1)


@dataclass(slots=True)
class ChoiceBuffers:
    """Where the selected tokens of some rows are written: by one layer after the other."""

    read: Integers
    """(rows, kv_heads, most, 6), see `ChoiceTable`."""
    seen: Integers
    firsts: Integers
    """(rows * kv_heads + 1,)"""
    kept: list[Floats | Integers] = field(default_factory=list)
    """Arrays whose addresses are in a table."""

    @classmethod
    def of(cls, choice: StepChoice, kv_heads: int) -> ChoiceBuffers:
        """Allocate them."""
        items = len(choice.choices) * kv_heads
        return cls(
            np.empty((items, choice.most, 6), np.int64),
            np.empty((items, 2), np.int64),
            np.arange(items + 1) * choice.most,
        )

    def set_table(
        self,
        table: Integers,
        choice: StepChoice,
        layer: int,
        attend: Integers,
        dims: tuple[int, int],
        nbytes: int,
    ) -> None:
        """Set the table of a layer's selection, and let its attention read what that writes.

        Args:
            table: `ChoiceTable` of the layer, with the queries of the model.
            choice: what the rows select.
            layer: number of the layer.
            attend: `AttendTable` of the layer, which reads all tokens.
            dims: sizes of a key and of a value.
            nbytes: bytes of a number of the keys and values.
        """
        of, to = AttendTable, ChoiceTable
        for one, other in (
            (to.QUERIES, of.QUERIES), (to.ROWS, of.ROWS), (to.HEADS, of.HEADS),
            (to.KV_HEADS, of.KV_HEADS), (to.SPANS, of.SPANS), (to.SPAN_COUNT, of.SPAN_COUNT),
            (to.FIRSTS, of.FIRSTS), (to.SEQUENCES, of.SEQUENCES), (to.WIDTH, of.WIDTH),
        ):  # fmt: skip
            table[one] = attend[other]
        table[to.INDEX] = choice.index[layer].ctypes.data
        table[to.CHOICES] = choice.choices.ctypes.data
        table[to.KEY_BYTES], table[to.VALUE_BYTES] = nbytes * dims[0], nbytes * dims[1]
        table[to.SIGNS] = signs_of(padded(dims[0])).ctypes.data
        self._set_centers(table, choice.selection.index, layer, choice.stop)
        table[to.READ], table[to.MOST] = self.read.ctypes.data, choice.most
        table[to.SEEN] = self.seen.ctypes.data

        rows, kv_heads = int(attend[of.ROWS]), int(attend[of.KV_HEADS])
        attend[of.ROWS] = attend[of.SEQUENCES] = rows * kv_heads
        attend[of.HEADS], attend[of.KV_HEADS] = attend[of.HEADS] // kv_heads, 1
        attend[of.SPANS], attend[of.SPAN_COUNT] = self.read.ctypes.data, self.read.size // 6
        attend[of.FIRSTS], attend[of.WIDTH] = self.firsts.ctypes.data, 1
        attend[of.SEEN] = self.seen.ctypes.data

    def _set_centers(self, table: Integers, index: KeyIndex, layer: int, stop: int) -> None:
        centers = index.centers.get(layer)
        if centers is None:
            return
        rotation, to = centers.rotation, ChoiceTable
        one, other, still = rotation.channels
        turns, far = rotation.turns(stop)
        self.kept += [centers.vectors, one, other, still, turns, far]
        table[to.CENTERS] = centers.vectors.ctypes.data
        table[to.PAIRS], table[to.PARTNERS] = one.ctypes.data, other.ctypes.data
        table[to.PAIR_COUNT] = len(one)
        table[to.STILL], table[to.STILL_COUNT] = still.ctypes.data, len(still)
        table[to.TURNS], table[to.TILE_COUNT] = turns.ctypes.data, len(turns)
        table[to.FAR_TURNS], table[to.FAR_COUNT] = far.ctypes.data, len(far)
