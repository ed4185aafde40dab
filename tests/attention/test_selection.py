"""Block selection for decode steps on long rows against a plain token-by-token version."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.attention import devices
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.devices import using
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.reads import DecodeReads
from penstock.attention.selection import block_gather
from penstock.attention.selection.block_choice import _lacks, best_blocks, block_scores
from penstock.attention.selection.block_gather import BlockTokens, block_positions
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import FIRST_TOKENS, READ_ALL, Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.plugins.cpu.cpu_backend import CPUBackend
from support.worst_blocks import choose_worst_blocks

HEADS, KV_HEADS, DIM, VALUE_DIM, TAIL = 4, 2, 32, 24, 8
SCALE = DIM**-0.5
INDEX = KeyIndex(frozenset({0}))
FAR = AttentionWindow()


class Row:
    """All keys and values of one sequence, and how they are split into segments."""

    def __init__(self, seed: int, cuts: list[int], tail: int, codec: str | None = None) -> None:
        draw = np.random.default_rng(seed)
        self.cuts, self.tail, self.position = cuts, tail, cuts[-1] + tail
        count = self.position + 1
        self.keys = draw.normal(size=(KV_HEADS, count, DIM)).astype(np.float32)
        self.values = draw.normal(size=(KV_HEADS, count, VALUE_DIM)).astype(np.float32)
        self.queries = draw.normal(size=(HEADS, DIM)).astype(np.float32) * 3
        self.spans: list[KVSpan] = []
        for start, stop in zip([0, *cuts], cuts, strict=False):
            segment = self.segment(start, stop)
            if codec is not None and start:
                segment = segment.encoded(parse_scheme(codec), devices.current())
                for side, held in zip(self.sides, segment.layers[0], strict=True):
                    assert isinstance(held, Coded)
                    side[:, start:stop] = np.array(held.dequantize(devices.current()).squeeze(0))
            self.spans.append(KVSpan(segment, start, stop - start))

    @property
    def sides(self) -> tuple[Any, Any]:
        return self.keys, self.values

    def segment(self, start: int, stop: int) -> Segment:
        keys, values = (mx.array(side[None, :, start:stop]) for side in self.sides)
        return INDEX.indexed(Segment(((keys, values),)), start, devices.current())

    def decode_row(self, slot: int) -> DecodeRow:
        return DecodeRow(tuple(self.spans), self.position, slot, self.tail)

    def exact(
        self, chosen: list[set[int]], sinks: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return attention over the chosen positions of each key head, (heads, value_dim)."""
        out = []
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            at = sorted(chosen[kv])
            scores = self.keys[kv, at] @ self.queries[head] * SCALE
            weights = np.exp(scores - scores.max())
            sunk = 0 if sinks is None else np.exp(sinks[head] - scores.max())
            out.append(weights @ self.values[kv, at] / (weights.sum() + sunk))
        return np.array(out)

    def choice(self, tokens: int) -> list[set[int]]:
        """Return the positions that each KV head selects, computed token by token."""
        count = self.position + 1
        if self.position < tokens:
            return [set(range(count))] * KV_HEADS
        recent = (count - max(33, tokens // 4)) // BLOCK_TOKENS * BLOCK_TOKENS
        rest = (tokens - FIRST_TOKENS - (count - recent)) // BLOCK_TOKENS
        chosen = []
        for kv in range(KV_HEADS):
            shares: dict[int, float] = {}
            for head in range(kv * HEADS // KV_HEADS, (kv + 1) * HEADS // KV_HEADS):
                best = self.block_scores(kv, head, tokens)
                top = max(best.values())
                total = sum(np.exp(score - top) for score in best.values())
                for block, score in best.items():
                    shares[block] = shares.get(block, 0) + np.exp(score - top) / total
            selectable = [block for block in shares if block >= FIRST_BLOCKS]
            best_blocks = sorted(selectable, key=lambda block: -shares[block])[:rest]
            positions = set(range(FIRST_TOKENS)) | set(range(recent, count))
            for block in best_blocks:
                positions |= set(range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS))
            chosen.append(positions)
        return chosen

    def block_scores(self, kv: int, head: int, tokens: int) -> dict[int, float]:
        """Return the index's score of each block."""
        own = scores_of(self, tokens)[kv, head - kv * HEADS // KV_HEADS]
        return {number: float(score) for number, score in enumerate(own)}

    def exact_scores(self, tokens: int) -> Any:
        """Return the best token score of each block, computed without tables."""
        stop = Selection(tokens, INDEX).recent_start(self.position)
        queries = mx.array(self.queries * SCALE).reshape(KV_HEADS, -1, DIM)
        scores = []
        for span in self.spans:
            index = span.segment.index[0]
            assert index is not None
            scores.append(np.array(index.score(queries, devices.current()))[..., : span.columns])
        of_tokens = np.concatenate(scores, axis=-1)[..., :stop]
        return of_tokens.reshape(KV_HEADS, HEADS // KV_HEADS, -1, BLOCK_TOKENS).max(axis=-1)


def scores_of(row: Row, tokens: int) -> np.ndarray[Any, Any]:
    """Return the scores of a row's blocks, (kv_heads, m, blocks)."""
    queries = mx.array(row.queries).reshape(1, KV_HEADS, -1, DIM)
    where = Selection(tokens, INDEX), [row.decode_row(0)], queries, SCALE, 0, devices.current()
    return np.array(block_scores(*where)[0])


def attend(
    rows: list[Row],
    tokens: int | None,
    sinks: mx.array | None = None,
    *,
    compiled: bool = True,
) -> np.ndarray[Any, Any]:
    """Return the attention of all rows at once, (rows, heads, value_dim)."""
    shape = LayerShape(KV_HEADS, DIM, VALUE_DIM, mx.float32)
    tails = Tails(len(rows), TAIL, [shape])
    tails.ready()
    for slot, row in enumerate(rows):
        start = row.cuts[-1]
        for column in range(row.tail):
            sides = (mx.array(s[None, :, start + column : start + column + 1]) for s in row.sides)
            tails.write_block(0, slot, column, *sides)
    selection = READ_ALL if tokens is None else Selection(tokens, INDEX, compiled)
    own = [row.decode_row(slot) for slot, row in enumerate(rows)]
    step = DecodeStep.of(devices.current(), own, tails, selection=selection)
    reads = DecodeReads(step, 0, FAR)
    keys, values = (mx.array(np.stack([row.sides[n][:, -1:] for row in rows])) for n in (0, 1))
    reads.update_and_fetch(keys, values)
    queries = mx.array(np.stack([row.queries[:, None] for row in rows]))
    out = reads.attend(queries, keys, values, SCALE, reads.make_mask(1), sinks)
    return np.array(out)[:, :, 0]


@pytest.mark.parametrize("device", [CPUBackend(), GPUBackend()])
def test_best_blocks_are_attended_exactly(device: AttentionBackend) -> None:
    row = Row(1, [96, 160, 640, 700], 3)
    with using(device):
        check_best_blocks(row)


def check_best_blocks(row: Row) -> None:
    out = attend([row], 256)[0]
    assert np.allclose(out, row.exact(row.choice(256)), atol=1e-4)
    everything = row.exact([set(range(row.position + 1))] * KV_HEADS)
    assert not np.allclose(out, everything, atol=1e-3), "it reads a part"
    assert all(len(of_head) <= 256 for of_head in row.choice(256))
    assert row.choice(256)[0] != row.choice(256)[1], "each key head its own"


@pytest.mark.parametrize("device", [CPUBackend(), GPUBackend()])
def test_attention_sinks_are_part_of_selective_softmax(device: AttentionBackend) -> None:
    rows = [Row(seed, [640, 700], 3) for seed in (1, 2)]
    sinks = np.array([-1.0, 0.5, 9.0, 2.0], np.float32)
    with using(device):
        out = attend(rows, 256, mx.array(sinks))
        plain = attend(rows, 256, mx.array(sinks), compiled=False)
        assert np.allclose(out, plain, atol=1e-5)
        for row, own in zip(rows, out, strict=True):
            assert np.allclose(own, row.exact(row.choice(256), sinks), atol=1e-4)
            assert not np.allclose(own, row.exact(row.choice(256)), atol=1e-2)


def test_block_score_is_maximum_token_score_for_any_split() -> None:
    """Queries are rounded to whole numbers, so that scores have the same bits for any split."""
    rows = [Row(7, cuts, 3) for cuts in ([700], [96, 160, 640, 700], [37, 700])]
    exact, scores = rows[0].exact_scores(256), []
    for device in (GPUBackend(), CPUBackend()):
        with using(device):
            scores += [scores_of(row, 256) for row in rows]
    assert all(np.array_equal(one, scores[0]) for one in scores[1:])
    assert np.abs(scores[0] - exact).max() < 0.03 * np.abs(exact).max()
    assert np.corrcoef(scores[0].ravel(), exact.ravel())[0, 1] > 0.999
    assert np.corrcoef(np.roll(scores[0], 1, -1).ravel(), exact.ravel())[0, 1] < 0.5


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 99),
            st.lists(st.integers(1, 90), min_size=1, max_size=6),
            st.integers(0, TAIL - 1),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, 4, 16, 32]),
    st.sampled_from([128, 160, 256]),
)
def test_batched_rows_match_single_rows_for_any_split(
    drawn: list[tuple[int, list[int], int]], unit: int, tokens: int
) -> None:
    """Segments start at multiples of any block size; rows differ in length."""
    rows = []
    for seed, lengths, tail in drawn:
        cuts = np.cumsum([length * unit % 400 + unit for length in lengths]).tolist()
        rows.append(Row(seed, [cut // unit * unit for cut in cuts], tail))
    out = attend(rows, tokens)
    for row, own in zip(rows, out, strict=True):
        assert np.allclose(own, row.exact(row.choice(tokens)), atol=2e-4)


@pytest.mark.parametrize("codec", ["turbo4", "kivi4/turbo4", "affine8g32/turbo3"])
def test_selected_codes_are_dequantized(codec: str) -> None:
    row = Row(3, [128, 512, 768], 5, codec)
    assert np.allclose(attend([row], 256)[0], row.exact(row.choice(256)), atol=1e-3)


def test_each_row_selects_from_shared_segment() -> None:
    rows = [Row(5, [512], tail) for tail in (2, 7)]
    rows[1].spans = rows[0].spans
    rows[1].keys[:, :512], rows[1].values[:, :512] = rows[0].keys[:, :512], rows[0].values[:, :512]
    rows[1].queries = np.random.default_rng(8).normal(size=(HEADS, DIM)).astype(np.float32) * 3
    out = attend(rows, 160)
    for row, own in zip(rows, out, strict=True):
        assert np.allclose(own, row.exact(row.choice(160)), atol=2e-4)
    assert rows[0].choice(160) != rows[1].choice(160)


@pytest.mark.parametrize("device", [CPUBackend(), GPUBackend()], ids=["cpu", "gpu"])
def test_shared_segment_scores_match_single_rows(
    monkeypatch: pytest.MonkeyPatch, device: AttentionBackend
) -> None:
    rows = [Row(5, [512, 600 + 40 * seed], 3) for seed in range(3)]
    for row in rows[1:]:
        row.spans[0] = rows[0].spans[0]
    decoded = [row.decode_row(slot) for slot, row in enumerate(rows)]
    draw = np.random.default_rng(1)
    queries = mx.array(draw.normal(size=(3, KV_HEADS, 2, DIM)).astype(np.float32))
    selection, counts = Selection(128, INDEX), []
    products = KeyIndex.products

    def counted(self: KeyIndex, whole: mx.array, *more: Any) -> mx.array:
        counts.append(whole.shape[1])
        return products(self, whole, *more)

    monkeypatch.setattr(KeyIndex, "products", counted)
    together = block_scores(selection, decoded, queries, 1.0, 0, device)
    assert counts == [6, 2, 2, 2], "the shared segment once, the rest by each row"
    for number, scores in enumerate(together):
        one = slice(number, number + 1)
        where = selection, decoded[one], queries[one], 1.0, 0, device
        assert mx.array_equal(scores, block_scores(*where)[0])


def test_full_budget_matches_full_attention() -> None:
    for lengths in ([[300]], [[300], [96, 200]]):
        rows = [Row(seed, cuts, 3) for seed, cuts in enumerate(lengths)]
        whole = attend(rows, None)
        assert np.array_equal(attend(rows, 304), whole), "to the bit"
        assert not np.array_equal(attend(rows, 303), whole)


def test_selection_is_prepared_once_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row may have many spans with an index each; unselected layers must cost nothing."""
    looked_at: list[Segment] = []
    complete = KeyIndex.complete

    def counted(self: KeyIndex, segment: Segment) -> bool:
        looked_at.append(segment)
        return complete(self, segment)

    monkeypatch.setattr(KeyIndex, "complete", counted)
    row = Row(2, [256, 512, 700], 3).decode_row(0)
    tails = Tails(1, TAIL, [LayerShape(KV_HEADS, DIM, VALUE_DIM, mx.float32)])
    looked_at.clear()
    step = DecodeStep.of(devices.current(), [row], tails, selection=Selection(128, INDEX))
    assert [step.choosing(layer, FAR) for layer in (0, 1, 0)] == [[0], [], [0]]
    assert len(looked_at) == 3
    assert step.choosing(0, AttentionWindow(64, 4)) == [], "behind a window nothing is chosen"
    step = DecodeStep.of(devices.current(), [row], tails)
    assert step.choosing(0, FAR) == [] and len(looked_at) == 3


def test_segments_without_index_are_fully_attended() -> None:
    row = Row(2, [256, 512], 3)
    whole = attend([row], None)
    span = row.spans[0]
    row.spans[0] = KVSpan(Segment(span.segment.layers), 0, 256)
    assert np.array_equal(attend([row], 128), whole)


def test_planted_key_is_selected_but_missed_by_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token in the middle matches the query; others of equal norm do not."""
    found = dict.fromkeys(("chosen", "by MLX", "worst", "window"), 0)
    for seed in range(10):
        row = Row(seed, [1_024, 2_048], 3)
        at = 100 + 173 * seed
        row.queries /= 3
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            row.keys[kv, at] = row.queries[kv * HEADS // KV_HEADS] * 3
        row.values[:, at] = 10.0
        row.spans = [
            KVSpan(row.segment(start, start + 1_024), start, 1_024) for start in (0, 1_024)
        ]
        whole = [set(range(row.position + 1))] * KV_HEADS
        expected = row.exact(whole)[0]
        for name, compiled in (("chosen", True), ("by MLX", False)):
            out = attend([row], 128, compiled=compiled)[0, 0]
            found[name] += bool(np.abs(out - expected).max() < 0.1)
        window = [set(range(row.position - 127, row.position + 1))] * KV_HEADS
        found["window"] += bool(np.abs(row.exact(window)[0] - expected).max() < 0.1)
        with monkeypatch.context() as patched:
            choose_worst_blocks(patched)
            out = attend([row], 128, compiled=False)[0, 0]
            found["worst"] += bool(np.abs(out - expected).max() < 0.1)
    assert found == {"chosen": 10, "by MLX": 10, "worst": 0, "window": 0}


def test_infinite_score_is_selected() -> None:
    """A key whose norm exceeds the index's scale ranks first."""
    row = Row(4, [512], 3)
    for kv in range(KV_HEADS):
        row.keys[kv, 200] = row.queries[kv * HEADS // KV_HEADS] * 1e6
    row.spans = [KVSpan(row.segment(0, 512), 0, 512)]
    selection = Selection(128, INDEX)
    queries = mx.array(row.queries).reshape(1, KV_HEADS, HEADS // KV_HEADS, DIM)
    for device in (GPUBackend(), CPUBackend()):
        (chosen,) = best_blocks(selection, [row.decode_row(0)], queries, 1.0, 0, device)
        blocks = np.array(chosen).tolist()
        assert all(200 // BLOCK_TOKENS - FIRST_BLOCKS in of_head for of_head in blocks)
    with using(CPUBackend()):
        assert np.allclose(attend([row], 128)[0, ::2], row.values[:, 200], atol=1e-3)


def test_share_is_summed_over_queries_and_counts_first_block() -> None:
    """The maximum over queries, or shares without the first block, would select another block."""
    of_queries = np.array([[[0.0, 0.45, 0.40, 0.15], [0.0, 0.05, 0.30, 0.65]]], np.float32)
    of_sink = np.array([[[0.9, 0.08, 0.01, 0.01], [0.1, 0.1, 0.5, 0.3]]], np.float32)
    with np.errstate(divide="ignore"):
        by_sum, by_sink = (
            np.array(_lacks(mx.array(np.log(shares)))) for shares in (of_queries, of_sink)
        )
    assert np.allclose(-by_sum, [[0.5, 0.7, 0.8]]) and np.allclose(-by_sink, [[0.18, 0.51, 0.31]])
    assert of_queries.max(axis=1)[0, 1] > of_queries.max(axis=1)[0, 2], "negative control"
    alone = (of_sink[..., 1:] / of_sink[..., 1:].sum(axis=-1, keepdims=True)).sum(axis=1)
    assert alone.argmax() != by_sink.argmin(), "negative control"


@pytest.mark.parametrize("tokens", [128, 160, 512, 1_000])
def test_selection_stays_within_token_budget(tokens: int) -> None:
    selection = Selection(tokens, INDEX)
    positions = range(tokens, tokens + 200)
    assert selection.most_blocks == max(map(selection.blocks, positions))
    for position in positions:
        start, blocks = selection.recent_start(position), selection.blocks(position)
        assert blocks >= 1 and start % BLOCK_TOKENS == 0
        assert tokens - BLOCK_TOKENS < FIRST_TOKENS + blocks * BLOCK_TOKENS + position + 1 - start
        assert FIRST_TOKENS + blocks * BLOCK_TOKENS + position + 1 - start <= tokens
        assert position - start >= 32, "the longest tail is recent"
        assert start - FIRST_TOKENS >= blocks * BLOCK_TOKENS, "there are as many to choose from"


@settings(max_examples=60)
@given(data=st.data())
def test_blocks_are_gathered_from_segments_of_any_length(data: st.DataObject) -> None:
    """The last segment may end inside a group of rows that are copied together."""
    lengths = data.draw(st.lists(st.sampled_from([8, 16, 32, 48, 40]), min_size=1, max_size=4))
    lengths.append(data.draw(st.integers(2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)))
    ends = np.cumsum(lengths)
    tokens = int(ends[-1])
    side = np.arange(KV_HEADS * tokens * 3, dtype=np.float32).reshape(1, KV_HEADS, tokens, 3)
    spans = []
    for start, stop in zip([0, *ends], ends, strict=False):
        held = mx.array(side[:, :, start:stop])
        spans.append((KVSpan(Segment(((held, held),)), int(start), int(stop - start)), held))
    whole = st.integers(FIRST_BLOCKS, tokens // BLOCK_TOKENS - 1)
    count = data.draw(st.integers(1, tokens // BLOCK_TOKENS - FIRST_BLOCKS))
    drawn = st.lists(whole, min_size=count, max_size=count, unique=True).map(sorted)
    blocks = np.array([data.draw(drawn) for _ in range(KV_HEADS)])
    relative = mx.array((blocks - FIRST_BLOCKS).astype(np.uint32))
    read, alone = (
        BlockTokens.of(relative, block_positions(tokens // BLOCK_TOKENS * BLOCK_TOKENS)),
        len(spans) == 1,
    )
    gathered = None
    for span, held in spans:
        columns, inside = read.within(span, alone=alone)
        own = np.array(block_gather._gathered(held, span, columns, read, devices.current()))[0]
        if gathered is None or inside is None:
            gathered = own
        else:
            gathered = np.where(np.array(inside)[..., None], own, gathered)
    assert gathered is not None
    columns = (blocks[..., None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(KV_HEADS, -1)
    assert np.array_equal(gathered, np.stack([side[0, h, columns[h]] for h in range(KV_HEADS)]))
