"""Steps and chunks through all packed layers in one job are bit-identical to layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.reads import decode_reads
from penstock.attention.span_attention import AttentionWindow
from penstock.caches.selective import SelectiveKVCache
from penstock.kv.codecs.scales import Squares
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.models import layer_seams
from penstock.models.weight_packer import pack, weight_packer
from penstock.plugins.cpu.compiled_jobs import Team, team
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.plugins.cpu.packed_steps import LayersTogether, _PassTables
from support.small_models import BASE, PACKED, build

pytestmark = pytest.mark.skipif(
    weight_packer() is None, reason="products with packed weights are compiled by Numba"
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    **PACKED,
}
ENDS = [3, 90, 41]
"""Tokens that rows have read."""
DTYPES = [mx.float32, mx.float16]
CUTS: list[list[int]] = [[], [32, 64], [40]]


def packed(name: str, **changes: Any) -> Any:
    mx.random.seed(3)
    model = build({**BASE, **MODELS[name], "model_type": name, **changes})
    nn.quantize(model, group_size=32, bits=4)
    pack(model, lambda module: None, exact=False)
    return model


def apart(model: Any) -> Any:
    """Return the model with layers that compute separately."""
    for layer in model.layers:
        layer._together = None
    return model


def drawn(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def step_of(
    model: Any,
    width: int,
    rows: list[int],
    dtype: mx.Dtype = mx.float32,
    odd: int | None = None,
    gone: Mapping[int, int] = MappingProxyType({}),
) -> DecodeStep:
    """Return a step of rows behind random keys and values, the same ones for each call.

    Those of the layer `odd` are bfloat16, which is not read in order. Layers lack those of the
    first `gone[layer]` tokens.
    """
    attention = model.layers[0].self_attn
    dim = model.layers[0].parts.dims[0]
    dtypes = [mx.bfloat16 if layer == odd else dtype for layer in range(len(model.layers))]
    shapes = tuple(LayerShape(attention.n_kv_heads, dim, dim, each) for each in dtypes)
    tails = Tails(len(rows), 64, shapes)
    tails.ready()
    decode_rows = []
    for slot, row in enumerate(rows):
        parts, start = [], 0
        sides = [
            [
                drawn(100 * layer + side, 1, attention.n_kv_heads, 100, dim).astype(shape.dtype)
                for side in (0, 1)
            ]
            for layer, shape in enumerate(shapes)
        ]
        for cut in CUTS[row]:
            layers = tuple(
                tuple(mx.contiguous(side[:, :, start:cut]) for side in both) for both in sides
            )
            mx.eval(layers)
            thinned = {layer: min(cut, count) - start for layer, count in gone.items()}
            segment = Segment(layers).thinned(thinned)  # type: ignore[arg-type]
            parts.append(KVSpan(segment, start, cut - start))
            start = cut
        for layer, both in enumerate(sides):
            tails.write_block(layer, slot, 0, *(side[:, :, start : ENDS[row]] for side in both))
        decode_rows.append(DecodeRow(tuple(parts), ENDS[row], slot, ENDS[row] - start))
    return DecodeStep.of(CPUBackend(), decode_rows, tails, width)


def computed(
    model: Any,
    width: int,
    rows: list[int],
    windows: list[AttentionWindow],
    dtype: mx.Dtype = mx.float32,
    odd: int | None = None,
    gone: Mapping[int, int] = MappingProxyType({}),
) -> tuple[mx.array, list[mx.array]]:
    """Return the logits, and the tails after the step."""
    step = step_of(model, width, rows, dtype, odd, gone)
    tokens = mx.array([[7 * row + n for n in range(width)] for row in rows])
    layer_seams.attach(model)
    with layer_seams.decoding(step.device):
        logits = model(tokens, cache=decode_reads(step, windows))
    tails = [mx.array(side) for n in range(len(windows)) for side in step.tails.layer(n)]
    mx.eval(logits, tails)
    return logits, tails


def windows_of(model: Any) -> list[AttentionWindow]:
    return [AttentionWindow() for _ in model.layers]


def count_jobs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each job's function."""
    jobs: list[int] = []
    run = Team.run

    def noting(self: Team, function: int, table: Any) -> None:
        jobs.append(function)
        run(self, function, table)

    monkeypatch.setattr(Team, "run", noting)
    return jobs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("width", "rows"), [(1, [1]), (1, [0, 1, 2]), (3, [2, 1])])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_layers_are_bit_identical_to_separate_ones(
    name: str, width: int, rows: list[int], dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(name)
    jobs = count_jobs(monkeypatch)
    logits, tails = computed(model, width, rows, windows_of(model), dtype)
    assert len(jobs) == 1, "one for the layers, the norm and the head"
    assert {side.dtype for side in tails} == {dtype}
    expected, expected_tails = computed(apart(model), width, rows, windows_of(model), dtype)
    assert len(jobs) == 1 + 3 * len(model.layers) + 2
    assert mx.array_equal(logits, expected)
    assert all(map(mx.array_equal, tails, expected_tails))


def steps_of(model: Any, width: int, rows: list[int], count: int) -> list[mx.array]:
    """Return the logits of consecutive steps."""
    step = step_of(model, width, rows)
    layer_seams.attach(model)
    logits = []
    for number in range(count):
        ahead = [row.ahead(number * width) for row in step.rows]
        following = DecodeStep.of(step.device, ahead, step.tails, width)
        tokens = mx.array([[7 * row + n + number for n in range(width)] for row in rows])
        with layer_seams.decoding(step.device):
            logits.append(model(tokens, cache=decode_reads(following, windows_of(model))))
        mx.eval(logits)
    return logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("width", "rows"), [(1, [1]), (1, [0, 1, 2]), (3, [2, 1])])
