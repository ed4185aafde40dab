"""Running sequences and a prefill chunk in one pass: as in two passes of their own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from parity_models import SHARED_FAMILIES, model_of, prompt_of

from penstock.attention import devices
from penstock.attention.attention_plan import DecodeRow
from penstock.engine.model.runner import Runner
from penstock.kv.segment import KVSpan
from penstock.kv.tails import Tails
from penstock.models import layer_seams
from penstock.models.weight_packer import kv_dtype, pack, weight_packer
from support.small_models import BASE, build

PROMPT = prompt_of(90)
NEW = [[5, 9], [7, 3]]
"""New tokens of two rows."""
START, COUNT = 32, 21
"""Position of the chunk, and its tokens."""


class Scene:
    """Two rows behind a shared span, one with a tail, and a prompt whose first block is read."""

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

    def together(self, width: int, position: int = START) -> list[mx.array]:
        rows, tails = self.rows()
        new = [row[:width] for row in NEW]
        prompt = PROMPT[52 : 52 + COUNT]
        decoded, chunk = self.runner.mixed(new, rows, tails, prompt, self.begun, position)
        return [decoded.logits, *tails.buffers(), *_sides(chunk.segment)]


def _sides(segment: Any) -> list[mx.array]:
    return [side for layer in segment.layers for side in layer]


def off(some: list[mx.array], others: list[mx.array]) -> float:
    """Return the largest difference of two lists of arrays, relative to the largest number."""
    assert [x.shape for x in some] == [x.shape for x in others]
    pairs = [(np.array(x.astype(mx.float32)), np.array(y.astype(mx.float32)))
             for x, y in zip(some, others, strict=True)]  # fmt: skip
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


@pytest.mark.parametrize("family", SHARED_FAMILIES)
@pytest.mark.parametrize("width", [1, 2])
def test_one_pass_computes_what_two_do(family: str, width: int) -> None:
    scene = Scene(model_of(family))
    assert not scene.runner.mixes, "both parts would be alive in MLX's operations"
    if scene.runner.is_recurrent:
        pytest.skip("recurrent layers have a state for each sequence")
    assert off(scene.together(width), scene.apart(width)) < 1e-4


@pytest.mark.skipif(weight_packer() is None, reason="packed products are compiled by Numba")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("width", [1, 2])
def test_packed_layers_compute_one_pass_to_the_bit(name: str, width: int) -> None:
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


def test_check_detects_a_chunk_elsewhere() -> None:
    scene = Scene(model_of("llama"))
    assert off(scene.together(1, START + 1), scene.apart(1)) > 1e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_of_a_chunk_are_not_computed(
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
