"""Tail pool: KV of the last few tokens of every running sequence, one buffer per layer and side.

All memory is allocated at once, before the first step that writes, and each running sequence owns a
slot. A step writes the new tokens of many sequences in one operation. Head sizes may differ by
layer. A full tail is copied to a segment and starts over. `KVCacheManager` is the same pool with
long slots, as a library class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

from penstock.errors import PoolFull
from penstock.kv import columns as col
from penstock.kv.code_pieces import PIECE_TOKENS
from penstock.kv.segment import Segment

_Value = TypeVar("_Value")
PIECE_BUFFERS = 10
"""Number of float32 arrays alive at once while a piece of one side is encoded; 8 were measured."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape and dtype of one token's keys and values in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> LayerShape:
        """Return the per-token shape of keys and values, (batch, kv_heads, tokens, dim) each."""
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)

    @property
    def nbytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


def token_bytes(shapes: Sequence[LayerShape]) -> int:
    return sum(shape.nbytes for shape in shapes)


def piece_bytes(shapes: Sequence[LayerShape], lanes: int) -> int:
    """Return the maximum working memory while each lane encodes or dequantizes a piece."""
    numbers = max(shape.kv_heads * max(shape.key_dim, shape.value_dim) for shape in shapes)
    return lanes * PIECE_TOKENS * numbers * mx.float32.size * PIECE_BUFFERS


class Tails:
    """KV of up to `slots` sequences with `columns` tokens each, in all layers.

    Not thread-safe: used only by the thread that runs the model. Writes are lazy, evaluated with
    the step's graph. The caller tracks which columns are valid, so an abandoned step has no effect.
    """

    def __init__(
        self, slots: int, columns: int, shapes: Sequence[LayerShape], spare: int = 0
    ) -> None:
        self.slots = slots
        self.columns = columns
        self.spare = spare
        """Number of extra columns, which steps of several tokens may write to; never read."""
        self.shapes = tuple(shapes)
        self._free = list(reversed(range(slots)))
        self.drop()

    def drop(self) -> None:
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._derived: dict[object, Any] = {}

    def derived(self, compute: Callable[[Tails], _Value]) -> _Value:
        """Return `compute(self)`, cached until a buffer may have another address.

        The value must not contain the buffers, whose writes would then be copies.
        """
        if compute not in self._derived:
            self._derived[compute] = compute(self)
        value: _Value = self._derived[compute]
        return value

    def ready(self) -> None:
        if not self._keys:
            self.renew()

    def renew(self) -> None:
        """Reallocate all buffers, zeroed; needed after a step whose evaluation failed."""
        columns = self.columns + self.spare

        def zeros(shape: LayerShape, dim: int) -> mx.array:
            return mx.zeros((self.slots, shape.kv_heads, columns, dim), shape.dtype)

        self.drop()
        self._keys = [zeros(shape, shape.key_dim) for shape in self.shapes]
        self._values = [zeros(shape, shape.value_dim) for shape in self.shapes]
        mx.eval(self._keys, self._values)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    @property
    def lost(self) -> bool:
        return bool(self.shapes) and not self._keys

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        """Return a free slot, now taken; raise PoolFull if there is none."""
        if not self._free:
            raise PoolFull(self.slots)
        return self._free.pop()

    def wipe(self, slot: int) -> None:
        """Zero a slot after non-finite values, which masks do not hide: 0 x infinity is NaN."""
        self._derived.clear()
        for buffers in (self._keys, self._values):
            for layer in range(len(buffers)):  # a second reference would prevent writing in place
                shape, dtype = buffers[layer].shape, buffers[layer].dtype
                zeros = mx.zeros((1, *shape[1:]), dtype)
                buffers[layer] = _written(buffers[layer], slot, 0, zeros)
        mx.eval(self.buffers())

    def give_back(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is not taken")
        self._free.append(slot)

    def check(self, taken: Iterable[int]) -> None:
        """Raise AssertionError unless exactly the `taken` slots are taken and the buffers fit."""
        slots = sorted(taken)
        if sorted([*slots, *self._free]) != list(range(self.slots)):
            raise AssertionError(f"slots taken {slots}, free {sorted(self._free)} of {self.slots}")
        columns = self.columns + self.spare
        for buffers, sides in ((self._keys, "key_dim"), (self._values, "value_dim")):
            expected = [
                ((self.slots, shape.kv_heads, columns, getattr(shape, sides)), shape.dtype)
                for shape in self.shapes
            ]
            if self.nbytes and [(buffer.shape, buffer.dtype) for buffer in buffers] != expected:
                raise AssertionError(f"the buffers are not {expected}")

    def write(
        self, layer: int, slots: mx.array, columns: mx.array, keys: mx.array, values: mx.array
    ) -> None:
        """Write row i of keys and values, (b, kv_heads, n, dim), at (slots[i], columns[i])."""
        self._derived.clear()
        places = columns[:, None] + mx.arange(keys.shape[2])
        for buffers, new in ((self._keys, keys), (self._values, values)):
            buffer = buffers[layer]
            if not buffer.size:  # an index may have no values; MLX would divide by zero
                continue
            buffer[slots[:, None], :, places] = new.swapaxes(1, 2)

    def write_block(
        self, layer: int, slot: int, column: int, keys: mx.array, values: mx.array
    ) -> None:
        """Write rows (b, kv_heads, n, dim) to adjacent slots at the same column; fast `write`."""
        self._derived.clear()
        self._keys[layer] = _written(self._keys[layer], slot, column, keys)
        self._values[layer] = _written(self._values[layer], slot, column, values)

    def read(self, layer: int, slots: mx.array, columns: int) -> tuple[mx.array, mx.array]:
        """Return copies of the slots' first columns, (b, kv_heads, columns, dim)."""
        return self._keys[layer][slots, :, :columns], self._values[layer][slots, :, :columns]

    def layer(self, layer: int) -> tuple[mx.array, mx.array]:
        return self._keys[layer], self._values[layer]

    def read_block(
        self, layer: int, slot: int, count: int, columns: int
    ) -> tuple[mx.array, mx.array]:
        """Return views of the first columns of adjacent slots, (count, kv_heads, columns, dim)."""
        rows = slice(slot, slot + count)
        return self._keys[layer][rows, :, :columns], self._values[layer][rows, :, :columns]

    def buffers(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def cut(self, slot: int, stop: int, before: Segment | None = None) -> Segment:
        """Copy the first `stop` columns of a slot to a segment, appended to `before` if given."""
        tail = tuple(self.read_block(i, slot, 1, stop) for i in range(len(self.shapes)))
        if before is None:
            return Segment.cut(tail, 0, stop)
        return before.join(Segment(tail, length=stop))


def _written(buffer: mx.array, slot: int, column: int, new: mx.array) -> mx.array:
    written = col.write(buffer, column, new, slot)
    assert isinstance(written, mx.array)
    return written
