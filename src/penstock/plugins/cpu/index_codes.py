"""Encoding of the key index with NumPy, three times as fast as with MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.rotation import rotate
from penstock.kv.codecs.turbo import STEPS, Turbo, padded


def index_codes(codec: Turbo, side: mx.array) -> Coded:
    """Encode (batch, heads, tokens, dim) like `codec.encode`, up to rounding."""
    step_size = np.float32(STEPS[codec.bits])
    rotated = rotate(side, padded(side.shape[-1]))
    mx.eval(rotated)
    z = np.asarray(rotated)
    with np.errstate(over="ignore", invalid="ignore"):
        # Summed row by row, so that results do not depend on the other rows.
        over = (z * z).sum(axis=-1)
        step = step_size * np.sqrt(over / z.shape[-1])[..., None]
        plus, outer = z >= 0, np.abs(z) > step
        signs = np.stack([plus == outer, plus], axis=-1)
        levels, one = outer + np.float32(0.5), step_size
        along = (np.abs(z) * levels).sum(axis=-1) * one
        under = along
        if not codec.unbiased:
            over, under = along, (levels * levels).sum(axis=-1) * one**2
        sizes = np.where(over > 0, over / np.maximum(under, 1e-30), 0.0).astype(np.float16)
    codes = np.packbits(signs.reshape(*z.shape[:-1], -1), axis=-1, bitorder="little")
    return Coded(codec, (mx.array(codes.view("<u4")), mx.array(sizes)), side.shape[-1])
