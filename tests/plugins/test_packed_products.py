"""Products with packed weights: near MLX's, and batch-invariant."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

pytest.importorskip("numba", reason="products with packed weights are compiled by Numba")

from penstock.plugins.cpu import tile_products
from penstock.plugins.cpu.compiled_jobs import team
from penstock.plugins.cpu.layer_loops import (
    LINEAR_WORDS,
    PART_WORDS,
    PartTable,
    part_loops,
    round_loop,
)
from penstock.plugins.cpu.packed_products import (
    GROUPS,
    CodeRows,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    Product,
    can_multiply,
    packed_matrix,
)

ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 33)
ROUNDED_ERROR = 2.0**-14
"""Error of products as a share of their size, where a row's blocks of numbers have 16 bits."""


def linear(columns: int, rows: int, bits: int, group: int, *, bias: bool = False) -> nn.Module:
    mx.random.seed(0)
    numbers = mx.random.normal((rows + 1, columns)) + 0.3  # offsets matter
    layer = nn.Linear(columns, rows, bias=bias)
    layer.weight = numbers[:rows]
    if bias:
        layer.bias = numbers[rows, :1] * mx.arange(rows)
    return layer.to_quantized(group_size=group, bits=bits)


def float4_linear(columns: int, rows: int) -> nn.Module:
    mx.random.seed(0)
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = mx.random.normal((rows, columns))
    return layer.to_quantized(group_size=32, bits=4, mode="mxfp4")


def packed(layer: nn.Module, *, exact: bool) -> PackedLinear:
    return PackedLinear(matrix_of(layer), layer.get("bias"), exact=exact)


def matrix_of(layer: nn.Module) -> PackedMatrix:
    assert can_multiply(layer)
    return packed_matrix(layer)


def error(products: mx.array, expected: mx.array) -> float:
    """Return the root mean square of the difference relative to the expected values."""
    difference = products - expected
    return float(mx.sqrt((difference * difference).mean() / (expected * expected).mean()))


