"""Streamed chunk reads against joined ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from rounding import product_error

from penstock.attention import devices, streamed_reads
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.devices import current, using
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.piece_reads import PieceReads
from penstock.attention.reads import MaskRequest, decode_reads
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import ALL_TOKENS, AttentionWindow
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.plugins.cpu.cpu_piece_reads import CPUPieceReads

HEADS, KV_HEADS, DIM, BEFORE, CHUNK = 4, 2, 16, (48, 70, 7), 40


@pytest.fixture(autouse=True, params=[CPUBackend, GPUBackend])
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param()):
        yield


def scene() -> tuple[list[KVSpan], mx.array, mx.array, mx.array]:
    mx.random.seed(3)
    parts, at = [], 0
    for tokens in BEFORE:
        keys, values = (mx.random.normal((1, KV_HEADS, tokens, DIM)) for _ in range(2))
        parts.append(KVSpan(Segment(((keys, values),)), at, tokens))
        at += tokens
    queries = mx.random.normal((1, HEADS, CHUNK, DIM))
    keys, values = (mx.random.normal((1, KV_HEADS, CHUNK, DIM)) for _ in range(2))
    return parts, queries, keys, values


def attended(most_joined: int, sinks: mx.array | None = None) -> mx.array:
    parts, queries, keys, values = scene()
    reads = ChunkReads(
        0, AttentionWindow(), parts, sum(BEFORE), devices.current(), most_joined=most_joined
    )
    given = reads.update_and_fetch(keys, values)
    return reads.attend(queries, *given, DIM**-0.5, MaskRequest(None), sinks)


@pytest.mark.parametrize("scores_at_once", [2**19, 4 * HEADS * 32])
@pytest.mark.parametrize("sunk", [False, True])
def test_streamed_chunk_matches_joined(
    scores_at_once: int, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if sunk else None
    joined = attended(ALL_TOKENS, sinks)
    monkeypatch.setattr(streamed_reads, "STREAMED_TOKENS", 32)
    monkeypatch.setattr(type(current()), "scores_at_once", scores_at_once)
    streamed = attended(32, sinks)
    most = product_error(mx.ones((1, sum(BEFORE) + CHUNK)), mx.ones((sum(BEFORE) + CHUNK, 1)))
    assert float(mx.abs(streamed - joined).max()) <= most
    assert mx.array_equal(attended(10_000, sinks), joined), "few columns are joined"


def doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Double all values that are read in pieces."""
    kind = CPUPieceReads if isinstance(current(), CPUBackend) else PieceReads
    real = kind.read

    def read(self: PieceReads, keys: Any, values: Any, *more: Any) -> None:
        real(self, keys, [2 * side for side in values], *more)

    monkeypatch.setattr(kind, "read", read)


def decoded(most_joined: int, count: int, tail: int, sinks: mx.array | None = None) -> mx.array:
    """Return full attention of rows after this number of tail tokens."""
    parts, queries, keys, values = scene()
    tails = Tails(count, tail + 1, [LayerShape(KV_HEADS, DIM, DIM, mx.float32)])
    tails.ready()
    for slot in range(count):
        tails.write_block(0, slot, 0, keys[:, :, :tail], values[:, :, :tail])
    at = sum(BEFORE) + tail
    rows = [DecodeRow(tuple(parts), at, slot, tail, whole=True) for slot in range(count)]
    selection = Selection(128, KeyIndex(frozenset({0})))
    step = DecodeStep.of(
        devices.current(), rows, tails, selection=selection, most_joined=most_joined
    )
    (reads,) = decode_reads(step, [AttentionWindow()])
    new = slice(tail, tail + 1)
    given = reads.update_and_fetch(
        *(mx.repeat(side[:, :, new], count, axis=0) for side in (keys, values))
    )
    asked = mx.concatenate([queries[:, :, n : n + 1] for n in range(count)])
    return reads.attend(asked, *given, DIM**-0.5, MaskRequest(None), sinks)


@pytest.mark.parametrize(("count", "tail"), [(1, 0), (1, 5), (3, 5)])
@pytest.mark.parametrize("sunk", [False, True])
def test_streamed_decode_row_matches_whole(
    count: int, tail: int, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if sunk else None
    whole = decoded(ALL_TOKENS, count, tail, sinks)
    monkeypatch.setattr(streamed_reads, "STREAMED_TOKENS", 4)
    tokens = sum(BEFORE) + tail + 1
    most = product_error(mx.ones((1, tokens)), mx.ones((tokens, 1)))
    assert float(mx.abs(decoded(32, count, tail, sinks) - whole).max()) <= most
    assert mx.array_equal(decoded(10_000, count, tail, sinks), whole), "few are read at once"
    doubling(monkeypatch)
    assert float(mx.abs(decoded(32, count, tail, sinks) - whole).max()) > 0.1, "negative control"


def test_check_detects_doubled_streamed_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_reads, "STREAMED_TOKENS", 32)
    joined = attended(ALL_TOKENS)
    doubling(monkeypatch)
    assert float(mx.abs(attended(32) - 2 * joined).max()) < 1e-4
