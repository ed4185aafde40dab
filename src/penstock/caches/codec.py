"""Caches that hold tokens in a codec, read as they lie: for mlx-lm's loops, alone or in batches.

    head  [ first tokens, raw ]  codes  [ whole blocks of 64, coded ]  tail  [ 64 at most, raw ]

A sequence that is shorter than `min_quantize_tokens` is all in the head and the tail. Once it is
not, the head is encoded as well, but for the first tokens that are to stay.

A chunk attends to itself in full precision, and to what was before it dequantized, one layer at a
time; it is encoded as soon as it is taken in. A single token is written to the tail. Where
`penstock.attach(model)` was called it reads the codes as they lie; elsewhere they are dequantized
for it, which is as right, and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, ClassVar
from weakref import ref

import mlx.core as mx

from penstock.caches import masks
from penstock.caches.base import LayerCache, agree, check_floating
from penstock.caches.growing import Growing, KVCache
from penstock.caches.masks import Mask
from penstock.config import MIN_QUANTIZE_TOKENS, RAW_FIRST_TOKENS
from penstock.errors import ModelError, SettingError
from penstock.kv import attention, backend
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints, positive, whole
from penstock.kv.codecs import Codec, Coded, Scheme, parse_scheme
from penstock.kv.columns import Side
from penstock.kv.joined_reads import KVData
from penstock.kv.quantization import FORMAT, QuantizationRule
from penstock.kv.segment import PIECE_TOKENS, Layer, dequantized

BLOCK_TOKENS = 64
"""Encoded together; a multiple of every codec's span."""


class Codes(Growing):
    """Keys and values of whole blocks, encoded; of `most` columns the first `kept` never go."""

    step = BLOCK_TOKENS

    def __init__(self, scheme: Scheme, capacity: int | None, most: int | None, kept: int) -> None:
        super().__init__(capacity)
        self.scheme, self.most, self.kept = scheme, most, kept

    @property
    def span(self) -> int:
        """Columns at a multiple of which it can be cut."""
        return max((codec.span for codec in self.scheme.codecs), default=1)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Encode blocks and write them behind the others, a piece at a time; evaluated.

        Raises:
            SettingError: numbers too large for a codec's scales.
        """
        tokens = keys.shape[2]
        size = PIECE_TOKENS if self.most is None else min(PIECE_TOKENS, self.most - self.kept)
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            new = self._encode(keys[:, :, start:stop], values[:, :, start:stop])
            if self.most is not None:
                self._drop(self.offset + stop - start - self.most)
            self.put(new, self.offset + tokens - start)

    def put(self, new: tuple[Side, Side], needed: int) -> None:
        """Write what is encoded behind the others, with room for `needed` columns; evaluated."""
        self._make_room(min(needed, self.most or needed), self.offset, new)
        self._write(self.offset, new)
        self.offset += col.columns(new[0])
        mx.eval(col.arrays(self.keys, self.values))

    def _encode(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        return _encoded(keys, self.scheme.keys), _encoded(values, self.scheme.values)

    def _drop(self, count: int) -> None:
        """Move what is behind the oldest `count` columns that are not kept into their place."""
        if count <= 0:
            return
        for name in ("keys", "values"):
            side = getattr(self, name)
            rest = col.copied(col.take(side, self.kept + count, self.offset))
            setattr(self, name, col.write(side, self.kept, rest))
            mx.eval(col.arrays(getattr(self, name)))
        self.offset -= count

    def _room_for(self, needed: int, held: int) -> int:
        if self.most is not None and self._capacity is None:
            return self.most
        room = super()._room_for(needed, held)
        return room if self.most is None else min(self.most, room)


def _encoded(side: mx.array, codec: Codec | None) -> Side:
    if codec is None:
        return side
    coded = codec.encode(side)
    mx.eval(coded.parts)
    if not bool(coded.is_finite()):
        raise SettingError(
            f"{codec.name} cannot hold numbers as large as {float(mx.abs(side).max()):.3g}: its "
            f"scales are float16; leave this layer in full precision"
        )
    return coded


class TurboQuant(LayerCache):
    """Base of the caches of one sequence and of a batch: reads in place, or dequantized."""

    _given: tuple[ref[mx.array], ref[mx.array]] | None = None
    """Weak references to the keys and values the model attends to next. The model alone keeps them
    alive, since they may be the whole sequence, dequantized."""
    _in_place = False
    """Whether a single token was seen to attend by `attend`."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_given"}

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all that is held, dequantized: (batch, kv_heads, columns, dim); not evaluated."""
        raise NotImplementedError

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """Attend as the model's own attention would: (b, heads, 1, d) -> (b, heads, 1, dim).

        None if the model is to attend to `keys` and `values` itself: those of a chunk, or such
        as it has changed.
        """
        given = self._given
        if given is None or keys is not given[0]() or values is not given[1]():
            return None
        seen = self._seen(mask)
        if len(seen) == 0:
            return None
        self._given, self._in_place = None, True
        queries = attention.in_base_2(queries, scale)
        rows = self._rows()
        mixed_rows = [
            row.attended(queries[i : i + 1] if len(rows) > 1 else queries, row_mask, sinks)
            for i, (row, row_mask) in enumerate(zip(rows, seen, strict=True))
        ]
        return mixed_rows[0] if len(mixed_rows) == 1 else mx.concatenate(mixed_rows, axis=0)

    def _give(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return what the model hands to its attention for a single token.

        All columns, lazily dequantized, until the model was seen to read in place.
        """
        given = (keys, values) if self._in_place else self.keys_and_values()
        self._given = ref(given[0]), ref(given[1])
        return given

    def _check_read(self) -> None:
        """Raise ModelError if what was given out to be read in place was read otherwise."""
        given, self._given = self._given, None
        if given is not None and self._in_place:
            self._in_place = False
            raise ModelError(
                "the last token was not read by penstock's attention, as those before it were: "
                "this cache was moved to another model; call penstock.attach for that one, too"
            )

    def _rows(self) -> Sequence[TurboQuantKVCache]:
        raise NotImplementedError

    def _seen(self, mask: object) -> list[mx.array | None]:
        """Return (1, columns) of booleans, or None for all, for each row.

        Returns nothing if the mask is of another kind.
        """
        raise NotImplementedError


