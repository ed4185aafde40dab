"""Rotation of keys by position (RoPE), derived by applying the model's module to unit vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from penstock.attention.selection.choice_blocks import BLOCK_TOKENS
from penstock.kv.numpy_arrays import Floats

TABLE_BLOCKS = 1_024
"""Number of blocks in a table of cosines and sines; later blocks use it with rotated queries."""
TILE_BLOCKS = 16
"""Number of blocks in a tile of the table, which is one matrix product."""
CenterLoop: TypeAlias = Callable[..., None]
"""Compiled loop for `Rotation.sums`."""
ROPE_NAMES = "rope", "rotary_emb"
"""Attribute names of the RoPE module in a layer."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Rotation:
    """Rotation of keys by position, in pairs of channels.

    Create it with `shared`, so that equal rotations share their tables.

    k'[i] = k[i] * cos(p * angles[i]) + k[partners[i]] * sin(p * angles[i]) at position p.
    """

    angles: npt.NDArray[np.float64]
    partners: npt.NDArray[np.int64]
    _tables: list[Floats] = field(default_factory=list, init=False, repr=False)
    """Table for `sums`, (tiles, 2 * pairs, TILE_BLOCKS); empty until first used."""
    _turns: list[Floats] = field(default_factory=list, init=False, repr=False)
    """Cosines and sines of every `TABLE_BLOCKS`-th block, (n, 2 * pairs)."""
    _device_tables: dict[int, mx.array] = field(default_factory=dict, init=False, repr=False)
    """Tables of `table`, by number."""
    channels: tuple[npt.NDArray[np.int64], ...] = field(init=False, repr=False)
    """First channel of each rotated pair, its partners, and the unrotated channels."""

    def __post_init__(self) -> None:
        turning, numbers = self.angles != 0, np.arange(len(self.angles))
        firsts = np.flatnonzero(turning & (self.partners > numbers))
        places = firsts, self.partners[firsts], np.flatnonzero(~turning)
        object.__setattr__(self, "channels", places)

    @classmethod
    def shared(cls, angles: npt.NDArray[np.float64], partners: npt.NDArray[np.int64]) -> Rotation:
        """Return the existing rotation with these angles and partners, or a new one."""
        key = angles.tobytes() + partners.tobytes()
        known = _in_use.get(key)
        if known is None:
            known = _in_use[key] = cls(angles, partners)
        return known

    @classmethod
    def none(cls, dim: int) -> Rotation:
        """Return the identity rotation."""
        return cls.shared(np.zeros(dim), np.arange(dim))

    def behind(self, still: int) -> Rotation:
        """Return this rotation for keys with `still` channels before, which are not rotated."""
        partners = np.concatenate([np.arange(still), self.partners + still])
        return Rotation.shared(np.concatenate([np.zeros(still), self.angles]), partners)

    @classmethod
    def of(cls, matrix: Floats) -> Rotation:
        """Derive a rotation from the matrix that rotates keys by one position.

        Returns the identity if the matrix does not rotate pairs of channels.
        """
        others = np.abs(matrix) * (1 - np.eye(len(matrix)))
        partners = others.argmax(axis=0)
        sines = matrix[partners, np.arange(len(matrix))]
        angles = np.arctan2(sines, matrix.diagonal()).astype(np.float32)  # as stored in files
        in_pairs = (partners[partners] == np.arange(len(matrix))) & (angles[partners] == -angles)
        if not np.all(in_pairs | (angles == 0)):
            return cls.none(len(matrix))
        return cls.shared(angles.astype(np.float64), partners)

    def turned(
        self, keys: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return keys (kv_heads, n, dim), each rotated by its position in `positions` (n,)."""
        turns = np.outer(positions, self.angles)
        turned: npt.NDArray[np.float64] = keys * np.cos(turns)
        turned += keys[..., self.partners] * np.sin(turns)
        return turned

    def of_blocks(self, first: int, stop: int) -> tuple[Floats, Floats]:
        """Return the mean cosines and sines over the positions of blocks, (blocks, dim) each."""
        return _mean_turns(self.angles, first, stop)

    def sums(
        self,
        queries: Floats,
        vectors: Floats,
        first: int,
        stop: int,
        *,
        loop: CenterLoop | None = None,
    ) -> Floats:
        """Return the products of queries with vectors rotated to each block.

        The channels of a pair have the same cosine and opposite sines, so they share a row of the
        table. The table covers `TABLE_BLOCKS` blocks; for later ones the queries are rotated.

        Args:
            queries: (kv_heads, m, dim).
            vectors: unrotated vectors, (kv_heads, dim).
            first: index of the first block.
            stop: index after the last block.
            loop: compiled loop used instead of NumPy; it releases the GIL.

        Returns:
            Array (kv_heads, m, blocks).
        """
        a, b, still = self.channels
        table, turns = self.turns(stop)
        if loop is not None:
            sums = np.empty((*queries.shape[:2], stop - first), np.float32)
            loop(queries, vectors, a, b, still, table, turns, first, sums)
            return sums
        products = queries * vectors[:, None]
        others = queries * vectors[:, None, self.partners]
        along = (products[..., a] + products[..., b])[:, :, None]
        across = (others[..., a] - others[..., b])[:, :, None]
        cosines, sines = np.split(turns, 2, axis=-1)
        turned = along * cosines + across * sines, across * cosines - along * sines
        # One query's at a time: how a product rounds depends on its shape.
        by_tile = np.concatenate(turned, axis=-1)[..., None, None, :] @ table
        every: Floats = by_tile.astype(np.float32).reshape(*queries.shape[:2], -1)[..., first:stop]
        every += products[..., still].sum(axis=-1, keepdims=True)
        return every

    def turns(self, stop: int) -> tuple[Floats, Floats]:
        """Return the cosines and sines of the blocks before `stop`, as `sums` reads them.

        Returns:
            Those of the first blocks, (tiles, 2 * pairs, TILE_BLOCKS), and of the first block of
            each `TABLE_BLOCKS`, (n, 2 * pairs). They are kept as long as the rotation, but for the
            second part, which is made anew for longer sequences.
        """
        return self._table, self._turned(-(-stop // TABLE_BLOCKS))

    @property
    def _table(self) -> Floats:
        if not self._tables:  # two threads may make the same one
            turns = np.hstack(_mean_turns(self.angles[self.channels[0]], 0, TABLE_BLOCKS))
            shape = TABLE_BLOCKS // TILE_BLOCKS, TILE_BLOCKS, turns.shape[-1]
            tiles = turns.reshape(shape).swapaxes(1, 2)
            self._tables.append(np.ascontiguousarray(tiles))
        return self._tables[0]

    def _turned(self, count: int) -> Floats:
        """Return at least `count` rows of `_turns`."""
        if not self._turns or len(self._turns[-1]) < count:
            steps = np.arange(max(count, 64)) * (TABLE_BLOCKS * BLOCK_TOKENS)
            turns = np.outer(steps, self.angles[self.channels[0]])
            both = np.hstack([np.cos(turns), np.sin(turns)]).astype(np.float32)
            self._turns[:] = [both]
        return self._turns[-1]

    def factors(self, vectors: Floats) -> Floats:
        """Return the matrices that transform queries for `table`, (kv_heads, dim, 2 * pairs + 1).

        Args:
            vectors: unrotated vectors, (kv_heads, dim).
        """
        a, b, still = self.channels
        heads, dim = vectors.shape
        pairs, number = len(a), np.arange(len(a))
        factors = np.zeros((heads, dim, 2 * pairs + 1), np.float32)
        factors[:, a, number] = vectors[:, a]
        factors[:, b, number] = vectors[:, b]
        factors[:, a, pairs + number] = vectors[:, b]
        factors[:, b, pairs + number] = -vectors[:, a]
        factors[:, still, 2 * pairs] = vectors[:, still]
        return factors

    def table(self, first: int, stop: int) -> mx.array:
        """Return a table of the blocks `first..stop - 1`: queries @ `factors` @ table = `sums`.

        Returns:
            Unevaluated array (2 * pairs + 1, blocks) of cosines, sines, and ones.
        """
        columns = []
        for number in range(first // TABLE_BLOCKS, -(-stop // TABLE_BLOCKS)):
            start = number * TABLE_BLOCKS
            if number not in self._device_tables:
                turns = _mean_turns(self.angles[self.channels[0]], start, start + TABLE_BLOCKS)
                ones = np.ones((TABLE_BLOCKS, 1), np.float32)
                self._device_tables[number] = mx.array(
                    np.ascontiguousarray(np.hstack([*turns, ones]).T)
                )
            inside = slice(max(first - start, 0), min(stop - start, TABLE_BLOCKS))
            columns.append(self._device_tables[number][:, inside])
        return columns[0] if len(columns) == 1 else mx.concatenate(columns, axis=1)

    def table_bytes(self, tokens: int) -> int:
        """Return the maximum bytes of the tables for `tokens` tokens, including temporaries."""
        tables = -(-tokens // (BLOCK_TOKENS * TABLE_BLOCKS))
        numbers = TABLE_BLOCKS * 2 * len(self.channels[0])
        return (4 * tables + 4 * 8) * numbers


_in_use: WeakValueDictionary[bytes, Rotation] = WeakValueDictionary()


def _mean_turns(angles: npt.NDArray[np.float64], first: int, stop: int) -> tuple[Floats, Floats]:
    """Return mean cosines and sines of angles over the positions of blocks, (blocks, n) each."""
    around = np.arange(BLOCK_TOKENS) - (BLOCK_TOKENS - 1) / 2
    turns = np.outer(np.arange(first, stop) * BLOCK_TOKENS - around[0], angles)
    mean = np.cos(np.outer(angles, around)).mean(axis=1)
    cosines, sines = ((part(turns) * mean).astype(np.float32) for part in (np.cos, np.sin))
    return cosines, sines


def rotations(model: Any, dims: Sequence[int]) -> list[Rotation]:
    """Return the rotation of each layer, given its head size; equal rotations are shared.

    A layer without a known RoPE module gets the identity, which only makes its index less precise.
    """
    turning = _turning(model)
    if len(turning) != len(dims):  # recurrent layers have no keys, and usually no RoPE
        turning = [rope for rope in turning if rope is not None]
    if len(turning) != len(dims):
        return [Rotation.none(dim) for dim in dims]
    return [rotation_of(rope, dim) for rope, dim in zip(turning, dims, strict=True)]


def rotation_of(rope: Any, dim: int) -> Rotation:
    """Return the rotation that a RoPE module applies to keys of size `dim`, or the identity."""
    if not dim:
        return Rotation.none(0)
    try:
        turned = rope(mx.eye(dim)[None, :, None], offset=1)
        matrix = np.array(turned.astype(mx.float32))[0, :, 0]
    except (TypeError, ValueError, RuntimeError):  # it expects another head size
        return Rotation.none(dim)
    return Rotation.of(matrix)


def _turning(model: Any) -> list[Any]:
    """Return the RoPE module of each layer; None for a layer without one."""
    return [next(_ropes(layer), None) for layer in getattr(model, "layers", ())]


def _ropes(layer: Any) -> Iterator[Any]:
    modules: list[Any] = layer.modules() if isinstance(layer, nn.Module) else []  # type: ignore[no-untyped-call]
    for module in modules:
        yield from filter(callable, map(module.get, ROPE_NAMES))
