"""The format of a block is known before it is computed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from penstock.kv.block_format import BlockFormats
from penstock.kv.quantization import QuantizationRule
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape

SHAPES = [LayerShape(2, 64, 64, mx.float32)] * 2
BLOCK = 64


def forms(name: str, raw_tokens: int = 0, raw_layers: frozenset[int] = frozenset()) -> BlockFormats:
    rule = QuantizationRule.of(
        name, block_size=BLOCK, first_tokens=raw_tokens, skip_layers=raw_layers
    )
    return BlockFormats(SHAPES, BLOCK, rule)


def block(largest: float = 1.0) -> Segment:
    def side() -> mx.array:
        return mx.random.normal((1, 2, BLOCK, 64)) * largest

    return Segment(tuple((side(), side()) for _ in SHAPES))


def test_blocks_of_raw_first_tokens_stay_raw() -> None:
    found = forms("turbo4", raw_tokens=100)
    assert [found.of(number) is found.coded for number in range(4)] == [False, False, True, True]
    assert found.spans.ends(9) == [2, 5], "what is raw is in records of its own"
    raw, coded = found.nbytes(0, 1), found.nbytes(2, 3)
    assert raw == block().nbytes
    assert 32 * coded == 4.25 * raw  # bits a number: 4, and 16 / 64 of a scale
    assert found.nbytes(0, 5) == 2 * raw + 3 * coded
    assert found.nbytes(3, 5) == 2 * coded
    assert (found.most_record_bytes, found.converted_record_bytes) == (5 * raw, 5 * coded)
    assert BlockFormats(SHAPES, BLOCK).converted_record_bytes == 0


@pytest.mark.parametrize("name", ["4", "turbo2.5", "kivi4", "raw/turbo3"])
def test_codec_of_block_depends_on_block_number(name: str) -> None:
    found, given = forms(name, raw_tokens=64, raw_layers=frozenset([1])), block()
    assert found.converted(given, 0) is given
    held = found.converted(given, 1)
    assert held is not None
    assert held.nbytes == found.nbytes(1, 2) < given.nbytes
    assert held.layers[1] == given.layers[1]
    assert found.converted(held, 1) is held
    assert found.converted(held, 0) is None, "it cannot be dequantized again"


def test_unencodable_block_is_not_stored() -> None:
    assert forms("4").converted(block(1e6), 0) is None


def test_different_formats_have_different_identities() -> None:
    names = [
        each.rule.identity
        for each in (
            forms("4"),
            forms("turbo4"),
            forms("4", raw_tokens=64),
            forms("4", raw_layers=frozenset([1])),
        )
    ]
    assert len(set(names)) == 4


def test_raw_keys_and_layers_are_counted_separately_from_codes() -> None:
    shapes = [LayerShape(2, 32, 64, mx.float16)] * 3
    rule = QuantizationRule.of("raw/8", block_size=64, first_tokens=0, skip_layers=[1])
    coded, raw = rule.token_bits(shapes)
    assert raw == 2 * (3 * 32 + 64) * 16
    codec = rule.scheme.values
    assert codec is not None and coded == 2 * 2 * codec.token_bits(64)
