"""Between a segment's arrays and the bytes of its blocks in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from penstock.kv import columns as col
from penstock.kv.segment import Layer, Segment
from penstock.kv.tails import LayerShape
from penstock.prefix.blocks import TokenArray
from penstock.prefix.ssd.record import TOKENS, HostArray, Target

_SIDES = ("keys", "values")


def host_block(segment: Segment, tokens: TokenArray, at: int) -> dict[str, HostArray]:
    """Copy a block out of a segment: its tokens, and the arrays of all layers by name.

    Names are `3.keys` for layer 3, and `3.keys.0`, `3.keys.1`, ... where a side is several arrays.
    Only the thread that owns the segment may call this.

    Args:
        segment: with the block in it.
        tokens: of the block.
        at: tokens of the segment in front of the block.
    """
    stop = at + len(tokens)
    found = {TOKENS: _host(tokens.astype(np.uint32), "uint32")}
    for name, array in _named(segment):
        numbers, dtype = _seen(array)
        span = segment.tokens // numbers.shape[2]  # a codec may hold some tokens together
        found[name] = _host(numbers[:, :, at // span : stop // span], dtype)
    return found


class Landing:
    """Memory for the KV of some blocks, which is filled from files and then is a segment.

    Nothing is copied on the way: the arrays that the files are read into are the segment's. They
    are made by `targets`, in the thread that reads: new memory can take as long as the files.

    Args:
        shapes: of one token in each layer.
        blocks: how many.
        block_size: tokens of a block.
        in_place: whether files can be read into MLX's arrays. Where the device has memory of its
            own they cannot, and are copied there afterwards.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        blocks: int,
        block_size: int,
        *,
        in_place: bool = True,
    ) -> None:
        self.blocks = blocks
        self.tokens = np.empty(blocks * block_size, np.uint32)
        """Of the blocks, once they are read."""
        self._block_size = block_size
        self._in_place = in_place
        self._shapes = tuple(shapes)
        self._layers: list[tuple[_Room, ...]] = []

    def targets(self) -> list[dict[str, Target]]:
        """Take the memory, if it is not taken, and return where the arrays of each block go."""
        if not self._layers:
            self._layers = [
                tuple(self._made(shape, dim) for dim in (shape.key_dim, shape.value_dim))
                for shape in self._shapes
            ]
            if self._in_place:
                mx.eval([room.array for layer in self._layers for room in layer])
        rooms = {
            f"{number}.{name}": (room, room.bytes())
            for number, layer in enumerate(self._layers)
            for name, room in zip(_SIDES, layer, strict=True)
        }
        return [
            {
                TOKENS: Target("uint32", (self._block_size,), [self._tokens_of(block)]),
                **{name: self._target(*room, block) for name, room in rooms.items()},
            }
            for block in range(self.blocks)
        ]

    def segment(self) -> Segment:
        """Return what was read as a segment."""
        layers = []
        for layer in self._layers:
            keys, values = (room.side() for room in layer)
            layers.append((keys, values))
        mx.eval(layers)
        return Segment(tuple(layers))

    def _made(self, shape: LayerShape, dim: int) -> _Room:
        size = (1, shape.kv_heads, self.blocks * self._block_size, dim)
        dtype = _name(shape.dtype)
        number = _number(dtype)
        array = mx.empty(size, getattr(mx, number)) if self._in_place else np.empty(size, number)
        return _Room(dtype, array)

    def _tokens_of(self, block: int) -> NDArray[np.uint8]:
        size = self._block_size
        return self.tokens[block * size : (block + 1) * size].view(np.uint8)

    def _target(self, room: _Room, data: NDArray[np.uint8], block: int) -> Target:
        size = self._block_size
        _, heads, _, dim = room.array.shape
        return Target(
            room.dtype,
            (1, heads, size, dim),
            [each[block * size : (block + 1) * size].reshape(-1) for each in data],
        )


@dataclass(frozen=True, slots=True)
class _Room:
    """One array of a landing: MLX's own, or numpy's where MLX's is out of the host's reach."""

    dtype: str
    array: mx.array | NDArray[Any]

    def bytes(self) -> NDArray[np.uint8]:
        """Return its memory, (heads, tokens, bytes of a row)."""
        seen: NDArray[np.uint8] = np.asarray(self.array)[0].view(np.uint8)
        return seen

    def side(self) -> mx.array:
        """Return it as MLX has it."""
        made = self.array if isinstance(self.array, mx.array) else mx.array(self.array)
        return made.view(mx.bfloat16) if self.dtype == "bfloat16" else made


def _named(segment: Segment) -> Iterator[tuple[str, mx.array]]:
    for number, layer in enumerate(segment.layers):
        yield from _named_sides(number, layer)


def _named_sides(number: int, layer: Layer) -> Iterator[tuple[str, mx.array]]:
    for name, side in zip(_SIDES, layer, strict=True):
        if isinstance(side, mx.array):
            yield f"{number}.{name}", side
        else:
            for part, array in enumerate(col.arrays(side)):
                yield f"{number}.{name}.{part}", array


def _seen(array: mx.array) -> tuple[NDArray[np.generic], str]:
    """Return an array as numpy sees it, without a copy where that can be, and its dtype."""
    dtype = _name(array.dtype)
    return np.asarray(array.view(mx.uint16) if dtype == "bfloat16" else array), dtype


def _host(part: NDArray[np.generic], dtype: str) -> HostArray:
    return HostArray(dtype, part.shape, np.frombuffer(part.tobytes(), np.uint8))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _number(dtype: str) -> str:
    """Return the dtype as which numpy holds the same bytes: it knows no bfloat16."""
    return "uint16" if dtype == "bfloat16" else dtype
