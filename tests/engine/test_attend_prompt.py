"""Chunks of prompts that read a part of the tokens in front of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine_faults import model_of
from spilled_engine import spilling_of
from test_attend import LONG, OTHER, SMALL, answers, prompt, running
from threadpoolctl import threadpool_info
from tiny_families import build

from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.selection.chunk_choice import ChunkChoice
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.engine.core import Core
from penstock.engine.run import executor
from penstock.errors import SettingError
from penstock.kv.segment import KVSpan, Segment
from penstock.models.loading import load
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue

CHOICE: dict[str, Any] = {"attend_tokens": 128, "attend_prompt": 128, "block_size": 32}
SCALE = 0.125


@pytest.fixture(autouse=True)
def short_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the prompts of these tests be longer than the end that reads all."""
    monkeypatch.setattr(executor, "WHOLE_TOKENS", 32)


class Chunk:
    """Keys and values of a layer in front of a chunk, in segments, and those of the chunk."""

    def __init__(self, lengths: list[int], *, kv_heads: int, repeats: int, tokens: int) -> None:
        draw, dim = np.random.default_rng(len(lengths)), 64

        def some(*shape: int) -> mx.array:
            return mx.array(draw.normal(size=(1, *shape, dim)).astype(np.float32))

        self.index, parts, start = KeyIndex(frozenset({0})), [], 0
        for columns in lengths:
            segment = Segment(((2 * some(kv_heads, columns), some(kv_heads, columns)),))
            indexed = self.index.indexed(segment, start, devices.current())
            parts.append(KVSpan(indexed, start, columns))
            start += columns
        self.row = DecodeRow(tuple(parts), start, 0, 0)
        self.new = some(kv_heads, tokens), some(kv_heads, tokens)
        self.queries = 2 * some(kv_heads * repeats, tokens)

    def read(self, device: Any, tokens: int, sinks: mx.array | None = None) -> Any:
        choice = ChunkChoice(Selection(tokens, self.index, recent=160), self.row)
        assert choice.applies(0, AttentionWindow(), self.queries.shape[2])
        assert not choice.applies(0, AttentionWindow(), 250), "more than are read whole"
        assert not choice.applies(1, AttentionWindow(), self.queries.shape[2])
        return np.array(choice.attend(device, 0, self.queries, self.new, SCALE, sinks))

    def whole(self, sinks: mx.array | None = None) -> Any:
        before = [part.segment.layers[0] for part in self.row.parts]
        keys, values = (
            mx.concatenate([*(layer[n] for layer in before), self.new[n]], axis=2) for n in (0, 1)
        )
        where = {"columns": None, "start": self.row.position, "scale": SCALE, "sinks": sinks}
        window = AttentionWindow()
        read = GPUBackend().prefill(self.queries, keys, values, attention_window=window, **where)
        return np.array(read)


@pytest.mark.skipif(sys.platform != "linux", reason="Accelerate has no such limit")
def test_two_threads_of_a_group_share_no_threaded_blas() -> None:
    if not isinstance(devices.current(), CPUBackend):
        pytest.skip("a GPU reads")

    class Watched(CPUBackend):
        def divide(self, function: Any, tasks: Any, meanwhile: Any = None) -> Any:
            libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
            limits.append(max(pool["num_threads"] for pool in libraries))
            return super().divide(function, tasks, meanwhile)

    limits: list[int] = []
    before = max(p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas")
    Chunk([700], kv_heads=2, repeats=2, tokens=64).read(Watched(), 256)
    assert limits and limits[0] == 1
    assert before == max(p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas")


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("lengths", [[700], [256, 100, 344]])
def test_devices_read_same_tokens_of_chunk(lengths: list[int], sunk: bool) -> None:
    pytest.importorskip("numba")
    chunk = Chunk(lengths, kv_heads=2, repeats=3, tokens=150)
    sinks = mx.array([0.5, 1.0, 2.0, 0.1, 0.0, -1.0]) if sunk else None
    by_loops, reference = (chunk.read(d, 384, sinks) for d in (CPUBackend(), GPUBackend()))
    assert np.allclose(by_loops, reference, atol=1e-4)
    whole = chunk.whole(sinks)
    assert not np.allclose(reference, whole, atol=1e-4), "it reads a part"
    assert np.abs(reference - whole).mean() < np.abs(whole).mean()
    nearer = np.abs(chunk.read(CPUBackend(), 672, sinks) - whole).mean()
    assert nearer < 0.5 * np.abs(reference - whole).mean()


def test_text_is_that_of_reading_all_up_to_n_tokens() -> None:
    with running() as core:
        expected = answers(core, LONG, OTHER)
    with running(**{**CHOICE, "attend_tokens": 512, "attend_prompt": 512}) as core:
        assert answers(core, LONG, OTHER) == expected


def test_prompt_reads_part_and_text_does_not_depend_on_batch_or_cache() -> None:
    talks = prompt(600), prompt(500, 4)
    with running(attend_tokens=128) as core:
        expected = answers(core, *talks)
    with running(**CHOICE) as core:
        first = answers(core, *talks)
        assert answers(core, *talks) == first, "from the cache"
        assert first != expected, "negative control"
    with running(**CHOICE) as core:
        assert [answers(core, talk)[0] for talk in reversed(talks)] == first[::-1], "alone"


def test_spilled_prompt_reads_same_blocks(tmp_path: Path) -> None:
    talk = prompt(900)
    with running(**CHOICE) as core:
        expected = answers(core, talk)
    spilled = {**CHOICE, "active_kv_size": 256, "ssd_cache_dir": tmp_path}
    with running(**spilled) as core:
        assert answers(core, talk) == expected
        assert spilling_of(core).spilled_tokens > 0


@pytest.mark.parametrize("family", ["gpt_oss", "falcon_h1", "qwen"])
def test_families_read_prompts_in_part(family: str) -> None:
    core = Core(build(family), **{**SMALL, **CHOICE})
    try:
        assert len(answers(core, [token % 90 for token in prompt(500)])[0]) == 12
    finally:
        core.close()


def test_embedded_model_knows_facts_of_prompt_read_in_part() -> None:
    talk = dialogue(3, tokens=3_000, facts=6, place=(0.0, 0.3))
    model, tokenizer = load(MODEL_PATH)
    core = Core(model, tokenizer, memory_limit="300MB", max_batch_size=1, **CHOICE)
    try:
        for question in talk.questions:
            messages = talk.ask(question)
            tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            (said,) = answers(core, tokens, tokens=4)
            assert tokenizer.decode(said).strip().startswith(question.answer)
    finally:
        core.close()


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    spilled = {**CHOICE, "active_kv_size": 256, "ssd_cache_dir": tmp_path}
    for settings, what in (
        ({"attend_prompt": 256}, "attend_tokens"),
        ({**spilled, "attend_prompt": 512}, "at most as many"),
        ({**CHOICE, "block_size": 48}, "block_size 48 is not a multiple of 32"),
    ):
        with pytest.raises(SettingError, match=what):
            Core(model_of("llama"), **{**SMALL, **settings})
