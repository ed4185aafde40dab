"""Immutable runs of keys and values, all layers, cut out of caches and made into caches again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias, TypeVar

import mlx.core as mx
import numpy as np

from penstock.kv import backend
from penstock.kv import columns as col
from penstock.kv.choice_loops import Addresses, side_addresses
from penstock.kv.codecs import Codec, Coded, Cut, Scheme
from penstock.kv.columns import Side
from penstock.kv.states import Checkpoint

_Part = TypeVar("_Part")
_Codecs: TypeAlias = tuple[Codec | None, Codec | None]
"""Codecs of keys and values; None is raw."""
PIECE_TOKENS = 128
"""Encoded or dequantized at a time in each lane, by codecs that take most memory for it; by others
as many more as take no more."""
PIECE_STEP = 64
"""A multiple of every codec's span."""
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

        Addresses of keys, values, and the parts of the index, (layers, 6, 2), see
        `side_addresses`; zeros for what is not there, or held in another form. They are valid as
        long as the segment is.
        """
        if self._addresses is None:
            index = self.index or (None,) * len(self.layers)
            layers = [
                [*map(_address, layer), *_index_addresses(coded)]
                for layer, coded in zip(self.layers, index, strict=True)
            ]
            held = np.array(layers, np.int64).reshape(-1, 2 + INDEX_PARTS, 2)
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
                _code_buffers(number, *layer_sides)
                for number, layer_sides in enumerate(zip(layer, own, strict=True))
            ]
            for layer, own in zip(self.layers, codecs, strict=True)
        ]
        mx.eval([side.parts for layer in buffers for side in layer if side is not None])
        for layer, into in zip(self.layers, buffers, strict=True):
            _encode(layer, into)
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


@dataclass(frozen=True, slots=True)
class _CodeBuffers:
    """Buffers for the codes of one side, written in place; nothing else refers to them."""

    codec: Codec
    parts: list[mx.array]
    dim: int

    def put(self, number: int, part: mx.array, head: int, column: int) -> None:
        """See `Codec.encode_by`."""
        written = col.write(self.parts[number], column, part, head=head)
        assert isinstance(written, mx.array)
        self.parts[number] = written

    def coded(self) -> Coded:
        """Return the keys and values that were put there."""
        return Coded(self.codec, tuple(self.parts), self.dim)


def _code_buffers(number: int, side: Side, codec: Codec | None) -> _CodeBuffers | None:
    """Return the buffers for the codes of a layer's first or second side, in a lane of its own.

    None if that side stays as it is.
    """
    if codec is None or not isinstance(side, mx.array):
        return None
    batch, heads, tokens, dim = side.shape
    codec.token_bits(dim)
    whole = tokens % codec.span or codec.span  # what is no whole span is refused
    like = codec.encode(mx.zeros((batch, heads, whole, dim), side.dtype))  # not computed
    with backend.current().lane(number):
        blank = col.blank(like, tokens)
    assert isinstance(blank, Coded)
    return _CodeBuffers(codec, list(blank.parts), dim)


def _encode(layer: Layer, into: Sequence[_CodeBuffers | None]) -> None:
    """Encode into the targets, piece by piece in all lanes.

    In each lane a piece begins when the arrays of the last one are freed, and is put together
    before. The last pieces may still be computed.
    """
    device = backend.current()
    sides, pieces = {}, []
    for number, (side, buffers) in enumerate(zip(layer, into, strict=True)):
        if buffers is not None and isinstance(side, mx.array):
            cuts = _cuts(side.shape, buffers.codec)
            sides[number] = buffers, buffers.codec.encode_by(cuts, side, buffers.put)
            pieces += [(place, number) for place in range(len(cuts))]
    for lane_pieces in _in_lanes(sorted(pieces)):  # of both sides in turn
        numbers = [number for _, number in lane_pieces]
        for place, number in enumerate(numbers):
            with device.lane(place):
                next(sides[number][1])
        for number in dict.fromkeys(numbers):
            # A last piece is alone: of its side one may be in any lane.
            for place in range(device.lanes):
                if len(numbers) < device.lanes or numbers[place] == number:
                    device.settle(place)
            mx.async_eval(sides[number][0].parts)  # type: ignore[no-untyped-call]


def _piece_tokens(codec: Codec) -> int:
    """Return how many tokens are encoded or dequantized together.

    It is as many as keep within the bytes of the largest codec.
    """
    tokens = int(PIECE_TOKENS * Codec.buffers / codec.buffers)
    return tokens - tokens % PIECE_STEP


def _cuts(shape: Sequence[int], codec: Codec) -> list[Cut]:
    """Return the (heads, tokens) of the pieces of (1, heads, tokens, dim).

    A piece has as many numbers, at most, as `_piece_tokens` of all heads. It has as few heads as
    possible, so that its tokens are contiguous.
    """
    _, heads, tokens, _ = shape
    most = _piece_tokens(codec) * heads
    if tokens > most:
        step, per_cut = most - most % PIECE_STEP, 1
    else:
        step, per_cut = max(1, tokens), max(1, min(heads, most // max(1, tokens)))
    return [
        (slice(head, min(head + per_cut, heads)), slice(start, min(start + step, tokens)))
        for head in range(0, heads, per_cut)
        for start in range(0, tokens, step)
    ]


def _in_lanes(pieces: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """Yield as many pieces as there are lanes at a time."""
    lanes = backend.current().lanes
    for first in range(0, len(pieces), lanes):
        yield pieces[first : first + lanes]


def _sums(array: mx.array) -> mx.array:
    """Sum (..., tokens, width) over the tokens, which is quickest.

    Where that overflows the dtype, sum over the width.
    """
    return array.sum(axis=-1 if array.dtype == mx.float16 else col.TOKEN_AXIS).reshape(-1)


def _all_finite(arrays: Sequence[mx.array]) -> bool:
    return not arrays or bool(
        mx.isfinite(mx.concatenate([array.reshape(-1) for array in arrays])).all()
    )


def placed(parts: Sequence[Side], count: int, dtype: mx.Dtype) -> Side:
    """Copy consecutive parts into one new buffer of `count` columns; evaluated.

    Codes are dequantized to `dtype`, some tokens at a time.
    """
    if not any(isinstance(part, Coded) for part in parts):
        return col.laid([(0, at, part) for at, part in col.spread(0, parts)], 1, count)
    return dequantized([(0, at, part) for at, part in col.spread(0, parts)], 1, count, dtype)


def dequantized(
    parts: Sequence[tuple[int, int, Side]], rows: int, count: int, dtype: mx.Dtype
) -> mx.array:
    """Copy parts, each (row, column, side), into a new array of rows x count; evaluated.

    Codes are dequantized, some tokens at a time.
    """
    wide: Side | None = None
    for row, at, part in parts:
        end = col.columns(part)
        starts, step = range(1), end
        if isinstance(part, Coded):
            step = _piece_tokens(part.codec)
            starts = range(0, end, step)
        for cuts in _in_lanes([(start, min(start + step, end)) for start in starts]):
            pieces = []
            for number, (start, stop) in enumerate(cuts):
                piece = col.take(part, start, stop)
                with backend.current().lane(number):
                    pieces.append(
                        piece.dequantize().astype(dtype) if isinstance(piece, Coded) else piece
                    )
            for (start, _), piece in zip(cuts, pieces, strict=True):
                wide = col.blank(piece, count, rows) if wide is None else wide
                wide = col.write(wide, at + start, piece, row)
            assert isinstance(wide, mx.array)
            mx.eval(wide)
    assert isinstance(wide, mx.array)
    return wide


def bytes_per_token(layers: Sequence[Layer]) -> int:
    """Return the bytes of one token of these layers in a segment."""
    return sum(part.nbytes // part.shape[2] for layer in layers for part in col.arrays(*layer))


def _address(side: Side) -> Addresses:
    is_float32 = isinstance(side, mx.array) and side.dtype == mx.float32
    return side_addresses(np.asarray(side)[0] if is_float32 else None)


def _index_addresses(coded: Coded | None) -> list[Addresses]:
    parts = [] if coded is None else [np.asarray(part)[0] for part in coded.parts]
    return [side_addresses(part) for part in (*parts, *[None] * (INDEX_PARTS - len(parts)))]
