"""Arrays to bytes and back, in every dtype and shape."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from penstock.attention import devices
from penstock.kv import columns as col
from penstock.kv.block_format import BlockFormat
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape
from penstock.tiers.host import TOKENS, RestoreBuffer, host_block
from penstock.tiers.record import HostArray

BLOCK = 64


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


def blocks_of(whole: Segment) -> list[dict[str, HostArray]]:
    tokens = np.arange(whole.tokens)
    starts = range(0, whole.tokens, BLOCK)
    return [
        host_block(Segment.views(whole.layers, start, start + BLOCK), tokens[start : start + BLOCK])
        for start in starts
    ]


def form(dtype: mx.Dtype = mx.float32) -> BlockFormat:
    return BlockFormat.of([LayerShape(2, 16, 8, dtype)] * 3)


def restored(blocks: list[dict[str, HostArray]], form: BlockFormat, **more: bool) -> RestoreBuffer:
    """Copy the bytes of blocks to their places, as if they were read from files."""
    buffer = RestoreBuffer(form, len(blocks), BLOCK, **more)
    for block, targets in zip(blocks, buffer.targets(), strict=True):
        assert block.keys() == targets.keys()
        for name, target in targets.items():
            assert (block[name].dtype, block[name].shape) == (target.dtype, target.shape)
            raw = block[name].data
            for piece in target.pieces:
                piece[:] = raw[: len(piece)]
                raw = raw[len(piece) :]
            assert not len(raw)
    return buffer


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_blocks_restore_segment(dtype: mx.Dtype, in_place: bool) -> None:
    whole = segment(4 * BLOCK, dtype)
    blocks = blocks_of(whole)
    assert set(blocks[0]) == {
        *(f"{i}.{side}" for i in range(3) for side in ("keys", "values")),
        TOKENS,
    }
    buffer = restored(blocks, form(dtype), in_place=in_place)
    assert equal(buffer.segment(), whole)
    assert list(buffer.tokens) == list(range(4 * BLOCK))
    part = whole.split(BLOCK)[1].split(2 * BLOCK)[0]
    assert equal(restored(blocks[1:3], form(dtype), in_place=in_place).segment(), part)


def test_in_place_buffer_is_counted_outside_mlx() -> None:
    blocks = blocks_of(segment(4 * BLOCK, mx.float32))
    buffer = restored(blocks, form(), in_place=True)
    assert buffer.nbytes == buffer.segment().nbytes
    assert restored(blocks, form(), in_place=False).nbytes == 0


def test_transposed_values_round_trip() -> None:
    """Models often produce views with heads after tokens."""

    def side(width: int) -> mx.array:
        return mx.random.normal((1, 2 * BLOCK, 2, width)).transpose(0, 2, 1, 3)

    whole = Segment(tuple((side(16), side(8)) for _ in range(3)))
    assert equal(restored(blocks_of(whole), form()).segment(), whole)


def test_restored_segment_uses_buffer_without_copy() -> None:
    shapes = [LayerShape(2, 64, 64, mx.bfloat16)] * 2
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    buffer = RestoreBuffer(BlockFormat.of(shapes), 64, BLOCK)
    buffer.targets()
    made = buffer.segment()
    assert mx.get_active_memory() - before == made.nbytes
    assert mx.get_peak_memory() - before < made.nbytes + 1_000


def test_every_array_of_quantized_keys_has_a_name() -> None:
    (block, _) = blocks_of(quantized(2 * BLOCK))
    assert {"0.keys.0", "0.keys.1", "0.keys.2"} <= set(block)


def test_block_copies_its_bytes() -> None:
    whole = segment(BLOCK)
    (block,) = blocks_of(whole)
    before = block["0.keys"].data.copy()
    del whole
    mx.eval(mx.zeros((1 << 20,)))
    assert np.array_equal(block["0.keys"].data, before)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "name",
    ["8", "rot3", "turbo4", "turbo2.5", "kivi4/turbo3.5", "k8v4", "raw/4", "5g32"],
)
def test_codes_round_trip_bit_identical(name: str, in_place: bool) -> None:
    """Also with differing head sizes, and with a layer that stays raw."""
    scheme = parse_scheme(name)
    shapes = [LayerShape(2, 128, 64, mx.bfloat16)] * 3
    held = BlockFormat.of(shapes, scheme, [1])
    layers = [
        tuple(mx.random.normal((1, 2, 4 * BLOCK, dim)).astype(mx.bfloat16) for dim in (128, 64))
        for _ in shapes
    ]
    whole = Segment(tuple((block_hashes, values) for block_hashes, values in layers)).encoded(
        scheme, devices.current(), [1]
    )
    assert held.holds(whole)
    assert held.nbytes(whole.tokens) == whole.nbytes
    made = restored(blocks_of(whole), held, in_place=in_place).segment()
    assert equal(made, whole)
    assert held.holds(made)
