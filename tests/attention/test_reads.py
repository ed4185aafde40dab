"""Decode and chunk reads on random trees, rows and windows against the formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import attention_reference as reference
import mlx.core as mx
import numpy as np
import pytest
from attention_reference import Numbers, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.attention import attention_plan, devices
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import AttentionPlan, DecodeRow, in_order, plan_attention
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.joined_reads import JoinedReads
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.reads import decode_reads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.plugins.cpu.cpu_backend import WIDE_ROW, CPUBackend
from penstock.plugins.cpu.cpu_layer_decode import CPULayerDecode

KEY_WIDTH, VALUE_WIDTH, TAIL = 4, 3, 4
SCALE = 0.7


@dataclass
class Node:
    """A segment and its start position; child nodes start at its end."""

    segment: Segment
    start: int

    @property
    def end(self) -> int:
        return self.start + self.segment.tokens


@dataclass
class Scene:
    """Rows of one step, in the order of `in_order`, over segments of random numbers."""

    attention_window: AttentionWindow
    heads: int
    kv_heads: int
    seed: int
    rows: list[DecodeRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self._random.normal(size=shape).astype(np.float32))

    def sides(self, rows: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Return random new keys and values."""
        shape = rows, self.kv_heads, tokens
        return self.normal(*shape, KEY_WIDTH), self.normal(*shape, VALUE_WIDTH)

    def segment(self, tokens: int) -> Segment:
        return Segment((self.sides(1, tokens),))

    def tails(self) -> Tails:
        """Return tails with a number in every column, whether visible or not."""
        shape = LayerShape(self.kv_heads, KEY_WIDTH, VALUE_WIDTH, mx.float32)
        tails = Tails(len(self.rows), TAIL + WIDE_ROW, [shape])
        tails.ready()
        for slot in range(tails.slots):
            for column in range(TAIL + WIDE_ROW):
                tails.write_block(0, slot, column, *self.sides(1, 1))
        return tails

    def answer(
        self,
        queries: mx.array,
        held: Held,
        position: int,
        attention_window: AttentionWindow,
        sinks: Any,
    ) -> Any:
        """Return what queries (1, heads, n, d) at `position` and behind make of what is held."""
        return reference.attention(
            numbers(queries[0]),
            np.concatenate(held.keys, axis=1),
            np.concatenate(held.values, axis=1),
            queries_at=range(position, position + queries.shape[2]),
            columns_at=held.positions,
            attention_window=attention_window,
            scale=SCALE,
            sinks=None if sinks is None else numbers(sinks),
        )


class Held:
    """All keys and values that a row can see, concatenated."""

    def __init__(self, parts: Sequence[KVSpan]) -> None:
        self.positions: list[int] = []
        self.keys: list[Numbers] = []
        self.values: list[Numbers] = []
        for part in parts:
            keys, values = part.segment.layers[0]
            self.add(part.start, keys[:, :, : part.columns], values[:, :, : part.columns])

    def add(self, start: int, keys: Any, values: Any) -> None:
        self.positions += range(start, start + keys.shape[2])
        self.keys.append(numbers(keys[0]))
        self.values.append(numbers(values[0]))


@st.composite
def scenes(draw: st.DrawFn, *, tail: int = TAIL - 1) -> Scene:
    """Draw a tree, rows that end anywhere in it, private segments, tails and a window."""
    window = draw(st.none() | st.integers(1, 20))
    attention_window = AttentionWindow(window, 0 if window is None else draw(st.integers(0, 8)))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    scene = Scene(attention_window, heads, kv_heads, draw(st.integers(0, 99)))
    paths: list[list[Node]] = [[]]
    for _ in range(draw(st.integers(0, 4))):
        above = draw(st.sampled_from(paths))
        start = above[-1].end if above else 0
        paths.append([*above, Node(scene.segment(draw(st.integers(1, 9))), start)])
    count = draw(st.integers(1, 5))
    slots = draw(st.permutations(range(count)))
    rows = [_row(draw, scene, draw(st.sampled_from(paths)), slot, tail) for slot in slots]
    scene.rows = [rows[i] for i in in_order(rows)]
    return scene


