"""Base classes of layer caches: input validation, allocation and memory accounting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.checks import counts, ints
from penstock.kv.columns import Side

Self = TypeVar("Self", bound="LayerCache")
Other = TypeVar("Other", bound="LayerCache")
Pieces = Callable[[Any, Side], Iterable[tuple[int, Side]]]


class LayerCache:
    """Keys and values of one layer, for mlx-lm's cache protocol.

    Not thread-safe: used only by the thread that runs the model. `keys` and `values` are None
    until the first update, which allocates them; later updates write in place.
    """

    kinds: ClassVar[dict[str, type[LayerCache]]] = {}
    """Cache classes by name, for loading from files."""
    step: ClassVar[int] = 256
    keys: Side | None = None
    values: Side | None = None
    growths: int = 0
    """Number of updates that replaced the buffers with a larger copy."""
    read_by_others: bool = False
    """Whether later layers call `keys_and_values()` of this cache (Gemma 3n, AFM 7).

    After a chunk that overflows a window, these layers need all columns that its queries saw. These
    are kept until the next update, or until the state is read, as in mlx-lm. Not part of the state:
    set it again after loading from a file."""
    carried: ClassVar[tuple[str, ...]] = ()
    """Names of the settings copied when caches are merged into a batch or extracted from one."""
    _capacity: int | None = None
    _shape: tuple[Any, ...] | None = None
    _roomy: bool = False

    def __init_subclass__(cls) -> None:
        LayerCache.kinds[cls.__name__] = cls

    @classmethod
    def from_state(cls: type[Self], state: Any) -> Self:
        """Create a cache from the `state` of another, without calling `__init__`."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy, without transient ones such as weak references."""
        transient = {"_shape", "_chunk", "_given"}
        return {name: value for name, value in vars(self).items() if name not in transient}

    def _sibling(self, kind: type[Other]) -> Other:
        cache = kind.__new__(kind)
        cache._capacity, cache.read_by_others = self._capacity, self.read_by_others
        for name in self.carried:
            if name in kind.carried:
                setattr(cache, name, getattr(self, name))
        return cache

    def _widen(self, other: LayerCache) -> None:
        """Adopt the larger capacity when rows of `other` are added; None means `max_size`."""
        self.read_by_others |= other.read_by_others
        if self._capacity is not None:
            larger = max(self._capacity, other._capacity or 0)
            self._capacity = None if other._capacity is None else larger

    @property
    def state(self) -> Any:
        """State in the order of mlx-lm 0.32.2: buffers in full, then settings."""
        return self._state()

    @state.setter
    def state(self, state: Any) -> None:
        self._restore(state)

    def _state(self) -> tuple[Any, ...]:
        return self.keys, self.values

    def _restore(self, state: Sequence[Any]) -> None:
        """Restore a result of `_state`; a file turns its tuples into lists."""
        keys, values = state
        self.keys = tuple(keys) if isinstance(keys, list) else keys
        self.values = tuple(values) if isinstance(values, list) else values
        self._repacked()
        # The state has only the allocated capacity, not the requested one. Growth continues from
        # it, so that a short sequence does not allocate a whole window.
        self._capacity = self._rounded(col.columns(self.keys)) or None

    @property
    def capacity(self) -> int:
        """Number of columns allocated per row; before the first update, the number requested."""
        return col.columns(self.keys) or self._capacity or 0

    @property
    def nbytes(self) -> int:
        return col.nbytes(self.keys, self.values)

    def empty(self) -> bool:
        return self.keys is None

    def _encode(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        return keys, values

    def _accept(self, keys: mx.array, values: mx.array) -> int:
        """Return the number of new tokens; raise an error if the arrays do not fit the cache."""
        try:
            shape = (keys.shape, values.shape, keys.dtype, values.dtype)
        except AttributeError:
            shape = None
        if shape is None or shape != self._shape:  # differs from the last update
            for name, array in (("keys", keys), ("values", values)):
                if not isinstance(array, mx.array):
                    raise TypeError(f"{name} must be an mx.array, not {type(array).__name__}")
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
        for name, shape in (("keys", keys), ("values", values)):
            if len(shape) != 4:
                raise ValueError(f"{name} must be (batch, kv_heads, tokens, head_dim), not {shape}")
            if 0 in shape[:2]:
                raise ValueError(f"{name} {shape} must have at least one row and one head")
        if keys[:3] != values[:3]:
            raise ValueError(f"values {values} must have the batch, heads and tokens of {keys}")
        dtypes = (("keys", key_dtype), ("values", value_dtype))
        for name, dtype in dtypes:
            self._accept_dtype(name, dtype)
        self._accept_widths(keys[3], values[3])
        present = self._held_shape()
        if present is None:
            return
        names = ("batch", "kv_heads", "head_dim of keys", "head_dim of values")
        for name, size, want in zip(names, (*keys[:2], keys[3], values[3]), present, strict=False):
            if size != want:
                raise ValueError(f"{name} is {size}; this cache holds {want}")
        for (name, dtype), want in zip(dtypes, present[4:], strict=True):
            if dtype != want:
                raise TypeError(f"{name} are {dtype}; this cache holds {want}")

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None: ...
    def _accept_widths(self, key_width: int, value_width: int) -> None: ...

    def _held_shape(self) -> tuple[Any, ...] | None:
        """Return (batch, kv_heads, key dim, value dim, key dtype, value dtype); None if empty."""
        if self.keys is None or self.values is None:
            return None
        key, value = col.arrays(self.keys)[0], col.arrays(self.values)[0]
        return (*key.shape[:2], key.shape[3], value.shape[3], key.dtype, value.dtype)

    def _room_for(self, needed: int, allocated: int) -> int:
        """Return the number of columns to allocate if `needed` exceeds `allocated`."""
        if allocated == 0 and self._capacity is not None and needed <= self._capacity:
            return self._capacity
        spare = max(self.step, allocated // 4) if allocated else 0
        return self._rounded(max(needed, allocated + spare))

    def _rounded(self, count: int) -> int:
        return -(-count // self.step) * self.step

    def _make_room(self, needed: int, used: int, like: tuple[Side, Side]) -> None:
        """Allocate buffers, or replace them with larger ones, so that `needed` columns exist.

        The first `used` columns are copied, keys before values, so only one old buffer is alive.
        The first update allocates even if it has no tokens.
        """
        allocated, needed = col.columns(self.keys), max(1, needed)
        if needed <= allocated:
            return
        room = self._room_for(needed, allocated if self._roomy else 0)
        if self.keys is None or self.values is None:
            self.keys, self.values = col.blank(like[0], room), col.blank(like[1], room)
        else:
            self.keys = col.resized(self.keys, room, used)
            self.values = col.resized(self.values, room, used)
            self.growths += self._roomy
        self._roomy = True

    def allocated(self, capacity: int) -> None:
        """Record that the buffers were allocated with `capacity` columns."""
        self._capacity, self._roomy = capacity, True

    def _repacked(self) -> None:
        """Record that the buffers were replaced by ones with exactly the columns in use."""
        self._shape, self._roomy = None, False

    def _write(self, start: int, new: tuple[Side, Side], row: int | None = None) -> None:
        """Write columns from `start` on to the buffers, for all rows or from `row` on."""
        keys, values = self.keys, self.values
        sides: Any = (keys, values, *new)
        if start and row is None and isinstance(keys, mx.array) and isinstance(values, mx.array):
            # Hot path, run for each token and layer; inlines `col.write`.
            keys, values, new_keys, new_values = sides
            stop = start + new_keys.shape[2]
            keys[:, :, start:stop] = new_keys
            values[:, :, start:stop] = new_values
            return
        self.keys = col.write(keys, start, new[0], row)  # type: ignore[arg-type]
        self.values = col.write(values, start, new[1], row)  # type: ignore[arg-type]

    def _held(self) -> tuple[Side, Side]:
        if self.keys is None or self.values is None:
            raise ValueError("the cache is empty")
        return self.keys, self.values


def check_floating(name: str, dtype: mx.Dtype) -> None:
    """Raise TypeError unless the dtype is floating point."""
    if not mx.issubdtype(dtype, mx.floating):
        raise TypeError(f"{name} must be floating point to be encoded, not {dtype}")


class Bounded(LayerCache):
    """A cache whose rows hold at most `max_size` columns."""

    max_size: int
    _chunk: tuple[Side, Side] | None = None

    @property
    def capacity(self) -> int:
        """Number of columns allocated per row; before the first update, the number to allocate."""
        return col.columns(self.keys) or min(self._capacity or self.max_size, self.max_size)

    def _room_for(self, needed: int, allocated: int) -> int:
        if self._capacity is None:
            return self.max_size
        return min(self.max_size, super()._room_for(needed, allocated))

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including columns kept for other layers; see `read_by_others`."""
        return super().nbytes + col.nbytes(*(self._chunk or ()))

    def _state(self) -> tuple[Any, ...]:
        self._chunk = None
        return super()._state()

    def _shown_to_others(self, fetched: tuple[Side, Side]) -> tuple[Side, Side]:
        if self.read_by_others:
            self._chunk = fetched
        return fetched


class Batch(LayerCache):
    _tokens: list[int]

    @property
    def offset(self) -> mx.array:
        return mx.array(self._tokens, mx.int32)

    def _pick(self, rows: list[int], start: int, stop: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = col.picked(self.keys, rows, start, stop)
            self.values = col.picked(self.values, rows, start, stop)

    def _join(self, other: Any, end: int, pieces: Pieces) -> None:
        sources = (0, self), (len(self._tokens), other)
        self._tokens = self._tokens + other._tokens
        self._lay(sources, end, pieces)
        self._widen(other)

    def _lay(self, sources: Iterable[tuple[int, Any]], end: int, pieces: Pieces) -> None:
        """Copy caches to new buffers of `end` columns; `sources` has the first row of each."""
        sources = list(sources)
        for name in ("keys", "values"):
            parts = [
                (row, column, part)
                for row, cache in sources
                if (side := getattr(cache, name)) is not None
                for column, part in pieces(cache, side)
            ]
            if parts:
                setattr(self, name, col.laid(parts, len(self._tokens), end))


class Padded(Batch):
    """A left-padded batch: the tokens of row i start at column `_pads[i]`, in order."""

    _pads: list[int]

    def _pad(self, left_padding: Sequence[int]) -> None:
        self._pads = counts("left_padding", left_padding)
        self._tokens = [-pad for pad in self._pads]

    @property
    def left_padding(self) -> mx.array:
        """Number of padding columns of each row, (batch,) int32; 0 or less for none."""
        return mx.array(self._pads, mx.int32)

    def _pad_more(self, left_padding: Sequence[int]) -> None:
        if not self.empty():
            raise ValueError("left_padding can only be added while the cache is empty")
        more = counts("left_padding", left_padding)
        self._pad([pad + by for pad, by in zip(self._pads, more, strict=True)])

    def _turned(self, shifts: list[int]) -> None:
        """Update the counts after `shifts[i]` padding columns of row i moved from end to front."""
        self._pads = [pad + by for pad, by in zip(self._pads, shifts, strict=True)]
        self._tokens = [position - by for position, by in zip(self._tokens, shifts, strict=True)]

    def _choose(self, rows: list[int]) -> None:
        self._pads = [self._pads[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._repacked()


def ends_of(
    tokens: Iterable[int], lengths: Sequence[int] | None, right_padding: Sequence[int] | None
) -> list[int] | None:
    """Return the position at which each right-padded prompt ends; None if there is no padding."""
    if right_padding is None or max(ints(right_padding)) <= 0:
        return None
    if lengths is None:
        raise ValueError("right_padding needs the lengths of the prompts")
    return [start + length for start, length in zip(tokens, ints(lengths), strict=True)]


def agree(what: str, caches: Sequence[LayerCache]) -> None:
    """Raise ValueError unless `caches` have the same class, settings and shapes.

    The message starts with `what`, the operation.
    """
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
    """Create an empty batch with the settings of `caches`; ValueError if they differ."""
    agree("merge", caches)
    batch = caches[0]._sibling(kind)
    for cache in caches:
        batch._widen(cache)
    return batch
