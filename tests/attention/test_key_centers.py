"""Key centers: measured and subtracted, which makes the index more accurate."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine_faults import model_of
from mlx_lm.models.cache import make_prompt_cache
from tiny_families import build

import penstock
from penstock.attention import devices
from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.attention.selection.key_centers import (
    RUN_TOKENS,
    KeyCenters,
    centers_of,
    run_of_tokens,
)
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.rotations import TABLE_BLOCKS, Rotation, rotation_of, rotations
from penstock.caches.factory import _with_keys
from penstock.engine.core import Core
from penstock.models.loading import load
from penstock.plugins.cpu.center_loops import cached_center_loop
from penstock.recall import MODEL_PATH

HEADS, DIM = 2, 32
Numbers = np.ndarray[Any, Any]


def ropes() -> dict[str, nn.Module]:
    return {
        "halves": nn.RoPE(DIM, traditional=False, base=1e4),
        "neighbors": nn.RoPE(DIM, traditional=True, base=1e5),
        "a part": nn.RoPE(DIM // 2, traditional=False, base=1e4),
        "scaled": nn.RoPE(DIM, traditional=False, base=1e4, scale=0.25),
    }


def turned(rope: nn.Module, keys: Numbers, offset: int = 0) -> Numbers:
    return np.array(rope(mx.array(keys.astype(np.float32))[None], offset=offset))[0]


@pytest.mark.parametrize("name", list(ropes()))
def test_rotation_matches_model_rope(name: str) -> None:
    rope = ropes()[name]
    rotation = rotation_of(rope, DIM)
    keys = np.random.default_rng(1).normal(size=(HEADS, 300, DIM))
    for offset in (0, 5_000):
        positions = np.arange(offset, offset + 300)
        expected = turned(rope, keys, offset)
        assert np.allclose(rotation.turned(keys, positions), expected, atol=5e-3)
        back = rotation.turned(expected.astype(np.float64), -positions)
        assert np.allclose(back, keys, atol=5e-3)
    assert not np.allclose(Rotation.none(DIM).turned(keys, positions), expected, atol=0.1)


def test_rotation_of_unsupported_rope_is_none() -> None:
    assert rotation_of(nn.RoPE(2 * DIM), DIM) is Rotation.none(DIM)
    assert rotation_of(None, DIM) is Rotation.none(DIM)
    assert rotation_of(lambda x, offset: x, 0) is Rotation.none(0)


@pytest.mark.parametrize(
    ("family", "turning"),
    [
        ("llama", [True, True, True, True]),
        ("qwen", [True, True, True, True]),
        ("llama4_text", [True, False, True, False]),
        ("gpt2", [False, False, False, False]),
    ],
)
def test_rotation_is_detected_per_layer(family: str, turning: list[bool]) -> None:
    model = build(family)
    dims = [cache.keys.shape[-1] for cache in filled_caches(model)]
    assert [bool(one.angles.any()) for one in rotations(model, dims)] == turning


def filled_caches(model: Any) -> list[Any]:
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2]]), cache=caches))
    return caches


@pytest.mark.parametrize("name", [*ropes(), "none"])
def test_key_centers_are_measured_and_subtracted(name: str) -> None:
    draw = np.random.default_rng(2)
    vectors = 3 * draw.normal(size=(HEADS, 1, DIM))
    plain = vectors + draw.normal(size=(HEADS, 512, DIM))
    rope = ropes().get(name)
    keys = plain if rope is None else turned(rope, plain)
    centers = KeyCenters.of(keys.astype(np.float32), rotation_of(rope, DIM))
    assert np.allclose(centers.vectors, vectors[:, 0], atol=0.3)
    rest = keys - centers.between(0, 512)
    # The fastest pairs turn within a block, and stay.
    assert np.square(rest).mean() < 0.45 * np.square(keys).mean()
    wrong = keys - centers.between(100, 612)
    assert rope is None or np.square(rest).mean() < 0.8 * np.square(wrong).mean()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["halves", "neighbors", "a part", "none"])
@pytest.mark.parametrize("m", [1, 3, 4, 7])
def test_scores_include_subtracted_centers(m: int, name: str, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    draw = np.random.default_rng(3)
    rotation = rotation_of(ropes().get(name), DIM)
    centers = KeyCenters(draw.normal(size=(HEADS, DIM)).astype(np.float32), rotation)
    queries = draw.normal(size=(HEADS, m, DIM)).astype(np.float32)
    first, stop = TABLE_BLOCKS - 3, TABLE_BLOCKS + 5
    taken = centers.between(first * BLOCK_TOKENS, stop * BLOCK_TOKENS)
    scores = centers.scores(
        queries, slice(None), first, stop, loop=cached_center_loop() if compiled else None
    )
    by_token = queries @ taken.swapaxes(1, 2)
    assert np.allclose(scores.repeat(BLOCK_TOKENS, axis=-1), by_token, atol=1e-4)
    if compiled:  # lanes share the heads of a row
        alone = centers.scores(queries[1:], slice(1, None), first, stop, loop=cached_center_loop())
        assert np.array_equal(alone, scores[1:]), "a head's scores depend on another's"
    inside = centers.between(first * BLOCK_TOKENS + 7, first * BLOCK_TOKENS + 40)
    assert np.array_equal(inside, taken[:, 7:40])
    (table,) = rotation._tables
    centers.scores(
        queries, slice(None), first, stop, loop=cached_center_loop() if compiled else None
    )
    assert rotation._tables[0] is table and len(rotation._tables) == 1, "one is made twice"
    made = 4 * 8 * TABLE_BLOCKS * 2 * len(rotation.channels[0])
    assert table.nbytes + made == rotation.table_bytes(TABLE_BLOCKS * BLOCK_TOKENS)


@pytest.mark.parametrize("compiled", [False, True])
def test_center_scores_are_correct_up_to_a_million_tokens(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    draw = np.random.default_rng(5)
    rotation = rotation_of(ropes()["halves"], DIM)
    centers = KeyCenters(draw.normal(size=(HEADS, DIM)).astype(np.float32), rotation)
    queries = draw.normal(size=(HEADS, 2, DIM)).astype(np.float32)
    last = 2**20 // BLOCK_TOKENS
    loop = cached_center_loop() if compiled else None
    scores = centers.scores(queries, slice(None), 1, last, loop=loop)
    for first in (1, TABLE_BLOCKS - 1, 7 * TABLE_BLOCKS + 1, last - 40):
        taken = centers.between(first * BLOCK_TOKENS, (first + 40) * BLOCK_TOKENS)
        by_block = queries @ taken[:, ::BLOCK_TOKENS].swapaxes(1, 2)
        assert np.allclose(scores[..., first - 1 : first + 39], by_block, atol=1e-4)
        later = scores[..., first : first + 39]
        assert not np.allclose(later, by_block[..., :-1], atol=1e-4), "negative control"
    assert len(rotation._tables) == 1
    held = rotation._tables[0].nbytes + rotation._turns[0].nbytes
    assert held < rotation.table_bytes(2**20) / 40


def test_centered_index_is_more_accurate_at_equal_bytes() -> None:
    """Keys of the embedded model, on tokens that were not used for calibration."""
    model, _ = load(MODEL_PATH)
    run = make_prompt_cache(model)
    size = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
    mx.eval(model(mx.array([run_of_tokens(size)]), cache=run))
    centers = centers_of(model, [np.array(cache.keys)[0, :, :RUN_TOKENS] for cache in run])
    draw = np.random.default_rng(4)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array(draw.integers(5, 900, (1, 600))), cache=caches))
    errors: dict[bool, list[float]] = {False: [], True: []}
    for layer, cache in enumerate(caches):
        keys = cache.keys[:, :, 16:600]
        queries = draw.normal(size=(keys.shape[1], 4, keys.shape[3])).astype(np.float32)
        exact = queries @ np.array(keys)[0].swapaxes(1, 2)
        for centered, found in errors.items():
            rule = KeyIndex(frozenset({layer}), centers=centers if centered else {})
            index = rule.of(keys, keys, layer, 16, devices.current())
            near = np.array(index.score(mx.array(queries), devices.current()))
            if centered:
                blocks = (
                    centers[layer].scores(queries, slice(None), 0, 38).repeat(BLOCK_TOKENS, axis=-1)
                )
                near += blocks[..., 16:600]
            found.append(float(np.square(near - exact).mean()))
            assert index.nbytes == 584 * keys.shape[1] * (keys.shape[3] // 4 + 2)
    assert np.mean(errors[True]) < 0.8 * np.mean(errors[False])


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "gpt_oss"])
def test_engine_and_cache_measure_equal_centers(family: str) -> None:
    model = build(family) if family == "gpt_oss" else model_of(family)
    penstock.attach(model)
    core = Core(model, memory_limit="200MB", max_batch_size=1, attend_tokens=128)
    try:
        centers = core.runner.selection.index.centers
        layers = core.runner.selectable_layers
    finally:
        core.close()
    caches = list(_with_keys(penstock.make_kv_cache(model, attend=128)))
    for number in layers:
        assert np.allclose(caches[number].centers.table, centers[number].table, atol=1e-4)
    again = list(_with_keys(penstock.make_kv_cache(model, attend=256)))
    first = min(layers)
    assert again[first].centers is caches[first].centers, "the model runs once"
