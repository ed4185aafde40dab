"""How the layers of a model turn keys by their position, found by turning unit vectors."""

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
"""Blocks of one table of turns."""
CenterLoop: TypeAlias = Callable[..., None]
"""A compiled loop for `Rotation.sums`."""
ROPE_NAMES = "rope", "rotary_emb"
"""Names of the module that turns the keys of a layer."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Rotation:
    """How keys are rotated by their position: number i of a key turns with one other.

    Make it with `shared`, so that all that turn alike share its tables.

    k'[i] = k[i] * cos(p * angles[i]) + k[partners[i]] * sin(p * angles[i]) at the position p.
    """

    angles: npt.NDArray[np.float64]
    partners: npt.NDArray[np.int64]
    _tables: dict[int, Floats] = field(default_factory=dict, init=False, repr=False)
    _places: tuple[npt.NDArray[np.int64], ...] = field(init=False, repr=False)
    """Numbers that turn, each pair once; their partners; and those that do not turn."""

    def __post_init__(self) -> None:
        turning, numbers = self.angles != 0, np.arange(len(self.angles))
        one = np.flatnonzero(turning & (self.partners > numbers))
        places = one, self.partners[one], np.flatnonzero(~turning)
        object.__setattr__(self, "_places", places)

    @classmethod
    def shared(cls, angles: npt.NDArray[np.float64], partners: npt.NDArray[np.int64]) -> Rotation:
        """Return the rotation with these angles and partners: the one in use, or a new one."""
        key = angles.tobytes() + partners.tobytes()
        known = _in_use.get(key)
        if known is None:
            known = _in_use[key] = cls(angles, partners)
        return known

    @classmethod
    def none(cls, dim: int) -> Rotation:
        """Return the rotation of keys that do not turn."""
        return cls.shared(np.zeros(dim), np.arange(dim))

    @classmethod
    def of(cls, matrix: Floats) -> Rotation:
        """Derive a rotation from the matrix that turns keys by one position: keys @ matrix."""
        others = np.abs(matrix) * (1 - np.eye(len(matrix)))
        partners = others.argmax(axis=0)
        sines = matrix[partners, np.arange(len(matrix))]
        angles = np.arctan2(sines, matrix.diagonal()).astype(np.float32)  # as files hold them
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
        """Return mean cosines and sines of the positions in blocks, (blocks, dim) each."""
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
        """Return the products of queries with vectors that are turned to each block.

        Two numbers that turn with each other have one cosine, and opposite sines: they share a row
        of the tables, which are kept for all blocks up to there.

        Args:
            queries: (kv_heads, m, dim).
            vectors: not turned, (kv_heads, dim).
            first: number of the first block.
            stop: number of the block behind the last.
            loop: compiled, in the place of NumPy: it lets Python's lock go.

        Returns:
            (kv_heads, m, blocks).
        """
        sums = np.empty((*queries.shape[:2], stop - first), np.float32)
        if loop is not None:
            for run in self._runs(first, stop):
                loop(queries, vectors, *self._places, *run, sums)
            return sums
        one, other, still = self._places
        along = queries * vectors[:, None]
        across = queries * vectors[:, None, self.partners]
        factors = np.concatenate(
            [along[..., one] + along[..., other], across[..., one] - across[..., other]], axis=-1
        )
        for table, start, at, count in self._runs(first, stop):
            # One head's at a time: how a product rounds depends on its shape.
            np.matmul(factors, table[:, start : start + count], out=sums[..., at : at + count])
        sums += along[..., still].sum(axis=-1, keepdims=True)
        return sums

    def _runs(self, first: int, stop: int) -> Iterator[tuple[Floats, int, int, int]]:
        """Yield tables, and of each the first column, the place of its sums, and their number."""
        at = first
        while at < stop:
            number, start = divmod(at, TABLE_BLOCKS)
            count = min(TABLE_BLOCKS - start, stop - at)
            if number not in self._tables:  # two threads may make the same one
                blocks = number * TABLE_BLOCKS, (number + 1) * TABLE_BLOCKS
                turns = _mean_turns(self.angles[self._places[0]], *blocks)
                self._tables[number] = np.ascontiguousarray(np.hstack(turns).T)
            yield self._tables[number], start, at - first, count
            at += count

    def table_bytes(self, tokens: int) -> int:
        """Return the most bytes of the tables for `tokens` tokens, and of two being computed."""
        tables = -(-tokens // (BLOCK_TOKENS * TABLE_BLOCKS))
        numbers = TABLE_BLOCKS * 2 * len(self._places[0])
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
    """Return how each layer turns keys of these sizes; layers that turn them alike share one.

    A layer of which that is not found has keys that do not turn. That costs an index some
    precision, and nothing else.
    """
    turning = _turning(model)
    if len(turning) != len(dims):  # layers with states have no keys, and mostly nothing that turns
        turning = [rope for rope in turning if rope is not None]
    if len(turning) != len(dims):
        return [Rotation.none(dim) for dim in dims]
    return [rotation_of(rope, dim) for rope, dim in zip(turning, dims, strict=True)]


def rotation_of(rope: Any, dim: int) -> Rotation:
    """Return how a module of a model turns keys of a size; None turns nothing."""
    if not dim:
        return Rotation.none(0)
    try:
        turned = rope(mx.eye(dim)[None, :, None], offset=1)
        matrix = np.array(turned.astype(mx.float32))[0, :, 0]
    except (TypeError, ValueError, RuntimeError):  # it turns something of another size
        return Rotation.none(dim)
    return Rotation.of(matrix)


def _turning(model: Any) -> list[Any]:
    """Return what turns keys in each layer, None for a layer that has nothing of the kind."""
    return [next(_ropes(layer), None) for layer in getattr(model, "layers", ())]


def _ropes(layer: Any) -> Iterator[Any]:
    modules: list[Any] = layer.modules() if isinstance(layer, nn.Module) else []  # type: ignore[no-untyped-call]
    for module in modules:
        yield from filter(callable, map(module.get, ROPE_NAMES))
