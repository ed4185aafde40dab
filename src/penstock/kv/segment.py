"""Immutable KV of consecutive tokens in all layers, copied from caches and read by attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx

from penstock.kv import columns as col
from penstock.kv.code_pieces import code_buffers, encode
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.columns import Side
from penstock.kv.states import Checkpoint

_Value = TypeVar("_Value")
_Codecs: TypeAlias = tuple[Codec | None, Codec | None]
"""Codec of keys and codec of values; None is raw."""
Layer: TypeAlias = tuple[Side, Side]


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of consecutive tokens: keys and values of each layer, (1, kv_heads, tokens, dim).

    Arrays are evaluated and have buffers of exact size. `split` and `join` copy, so dropping a
    segment frees all of its bytes, except checkpoints, which are shared.
    """

    layers: tuple[Layer, ...]
    checkpoints: tuple[Checkpoint, ...] = ()
    length: int = 0
    """Number of tokens; used only if the model has no KV, just recurrent layers."""
    missing: tuple[int, ...] = ()
    """Number of leading tokens without KV, by layer; empty if every layer is complete."""
    index: tuple[Coded | None, ...] = ()
    """Index of each layer's keys, see `key_index`, or None; empty if no layer has one."""
    _derived: dict[object, Any] | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def cut(cls, layers: Sequence[Layer], start: int, stop: int) -> Segment:
        return cls.views(layers, start, stop).owned(coded=True)

    @classmethod
    def views(cls, layers: Sequence[Layer], start: int, stop: int) -> Segment:
        return cls(
            tuple(
                (col.take(keys, start, stop), col.take(values, start, stop))
                for keys, values in layers
            ),
            length=stop - start,
        )

    def owned(self, *, coded: bool = False) -> Segment:
        """Copy raw sides, which may be views, and with `coded` also encoded ones; evaluated."""

        def copied(side: Side) -> Side:
            return side if isinstance(side, Coded) and not coded else col.copied(side)

        layers = ((copied(keys), copied(values)) for keys, values in self.layers)
        return self._with(layers, map(_copied, self.index))

    def _with(self, layers: Iterable[Layer], index: Iterable[Coded | None] = ()) -> Segment:
        segment = replace(self, layers=tuple(layers), index=_if_some(index))
        mx.eval([col.arrays(*layer) for layer in segment.layers], col.arrays(*segment.index))
        return segment

    @property
    def tokens(self) -> int:
        if not self.layers:
            return self.length
        return col.columns(self.layers[0][0]) + (self.missing[0] if self.missing else 0)

    def columns(self, layer: int, start: int, stop: int) -> tuple[int, int]:
        """Convert a range of tokens, none of them missing, to columns of a layer."""
        gone = self.missing[layer] if self.missing else 0
        if start < gone and start < stop:
            raise AssertionError(f"layer {layer} no longer has its first {gone} tokens")
        return start - gone, stop - gone

    def derived(self, compute: Callable[[Segment], _Value]) -> _Value:
        """Return `compute(self)`, computed once and cached in the segment."""
        if self._derived is None:
            object.__setattr__(self, "_derived", {})
        assert self._derived is not None
        if compute not in self._derived:
            self._derived[compute] = compute(self)
        value: _Value = self._derived[compute]
        return value

    @property
    def nbytes(self) -> int:
        return self.kv_nbytes + self.key_index_nbytes + self.checkpoint_nbytes

    @property
    def kv_nbytes(self) -> int:
        return sum(col.nbytes(*layer) for layer in self.layers)

    @property
    def key_index_nbytes(self) -> int:
        return col.nbytes(*self.index)

    @property
    def checkpoint_nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints)

    def checkpointed(self, checkpoints: Iterable[Checkpoint]) -> Segment:
        ordered = tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.offset))
        places = [checkpoint.offset for checkpoint in ordered]
        inside = not places or 0 < places[0] <= places[-1] <= self.tokens
        if len(set(places)) < len(places) or not inside:
            raise ValueError(f"checkpoints at {places} of {self.tokens} tokens")
        return replace(self, checkpoints=ordered)

    def encoded(self, scheme: Scheme, ops: CodeOps, raw_layers: Collection[int] = ()) -> Segment:
        """Return a segment encoded by a scheme, evaluated.

        A side is shared unchanged if it is already encoded, if a value is too large for the codec's
        scales, or if its layer is in `raw_layers`. A spilled side stays in the tier, and is read as
        if quantized by the codec.

        Raises:
            ValueError: the number of tokens or the head size does not fit a codec.
        """
        codecs: list[_Codecs] = [
            (None, None) if number in raw_layers else (codecs_of.keys, codecs_of.values)
            for number, codecs_of in enumerate(map(scheme.of_layer, range(len(self.layers))))
        ]
        # All results are allocated first: later MLX could reuse larger buffers freed by pieces.
        buffers = [
            [
                code_buffers(number, *layer_sides, ops)
                for number, layer_sides in enumerate(zip(layer, codecs_of, strict=True))
            ]
            for layer, codecs_of in zip(self.layers, codecs, strict=True)
        ]
        mx.eval([side.parts for layer in buffers for side in layer if side is not None])
        for layer, into in zip(self.layers, buffers, strict=True):
            encode(layer, into, ops)
        for number in range(ops.lanes):
            ops.settle(number)
        coded = [[side.coded() if side else None for side in layer] for layer in buffers]
        sides = [(number, side) for layer in coded for number, side in enumerate(layer)]
        finite = [_is_finite(number, side, ops) for number, side in sides if side is not None]
        mx.eval(finite)
        answers = iter(finite)

        def finished(old: Side, new: Coded | None, codec: Codec | None) -> Side:
            if isinstance(old, Coded) and codec is not None:
                return old.codec.at_rest(old, codec)
            return old if new is None or not bool(next(answers)) else new

        return replace(
            self,
            layers=tuple(
                (finished(keys, into[0], of[0]), finished(values, into[1], of[1]))
                for (keys, values), into, of in zip(self.layers, coded, codecs, strict=True)
            ),
        )

    def is_finite(self) -> bool:
        """Return whether all values are finite.

        A NaN in a shared segment spreads even if masked, because 0 x NaN is NaN.

        Checks sums first, which is cheaper: a sum is finite only if all summands are. As a sum may
        also overflow, all values are checked if one is not finite.
        """
        parts = [part for layer in self.layers for part in col.arrays(*layer)]
        return _all_finite([_sums(part) for part in parts]) or _all_finite(parts)

    def split(self, at_tokens: int) -> tuple[Segment, Segment]:
        return self._copy(0, at_tokens), self._copy(at_tokens, self.tokens)

    def part(self, start: int, stop: int) -> Segment:
        """Return views of tokens `start..stop - 1`, without checkpoints; the caller copies them."""
        index = tuple(layer_index and layer_index.take(start, stop) for layer_index in self.index)
        if not self.missing:
            return replace(Segment.views(self.layers, start, stop), index=index)
        layers = []
        for (keys, values), gone in zip(self.layers, self.missing, strict=True):
            first, last = max(0, start - gone), max(0, stop - gone)
            layers.append((col.take(keys, first, last), col.take(values, first, last)))
        missing = [min(max(0, gone - start), stop - start) for gone in self.missing]
        return Segment(tuple(layers), length=stop - start, missing=_if_any(missing), index=index)

    def _copy(self, start: int, stop: int) -> Segment:
        inside = (
            checkpoint for checkpoint in self.checkpoints if start < checkpoint.offset <= stop
        )
        return replace(
            self.part(start, stop).owned(coded=True),
            checkpoints=tuple(checkpoint.moved(-start) for checkpoint in inside),
        )

    def thinned(self, gone: Mapping[int, int]) -> Segment:
        """Return a segment without the KV of the first `gone[layer]` tokens of some layers.

        These numbers are multiples of the span of the layer's codecs. The rest of those layers is
        copied, evaluated; the other layers and the checkpoints are shared.
        """
        layers, missing = list(self.layers), list(self.missing or [0] * len(self.layers))
        for layer, count in gone.items():
            drop = count - missing[layer]
            if drop > 0:
                missing[layer] = count
                keys, values = layers[layer]
                layers[layer] = (_behind(keys, drop), _behind(values, drop))
        return replace(self, missing=_if_any(missing))._with(layers, self.index)

    def filled(self, source: Segment, start: int) -> Segment:
        """Return this segment with incomplete layers copied from the same tokens of `source`.

        Args:
            source: segment that has these tokens in all layers.
            start: index in `source` of this segment's first token.

        Raises:
            ValueError: `source` lacks some of the tokens.
        """
        complete = source.part(start, start + self.tokens)
        if complete.missing or complete.tokens != self.tokens:
            raise ValueError(
                f"tokens {start} to {start + self.tokens} are not all in {source.tokens}"
            )
        missing = self.missing or [0] * len(self.layers)
        layers = [
            (col.copied(new[0]), col.copied(new[1])) if gone else old
            for old, new, gone in zip(self.layers, complete.layers, missing, strict=True)
        ]
        return replace(self, missing=())._with(layers, self.index)

    def joins(self, other: Segment) -> bool:
        """Return whether `other` can be joined: formats match, and no layer would have a gap.

        If `other` lacks leading tokens of a layer, this segment must lack all of that layer.
        """
        return self._forms() == other._forms() and all(
            not gone or not col.columns(layer[0])
            for layer, gone in zip(self.layers, other.missing, strict=False)
        )

    def _forms(self) -> list[object]:
        sides = [side for layer in self.layers for side in layer]
        everything = (*sides, *self.index)
        return [side.codec if isinstance(side, Coded) else type(side) for side in everything]

    def join(self, *others: Segment) -> Segment:
        segments = (self, *others)
        missing: Sequence[int] = ()
        if any(segment.missing for segment in segments):
            if not all(left.joins(right) for left, right in pairwise(segments)):
                raise ValueError("a layer would have a gap between two segments")
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


