"""Attention to unselected tokens through an index with values; all ways agree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.devices import using
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.selection.block_choice import best_blocks
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS, FIRST_BLOCKS, HALF_NOISE
from penstock.attention.selection.key_centers import KeyCenters, Rotation
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selected_reads import attend_alone
from penstock.attention.selection.selection import FIRST_TOKENS, Selection
from penstock.kv.segment import KVSpan, Segment
from penstock.plugins.cpu.cpu_backend import CPUBackend

HEADS, KV_HEADS, DIM, VALUE_DIM, TOKENS = 4, 2, 32, 24, 128
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """A sequence of several spans and a tail."""

    cuts: tuple[int, ...]
    tail: int
    seed: int
    rest: bool = True
    centered: bool = True
    dtype: mx.Dtype = mx.float32

    @property
    def count(self) -> int:
        return self.cuts[-1] + self.tail

    @cached_property
    def arrays(self) -> tuple[Numbers, Numbers, Numbers]:
        draw = np.random.default_rng(self.seed)
        keys = 2 * draw.normal(size=(1, KV_HEADS, self.count, DIM))
        values = draw.normal(size=(1, KV_HEADS, self.count, VALUE_DIM))
        queries = draw.normal(size=(1, HEADS, 1, DIM))
        return keys.astype(np.float32), values.astype(np.float32), queries.astype(np.float32)

    def index(self, with_values: bool) -> KeyIndex:
        """Return the index rule; the keys need not be distributed around the centers."""
        draw = np.random.default_rng(self.seed + 1)
        vectors = draw.normal(size=(KV_HEADS, DIM)).astype(np.float32)
        turns = 10.0 ** -draw.uniform(0, 4, DIM // 2)
        rotation = Rotation(np.concatenate([-turns, turns]), np.roll(np.arange(DIM), DIM // 2))
        centers = {0: KeyCenters(vectors, rotation)} if self.centered else {}
        return KeyIndex(frozenset({0}), with_values, centers)

    def attention(
        self, device: AttentionBackend, sinks: Numbers | None, *, compiled: bool
    ) -> Numbers:
        """Return the attention computed by penstock."""
        index = self.index(self.rest)
        selection = Selection(TOKENS, index, compiled)
        keys, values, queries = (mx.array(side).astype(self.dtype) for side in self.arrays)
        with using(device):
            spans = [
                KVSpan(
                    index.indexed(
                        Segment(((keys[:, :, a:b], values[:, :, a:b]),)).owned(), a, device
                    ),
                    *(a, b - a),
                )
                for a, b in zip((0, *self.cuts), self.cuts, strict=False)
            ]
            position = self.count - 1
            row = DecodeRow(tuple(spans), position, 0, position - self.cuts[-1])
            tail = keys[:, :, self.cuts[-1] :], values[:, :, self.cuts[-1] :]
            sunk = None if sinks is None else mx.array(sinks).astype(self.dtype)
            scale = DIM**-0.5
            out = attend_alone(
                device.choice_reader(selection, DIM, VALUE_DIM), row, queries, scale, tail, sunk
            )
        return np.array(out.astype(mx.float32))[0, :, 0]

    def expected(self, device: AttentionBackend, sinks: Numbers | None) -> Numbers:
        """Return the definition: selected tokens by their keys, all others by the index.

        The device says what is chosen: of blocks that are wanted almost equally each takes another.
        """
        keys, values, queries = self.arrays
        index = self.index(True)
        selection = Selection(TOKENS, index)
        position, out = self.count - 1, []
        asked = queries.reshape(KV_HEADS, HEADS // KV_HEADS, DIM) * DIM**-0.5
        recent = selection.recent_start(position)
        with using(device):
            whole = index.indexed(Segment(((mx.array(keys), mx.array(values)),)), 0, device)
            row = DecodeRow((KVSpan(whole, 0, position),), position, 0, 0)
            (blocks,) = best_blocks(selection, [row], mx.array(asked)[None], 1.0, 0, device)
            chosen = np.array(blocks) + FIRST_BLOCKS
            held = whole.index[0]
            assert held is not None
            near_keys, near_values = index.sides(held, VALUE_DIM)
            near = np.array(near_keys.score(mx.array(asked), device))
            if self.centered:
                near += asked @ index.centers[0].between(0, self.count).swapaxes(1, 2)
            sizes = np.array(near_keys.parts[1])[0].astype(np.float32)
            wide = np.array(near_values.dequantize(device))[0]
        at = np.arange(self.count)
        for head in range(KV_HEADS):
            inside = (at < FIRST_TOKENS) | (at >= recent)
            inside |= np.isin(at // BLOCK_TOKENS, chosen[head])
            for query in range(HEADS // KV_HEADS):
                own = asked[head, query]
                noise = HALF_NOISE * (own @ own) * sizes[head] ** 2
                scores = np.where(inside, keys[0, head] @ own, near[head, query] - noise)
                sunk = -np.inf if sinks is None else sinks[head * HEADS // KV_HEADS + query]
                weights = np.exp(scores)
                mixed = weights @ np.where(inside[:, None], values[0, head], wide[head])
                out.append(mixed / (weights.sum() + np.exp(sunk)))
        return np.array(out)


WAYS: list[tuple[AttentionBackend, bool]] = [
    (CPUBackend(), True),
    (CPUBackend(), False),
    (CPUBackend(lanes=1), True),
    (GPUBackend(), True),
]


@settings(max_examples=40)
@given(
    st.sampled_from(WAYS), st.lists(st.integers(1, 700), min_size=1, max_size=4, unique=True),
    st.integers(1, 20), st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_unselected_tokens_are_attended_through_index(
    way: tuple[AttentionBackend, bool],
    cuts: list[int],
    tail: int,
    sunk: bool,
    centered: bool,
    seed: int,
) -> None:
    row = Row((*sorted(cuts), max(cuts) + 200), tail, seed, centered=centered)
    sinks = np.random.default_rng(seed).normal(size=HEADS).astype(np.float32) if sunk else None
    device, compiled = way
    out = row.attention(device, sinks, compiled=compiled)
    assert np.allclose(out, row.expected(device, sinks), atol=5e-3)


@pytest.mark.parametrize(("device", "compiled"), WAYS)
def test_check_detects_skipped_unselected_tokens(device: AttentionBackend, compiled: bool) -> None:
    """Negative control: only the selected tokens are read."""
    row = Row((300, 900), 5, 1)
    without = Row(row.cuts, row.tail, row.seed, rest=False)
    out = without.attention(device, None, compiled=compiled)
    assert not np.allclose(out, row.expected(device, None), atol=5e-2)


@pytest.mark.parametrize(("device", "compiled"), WAYS)
def test_attending_unselected_tokens_is_closer_to_full_attention(
    device: AttentionBackend, compiled: bool
) -> None:
    errors: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(5):
        keys, values, queries = Row((300, 900), 5, seed).arrays
        asked = queries.reshape(KV_HEADS, -1, DIM) * DIM**-0.5
        weights = np.exp(asked @ keys[0].swapaxes(1, 2))
        whole = (weights @ values[0] / weights.sum(axis=-1, keepdims=True)).reshape(HEADS, -1)
        for rest, found in errors.items():
            out = Row((300, 900), 5, seed, rest).attention(device, None, compiled=compiled)
            found.append(float(np.square(out - whole).mean()))
    assert np.mean(errors[True]) < 0.5 * np.mean(errors[False])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("device", [CPUBackend(), GPUBackend()], ids=["cpu", "gpu"])
def test_unselected_tokens_are_attended_in_half_precision(
    device: AttentionBackend, dtype: mx.Dtype
) -> None:
    row = Row((300, 900), 5, 2, dtype=dtype)
    assert np.allclose(
        row.attention(device, None, compiled=True), row.expected(device, None), atol=0.1
    )


def test_huge_values_of_unselected_tokens_stay_finite() -> None:
    row = Row((600,), 5, 3)
    row.arrays[1][0, :, 100:120] = 3e38
    for device, compiled in WAYS:
        assert np.isfinite(row.attention(device, None, compiled=compiled)).all()
