"""Decode rows and prefill chunks in one pass match separate passes."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from parity_models import SHARED_FAMILIES, model_of, prompt_of

from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow
from penstock.config import EngineSettings
from penstock.engine.fixed_memory import measured_estimator
from penstock.engine.model.runner import PromptChunk, Runner
from penstock.engine.model.step_peaks import SLACK
from penstock.engine.model.step_trials import peak_of
from penstock.kv.segment import KVSpan
from penstock.kv.tails import Tails
from penstock.ledger import Ledger
from penstock.models import layer_seams
from penstock.models.weight_packer import kv_dtype, pack, weight_packer
from support.small_models import BASE, build

PROMPT = prompt_of(90)
NEW = [[5, 9], [7, 3]]
"""New tokens of two rows."""
START, COUNT = 32, 21
"""Position of the chunk, and its tokens."""


class Scene:
    """Two rows after a shared span, one with a tail, and a partly prefilled prompt."""

    def __init__(self, model: Any, *, halves: bool = False) -> None:
        dtype = kv_dtype(model) if halves else None
        self.runner = Runner(model, devices.current(), max_kv_size=4_096, keep=0, kv_dtype=dtype)
        read = self.runner.prefill(PROMPT[:48], [], 0)
        self.parts = (KVSpan(read.segment, 0, 48),)
        begun = self.runner.prefill(PROMPT[20:52], [], 0)
        self.begun = [KVSpan(begun.segment, 0, START)]

    def rows(self) -> tuple[list[DecodeRow], Tails]:
        tails = Tails(2, 16, self.runner.shapes)
        rows = [DecodeRow(self.parts, 48, 0, 0), DecodeRow(self.parts, 50, 1, 2)]
        self.runner.decode([[11, 12]] * 2, [DecodeRow(self.parts, 48, n, 0) for n in (0, 1)], tails)
        return rows, tails

    def apart(self, width: int) -> list[mx.array]:
        rows, tails = self.rows()
        decoded = self.runner.decode([row[:width] for row in NEW], rows, tails)
        chunk = self.runner.prefill(PROMPT[52 : 52 + COUNT], self.begun, START)
        return [decoded.logits, *tails.buffers(), *_sides(chunk.segment)]

    def of_rows(self, width: int) -> list[mx.array]:
        """Return the results of the rows alone; nothing if the width is 0."""
        return self.apart(width)[: 1 + len(self.rows()[1].buffers())] if width else []

    def together(self, width: int, position: int = START) -> list[mx.array]:
        rows, tails = self.rows()
        new = [row[:width] for row in NEW]
        chunk = PromptChunk(PROMPT[52 : 52 + COUNT], self.begun, position)
        output = self.runner.mixed(new, rows, tails, [chunk])
        assert output.decoded is not None and output.logits == [None]
        return [output.decoded.logits, *tails.buffers(), *_sides(output.chunks[0].segment)]

    def questions(self) -> list[PromptChunk]:
        """Return short prompt ends after the shared span."""
        return [
            PromptChunk(PROMPT[60:67], self.parts, 48, skipped=6),
            PromptChunk(PROMPT[52 : 52 + COUNT], self.begun, START),
            PromptChunk(PROMPT[70:75], self.parts, 48, skipped=2),
            PromptChunk(PROMPT[75:79], (), 0, skipped=0),
        ]

    def each_apart(self) -> list[mx.array]:
        read: list[mx.array] = []
        for chunk in self.questions():
            where = chunk.tokens, chunk.parts, chunk.position
            if chunk.skipped is None:
                output = self.runner.prefill(*where)
            else:
                logits, output = self.runner.read(*where, skipped=chunk.skipped)
                read.append(logits)
            read += _sides(output.segment)
        return read

    def all_together(self, width: int) -> list[mx.array]:
        """Return what the questions leave in one pass, beside the rows if they have a width."""
        rows, tails = self.rows() if width else ([], Tails(1, 16, self.runner.shapes))
        new = [row[:width] for row in NEW[: len(rows)]]
        output = self.runner.mixed(new, rows, tails, self.questions())
        read: list[mx.array] = []
        for chunk, logits in zip(output.chunks, output.logits, strict=True):
            read += [*([] if logits is None else [logits]), *_sides(chunk.segment)]
        if output.decoded is not None:
            read += [output.decoded.logits, *tails.buffers()]
        return read


def _sides(segment: Any) -> list[mx.array]:
    return [side for layer in segment.layers for side in layer]


def off(some: list[mx.array], others: list[mx.array]) -> float:
    """Return the largest difference of two lists of arrays, relative to the largest value."""
    assert [x.shape for x in some] == [x.shape for x in others]
    pairs = [(np.array(x.astype(mx.float32)), np.array(y.astype(mx.float32)))
             for x, y in zip(some, others, strict=True)]  # fmt: skip
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


@pytest.mark.parametrize("family", SHARED_FAMILIES)
@pytest.mark.parametrize("width", [1, 2])
def test_mixed_pass_matches_separate_passes(family: str, width: int) -> None:
    scene = Scene(model_of(family))
    assert scene.runner.mixes != scene.runner.is_recurrent
    if scene.runner.is_recurrent:
        pytest.skip("recurrent layers have a state for each sequence")
    assert off(scene.together(width), scene.apart(width)) < 1e-4


@pytest.mark.parametrize("family", SHARED_FAMILIES)
@pytest.mark.parametrize("width", [0, 2])
def test_several_chunks_in_one_pass_match_separate_passes(family: str, width: int) -> None:
    scene = Scene(model_of(family))
    if scene.runner.is_recurrent:
        pytest.skip("recurrent layers have a state for each sequence")
    apart = scene.each_apart() + scene.of_rows(width)
    assert off(scene.all_together(width), apart) < 1e-4


@pytest.mark.skipif(weight_packer() is None, reason="packed products are compiled by Numba")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("width", [1, 2])
def test_packed_layers_are_bit_identical_in_mixed_pass(name: str, width: int) -> None:
    windows = {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    more = windows if name == "gemma3_text" else {}
    mx.random.seed(3)
    model = build({**BASE, "head_dim": 32, "vocab_size": 512, **more, "model_type": name})
    nn.quantize(model, group_size=32, bits=4)
    pack(model, lambda module: None, exact=False)
    scene = Scene(model, halves=True)
    assert scene.runner.mixes and scene.runner.shapes[0].dtype == mx.float16
    pairs = zip(scene.together(width), scene.apart(width), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)
    for several in (0, width):
        apart = scene.each_apart() + scene.of_rows(several)
        pairs = zip(scene.all_together(several), apart, strict=True)
        assert all(mx.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("family", ["embedded", "llama"])
@pytest.mark.parametrize(("chunk", "slots", "proposed"), [(256, 8, 0), (256, 8, 3), (24, 4, 0)])
def test_mixed_pass_stays_within_reserved_bytes(
    family: str, chunk: int, slots: int, proposed: int
) -> None:
    runner, width = Scene(model_of(family)).runner, proposed + 1
    sizes = {"prefill_chunk": chunk, "max_batch_size": slots, "speculative_tokens": proposed}
    limits = EngineSettings(memory_limit=10**9, block_size=8, max_kv_size=1_024, **sizes)
    tails = Tails(slots, 16, runner.shapes)
    estimator = measured_estimator(runner, limits, tails, Ledger(10**9))

    def mixed(tokens: int, slots: int, chunks: int = 1) -> None:
        rows = [DecodeRow((), 0, slot, 0) for slot in range(slots)]
        prompts = [PromptChunk([0] * (tokens // chunks), (), 0)] * chunks
        output = runner.mixed([[0] * width] * slots, rows, tails, prompts)
        mx.eval(output.decoded.logits if output.decoded else [], tails.buffers())

    reserved = SLACK * estimator.peak_bytes
    assert 0 < estimator.mixed_tokens < chunk
    for beside in (slots, 0):
        for chunks in (1, 4):
            one_pass = partial(mixed, estimator.mixed_tokens, beside, chunks)
            assert peak_of(one_pass)[0] <= reserved
    assert peak_of(partial(mixed, 2 * chunk, slots))[0] > reserved


def test_check_detects_chunk_at_wrong_position() -> None:
    scene = Scene(model_of("llama"))
    assert off(scene.together(1, START + 1), scene.apart(1)) > 1e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_prefill_chunk_logits_are_not_computed(
    tied: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(3)
    config = {**BASE, "model_type": "llama", "tie_word_embeddings": tied, "vocab_size": 512}
    model = build(config)
    if packed and weight_packer() is None:
        pytest.skip("packed products are compiled by Numba")
    if packed:
        nn.quantize(model, group_size=32, bits=4)
        pack(model, lambda module: None, exact=False)
    scene, read_rows, heads = Scene(model), layer_seams.read_rows, list[int]()

    def noting(x: mx.array, layer: nn.Module | None = None) -> mx.array:
        read = read_rows(x, layer)
        if len(read) < len(x):
            heads.append(len(read))
        return read

    monkeypatch.setattr(layer_seams, "read_rows", noting)
    if packed:
        monkeypatch.setattr("penstock.plugins.cpu.packed_products.read_rows", noting)
    logits = scene.together(2)[0]
    assert heads == [4] and logits.shape[:2] == (2, 2)