def _row(draw: st.DrawFn, scene: Scene, path: list[Node], slot: int, most: int) -> DecodeRow:
    parts = [KVSpan(node.segment, node.start, node.segment.tokens) for node in path]
    if parts:  # the last node may go on behind what this row reads of it
        last = parts.pop()
        parts.append(KVSpan(last.segment, last.start, draw(st.integers(1, last.columns))))
    runs: list[KVSpan] = []
    end = parts[-1].end if parts else 0
    for tokens in draw(st.lists(st.integers(1, 6), max_size=2)):
        runs.append(KVSpan(scene.segment(tokens), end, tokens))
        end += tokens
    if runs and draw(st.booleans()):
        parts, runs = _without_invisible(parts, runs, scene.attention_window, end)
    tail = draw(st.integers(0, most))
    return DecodeRow((*parts, *runs), end + tail, slot, tail)


def _without_invisible(
    path: list[KVSpan], runs: list[KVSpan], attention_window: AttentionWindow, end: int
) -> tuple[list[KVSpan], list[KVSpan]]:
    """Drop segments that no query from `end` on sees, as the engine does."""
    nearest = attention_window.starts_at(end)
    if nearest <= attention_window.keep:
        return path, runs
    if path and path[-1].end <= nearest:
        path = [part for part in path if part.start < attention_window.keep]
    *others, last = runs
    return path, [*(r for r in others if r.end > nearest or r.start < attention_window.keep), last]


def check_decode(
    scene: Scene, window: int | None = None, with_sinks: bool = False, width: int = 1
) -> None:
    """Attend with all rows at once, `width` new tokens each, and compare with the formula."""
    tails, b = scene.tails(), len(scene.rows)
    held = []
    for row in scene.rows:
        held.append(Held(row.parts))
        if row.tail:
            held[-1].add(row.position - row.tail, *tails.read_block(0, row.slot, 1, row.tail))
    (reads,) = decode_reads(
        DecodeStep.of(devices.current(), scene.rows, tails, width), [scene.attention_window]
    )
    assert mx.array(reads.offset).reshape(-1).tolist() == [row.position for row in scene.rows]
    keys, values = scene.sides(b, width)
    queries = scene.normal(b, scene.heads, width, KEY_WIDTH)
    sinks = scene.normal(scene.heads) if with_sinks else None
    mask = reads.make_mask(width, window_size=window)
    given = reads.update_and_fetch(keys, values)
    answers = []
    for device in (CPUBackend(lanes=2), GPUBackend()):  # all at once, and part by part
        with devices.using(device):
            answers.append(numbers(reads.attend(queries, *given, SCALE, mask, sinks)))
    for i, row in enumerate(scene.rows):
        held[i].add(row.position, keys[i : i + 1], values[i : i + 1])
        true = scene.answer(
            queries[i : i + 1], held[i], row.position, scene.attention_window.within(window), sinks
        )
        for found in answers:
            assert found.shape == (b, scene.heads, width, VALUE_WIDTH)
            np.testing.assert_allclose(found[i], true, atol=3e-6, err_msg=f"row {i}: {row}")
        # What was written is there for the next step.
        written = tails.read_block(0, row.slot, 1, row.tail + width)
        assert mx.array_equal(written[0][0, :, row.tail :], keys[i])
        assert mx.array_equal(written[1][0, :, row.tail :], values[i])


windows = st.none() | st.integers(1, 12)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scenes(), windows, st.booleans())
def test_decode_steps_match_reference(scene: Scene, window: int | None, with_sinks: bool) -> None:
    check_decode(scene, window, with_sinks)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    scenes(tail=TAIL - 3),
    windows,
    st.booleans(),
    st.sampled_from((2, 3, WIDE_ROW - 1, WIDE_ROW)),
)
def test_decode_steps_of_several_tokens_match_reference(
    scene: Scene, window: int | None, with_sinks: bool, width: int
) -> None:
    check_decode(scene, window, with_sinks, width)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(scenes(tail=0), st.integers(1, 6), windows, st.booleans())
