"""Arrays to bytes and back: the very numbers, in every dtype and shape."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from penstock.kv import columns as col
from penstock.kv.segment import Segment
from penstock.prefix.ssd.host import host_blocks, segment_of

BLOCK = 8


def segment(tokens: int, dtype: mx.Dtype = mx.float32, layers: int = 3) -> Segment:
    key = mx.random.key(7)

    def side(heads: int, width: int) -> mx.array:
        return mx.random.normal((1, heads, tokens, width), key=key).astype(dtype)

    made = Segment(tuple((side(2, 16), side(2, 8)) for _ in range(layers)))
    mx.eval([col.arrays(*layer) for layer in made.layers])
    return made


def quantized(tokens: int) -> Segment:
    wide = segment(tokens, layers=2)
    made = Segment(
        tuple(
            tuple(mx.quantize(mx.concatenate([side] * 4, axis=-1), 32, 8) for side in layer)  # type: ignore[misc]
            for layer in wide.layers
        )
    )
    mx.eval([col.arrays(*layer) for layer in made.layers])
    return made


def equal(a: Segment, b: Segment) -> bool:
    def arrays(one: Segment) -> list[mx.array]:
        return [array for layer in one.layers for array in col.arrays(*layer)]

    return len(arrays(a)) == len(arrays(b)) and all(
        x.dtype == y.dtype and x.shape == y.shape and mx.array_equal(x, y).item()
        for x, y in zip(arrays(a), arrays(b), strict=True)
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_blocks_are_the_segment_again(dtype: mx.Dtype) -> None:
    whole = segment(4 * BLOCK, dtype)
    blocks = host_blocks(whole, BLOCK)
    assert len(blocks) == 4
    assert set(blocks[0]) == {f"{i}.{side}" for i in range(3) for side in ("keys", "values")}
    assert sum(a.data.nbytes for block in blocks for a in block.values()) == whole.nbytes
    assert equal(segment_of(blocks), whole)
    assert equal(segment_of(blocks[1:3]), whole.split(BLOCK)[1].split(2 * BLOCK)[0])


def test_values_whose_layout_is_another_come_back_too() -> None:
    """What a model computes is often a view with its heads behind its tokens."""
    rows = mx.random.normal((1, 2 * BLOCK, 2, 16))
    turned = rows.transpose(0, 2, 1, 3)
    whole = Segment(((turned, turned),))
    assert equal(segment_of(host_blocks(whole, BLOCK)), whole)


def test_a_side_of_several_arrays_stays_what_it_is() -> None:
    whole = quantized(2 * BLOCK)
    blocks = host_blocks(whole, BLOCK)
    assert "0.keys.2" in blocks[0]
    assert equal(segment_of(blocks), whole)


def test_bytes_are_the_caller_s_own() -> None:
    whole = segment(BLOCK)
    (block,) = host_blocks(whole, BLOCK)
    before = block["0.keys"].data.copy()
    del whole
    mx.eval(mx.zeros((1 << 20,)))
    assert np.array_equal(block["0.keys"].data, before)


def test_blocks_that_do_not_go_together_are_refused() -> None:
    one, other = host_blocks(segment(BLOCK), BLOCK), host_blocks(segment(BLOCK, layers=2), BLOCK)
    for blocks in ([], [*one, *other], [{"0.keys": one[0]["0.keys"]}]):
        with pytest.raises(ValueError, match="the blocks do not hold"):
            segment_of(blocks)
