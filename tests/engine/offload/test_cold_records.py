"""Records of several blocks: few files, and no block is lost."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import cold_engine
import numpy as np
import pytest
from cold_engine import BLOCK, ask, files, ssd
from core_parts import hash_prompt
from tiny_families import VOCABULARY_TOKENS, build

from penstock.kv.block_spans import Spans
from penstock.prefix.block_hashes import hash_blocks, is_hash_of, root_hash

RECORD = 4
"""Blocks."""


pytestmark = pytest.mark.usefixtures("patient")


@functools.cache
def pure_recurrent() -> Any:
    """Return a model without KV: its records have tokens and checkpoints only."""
    return build("mamba2")


def running(folder: Path | None, family: str = "llama", **settings: Any) -> Any:
    model = pure_recurrent() if family == "mamba2" else None
    return cold_engine.running(folder, family, model, record_tokens=RECORD * BLOCK, **settings)


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY_TOKENS) for _ in range(tokens))


def cold_text(tokens: tuple[int, ...], family: str = "llama", **settings: Any) -> tuple[int, ...]:
    with running(None, family, **settings) as core:
        return ask(core, tokens)


@pytest.mark.parametrize("cut", [0, 3, 8, 9])
def test_every_block_belongs_to_one_record(cut: int) -> None:
    spans = Spans(4, cut)
    for block in range(20):
        start, end = spans.start(block), spans.end(block)
        assert start <= block < end <= start + 4
        assert end in spans.ends(20)
        assert {spans.start(each) for each in range(start, end)} == {start}
        assert not start < cut < end, "what is held in two forms is in two records"


def test_record_key_is_hash_of_last_block() -> None:
    values, root = np.array(prompt(4 * BLOCK), np.uint32), root_hash("m")
    last = hash_blocks(values, BLOCK, root)[-1]
    assert is_hash_of(last, root, values, 4)
    assert not is_hash_of(last, root, values, 2)
    assert not is_hash_of(last, root, values, 3), "blocks are alike"
    assert not is_hash_of(last, root, values, 0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("tokens", [30, 65, 230, 250])
def test_text_is_equal_after_restart(family: str, tokens: int, tmp_path: Path) -> None:
    asked = prompt(tokens)
    expected = cold_text(asked, family)
    with running(tmp_path, family) as core:
        assert ask(core, asked) == expected
    with running(tmp_path, family) as core:
        assert ask(core, asked) == expected
        lost = tokens - core.view.stats().restored_tokens
        # Where an answer has begun a block, its record is named by a block that is not asked for.
        assert lost <= (RECORD * BLOCK if (tokens + 7) // BLOCK > tokens // BLOCK else BLOCK)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_records_per_token_do_not_grow_for_small_blocks(family: str, tmp_path: Path) -> None:
    """The unfinished end of a turn is one record, replaced by that of the next turn."""
    said = prompt(100)
    for turn in range(1, 5):
        with running(tmp_path, family) as core:
            answer = ask(core, said)
            restored_tokens = (len(said) - 53) // BLOCK * BLOCK * (turn > 1)
            assert core.view.stats().restored_tokens == restored_tokens
        blocks = (len(said) + len(answer) - 1) // BLOCK
        assert len(files(tmp_path)) == -(-blocks // RECORD)
        said = (*said, *answer, *prompt(60 - len(answer), turn))


@pytest.mark.parametrize("held", [20, 70, 100, 127])
@pytest.mark.parametrize("settings", [{}, {"kv_cache_quantization": "turbo4"}])
def test_record_partly_in_memory_is_restored(
    held: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings:  # what was computed last is read as codes, too
        settings = {
            **settings,
            "kv_cache_quantize_when": "active",
            "kv_cache_min_quantize_tokens": 40,
        }
    asked = prompt(230)
    with running(tmp_path, **settings) as core:
        expected = ask(core, asked)
    with running(tmp_path, **settings) as core:
        ask(core, asked[:held])
        before = core.view.stats().restored_tokens
        assert ask(core, asked) == expected
        in_memory = (
            (held + 7) // BLOCK * BLOCK if held % BLOCK + 7 < BLOCK else held // BLOCK * BLOCK
        )
        assert core.view.stats().restored_tokens - before == 224 - in_memory
        assert ssd(core).counts.damaged_blocks == 0


def test_only_damaged_record_is_recomputed(tmp_path: Path) -> None:
    asked = prompt(230)
    with running(tmp_path) as core:
        expected = ask(core, asked)
        keys = hash_prompt(core, asked)
    path = next(path for path in files(tmp_path) if keys[7].hex() in path.name)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with running(tmp_path) as core:
        assert ask(core, asked) == expected
        assert core.view.stats().restored_tokens == RECORD * BLOCK
        assert ssd(core).counts.damaged_blocks == 1


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "mamba2"])
def test_all_blocks_are_preloaded(family: str, tmp_path: Path) -> None:
    asked = prompt(230)
    with running(tmp_path, family) as core:
        expected = ask(core, asked)
    with running(tmp_path, family) as core:
        assert core.tiers is not None
        assert core.tiers.preload(core.stores.capture) == 224
        core.view.check()
        assert ask(core, asked) == expected
        assert core.view.stats().prefilled_tokens < BLOCK


def test_queued_write_is_extended_by_longer_chain(tmp_path: Path) -> None:
    """Otherwise the chunks of a long prompt would fill the queue."""
    with running(tmp_path) as core:
        assert core.tiers is not None
        (tier,) = core.tiers
        keys = hash_prompt(core, prompt(3_200))
        for blocks in range(10, 201, 10):
            tier.writer.note(keys[:blocks], b"", blocks - 10)
        assert (len(tier.writer._pending), tier.writer._pending_hashes) == (1, 200)
        assert tier.writer._pending[0].first == 0
        tier.writer.forget()
