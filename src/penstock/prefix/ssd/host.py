"""Between a segment's arrays and the bytes of its blocks in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from penstock.kv import columns as col
from penstock.kv.columns import Side
from penstock.kv.segment import Layer, Segment
from penstock.prefix.ssd.record import HostArray

TOKEN_AXIS = col.TOKEN_AXIS
_SIDES = ("keys", "values")


def host_blocks(segment: Segment, block_size: int) -> list[dict[str, HostArray]]:
    """Copy the whole blocks of a segment, each with the arrays of all layers by name.

    Names are `3.keys` for layer 3, and `3.keys.0`, `3.keys.1`, ... where a side is several arrays.
    Only the thread that owns the segment may call this.
    """
    seen = {name: _seen(array) for name, array in _named(segment)}
    return [
        {
            name: _host(array[:, :, start : start + block_size], dtype)
            for name, (array, dtype) in seen.items()
        }
        for start in range(0, segment.tokens, block_size)
    ]


def segment_of(blocks: Sequence[Mapping[str, HostArray]]) -> Segment:
    """Make one segment of consecutive blocks; evaluated.

    Raises:
        ValueError: the blocks do not hold the same arrays, or none.
    """
    if not blocks or any(block.keys() != blocks[0].keys() for block in blocks):
        raise ValueError("the blocks do not hold the same layers")
    count = len({name.partition(".")[0] for name in blocks[0]})
    layers = []
    for layer in range(count):
        keys, values = (_side(blocks, f"{layer}.{side}") for side in _SIDES)
        layers.append((keys, values))
    mx.eval([col.arrays(*layer) for layer in layers])
    return Segment(tuple(layers))


def _named(segment: Segment) -> Iterator[tuple[str, mx.array]]:
    for number, layer in enumerate(segment.layers):
        yield from _named_sides(number, layer)


def _named_sides(number: int, layer: Layer) -> Iterator[tuple[str, mx.array]]:
    for name, side in zip(_SIDES, layer, strict=True):
        if isinstance(side, mx.array):
            yield f"{number}.{name}", side
        else:
            for part, array in enumerate(side):
                yield f"{number}.{name}.{part}", array


def _seen(array: mx.array) -> tuple[NDArray[np.generic], str]:
    """Return an array as numpy sees it, without a copy where that can be, and its dtype."""
    dtype = str(array.dtype).removeprefix("mlx.core.")
    return np.asarray(array.view(mx.uint16) if dtype == "bfloat16" else array), dtype


def _host(part: NDArray[np.generic], dtype: str) -> HostArray:
    return HostArray(dtype, part.shape, np.frombuffer(part.tobytes(), np.uint8))


def _side(blocks: Sequence[Mapping[str, HostArray]], name: str) -> Side:
    if name in blocks[0]:
        return _joined([block[name] for block in blocks])
    parts = [each for each in blocks[0] if each.startswith(f"{name}.")]
    if not parts:
        raise ValueError(f"the blocks do not hold {name}")
    return tuple(
        _joined([block[f"{name}.{part}"] for block in blocks]) for part in range(len(parts))
    )


def _joined(arrays: Sequence[HostArray]) -> mx.array:
    """Join arrays of consecutive blocks along their tokens."""
    first = arrays[0]
    half = first.dtype == "bfloat16"
    numbers = np.dtype("uint16" if half else first.dtype)
    joined = np.concatenate(
        [array.data.view(numbers).reshape(array.shape) for array in arrays], axis=TOKEN_AXIS
    )
    made = mx.array(joined)
    return made.view(mx.bfloat16) if half else made
