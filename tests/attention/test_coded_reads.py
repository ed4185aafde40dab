"""Attention over quantized segments, also mixed with raw ones, against dequantized KV."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from penstock.attention import devices
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.joined_reads import JoinedReads, join_parts
from penstock.attention.reads import DecodeReads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv import columns as col
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.columns import Side
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.tiers.host import host_block

HEADS, KV_HEADS, DIM, SCALE, TAIL = 8, 2, 64, 64**-0.5, 4
SCALED = ", scaled"
SCHEMES = (
    *("affine4", "k8v4", "turbo3", "turbo2.5", "kivi4", "kivi5/turbo3.5", "raw/4"),
    *(f"{name}{SCALED}" for name in ("turbo4", "turbo2.5", "k8v4")),
)
SIGHTS = (AttentionWindow(), AttentionWindow(100, 8), AttentionWindow(70))


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def segment(tokens: int, seed: int) -> Segment:
    sides = [normal(1, KV_HEADS, tokens, DIM, seed=10 * seed + i) for i in range(2)]
    return Segment(((sides[0], sides[1]),))


def parsed(name: str) -> Scheme:
    """Return a codec scheme, or one with different scales per head and channel."""
    scheme = parse_scheme(name.removesuffix(SCALED))
    if not name.endswith(SCALED):
        return scheme
    exponents = np.random.default_rng(0).integers(-2, 3, (KV_HEADS, DIM), np.int8)
    return scheme.scaled(lambda: (tuple(head.tobytes() for head in exponents),))


def dequantized(found: Segment) -> Segment:
    def wide(side: Side) -> Side:
        return side.dequantize(devices.current()) if isinstance(side, Coded) else side

    return Segment(tuple((wide(keys), wide(values)) for keys, values in found.layers))


def tree(scheme: str) -> list[Segment]:
    """Return a raw segment, one in the scheme, and one in another codec."""
    runs = [segment(64, 1), segment(128, 2), segment(192, 3)]
    return [
        runs[0],
        runs[1].encoded(parsed(scheme), devices.current()),
        runs[2].encoded(parse_scheme("8"), devices.current()),
    ]


def rows(runs: list[Segment]) -> list[DecodeRow]:
    """Return three rows: the second shares two segments with the first, the third one."""
    starts = [0, 64, 192]
    parts = [KVSpan(run, start, run.tokens) for run, start in zip(runs, starts, strict=True)]
    cut = KVSpan(runs[1], 64, 100)
    return [
        DecodeRow(tuple(parts), 384 + 2, 0, 2),
        DecodeRow(tuple(parts[:2]), 192 + 1, 1, 1),
        DecodeRow((parts[0], cut), 164 + 3, 2, 3),
    ]


def tails() -> Tails:
    made = Tails(3, TAIL, [LayerShape(KV_HEADS, DIM, DIM, mx.float32)])
    made.ready()
    for slot in range(3):
        for column in range(TAIL):
            sides = [normal(1, KV_HEADS, 1, DIM, seed=500 + 10 * slot + column + i) for i in (0, 7)]
            made.write_block(0, slot, column, sides[0], sides[1])
    return made


def decoded(chosen: list[DecodeRow], attention_window: AttentionWindow) -> mx.array:
    step = DecodeStep.of(devices.current(), chosen, tails())
    reads = DecodeReads(step, 0, attention_window)
    own = [normal(3, KV_HEADS, 1, DIM, seed=900 + i) for i in range(2)]
    slots = mx.array([row.slot for row in chosen])
    keys, values = reads.update_and_fetch(own[0][slots], own[1][slots])
    queries = normal(3, HEADS, 1, DIM, seed=77)[slots]
    return reads.attend(queries, keys, values, SCALE, reads.make_mask(1))


def off(found: mx.array, wanted: mx.array) -> float:
    return float(mx.abs(found - wanted).max())


@pytest.mark.parametrize("attention_window", SIGHTS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_step_over_codes_matches_dequantized(
    scheme: str, attention_window: AttentionWindow
) -> None:
    coded = tree(scheme)
    wide = [dequantized(run) for run in coded]
    together = decoded(rows(coded), attention_window)
    assert off(together, decoded(rows(wide), attention_window)) < 1e-5
    for i in range(3):
        alone = decoded([rows(coded)[i]], attention_window)
        assert off(alone, together[i : i + 1]) < 1e-5, "a batch says what each says alone"


@pytest.mark.parametrize("attention_window", SIGHTS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunk_over_codes_matches_dequantized(
    scheme: str, attention_window: AttentionWindow
) -> None:
    def attended(runs: list[Segment]) -> mx.array:
        parts = rows(runs)[0].parts
        reads = ChunkReads(0, attention_window, parts, 384, devices.current())
        own = [normal(1, KV_HEADS, 16, DIM, seed=30 + i) for i in range(2)]
        keys, values = reads.update_and_fetch(own[0], own[1])
        queries = normal(1, HEADS, 16, DIM, seed=9)
        return reads.attend(queries, keys, values, SCALE, reads.make_mask(16))

    coded = tree(scheme)
    assert off(attended(coded), attended([dequantized(run) for run in coded])) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_joined_kv_is_dequantized(scheme: str) -> None:
    def joined(runs: list[Segment]) -> tuple[mx.array, mx.array]:
        reads = JoinedReads(0, AttentionWindow(), rows(runs)[0].parts, 384, devices.current())
        own = [normal(1, KV_HEADS, 4, DIM, seed=60 + i) for i in range(2)]
        return reads.update_and_fetch(own[0], own[1])

    coded = tree(scheme)
    for found, wanted in zip(joined(coded), joined([dequantized(r) for r in coded]), strict=True):
        assert found.dtype == mx.float32
        assert mx.array_equal(found, wanted)


def test_check_detects_wrong_codec() -> None:
    """Negative control: codes of another codec."""
    coded, other = tree("turbo3"), tree("turbo4")
    assert (
        off(decoded(rows(coded), AttentionWindow()), decoded(rows(other), AttentionWindow())) > 1e-3
    )


def test_check_detects_missing_key_scales() -> None:
    """Negative control: queries without the key scales."""
    scaled = tree(f"turbo4{SCALED}")
    ((keys, values),) = scaled[1].layers
    assert isinstance(keys, Coded)
    bare = parse_scheme("turbo4").keys
    assert bare is not None
    forgotten = Segment(((Coded(bare, keys.parts, keys.dim), values),))
    found = decoded(rows([scaled[0], forgotten, scaled[2]]), AttentionWindow())
    assert off(found, decoded(rows(scaled), AttentionWindow())) > 1e-2


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("scheme", ["kivi4", "turbo4", "turbo4, scaled"])
def test_half_precision_and_quantized_segments_are_attended_together(
    scheme: str, dtype: mx.Dtype
) -> None:
    """Raw spans are multiplied in their own dtype, coded ones in float32."""

    def attended(runs: list[Segment], kind: mx.Dtype) -> mx.array:
        cast: Callable[[Side], Side] = lambda side: (  # noqa: E731
            side.astype(kind) if isinstance(side, mx.array) else side
        )
        runs = [Segment(tuple((cast(k), cast(v)) for k, v in run.layers)) for run in runs]
        made = Tails(3, TAIL, [LayerShape(KV_HEADS, DIM, DIM, kind)])
        made.ready()
        step = DecodeStep.of(devices.current(), rows(runs), made)
        reads = DecodeReads(step, 0, AttentionWindow())
        own = [normal(3, KV_HEADS, 1, DIM, seed=900 + i).astype(kind) for i in range(2)]
        keys, values = reads.update_and_fetch(own[0], own[1])
        queries = normal(3, HEADS, 1, DIM, seed=77).astype(kind)
        return reads.attend(queries, keys, values, SCALE, reads.make_mask(1))

    runs = tree(scheme)
    found = attended(runs, dtype)
    assert found.dtype == dtype
    assert off(found.astype(mx.float32), attended(runs, mx.float32)) < 0.03


# ---- segments


@pytest.mark.parametrize("scheme", SCHEMES)
def test_coded_segments_split_join_and_count_bytes(scheme: str) -> None:
    whole = segment(256, 1).encoded(parsed(scheme), devices.current())
    assert whole.tokens == 256
    bits = parsed(scheme).token_bits(DIM, DIM, 32)
    assert 8 * whole.nbytes == bits * KV_HEADS * 256
    first, rest = whole.split(64)
    assert (first.tokens, rest.tokens) == (64, 192)
    assert first.nbytes + rest.nbytes == whole.nbytes
    again = first.join(rest)
    for layer, same in zip(whole.layers, again.layers, strict=True):
        for one, other in zip(col.arrays(*layer), col.arrays(*same), strict=True):
            assert mx.array_equal(one, other)
    held = host_block(Segment.views(whole.layers, 64, 128), np.zeros(64, np.int32))
    assert sum(array.data.nbytes for name, array in held.items() if name != "tokens") == (
        first.nbytes
    )


def test_only_segments_of_same_encoding_join() -> None:
    raw, four = segment(64, 1), segment(64, 2).encoded(parse_scheme("4"), devices.current())
    other = segment(64, 3).encoded(parse_scheme("4"), devices.current())
    assert raw.joins(segment(64, 4))
    assert four.joins(other)
    assert not raw.joins(four)
    assert not four.joins(segment(64, 5).encoded(parse_scheme("4g32"), devices.current()))


def test_encoding_keeps_skipped_layers_and_existing_codes() -> None:
    raw = Segment(segment(64, 1).layers + segment(64, 2).layers)
    found = raw.encoded(parse_scheme("turbo4"), devices.current(), raw_layers={1})
    assert isinstance(found.layers[0][0], Coded)
    assert all(a is b for a, b in zip(found.layers[1], raw.layers[1], strict=True))
    again = found.encoded(parse_scheme("4"), devices.current(), raw_layers={1})
    assert all(a is b for a, b in zip(again.layers[0], found.layers[0], strict=True))


def test_values_too_large_for_scale_stay_raw() -> None:
    raw = segment(64, 1)
    keys = mx.array(raw.layers[0][0])
    keys[0, 0, 3, 5] = 1e6
    found = Segment(((keys, raw.layers[0][1]),)).encoded(parse_scheme("turbo4"), devices.current())
    assert found.layers[0][0] is keys
    assert isinstance(found.layers[0][1], Coded)


def test_encoding_peak_memory_is_bounded() -> None:
    """One side is encoded piece by piece, whatever the segment's length."""
    raw = segment(8_192, 1)
    for side in raw.layers[0]:
        mx.eval(side)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = raw.encoded(parse_scheme("turbo4"), devices.current())
    peak = mx.get_peak_memory() - before
    assert mx.get_active_memory() - before == found.nbytes
    assert peak < 2 * found.nbytes + 0.2 * raw.nbytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("scheme", ["kivi4/turbo4", "k8v4", "4"])
