"""Codecs: error, size, and that codes equal their dequantized values."""

from __future__ import annotations

import math
from typing import Self

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import product_error

from penstock.attention import devices
from penstock.kv.codecs import names
from penstock.kv.codecs.affine import Affine
from penstock.kv.codecs.coded import Codec, pack, quantized, unpack
from penstock.kv.codecs.names import AUTO, parse_scheme
from penstock.kv.codecs.rotation import rotate, rotate_back

HEADS, TOKENS = 4, 256
NAMES = (
    *("affine2", "affine3", "affine4", "affine5", "affine6", "affine8", "affine4g32"),
    *("rot4", "rot8", "turbo2", "turbo2.5", "turbo3", "turbo3.5", "turbo4", "turbo5", "turbo6"),
    *("turbo8", "kivi2", "kivi3", "kivi4", "kivi8"),
)
DIMS = (64, 80, 128, 192)


def side(name: str, *, keys: bool = True) -> Codec:
    scheme = parse_scheme(name)
    found = scheme.keys if keys else scheme.values
    assert found is not None
    return found


def holds(codec: Codec, dim: int) -> bool:
    try:
        codec.token_bits(dim)
    except ValueError:
        return False
    return True


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def widened(codes: mx.array, scales: mx.array, offsets: mx.array, group_size: int) -> mx.array:
    """Return bytes as the float32 values that they encode."""
    wide = scales.astype(mx.float32), offsets.astype(mx.float32)
    return mx.dequantize(codes, *wide, group_size=group_size, bits=8)


def off(found: mx.array, wanted: mx.array) -> float:
    return float(mx.abs(found - wanted).max())


CASES = [
    pytest.param(side(name, keys=keys), dim, id=f"{name}-{'keys' if keys else 'values'}-{dim}")
    for name in NAMES
    for keys in (True, False)
    for dim in DIMS
    if holds(side(name, keys=keys), dim)
]


@pytest.mark.parametrize(("codec", "dim"), CASES)
def test_code_size_and_products_match_dequantized_values(codec: Codec, dim: int) -> None:
    x = normal(1, HEADS, TOKENS, dim)
    coded = codec.encode(x, devices.current())
    assert 8 * coded.nbytes == codec.token_bits(dim) * HEADS * TOKENS
    assert coded.tokens == TOKENS
    wide = coded.dequantize(devices.current())
    assert wide.shape == x.shape
    assert wide.dtype == mx.float32
    queries = normal(HEADS, 3, dim, seed=1)
    keys = wide[0].swapaxes(-1, -2)
    assert off(coded.score(queries, devices.current()), queries @ keys) < product_error(
        queries, keys
    )
    weights = mx.softmax(normal(HEADS, 3, TOKENS, seed=2), axis=-1)
    assert off(coded.mix(weights, devices.current()), weights @ wide[0]) < product_error(
        weights, wide[0]
    )


@pytest.mark.parametrize(("codec", "dim"), [case for case in CASES if "128" in str(case.id)])
def test_encoding_is_deterministic_in_any_batch(codec: Codec, dim: int) -> None:
    """In a block, batched, alone, or after others: restored codes must match."""
    x = normal(3, HEADS, TOKENS, dim)
    together = codec.encode(x, devices.current())
    span = codec.span
    for row in range(3):
        alone = codec.encode(x[row : row + 1], devices.current())
        for part, own in zip(together.parts, alone.parts, strict=True):
            assert mx.array_equal(part[row : row + 1], own)
    one = codec.encode(x[:1, :, span : 2 * span], devices.current())
    cut = codec.encode(x[:1], devices.current()).take(span, 2 * span)
    whole = (
        codec.encode(x[:1], devices.current())
        .take(0, span)
        .join(cut, codec.encode(x[:1], devices.current()).take(2 * span, TOKENS))
    )
    for piece, again in zip(one.parts, cut.parts, strict=True):
        assert mx.array_equal(piece, again)
    for piece, again in zip(whole.parts, codec.encode(x[:1], devices.current()).parts, strict=True):
        assert mx.array_equal(piece, again)


@pytest.mark.parametrize(
    ("name", "most"), [("turbo2", 0.119), ("turbo3", 0.0375), ("turbo4", 0.0116), ("turbo8", 9e-5)]
)
def test_uniform_codec_error_is_bounded(name: str, most: float) -> None:
    x = normal(1, 16, 1_024, 128)
    lost = x - side(name, keys=False).encode(x, devices.current()).dequantize(devices.current())
    assert float((lost * lost).sum() / (x * x).sum()) < most


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("turbo")])
def test_dequantized_keys_have_unbiased_projections(name: str) -> None:
    x = normal(1, 16, 1_024, 128)
    wide = side(name).encode(x, devices.current()).dequantize(devices.current())
    along = (x * wide).sum(axis=-1) / (x * x).sum(axis=-1)
    assert abs(float(along.mean()) - 1) < 0.002
    assert off(along, mx.ones(along.shape)) < 0.01


