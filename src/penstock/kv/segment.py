"""Immutable runs of keys and values, all layers, cut out of caches and made into caches again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from penstock.kv import backend
from penstock.kv import columns as col
from penstock.kv.attending_loops import PLACES
from penstock.kv.choice_loops import Addresses, side_addresses
from penstock.kv.code_pieces import code_buffers, encode
from penstock.kv.codecs import Codec, Coded, Scheme
from penstock.kv.codecs.spilled import is_spilled
from penstock.kv.columns import Side
from penstock.kv.states import Checkpoint

_Codecs: TypeAlias = tuple[Codec | None, Codec | None]
"""Codecs of keys and values; None is raw."""
INDEX_PARTS = 4
"""Parts of an index, at most: codes and sizes of keys, and of values."""
Layer: TypeAlias = tuple[Side, Side]
"""Keys and values of one layer."""


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of consecutive tokens: per layer keys and values, (1, kv_heads, tokens, width).

    Buffers of just their size, evaluated; `split` and `join` copy, so that dropping a segment
    frees all of its bytes. Checkpoints are handed on: nothing is left behind that has them.
    """

    layers: tuple[Layer, ...]
    """Layers with keys and values, in the model's order."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """States of the recurrent layers, by where they were captured."""
    length: int = 0
    """Number of tokens in a model of recurrent layers alone, which has no keys to count."""
    missing: tuple[int, ...] = ()
    """Number of first tokens that each layer lacks; empty if every layer is complete, as in most
    segments."""
    index: tuple[Coded | None, ...] = ()
    """Index of each layer's keys, see `key_index`; None for a layer without one. Empty if no layer
    has one."""
    _addresses: Addresses | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def cut(cls, layers: Sequence[Layer], start: int, stop: int) -> Segment:
        """Copy columns start..stop-1; evaluated."""
        return cls.views(layers, start, stop).owned(coded=True)

    @classmethod
    def views(cls, layers: Sequence[Layer], start: int, stop: int) -> Segment:
        """Return views of columns start..stop-1, to be encoded or owned at once."""
        return cls(
            tuple(
                (col.take(keys, start, stop), col.take(values, start, stop))
                for keys, values in layers
            ),
            length=stop - start,
        )

    def owned(self, *, coded: bool = False) -> Segment:
        """Return the segment with copies of the sides that may be views, evaluated.

        Those are the raw sides, or with `coded` all.
        """

        def own(side: Side) -> Side:
            return side if isinstance(side, Coded) and not coded else col.copied(side)

        layers = ((own(keys), own(values)) for keys, values in self.layers)
        return self._with(layers, map(_copied, self.index))

    def _with(self, layers: Iterable[Layer], index: Iterable[Coded | None] = ()) -> Segment:
        """Return it with other arrays, evaluated."""
        segment = replace(self, layers=tuple(layers), index=_if_some(index))
        mx.eval([col.arrays(*layer) for layer in segment.layers], col.arrays(*segment.index))
        return segment

    @property
    def tokens(self) -> int:
        """How many tokens' KV it holds, those included that some layers do not hold any more."""
        if not self.layers:
            return self.length
        return col.columns(self.layers[0][0]) + (self.missing[0] if self.missing else 0)

    def columns(self, layer: int, start: int, stop: int) -> tuple[int, int]:
        """Return in which columns of a layer the tokens start..stop-1 are.

        Raises:
            AssertionError: the layer does not hold all of them any more.
        """
        gone = self.missing[layer] if self.missing else 0
        if start < gone and start < stop:
            raise AssertionError(f"layer {layer} does not hold its first {gone} tokens any more")
        return start - gone, stop - gone

    @property
    def addresses(self) -> Addresses:
        """Where compiled loops find each layer's float32 keys and values, and its index.

        Addresses of keys, values, the parts of the index, and the places of what is spilled,
        (layers, 7, 2), see `side_addresses`; zeros for what is not there, or held in another form.
        Spilled keys and values have those of their checksums. They are valid as long as the
        segment is.
        """
        if self._addresses is None:
            index = self.index or (None,) * len(self.layers)
            layers = [
                [*map(_address, layer), *_index_addresses(coded), _place_address(layer[0])]
                for layer, coded in zip(self.layers, index, strict=True)
            ]
            held = np.array(layers, np.int64).reshape(-1, PLACES + 1, 2)
            object.__setattr__(self, "_addresses", held)
        assert self._addresses is not None
        return self._addresses

    @property
    def nbytes(self) -> int:
        """Bytes it holds, those of the checkpoints included."""
        return self.kv_nbytes + self.key_index_nbytes + self.checkpoint_nbytes

    @property
    def kv_nbytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(col.nbytes(*layer) for layer in self.layers)

    @property
    def key_index_nbytes(self) -> int:
        """Bytes of the index of its keys."""
        return col.nbytes(*self.index)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of its checkpoints."""
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints)

    def checkpointed(self, checkpoints: Iterable[Checkpoint]) -> Segment:
        """Return it with these checkpoints in place of its own; keys and values are shared.

        Raises:
            ValueError: two at one position, or one that is not in it.
        """
        ordered = tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.at))
        places = [checkpoint.at for checkpoint in ordered]
        inside = not places or 0 < places[0] <= places[-1] <= self.tokens
        if len(set(places)) < len(places) or not inside:
            raise ValueError(f"checkpoints at {places} of {self.tokens} tokens")
        return replace(self, checkpoints=ordered)

    def encoded(self, scheme: Scheme, raw_layers: Collection[int] = ()) -> Segment:
        """Return it held as a scheme says, some tokens of one layer at a time; evaluated.

        A side that is coded already, or has numbers too large for a codec's scales, stays as it
        is, and is shared with this segment.

        Args:
            scheme: of keys and values.
            raw_layers: numbers of layers that stay as they are.

        Raises:
            ValueError: the tokens, or the size of a head, do not fit a codec.
        """
        codecs: list[_Codecs] = [
            (None, None) if number in raw_layers else (own.keys, own.values)
            for number, own in enumerate(map(scheme.of_layer, range(len(self.layers))))
        ]
        # All that is made, before what pieces leave behind is handed out, larger than it need be.
        buffers = [
            [
                code_buffers(number, *layer_sides)
                for number, layer_sides in enumerate(zip(layer, own, strict=True))
            ]
            for layer, own in zip(self.layers, codecs, strict=True)
        ]
        mx.eval([side.parts for layer in buffers for side in layer if side is not None])
        for layer, into in zip(self.layers, buffers, strict=True):
            encode(layer, into)
        device = backend.current()
        for number in range(device.lanes):
            device.settle(number)
        coded = [[side.coded() if side else None for side in layer] for layer in buffers]
        sides = [(number, side) for layer in coded for number, side in enumerate(layer)]
        finite = [_is_finite(number, side) for number, side in sides if side is not None]
        mx.eval(finite)
        answers = iter(finite)

        def held(old: Side, new: Coded | None) -> Side:
            return old if new is None or not bool(next(answers)) else new

        return replace(
            self,
            layers=tuple(
                (held(keys, into[0]), held(values, into[1]))
                for (keys, values), into in zip(self.layers, coded, strict=True)
            ),
        )

    def is_finite(self) -> bool:
        """Tell whether every number is finite.

        A sequence that shares a segment with a NaN, even masked, gets NaN: weights of 0 x infinity.

        Looks at sums first, a fraction of the work: they are no numbers if one of the summands
        is none. A sum may also overflow; only then is every number looked at.
        """
        parts = [part for layer in self.layers for part in col.arrays(*layer)]
        return _all_finite([_sums(part) for part in parts]) or _all_finite(parts)

    def split(self, at_tokens: int) -> tuple[Segment, Segment]:
        """Return copies of the first `at_tokens` tokens, and of the others."""
        return self._copy(0, at_tokens), self._copy(at_tokens, self.tokens)

    def part(self, start: int, stop: int) -> Segment:
        """Return views of the tokens start..stop-1, without checkpoints; own them at once."""
        index = tuple(one and one.take(start, stop) for one in self.index)
        if not self.missing:
            return replace(Segment.views(self.layers, start, stop), index=index)
        layers = []
        for (keys, values), gone in zip(self.layers, self.missing, strict=True):
            first, last = max(0, start - gone), max(0, stop - gone)
            layers.append((col.take(keys, first, last), col.take(values, first, last)))
        missing = [min(max(0, gone - start), stop - start) for gone in self.missing]
        return Segment(tuple(layers), length=stop - start, missing=_if_any(missing), index=index)

    def _copy(self, start: int, stop: int) -> Segment:
        inside = (checkpoint for checkpoint in self.checkpoints if start < checkpoint.at <= stop)
        return replace(
            self.part(start, stop).owned(coded=True),
            checkpoints=tuple(checkpoint.moved(-start) for checkpoint in inside),
        )

    def thinned(self, gone: Mapping[int, int]) -> Segment:
        """Return the segment without the first tokens of the layers in `gone`.

        Copies the rest of those layers, evaluated. Shares the other layers, and the checkpoints.

        Args:
            gone: how many tokens, by the layer's number; a multiple of the span of its codecs.
        """
        layers, missing = list(self.layers), list(self.missing or [0] * len(self.layers))
        for layer, count in gone.items():
            drop = count - missing[layer]
            if drop > 0:
                missing[layer] = count
                keys, values = layers[layer]
                layers[layer] = (_behind(keys, drop), _behind(values, drop))
        return replace(self, missing=_if_any(missing))._with(layers, self.index)

    def filled(self, source: Segment, at: int) -> Segment:
        """Return the segment with its incomplete layers filled in from `source`.

        Copies those layers, evaluated. Shares the other layers, and the checkpoints.

        Args:
            source: holds the same tokens, in all layers.
            at: which token of it is this one's first.

        Raises:
            ValueError: it does not hold them.
        """
        complete = source.part(at, at + self.tokens)
        if complete.missing or complete.tokens != self.tokens:
            raise ValueError(f"tokens {at} to {at + self.tokens} are not all in {source.tokens}")
        missing = self.missing or [0] * len(self.layers)
        layers = [
            (col.copied(new[0]), col.copied(new[1])) if gone else old
            for old, new, gone in zip(self.layers, complete.layers, missing, strict=True)
        ]
        return replace(self, missing=())._with(layers, self.index)

    def joins(self, other: Segment) -> bool:
        """Tell whether both have equal formats on every side, and joining leaves no hole.

        Where the other segment lacks first tokens of a layer, this one must hold none of that
        layer.
        """
        return self._forms() == other._forms() and all(
            not gone or not col.columns(layer[0])
            for layer, gone in zip(self.layers, other.missing, strict=False)
        )

    def _forms(self) -> list[object]:
        """Return how each side is held: by which codec, as numbers, or as MLX's triple."""
        sides = [side for layer in self.layers for side in layer]
        held = (*sides, *self.index)
        return [side.codec if isinstance(side, Coded) else type(side) for side in held]

    def join(self, *others: Segment) -> Segment:
        """Return one segment of copies of this one's tokens and then the others'; evaluated.

        Raises:
            ValueError: see `joins`.
        """
        segments = (self, *others)
        missing: Sequence[int] = ()
        if any(segment.missing for segment in segments):
            if not all(one.joins(next_one) for one, next_one in pairwise(segments)):
                raise ValueError("some layer would have a hole between two segments")
            none = (0,) * len(self.layers)
            gone = (segment.missing or none for segment in segments)
            missing = [sum(counts) for counts in zip(*gone, strict=True)]
        checkpoints, length = [], 0
        for segment in segments:
            checkpoints += [counts.moved(length) for counts in segment.checkpoints]
            length += segment.tokens
        joined = Segment((), tuple(checkpoints), length, _if_any(missing))
        layers = (
            (col.join(*(keys for keys, _ in layer)), col.join(*(values for _, values in layer)))
            for layer in zip(*(segment.layers for segment in segments), strict=True)
        )
        indexed = all(segment.index for segment in segments)
        parts = zip(*(segment.index for segment in segments), strict=True) if indexed else ()
        return joined._with(layers, map(_joined, parts))


