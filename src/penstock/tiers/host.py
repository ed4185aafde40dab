"""Conversion between a segment's arrays and blocks in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from penstock.kv import columns as col
from penstock.kv.block_format import BlockFormat
from penstock.kv.segment import Segment
from penstock.kv.states import StateForm, States, named
from penstock.prefix.block_hashes import TokenArray
from penstock.tiers.record import TOKENS, HostArray, Target

_SIDES = ("keys", "values")
_STATES = "states."
_A = TypeVar("_A")
_S = TypeVar("_S")


def host_block(block: Segment, tokens: TokenArray, *more: Segment) -> dict[str, HostArray]:
    """Copy tokens and arrays of consecutive segments, under names such as `3.keys`."""
    pieces = (block, *more)
    mx.eval([col.arrays(*layer) for piece in pieces for layer in piece.layers])
    host_arrays = {TOKENS: _host([tokens.astype(np.uint32)], "uint32")}
    for number, layers in enumerate(zip(*(piece.layers for piece in pieces), strict=True)):
        named = [_named(number, layer, col.arrays) for layer in layers]
        for arrays in zip(*named, strict=True):
            seen, dtypes = zip(*(_seen(array) for _, array in arrays), strict=True)
            host_arrays[arrays[0][0]] = _host(seen, dtypes[0], col.TOKEN_AXIS)
    return host_arrays


def host_states(states: States) -> dict[str, HostArray]:
    """Copy the states of one sequence to host memory, under names such as `states.3.0`."""
    mx.eval([array for _, array in named(states)])
    seen = ((name, *_seen(array)) for name, array in named(states))
    return {_STATES + name: _host([array], dtype) for name, array, dtype in seen}


class StateRestoreBuffer:
    def __init__(self, form: StateForm, *, in_place: bool = True) -> None:
        self._form = form
        self._in_place = in_place
        self._rooms: dict[str, _BufferPool] = {}

    def targets(self) -> list[dict[str, Target]]:
        if not self._rooms:
            self._rooms = {
                name: _BufferPool.allocate(shape, dtype, in_place=self._in_place)
                for name, shape, dtype in self._form.arrays
            }
            if self._in_place:
                mx.eval([room.array for room in self._rooms.values()])
        return [
            {
                _STATES + name: Target(
                    room.dtype,
                    tuple(room.array.shape),
                    [np.asarray(room.array).reshape(-1).view(np.uint8)],
                )
                for name, room in self._rooms.items()
            }
        ]

    @property
    def nbytes(self) -> int:
        return sum(room.nbytes for room in self._rooms.values())

    def states(self) -> States:
        arrays = {name: room.read() for name, room in self._rooms.items()}
        mx.eval(list(arrays.values()))
        return self._form.states(arrays)


class RestoreBuffer:
    """Memory for the KV of blocks, which is filled from files and then becomes a segment.

    Nothing is copied: files are read directly into the segment's arrays. `targets` allocates these
    on the reading thread, since allocation can take as long as reading the files. If the device has
    its own memory (not `in_place`), the arrays are copied to it afterwards.
    """

    def __init__(
        self,
        form: BlockFormat,
        blocks: int,
        block_size: int,
        *,
        in_place: bool = True,
    ) -> None:
        self.blocks = blocks
        self.tokens = np.empty(blocks * block_size, np.uint32)
        """Tokens of the blocks, valid once read."""
        self._block_size = block_size
        self._tokens = blocks * block_size
        self._in_place = in_place
        self._form = form
        self._layers: list[tuple[list[_BufferPool], ...]] = []

    def targets(self) -> list[dict[str, Target]]:
        if not self._layers:
            self._layers = [
                tuple([self._made(*form) for form in side.arrays(self._tokens)] for side in layer)
                for layer in self._form.layers
            ]
            if self._in_place:
                mx.eval([room.array for layer in self._layers for side in layer for room in side])
        rooms = [
            (name, room, room.bytes())
            for number, layer in enumerate(self._layers)
            for name, room in _named(number, layer, lambda side: side)
        ]
        return [
            {
                TOKENS: Target("uint32", (self._block_size,), [self._tokens_of(block)]),
                **{name: self._target(room, data, block) for name, room, data in rooms},
            }
            for block in range(self.blocks)
        ]

    @property
    def nbytes(self) -> int:
        return sum(room.nbytes for layer in self._layers for side in layer for room in side)

    def segment(self) -> Segment:
        segment = Segment(
            tuple(
                (
                    forms[0].side([room.read() for room in keys]),
                    forms[1].side([room.read() for room in values]),
                )
                for forms, (keys, values) in zip(self._form.layers, self._layers, strict=True)
            ),
            length=self._tokens,
        )
        mx.eval([col.arrays(*layer) for layer in segment.layers])
        return segment

    def _made(self, shape: tuple[int, ...], dtype: mx.Dtype) -> _BufferPool:
        return _BufferPool.allocate(shape, dtype, in_place=self._in_place)

    def _tokens_of(self, block: int) -> NDArray[np.uint8]:
        size = self._block_size
        return self.tokens[block * size : (block + 1) * size].view(np.uint8)

    def _target(self, room: _BufferPool, data: NDArray[np.uint8], block: int) -> Target:
        _, heads, count, *rest = room.array.shape
        count //= self.blocks  # per block
        return Target(
            room.dtype,
            (1, heads, count, *rest),
            [part[block * count : (block + 1) * count].reshape(-1) for part in data],
        )


@dataclass(frozen=True, slots=True)
class _BufferPool:
    """One array of a restore buffer: MLX's, or NumPy's if the host cannot access MLX's memory."""

    dtype: str
    array: mx.array | NDArray[Any]

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: mx.Dtype, *, in_place: bool) -> _BufferPool:
        name = _name(dtype)
        number = _number(name)
        array = mx.empty(shape, getattr(mx, number)) if in_place else np.empty(shape, number)
        return cls(name, array)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes if isinstance(self.array, mx.array) else 0

    def bytes(self) -> NDArray[np.uint8]:
        _, heads, count, *_ = self.array.shape
        rows = np.asarray(self.array).reshape(heads, count, -1)
        seen: NDArray[np.uint8] = rows.view(np.uint8)
        return seen

    def read(self) -> mx.array:
        array = self.array if isinstance(self.array, mx.array) else mx.array(self.array)
        return array.view(mx.bfloat16) if self.dtype == "bfloat16" else array


def _named(
    number: int, layer: Sequence[_S], arrays: Callable[[_S], Sequence[_A]]
) -> Iterator[tuple[str, _A]]:
    for name, side in zip(_SIDES, layer, strict=True):
        parts = arrays(side)
        for part, array in enumerate(parts):
            yield f"{number}.{name}" + (f".{part}" if len(parts) > 1 else ""), array


def _seen(array: mx.array) -> tuple[NDArray[np.generic], str]:
    """Return an array as NumPy, without a copy if possible, and the name of its dtype."""
    dtype = _name(array.dtype)
    return np.asarray(array.view(mx.uint16) if dtype == "bfloat16" else array), dtype


def _host(parts: Sequence[NDArray[np.generic]], dtype: str, axis: int = 0) -> HostArray:
    if len(parts) == 1:
        (part,) = parts
        return HostArray(dtype, part.shape, np.frombuffer(part.tobytes(), np.uint8))
    whole = np.concatenate(parts, axis)
    return HostArray(dtype, whole.shape, whole.reshape(-1).view(np.uint8))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _number(dtype: str) -> str:
    """Return a NumPy dtype of the same size, as NumPy has no bfloat16."""
    return "uint16" if dtype == "bfloat16" else dtype
