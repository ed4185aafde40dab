"""The rows of a batch of sequences in a codec, each in a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from penstock.caches import masks
from penstock.caches.base import agree, check_floating
from penstock.caches.codec_reading import TurboQuant
from penstock.caches.masks import Mask
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints
from penstock.kv.code_pieces import dequantized

if TYPE_CHECKING:
    from penstock.caches.codec import TurboQuantKVCache

_ALL = 2**30
"""More tokens than any cache holds."""


class TurboQuantBatch(TurboQuant):
    """Base of `BatchTurboQuantKVCache`, which adds the making of its rows from a state.

    A row is a `TurboQuantKVCache`, which makes batches: its module imports this one.
    """

    def __init__(self, rows: Sequence[TurboQuantKVCache]) -> None:
        self.rows = list(rows)
        self._ends: list[int] | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token; (batch,) int32."""
        return mx.array([row.offset for row in self.rows], mx.int32)

    @property
    def left_padding(self) -> mx.array:
        """Columns before each row's first one, as models see them; (batch,) int32."""
        return mx.array([self.size() - row.size() for row in self.rows], mx.int32)

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(row.nbytes for row in self.rows)

    @property
    def capacity(self) -> int:
        """Columns allocated for the longest row, or before that those asked for."""
        return max(row.capacity for row in self.rows)

    def empty(self) -> bool:
        """Tell whether nothing was ever written."""
        return all(row.empty() for row in self.rows)

    def size(self) -> int:
        """Count the tokens of the longest row."""
        return max(row.size() for row in self.rows)

    def is_trimmable(self) -> bool:
        """Tell whether `trim` works: as long as nothing was dropped."""
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row, or as many as there are; return how many."""
        if not self.is_trimmable():
            return 0
        self._check_read()
        return max(row.trim(n) for row in self.rows)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return (batch, 1, N, columns + N) for the next N tokens."""
        alone = self._alone(N)
        pasts = [row.past(alone=alone) for row in self.rows]
        pads = [max(pasts) - past for past in pasts]
        if window_size is None:
            return masks.causal(N, max(pasts), None, mx.array(pads))
        at = [
            mx.concatenate([mx.full((pad,), -1, mx.int32), row.positions(N, alone=alone)])
            for pad, row in zip(pads, self.rows, strict=True)
        ]
        own = self.offset[:, None, None] + mx.arange(N)
        return masks.by_position(mx.stack(at)[:, None], own, 0, _ALL, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take one chunk in for every row and return all there is, padded on the left.

        keys, values: (batch, kv_heads, tokens, dim). As with one sequence, each row's chunk comes
        as it is, and the tokens before it dequantized. Single tokens that are read in place get
        themselves alone.

        Raises:
            TypeError, ValueError: wrong rank, dtype, batch, heads or widths.
            SettingError, ModelError: as with one sequence.
        """
        self._check_read()
        tokens = self._accept(keys, values)
        if self._alone(tokens):
            for i, row in enumerate(self.rows):
                row.write(keys[i : i + 1], values[i : i + 1])
            return self._give(keys, values)
        past, parts = self.size(), [row.sides() for row in self.rows]
        fetched = []
        for number, new in enumerate((keys, values)):
            placed = [
                (i, at, side)
                for i, row in enumerate(self.rows)
                for at, side in col.spread(past - row.size(), [*parts[i][number], new[i : i + 1]])
            ]
            fetched.append(dequantized(placed, len(self.rows), past + tokens, new.dtype))
        for i, row in enumerate(self.rows):
            count = tokens if self._ends is None else min(tokens, self._ends[i] - row.offset)
            if count > 0:
                row.take_in(keys[i : i + 1, :, :count], values[i : i + 1, :, :count])
        return fetched[0], fetched[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all that is held, dequantized, zeros in front of shorter rows; not evaluated."""
        count = self.size()
        wide = [row.keys_and_values() for row in self.rows]

        def padded(side: mx.array) -> mx.array:
            return mx.pad(side, [(0, 0), (0, 0), (count - side.shape[2], 0), (0, 0)])

        keys, values = (mx.concatenate([padded(row[i]) for row in wide]) for i in (0, 1))
        return keys, values

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce how the next prompts are padded; on right padding `finalize` must follow.

        Raises:
            ValueError: left padding, or right padding without lengths.
        """
        if left_padding is not None and max(ints(left_padding)) > 0:
            raise ValueError("pad on the right: the rows of this batch have no room for padding")
        if right_padding is not None and max(ints(right_padding)) > 0:
            if lengths is None:
                raise ValueError("right_padding needs the lengths of the prompts")
            pairs = zip(self.rows, ints(lengths), strict=True)
            self._ends = [row.offset + length for row, length in pairs]

    def finalize(self) -> None:
        """End the padding that was announced; none of it was kept."""
        self._ends = None

    def filter(self, batch_indices: Any) -> None:
        """Keep the given rows, in the given order."""
        self.rows = [self.rows[row] for row in chosen_rows(batch_indices, len(self.rows))]
        self._shape = None

    def extend(self, other: TurboQuantBatch) -> None:
        """Append the rows of `other`.

        Raises:
            ValueError: the two differ in codec, settings or shapes.
        """
        agree("extend", [*self.rows, *other.rows])
        self.rows = self.rows + [deepcopy(row) for row in other.rows]
        self._shape = None

    def extract(self, idx: int) -> TurboQuantKVCache:
        """Return one row, copied when it is written to first."""
        return deepcopy(self.rows[idx])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return a batch of the sequences, in order; each is copied when it is written to first.

        Raises:
            ValueError: no caches, or they differ in codec, settings or shapes.
        """
        agree("merge", caches)
        return cls([deepcopy(cache) for cache in caches])

    # ---- parts

    def _alone(self, tokens: int) -> bool:
        """Tell whether every row takes a single token, behind others."""
        return tokens == 1 and self._ends is None and not any(row.empty() for row in self.rows)

    def _rows(self) -> Sequence[TurboQuantKVCache]:
        return self.rows

    def _seen(self, mask: object) -> list[mx.array | None]:
        rows, count = len(self.rows), self.size()
        if mask is None:
            return [None] * rows
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return []
        if mask.shape not in ((rows, 1, 1, count), (1, 1, 1, count)):
            return []
        row_mask = mx.broadcast_to(mask, (rows, 1, 1, count))
        return [row_mask[i, 0, :, count - row.size() :] for i, row in enumerate(self.rows)]

    def _held_shape(self) -> tuple[Any, ...] | None:
        shapes = (shape for row in self.rows if (shape := row._held_shape()) is not None)
        shape = next(shapes, None)
        return None if shape is None else (len(self.rows), *shape[1:])

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None:
        check_floating(name, dtype)

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        self.rows[0]._accept_widths(key_width, value_width)

    def _state(self) -> tuple[Any, ...]:
        return tuple(row.state for row in self.rows)
