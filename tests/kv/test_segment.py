"""Segments: finiteness, dropped tokens and encoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.attention import devices
from penstock.attention.joined_reads import read_sides
from penstock.kv.block_format import BlockFormats
from penstock.kv.code_pieces import dequantized
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.columns import arrays, columns
from penstock.kv.segment import Segment
from penstock.kv.states import Checkpoint
from penstock.kv.tails import LayerShape, piece_bytes

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def segment(dtype: mx.Dtype, tokens: int = 70) -> Segment:
    layers = []
    for number in range(3):
        keys = mx.random.normal((1, 2, tokens, 16), key=mx.random.key(number)).astype(dtype)
        layers.append((keys, -2 * keys[..., :8]))
    mx.eval(layers)
    return Segment(tuple(layers))


@dtypes
def test_finite_segment_is_finite(dtype: mx.Dtype) -> None:
    assert segment(dtype).is_finite()


@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("at", [(0, 0, 0), (1, 69, 7), (1, 35, 3)])
def test_non_finite_value_is_detected_anywhere(
    dtype: mx.Dtype, bad: float, side: int, at: tuple[int, int, int]
) -> None:
    for layer in range(3):
        made = segment(dtype)
        head, token, dim = at
        made.layers[layer][side][0, head, token, dim] = bad  # type: ignore[index]
        assert not made.is_finite()


@dtypes
def test_infinities_of_opposite_sign_are_detected(dtype: mx.Dtype) -> None:
    made = segment(dtype)
    made.layers[1][0][0, 0, 5, 2] = float("inf")  # type: ignore[index]
    made.layers[1][0][0, 0, 5, 3] = float("-inf")  # type: ignore[index]
    assert not made.is_finite()


def test_finite_values_with_infinite_sum_are_finite() -> None:
    """The quick check of sums fails, the full check passes."""
    made = segment(mx.float16)
    made.layers[2][1][:] = 60_000.0  # type: ignore[index]
    assert not mx.isfinite(made.layers[2][1].sum(axis=-1)).all()  # type: ignore[union-attr]
    assert made.is_finite()


# ---- layers that hold their last tokens alone


def numbered(start: int, stop: int) -> Segment:
    """Return a segment of two layers whose values are the token positions."""
    at = mx.arange(start, stop).astype(mx.float32)[None, None, :, None]
    return Segment(tuple((at + 1_000 * layer, -at - 1_000 * layer) for layer in range(2)))


def held(segment: Segment, start: int = 0) -> list[list[int]]:
    """Return the positions stored in each layer; both sides must be equal."""
    found = []
    for layer, (keys, values) in enumerate(segment.layers):
        assert isinstance(keys, mx.array) and isinstance(values, mx.array)
        assert mx.array_equal(keys, -values)
        found.append([int(x) - 1_000 * layer - start for x in keys.reshape(-1).tolist()])
        assert len(found[-1]) == segment.tokens - (segment.missing or (0, 0))[layer]
    return found


def tail(tokens: int, *gone: int) -> list[list[int]]:
    return [list(range(each, tokens)) for each in gone]


def test_layer_with_dropped_tokens_frees_their_memory() -> None:
    before = mx.get_active_memory()
    whole = segment(mx.float32, 4_096)
    size = mx.get_active_memory() - before
    thin = whole.thinned({0: 4_000, 2: 4_096})
    assert thin.missing == (4_000, 0, 4_096)
    assert (thin.tokens, whole.tokens, whole.missing) == (4_096, 4_096, ())
    assert thin.nbytes == whole.nbytes * (96 + 4_096) // (3 * 4_096)
    assert thin.layers[1] is whole.layers[1]
    assert thin.is_finite()
    del whole
    assert mx.get_active_memory() - before < size * 0.4
    again = thin.thinned({0: 3_000, 1: 0})  # what is gone stays gone
    assert again.missing == thin.missing
    assert [a.nbytes for a in arrays(*thin.layers[2])] == [0, 0]


@given(st.data())
def test_segment_with_dropped_tokens_splits_and_joins(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 9))
    gone = data.draw(st.tuples(*[st.integers(0, tokens)] * 2))
    at = data.draw(st.integers(0, tokens))
    thin = numbered(0, tokens).thinned(dict(enumerate(gone)))
    assert held(thin) == tail(tokens, *gone)
    first, rest = thin.split(at)
    assert held(first) == tail(at, *(min(each, at) for each in gone))
    assert held(rest, at) == tail(tokens - at, *(max(each - at, 0) for each in gone))
    if 0 < at < tokens:
        assert first.joins(rest)
        assert held(first.join(rest)) == held(thin)
        assert first.join(rest).missing == thin.missing
    for start in range(tokens):
        for layer in range(2):
            if start < gone[layer]:
                with pytest.raises(AssertionError, match="no longer has its first"):
                    read_sides([(thin, start, tokens)], layer, devices.current())
            else:
                ((keys,), _) = read_sides([(thin, start, tokens)], layer, devices.current())
                assert keys.tolist() == (numbered(start, tokens).layers[layer][0][0]).tolist()  # type: ignore[index,union-attr]


def gone(*counts: int) -> dict[int, int]:
    return dict(enumerate(counts))


@pytest.mark.parametrize(
    ("parents", "childs", "fits"),
    [
        ((0, 0), (0, 0), True),
        ((0, 3), (0, 0), True),
        ((0, 8), (0, 5), True),
        ((8, 8), (8, 8), True),
        ((0, 7), (0, 1), False),
        ((0, 0), (0, 8), False),
    ],
)
def test_join_with_gap_in_layer_is_refused(
    parents: Sequence[int], childs: Sequence[int], fits: bool
) -> None:
    parent, child = numbered(0, 8).thinned(gone(*parents)), numbered(8, 16).thinned(gone(*childs))
    assert parent.joins(child) is fits
    if fits:
        lost = [8 + b if b else a for a, b in zip(parents, childs, strict=True)]
        assert held(parent.join(child)) == tail(16, *lost)
    else:
        with pytest.raises(ValueError, match="a gap between two segments"):
            parent.join(child)


def test_dropped_tokens_are_filled_from_recomputed_segment() -> None:
    thin = numbered(8, 16).thinned(gone(0, 6)).checkpointed([Checkpoint(4, ())])
    filled = thin.filled(numbered(4, 23), 4)
    assert held(filled, 8) == tail(8, 0, 0)
    assert filled.missing == ()
    assert filled.checkpoints == thin.checkpoints
    assert filled.layers[0] is thin.layers[0]
    for source, at in ((numbered(8, 14), 0), (numbered(0, 16).thinned(gone(0, 9)), 8)):
        with pytest.raises(ValueError, match="not all"):
            thin.filled(source, at)


@pytest.mark.parametrize("name", ["8", "turbo4", "kivi4"])
def test_quantized_segment_with_dropped_tokens_splits_and_joins(name: str) -> None:
    scheme = parse_scheme(name)
    keys = mx.random.normal((1, 2, 192, 64), key=mx.random.key(1))
    whole = Segment(((keys, -keys), (keys, keys + 1), (keys, keys)))
    coded = whole.encoded(scheme, devices.current()).thinned(gone(64, 192, 0))
    other = whole.thinned(gone(64, 192, 0)).encoded(scheme, devices.current())
    assert coded.missing == other.missing == (64, 192, 0)
    assert coded.joins(other.split(64)[0]) is False
    for one, another in zip(coded.layers, other.layers, strict=True):
        assert columns(one[0]) == columns(another[0])
        for a, b in zip(arrays(*one), arrays(*another), strict=True):
            assert mx.array_equal(a, b)
    first, rest = coded.split(128)
    assert first.join(rest).nbytes == coded.nbytes == first.nbytes + rest.nbytes


def test_cut_segment_copies_its_codes() -> None:
    """It frees the rest of the codes; a copy of the raw sides alone shares the coded ones."""
    side = mx.random.normal((1, 2, 4_096, 64), key=mx.random.key(1))
    whole = Segment(((side, side),)).encoded(parse_scheme("8"), devices.current())
    assert whole.owned().layers[0][0] is whole.layers[0][0]
    held = mx.get_active_memory()
    part = Segment.cut(whole.layers, 0, 64)
    size = whole.nbytes
    del whole
    assert mx.get_active_memory() < held - size / 2
    assert part.tokens == 64


@pytest.mark.parametrize("name", ["8", "turbo4"])
def test_codes_are_dequantized_in_pieces(name: str) -> None:
    """Beside the result there are pieces of it, and never all of it once more."""
    side = mx.random.normal((1, 2, 16_384, 64), key=mx.random.key(1))
    coded = Segment(((side, side),)).encoded(parse_scheme(name), devices.current()).layers[0][0]
    mx.eval(arrays(coded, coded))
    del side
    mx.clear_cache()
    mx.reset_peak_memory()
    wide = dequantized([(0, 0, coded)], 1, 16_384, mx.float32, devices.current())
    assert mx.get_peak_memory() - mx.get_active_memory() < wide.nbytes / 2


def test_block_with_dropped_tokens_is_not_converted() -> None:
    shapes = [LayerShape(1, 1, 1, mx.float32)] * 2
    thin = numbered(0, 16).thinned(gone(0, 8))
    assert BlockFormats(shapes, 8).converted(thin.part(0, 8), 0) is None
    assert BlockFormats(shapes, 8).converted(thin.part(8, 16), 1) is not None


SIZES = [
    *itertools.product(
        ["affine8", "affine4", "k8v4", "turbo4", "kivi8", "raw/affine8"],
        [(1, 256), (1, 2_048), (8, 512), (8, 2_048)],
    ),
    ("affine8", (1, 16_384)),
    ("affine8g32", (1, 16_384)),
    ("raw/affine8", (1, 16_896)),  # an odd number of pieces of one side, in both lanes
    ("raw/affine4", (3, 4_224)),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_encoding_stays_within_reserved_bytes(
    name: str, size: tuple[int, int], dtype: mx.Dtype
) -> None:
    """Beside its result, piece by piece on two streams."""
    heads, tokens = size
    side = mx.random.normal((1, heads, tokens, 64), key=mx.random.key(1)).astype(dtype)
    segment = Segment(((side, side + 1), (side + 2, side + 3))).owned()
    aside = piece_bytes([LayerShape(heads, 64, 64, dtype)], devices.current().lanes)
    most = 0
    for _ in range(3):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        made = segment.encoded(parse_scheme(name), devices.current())
        held = mx.get_active_memory()
        most = max(most, mx.get_peak_memory() - held)
        assert held - before < segment.nbytes
        del made
    assert most <= aside


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("tokens", [64, 1_024, 1_984, 2_112])
def test_encoding_is_independent_of_piece_size(tokens: int, dtype: mx.Dtype) -> None:
    """For any pieces by heads and by tokens; only a side that cannot be encoded stays raw."""
    more = mx.random.normal((1, 2, tokens + 64, 64), key=mx.random.key(1)).astype(dtype)
    side = mx.contiguous(more[:, :, :tokens])
    huge = 1e9 * side.astype(mx.float32)
    view = more[:, :, 64:]
    segment = Segment(((side, side + 1), (huge, side), (side, -huge), (view, view)))
    for name in ("affine8", "kivi8/turbo4", "raw/affine4"):
        scheme = parse_scheme(name)
        made = segment.encoded(scheme, devices.current())
        for layer, before in zip(made.layers, segment.layers, strict=True):
            for held, raw, codec in zip(layer, before, (scheme.keys, scheme.values), strict=True):
                if codec is None or float(mx.abs(raw).max()) > 1e6:
                    assert held is raw
                    continue
                wanted = codec.encode(raw, devices.current())
                assert all(map(mx.array_equal, arrays(held), wanted.parts))


@pytest.mark.parametrize("tokens", [100, 300])
def test_spans_of_partial_codec_blocks_are_refused(tokens: int) -> None:
    side = mx.zeros((1, 2, tokens, 64))
    for name in ("kivi8", "kivi4/affine8"):
        with pytest.raises(ValueError, match="64 tokens together"):
            Segment(((side, side),)).encoded(parse_scheme(name), devices.current())


@pytest.mark.parametrize("name", ["rot8", "turbo4", "affine8", "kivi4"])
def test_empty_layer_is_encoded_and_dequantized(name: str) -> None:
    sides = [mx.random.normal((1, 2, tokens, 64), key=mx.random.key(1)) for tokens in (0, 64)]
    scheme = parse_scheme(name)
    parts = [
        Segment(((side, side),)).encoded(scheme, devices.current()).layers[0][0] for side in sides
    ]
    wide = dequantized([(0, 0, parts[0]), (0, 0, parts[1])], 1, 64, mx.float32, devices.current())
    assert mx.array_equal(wide, parts[1].dequantize(devices.current()))
