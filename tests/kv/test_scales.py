"""Key channel scales: equal scores, with less error for outlier channels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from rounding import product_error

from penstock.attention import devices
from penstock.attention.span_attention import merged
from penstock.kv.block_format import BlockFormat
from penstock.kv.codecs.coded import Codec, Scales
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.codecs.scales import Squares, digest
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.quantization import QuantizationRule
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape

HEADS, TOKENS, DIM, ASKED = 4, 256, 64, 256
NAMES = ("turbo4", "turbo3.5", "turbo3", "rot4", "rot8")
LARGE = 16.0
CHANNELS = (3, 17, 35, 49)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def codec(name: str) -> Codec:
    found = parse_scheme(name).keys
    assert found is not None
    return found


def uneven() -> mx.array:
    """Return channel magnitudes that differ per head, (heads, 1, dim)."""
    factors = mx.ones((HEADS, 1, DIM))
    for head in range(HEADS):
        for channel in CHANNELS:
            factors[head, 0, (channel + head) % DIM] = LARGE
    return factors


def measured(keys: mx.array, queries: mx.array) -> Scales:
    """keys: (1, heads, tokens, dim), queries: (heads, m, dim)."""
    squares = Squares()
    squares.add(keys, queries[None])
    return squares.scales()


def outliers(seed: int = 0) -> tuple[mx.array, mx.array]:
    """Return keys with large channels and queries with equally small ones."""
    keys, queries = normal(1, HEADS, TOKENS, DIM, seed=seed), normal(HEADS, ASKED, DIM, seed=99)
    return keys * uneven(), queries / uneven()


def off(found: mx.array, wanted: mx.array) -> float:
    return float(mx.abs(found - wanted).max())


def lost(held: Codec, keys: mx.array, queries: mx.array) -> float:
    """Return the mean squared error of the scores."""
    wanted = queries @ keys[0].swapaxes(-1, -2)
    return float(
        (
            (held.encode(keys, devices.current()).score(queries, devices.current()) - wanted) ** 2
        ).mean()
    )


# ---- which


def test_outlier_channels_are_detected() -> None:
    keys, queries = outliers()
    scales = measured(keys, queries)
    for head, found in enumerate(scales):
        large = {(channel + head) % DIM for channel in CHANNELS}
        assert {i: power for i, power in enumerate(found) if power} == dict.fromkeys(large, 4)


def test_ordinary_keys_have_no_scales() -> None:
    keys, queries = normal(1, HEADS, TOKENS, DIM), normal(HEADS, TOKENS, DIM, seed=1)
    assert measured(30 * keys, queries) == ()
    assert Squares().scales() == ()


def test_queries_of_head_group_are_pooled() -> None:
    keys, queries = normal(1, 2, TOKENS, DIM), mx.array(normal(1, 4, TOKENS, DIM, seed=1))
    queries[:, 2:, :, 5] /= 64  # all that the second head of keys meets
    queries[:, 1, :, 9] /= 64  # half of what the first one does
    squares = Squares()
    squares.add(keys, queries)
    first, second = squares.scales()
    assert not any(first)
    assert {i: power for i, power in enumerate(second) if power} == {5: 3}


@pytest.mark.parametrize(("times", "power"), [(6.0, 0), (10.0, 2), (24.0, 2), (2e10, 16)])
def test_only_outlier_channels_get_scale(times: float, power: int) -> None:
    keys, queries = mx.array(normal(1, 1, 4_096, DIM)), mx.array(normal(1, 4_096, DIM, seed=1))
    keys[..., 3] *= times
    queries[..., 7] *= 100  # what meets small keys is no reason to make them large
    found = measured(keys, queries)
    assert found == ((bytes(power if i == 3 else 0 for i in range(DIM)),) if power else ())


def test_zero_and_infinite_channels_get_no_scale() -> None:
    keys, queries = outliers()
    keys, queries = mx.array(keys), mx.array(queries)
    keys[:, 0, :, 7], queries[1, :, 8] = 0.0, 0.0
    keys[:, 2, :, 9] = float("inf")
    scales = measured(keys, queries)
    assert (scales[0][7], scales[1][8], scales[2][9]) == (0, 0, 0)


def test_incremental_measurement_matches_one_pass() -> None:
    keys, queries = outliers()
    squares = Squares()
    for start in range(0, TOKENS, 64):
        squares.add(keys[:, :, start : start + 64], queries[None])
    assert squares.scales() == measured(keys, queries)


# ---- what they do


@pytest.mark.parametrize("name", NAMES)
def test_scores_match_dequantized_codes(name: str) -> None:
    keys, queries = outliers()
    held = codec(name).scaled(measured(keys, queries))
    coded = held.encode(keys, devices.current())
    wide = coded.dequantize(devices.current())[0]
    columns = wide.swapaxes(-1, -2)
    assert off(coded.score(queries, devices.current()), queries @ columns) < product_error(
        queries, columns
    )
    weights = mx.softmax(normal(HEADS, 3, TOKENS, seed=2), axis=-1)
    assert off(coded.mix(weights, devices.current()), weights @ wide) < product_error(weights, wide)
    for start, stop in ((0, 2), (2, 4), (1, 2)):
        some = coded.of_heads(start, stop)
        assert mx.array_equal(some.dequantize(devices.current())[0], wide[start:stop])
        assert (
            off(
                some.score(queries[start:stop], devices.current()),
                coded.score(queries, devices.current())[start:stop],
            )
            < 1e-5
        )


def test_attention_over_codes_matches_dequantized() -> None:
    keys, queries = outliers()
    held = codec("turbo4").scaled(measured(keys, queries)).encode(keys, devices.current())
    values = normal(HEADS, TOKENS, DIM, seed=3)
    found = merged([devices.current().attend_decode(queries, [held], [values])])
    # In float64: scores of 40 have an error of 1e-5 in float32 already.
    wide, asked, mixed = (
        np.array(each, np.float64)
        for each in (held.dequantize(devices.current())[0], queries, values)
    )
    scores = asked @ wide.swapaxes(-1, -2)
    weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    wanted = weights @ mixed / weights.sum(axis=-1, keepdims=True)
    assert np.abs(np.array(found) - wanted).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_outlier_channels_do_not_increase_error(name: str) -> None:
    plain = lost(codec(name), normal(1, HEADS, TOKENS, DIM), normal(HEADS, ASKED, DIM, seed=99))
    keys, queries = outliers()
    scaled = lost(codec(name).scaled(measured(keys, queries)), keys, queries)
    assert 0.7 * plain < scaled < 1.3 * plain
    assert lost(codec(name), keys, queries) > 3 * scaled, "without scales they do"


def test_scales_depend_on_keys_and_queries() -> None:
    """Negative control: keys and queries that are large in the same channels need no scale."""
    keys, queries = outliers()
    queries = queries * uneven() ** 2
    assert measured(keys, queries) == ()
    held, wrong = codec("turbo4"), measured(keys, mx.ones(queries.shape))
    assert lost(held.scaled(wrong), keys, queries) > 1.5 * lost(held, keys, queries)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_is_deterministic_in_any_batch(name: str) -> None:
    keys, queries = outliers()
    held = codec(name).scaled(measured(keys, queries))
    both = held.encode(mx.concatenate([keys, outliers(1)[0]]), devices.current())
    for part, own in zip(both.parts, held.encode(keys, devices.current()).parts, strict=True):
        assert mx.array_equal(part[:1], own)
    for part, own in zip(
        both.parts, held.encode(keys[:, :, 70:71], devices.current()).parts, strict=True
    ):
        assert mx.array_equal(part[:1, :, 70:71], own)


@pytest.mark.parametrize("name", ["affine4", "kivi4"])
def test_codecs_without_rotation_ignore_scales(name: str) -> None:
    def asked() -> tuple[Scales, ...]:
        raise AssertionError("nothing is to be measured")

    scheme = parse_scheme(name)
    assert scheme.scaled(asked) is scheme


# ---- identity


def layered(*layers: Scales, name: str = "turbo4") -> Scheme:
    return parse_scheme(name).scaled(lambda: layers)


def segment(seed: int = 0) -> Segment:
    keys = outliers(seed)[0]
    return Segment(((keys, keys), (keys, keys)))


def test_scales_are_per_layer() -> None:
    some = measured(*outliers())
    scheme = layered((), some)
    assert scheme == layered((), measured(*outliers()))
    assert scheme != layered(some, ())
    assert layered((), ()) == parse_scheme("turbo4")
    held = segment().encoded(scheme, devices.current())
    bare = segment().encoded(parse_scheme("turbo4"), devices.current())
    same = [
        [mx.array_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True)]  # type: ignore[union-attr]
        for ours, theirs in zip(held.layers, bare.layers, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    assert [all(each) for each in same] == [True, True, False, True]


def test_per_head_encoding_uses_per_head_scales() -> None:
    scheme = layered(measured(*outliers()))
    keys = normal(1, HEADS, 1_024, DIM)  # of which one head is encoded at a time
    held = Segment(((keys, keys),)).encoded(scheme, devices.current()).layers[0][0]
    own = scheme.of_layer(0).keys
    assert own is not None and own.takes_scales
    assert own != codec("turbo4")
    assert all(map(mx.array_equal, held.parts, own.encode(keys, devices.current()).parts))  # type: ignore[union-attr]


def test_only_segments_with_equal_scales_join() -> None:
    some = measured(*outliers())
    held = segment().encoded(layered((), some), devices.current())
    again = segment(1).encoded(layered((), measured(*outliers())), devices.current())
    assert held.joins(again)
    assert held.join(again).tokens == 2 * TOKENS
    assert not held.joins(segment().encoded(parse_scheme("turbo4"), devices.current()))
    assert not held.joins(segment().encoded(layered(some, some), devices.current()))
    shapes = [LayerShape(HEADS, DIM, DIM, mx.float32)] * 2
    assert BlockFormat.of(shapes, layered((), some)).holds(held)
    assert not BlockFormat.of(shapes, parse_scheme("turbo4")).holds(held)


def test_different_scales_have_different_identities() -> None:
    rule = QuantizationRule.of("turbo4", block_size=64, first_tokens=0)
    assert rule is not None
    some = measured(*outliers())
    found = [
        rule.scaled(lambda layers=layers: layers).identity  # type: ignore[misc]
        for layers in ((), (some, ()), ((), some), (some, some))
    ]
    assert len(set(found)) == 4
    assert found[0] == rule.identity == rule.scaled(lambda: ((), ())).identity
    assert digest((some,)) == digest((measured(*outliers()),))
