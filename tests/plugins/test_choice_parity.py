"""Compiled loops choose the blocks that MLX's operations choose, of any row and layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.attention.attention_plan import DecodeRow
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.selection.block_choice import _lacks, best_blocks, block_scores
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import Rotation
from penstock.attention.selection.selected_reads import Asked, StepMemory
from penstock.attention.selection.selection import Selection
from penstock.kv.segment import KVSpan, Segment
from penstock.plugins.cpu.choice_reader import LoopReader, _HostQuery
from penstock.plugins.cpu.cpu_backend import CPUBackend

pytest.importorskip("numba")
DIMS = 32, 64, 96
CPU, GPU = CPUBackend(), GPUBackend()
Numbers = np.ndarray[Any, Any]
ROUNDING = 1e-5
"""Difference of logarithms that other orders of the sums of centers and of a softmax make."""


class Layer:
    """Keys of a layer, of rows that share a beginning, and queries.

    Args:
        seed: of all numbers.
        lengths: tokens of the segments that are shared, and of those of each row.
        repeats: whether blocks have the keys of other blocks.
    """

    def __init__(
        self, seed: int, dim: int, heads: tuple[int, int], lengths: list[list[int]],
        *, centered: bool, repeats: bool,
    ) -> None:  # fmt: skip
        draw, (kv_heads, m) = np.random.default_rng(seed), heads
        turns = 10.0 ** -draw.uniform(0, 4, dim // 2)
        rotation = Rotation.shared(
            np.concatenate([-turns, turns]), np.roll(np.arange(dim), dim // 2)
        )
        vectors = draw.normal(size=(kv_heads, dim)).astype(np.float32)
        centers = {0: KeyCenters(vectors, rotation)} if centered else {}
        self.index = KeyIndex(frozenset({0}), centers=centers)
        pool = draw.normal(size=(1, kv_heads, 3 * BLOCK_TOKENS, dim)).astype(np.float32)

        def segment(start: int, tokens: int) -> Segment:
            keys = draw.normal(size=(1, kv_heads, tokens, dim)).astype(np.float32)
            if repeats:
                keys = pool[:, :, (start + np.arange(tokens)) % pool.shape[2]]
            side = mx.array(keys * np.float32(draw.uniform(0.5, 4)))
            return self.index.indexed(Segment(((side, side),)), start, CPU)

        first, *others = lengths
        shared, end = [], 0
        for tokens in first:
            shared.append(KVSpan(segment(end, tokens), end, tokens))
            end += tokens
        self.rows = []
        for slot, own in enumerate(others):
            spans, position = list(shared), end
            for tokens in own:
                spans.append(KVSpan(segment(position, tokens), position, tokens))
                position += tokens
            self.rows.append(DecodeRow(tuple(spans), position, slot, 0))
        queries = draw.normal(size=(len(self.rows), kv_heads, m, dim))
        self.queries = mx.array(3 * queries.astype(np.float32))
        self.tail = (mx.zeros((1, kv_heads, 1, dim)),) * 2

    def by_loops(self, selection: Selection, scale: float) -> list[Numbers]:
        """Return the blocks that compiled loops select for each row, numbered from 0."""
        dim = self.queries.shape[-1]
        reader = CPU.choice_reader(selection, dim, dim)
        assert isinstance(reader, LoopReader)
        whole, units = map(np.array, self.index.whole_queries(self.queries, scale))
        scaled, chosen = np.array(self.queries * scale), []
        for number, row in enumerate(self.rows):
            asked = Asked(row, number, self.queries, scale, 0, self.tail, None)
            host = _HostQuery.of(asked, scaled[number], whole[number], units[number])
            query = reader._query(host, StepMemory(), slice(None))
            chosen.append(reader._choose(query) - FIRST_BLOCKS)
        return chosen


def logs_of(scores: mx.array) -> Numbers:
    """Return the negative logarithms of the selectable blocks' shares, (kv_heads, blocks)."""
    return -np.log(-np.array(_lacks(scores)))  # type: ignore[no-any-return]