def tiles_by_numpy(matrix: PackedMatrix, layer: nn.Module) -> np.ndarray[Any, Any]:
    """Return the tiles of a module's codes, computed by operations on whole arrays."""
    groups, count = matrix.tiles.shape[1], len(matrix.tiles)
    rows, padding = matrix.rows, count * 16 - matrix.rows
    if layer.mode == "mxfp4":
        stream = np.asarray(layer.weight).view(np.uint8)
        codes = np.stack([stream & 15, stream >> 4], axis=-1).reshape(rows, -1)
        scales = np.exp2(np.asarray(layer.scales).astype(np.float32) - 128)
        sides = [scales, -12 * scales]
    else:
        ones = mx.ones((rows, matrix.columns // 32))
        numbers = mx.dequantize(layer.weight, ones, 0 * ones, group_size=32, bits=layer.bits)
        codes = np.asarray(numbers).astype(np.uint8)
        sides = [np.asarray(layer[name]) for name in ("scales", "biases")]
    parts = []
    for side in sides[: 1 if matrix.zero else 2]:
        numbers = np.pad(side.astype(f"f{matrix.scale_bytes}"), ((0, padding), (0, 0)))
        by_tile = numbers.reshape(count, 16, groups).swapaxes(1, 2)
        parts.append(np.ascontiguousarray(by_tile).view(np.uint8))
    by_block = np.pad(codes, ((0, padding), (0, 0)))
    by_block = by_block.reshape(count, 16, groups, matrix.per_scale, 8, 4)
    words = by_block
    if matrix.bits < 8:
        words = by_block[..., ::2, :] & 15 | by_block[..., 1::2, :] << 4
    if matrix.bits in (5, 6):
        more = matrix.bits - 4
        high = by_block.reshape(*by_block.shape[:4], more, 8 // more, 4) >> 4
        shifted = high << np.arange(0, 8, more, dtype=np.uint8)[:, None]
        words = np.concatenate([words, np.bitwise_or.reduce(shifted, axis=-2)], axis=-2)
    stored = words.transpose(0, 2, 3, 4, 1, 5).reshape(count, groups, -1)
    return np.concatenate([*parts, stored], axis=-1)


def coded_layers(bits: int, group: int) -> list[nn.Module]:
    """Return modules of the same codes: scales in float32 and float16, and offsets that follow."""
    layers = [linear(768, 55, bits, min(group, 128)) for _ in range(3)]
    for number, layer in enumerate(layers):
        if group == 256:  # none of MLX's own forms is as wide
            layer.scales, layer.biases, layer.group_size = (
                layer.scales[:, ::2],
                layer.biases[:, ::2],
                256,
            )
        layer.biases[0, 0] += 1  # else all may have one zero
        if number:
            layer.scales, layer.biases = (
                layer[name].astype(mx.float16) for name in ("scales", "biases")
            )
    layers[2].biases = -(2 ** (bits - 1)) * layers[2].scales
    return layers


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8, "mxfp4"])
def test_tiles_are_bit_identical_to_numpy_packing(
    bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one thread and two, of groups of all sizes, with a tile that is not filled."""
    if bits == "mxfp4":
        layers = [float4_linear(768, 55), float4_linear(768, 1)]
    else:
        layers = [layer for group in GROUPS for layer in coded_layers(bits, group)]
    kinds = []
    for layer in layers:
        matrix = matrix_of(layer)
        kinds.append((matrix.scale_bytes, matrix.zero > 0))
        assert np.array_equal(matrix.tiles, tiles_by_numpy(matrix, layer))
        with monkeypatch.context() as patch:
            patch.setattr(team(), "threads", 1)
            assert np.array_equal(matrix_of(layer).tiles, matrix.tiles)
    if bits != "mxfp4":
        assert kinds == [(4, False), (2, False), (2, True)] * len(GROUPS)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("exact", [False, True])
def test_products_match_mlx(bits: int, group: int, exact: bool) -> None:
    layer = linear(256, 96, bits, group, bias=True)
    x = mx.random.normal((5, 7, 256))
    off = error(packed(layer, exact=exact)(x), layer(x))
    assert off < (1e-5 if exact else ROUNDED_ERROR)
    if not exact:
        assert off > 3e-6, "rows were not rounded"


def test_products_of_float16_scales_are_float32() -> None:
    layer = linear(128, 64, 4, 64)
    layer.scales, layer.biases = (layer[x].astype(mx.float16) for x in ("scales", "biases"))
    x = mx.random.normal((3, 128)).astype(mx.float16)
    products = packed(layer, exact=True)(x)
    assert products.dtype == mx.float32
    layer.scales, layer.biases = (layer[x].astype(mx.float32) for x in ("scales", "biases"))
    assert error(products, layer(x.astype(mx.float32))) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("exact", [False, True])
def test_rows_are_bit_identical_in_any_batch(bits: int, group: int, exact: bool) -> None:
    product = packed(linear(1536, 160, bits, group), exact=exact).product
    x = np.random.default_rng(0).standard_normal((200, 1536), np.float32)
    together = product(x)
    for first in (0, 3, 160):
        for rows in ROWS:
            alone = product(x[first : first + rows])
            assert np.array_equal(alone, together[first : first + rows]), (first, rows)
    other = x[:4] + np.float32(1e-3)
    assert not np.array_equal(product(other), together[:4])


@pytest.mark.parametrize("bits", [4, 5, 6, 8, "mxfp4"])
@pytest.mark.parametrize("scales", ["float16", "float32"])
@pytest.mark.parametrize("exact", [False, True])
def test_products_are_bit_identical_on_any_instruction_set(
    bits: Any, scales: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = float4_linear(256, 48) if bits == "mxfp4" else linear(256, 48, bits, 64)
    if bits == "mxfp4":
        if scales == "float32":
            layer.scales[0, 0] = 90  # a power of two below those of float16
    elif scales == "float16":
        for name in ("scales", "biases"):
            layer[name] = layer[name].astype(mx.float16).astype(mx.float32)
    matrix = matrix_of(layer)
    assert matrix.scale_bytes == int(scales[-2:]) // 8
    x = np.random.default_rng(0).standard_normal((7, 256), np.float32)
    own = tile_products.dot_product_name()
    found = {}
    for name in {"plain", own} | ({"avx2"} if own == "vnni" else set()):
        monkeypatch.setattr(tile_products, "dot_product_name", lambda name=name: name)
        tile_products.multiply_loop.cache_clear()
        found[name] = PackedLinear(matrix, None, exact=exact).product(x)
    tile_products.multiply_loop.cache_clear()
    assert all(np.array_equal(found["plain"], products) for products in found.values())
    assert error(mx.array(found["plain"]), layer(mx.array(x))) < ROUNDED_ERROR


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("exact", [False, True])
def test_offsets_implied_by_scales_are_not_stored(bits: int, dtype: mx.Dtype, exact: bool) -> None:
    """As in Q4_0, where a code of 8 is zero: the same bits, from fewer bytes."""
    layer = linear(256, 72, bits, 32)
    layer.scales = layer.scales.astype(dtype)
    layer.biases = -(2 ** (bits - 1)) * layer.scales
    matrix = matrix_of(layer)
    codes = CodeRows(layer.weight, bits, 32)
    sides = (np.asarray(layer[name]) for name in ("scales", "biases"))
    stored = PackedMatrix(codes, *sides, matrix.bits)
    assert (matrix.zero, stored.zero) == (2 ** (bits - 1), 0)
    assert stored.tiles.nbytes - matrix.tiles.nbytes == 80 * 8 * dtype.size
    x = np.random.default_rng(0).standard_normal((7, 256), np.float32)
    products = [PackedLinear(each, None, exact=exact).product(x) for each in (matrix, stored)]
    assert np.array_equal(*products)
    tokens = np.arange(72)
    assert np.array_equal(matrix.rows_of(tokens), stored.rows_of(tokens))
    layer.biases[71, 7] += 1
    assert matrix_of(layer).zero == 0, "one offset does not follow"


def test_arm_products_compile_to_sdot_and_tbl() -> None:
    """Arm's `sdot` and `tbl` cannot run here: their machine code is looked at."""
    llvm = pytest.importorskip("llvmlite.binding")
    from llvmlite import ir

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError as error:
        pytest.skip(str(error))
    machine = target.create_target_machine(features="+neon,+dotprod", opt=3)

    def assembly(write: Callable[..., Any], arguments: int) -> str:
        module = ir.Module(name="dot")
        module.triple = "aarch64-unknown-linux-gnu"
        kind = ir.VectorType(ir.IntType(32), 16)
        function = ir.Function(module, ir.FunctionType(kind, [kind] * arguments), "dot")
        builder = ir.IRBuilder(function.append_basic_block())
        builder.ret(write(builder, *function.args))
        return str(machine.emit_assembly(llvm.parse_assembly(str(module))))

    assert assembly(tile_products._dot_neon, 3).count("sdot\t") == 4
    assert assembly(tile_products._LOOKUPS["neon"], 1).count("tbl\t") == 4


def test_products_of_zero_and_extreme_rows_match_mlx() -> None:
    layer = linear(64, 32, 4, 32)
    x = mx.zeros((3, 64))
    x[1, :32] = 1e30
    x[2] = 1e-30
    products = packed(layer, exact=True)(x)
    assert not products[0].any()
    for row in (1, 2):
        assert error(products[row] / x[row, 0], (layer(x[row] / x[row, 0]))) < 1e-5


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [False, True])
def test_non_finite_row_gives_nan_only_in_its_products(number: float, exact: bool) -> None:
    product = Product(matrix_of(linear(128, 48, 4, 32)), None, exact=exact)
    x = np.random.default_rng(0).standard_normal((5, 128), np.float32)
    expected = product(x)
    for place in (0, 77, 127):
        broken = x.copy()
        broken[2, place] = number
        products = product(broken)
        assert np.isnan(products[2]).all()
        others = [0, 1, 3, 4]
        assert np.array_equal(products[others], expected[others])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [3e36, 1e-30, 2e-32, 1e-34, 1e-38, 1e-44])