@dataclass(frozen=True, slots=True)
class KVSpan:
    """The first `columns` columns of a segment, starting at position `start`."""

    segment: Segment
    start: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.columns


ColumnRange = tuple[Segment, int, int]
"""Columns `start..stop - 1` of a segment."""


def _if_any(missing: Sequence[int]) -> tuple[int, ...]:
    return tuple(missing) if any(missing) else ()


def _if_some(index: Iterable[Coded | None]) -> tuple[Coded | None, ...]:
    every = tuple(index)
    return every if any(layer_index is not None for layer_index in every) else ()


def _copied(index: Coded | None) -> Coded | None:
    copy = None if index is None else col.copied(index)
    assert copy is None or isinstance(copy, Coded)
    return copy


def _joined(parts: Sequence[Coded | None]) -> Coded | None:
    """Join the indexes of consecutive keys; None if any is missing."""
    present = [part for part in parts if part is not None]
    return present[0].join(*present[1:]) if len(present) == len(parts) else None


def _behind(side: Side, count: int) -> Side:
    return col.copied(col.take(side, count, col.columns(side)))


def _is_finite(number: int, side: Coded, ops: CodeOps) -> mx.array:
    with ops.lane(number):
        return side.is_finite()


def _sums(array: mx.array) -> mx.array:
    """Sum (..., tokens, dim) over the tokens, or over dim for float16, which would overflow."""
    return array.sum(axis=-1 if array.dtype == mx.float16 else col.TOKEN_AXIS).reshape(-1)


def _all_finite(arrays: Sequence[mx.array]) -> bool:
    return not arrays or bool(
        mx.isfinite(mx.concatenate([array.reshape(-1) for array in arrays])).all()
    )


def bytes_per_token(layers: Sequence[Layer]) -> int:
    return sum(part.nbytes // part.shape[2] for layer in layers for part in col.arrays(*layer))