def border(lacks: Numbers, chosen: Numbers) -> float:
    """Return how much the share of the best unselected block is above the worst selected one's."""
    inside = np.zeros(lacks.shape, bool)
    np.put_along_axis(inside, chosen, True, axis=1)
    worst = np.where(inside, lacks, -np.inf).max(axis=1)
    return float((worst - np.where(inside, np.inf, lacks).min(axis=1)).max())


lengths = st.lists(st.integers(1, 300), max_size=4)


@settings(max_examples=60)
@given(
    st.integers(0, 999), st.sampled_from(DIMS), st.tuples(st.integers(1, 3), st.integers(1, 6)),
    st.lists(lengths, min_size=2, max_size=4), st.sampled_from([128, 160, 256]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_compiled_loops_select_same_blocks_as_reference(
    seed: int, dim: int, heads: tuple[int, int], lengths: list[list[int]], tokens: int,
    centered: bool, repeats: bool,
) -> None:  # fmt: skip
    lengths = [[*lengths[0], 200], *([*own, 90] for own in lengths[1:])]
    layer = Layer(seed, dim, heads, lengths, centered=centered, repeats=repeats)
    selection, scale = Selection(tokens, layer.index), dim**-0.5
    where = selection, layer.rows, layer.queries, scale, 0
    chosen = [np.array(blocks) for blocks in best_blocks(*where, GPU)]
    by_loops = layer.by_loops(selection, scale)
    scores, on_cpu = (block_scores(*where, device) for device in (GPU, CPU))
    for number, (one, other) in enumerate(zip(chosen, by_loops, strict=True)):
        assert mx.array_equal(scores[number], on_cpu[number]), "to the bit"
        lacks = logs_of(scores[number])
        assert one.shape == other.shape
        assert border(lacks, one) <= 0 and border(lacks, other) <= ROUNDING
        if np.array_equal(np.sort(one), other):
            continue
        for head, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            apart = np.setxor1d(mine, theirs)
            edge = lacks[head, mine].max()
            assert np.all(np.abs(lacks[head, apart] - edge) <= ROUNDING)


def test_scores_are_batch_invariant() -> None:
    layer = Layer(5, 64, (2, 3), [[500, 300], [40], [100], [7, 60]], centered=True, repeats=False)
    selection = Selection(128, layer.index)
    together = block_scores(selection, layer.rows, layer.queries, 0.125, 0, GPU)
    for number, scores in enumerate(together):
        one = slice(number, number + 1)
        where = selection, layer.rows[one], layer.queries[one], 0.125, 0
        assert mx.array_equal(scores, block_scores(*where, GPU)[0])


def test_earlier_blocks_are_selected_on_ties() -> None:
    """Without the rounding of centers, equal keys have equal scores on both sides."""
    layer = Layer(3, 64, (2, 1), [[16 * 40], [40]], centered=False, repeats=True)
    selection = Selection(128, layer.index)
    where = selection, layer.rows, layer.queries, 0.125, 0
    (scores,), (chosen,) = block_scores(*where, GPU), best_blocks(*where, GPU)
    assert len(np.unique(np.array(scores)[0])) == 3, "there are three kinds of blocks"
    (by_loops,) = layer.by_loops(selection, 0.125)
    assert np.array_equal(np.sort(np.array(chosen)), by_loops)
    assert all(np.all(np.diff(head) == 3) for head in by_loops), "one kind, from the first on"


def test_check_detects_changed_score() -> None:
    """Negative control: another query, or an index that is shifted by a block."""
    layer = Layer(5, 64, (2, 3), [[500, 300], [40]], centered=True, repeats=False)
    selection = Selection(160, layer.index)
    where = selection, layer.rows, layer.queries, 0.125, 0
    lacks = logs_of(block_scores(*where, GPU)[0])
    (right,) = layer.by_loops(selection, 0.125)
    assert border(lacks, right) <= ROUNDING < border(lacks, np.roll(right, 1, axis=0))
    assert border(np.roll(lacks, 1, axis=1), right) > ROUNDING
