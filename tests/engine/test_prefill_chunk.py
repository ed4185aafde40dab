"""Prefill chunks are longer on GPUs with memory, and join one layer at a time."""

from __future__ import annotations

import mlx.core as mx
import pytest
from small_models import BASE, build

from penstock import config
from penstock.attention import devices
from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.span_attention import AttentionWindow
from penstock.engine.core import Core
from penstock.engine.model.model_probe import weight_bytes
from penstock.engine.model.runner import Runner
from penstock.engine.settings import LONG_CHUNK, LONG_CHUNK_ROOM, SPILLED_CHUNK, checked, fitting
from penstock.kv.segment import KVSpan, Segment
from penstock.plugins.cpu.cpu_backend import CPUBackend

HEADS_OF_256 = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
"""A model for whose heads MLX has no fused attention: all scores of a chunk are held."""


@pytest.mark.parametrize(
    ("device", "heads", "room", "given", "expected"),
    [
        (GPUBackend(), {}, LONG_CHUNK_ROOM, None, LONG_CHUNK),
        (GPUBackend(), {}, LONG_CHUNK_ROOM - 1, None, config.PREFILL_CHUNK),
        (GPUBackend(), {}, LONG_CHUNK_ROOM, 300, 300),
        (GPUBackend(), {}, LONG_CHUNK_ROOM, config.PREFILL_CHUNK, config.PREFILL_CHUNK),
        (GPUBackend(), HEADS_OF_256, LONG_CHUNK_ROOM, None, config.PREFILL_CHUNK),
        (GPUBackend(), HEADS_OF_256, LONG_CHUNK_ROOM, LONG_CHUNK, LONG_CHUNK),
        (CPUBackend(), {}, LONG_CHUNK_ROOM, None, config.PREFILL_CHUNK),
    ],
)
def test_prefill_chunk_depends_on_device_and_memory(
    device: AttentionBackend,
    heads: dict[str, int],
    room: int,
    given: int | None,
    expected: int,
) -> None:
    config_of_model = {**BASE, "model_type": "llama", "head_dim": 64, **heads}
    with devices.using(device):
        runner = Runner(build(config_of_model), devices.current(), max_kv_size=4_096, keep=0)
        limits = checked({"memory_limit": room, "prefill_chunk": given})
        assert fitting(limits, runner, room).prefill_chunk == expected


def test_prefill_chunk_depends_on_memory_left_by_weights() -> None:
    """A limit that the weights fill has no room for a long chunk."""
    with devices.using(GPUBackend()):
        model = build({**BASE, "model_type": "llama", "head_dim": 64})
        beside = weight_bytes(model)
        for limit, expected in (
            (LONG_CHUNK_ROOM + beside, LONG_CHUNK),
            (LONG_CHUNK_ROOM + beside - 1, config.PREFILL_CHUNK),
        ):
            core = Core(model, memory_limit=limit, max_batch_size=1)
            assert core.limits.prefill_chunk == expected
            core.close()


LAYERS, PREFIX, CHUNK, HEADS, DIM = 8, 4_096, 16, 2, 64


def joined_peak(*, held: bool = False) -> float:
    """Return the peak, in layers of joined KV, of a chunk after a prefix.

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
        reads.append(ChunkReads(layer, AttentionWindow(), parts, PREFIX, devices.current()))
        keys, values = reads[-1].update_and_fetch(queries + 1, queries + 2)
        if held:
            kept.append(reads[-1].joined(AttentionWindow())[:2])
            mx.eval(kept[-1])
        mask = reads[-1].make_mask(CHUNK)
        queries = reads[-1].attend(queries, keys, values, DIM**-0.5, mask)
    mx.eval(queries)
    return (mx.get_peak_memory() - before) / (2 * HEADS * (PREFIX + CHUNK) * DIM * 4)


def test_joined_kv_is_freed_layer_by_layer() -> None:
    """On the GPU backend only one layer's copy of the prefix is alive."""
    kept = mx.set_cache_limit(0)
    try:
        with devices.using(GPUBackend()):
            assert 1 <= joined_peak() < 2
            assert joined_peak(held=True) > LAYERS
    finally:
        mx.set_cache_limit(kept)


@pytest.mark.parametrize(
    ("active", "given", "expected"),
    [(SPILLED_CHUNK, None, SPILLED_CHUNK), (SPILLED_CHUNK - 1, None, 512), (4_096, 300, 300)],
)
def test_spilling_uses_longer_prefill_chunks(active: int, given: int | None, expected: int) -> None:
    """Each chunk reads all spilled KV again; the resident tokens bound its length."""
    model = build({**BASE, "model_type": "llama", "head_dim": 64})
    runner = Runner(model, devices.current(), max_kv_size=8_192, keep=0)
    settings = {"attend_tokens": 256, "active_kv_size": active, "ssd_cache_dir": "somewhere"}
    limits = checked({"memory_limit": 10**9, "prefill_chunk": given, **settings})
    assert fitting(limits, runner, 10**9).prefill_chunk == expected