@pytest.mark.parametrize("name", ["turbo3", "turbo2.5", "kivi4", "rot4"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_encodes_like_float32(name: str, dtype: mx.Dtype) -> None:
    x = normal(1, HEADS, TOKENS, 64).astype(dtype)
    for part, same in zip(
        side(name).encode(x, devices.current()).parts,
        side(name).encode(x.astype(mx.float32), devices.current()).parts,
        strict=True,
    ):
        assert mx.array_equal(part, same)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_encoded_exactly(name: str) -> None:
    for keys in (True, False):
        coded = side(name, keys=keys).encode(mx.zeros((1, HEADS, TOKENS, 64)), devices.current())
        assert coded.is_finite()
        assert off(coded.dequantize(devices.current()), mx.zeros((1, HEADS, TOKENS, 64))) == 0


@pytest.mark.parametrize("name", NAMES)
def test_values_too_large_for_scale_are_detected(name: str) -> None:
    x = normal(1, HEADS, TOKENS, 64)
    assert side(name).encode(x, devices.current()).is_finite()
    # 255 steps of 8 bits reach further than the others' scales.
    x[0, 1, 2, 3] = 1e9 if name in ("affine8", "rot8", "kivi8") else 1e7
    assert not side(name).encode(x, devices.current()).is_finite()


def test_coded_spans_split_only_at_block_boundaries() -> None:
    coded = side("kivi4").encode(normal(1, HEADS, TOKENS, 64), devices.current())
    with pytest.raises(ValueError, match="cut every 64 tokens"):
        coded.take(0, 65)
    with pytest.raises(ValueError, match="encodes 64 tokens together, not 65"):
        side("kivi4").encode(normal(1, HEADS, 65, 64), devices.current())


@pytest.mark.parametrize(
    ("name", "dim", "words"),
    [
        ("affine4", 80, "no group does, but turbo4 holds it"),
        ("affine4", 96, "append g32"),
        ("turbo2.5", 96, "multiple of 64, not 96; use turbo2 or turbo3"),
        ("kivi4", 81, "no whole bits"),
    ],
)
def test_unsupported_head_sizes_are_refused_with_reason(name: str, dim: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        side(name).token_bits(dim)


# ---- names


@pytest.mark.parametrize(
    ("text", "name", "ratio"),
    [
        ("raw", "raw", 1.0),
        ("4", "affine4", 3.556),
        ("8", "affine8", 1.882),
        ("affine4g32", "affine4g32", 3.2),
        ("k8v4g32", "rot8g32/rot4g32", 2.286),
        ("k8v4", "rot8/rot4", 2.462),
        ("K4V2", "rot4/rot2", 4.571),
        ("kivi4", "kivi4", 3.556),
        ("kivi5/turbo3.5", "kivi5/turbo3.5", 3.507),
        ("turbo4", "turbo4", 3.879),
        ("turbo2.5", "turbo2.5", 6.095),
        ("raw/affine4", "raw/affine4", 1.561),
    ],
)
def test_codec_names_round_trip(text: str, name: str, ratio: float) -> None:
    scheme = parse_scheme(text)
    assert scheme.name == name
    assert scheme.ratio(128, 128) == pytest.approx(ratio, abs=1e-3)
    assert parse_scheme(name) == scheme


@pytest.mark.parametrize(
    "text",
    [
        "",
        "affine7",
        "7",
        "turbo7",
        "turbo9",
        "turbo5c",
        "turbo4.5c",
        "kivi7",
        "k7v4",
        "q4",
        "a/b/c",
    ],
)
def test_error_of_unknown_codec_lists_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="supported: raw; affine2"):
        parse_scheme(text)


def test_kivi_codec_for_values_is_refused() -> None:
    with pytest.raises(ValueError, match="for keys"):
        parse_scheme("affine4/kivi4")


# ---- parts


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_codes_round_trip(bits: int, groups: int, seed: int) -> None:
    codes = mx.random.randint(0, 2**bits, (3, 32 * groups), key=mx.random.key(seed))
    packed = pack(codes, bits)
    assert packed.shape == (3, bits * groups)
    assert mx.array_equal(unpack(packed, bits), codes.astype(mx.uint32))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_matches_mlx(bits: int) -> None:
    codes = mx.random.randint(0, 2**bits, (5, 128), key=mx.random.key(bits))
    ones, zeros = mx.ones((5, 2)), mx.zeros((5, 2))
    read = mx.dequantize(pack(codes, bits), ones, zeros, group_size=64, bits=bits)
    assert mx.array_equal(read, codes.astype(mx.float32))


def spread(kind: str) -> mx.array:
    """Return numbers with groups that are hard to encode: offset, constant, tiny, large, empty."""
    x = normal(3, 40, 128)
    if kind == "far":
        return 300.0 + 0.01 * x
    if kind == "below":
        return -300.0 + 0.01 * x
    if kind == "alike":
        return mx.full(x.shape, 3.14159)
    return x * {"plain": 1.0, "tiny": 1e-7, "large": 1e4, "zero": 0.0}[kind]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "far", "below", "alike", "tiny", "large", "zero"])
