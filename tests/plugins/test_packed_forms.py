"""Quantizations of GGUF and MLX as packed matrices, compared with the values they encode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf.quants import dequantize

pytest.importorskip("numba", reason="products with packed weights are compiled by Numba")

from penstock.plugins.cpu import packing
from penstock.plugins.cpu.packed_products import PackedMatrix, Product, packed_matrix
from penstock.plugins.gguf import blocks
from penstock.plugins.gguf.header import FORMS, TensorInfo
from support.gguf_files import random_blocks

ROWS, COLUMNS = 37, 512
"""Rows that do not fill their last tile."""
FORM = {form.name: form for form in FORMS.values()}


def relative(off: Any, expected: Any) -> float:
    """Return the root mean square of an error relative to the expected values."""
    return float(np.sqrt((off**2).mean() / (expected**2).mean()))


def errors(matrix: PackedMatrix, weights: Any) -> tuple[float, float]:
    """Return the errors of a matrix's rows, and of its products with 24 bits, for 1 to 40 rows."""
    expected = weights.astype(np.float64)
    read = matrix.rows_of(np.arange(matrix.rows))
    product = Product(matrix, None, exact=True)
    x = np.random.default_rng(0).standard_normal((40, matrix.columns)).astype(np.float32)
    together = product(x)
    for rows in (1, 3, 17):
        assert np.array_equal(product(x[:rows]), together[:rows])
    products = x.astype(np.float64) @ expected.T
    return relative(read - expected, expected), relative(together - products, products)


@pytest.mark.parametrize(
    ("form", "bits", "scale_bytes", "most"),
    [
        ("Q4_0", 4, 2, 1e-6),
        ("Q4_1", 4, 2, 1e-6),
        ("Q5_0", 5, 2, 1e-6),
        ("Q5_1", 5, 2, 1e-6),
        ("Q8_0", 8, 2, 1e-6),
        ("Q4_K", 4, 4, 1e-6),
        ("Q5_K", 5, 4, 1e-6),
        ("Q6_K", 8, 2, 8e-3),
        ("Q3_K", 4, 2, 8e-2),
        ("Q2_K", 4, 2, 8e-2),
    ],
)
def test_gguf_quantizations_match_gguf_package(
    form: str, bits: int, scale_bytes: int, most: float, tmp_path: Path
) -> None:
    raw = random_blocks(form, ROWS, COLUMNS)
    (tmp_path / "t").write_bytes(raw.tobytes())
    info = TensorInfo("blk.0.attn_q.weight", (ROWS, COLUMNS), FORM[form], tmp_path / "t", 0)
    codes = blocks.read(info)
    assert isinstance(codes, blocks.AffineCodes)
    layer = nn.Linear(COLUMNS, ROWS, bias=False).to_quantized(group_size=32, bits=codes.bits)
    layer.weight, layer.scales, layer.biases = codes.weight, codes.scales, codes.biases
    matrix = packed_matrix(layer)
    assert (matrix.bits, matrix.scale_bytes) == (bits, scale_bytes)
    zeros = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
    assert matrix.zero == zeros.get(form, 0)
    expected = dequantize(raw, gguf.GGMLQuantizationType[form])
    of_rows, of_products = errors(matrix, expected)
    assert of_rows < most
    assert of_products < 3 * most
    if most > 1e-3:
        assert of_rows > most / 8, "the table of forms could say less"


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("bits", "stored"), [(2, 4), (3, 4), (4, 4), (5, 5), (6, 6), (8, 8)])
def test_mlx_codes_match_mlx(bits: int, stored: int, group: int) -> None:
    mx.random.seed(0)
    layer = nn.Linear(COLUMNS, ROWS, bias=False).to_quantized(group_size=group, bits=bits)
    matrix = packed_matrix(layer)
    assert matrix.bits == stored
    sides = 1 if matrix.zero else 2  # evenly drawn numbers can have the same zero in all groups
    scale_bytes = sides * 4 * 48 * COLUMNS // group
    assert matrix.tiles.nbytes == 48 * COLUMNS * stored // 8 + scale_bytes
    weights = mx.dequantize(layer.weight, layer.scales, layer.biases, group, bits)
    of_rows, of_products = errors(matrix, np.asarray(weights))
    assert max(of_rows, of_products) < 1e-6


def test_mxfp4_products_match_mlx() -> None:
    mx.random.seed(0)
    numbers = mx.random.normal((ROWS, COLUMNS)) * 2.0 ** mx.random.randint(-9, 9, (ROWS, 1))
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight = numbers
    layer = layer.to_quantized(group_size=32, bits=4, mode="mxfp4")
    matrix = packed_matrix(layer)
    assert matrix.tiles.nbytes == 48 * COLUMNS * 9 // 16, "4 bits, and 16 for a scale of 32"
    weights = np.asarray(mx.dequantize(layer.weight, layer.scales, mode="mxfp4", dtype=mx.float32))
    assert len(np.unique(np.abs(weights[0] / np.abs(weights[0]).max()))) > 7
    of_rows, of_products = errors(matrix, weights)
    assert of_rows == 0
    assert of_products < 1e-6


def test_kv_dtype_needs_layers_that_run_in_jobs() -> None:
    """Other layers of a packed model attend in MLX's operations, which are slow in halves."""
    assert packing.kv_dtype(nn.Module()) is None
