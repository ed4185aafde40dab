"""Groups of queries that read pieces of keys and values, one piece after the other.

Results over the pieces are merged by the maximum and the sum of the softmax, so that only one
piece need be in memory.
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
    """Reads pieces with MLX's operations.

    Args:
        ops: compute.
        stacked: groups of queries in base 2, (kv_heads, rows, d) each, see `grouped`.
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
        """Let groups read a piece; computed at once.

        Args:
            keys: consecutive parts of it, (kv_heads, columns, d) each.
            values: (kv_heads, columns, value_dim) each.
            seen: which columns each group sees that reads the piece, (rows, columns); None is all.
            meanwhile: called once, while a lane begins.
        """
        if meanwhile is not None:
            meanwhile()
        for number, columns in seen.items():
            mask = None if columns is None else mx.array(columns)
            asked = self._stacked[number]
            wide = [[mx.array(side) for side in own] for own in (keys, values)]
            part = span_attention.attend(asked, wide[0], wide[1], mask, None, self._ops)
            held = self._read.get(number)
            both = part if held is None else span_attention.together(held, part)
            mx.eval(both.top, both.total, both.mixed)
            self._read[number] = both

    def result(self, number: int) -> Partial:
        """Return what a group has read."""
        return self._read[number]