def test_following_steps_use_tables_again(
    name: str, width: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[None] = []
    make = LayersTogether._tables

    def noting(*arguments: Any) -> Any:
        made.append(None)
        return make(*arguments)

    monkeypatch.setattr(LayersTogether, "_tables", noting)
    model = packed(name)
    logits = steps_of(model, width, rows, 4)
    assert len(made) == 1
    expected = steps_of(apart(packed(name)), width, rows, 4)
    assert all(map(mx.array_equal, logits, expected))
    monkeypatch.setattr(_PassTables, "renew", lambda *_: None)
    others = steps_of(packed(name), width, rows, 4)
    assert not any(map(mx.array_equal, others[1:], expected[1:])), "the check sees stale tables"


def test_tables_are_made_anew_for_other_rows() -> None:
    model, alone = packed("llama"), apart(packed("llama"))
    for rows in ([1], [2], [1, 2], [2, 1], [1]):
        assert all(map(mx.array_equal, steps_of(model, 1, rows, 2), steps_of(alone, 1, rows, 2)))


@pytest.mark.parametrize("odd", range(4))
def test_layers_before_one_of_other_dtype_are_fused(
    odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed("llama", num_hidden_layers=4)
    jobs, rows = count_jobs(monkeypatch), [0, 0]
    logits, _ = computed(model, 1, rows, windows_of(model), odd=odd)
    together = 1 if odd else 0
    assert len(jobs) == together + 2 + 3 * (3 - odd) + 2
    expected, _ = computed(apart(model), 1, rows, windows_of(model), odd=odd)
    assert mx.array_equal(logits, expected)


def test_windowed_layers_with_keep_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("llama")
    windows = [AttentionWindow(20, keep=4), *windows_of(model)[1:]]
    jobs = count_jobs(monkeypatch)
    logits, _ = computed(model, 1, [1, 2], windows)
    assert len(jobs) == 1
    expected, _ = computed(apart(model), 1, [1, 2], windows)
    assert mx.array_equal(logits, expected)
    others, _ = computed(model, 1, [1, 2], [AttentionWindow(20), *windows[1:]])
    assert not mx.array_equal(logits, others)


@pytest.mark.parametrize("evicted", [20, 32, 45])
def test_layers_whose_first_tokens_were_evicted_are_fused(
    evicted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows, the tokens behind them are the first to be evicted."""
    model, rows = packed("gemma3_text"), [1, 1]
    windows = [AttentionWindow(20), *windows_of(model)[1:]]
    jobs, gone = count_jobs(monkeypatch), {0: evicted}
    logits, _ = computed(model, 1, rows, windows, gone=gone)
    assert len(jobs) == 1
    chunk, _ = chunk_of(model, windows, gone={0: min(evicted, 44)})
    assert len(jobs) == 4
    expected, _ = computed(model, 1, rows, windows)
    assert mx.array_equal(logits, expected)
    assert mx.array_equal(chunk, chunk_of(model, windows)[0])


@pytest.mark.parametrize(
    ("window", "evicted"), [(AttentionWindow(40), 52), (AttentionWindow(40, keep=4), 30)]
)
def test_evicted_tokens_that_a_layer_sees_are_an_error(
    window: AttentionWindow, evicted: int
) -> None:
    model = packed("gemma3_text")
    windows = [window, *windows_of(model)[1:]]
    with pytest.raises(AssertionError, match="no longer has its first"):
        computed(model, 1, [1], windows, gone={0: evicted})


def test_one_thread_gives_bit_identical_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("llama")
    expected, _ = computed(model, 1, [0, 1, 2], windows_of(model))
    monkeypatch.setattr(team(), "threads", 1)
    logits, _ = computed(model, 1, [0, 1, 2], windows_of(model))
    assert mx.array_equal(logits, expected)


def test_layers_are_not_fused_if_one_has_float32_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mx.random.seed(3)
    model = build({**BASE, **MODELS["llama"], "model_type": "llama"})

    def quantized(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and not path.startswith("model.layers.1.")

    nn.quantize(model, group_size=32, bits=4, class_predicate=quantized)
    pack(model, lambda module: None, exact=False)
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds.count("PackedDecoderLayer") == len(kinds) - 1
    jobs = count_jobs(monkeypatch)
    logits, tails = computed(model, 1, [1], windows_of(model))
    assert len(jobs) >= len(kinds) - 1
    expected, expected_tails = computed(apart(model), 1, [1], windows_of(model))
    assert mx.array_equal(logits, expected)
    assert all(map(mx.array_equal, tails, expected_tails))


def test_layers_with_equal_angles_share_them() -> None:
    llama, gemma = packed("llama"), packed("gemma3_text")
    assert len({layer.parts.rotation for layer in llama.layers}) == 1
    assert len({layer.parts.rotation for layer in gemma.layers}) == 2


def chunk_of(
    model: Any,
    windows: list[AttentionWindow],
    *,
    row: int = 1,
    tokens: int = 30,
    last: bool = False,
    squares: bool = False,
    dtype: mx.Dtype | None = None,
    gone: Mapping[int, int] = MappingProxyType({}),
) -> tuple[mx.array, list[mx.array]]:
    """Return a chunk's logits after the spans of a row, and the KV it keeps."""
    parts = step_of(model, 1, [row], dtype or mx.float32, gone=gone).rows[0].parts
    position, plans = CUTS[row][-1] if parts else 0, {}  # type: ignore[var-annotated]
    final = len(windows) - 1 if last else -1
    reads = [
        ChunkReads(
            n, window, parts, position, CPUBackend(), last=n == final, plans=plans, dtype=dtype
        )
        for n, window in enumerate(windows)
    ]
    for layer in reads if squares else []:
        layer.squares = Squares()
    layer_seams.attach(model)
    logits = model(mx.array([[5 * n % 60 for n in range(tokens)]]), cache=reads)
    sides = [side for layer in reads for side in (layer.keys, layer.values) if side is not None]
    mx.eval(logits, sides)
    assert len(sides) == 2 * len(windows)
    assert all(np.asarray(side).flags.c_contiguous for side in sides)
    return logits, sides


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_in_one_job_is_bit_identical_to_layer_by_layer(
    name: str, row: int, last: bool, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(name)
    jobs = count_jobs(monkeypatch)
    windows = windows_of(model)
    logits, sides = chunk_of(model, windows, row=row, last=last, dtype=dtype)
    assert len(jobs) == 3, "one for the layers, one for the norm, one for the head"
    assert {side.dtype for side in sides} == {dtype}
    expected, expected_sides = chunk_of(apart(model), windows, row=row, last=last, dtype=dtype)
    assert len(jobs) == 3 + 3 * len(model.layers) + 2 - 2 * last
    assert mx.array_equal(logits, expected) or last
    assert all(map(mx.array_equal, sides, expected_sides))


@pytest.mark.parametrize("window", [AttentionWindow(20), AttentionWindow(20, keep=4)])
def test_windowed_chunk_is_bit_identical_to_layer_by_layer(window: AttentionWindow) -> None:
    model = packed("llama")
    windows = [window, *windows_of(model)[1:]]
    logits, sides = chunk_of(model, windows)
    expected, expected_sides = chunk_of(apart(model), windows)
    assert mx.array_equal(logits, expected)
    assert all(map(mx.array_equal, sides, expected_sides))


def test_calibration_chunk_is_computed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("llama")
    jobs = count_jobs(monkeypatch)
    chunk_of(model, windows_of(model), squares=True)
    assert len(jobs) == 3 * len(model.layers) + 2


def test_check_detects_chunk_after_other_spans() -> None:
    model = packed("llama")
    logits, _ = chunk_of(model, windows_of(model), row=1)
    other, _ = chunk_of(apart(model), windows_of(model), row=2)
    assert not mx.array_equal(logits, other)


def test_selective_caches_use_their_own_attention() -> None:
    model = packed("llama")
    tokens = mx.array([[5 * n % 60 for n in range(200)]])
    caches: list[Any] = [SelectiveKVCache(512, attend=128) for _ in model.layers]
    whole: list[Any] = [SelectiveKVCache(512, attend=512) for _ in model.layers]
    mx.eval(model(tokens, cache=caches), model(tokens, cache=whole))
    for token in (7, 8, 9):
        partial, full = (model(mx.array([[token]]), cache=each) for each in (caches, whole))
    assert all(cache._index is not None for cache in caches)
    assert all(cache._index is None for cache in whole)
    assert not mx.array_equal(partial, full)
