"""Steps that select tokens in compiled jobs: what `LoopReader` selects, in any batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.reads import decode_reads
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import Rotation
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.models import layer_seams
from penstock.models.weight_packer import pack, weight_packer
from penstock.plugins.cpu import ordered_attention
from penstock.plugins.cpu.compiled_jobs import Team
from penstock.plugins.cpu.cpu_backend import CPUBackend
from support.small_models import BASE, build

pytestmark = pytest.mark.skipif(
    weight_packer() is None, reason="products with packed weights are compiled by Numba"
)
CPU = CPUBackend()
HEADS, KV_HEADS = 4, 2
CUTS = [[], [32, 64, 330], [200, 216, 500], [3, 700]]
"""Ends of the spans of each row. The first has too few tokens to select any."""
TOKENS = [20, 345, 531, 719]
"""Tokens that rows have read."""


def packed(dim: int, layers: int = 2) -> Any:
    mx.random.seed(3)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": dim}
    model = build({**BASE, **heads, "num_hidden_layers": layers, "model_type": "llama"})
    nn.quantize(model, group_size=32, bits=4)
    pack(model, lambda module: None, exact=False)
    return model


def index_of(dim: int, layers: frozenset[int], *, centered: bool) -> KeyIndex:
    draw = np.random.default_rng(7)
    turns = 10.0 ** -draw.uniform(0, 4, dim // 2)
    partners = np.roll(np.arange(dim), dim // 2)
    rotation = Rotation.shared(np.concatenate([-turns, turns]), partners)
    vectors = draw.normal(size=(KV_HEADS, dim)).astype(np.float32)
    centers = {layer: KeyCenters(vectors, rotation) for layer in layers} if centered else {}
    return KeyIndex(layers, centers=centers)


def proposed_of(row: int, width: int) -> int:
    return max(0, width - 1 - row % 2)


def step_of(
    selection: Selection, dim: int, rows: list[int], width: int, dtype: mx.Dtype, layers: int
) -> DecodeStep:
    """Return a step of rows behind random keys and values, the same ones for each call."""
    tails = Tails(len(rows), 64, (LayerShape(KV_HEADS, dim, dim, dtype),) * layers)
    tails.ready()
    decode_rows = []
    for slot, row in enumerate(rows):
        draw = np.random.default_rng(row)
        shape = layers, 2, 1, KV_HEADS, TOKENS[row], dim
        sides = mx.array(2 * draw.standard_normal(shape, np.float32)).astype(dtype)
        parts, start = [], 0
        for cut in CUTS[row]:
            of_layers = tuple(
                tuple(mx.contiguous(side[:, :, start:cut]) for side in layer) for layer in sides
            )
            mx.eval(of_layers)
            segment = Segment(of_layers)  # type: ignore[arg-type]
            parts.append(KVSpan(selection.index.indexed(segment, start, CPU), start, cut - start))
            start = cut
        for number, layer in enumerate(sides):
            tails.write_block(number, slot, 0, *(side[:, :, start:] for side in layer))
        own = DecodeRow(
            tuple(parts), TOKENS[row], slot, TOKENS[row] - start, proposed=proposed_of(row, width)
        )
        decode_rows.append(own)
    return DecodeStep.of(CPU, decode_rows, tails, width, selection=selection)


def computed(model: Any, step: DecodeStep, rows: list[int]) -> mx.array:
    """Return the logits of a step, without those of columns that are ignored."""
    tokens = mx.array([[7 * row + n for n in range(step.width)] for row in rows])
    layer_seams.attach(model)
    windows = [AttentionWindow() for _ in model.layers]
    with layer_seams.decoding(step.device):
        logits = model(tokens, cache=decode_reads(step, windows))
    mx.eval(logits)
    return mx.concatenate(
        [logits[number, : 1 + row.proposed] for number, row in enumerate(step.rows)]
    )


def without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps that select tokens be read by `LoopReader`."""
    monkeypatch.setattr(ordered_attention, "step_choice", lambda *_: None)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize(("dim", "centered"), [(64, True), (32, False), (96, True)])
@pytest.mark.parametrize(("rows", "width"), [([1], 1), ([0, 1, 2, 3], 1), ([3, 2], 3)])
def test_jobs_match_loops_that_select_one_layer(
    dtype: mx.Dtype,
    dim: int,
    centered: bool,
    rows: list[int],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One layer: a second one would select by what the first one has rounded in another way.
    layer = dim // 32 % 2
    model, index = packed(dim), index_of(dim, frozenset({layer}), centered=centered)
    step = step_of(Selection(192, index), dim, rows, width, dtype, 2)
    runs: list[int] = []
    monkeypatch.setattr(Team, "run", _noting(Team.run, runs))
    by_jobs = computed(model, step, rows)
    assert len(runs) == 1, "one program of all layers and the head"
    without_jobs(monkeypatch)
    by_loops = computed(model, step_of(Selection(192, index), dim, rows, width, dtype, 2), rows)
    assert len(runs) > 4
    every = computed(model, step_of(Selection(10_000, index), dim, rows, width, dtype, 2), rows)
    difference = float(mx.abs(by_jobs - by_loops).max())
    assert difference < 2e-3 < 0.02 < float(mx.abs(by_jobs - every).max())


def _noting(run: Any, runs: list[int]) -> Any:
    def noted(self: Team, function: int, table: Any) -> None:
        runs.append(function)
        run(self, function, table)

    return noted


@pytest.mark.parametrize("width", [1, 2])
def test_selecting_row_has_the_same_bits_in_any_batch(width: int) -> None:
    dim, rows = 64, [0, 1, 2, 3]
    model, index = packed(dim), index_of(dim, frozenset({0, 1}), centered=True)
    selection = Selection(192, index)
    together = computed(model, step_of(selection, dim, rows, width, mx.float16, 2), rows)
    first = 0
    for row in rows:
        alone = computed(model, step_of(selection, dim, [row], width, mx.float16, 2), [row])
        assert mx.array_equal(together[first : first + len(alone)], alone)
        first += len(alone)
    assert first == len(together)


@pytest.mark.parametrize("indexed", [{0, 1}, {1}])
def test_layer_that_selects_by_itself_has_the_same_bits(indexed: set[int]) -> None:
    dim, rows = 64, [1, 0, 3]
    index = index_of(dim, frozenset(indexed), centered=True)
    step = step_of(Selection(192, index), dim, rows, 1, mx.float16, 2)
    model = packed(dim)
    together = computed(model, step, rows)
    for layer in model.layers:
        layer._together = None
    step = step_of(Selection(192, index), dim, rows, 1, mx.float16, 2)
    assert mx.array_equal(together, computed(model, step, rows))


def test_check_detects_other_selection() -> None:
    dim, rows = 64, [3]
    model, index = packed(dim), index_of(dim, frozenset({0, 1}), centered=True)
    few, more = (
        computed(model, step_of(Selection(tokens, index), dim, rows, 1, mx.float16, 2), rows)
        for tokens in (192, 208)
    )
    assert float(mx.abs(few - more).max()) > 2e-3
