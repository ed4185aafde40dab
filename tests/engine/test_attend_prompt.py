"""Selective attention in prefill chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from core_parts import cached_nodes
from engine_faults import model_of
from spilled_engine import spilling_of
from test_attend import LONG, OTHER, SMALL, answers, prompt, running
from tiny_families import build

from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.selection.chunk_choice import ChunkChoice
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import Rotation
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.engine.core import Core
from penstock.engine.request import Request
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
    """Shorten the end of a prompt that uses full attention."""
    monkeypatch.setattr(executor, "WHOLE_TOKENS", 32)


class Chunk:
    """A layer's KV before a chunk, in segments, and the KV of the chunk.

    Args:
        lengths: tokens of the segments in front of it.
    """

    def __init__(
        self, lengths: list[int], *, kv_heads: int, repeats: int, tokens: int,
        dtype: mx.Dtype = mx.float32,
    ) -> None:  # fmt: skip
        draw, dim = np.random.default_rng(len(lengths)), 64

        def some(*shape: int) -> mx.array:
            return mx.array(draw.normal(size=(1, *shape, dim)).astype(np.float32)).astype(dtype)

        turns = 10.0 ** -draw.uniform(0, 4, dim // 2)
        rotation = Rotation.shared(
            np.concatenate([-turns, turns]), np.roll(np.arange(dim), dim // 2)
        )
        vectors = draw.normal(size=(kv_heads, dim)).astype(np.float32)
        self.index = KeyIndex(frozenset({0}), centers={0: KeyCenters(vectors, rotation)})
        self.before, self.tokens = sum(lengths), tokens
        self.sides = tuple(2 * some(kv_heads, self.before + tokens) for _ in range(2))
        self.queries = 2 * some(kv_heads * repeats, tokens)
        self.ends = list(accumulate(lengths))

    def segment(self, start: int, end: int) -> Segment:
        layer = self.sides[0][:, :, start:end], self.sides[1][:, :, start:end]
        return self.index.indexed(Segment((layer,)), start, devices.current())

    def read(
        self, device: Any, tokens: int, sinks: mx.array | None = None, cuts: tuple[int, ...] = ()
    ) -> Any:
        """Attend, in several chunks that begin at `cuts`."""
        cuts = 0, *cuts, self.tokens
        read = []
        for start, end in pairwise(cuts):
            offset = self.before + start
            spans = [
                KVSpan(self.segment(first, last), first, last - first)
                for first, last in pairwise([0, *self.ends, *(self.before + x for x in cuts[1:])])
                if last <= offset
            ]
            row = DecodeRow(tuple(spans), offset, 0, 0)
            choice = ChunkChoice(Selection(tokens, self.index), row)
            assert choice.begin(0, AttentionWindow(), end - start) == 0
            assert choice.begin(1, AttentionWindow(), end - start) is None
            own = self.segment(offset, self.before + end)
            assert own.index[0] is not None
            where = self.queries[:, :, start:end], own.layers[0], own.index[0], SCALE, sinks
            read.append(np.array(choice.attend(device, 0, *where), np.float32))
        return np.concatenate(read, axis=2)

    def whole(self, sinks: mx.array | None = None) -> Any:
        where = {"columns": None, "start": self.before, "scale": SCALE, "sinks": sinks}
        window = AttentionWindow()
        read = GPUBackend().prefill(self.queries, *self.sides, attention_window=window, **where)
        return np.array(read, np.float32)


SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2, "repeats": 3, "tokens": 150},
    {"kv_heads": 1, "repeats": 1, "tokens": 33},
    {"kv_heads": 3, "repeats": 2, "tokens": 90},
    {"kv_heads": 2, "repeats": 2, "tokens": 64, "dtype": mx.float16},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[700], [256, 100, 344], [5, 403, 230]])
@pytest.mark.parametrize("sunk", [False, True])
def test_devices_select_same_tokens_for_chunk(
    lengths: list[int], sunk: bool, shape: dict[str, Any]
) -> None:
    pytest.importorskip("numba")
    chunk = Chunk(lengths, **shape)
    heads = chunk.queries.shape[1]
    sinks = mx.array(np.linspace(-1, 2, heads)).astype(chunk.queries.dtype) if sunk else None
    by_loops, reference = (chunk.read(d, 384, sinks) for d in (CPUBackend(), GPUBackend()))
    rounding = 0.02 if chunk.queries.dtype == mx.float16 else 1e-4
    assert np.allclose(by_loops, reference, atol=rounding)
    whole = chunk.whole(sinks)
    assert not np.allclose(reference, whole, atol=rounding), "it reads a part"
    assert np.abs(reference - whole).mean() < np.abs(whole).mean()
    nearer = np.abs(chunk.read(CPUBackend(), 608, sinks) - whole).mean()
    assert nearer < 0.5 * np.abs(reference - whole).mean()


@pytest.mark.parametrize("cuts", [(64,), (32, 96), (20, 21, 100)])
def test_group_output_is_independent_of_chunks(cuts: tuple[int, ...]) -> None:
    """Outputs are bit-identical if chunks begin at groups; other cuts change a choice."""
    pytest.importorskip("numba")
    chunk = Chunk([320, 100, 220], kv_heads=2, repeats=2, tokens=150)
    together = chunk.read(CPUBackend(), 256)
    apart = chunk.read(CPUBackend(), 256, cuts=cuts)
    by_groups = all(cut % 32 == 0 for cut in cuts)
    assert np.array_equal(together, apart) == by_groups
    assert np.abs(together - apart).mean() < 0.2 * np.abs(together).mean()


def test_index_of_selective_chunk_matches_recomputed_index() -> None:
    """The index that a chunk makes before it attends is the one of its segment."""
    with running(**{**CHOICE, "prefill_chunk": 256}) as core:
        answers(core, prompt(600))
        assert cached_nodes(core)
        for node in cached_nodes(core):
            again = core.runner.indexed(replace(node.segment, index=()), node.start)
            for one, other in zip(node.segment.index, again.index, strict=True):
                assert one is not None and other is not None
                assert all(map(mx.array_equal, one.parts, other.parts))


@pytest.mark.parametrize("chunk", [32, 96, 512])
def test_selective_prefill_text_is_independent_of_chunk_size(chunk: int) -> None:
    talk = prompt(600)
    with running(**CHOICE) as core:
        expected = answers(core, talk)
    with running(**{**CHOICE, "prefill_chunk": chunk}) as core:
        assert answers(core, talk) == expected


def test_prompt_below_budget_uses_full_attention() -> None:
    with running() as core:
        expected = answers(core, LONG, OTHER)
    with running(**{**CHOICE, "attend_tokens": 512, "attend_prompt": 512}) as core:
        assert answers(core, LONG, OTHER) == expected


def test_selective_prefill_text_is_independent_of_batch_and_cache() -> None:
    talks = prompt(600), prompt(500, 4)
    with running(attend_tokens=128) as core:
        expected = answers(core, *talks)
    with running(**CHOICE) as core:
        first = answers(core, *talks)
        assert answers(core, *talks) == first, "from the cache"
        assert first != expected, "negative control"
    with running(**CHOICE) as core:
        assert [answers(core, talk)[0] for talk in reversed(talks)] == first[::-1], "alone"


def test_prompt_logprobs_ignore_selective_prefill() -> None:
    """Log-probabilities are those of full attention; passes end elsewhere, which rounds."""
    talk, scores = prompt(600), []
    for settings in ({"attend_tokens": 128, "block_size": 32}, CHOICE):
        with running(**settings) as core:
            asked = Request(prompt=talk, max_tokens=1, ignore_eos=True, prompt_logprobs=2)
            handle = core.submit(asked)
            while core.step():
                pass
            assert handle.prompt_logprobs is not None and handle.prompt_logprobs.done
            scores.append([token.logprob for token in [*handle.prompt_logprobs][1:]])
    whole, selective = (np.array(of, np.float64) for of in scores)
    assert len(whole) == len(talk) - 1
    assert np.allclose(whole, selective, atol=1e-4)


def test_parallel_choices_match_single_after_selective_prefill() -> None:
    talk = prompt(600)
    with running(**CHOICE) as core:
        one = answers(core, talk)[0]
    with running(**CHOICE) as core:
        assert answers(core, talk, n=3) == [one] * 3


def test_spilled_prompt_selects_same_blocks(tmp_path: Path) -> None:
    talk = prompt(900)
    with running(**CHOICE) as core:
        expected = answers(core, talk)
    spilled = {**CHOICE, "active_kv_size": 256, "ssd_cache_dir": tmp_path}
    with running(**spilled) as core:
        assert answers(core, talk) == expected
        assert spilling_of(core).spilled_tokens > 0


@pytest.mark.parametrize("family", ["gpt_oss", "falcon_h1", "qwen"])
def test_model_families_support_selective_prefill(family: str) -> None:
    core = Core(build(family), **{**SMALL, **CHOICE})
    try:
        assert len(answers(core, [token % 90 for token in prompt(500)])[0]) == 12
    finally:
        core.close()


def test_embedded_model_recalls_facts_with_selective_prefill() -> None:
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


def test_incompatible_settings_are_refused(tmp_path: Path) -> None:
    spilled = {**CHOICE, "active_kv_size": 256, "ssd_cache_dir": tmp_path}
    for settings, what in (
        ({"attend_prompt": 256}, "attend_tokens"),
        ({**spilled, "attend_prompt": 512}, "at most as many"),
        ({**CHOICE, "block_size": 48}, "block_size 48 is not a multiple of 32"),
    ):
        with pytest.raises(SettingError, match=what):
            Core(model_of("llama"), **{**SMALL, **settings})
