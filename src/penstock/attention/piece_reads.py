"""Attention of query groups to KV in consecutive pieces.

Results over the pieces are merged by running maximum and sum of the softmax, so only one piece has
to be in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.ops import AttentionOps
from penstock.attention.span_attention import Partial
from penstock.kv.numpy_arrays import Booleans, Floats

HostSide: TypeAlias = mx.array | Floats
"""Keys or values, (kv_heads, columns, dim)."""
Arrays: TypeAlias = Sequence[HostSide]


class PieceReads:
    """Attention of query groups to one piece at a time, with MLX's operations.

    Args:
        stacked: query groups scaled for base 2, (kv_heads, rows, d) each, see `grouped`.
    """

    def __init__(self, ops: AttentionOps, stacked: Sequence[mx.array]) -> None:
        self._ops = ops
        self._stacked = stacked
        self._read: dict[int, Partial] = {}

    def read(
        self,
        keys: Arrays,
        values: Arrays,
        seen: Mapping[int, Booleans | None],
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Attend to a piece and merge the result with those before, evaluated.

        Args:
            keys: consecutive parts of the piece, (kv_heads, columns, d) each.
            values: values of the same parts, (kv_heads, columns, value_dim) each.
            seen: mask of each group that reads the piece, (rows, columns), by group index; None
                if all columns are visible.
            meanwhile: callback to run once during the computation.
        """
        if meanwhile is not None:
            meanwhile()
        for number, columns in seen.items():
            mask = None if columns is None else mx.array(columns)
            stacked, ops = self._stacked[number], self._ops
            sides = [[mx.array(part) for part in parts] for parts in (keys, values)]
            result = span_attention.attend(stacked, sides[0], sides[1], mask, None, ops)
            before = self._read.get(number)
            both = result if before is None else span_attention.together(before, result)
            mx.eval(both.top, both.total, both.mixed)
            self._read[number] = both

    def result(self, number: int) -> Partial:
        return self._read[number]
