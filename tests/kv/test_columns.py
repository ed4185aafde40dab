"""Column writes: what changes, and what does not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from penstock.kv import columns as col

ROWS, HEADS, COLUMNS, WIDTH = 5, 4, 6, 2


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 2, HEADS])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("head", [0, 2])
def test_write_changes_only_selected_rows_heads_and_columns(
    rows: int, heads: int, tokens: int, row: int, head: int
) -> None:
    heads = min(heads, HEADS - head)
    new = mx.random.normal((rows, heads, tokens, WIDTH), key=mx.random.key(0))
    wanted = np.zeros((ROWS, HEADS, COLUMNS, WIDTH), np.float32)
    wanted[row : row + rows, head : head + heads, 2 : 2 + tokens] = np.array(new)
    side = mx.zeros((ROWS, HEADS, COLUMNS, WIDTH))
    assert np.array_equal(np.array(col.write(side, 2, new, row, head)), wanted)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_write_without_row_covers_all_rows(heads: int) -> None:
    new = mx.random.normal((ROWS, heads, 2, WIDTH), key=mx.random.key(0))
    wanted = np.zeros((ROWS, HEADS, COLUMNS, WIDTH), np.float32)
    wanted[:, :heads, 3:5] = np.array(new)
    side = mx.zeros((ROWS, HEADS, COLUMNS, WIDTH))
    assert np.array_equal(np.array(col.write(side, 3, new)), wanted)


def test_full_write_does_not_retain_source() -> None:
    """MLX would replace the buffer with the new array and what it is a view of."""
    before = mx.set_cache_limit(0)
    try:
        start = mx.get_active_memory()
        side = mx.zeros((1, HEADS, COLUMNS, WIDTH))
        whole = mx.ones((1, HEADS, 100 * COLUMNS, WIDTH))
        mx.eval(side, whole)
        side = col.write(side, 0, whole[:, :, :COLUMNS])
        mx.eval(side)
        del whole
        assert mx.get_active_memory() - start == side.nbytes
        assert float(side.min()) == 1
    finally:
        mx.set_cache_limit(before)


def test_scatter_writes_each_row_at_its_column() -> None:
    side, new = mx.zeros((3, HEADS, COLUMNS, WIDTH)), mx.arange(3.0).reshape(3, 1, 1, 1) + 1
    new = mx.broadcast_to(new, (3, HEADS, 1, WIDTH))
    written = np.array(col.scatter(side, [4, 0, 2], new))
    assert [[int(n) for n in row] for row in written[:, 0, :, 0]] == [
        [0, 0, 0, 0, 1, 0],
        [2, 0, 0, 0, 0, 0],
        [0, 0, 3, 0, 0, 0],
    ]
    assert np.array_equal(written, np.broadcast_to(written[:, :1, :, :1], written.shape))
