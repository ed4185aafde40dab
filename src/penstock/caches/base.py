"""Base of the caches of one layer: checks on the way in, allocation, the count of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.checks import counts, ints
from penstock.kv.columns import Side

Self = TypeVar("Self", bound="LayerCache")
Other = TypeVar("Other", bound="LayerCache")


class LayerCache:
    """Keys and values of one layer, for mlx-lm's cache protocol.

    Not thread-safe: one owner, the thread that runs the model. `keys` and `values` are None
    until the first update, which allocates them; afterwards they are written in place.
    """

    step: ClassVar[int] = 256
    keys: Side | None = None
    values: Side | None = None
    growths: int = 0
    """Number of updates that replaced the allocated buffers by a larger copy."""
    read_by_others: bool = False
    """Whether later layers call `keys_and_values()` of this one (Gemma 3n, AFM 7).

    After a chunk past the end of a window these layers need the columns that the chunk's own
    queries saw. The columns are kept until the next update, or until the state is read, as mlx-lm
    does after a chunk. This flag is not part of the state: set it again after a cache was loaded
    from a file.
    """
    carried: ClassVar[tuple[str, ...]] = ()
    """Settings that a batch made of this cache, or a row taken out of it, takes over."""
    _capacity: int | None = None
    _shape: tuple[Any, ...] | None = None
    _roomy: bool = False

    @classmethod
    def from_state(cls: type[Self], state: Any) -> Self:
        """Make a cache from a `state`, `__init__` not being called."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a dtype, which `copy` cannot copy, and fields set by the next update."""
        return {name: value for name, value in vars(self).items() if name != "_shape"}

    def _sibling(self, kind: type[Other]) -> Other:
        """Make a bare cache of another class with this one's settings; the caller fills it."""
        cache = kind.__new__(kind)
        cache._capacity, cache.read_by_others = self._capacity, self.read_by_others
        for name in self.carried:
            if name in kind.carried:
                setattr(cache, name, getattr(self, name))
        return cache

    def _widen(self, other: LayerCache) -> None:
        """Take over the needs of one more row: the larger capacity; none is the bound."""
        self.read_by_others |= other.read_by_others
        if self._capacity is not None:
            larger = max(self._capacity, other._capacity or 0)
            self._capacity = None if other._capacity is None else larger

    @property
    def state(self) -> Any:
        """All that must be saved, in mlx-lm 0.32.2's order: whole buffers, and settings."""
        return self._state()

    @state.setter
    def state(self, state: Any) -> None:
        self._restore(state)

    def _state(self) -> tuple[Any, ...]:
        """Return (keys, values, ...)."""
        return self.keys, self.values

    def _restore(self, state: Sequence[Any]) -> None:
        """Take over a `_state`, made here or read from a file, which turns tuples to lists."""
        keys, values = state
        self.keys = tuple(keys) if isinstance(keys, list) else keys
        self.values = tuple(values) if isinstance(values, list) else values
        self._repacked()
        # What was asked for is not in the state. What was allocated is: growth goes on from
        # there, and does not start with a whole window for a sequence that is short.
        self._capacity = self._rounded(col.columns(self.keys)) or None

    @property
    def capacity(self) -> int:
        """Columns a row has room for: those allocated, or before that those asked for."""
        return col.columns(self.keys) or self._capacity or 0

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return col.nbytes(self.keys, self.values)

    def empty(self) -> bool:
        """Tell whether nothing was ever written."""
        return self.keys is None

    def _encode(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Return the form in which keys and values are held: as they are."""
        return keys, values

    def _accept(self, keys: mx.array, values: mx.array) -> int:
        """Return the number of tokens; raise unless the arrays fit each other and the cache."""
        try:
            shape = (keys.shape, values.shape, keys.dtype, values.dtype)
        except AttributeError:
            shape = None
        if shape is None or shape != self._shape:  # not what the last update brought
            for name, given in (("keys", keys), ("values", values)):
                if not isinstance(given, mx.array):
                    raise TypeError(f"{name} must be an mx.array, not {type(given).__name__}")
            shape = (keys.shape, values.shape, keys.dtype, values.dtype)
            self._accept_shape(*shape)
            self._shape = shape
        return shape[0][2]

    def _accept_shape(
        self,
        keys: tuple[int, ...],
        values: tuple[int, ...],
        key_dtype: mx.Dtype,
        value_dtype: mx.Dtype,
    ) -> None:
        """Raise unless chunks of these shapes match each other and the cache."""
        for name, shape in (("keys", keys), ("values", values)):
            if len(shape) != 4:
                raise ValueError(f"{name} must be (batch, kv_heads, tokens, head_dim), not {shape}")
            if 0 in shape[:2]:
                raise ValueError(f"{name} {shape} has no batch or no heads")
        if keys[:3] != values[:3]:
            raise ValueError(f"values {values} must have the batch, heads and tokens of {keys}")
        dtypes = (("keys", key_dtype), ("values", value_dtype))
        for name, dtype in dtypes:
            self._accept_dtype(name, dtype)
        self._accept_widths(keys[3], values[3])
        held = self._held_shape()
        if held is None:
            return
        names = ("batch", "kv_heads", "head_dim of keys", "head_dim of values")
        for name, given, want in zip(names, (*keys[:2], keys[3], values[3]), held, strict=False):
            if given != want:
                raise ValueError(f"{name} is {given}; this cache holds {want}")
        for (name, dtype), want in zip(dtypes, held[4:], strict=True):
            if dtype != want:
                raise TypeError(f"{name} are {dtype}; this cache holds {want}")

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None:
        """Raise if numbers of this type cannot be held. Any can, as with mlx-lm."""

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        """Raise if the head sizes cannot be held. Any can."""

    def _held_shape(self) -> tuple[Any, ...] | None:
        """Return (batch, kv_heads, key width, value width, two dtypes) of the cached columns."""
        if self.keys is None or self.values is None:
            return None
        key, value = col.arrays(self.keys)[0], col.arrays(self.values)[0]
        return (*key.shape[:2], key.shape[3], value.shape[3], key.dtype, value.dtype)

    def _room_for(self, needed: int, held: int) -> int:
        """Say how many columns to allocate when `needed` are wanted and `held` are too few."""
        if held == 0 and self._capacity is not None and needed <= self._capacity:
            return self._capacity
        spare = max(self.step, held // 4) if held else 0
        return self._rounded(max(needed, held + spare))

    def _rounded(self, count: int) -> int:
        """Return `count` columns, up to whole steps."""
        return -(-count // self.step) * self.step

    def _make_room(self, needed: int, used: int, like: tuple[Side, Side]) -> None:
        """Allocate, or replace full buffers by larger ones, so that `needed` columns exist.

        `used` columns are carried over. Keys first, then values: never more than one old
        buffer is alive. The first update allocates, even one of no tokens.
        """
        held, needed = col.columns(self.keys), max(1, needed)
        if needed <= held:
            return
        room = self._room_for(needed, held if self._roomy else 0)
        if self.keys is None or self.values is None:
            self.keys, self.values = col.blank(like[0], room), col.blank(like[1], room)
        else:
            self.keys = col.resized(self.keys, room, used)
            self.values = col.resized(self.values, room, used)
            self.growths += self._roomy
        self._roomy = True

    def allocated(self, capacity: int) -> None:
        """Note that the buffers were made with `capacity` columns on purpose."""
        self._capacity, self._roomy = capacity, True

    def _repacked(self) -> None:
        """Note that the buffers are new ones, of just the columns in use."""
        self._shape, self._roomy = None, False

    def _write(self, start: int, new: tuple[Side, Side], row: int | None = None) -> None:
        """Write columns from `start` on, of all rows, or from `row` on as many as `new` has.

        There must be room: see `_make_room`.
        """
        keys, values = self.keys, self.values
        sides: Any = (keys, values, *new)
        if start and row is None and isinstance(keys, mx.array) and isinstance(values, mx.array):
            # Every token of every layer comes by here: `col.write`, spelled out.
            keys, values, new_keys, new_values = sides
            stop = start + new_keys.shape[2]
            keys[:, :, start:stop] = new_keys
            values[:, :, start:stop] = new_values
            return
        self.keys = col.write(keys, start, new[0], row)  # type: ignore[arg-type]
        self.values = col.write(values, start, new[1], row)  # type: ignore[arg-type]

    def _held(self) -> tuple[Side, Side]:
        """Return both sides of a cache that is not empty."""
        if self.keys is None or self.values is None:
            raise ValueError("the cache is empty: nothing was written yet")
        return self.keys, self.values


def check_floating(name: str, dtype: mx.Dtype) -> None:
    """Raise TypeError unless numbers of this type can be encoded."""
    if not mx.issubdtype(dtype, mx.floating):
        raise TypeError(f"{name} must be floating point to be encoded, not {dtype}")


class Bounded(LayerCache):
    """Adds a bound: a row never holds more than `max_size` columns."""

    max_size: int
    _chunk: tuple[Side, Side] | None = None

    @property
    def capacity(self) -> int:
        """Columns a row has room for: those allocated, or before that those to come."""
        return col.columns(self.keys) or min(self._capacity or self.max_size, self.max_size)

    def _room_for(self, needed: int, held: int) -> int:
        if self._capacity is None:
            return self.max_size
        return min(self.max_size, super()._room_for(needed, held))

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not; also those of a chunk that other layers may still read."""
        return super().nbytes + col.nbytes(*(self._chunk or ()))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_chunk"}

    def _state(self) -> tuple[Any, ...]:
        self._chunk = None
        return super()._state()

    def _shown_to_others(self, fetched: tuple[Side, Side]) -> tuple[Side, Side]:
        """Return the keys and values fetched for a chunk, noted if other layers read them."""
        if self.read_by_others:
            self._chunk = fetched
        return fetched


class Batch(LayerCache):
    """Adds rows: `_tokens[i]` is the position of row i's next token, known without the device."""

    _tokens: list[int]

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token; (batch,) int32."""
        return mx.array(self._tokens, mx.int32)

    def _ends_of(
        self, lengths: Sequence[int] | None, right_padding: Sequence[int] | None
    ) -> list[int] | None:
        """Return where right-padded prompts end, a position a row; None without padding."""
        if right_padding is None or max(right_padding) <= 0:
            return None
        if lengths is None:
            raise ValueError("right_padding needs the lengths of the prompts")
        return [at + length for at, length in zip(self._tokens, ints(lengths), strict=True)]

    def _pick(self, rows: list[int], start: int, stop: int) -> None:
        """Keep the columns start..stop-1 of the given rows, in buffers of their own."""
        if self.keys is not None and self.values is not None:
            self.keys = col.picked(self.keys, rows, start, stop)
            self.values = col.picked(self.values, rows, start, stop)

    def _join(
        self, other: Any, end: int, pieces: Callable[[Any, Side], Iterable[tuple[int, Side]]]
    ) -> None:
        """Lay the rows of another batch behind the own ones, in buffers of `end` columns.

        Args:
            other: batch of the same class and settings.
            end: columns of the new buffers.
            pieces: gives the columns of a batch's side, each run with its first column.
        """
        for name in ("keys", "values"):
            parts = [
                (row, column, part)
                for row, batch in ((0, self), (len(self._tokens), other))
                if (side := getattr(batch, name)) is not None
                for column, part in pieces(batch, side)
            ]
            if parts:
                setattr(self, name, col.laid(parts, len(self._tokens) + len(other._tokens), end))
        self._tokens = self._tokens + other._tokens
        self._widen(other)


class Padded(Batch):
    """A batch in which row i's first token stands in column `_pads[i]`, by order of time."""

    _pads: list[int]

    def _pad(self, left_padding: Sequence[int]) -> None:
        """Set the padding of a new batch."""
        self._pads = counts("left_padding", left_padding)
        self._tokens = [-pad for pad in self._pads]

    @property
    def left_padding(self) -> mx.array:
        """Columns before each row's first token; (batch,) int32; 0 or less if there are none."""
        return mx.array(self._pads, mx.int32)

    def _pad_more(self, left_padding: Sequence[int]) -> None:
        """Add left padding to an empty batch; raise ValueError if it is not empty."""
        if not self.empty():
            raise ValueError("left_padding can only be added while the cache is empty")
        more = counts("left_padding", left_padding)
        self._pad([pad + by for pad, by in zip(self._pads, more, strict=True)])

    def _turned(self, shifts: list[int]) -> None:
        """Note that row i's last `shifts[i]` columns, padding, now stand before its first."""
        self._pads = [pad + by for pad, by in zip(self._pads, shifts, strict=True)]
        self._tokens = [at - by for at, by in zip(self._tokens, shifts, strict=True)]

    def _choose(self, rows: list[int]) -> None:
        """Keep the counts of the given rows."""
        self._pads = [self._pads[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._repacked()


def agree(what: str, caches: Sequence[LayerCache]) -> None:
    """Raise ValueError unless `caches` are of one class, with the same settings and shapes."""
    if not caches:
        raise ValueError(f"{what} needs at least one cache")
    first = caches[0]
    kinds = {type(cache).__name__ for cache in caches}
    if len(kinds) > 1:
        raise ValueError(f"{what} needs caches of one class, not of {sorted(kinds)}")
    for name in first.carried:
        values = {getattr(cache, name) for cache in caches}
        if len(values) > 1:
            raise ValueError(
                f"{what} needs caches of the same {name}, not of {sorted(values, key=str)}"
            )
    shapes = [shape[1:] for cache in caches if (shape := cache._held_shape()) is not None]
    names = ("kv_heads", "head_dim of keys", "head_dim of values", "dtype", "dtype of values")
    for name, *found_in_each in zip(names, *shapes, strict=False):
        if any(values != found_in_each[0] for values in found_in_each):
            raise ValueError(f"{what} needs caches of the same {name}, not of {found_in_each}")


def batch_of(kind: type[Other], caches: Sequence[LayerCache]) -> Other:
    """Make a bare batch with the settings that all `caches` share; the caller fills it.

    Raises:
        ValueError: no caches, or they differ in class, settings or shapes.
    """
    agree("merge", caches)
    batch = caches[0]._sibling(kind)
    for cache in caches:
        batch._widen(cache)
    return batch
