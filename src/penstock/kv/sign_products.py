"""Products with signs, an index of keys in one bit a number, from tables on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

_SIGNS = (np.arange(256)[:, None] >> np.arange(8) & 1) * np.float32(2) - np.float32(1)
"""Signs that the bits of each byte stand for."""


def by_tables(x: mx.array, codes: mx.array, levels: mx.array) -> mx.array:
    """Multiply by signs, from tables of all 256 sums of eight numbers; computed at once.

    A row is then read as n / 8 bytes, not n floats. On a busy machine 3 to 12 times quicker than a
    product with float32 rows, where signs that become floats take twice as long.

    Args:
        x: (heads, m, n).
        codes: (heads, rows, n / 32), a bit a number; 1 is plus.
        levels: size of each row, (heads, rows), float32.

    Returns:
        (heads, m, rows), float32.
    """
    heads, m, n = x.shape
    groups = np.array(x.astype(mx.float32)).reshape(heads, m, n // 8, 8)
    sums = np.einsum("pk,hmbk->hbpm", _SIGNS, groups)
    octets = np.array(codes.view(mx.uint8))
    products = np.empty((heads, octets.shape[1], m), np.float32)
    for head in range(heads):
        products[head] = sums[head, 0].take(octets[head, :, 0], axis=0)
        for octet in range(1, n // 8):
            products[head] += sums[head, octet].take(octets[head, :, octet], axis=0)
    return mx.array(products).swapaxes(-1, -2) * mx.expand_dims(levels, 1)
