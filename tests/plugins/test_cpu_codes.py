"""Products with codes on a CPU, and dequantization."""

from __future__ import annotations

import mlx.core as mx
import pytest
from rounding import product_error

from penstock.kv.codecs.names import parse_scheme
from penstock.plugins.cpu.cpu_backend import CPUBackend

CPU = CPUBackend()
BITS = (2, 3, 4, 5, 6, 8)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def off(found: mx.array, wanted: mx.array) -> float:
    return float(mx.abs(found - wanted).max())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_dequantization_matches_mlx(bits: int, group_size: int) -> None:
    codes, scales, offsets = mx.quantize(normal(2, 5, 256), group_size=group_size, bits=bits)
    wanted = mx.dequantize(codes, scales, offsets, group_size=group_size, bits=bits)
    found = CPU.dequantize_codes(codes, scales, offsets, group_size=group_size, bits=bits)
    assert mx.array_equal(found, wanted)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("at_once", [2**10, 2**18])
@pytest.mark.parametrize("shape", [(2, 100), (2, 3, 64)])
def test_products_with_codes_match_mlx(
    bits: int,
    group_size: int,
    rows: int,
    at_once: int,
    shape: tuple[int, ...],
) -> None:
    device = CPUBackend(codes_at_once=at_once)
    codes, scales, offsets = mx.quantize(normal(*shape, 128), group_size=group_size, bits=bits)
    form = {"group_size": group_size, "bits": bits}
    for transpose, width in ((True, 128), (False, shape[-1])):
        x = normal(*shape[:-1], rows, width, seed=1)
        wanted = mx.quantized_matmul(x, codes, scales, offsets, transpose=transpose, **form)
        found = device.multiply_codes(x, codes, scales, offsets, transpose=transpose, **form)
        assert found.shape == wanted.shape
        wide = mx.dequantize(codes, scales, offsets, **form)
        wide = wide.swapaxes(-1, -2) if transpose else wide
        assert off(found, wanted) < product_error(x, wide)


@pytest.mark.parametrize("name", ["affine8", "turbo4", "turbo3.5"])
@pytest.mark.parametrize("tokens", [4_096, 16_384])
def test_codes_are_dequantized_piecewise(name: str, tokens: int) -> None:
    codec, heads, rows = parse_scheme(name).keys, 8, 8
    assert codec is not None
    coded = codec.encode(normal(1, heads, tokens, 64), CPU)
    queries, weights = normal(heads, rows, 64), normal(heads, rows, tokens)
    mx.eval(coded.parts, queries, weights)
    scores = weights.nbytes
    for read in (
        lambda: coded.score(queries, CPU),
        lambda: coded.mix(weights, CPU),
    ):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(read())
        taken = mx.get_peak_memory() - before
        # One lane; the sums of what is scored are counted with the scores.
        assert taken <= CPUBackend(lanes=1).memory.code_bytes(heads * tokens * 64) + 5 * scores
        if tokens > 4_096:
            assert taken < heads * tokens * 64 * 4  # what all of it would take