def test_products_of_huge_and_tiny_rows_are_finite(size: float, exact: bool) -> None:
    """Numbers below 1e-31 may count as zeros."""
    layer = linear(128, 48, 8, 32)
    x = (np.random.default_rng(0).uniform(-1, 1, (2, 128)) * size).astype(np.float32)
    products = Product(matrix_of(layer), None, exact=exact)(x).astype(np.float64)
    weights = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=8)
    off = np.abs(products - x.astype(np.float64) @ np.asarray(weights).T.astype(np.float64))
    assert off.max() < max(1e-29, 1e-3 * size)


@pytest.mark.parametrize("digits", [2, 3])
def test_rounding_matches_reference_to_the_bit(digits: int) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((60, 32)).astype(np.float32)
    x *= np.float32(10.0) ** generator.integers(-25, 25, (60, 1)).astype(np.float32)
    x[::3] = np.round(x[::3] * 4)  # ties of the most to a power of two
    x[::7, 1:] = 0
    most = np.float32(127 * 256 ** (digits - 1))
    top = np.abs(x).max(axis=1, keepdims=True)
    factor = np.divide(most, top, out=np.zeros_like(top), where=top > 0)
    values = np.rint(x * factor).astype(np.int32)
    rounded = np.empty((digits, x.size), np.int8)
    scales = np.empty((60, 2), np.float32)
    round_loop()(x.ravel(), rounded, scales, 0, 60)
    powers = 256 ** np.arange(digits)[::-1, None]
    assert np.array_equal((rounded * powers).sum(axis=0), values.ravel())
    assert np.array_equal(scales[:, :1], top / most)
    sums = values.sum(axis=1, keepdims=True).astype(np.float32)
    assert np.array_equal(scales[:, 1:], top / most * sums)


