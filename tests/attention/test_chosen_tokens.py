"""Choice of blocks of tokens by an index, across the parts of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import pytest

from penstock.attention import chosen_tokens, devices
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chosen_tokens import ChosenTokens, IndexPart, choose_tokens, gathered
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails

DIM, HEADS = 8, 2
CUTS = (0, 3, 4, 21, 34)
"""Starts of the spans, and of the tail."""


@dataclass(frozen=True)
class SumIndex:
    """Index that scores a block by the sum of its keys' first numbers, or of each of them."""

    block: int
    blocks: int
    by_head: bool = False
    negates: bool = False

    def budget(self, count: int) -> int:
        return self.blocks * self.block + count % self.block

    def scores(self, row: int, token: int, part: IndexPart) -> mx.array:
        assert part.start % self.block == part.keys.shape[1] % self.block == 0
        sums = mx.unflatten(part.keys[0], 0, (-1, self.block)).sum(axis=1)
        return sums[:, :HEADS].T if self.by_head else sums[:, 0]


def step_of(sides: tuple[mx.array, mx.array]) -> DecodeStep:
    """Return a step of one row, whose last tokens are in a tail."""
    count = sides[0].shape[2]
    spans = [
        KVSpan(Segment((tuple(side[:, :, a:b] for side in sides),)).owned(), a, b - a)  # type: ignore[arg-type]
        for a, b in pairwise(CUTS)
    ]
    tails = Tails(1, count - CUTS[-1], [LayerShape.of(*sides)])
    tails.ready()
    tails.write_block(0, 0, 0, *(side[:, :, CUTS[-1] :] for side in sides))
    row = DecodeRow(tuple(spans), count - 1, 0, count - 1 - CUTS[-1])
    return DecodeStep.of(devices.current(), [row], tails)


def expected(keys: mx.array, index: SumIndex, head: int = 0) -> list[int]:
    """Return the columns of the best blocks, and those behind the last whole block."""
    block, count = index.block, len(keys)
    sums = [float(keys[i : i + block, head].sum()) for i in range(0, count - block + 1, block)]
    best = sorted(sorted(range(len(sums)), key=lambda i: -sums[i])[: index.blocks])
    rest = range(count - count % block, count)
    return [i * block + j for i in best for j in range(block)] + list(rest)


@pytest.mark.parametrize("at_once", [1, 8, 4_096])
@pytest.mark.parametrize("negates", [False, True])
@pytest.mark.parametrize("block", [1, 2, 4, 5, 16])
def test_blocks_across_parts_are_chosen(
    monkeypatch: pytest.MonkeyPatch, block: int, negates: bool, at_once: int
) -> None:
    monkeypatch.setattr(chosen_tokens, "SCORED_AT_ONCE", at_once)
    for count in (35, 40, 48):
        mx.random.seed(count + block)
        keys = mx.random.normal((1, 1, count, DIM))
        index = SumIndex(block, 1, negates=negates)
        chosen = choose_tokens(step_of((keys, keys[..., :0])), 0, AttentionWindow(), index)
        assert chosen[0].columns.tolist() == expected(keys[0, 0], index)
        assert chosen[0].seen is None


def test_sequences_within_the_budget_choose_nothing() -> None:
    keys = mx.zeros((1, 1, 40, DIM))
    step = step_of((keys, keys[..., :0]))
    assert choose_tokens(step, 0, AttentionWindow(), SumIndex(4, 10)) == {}
    assert choose_tokens(step, 0, AttentionWindow(), SumIndex(4, 9)) != {}


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 2.0, 0.0])])
def test_each_kv_head_reads_its_own_choice(sinks: mx.array | None) -> None:
    mx.random.seed(5)
    count, index = 47, SumIndex(4, 3, by_head=True)
    keys, values = (mx.random.normal((1, HEADS, count, DIM)) for _ in range(2))
    queries = mx.random.normal((1, 2 * HEADS, 1, DIM))
    index_keys = mx.random.normal((1, 1, count, DIM))
    window = AttentionWindow()
    chosen = choose_tokens(step_of((index_keys, index_keys[..., :0])), 0, window, index)
    columns = [expected(index_keys[0, 0], index, head) for head in range(HEADS)]
    assert chosen[0].columns.tolist() == columns
    assert columns[0] != columns[1]
    mask = mx.zeros((HEADS, count), mx.bool_)
    mask = mx.put_along_axis(mask, mx.array(columns), mx.array(True), axis=-1)
    reference = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask=mx.repeat(mask[:, None], 2, axis=0), sinks=sinks
    )
    step = step_of((keys, values))
    read = LayerDecode(step.device, step, 0, window).attend_chosen(queries, 0.3, chosen, sinks)
    assert mx.allclose(read, reference, atol=1e-5)
    # Negative control: the heads' choices are exchanged.
    exchanged = {0: ChosenTokens(chosen[0].columns[::-1], None)}
    wrong = LayerDecode(step.device, step, 0, window).attend_chosen(queries, 0.3, exchanged, sinks)
    assert not mx.allclose(wrong, reference, atol=1e-2)


def test_hidden_tokens_of_a_tail_are_masked() -> None:
    """The first six tokens of the tail are outside of the window."""
    keys = mx.arange(48.0).reshape(1, 1, 48, 1) * mx.ones(DIM)
    window = AttentionWindow(8, keep=16)
    chosen = choose_tokens(step_of((keys, keys[..., :0])), 0, window, SumIndex(4, 2))
    # Of the spans the columns 0 to 15 are seen; the tail has the columns 16 to 29.
    assert chosen[0].columns.tolist() == [*range(20, 28), 28, 29]
    assert chosen[0].seen is not None
    assert chosen[0].seen.tolist() == [[False] * 2 + [True] * 8]


def test_nothing_is_gathered_of_sides_without_numbers() -> None:
    parts = [mx.zeros((2, 5, 0)), mx.zeros((2, 3, 0))]
    assert gathered(parts, mx.array([1, 6])).shape == (2, 2, 0)
