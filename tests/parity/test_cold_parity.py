"""Tokens match a plain mlx-lm loop after KV was restored from disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cold_engine import files
from core_parts import cached_nodes, evict_all
from parity_models import model_of, prompt_of
from test_engine import BASE, SMALL, answer, ask, check, drain, engine, every_family

from penstock.engine.core import Core
from penstock.engine.offload import conversation_ends
from penstock.kv import block_spans

TURN = (*BASE, *prompt_of(30, 5))
"""Goes on where `BASE` ends: six of its blocks are whole."""
FORK = (*BASE[:40], *prompt_of(20, 3))
OTHER = tuple(prompt_of(50, 9))


@pytest.fixture(autouse=True)
def conversation_ends_do_not_wait(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Records of what is evicted are there at once.
    monkeypatch.setattr(conversation_ends, "LINGER_SECONDS", 0.0)


@contextmanager
def with_disk(
    model: Any,
    folder: Path,
    settings: Mapping[str, Any] = SMALL,
    *,
    record_tokens: int = block_spans.RECORD_TOKENS,
) -> Iterator[Core]:
    """Run an engine that writes every block to disk, however cheap its recomputation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_spans, "SPAN_TOKENS", min(record_tokens, block_spans.SPAN_TOKENS))
        patch.setattr(block_spans, "RECORD_TOKENS", record_tokens)
        with engine(model, **settings, ssd_cache_dir=folder, ssd_cache_limit="1GB") as made:
            made.prefill_rate.prefill_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
            yield made


def restored(core: Core) -> int:
    return core.view.stats().restored_tokens


@every_family
def test_text_is_equal_from_memory_disk_and_after_restart(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    with with_disk(model, tmp_path) as core:
        for on_disk in (0, 0, 64):
            if on_disk:
                evict_all(core)
            handle = ask(core, BASE, 24)
            drain(core)
            check(family, handle)
            assert restored(core) == on_disk
    with with_disk(model, tmp_path) as core:
        again = ask(core, BASE, 24)
        drain(core)
        check(family, again)
        assert (restored(core), core.view.stats().prefilled_tokens) == (64, 5)
        evict_all(core)
        turn = ask(core, (*BASE, *answer(again), *prompt_of(4)), 16)
        drain(core)
        check(family, turn)
        assert restored(core) == 64 + 80, "what was said is on the disk, too"


@every_family
@pytest.mark.parametrize("record_tokens", [16, block_spans.RECORD_TOKENS])
def test_concurrent_partly_cached_requests_match_plain(
    record_tokens: int, family: str, tmp_path: Path
) -> None:
    model = model_of(family)
    with with_disk(model, tmp_path, record_tokens=record_tokens) as core:
        ask(core, BASE, 1)
        drain(core)
    with with_disk(model, tmp_path, record_tokens=record_tokens) as core:
        handles = [ask(core, prompt, 20) for prompt in (TURN, OTHER, FORK, BASE)]
        drain(core)
        check(family, *handles)
        assert restored(core) == 64
        assert core.view.stats().hit_tokens == 64 + 32 + 64
    with with_disk(model, tmp_path, record_tokens=record_tokens) as core:
        handles = [ask(core, prompt, 20) for prompt in (BASE, FORK, OTHER, TURN)]
        drain(core)
        check(family, *handles)
        if record_tokens == 16:
            # The blocks of all, each read once; the last token's block is computed.
            assert restored(core) == 64 + 16 + 48 + 32
        # Else each prompt is in one record with its answer, and no record holds a prompt alone.


@every_family
def test_turns_after_restarts_match_plain_with_default_settings(
    family: str, tmp_path: Path
) -> None:
    """Default block, chunk and record sizes: the last, shorter record is replaced."""
    model, said = model_of(family), tuple(prompt_of(600))
    fork = (*said[:530], *prompt_of(60, 2))
    for turn in range(3):
        with with_disk(model, tmp_path, {}) as core:
            size = core.prefixes.block_size
            handle = ask(core, said, 24)
            drain(core)
            check(family, handle)
            assert restored(core) == (len(said) - 81) // size * size * (turn > 0)
        held = (len(said) + 23) // size * size
        assert len(files(tmp_path)) == math.ceil(held / block_spans.RECORD_TOKENS)
        said = (*said, *answer(handle), *prompt_of(80, turn))
    with with_disk(model, tmp_path, {}) as core:
        handle = ask(core, fork, 24)
        drain(core)
        check(family, handle)
        size = block_spans.RECORD_TOKENS
        assert restored(core) == 530 // size * size


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision_text_is_equal_after_restore(
    family: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    model = model_of(family)
    model.set_dtype(dtype)
    try:
        with with_disk(model, tmp_path) as core:
            cold, warm = (said(core), said(core))
            evict_all(core)
            assert said(core) == warm == cold
        with with_disk(model, tmp_path) as core:
            assert said(core) == warm
            assert restored(core) == 64
            arrays = [a for node in cached_nodes(core) for kv in node.segment.layers for a in kv]
            assert {a.dtype for a in arrays if isinstance(a, mx.array)} == {dtype}
    finally:
        model_of.cache_clear()


def said(core: Core) -> list[int]:
    handle = ask(core, BASE, 16)
    drain(core)
    return answer(handle)