def test_chunks_match_reference(scene: Scene, n: int, window: int | None, with_sinks: bool) -> None:
    row = scene.rows[0]
    keys, values = scene.sides(1, n)
    queries = scene.normal(1, scene.heads, n, KEY_WIDTH)
    sinks = scene.normal(scene.heads) if with_sinks else None
    reads = ChunkReads(0, scene.attention_window, row.parts, row.position, devices.current())
    mask = reads.make_mask(n, window_size=window)
    found = reads.attend(queries, *reads.update_and_fetch(keys, values), SCALE, mask, sinks)
    held = Held(row.parts)
    held.add(row.position, keys, values)
    true = scene.answer(queries, held, row.position, scene.attention_window.within(window), sinks)
    np.testing.assert_allclose(numbers(found[0]), true, atol=3e-6)
    assert reads.keys is not None and mx.array_equal(reads.keys, keys)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(scenes(), st.integers(1, 6), windows, st.booleans())
def test_joined_kv_and_mask_match_reference(
    scene: Scene, n: int, window: int | None, as_array: bool
) -> None:
    """Decode steps and chunks of models with their own attention, with the mask they get."""
    row, tails = scene.rows[0], scene.tails()
    held = Held(row.parts)
    if row.tail:
        n = 1
        held.add(row.position - row.tail, *tails.read_block(0, row.slot, 1, row.tail))
    tail = (tails, row.slot, row.tail) if n == 1 else None
    reads = JoinedReads(0, scene.attention_window, row.parts, row.position, devices.current(), tail)
    assert reads.empty() == (row.position == 0)
    mask = reads.make_mask(n, as_array, window)
    new = scene.sides(1, n)
    keys, values = reads.update_and_fetch(*new)
    if not scene.attention_window.keep:  # the columns follow on one another
        assert keys.shape[2] == row.position + n - reads.start_position
    again = reads.state
    assert mx.array_equal(again[0], keys) and mx.array_equal(again[1], values)
    assert again[2] == row.position
    queries = scene.normal(1, scene.heads, n, KEY_WIDTH)
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    held.add(row.position, *new)
    true = scene.answer(queries, held, row.position, scene.attention_window.within(window), None)
    np.testing.assert_allclose(numbers(found[0]), true, atol=3e-6)


# ---- a shared part is read once


def times_read(layout: AttentionPlan) -> Counter[int]:
    """Count how often each segment is read."""
    units = [unit for level in layout.levels for unit in level]
    return Counter(
        segment for unit in units for segment in {id(segment) for segment, _, _ in unit.pieces}
    )


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scenes())
def test_shared_spans_are_read_once(scene: Scene) -> None:
    layout = plan_attention(scene.rows, scene.attention_window)
    assert all(times == 1 for times in times_read(layout).values())
    for level in layout.levels:
        rows = [row for unit in level for row in range(unit.first, unit.last)]
        assert rows == sorted(set(rows)), "units of a level have rows in common"
    assert layout.tail_columns == 1 + max(row.tail for row in scene.rows)


def family() -> Scene:
    """Return two rows in each of two branches of a common part; one ends inside a segment."""
    scene = Scene(AttentionWindow(window=14, keep=3), 4, 2, seed=1)
    common, left, right = scene.segment(8), scene.segment(6), scene.segment(5)
    run = KVSpan(scene.segment(3), 12, 3)

    def row(slot: int, tail: int, *parts: KVSpan) -> DecodeRow:
        return DecodeRow((KVSpan(common, 0, 8), *parts), parts[-1].end + tail, slot, tail)

    rows = [
        row(0, 1, KVSpan(left, 8, 6)),
        row(1, 0, KVSpan(right, 8, 5)),
        row(2, 2, KVSpan(left, 8, 4), run),
        row(3, 3, KVSpan(right, 8, 5)),
    ]
    scene.rows = [rows[i] for i in in_order(rows)]
    return scene


def test_branches_of_same_node_share_plan_level() -> None:
    layout = plan_attention(family().rows, AttentionWindow())
    assert [[(u.first, u.last, len(u.pieces)) for u in level] for level in layout.levels[:2]] == [
        [(0, 4, 1)],
        [(0, 2, 1), (2, 4, 1)],
    ]
    check_decode(family())


