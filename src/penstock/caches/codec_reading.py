"""How caches in a codec are read: in place by `penstock.attach`, elsewhere dequantized.

A chunk attends to itself in full precision, and to earlier tokens dequantized, one layer at a
time; it is encoded as soon as it is taken in. A single token is written to the tail. Where
`penstock.attach(model)` was called it reads the codes as they lie; elsewhere they are dequantized
for it, which is as right, and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import mlx.core as mx

from penstock.caches.base import LayerCache
from penstock.errors import ModelError
from penstock.kv import attention

if TYPE_CHECKING:
    from penstock.caches.codec import TurboQuantKVCache


class TurboQuant(LayerCache):
    """Base of the caches of one sequence and of a batch: reads in place, or dequantized."""

    _given: tuple[ref[mx.array], ref[mx.array]] | None = None
    """Weak references to the keys and values the model attends to next. The model alone keeps them
    alive, since they may be the whole sequence, dequantized."""
    _in_place = False
    """Whether a single token was seen to attend by `attend`."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_given"}

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all that is held, dequantized: (batch, kv_heads, columns, dim); not evaluated."""
        raise NotImplementedError

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """Attend as the model's own attention would: (b, heads, 1, d) -> (b, heads, 1, dim).

        None if the model is to attend to `keys` and `values` itself: those of a chunk, or such
        as it has changed.
        """
        given = self._given
        if given is None or keys is not given[0]() or values is not given[1]():
            return None
        seen = self._seen(mask)
        if len(seen) == 0:
            return None
        self._given, self._in_place = None, True
        queries = attention.in_base_2(queries, scale)
        rows = self._rows()
        mixed_rows = [
            row.attended(queries[i : i + 1] if len(rows) > 1 else queries, row_mask, sinks)
            for i, (row, row_mask) in enumerate(zip(rows, seen, strict=True))
        ]
        return mixed_rows[0] if len(mixed_rows) == 1 else mx.concatenate(mixed_rows, axis=0)

    def _give(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values that the model hands to its attention for a single token.

        All columns, lazily dequantized, until the model was seen to read in place.
        """
        given = (keys, values) if self._in_place else self.keys_and_values()
        self._given = ref(given[0]), ref(given[1])
        return given

    def _check_read(self) -> None:
        """Raise ModelError if columns given out to be read in place were read otherwise."""
        given, self._given = self._given, None
        if given is not None and self._in_place:
            self._in_place = False
            raise ModelError(
                "the last token was not read by penstock's attention, as those before it were: "
                "this cache was moved to another model; call penstock.attach for that one, too"
            )

    def _rows(self) -> Sequence[TurboQuantKVCache]:
        raise NotImplementedError

    def _seen(self, mask: object) -> list[mx.array | None]:
        """Return (1, columns) of booleans, or None for all, for each row.

        Returns nothing if the mask is of another kind.
        """
        raise NotImplementedError