@pytest.mark.parametrize(
    "attention_window", [AttentionWindow(), AttentionWindow(100), AttentionWindow(130, 40)]
)
def test_streamed_dequantization_matches_joined(
    attention_window: AttentionWindow, scheme: str, dtype: mx.Dtype
) -> None:
    """Bit-identical in the model's dtype, also where a window starts inside a span."""
    runs = [
        Segment(tuple((k.astype(dtype), v.astype(dtype)) for k, v in run.layers))
        for run in (segment(64, 1), segment(2_048, 2))
    ]
    coded = Segment(runs[1].layers).encoded(parse_scheme(scheme), devices.current())
    parts = (KVSpan(runs[0], 0, 64), KVSpan(coded, 64, 2_048))
    keys, values = (normal(1, KV_HEADS, 5, DIM, seed=i).astype(dtype) for i in (7, 8))
    for position in (2_112, 128):
        seen = parts if position == 2_112 else (parts[0], KVSpan(coded, 64, 64))
        pieces, at_once = (
            join_parts(
                seen,
                0,
                attention_window,
                position,
                (keys, values),
                devices.current(),
                lazily=lazily,
            )
            for lazily in (False, True)
        )
        for one, other in zip(pieces[:2], at_once[:2], strict=True):
            assert one.dtype == dtype
            assert mx.array_equal(one, other.astype(dtype))
        assert (pieces[2] is None) == (at_once[2] is None)
