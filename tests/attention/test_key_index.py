"""The key index: scores, size, and splitting and joining with its segment."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from penstock.attention import devices
from penstock.attention.devices import using
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.key_index import PIECE_TOKENS, KeyIndex
from penstock.attention.selection.rotations import Rotation
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.columns import arrays
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape
from penstock.plugins.cpu.cpu_backend import CPUBackend

HEADS, DIM, LAYERS = 2, 64, 3
INDEX = KeyIndex(frozenset({0, 2}))
SHAPES = [LayerShape(HEADS, DIM, DIM, mx.float32)] * LAYERS


def segment(tokens: int, seed: int = 0, dim: int = DIM, dtype: mx.Dtype = mx.float32) -> Segment:
    def side(number: int) -> mx.array:
        return mx.random.normal((1, HEADS, tokens, dim), key=mx.random.key(number)).astype(dtype)

    layers = tuple((side(seed + 2 * n), side(seed + 2 * n + 1)) for n in range(LAYERS))
    mx.eval(layers)
    return Segment(layers)


def indexed(segment: Segment, start: int = 0) -> Segment:
    return INDEX.indexed(segment, start, devices.current())


def raw_keys(segment: Segment, layer: int) -> mx.array:
    keys = segment.layers[layer][0]
    assert isinstance(keys, mx.array)
    return keys.squeeze(0)


def same(index: tuple[Coded | None, ...], other: tuple[Coded | None, ...]) -> bool:
    """Return whether two indices are bit-identical in the same layers."""
    if [one is None for one in index] != [one is None for one in other]:
        return False
    pairs = zip(arrays(*index), arrays(*other), strict=True)
    return all(mx.array_equal(a, b).item() for a, b in pairs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_index_scores_correlate_with_key_scores(dim: int, dtype: mx.Dtype) -> None:
    """For normal keys the sign keeps 2 / pi of the variance: a correlation of 0.8."""
    held = indexed(segment(700, dim=dim, dtype=dtype))
    queries = mx.random.normal((HEADS, 3, dim), key=mx.random.key(9))
    keys, index = raw_keys(held, 2).astype(mx.float32), held.index[2]
    assert index is not None
    exact, scores = (
        np.array(queries @ keys.swapaxes(-1, -2)),
        np.array(index.score(queries, devices.current())),
    )
    assert scores.shape == exact.shape
    for head in range(HEADS):
        for row in range(3):
            assert np.corrcoef(exact[head, row], scores[head, row])[0, 1] > 0.65
            # Unbiased: the scale is the one by which a key meets itself rightly.
            slope = np.polyfit(exact[head, row], scores[head, row], 1)[0]
            assert 0.75 < slope < 1.25


def test_index_score_of_key_with_itself_is_its_squared_norm() -> None:
    held = indexed(segment(50))
    keys, index = raw_keys(held, 0), held.index[0]
    assert index is not None
    own = np.einsum("htt->ht", np.array(index.score(keys, devices.current())))
    assert np.allclose(own, np.array((keys * keys).sum(-1)), rtol=2e-3)


def test_key_index_nbytes_match_formula() -> None:
    for tokens in (1, 37, 2 * PIECE_TOKENS + 5):
        held = indexed(segment(tokens))
        assert held.key_index_nbytes == tokens * INDEX.token_bytes(SHAPES)
        assert held.nbytes == held.kv_nbytes + held.key_index_nbytes
    assert INDEX.token_bytes(SHAPES) == 2 * HEADS * 18, "two bits a number and two bytes, by head"


def test_index_survives_split_and_join() -> None:
    whole = segment(300)
    expected = indexed(whole).index
    first, second = whole.split(130)
    joined = indexed(first).join(indexed(second))
    assert same(joined.index, expected)
    head, tail = indexed(whole).split(40)
    assert same(head.index, indexed(whole.part(0, 40)).index)
    assert same(tail.join(head).index, indexed(whole.split(40)[1].join(head)).index)
    assert not same(tail.join(head).index, expected), "the order counts"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_cpu_index_matches_codec(dim: int, dtype: mx.Dtype) -> None:
    keys = mx.random.normal((1, HEADS, 300, dim), key=mx.random.key(5)).astype(dtype)
    keys[:, :, 7] = 0
    keys[:, :, 8, 0] = 3e38 if dtype != mx.float16 else 6e4
    with using(CPUBackend()):
        codes, sizes = map(np.array, INDEX.of(keys, keys, 0, 0, devices.current()).parts)
        expected = [np.array(part) for part in INDEX.codec.encode(keys, devices.current()).parts]
        apart = [
            INDEX.of(keys[:, :, n : n + 1], keys, 0, 0, devices.current()).parts for n in range(16)
        ]
    assert codes.dtype == expected[0].dtype
    assert np.array_equal(*(np.delete(part, 8, axis=2) for part in (codes, expected[0])))
    too_large = ~np.isfinite(expected[1])
    assert np.isfinite(sizes).all() and not np.any(sizes[:, :, 7])
    assert np.all(sizes[too_large] == np.finfo(np.float16).max), "held as the largest"
    assert too_large[:, :, 8].all() == (dtype != mx.float16) and not too_large[:, :, 9:].any()
    # Sums in another order: up to one step of a float16.
    steps = sizes.view(np.int16).astype(int) - expected[1].view(np.int16)
    assert np.abs(steps[:, :, 9:]).max() <= 1
    for part, whole in ((0, codes), (1, sizes)):
        alone = np.concatenate([np.array(one[part]) for one in apart], axis=2)
        assert np.array_equal(alone, whole[:, :, :16]), "row by row"


def test_join_with_unindexed_segment_drops_index() -> None:
    first, second = segment(64).split(32)
    assert indexed(first).join(second).index == ()
    assert not indexed(first).joins(second)
    assert indexed(first).joins(indexed(second))


def test_split_frees_original_segment() -> None:
    held = indexed(segment(4_096))
    mx.clear_cache()
    half, rest = held.split(2_048)
    del held, rest
    mx.clear_cache()
    before = mx.get_active_memory()
    nbytes = half.nbytes
    del half
    assert before - mx.get_active_memory() == nbytes


@pytest.mark.parametrize("codec", ["turbo4", "kivi4", "affine8"])
def test_index_survives_quantization(codec: str) -> None:
    raw = indexed(segment(256))
    coded = raw.encoded(parse_scheme(codec), devices.current())
    assert same(coded.index, raw.index)
    anew = indexed(segment(256).encoded(parse_scheme(codec), devices.current()))
    assert INDEX.complete(anew)
    for layer in (0, 2):
        codes, before = arrays(anew.index[layer])[0], arrays(raw.index[layer])[0]
        differ = np.bitwise_xor(np.array(codes), np.array(before))
        share = np.unpackbits(differ.view(np.uint8)).mean()
        assert share < 0.06, "few signs change where keys change by some percent"


def test_layers_with_dropped_tokens_are_not_indexed() -> None:
    """A layer that dropped its first tokens reads a window and selects nothing."""
    thinned = segment(64).thinned({2: 32})
    index = indexed(thinned).index
    assert index[0] is not None and index[1] is None and index[2] is None


def test_index_codec_of_one_bit_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a codec"):
        parse_scheme("turbo1")


def test_both_backends_give_equal_index_scores() -> None:
    """The GPU expands signs to floats; the CPU looks up sums of eight."""
    index = indexed(segment(3_000)).index[0]
    assert index is not None
    queries = mx.random.normal((HEADS, 3, DIM), key=mx.random.key(9))
    scores = []
    for device in (CPUBackend(), GPUBackend()):
        with using(device):
            scores.append(np.array(index.score(queries, devices.current())))
    assert np.allclose(*scores, rtol=1e-4, atol=1e-4)
    assert not np.allclose(scores[0], np.roll(scores[1], 1, axis=-1), atol=1e-2)


@pytest.mark.parametrize("tokens", [1, 32, PIECE_TOKENS // 2 + 1])
@pytest.mark.parametrize("backend", [CPUBackend, GPUBackend])
def test_layers_indexed_together_equal_each_alone(backend: type, tokens: int) -> None:
    """With the same, other and no centers, other dtypes and sizes, and a layer that is indexed."""
    rng = np.random.default_rng(0)
    turning = Rotation.shared(np.repeat([0.3, -0.3], DIM // 2), np.arange(DIM) ^ 1)
    rotations = turning, turning, Rotation.none(DIM), Rotation.none(DIM), None, None
    vectors = [rng.normal(size=(HEADS, DIM)).astype(np.float32) for _ in rotations]
    centers = {
        layer: KeyCenters(vectors[layer], rotation)
        for layer, rotation in enumerate(rotations)
        if rotation is not None
    }
    layers = [*segment(tokens).layers, *segment(tokens, seed=6).layers]
    layers += [*segment(tokens, seed=12, dtype=mx.float16).layers, *segment(tokens, dim=96).layers]
    index = KeyIndex(frozenset(range(len(layers) - 1)), centers=centers)
    with using(backend()):
        ops = devices.current()
        alone = [index.of(*layers[layer], layer, 40, ops) for layer in sorted(index.layers)]
        none = (None,) * (len(layers) - 1)
        joined = index.indexed(Segment(tuple(layers), index=(alone[0], *none)), 40, ops).index
    assert same(joined, (*alone, None))
    assert joined[0] is alone[0]
    other = replace(alone[1], parts=(alone[1].parts[0] ^ 1, alone[1].parts[1]))
    assert not same(joined, (alone[0], other, *alone[2:], None)), "the comparison sees a bit"
