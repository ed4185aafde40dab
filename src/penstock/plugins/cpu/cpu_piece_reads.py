"""Attention of query groups to KV in pieces on the CPU, with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from penstock.attention.ops import AttentionOps
from penstock.attention.piece_reads import Arrays, PieceReads
from penstock.attention.span_attention import Partial
from penstock.kv.numpy_arrays import Booleans, Floats
from penstock.plugins.cpu import cpu_rows
from penstock.plugins.cpu.cpu_rows import Sums


class CPUPieceReads(PieceReads):
    """Attention to pieces of KV with NumPy.

    Args:
        ops: array operations of attention.
        stacked: query groups, see `PieceReads`.
        divided: whether to divide the groups, or the KV heads of a single group, between lanes.
    """

    def __init__(self, ops: AttentionOps, stacked: Sequence[mx.array], *, divided: bool) -> None:
        super().__init__(ops, stacked)
        mx.eval(*stacked)
        self._divided = divided
        kv_heads = stacked[0].shape[0]
        cut = kv_heads // 2 if len(stacked) == 1 and divided else 0
        self._heads = [slice(0, cut), slice(cut, kv_heads)] if cut else [slice(0, kv_heads)]
        self._queries = [np.asarray(group) for group in stacked]
        self._sums: dict[tuple[int, int], Sums] = {}

    def read(
        self,
        keys: Arrays,
        values: Arrays,
        seen: Mapping[int, Booleans | None],
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        piece = _joined(self._ops, keys), _joined(self._ops, values)

        def read(task: tuple[int, int]) -> None:
            number, half = task
            heads = self._heads[half]
            of_heads = piece[0][heads], piece[1][heads]
            own = cpu_rows.sums(self._queries[number][heads], [of_heads], seen[number])
            held = self._sums.setdefault(task, own)
            if held is not own:
                held.add(slice(None), own)

        tasks = [(number, half) for number in seen for half in range(len(self._heads))]
        if self._divided:
            self._ops.divide(read, tasks, meanwhile)
            return
        if meanwhile is not None:
            meanwhile()
        for task in tasks:
            read(task)

    def result(self, number: int) -> Partial:
        parts = [self._sums[number, half] for half in range(len(self._heads))]

        def joined(name: str) -> mx.array:
            return mx.array(np.concatenate([getattr(part, name) for part in parts]))

        return Partial(joined("top"), joined("total"), joined("mixed"))


def _joined(ops: AttentionOps, sides: Arrays) -> Floats:
    """Concatenate consecutive parts as float32, because products with short parts are slow."""
    wide = [ops.as_float32(s) if isinstance(s, mx.array) else s for s in sides]
    mx.eval([side for side in wide if isinstance(side, mx.array)])
    held = [np.asarray(side) for side in wide]
    return held[0] if len(held) == 1 else np.concatenate(held, axis=1)