def _if_any(missing: Sequence[int]) -> tuple[int, ...]:
    return tuple(missing) if any(missing) else ()


def _if_some(index: Iterable[Coded | None]) -> tuple[Coded | None, ...]:
    every = tuple(index)
    return every if any(one is not None for one in every) else ()


def _copied(index: Coded | None) -> Coded | None:
    copy = None if index is None else col.copied(index)
    assert copy is None or isinstance(copy, Coded)
    return copy


def _joined(parts: Sequence[Coded | None]) -> Coded | None:
    """Return the index of consecutive keys; None if some of them have none."""
    held = [part for part in parts if part is not None]
    return held[0].join(*held[1:]) if len(held) == len(parts) else None


def _behind(side: Side, count: int) -> Side:
    """Return a copy of the columns behind the first ones."""
    return col.copied(col.take(side, count, col.columns(side)))


def _is_finite(number: int, side: Coded) -> mx.array:
    with backend.current().lane(number):
        return side.is_finite()


def _sums(array: mx.array) -> mx.array:
    """Sum (..., tokens, width) over the tokens, which is quickest.

    Where that overflows the dtype, sum over the width.
    """
    return array.sum(axis=-1 if array.dtype == mx.float16 else col.TOKEN_AXIS).reshape(-1)


def _all_finite(arrays: Sequence[mx.array]) -> bool:
    return not arrays or bool(
        mx.isfinite(mx.concatenate([array.reshape(-1) for array in arrays])).all()
    )


def bytes_per_token(layers: Sequence[Layer]) -> int:
    """Return the bytes of one token of these layers in a segment."""
    return sum(part.nbytes // part.shape[2] for layer in layers for part in col.arrays(*layer))


def _address(side: Side) -> Addresses:
    if is_spilled(side):
        return side_addresses(np.asarray(side.parts[0])[0])
    is_float32 = isinstance(side, mx.array) and side.dtype == mx.float32
    return side_addresses(np.asarray(side)[0] if is_float32 else None)


def _place_address(side: Side) -> Addresses:
    return side_addresses(np.asarray(side.parts[1])[0] if is_spilled(side) else None)


def _index_addresses(coded: Coded | None) -> list[Addresses]:
    parts = [] if coded is None else [np.asarray(part)[0] for part in coded.parts]
    return [side_addresses(part) for part in (*parts, *[None] * (INDEX_PARTS - len(parts)))]
