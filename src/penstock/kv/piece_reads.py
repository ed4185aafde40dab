"""Groups of queries that read pieces of keys and values, one piece after the other.

Results over the pieces are merged by the maximum and the sum of the softmax, so that only one
piece need be in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.kv import attention, cpu_rows
from penstock.kv.attention import Partial
from penstock.kv.cpu_rows import Sums
from penstock.kv.sign_products import Floats

if TYPE_CHECKING:
    from penstock.kv.backend_base import Backend

Seen: TypeAlias = npt.NDArray[np.bool_]
HostSide: TypeAlias = mx.array | Floats
"""Keys or values, (kv_heads, columns, dim)."""
Arrays: TypeAlias = Sequence[HostSide]


class PieceReads:
    """Reads pieces with MLX's operations.

    Args:
        device: computes.
        stacked: groups of queries in base 2, (kv_heads, rows, d) each, as `attention.grouped` has
            them.
    """

    def __init__(self, device: Backend, stacked: Sequence[mx.array]) -> None:
        self._device = device
        self._stacked = stacked
        self._read: dict[int, Partial] = {}

    def read(
        self,
        keys: Arrays,
        values: Arrays,
        seen: Mapping[int, Seen | None],
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
            part = attention.attend(asked, wide[0], wide[1], mask, None, self._device)
            held = self._read.get(number)
            both = part if held is None else attention.together(held, part)
            mx.eval(both.top, both.total, both.mixed)
            self._read[number] = both

    def result(self, number: int) -> Partial:
        """Return what a group has read."""
        return self._read[number]


class CPUPieceReads(PieceReads):
    """Reads pieces with NumPy.

    Args:
        device: computes.
        stacked: see `PieceReads`.
        divided: whether each lane takes half of the groups, or of the key heads of a single one.
    """

    def __init__(self, device: Backend, stacked: Sequence[mx.array], *, divided: bool) -> None:
        super().__init__(device, stacked)
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
        seen: Mapping[int, Seen | None],
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """See `PieceReads`."""
        piece = _joined(self._device, keys), _joined(self._device, values)

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
            self._device.divide(read, tasks, meanwhile)
            return
        if meanwhile is not None:
            meanwhile()
        for task in tasks:
            read(task)

    def result(self, number: int) -> Partial:
        """See `PieceReads`."""
        parts = [self._sums[number, half] for half in range(len(self._heads))]

        def joined(name: str) -> mx.array:
            return mx.array(np.concatenate([getattr(part, name) for part in parts]))

        return Partial(joined("top"), joined("total"), joined("mixed"))


def _joined(device: Backend, sides: Arrays) -> Floats:
    """Copy consecutive parts together as float32: short products are slow ones."""
    wide = [device.as_float32(s) if isinstance(s, mx.array) else s for s in sides]
    mx.eval([side for side in wide if isinstance(side, mx.array)])
    held = [np.asarray(side) for side in wide]
    return held[0] if len(held) == 1 else np.concatenate(held, axis=1)
