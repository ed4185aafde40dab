"""A prefill chunk is longer on a GPU whose memory allows for it, and joins a layer at a time."""

from __future__ import annotations

import mlx.core as mx
import pytest

from penstock import config
from penstock.engine.settings import LONG_CHUNK, LONG_CHUNK_FROM, checked
from penstock.kv import backend
from penstock.kv.attention import AttentionWindow
from penstock.kv.attention_plan import KVSpan
from penstock.kv.chunk_reads import ChunkReads
from penstock.kv.segment import Segment


@pytest.mark.parametrize(
    ("device", "limit", "given", "expected"),
    [
        (backend.GPUBackend(), LONG_CHUNK_FROM, None, LONG_CHUNK),
        (backend.GPUBackend(), LONG_CHUNK_FROM - 1, None, config.PREFILL_CHUNK),
        (backend.GPUBackend(), LONG_CHUNK_FROM, 300, 300),
        (backend.CPUBackend(), LONG_CHUNK_FROM, None, config.PREFILL_CHUNK),
    ],
)
def test_prefill_chunk(
    device: backend.Backend, limit: int, given: int | None, expected: int
) -> None:
    with backend.using(device):
        settings = checked({"memory_limit": limit, "prefill_chunk": given})
    assert settings.prefill_chunk == expected


LAYERS, PREFIX, CHUNK, HEADS, DIM = 8, 4_096, 16, 2, 64


def joined_peak(*, held: bool = False) -> float:
    """Return the peak of a chunk's layers behind a prefix, in joined keys and values of a layer.

    Args:
        held: all that was joined is kept, as if nothing were let go.
    """
    shape = 1, HEADS, PREFIX // 4, DIM
    segments = [
        Segment(tuple((mx.random.normal(shape), mx.random.normal(shape)) for _ in range(LAYERS)))
        for _ in range(4)
    ]
    parts = [KVSpan(one, i * shape[2], shape[2]) for i, one in enumerate(segments)]
    queries = mx.random.normal((1, HEADS, CHUNK, DIM))
    mx.eval(queries, [one.layers for one in segments])
    kept, reads = [], []
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for layer in range(LAYERS):
        reads.append(ChunkReads(layer, AttentionWindow(), parts, PREFIX))
        keys, values = reads[-1].update_and_fetch(queries + 1, queries + 2)
        if held:
            kept.append(reads[-1].joined(AttentionWindow())[:2])
            mx.eval(kept[-1])
        mask = reads[-1].make_mask(CHUNK)
        queries = reads[-1].attend(queries, keys, values, DIM**-0.5, mask)
    mx.eval(queries)
    return (mx.get_peak_memory() - before) / (2 * HEADS * (PREFIX + CHUNK) * DIM * 4)


def test_layers_of_a_chunk_take_turns_with_what_is_joined() -> None:
    """On a GPU's back end no layer's copy of the prefix is there when the next one's is made."""
    kept = mx.set_cache_limit(0)
    try:
        with backend.using(backend.GPUBackend()):
            assert 1 <= joined_peak() < 2
            assert joined_peak(held=True) > LAYERS
    finally:
        mx.set_cache_limit(kept)