def test_8_bit_error_is_at_most_that_of_mlx(kind: str, dtype: mx.Dtype, group_size: int) -> None:
    x = spread(kind).astype(dtype)
    wide = x.astype(mx.float32)
    form = {"group_size": group_size, "bits": 8}

    def lost(codes: mx.array, scales: mx.array, offsets: mx.array) -> float:
        assert scales.dtype == offsets.dtype == mx.float16
        found = widened(codes, scales, offsets, group_size)
        return float(((found - wide) ** 2).mean())

    theirs = mx.quantize(x.astype(mx.float16), **form)
    rounded = 1e-6 * float(mx.abs(wide).max()) + 5e-8  # far below what float16 tells apart
    assert lost(*quantized(x, **form, ops=devices.current())) <= 1.01 * lost(*theirs) + rounded**2


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_8_bit_codes_are_independent_of_input_precision(dtype: mx.Dtype) -> None:
    every = mx.arange(2**16, dtype=mx.uint16).view(dtype)
    size = mx.abs(every.astype(mx.float32))
    fits = mx.isfinite(size) & (size < 6e4)  # for bfloat16, what fits a scale
    every = mx.where(fits, every, 0)
    mixed = every[mx.random.permutation(every.size, key=mx.random.key(0))]
    for x in (every.reshape(-1, 64), mixed.reshape(-1, 64), mixed.reshape(-1, 128)[:, :96]):
        found = quantized(x, group_size=32, bits=8, ops=devices.current())
        wanted = quantized(x.astype(mx.float32), group_size=32, bits=8, ops=devices.current())
        assert all(map(mx.array_equal, found, wanted))


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_non_finite_input_gives_non_finite_scale(dtype: mx.Dtype, number: float) -> None:
    for others in (normal(2, 64), mx.abs(normal(2, 64)), -mx.abs(normal(2, 64))):
        x = others.astype(dtype)
        x[0, 5] = number
        _, scales, _ = quantized(x, group_size=64, bits=8, ops=devices.current())
        assert mx.isfinite(scales).tolist() == [[False], [True]]


@given(
    st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32),
    st.sampled_from([1.0, 1e-3, 1e-6]),
)
@settings(max_examples=300, deadline=None)
def test_8_bit_error_is_at_most_half_a_quantization_step(
    numbers: list[float], times: float
) -> None:
    x = mx.array([numbers], mx.float32) * times
    codes, scales, offsets = quantized(x, group_size=32, bits=8, ops=devices.current())
    found = widened(codes, scales, offsets, 32)
    largest, span = float(mx.abs(x).max()), float(x.max() - x.min())
    # A step, and what an offset far from zero is rounded by.
    assert off(found, x) <= 0.51 * (span + largest / 500) / 255 + largest / 2e6 + 1.3e-7


@pytest.mark.parametrize("dim", [*DIMS, 32, 48, 96, 112, 256, 576])
def test_rotation_preserves_products_and_is_invertible(dim: int) -> None:
    x, y = normal(5, dim), normal(7, dim, seed=1)
    for width in (dim, -(-dim // 32) * 32):
        transform_query = rotate(x, width)
        assert transform_query.shape == (5, width)
        also = rotate(y, width).T
        assert off(transform_query @ also, x @ y.T) < product_error(transform_query, also)
        assert off(rotate_back(transform_query, dim), x) < 1e-5


def test_rotation_spreads_outliers() -> None:
    x = normal(100, 128)
    x[:, 3] *= 30
    assert float(mx.abs(rotate(x)).max()) < 0.3 * float(mx.abs(x).max())


def test_rotation_is_stable_across_processes() -> None:
    """Other processes read the blocks: the signs are part of the format."""
    found = [round(float(number), 5) for number in rotate(mx.arange(32.0)[None])[0, :4]]
    assert found == [-7.07107, -9.8995, -7.07107, 24.04163]


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", AUTO)
def test_auto_codec_reaches_ratio_in_its_name(name: str, dim: int) -> None:
    assert parse_scheme(name).ratio(dim, dim) >= float(name.removeprefix("auto").removesuffix("x"))


def test_new_codec_needs_one_class_and_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting names, pairs with other codecs, and the error's list follow."""

    class Doubled(Affine):
        FORMS = "doubled4"

        @classmethod
        def parse(cls, word: str, *, keys: bool) -> Self | None:
            return cls(4) if word == "doubled4" else None

        @property
        def name(self) -> str:
            return "doubled4"

    monkeypatch.setattr(names, "CODECS", (*names.CODECS, Doubled))
    scheme = parse_scheme("doubled4/turbo3")
    assert scheme.name == "doubled4/turbo3" and isinstance(scheme.keys, Doubled)
    assert parse_scheme("doubled4").values == Doubled(4)


def test_codec_without_scales_ignores_them() -> None:
    codec = side("kivi8")
    assert not codec.takes_scales and codec.scaled(((1,) * 64,)) is codec


@pytest.mark.parametrize("kind", names.CODECS)
def test_every_codec_is_listed_in_error(kind: type[Codec]) -> None:
    assert kind.FORMS and kind.FORMS in names.FORMS