@pytest.mark.parametrize("bits", [4, 5, 6, 8, "mxfp4"])
@pytest.mark.parametrize(("columns", "rows"), [(32, 1), (96, 37), (288, 16)])
def test_products_are_bit_identical_for_any_number_of_threads(
    bits: Any, columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 to 40 rows; tiles and the columns of a group are not filled, or fewer than threads."""
    layer = (
        float4_linear(columns, rows)
        if bits == "mxfp4"
        else linear(columns, rows, bits, 32, bias=True)
    )
    product = packed(layer, exact=False).product
    x = np.random.default_rng(0).standard_normal((40, columns), np.float32)
    counts = range(1, 41)
    by_two = [product(x[:count]) for count in counts]
    monkeypatch.setattr(team(), "threads", 1)
    by_one = [product(x[:count]) for count in counts]
    assert all(np.array_equal(one, two) for one, two in zip(by_one, by_two, strict=True))
    assert all(np.array_equal(part, by_one[-1][: len(part)]) for part in by_one)
    expected = layer(mx.array(x))
    assert error(mx.array(by_one[-1]), expected) < 2 * ROUNDED_ERROR


def test_rows_are_bit_identical_at_any_alignment() -> None:
    product = packed(linear(576, 96, 4, 32), exact=False).product
    x = np.random.default_rng(0).standard_normal(5 * 576, np.float32)
    expected = product(x.reshape(5, 576))
    raw = np.empty(x.nbytes + 64, np.uint8)
    for shift in range(0, 64, 4):
        moved = raw[shift : shift + x.nbytes].view(np.float32)
        moved[:] = x
        assert np.array_equal(product(moved.reshape(5, 576)), expected), shift


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_packed_embedding_matches_mlx(bits: int, group: int) -> None:
    mx.random.seed(0)
    embedding = nn.QuantizedEmbedding(300, 64, group_size=group, bits=bits)
    both = PackedEmbedding(matrix_of(embedding), exact=True)
    tokens = mx.array([[1, 299], [7, 7]])
    assert both(tokens).shape == (2, 2, 64)
    assert error(both(tokens), embedding(tokens)) < 1e-7
    x = mx.random.normal((2, 64))
    assert error(both.as_linear(x), embedding.as_linear(x)) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_products_accept_zero_rows(bits: int) -> None:
    assert packed(linear(64, 48, bits, 32), exact=False)(mx.zeros((2, 0, 64))).shape == (2, 0, 48)
    embedding = nn.QuantizedEmbedding(48, 64, group_size=32, bits=bits)
    both = PackedEmbedding(matrix_of(embedding), exact=False)
    assert both(mx.zeros((0,), mx.int32)).shape == (0, 64)
    assert both.as_linear(mx.zeros((0, 64))).shape == (0, 48)


def test_product_of_zero_rows_writes_nothing() -> None:
    matrix = matrix_of(linear(64, 48, 4, 32))
    space = np.full(1000, 7.0, np.float32)
    entries = {PartTable.DIGITS: 2, PartTable.WIDTH: 64, PartTable.STRIDE: 48}
    for entry in (PartTable.X, PartTable.ROUNDED, PartTable.SCALES, PartTable.RESULT):
        entries[entry] = space.ctypes.data
    table = np.zeros(PART_WORDS + LINEAR_WORDS, np.int64)
    table[list(entries)] = list(entries.values())
    table[PART_WORDS:] = matrix.linear(2)
    team().run(part_loops()[0], table)
    assert (space == 7).all()


def test_product_refuses_wrong_shape_dtype_or_strides() -> None:
    matrix = matrix_of(linear(64, 48, 4, 32))
    product = Product(matrix, None, exact=False)
    x = np.zeros((3, 64), np.float32)
    for other in (x[:, :32], x.T, x[0], x.astype(np.float64), np.zeros((64, 3), np.float32).T):
        with pytest.raises(ValueError, match=r"need \(n, 64\) float32"):
            product(other)
    for bias in (np.zeros(47, np.float32), np.zeros(48), np.zeros(96, np.float32)[::2]):
        with pytest.raises(ValueError, match=r"need \(n, 48\) float32"):
            Product(matrix, bias, exact=False)
    assert not product(x).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_dequantizes_only_rows_of_tokens(bits: int) -> None:
    """All rows of a tile would take 16 times the codes."""
    embedding = nn.QuantizedEmbedding(1600, 256, group_size=32, bits=bits)
    both = PackedEmbedding(matrix_of(embedding), exact=False)
    tokens = np.arange(400) * 4
    peak = peak_bytes(lambda: both.product.matrix.rows_of(tokens))
    floats = 400 * 256 * 4
    assert floats < peak < 1.5 * floats
    assert max(peak, 2 * floats) <= 400 * both.packed_row_bytes, "a copy becomes an MLX array"


def test_packed_row_bytes_match_peak_memory() -> None:
    layer = packed(linear(2048, 64, 4, 32), exact=True)
    x = np.ones((100, 2048), np.float32)
    layer.product(x[:1])  # compiles
    peak = peak_bytes(lambda: layer.product(x))
    assert 0.9 < (peak + x.nbytes + 100 * 64 * 4) / (100 * layer.packed_row_bytes) < 1.1


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of bytes that a function allocates with NumPy."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_packed_weights_have_fingerprint_and_nbytes() -> None:
    one = packed(linear(128, 64, 4, 32), exact=False)
    assert repr(packed(linear(128, 64, 4, 32), exact=False)) == repr(one)
    biased = linear(128, 64, 4, 32, bias=True)
    other_bias = linear(128, 64, 4, 32, bias=True)
    other_bias.bias = other_bias.bias + mx.arange(64) * 1e-3
    others = [
        packed(biased, exact=False),
        packed(other_bias, exact=False),
        packed(linear(128, 96, 4, 32), exact=False),
        packed(linear(128, 64, 4, 32), exact=True),
    ]
    assert len({repr(one), *map(repr, others)}) == 5
    assert one.packed_bytes == 128 * 64 // 2 + 2 * 4 * 128 * 64 // 32
    assert others[0].packed_bytes == one.packed_bytes + 4 * 64


def zero_matrix(rows: int, bits: int, group: int) -> PackedMatrix:
    layer = linear(128, rows, bits, group)
    for name in ("weight", "scales", "biases"):
        layer[name] = mx.zeros_like(layer[name])
    return matrix_of(layer)


@pytest.mark.parametrize(("rows", "bits", "group"), [(63, 4, 32), (64, 8, 32), (64, 4, 64)])
def test_matrices_of_different_shape_have_different_digest(
    rows: int, bits: int, group: int
) -> None:
    """A row of zeros more fills the same tile."""
    assert zero_matrix(rows, bits, group).digest != zero_matrix(64, 4, 32).digest


def test_unsupported_layers_are_unchanged() -> None:
    assert not can_multiply(nn.Linear(64, 64))
    for mode, bits, group in (("mxfp8", 8, 32), ("nvfp4", 4, 16)):
        layer = nn.Linear(64, 64, bias=False).to_quantized(group_size=group, bits=bits, mode=mode)
        assert not can_multiply(layer)
