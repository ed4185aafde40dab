"""Products with packed weights: near MLX's, and batch-invariant."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from penstock.plugins.cpu.packed_products import (
    PackedEmbedding,
    PackedLinear,
    packed_codes,
    row_multiple,
    run_rows,
)

pytest.importorskip("onnxruntime", reason="weights are packed by ONNX Runtime")
ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 33)
ROUNDED_ERROR = 2.0**-6
"""Error of products as a share of their size, where a row's blocks of numbers have 8 bits."""


def linear(columns: int, rows: int, bits: int, group: int, *, bias: bool = False) -> nn.Module:
    mx.random.seed(0)
    numbers = mx.random.normal((rows + 1, columns)) + 0.3  # offsets matter
    layer = nn.Linear(columns, rows, bias=bias)
    layer.weight = numbers[:rows]
    if bias:
        layer.bias = numbers[rows, :1] * mx.arange(rows)
    return layer.to_quantized(group_size=group, bits=bits)


def packed(layer: nn.Module, *, exact: bool) -> PackedLinear:
    matrix = packed_codes(layer)
    assert matrix is not None
    return PackedLinear(matrix, layer.get("bias"), exact=exact)


def error(products: mx.array, expected: mx.array) -> float:
    """Return the root mean square of the difference, as a share of that of what is expected."""
    difference = products - expected
    return float(mx.sqrt((difference * difference).mean() / (expected * expected).mean()))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("exact", [False, True])
def test_products_match_mlx(bits: int, group: int, exact: bool) -> None:
    layer = linear(256, 96, bits, group, bias=True)
    x = mx.random.normal((5, 7, 256))
    off = error(packed(layer, exact=exact)(x), layer(x))
    assert off < (1e-5 if exact else ROUNDED_ERROR)
    if not exact:
        assert off > 1e-4, "rows were not rounded"


def test_half_precision_codes_become_float32() -> None:
    layer = linear(128, 64, 4, 64)
    layer.scales, layer.biases = (layer[x].astype(mx.float16) for x in ("scales", "biases"))
    x = mx.random.normal((3, 128)).astype(mx.float16)
    products = packed(layer, exact=True)(x)
    assert products.dtype == mx.float32
    layer.scales, layer.biases = (layer[x].astype(mx.float32) for x in ("scales", "biases"))
    assert error(products, layer(x.astype(mx.float32))) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_are_bit_identical_in_any_batch(
    bits: int, block: int, exact: bool, symmetric: bool
) -> None:
    layer = linear(1536, 160, bits, block)
    if symmetric:
        layer.biases = -(2.0 ** (bits - 1)) * layer.scales
    matrix = packed_codes(layer)
    assert matrix is not None
    assert (matrix.offsets is None) is symmetric
    session = packed(layer, exact=exact)._product
    x = np.random.default_rng(0).standard_normal((40, 1536), np.float32)
    (together,) = run_rows(session, x)
    for first in (0, 3):
        for rows in ROWS:
            (alone,) = run_rows(session, x[first : first + rows])
            assert np.array_equal(alone, together[first : first + rows]), (first, rows)
    assert session.row_multiple == row_multiple(bits, block, exact)
    if session.row_multiple == 2:  # and the check sees it
        assert not np.array_equal(session.run(x[:1])[0], together[:1])


def test_rows_are_bit_identical_at_any_alignment() -> None:
    session = packed(linear(576, 96, 4, 32), exact=False)._product
    x = np.random.default_rng(0).standard_normal(5 * 576, np.float32)
    (expected,) = run_rows(session, x.reshape(5, 576))
    raw = np.empty(x.nbytes + 64, np.uint8)
    for shift in range(0, 64, 4):
        moved = raw[shift : shift + x.nbytes].view(np.float32)
        moved[:] = x
        assert np.array_equal(run_rows(session, moved.reshape(5, 576))[0], expected), shift


def test_packed_embedding_matches_mlx() -> None:
    mx.random.seed(0)
    embedding = nn.QuantizedEmbedding(300, 64, group_size=32, bits=8)
    matrix = packed_codes(embedding)
    assert matrix is not None
    both = PackedEmbedding(embedding, matrix, exact=True)
    tokens = mx.array([[1, 299], [7, 7]])
    assert mx.array_equal(both(tokens), embedding(tokens))
    x = mx.random.normal((2, 64))
    assert error(both.as_linear(x), embedding.as_linear(x)) < 1e-5


def test_weights_have_identity_and_size() -> None:
    one = packed(linear(128, 64, 4, 32), exact=False)
    assert repr(packed(linear(128, 64, 4, 32, bias=True), exact=False)) == repr(one)
    assert repr(packed(linear(128, 96, 4, 32), exact=False)) != repr(one)
    assert repr(packed(linear(128, 64, 4, 32), exact=True)) != repr(one)
    assert 0 <= one.packed_bytes - (128 * 64 // 2 + 2 * 4 * 128 * 64 // 32) < 64


def test_unsupported_layers_are_unchanged() -> None:
    assert packed_codes(nn.Linear(64, 64)) is None
    mxfp4 = nn.Linear(64, 64, bias=False).to_quantized(group_size=32, bits=4, mode="mxfp4")
    assert packed_codes(mxfp4) is None
