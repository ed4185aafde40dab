"""A prefill chunk is longer on a GPU whose memory allows for it."""

from __future__ import annotations

import pytest

from penstock import config
from penstock.engine.settings import LONG_CHUNK, LONG_CHUNK_FROM, checked
from penstock.kv import backend


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
