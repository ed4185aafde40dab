"""The largest advertised request is admitted, in several families.

The banner, `max_model_len` and `plan --measure` show one number, the service's.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_families
from servers import settings

from penstock import Engine, load
from penstock.engine.request import Request
from penstock.errors import NeverFits
from penstock.recall import MODEL_PATH
from penstock.server.service import Service

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"block_size": 64, "prefill_chunk": 64},
    {"max_batch_size": 2, "kv_cache_quantization": "turbo8"},
)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "deepseek_v2"])
def test_advertised_context_length_is_exact(family: str) -> None:
    model = tiny_families.build(family)
    if getattr(model.args, "max_position_embeddings", None):
        model.args.max_position_embeddings = 1 << 20  # so that memory is what ends a request
    _, tokenizer = load(MODEL_PATH)
    for changed in SETTINGS:
        with Engine(model, tokenizer, memory_limit="40MB", **changed) as engine:
            service = Service(engine, tokenizer, settings(), family)
            promised = service.context_tokens
            service.close()
            assert promised > 256
            engine.submit(Request(prompt=(1,) * (promised - 1), max_tokens=1)).cancel()
            with pytest.raises(NeverFits):
                engine.submit(Request(prompt=(1,) * promised, max_tokens=1))
