"""A chunk that reads piece by piece: the numbers of one that joins what is in front of it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from penstock.kv import streamed_reads
from penstock.kv.attention import AttentionWindow
from penstock.kv.attention_plan import KVSpan
from penstock.kv.backend import current
from penstock.kv.chunk_reads import ChunkReads
from penstock.kv.reads import MaskRequest
from penstock.kv.segment import Segment
from rounding import product_error

HEADS, KV_HEADS, DIM, BEFORE, CHUNK = 4, 2, 16, (48, 70, 7), 40


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


def attended(most_joined: int | None, sinks: mx.array | None = None) -> mx.array:
    parts, queries, keys, values = scene()
    reads = ChunkReads(0, AttentionWindow(), parts, sum(BEFORE), most_joined=most_joined)
    given = reads.update_and_fetch(keys, values)
    return reads.attend(queries, *given, DIM**-0.5, MaskRequest(None), sinks)


@pytest.mark.parametrize("scores_at_once", [2**19, 4 * HEADS * 32])
@pytest.mark.parametrize("sunk", [False, True])
def test_the_result_is_that_of_joined_columns(
    scores_at_once: int, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if sunk else None
    joined = attended(None, sinks)
    monkeypatch.setattr(streamed_reads, "STREAMED_TOKENS", 32)
    monkeypatch.setattr(type(current()), "scores_at_once", scores_at_once)
    streamed = attended(32, sinks)
    most = product_error(mx.ones((1, sum(BEFORE) + CHUNK)), mx.ones((sum(BEFORE) + CHUNK, 1)))
    assert float(mx.abs(streamed - joined).max()) <= most
    assert mx.array_equal(attended(10_000, sinks), joined), "few columns are joined"


def test_it_is_the_pieces_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_reads, "STREAMED_TOKENS", 32)
    joined, read = attended(None), streamed_reads._Queries.read
    monkeypatch.setattr(
        streamed_reads._Queries,
        "read",
        lambda self, keys, values, own=None: read(self, keys, values * 2, own),
    )
    assert float(mx.abs(attended(32) - 2 * joined).max()) < 1e-4