def test_rows_ending_far_apart_read_segment_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise short rows would be scored against columns that only the long row sees."""
    monkeypatch.setattr(attention_plan, "APART", 4)
    scene = Scene(AttentionWindow(), 4, 2, seed=1)
    long, behind = scene.segment(12), scene.segment(3)
    ends = (12, 3, 11, 4, 12)
    rows = [DecodeRow((KVSpan(long, 0, end),), end, slot, 0) for slot, end in enumerate(ends[:4])]
    rows.append(DecodeRow((KVSpan(long, 0, 12), KVSpan(behind, 12, 3)), 15, 4, 0))
    scene.rows = [rows[i] for i in in_order(rows)]
    layout = plan_attention(scene.rows, scene.attention_window)
    assert sorted(stop for unit in layout.levels[0] for *_, stop in unit.pieces) == [4, 12]
    check_decode(scene)


def test_check_detects_unsorted_rows() -> None:
    """Negative control: adjacent rows without common spans read a shared span one by one."""
    rows = family().rows
    layout = plan_attention([rows[0], rows[2], rows[1], rows[3]], AttentionWindow())
    assert max(times_read(layout).values()) == 2


def test_unshared_row_matches_reference_in_batch_of_shared_rows() -> None:
    scene = family()
    scene.rows = [DecodeRow((), 2, 4, 2), *scene.rows]
    check_decode(scene)


# ---- negative controls of the comparison


def mask_with_extra_window_column(
    attention_window: AttentionWindow, queries: mx.array, columns: mx.array
) -> mx.array:
    near = columns[None] > queries[:, None] - attention_window.window - 1
    return (columns[None] <= queries[:, None]) & (near | (columns[None] < attention_window.keep))


def without_keep(
    attention_window: AttentionWindow, queries: mx.array, columns: mx.array
) -> mx.array:
    near = columns[None] > queries[:, None] - attention_window.window
    return (columns[None] <= queries[:, None]) & near


def mask_without_causality(
    attention_window: AttentionWindow, queries: mx.array, columns: mx.array
) -> mx.array:
    return mx.ones((queries.size, columns.size), mx.bool_)


@pytest.mark.parametrize(
    "wrong", [mask_with_extra_window_column, without_keep, mask_without_causality]
)
def test_check_detects_wrong_mask(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_decode(family())
    monkeypatch.setattr(AttentionWindow, "mask", wrong)
    with pytest.raises(AssertionError, match="row"):
        check_decode(family())


def test_check_detects_skipped_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: LayerDecode, *args: Any) -> mx.array:
        self.step.tails.renew()
        return real(self, *args)

    real = LayerDecode.together
    monkeypatch.setattr(LayerDecode, "together", nothing)
    monkeypatch.setattr(CPULayerDecode, "together", nothing)
    with pytest.raises(AssertionError, match="row"):
        check_decode(family())


# ---- what a model may not do with it


def test_modified_keys_or_values_are_refused() -> None:
    """The engine then serves this model with joined KV."""
    scene = family()
    (reads,) = decode_reads(
        DecodeStep.of(devices.current(), scene.rows, scene.tails()), [scene.attention_window]
    )
    queries = scene.normal(4, scene.heads, 1, KEY_WIDTH)
    keys, values = scene.sides(4, 1)
    mask = reads.make_mask(1)
    with pytest.raises(TypeError, match="after they were cached"):
        reads.attend(queries, keys, values, SCALE, mask)
    reads.update_and_fetch(keys, values)
    with pytest.raises(TypeError, match="after they were cached"):
        reads.attend(queries, keys + 1, values, SCALE, mask)
    with pytest.raises(TypeError, match="after they were cached"):
        reads.attend(queries, keys, values + 1, SCALE, mask)
    with pytest.raises(TypeError, match="its own masks"):
        reads.attend(queries, keys, values, SCALE, None)
    with pytest.raises(TypeError, match="computes with masks"):
        reads.make_mask(1, return_array=True)