class TurboQuantKVCache(TurboQuant):
    """Keys and values of one sequence in a codec; a drop-in for mlx-lm's `KVCache`.

    Args:
        codec: as `turbo4`, `k8v4`, `kivi5/turbo3.5`.
        min_quantize_tokens: a sequence of fewer tokens stays in full precision; a longer one is
            encoded whole, but for the last tokens, less than two blocks of 64.
        raw_first_tokens: first tokens that stay in full precision all the same, up to whole blocks
            of 64.
        max_size: tokens held at most, at least 128; None is no bound. When it is full, the oldest
            64 that are not kept go together. Of the first tokens, those in full precision stay.
        keep: first tokens that are never dropped.
        capacity: tokens the request can use: so many columns are allocated, once.

    Raises:
        SettingError: there is no such codec, or it is dequantized whenever it is read.
        TypeError, ValueError: a size that is no integer, or out of range.

    >>> cache = TurboQuantKVCache("turbo4", min_quantize_tokens=0)
    >>> k, v = cache.update_and_fetch(mx.zeros((1, 2, 640, 64)), mx.zeros((1, 2, 640, 64)))
    >>> cache.offset, cache.codes.nbytes  # 2 sides of 2 heads of 64 numbers of 4.25 bits
    (640, 87040)
    """

    carried: ClassVar[tuple[str, ...]] = ("codec", "first", "least", "max_size", "keep")
    offset: int

    def __init__(
        self,
        codec: str,
        *,
        min_quantize_tokens: int = MIN_QUANTIZE_TOKENS,
        raw_first_tokens: int = RAW_FIRST_TOKENS,
        max_size: int | None = None,
        keep: int = 0,
        capacity: int | None = None,
    ) -> None:
        rule = QuantizationRule.of(
            codec,
            block_size=BLOCK_TOKENS,
            first_tokens=raw_first_tokens,
            least_tokens=min_quantize_tokens,
        )
        if rule is None:
            raise SettingError(f"kv_cache_quantization {codec} is no codec; use KVCache")
        rule.check_in_place()
        if max_size is not None and positive("max_size", max_size) < 2 * BLOCK_TOKENS:
            raise ValueError(f"max_size must be at least {2 * BLOCK_TOKENS}, not {max_size}")
        if max_size is not None and whole("keep", keep, 0) >= max_size:
            raise ValueError(f"keep must lie in 0..{max_size - 1}, not {keep}")
        if capacity is not None:
            capacity = min(positive("capacity", capacity), max_size or capacity)
        self._set_up(rule.scheme, rule.first_tokens, min_quantize_tokens, max_size, keep, capacity)

    def _set_up(
        self,
        scheme: Scheme,
        first: int,
        least: int,
        max_size: int | None,
        keep: int,
        capacity: int | None,
    ) -> None:
        """Begin empty; `first` tokens stay raw, or as many as leave room for a block of codes."""
        most, kept = None, 0
        if max_size is not None:
            blocks = max_size // BLOCK_TOKENS - 1  # the tail's is left out
            first = min(first, (blocks - 1) * BLOCK_TOKENS)
            most = blocks * BLOCK_TOKENS - first
            kept = min(_blocks(max(0, keep - first)), most - BLOCK_TOKENS)
            least = min(least, first + most)
        self.scheme, self.first, self.max_size, self.keep = scheme, first, max_size, keep
        self.least = least
        room = None if capacity is None else max(BLOCK_TOKENS, _blocks(capacity - first))
        if room is not None and most is not None:
            room = min(room, most)
        raw = min(first, LayerCache.step if capacity is None else _blocks(capacity))
        self.head, self.codes = KVCache(raw or None), Codes(scheme, room, most, kept)
        self._asked = capacity
        self.tail = KVCache(BLOCK_TOKENS)
        self.offset = 0

    @classmethod
    def holding(
        cls,
        scheme: Scheme,
        first: int,
        least: int,
        parts: Sequence[Layer],
        dtypes: Sequence[mx.Dtype],
        capacity: int,
    ) -> TurboQuantKVCache | None:
        """Return a cache that holds copies of consecutive parts in the form they have.

        None if that is not its own: `first` tokens as they are, and the others in the scheme; or
        less than `least` tokens, all as they are.

        Args:
            scheme: of keys and values.
            first: tokens that stay in full precision.
            least: tokens below which all do.
            parts: keys and values, each (1, kv_heads, tokens, dim) or coded.
            dtypes: of keys and values in full precision.
            capacity: tokens that there is to be room for.
        """
        cache = cls.__new__(cls)
        cache._set_up(scheme, first, least, None, 0, capacity)
        codecs = (scheme.keys, scheme.values)
        tokens = sum(col.columns(keys) for keys, _ in parts)
        needed = tokens - first
        short = tokens < least and not any(isinstance(side, Coded) for p in parts for side in p)
        if short:
            cache._begin_raw()
        for part in parts:
            raw = short or cache.head.offset < first
            for side, codec in zip(part, codecs, strict=True):
                held_codec = side.codec if isinstance(side, Coded) else None
                if held_codec != (None if raw else codec):
                    return None
            if raw:
                cache.head.update_and_fetch(*col.arrays(*part))
                mx.eval(cache.head.keys, cache.head.values)
            else:
                cache.codes.put(part, max(needed, col.columns(part[0])))
        keys, values = (
            mx.zeros((1, col.arrays(side)[0].shape[1], 1, _dim(side)), dtype)
            for side, dtype in zip(parts[0], dtypes, strict=True)
        )
        cache.tail._make_room(1, 0, (keys, values))
        mx.eval(cache.tail.keys, cache.tail.values)
        cache.offset = cache.size()
        return cache if short or cache.head.offset <= first else None

    # ---- questions

    @property
    def codec(self) -> str:
        """The name of the scheme."""
        return self.scheme.name

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(store.nbytes for store in self._stores)

    @property
    def capacity(self) -> int:
        """Columns allocated, or before that those asked for."""
        return sum(store.capacity for store in self._stores)

    @property
    def _stores(self) -> tuple[Growing, ...]:
        return self.head, self.codes, self.tail

    def empty(self) -> bool:
        """Tell whether nothing was ever written."""
        return self.tail.empty()

    def size(self) -> int:
        """Count the tokens held."""
        return sum(store.offset for store in self._stores)

    def is_trimmable(self) -> bool:
        """Tell whether `trim` works: as long as nothing was dropped."""
        return self.offset == self.size()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return the mask for the next N tokens, in mlx-lm's form."""
        alone = N == 1 and not self.empty()
        past = self.past(alone=alone)
        if window_size is None or past == self.offset:
            return masks.plain(N, past, window_size, return_array)
        at, own = self.positions(N, alone=alone), mx.arange(self.offset, self.offset + N)
        return masks.by_position(at, own, 0, self.offset + N, window_size)

    def past(self, *, alone: bool) -> int:
        """Return how many columns the next tokens will have in front of them.

        alone: whether it is a single one, in front of which a full tail is committed.
        """
        most, held = self.codes.most, self.size()
        if most is None or not alone or self.tail.offset < BLOCK_TOKENS:
            return held
        return held - max(0, self.codes.offset + BLOCK_TOKENS - most)

    def positions(self, tokens: int, *, alone: bool) -> mx.array:
        """Return the positions of these columns and of so many new tokens."""
        past = self.past(alone=alone)
        kept = min(past, self.first + self.codes.kept)
        behind = mx.arange(self.offset - (past - kept), self.offset + tokens)
        return mx.concatenate([mx.arange(kept), behind])

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all that is held, dequantized: (1, kv_heads, columns, dim); not evaluated."""
        wide = []
        for sides, own in zip(self.sides(), col.arrays(*self.tail._held()), strict=True):
            parts = [
                side.dequantize().astype(own.dtype) if isinstance(side, Coded) else side
                for side in sides
            ]
            wide.append(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2))
        return wide[0], wide[1]

    def sides(self) -> tuple[list[KVData], list[KVData]]:
        """Return keys and values as they are held, in order: (1, kv_heads, n, dim), or coded."""
        held = [store.keys_and_values() for store in self._stores if store.offset]
        return [_one(keys) for keys, _ in held], [_one(values) for _, values in held]

    def _rows(self) -> Sequence[TurboQuantKVCache]:
        return (self,)

    def _seen(self, mask: object) -> list[mx.array | None]:
        if mask is None:
            return [None]
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.size == self.size():
            return [mask.reshape(1, -1)]
        return []

    def _held_shape(self) -> tuple[Any, ...] | None:
        return self.tail._held_shape()

    def _accept_shape(
        self,
        keys: tuple[int, ...],
        values: tuple[int, ...],
        key_dtype: mx.Dtype,
        value_dtype: mx.Dtype,
    ) -> None:
        super()._accept_shape(keys, values, key_dtype, value_dtype)
        if keys[0] != 1:
            raise ValueError(f"keys {keys} are of {keys[0]} rows; merge caches of one to a batch")

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None:
        check_floating(name, dtype)

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        self.scheme.token_bits(key_width, value_width, 16)

    def cut(self, start: int, stop: int) -> Layer:
        """Return columns start..stop-1 in the form they are kept in.

        The first ones, or all as long as none are coded, are as they are: views, or joined where
        some are in the tail. Others are copies of coded ones, those of the tail encoded. The two
        are asked for by themselves.

        Raises:
            SettingError: numbers too large for the codec in the tail.
        """
        short = self.head.offset > self.first or self.offset < self.least
        if stop <= self.first or (short and not self.codes.offset):
            keys, values = (col.between(list(parts), start, stop) for parts in self.sides())
            return keys, values
        first, end = self.head.offset, self.codes.offset
        start, stop = start - first, stop - first
        sides = []
        codecs = (self.scheme.keys, self.scheme.values)
        own = self.tail.keys_and_values()
        for coded, raw, codec in zip(
            (self.codes.keys, self.codes.values), own, codecs, strict=True
        ):
            parts = []
            if start < end:
                assert coded is not None
                parts.append(col.take(coded, start, min(stop, end)))
            if stop > end:
                (rest,) = col.arrays(col.take(raw, max(0, start - end), stop - end))
                parts.append(_encoded(rest, codec))
            sides.append(col.copied(parts[0]) if len(parts) == 1 else col.join(*parts))
        mx.eval(col.arrays(*sides))
        return sides[0], sides[1]

    def attended(
        self, queries: mx.array, seen: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        """Read all columns under one softmax: (1, heads, 1, d), scaled, -> (1, heads, 1, dim)."""
        heads = queries.shape[1]
        keys, values = (
            [side if isinstance(side, Coded) else side.squeeze(0) for side in sides]
            for sides in self.sides()
        )
        stacked = attention.grouped(queries, col.arrays(self.tail.keys)[0].shape[1])
        device = backend.current()
        with device.lane(0):
            part = device.attend_decode(stacked, keys, values, seen)
        if sinks is not None:
            sinks = (sinks.astype(mx.float32) * attention.LOG2_E).reshape(*stacked.shape[:2], 1)
        mixed = attention.ungrouped(attention.merged([part], sinks), 1, heads)
        return mixed.astype(queries.dtype)

    # ---- acts

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take tokens in and return all of them: the new ones raw, the earlier ones dequantized.

        keys, values: (1, kv_heads, tokens, dim). To a single token whose model was seen to read
        in place, itself alone.

        Raises:
            TypeError, ValueError: wrong rank, dtype, heads or widths; the cache is unchanged.
            SettingError: numbers too large for the codec; the cache is of no use any more.
            ModelError: the last token was read in another way than those before it.
        """
        self._check_read()
        if self._accept(keys, values) == 1 and not self.empty():
            self.write(keys, values)
            return self._give(keys, values)
        fetched = [keys, values]
        if past := self.size():
            fetched = [
                dequantized(
                    [(0, at, side) for at, side in col.spread(0, [*sides, new])],
                    1,
                    past + new.shape[2],
                    new.dtype,
                )
                for sides, new in zip(self.sides(), fetched, strict=True)
            ]
        self.take_in(keys, values)
        return fetched[0], fetched[1]

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write one token to the tail, which is committed first if it is full."""
        if self.tail.offset == BLOCK_TOKENS:
            self._seal(*self._emptied())
        self.tail.update_and_fetch(keys, values)
        self.offset += 1

    def take_in(self, keys: mx.array, values: mx.array) -> None:
        """Take in a chunk: its whole blocks are encoded; evaluated."""
        self.offset += keys.shape[2]
        mx.eval(keys, values)  # all of the layers before is computed with them, and let go
        if self.tail.offset:
            before = self._emptied()
            keys = mx.concatenate([before[0], keys], axis=2)
            values = mx.concatenate([before[1], values], axis=2)
        self._seal(keys, values)
        mx.eval(self.tail.keys, self.tail.values)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or as many as there are; return how many.

        0 if something was dropped. A codec that encodes several tokens together is cut where it
        can be; what is left of the last ones is dequantized, and encoded again later.
        """
        if not self.is_trimmable():
            return 0
        self._check_read()
        n = left = min(self.offset, whole("n", n, 0))
        left -= self.tail.trim(left)
        if left and self.codes.offset:
            stays = max(0, self.codes.offset - left)
            left -= self.codes.offset - stays
            self._cut_codes(stays)
        self.head.trim(left)
        self.offset -= n
        return n

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchTurboQuantKVCache:
        """Return a batch of the sequences, in order; each is copied when it is written to first.

        Raises:
            ValueError: no caches, or they differ in codec, settings or shapes.
        """
        return BatchTurboQuantKVCache.merge(caches)

    # ---- parts

    def _emptied(self) -> tuple[mx.array, mx.array]:
        """Take all tokens out of the tail."""
        keys, values = (col.arrays(side)[0] for side in self.tail.keys_and_values())
        self.tail.offset = 0
        return keys, values

    def _seal(self, keys: mx.array, values: mx.array) -> None:
        """Put whole blocks where they stay; the tail, which is empty, takes the rest."""
        tokens, raw = keys.shape[2], self.first
        if not self.codes.offset:
            if self.head.offset + tokens < self.least:
                raw = max(self.first, self.least)
                self._begin_raw()
            elif self.head.offset > self.first:
                keys, values = self._unraw(keys, values)
        tokens, done = keys.shape[2], 0
        if tokens >= BLOCK_TOKENS and self.head.offset < raw:
            done = min(raw - self.head.offset, tokens)
            self.head.update_and_fetch(keys[:, :, :done], values[:, :, :done])
            mx.eval(self.head.keys, self.head.values)
        stop = tokens - (tokens - done) % BLOCK_TOKENS
        if done < stop:
            self.codes.append(keys[:, :, done:stop], values[:, :, done:stop])
        if stop < tokens:
            self.tail.update_and_fetch(keys[:, :, stop:], values[:, :, stop:])
        else:
            self.tail._make_room(1, 0, (keys, values))

    def _begin_raw(self) -> None:
        """Let the head, if it is empty, take as many tokens as a short sequence has."""
        if self.head.empty():
            room = LayerCache.step if self._asked is None else _blocks(self._asked)
            self.head = KVCache(max(BLOCK_TOKENS, min(_blocks(max(self.first, self.least)), room)))

    def _unraw(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the columns to be encoded out of the head; return them with these behind."""
        held = self.head.keys_and_values()
        rest = [
            mx.concatenate([*col.arrays(col.take(side, self.first, self.head.offset)), new], axis=2)
            for side, new in zip(held, (keys, values), strict=True)
        ]
        stays = [col.arrays(col.copied(col.take(side, 0, self.first))) for side in held]
        self.head = KVCache(self.first or None)
        if self.first:
            self.head.update_and_fetch(stays[0][0], stays[1][0])
        mx.eval(rest, col.arrays(self.head.keys, self.head.values))
        return rest[0], rest[1]

    def _cut_codes(self, tokens: int) -> None:
        """Leave so many tokens of the codes; those of a span that is cut go to the tail, empty."""
        span = self.codes.span
        start = tokens // span * span
        if start < tokens:
            dtypes = [part.dtype for part in col.arrays(*self.tail._held())]
            rest = []
            for side, dtype in zip(self.codes.keys_and_values(), dtypes, strict=True):
                piece = col.take(side, start, start + span)
                wide = piece.dequantize().astype(dtype) if isinstance(piece, Coded) else piece
                rest.append(col.take(wide, 0, tokens - start))
            self.tail.update_and_fetch(*(col.arrays(*rest)))
        self.codes.offset = start

    def _state(self) -> tuple[Any, ...]:
        """Return the codes' format, codec, settings, offset, and what head, codes and tail hold."""

        def flat(side: Side | None) -> Any:
            return (side.dim, *side.parts) if isinstance(side, Coded) else side

        codes = (flat(self.codes.keys), flat(self.codes.values), self.codes.offset)
        settings = (FORMAT, self.scheme.name, self.first, self.least, self.max_size, self.keep)
        return *settings, self.offset, self.head.state, codes, self.tail.state

    def _restore(self, state: Sequence[Any]) -> None:
        if state[0] != FORMAT:
            raise ValueError(f"its codes are of format {state[0]}; this penstock has {FORMAT}")
        name, first, least, max_size, keep, offset, head, codes, tail = state[1:]
        self._set_up(parse_scheme(name), first, least, max_size, keep, None)
        self.offset = offset
        self.head, self.tail = KVCache.from_state(head), KVCache.from_state(tail)
        codecs = (self.scheme.keys, self.scheme.values)
        for name, side, codec in zip(("keys", "values"), codes[:2], codecs, strict=True):
            if codec is not None and side is not None:
                side = Coded(codec, tuple(side[1:]), side[0])
            setattr(self.codes, name, side)
        self.codes.offset = codes[2]
        self.codes._capacity = col.columns(self.codes.keys) or None


class BatchTurboQuantKVCache(TurboQuant):
    """Sequences of a batch, each in a `TurboQuantKVCache` of its own: no row is padded in memory.

    To a model it looks left-padded: all rows end in the same column. Prompts of different lengths
    are padded on the right, and announced by `prepare`; the padding is not kept.
    """

    def __init__(self, rows: Sequence[TurboQuantKVCache]) -> None:
        self.rows = list(rows)
        self._ends: list[int] | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token; (batch,) int32."""
        return mx.array([row.offset for row in self.rows], mx.int32)

    @property
    def left_padding(self) -> mx.array:
        """Columns before each row's first one, as models see them; (batch,) int32."""
        return mx.array([self.size() - row.size() for row in self.rows], mx.int32)

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(row.nbytes for row in self.rows)

    @property
    def capacity(self) -> int:
        """Columns allocated for the longest row, or before that those asked for."""
        return max(row.capacity for row in self.rows)

    def empty(self) -> bool:
        """Tell whether nothing was ever written."""
        return all(row.empty() for row in self.rows)

    def size(self) -> int:
        """Count the tokens of the longest row."""
        return max(row.size() for row in self.rows)

    def is_trimmable(self) -> bool:
        """Tell whether `trim` works: as long as nothing was dropped."""
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row, or as many as there are; return how many."""
        if not self.is_trimmable():
            return 0
        self._check_read()
        return max(row.trim(n) for row in self.rows)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """Return (batch, 1, N, columns + N) for the next N tokens."""
        alone = self._alone(N)
        pasts = [row.past(alone=alone) for row in self.rows]
        pads = [max(pasts) - past for past in pasts]
        if window_size is None:
            return masks.causal(N, max(pasts), None, mx.array(pads))
        at = [
            mx.concatenate([mx.full((pad,), -1, mx.int32), row.positions(N, alone=alone)])
            for pad, row in zip(pads, self.rows, strict=True)
        ]
        own = self.offset[:, None, None] + mx.arange(N)
        return masks.by_position(mx.stack(at)[:, None], own, 0, _ALL, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take one chunk in for every row and return all there is, padded on the left.

        keys, values: (batch, kv_heads, tokens, dim). As with one sequence, each row's chunk as it
        is and what was before dequantized; to single tokens that are read in place, themselves
        alone.

        Raises:
            TypeError, ValueError: wrong rank, dtype, batch, heads or widths.
            SettingError, ModelError: as with one sequence.
        """
        self._check_read()
        tokens = self._accept(keys, values)
        if self._alone(tokens):
            for i, row in enumerate(self.rows):
                row.write(keys[i : i + 1], values[i : i + 1])
            return self._give(keys, values)
        past, parts = self.size(), [row.sides() for row in self.rows]
        fetched = []
        for number, new in enumerate((keys, values)):
            placed = [
                (i, at, side)
                for i, row in enumerate(self.rows)
                for at, side in col.spread(past - row.size(), [*parts[i][number], new[i : i + 1]])
            ]
            fetched.append(dequantized(placed, len(self.rows), past + tokens, new.dtype))
        for i, row in enumerate(self.rows):
            count = tokens if self._ends is None else min(tokens, self._ends[i] - row.offset)
            if count > 0:
                row.take_in(keys[i : i + 1, :, :count], values[i : i + 1, :, :count])
        return fetched[0], fetched[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all that is held, dequantized, zeros in front of shorter rows; not evaluated."""
        count = self.size()
        wide = [row.keys_and_values() for row in self.rows]

        def padded(side: mx.array) -> mx.array:
            return mx.pad(side, [(0, 0), (0, 0), (count - side.shape[2], 0), (0, 0)])

        keys, values = (mx.concatenate([padded(row[i]) for row in wide]) for i in (0, 1))
        return keys, values

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce how the next prompts are padded; on right padding `finalize` must follow.

        Raises:
            ValueError: left padding, or right padding without lengths.
        """
        if left_padding is not None and max(ints(left_padding)) > 0:
            raise ValueError("pad on the right: the rows of this batch have no room for padding")
        if right_padding is not None and max(ints(right_padding)) > 0:
            if lengths is None:
                raise ValueError("right_padding needs the lengths of the prompts")
            pairs = zip(self.rows, ints(lengths), strict=True)
            self._ends = [row.offset + length for row, length in pairs]

    def finalize(self) -> None:
        """End the padding that was announced; none of it was kept."""
        self._ends = None

    def filter(self, batch_indices: Any) -> None:
        """Keep the given rows, in the given order."""
        self.rows = [self.rows[row] for row in chosen_rows(batch_indices, len(self.rows))]
        self._shape = None

    def extend(self, other: BatchTurboQuantKVCache) -> None:
        """Append the rows of `other`.

        Raises:
            ValueError: the two differ in codec, settings or shapes.
        """
        agree("extend", [*self.rows, *other.rows])
        self.rows = self.rows + [deepcopy(row) for row in other.rows]
        self._shape = None

    def extract(self, idx: int) -> TurboQuantKVCache:
        """Return one row, copied when it is written to first."""
        return deepcopy(self.rows[idx])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchTurboQuantKVCache:
        """Return a batch of the sequences, in order; each is copied when it is written to first.

        Raises:
            ValueError: no caches, or they differ in codec, settings or shapes.
        """
        agree("merge", caches)
        return cls([deepcopy(cache) for cache in caches])

    # ---- parts

    def _alone(self, tokens: int) -> bool:
        """Tell whether every row takes a single token, behind others."""
        return tokens == 1 and self._ends is None and not any(row.empty() for row in self.rows)

    def _rows(self) -> Sequence[TurboQuantKVCache]:
        return self.rows

    def _seen(self, mask: object) -> list[mx.array | None]:
        rows, count = len(self.rows), self.size()
        if mask is None:
            return [None] * rows
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return []
        if mask.shape not in ((rows, 1, 1, count), (1, 1, 1, count)):
            return []
        row_mask = mx.broadcast_to(mask, (rows, 1, 1, count))
        return [row_mask[i, 0, :, count - row.size() :] for i, row in enumerate(self.rows)]

    def _held_shape(self) -> tuple[Any, ...] | None:
        shapes = (shape for row in self.rows if (shape := row._held_shape()) is not None)
        shape = next(shapes, None)
        return None if shape is None else (len(self.rows), *shape[1:])

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None:
        check_floating(name, dtype)

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        self.rows[0]._accept_widths(key_width, value_width)

    def _state(self) -> tuple[Any, ...]:
        return tuple(row.state for row in self.rows)

    def _restore(self, state: Sequence[Any]) -> None:
        self.rows, self._ends = [TurboQuantKVCache.from_state(row) for row in state], None


_ALL = 2**30
"""More tokens than any cache holds."""


def _dim(side: Side) -> int:
    return side.dim if isinstance(side, Coded) else col.arrays(side)[0].shape[3]


def _one(side: Side) -> KVData:
    assert not isinstance(side, tuple)
    return side


def _blocks(tokens: int) -> int:
    """Return so many tokens, up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
