"""Experts with packed weights: near MLX's, and batch-invariant."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

pytest.importorskip("numba", reason="products with packed weights are compiled by Numba")

from penstock.plugins.cpu.packed_products import PackedExperts, are_experts, packed_experts

EXPERTS, WIDTH, HIDDEN = 6, 64, 96
FORMS = [(4, "affine"), (5, "affine"), (8, "affine"), (4, "mxfp4")]


def experts(bits: int, mode: str, *, bias: bool) -> Any:
    mx.random.seed(0)
    layer = QuantizedSwitchLinear(WIDTH, HIDDEN, EXPERTS, bias, 32, bits, mode)
    if bias:
        layer.bias = mx.random.normal((EXPERTS, HIDDEN))
    return layer


def off(result: mx.array, expected: mx.array) -> float:
    assert result.shape == expected.shape
    return float(mx.abs(result - expected).max() / mx.abs(expected).max())


@pytest.mark.parametrize(("bits", "mode"), FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_match_mlx(bits: int, mode: str, bias: bool) -> None:
    layer = experts(bits, mode, bias=bias)
    assert are_experts(layer)
    packed = packed_experts(layer, exact=True)
    indices = mx.random.randint(0, EXPERTS - 1, (2, 5, 3))  # the last expert gets no row
    for shape in ((2, 5, 1, 1, WIDTH), (2, 5, 3, 1, WIDTH)):
        x = mx.random.normal(shape)
        assert off(packed(x, indices), layer(x, indices)) < 1e-5
    assert packed.packed_bytes >= EXPERTS * HIDDEN * WIDTH * bits // 8


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_mixture_of_experts_layer_matches_mlx(tokens: int) -> None:
    """From 64 choices on, MLX sorts the rows by their experts."""
    mx.random.seed(1)
    layer = SwitchGLU(WIDTH, HIDDEN, EXPERTS)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer[name] = layer[name].to_quantized(32, 4)
    x, indices = mx.random.normal((1, tokens, WIDTH)), mx.random.randint(0, EXPERTS, (1, tokens, 2))
    expected = layer(x, indices)
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer[name] = packed_experts(layer[name], exact=True)
    assert off(layer(x, indices), expected) < 1e-5


def test_rows_of_experts_are_bit_identical_in_any_batch() -> None:
    packed = packed_experts(experts(4, "affine", bias=True), exact=False)
    x = mx.random.normal((1, 40, 1, 1, WIDTH))
    indices = mx.random.randint(0, EXPERTS, (1, 40, 2))
    together = np.asarray(packed(x, indices))
    for token in range(0, 40, 7):
        part = slice(token, token + 3)
        assert np.array_equal(packed(x[:, part], indices[:, part]), together[:, part])


def test_experts_have_fingerprint_and_row_bytes() -> None:
    layer = experts(4, "affine", bias=True)
    packed = packed_experts(layer, exact=False)
    assert repr(packed_experts(layer, exact=False)) == repr(packed)
    layer.bias = layer.bias + mx.zeros((EXPERTS, HIDDEN)).at[3, 5].add(1e-3)
    assert repr(packed_experts(layer, exact=False)) != repr(packed)
    of_product = PackedExperts([packed._products[0].matrix], [None], exact=False).packed_row_bytes
    assert packed.packed_row_bytes == EXPERTS * of_product


def test_experts_accept_zero_rows() -> None:
    packed = packed_experts(experts(4, "affine", bias=False), exact=False)
    none = packed(mx.zeros((1, 0, 1, 1, WIDTH)), mx.zeros((1, 0, 2), mx.uint32))
    assert none.shape == (1, 0, 2, 1, HIDDEN)
