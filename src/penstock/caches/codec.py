"""Caches of KV encoded by a codec and read in place, for mlx-lm's loops, single or batched.

    head  [ first tokens, raw ]  codes  [ whole blocks of 64, coded ]  tail  [ 64 at most, raw ]

A sequence shorter than `min_quantize_tokens` is entirely in the head and the tail. Once it is
longer, the head is encoded too, except for `raw_first_tokens`.

A chunk attends to itself in full precision, and to earlier tokens dequantized, one layer at a
time; then it is encoded. A single token is written to the tail. It attends to the codes in place
after `penstock.attach(model)`; otherwise they are dequantized, which is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, ClassVar, Self
from weakref import ref

import mlx.core as mx

from penstock.attention import devices, span_attention
from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.joined_reads import SideData
from penstock.caches.base import LayerCache, agree, check_floating, ends_of
from penstock.caches.codes import BLOCK_TOKENS, Codes, dim_of, encoded, whole_blocks
from penstock.caches.growing import Growing, KVCache
from penstock.caches.masks import Mask, by_position, causal, plain
from penstock.config import MIN_QUANTIZE_TOKENS, RAW_FIRST_TOKENS
from penstock.errors import ModelError, SettingError
from penstock.kv import columns as col
from penstock.kv.checks import chosen_rows, ints, positive, whole
from penstock.kv.code_pieces import dequantized
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.columns import Side
from penstock.kv.quantization import FORMAT, QuantizationRule
from penstock.kv.segment import Layer

LEAST_WINDOW = 2 * BLOCK_TOKENS
"""Tokens of the smallest window: a block of codes, and one that is not encoded yet."""
_ALL = 2**30
"""Number larger than that of any cache's tokens."""


class TurboQuant(LayerCache):
    """Base class of codec caches, for one sequence or a batch."""

    _given: tuple[ref[mx.array], ref[mx.array]] | None = None
    """Weak references to the keys and values returned last. Only the model keeps them alive, since
    they may be the whole sequence, dequantized."""
    _in_place = False
    """Whether the model has called `attend` for a single token."""

    @property
    def _device(self) -> AttentionBackend:
        return devices.current()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all columns, dequantized, (batch, kv_heads, columns, dim); not evaluated."""
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
        """Attend to the codes in place: (b, heads, 1, d) -> (b, heads, 1, dim).

        Returns None if the model must attend to `keys` and `values` itself, because they are those
        of a chunk, or the model has changed them.
        """
        expected = self._given
        if expected is None or keys is not expected[0]() or values is not expected[1]():
            return None
        seen = self._seen(mask)
        if len(seen) == 0:
            return None
        self._given, self._in_place = None, True
        queries = span_attention.in_base_2(queries, scale)
        rows = self._rows()
        mixed_rows = [
            row.attended(queries[i : i + 1] if len(rows) > 1 else queries, row_mask, sinks)
            for i, (row, row_mask) in enumerate(zip(rows, seen, strict=True))
        ]
        return mixed_rows[0] if len(mixed_rows) == 1 else mx.concatenate(mixed_rows, axis=0)

    def attended(
        self, queries: mx.array, seen: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        """Compute attention over one sequence: (1, heads, 1, d) -> (1, heads, 1, dim)."""
        raise NotImplementedError

    def _give(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values that a model gets for a single token.

        These are all columns, lazily dequantized, until the model has called `attend` once.
        """
        sides = (keys, values) if self._in_place else self.keys_and_values()
        self._given = ref(sides[0]), ref(sides[1])
        return sides

    def _check_read(self) -> None:
        """Raise ModelError if the model stopped calling `attend`."""
        unread, self._given = self._given, None
        if unread is not None and self._in_place:
            self._in_place = False
            raise ModelError(
                "the last token did not use penstock's attention, unlike earlier ones: the cache "
                "was passed to another model; call penstock.attach for that model, too"
            )

    def _accept_dtype(self, name: str, dtype: mx.Dtype) -> None:
        check_floating(name, dtype)

    def _rows(self) -> Sequence[TurboQuant]:
        raise NotImplementedError

    def _seen(self, mask: object) -> list[mx.array | None]:
        """Return each row's mask, (1, columns), or None for all columns; [] if unsupported."""
        raise NotImplementedError


class TurboQuantKVCache(TurboQuant):
    """Keys and values of one sequence, encoded by a codec; a drop-in for mlx-lm's `KVCache`.

    Args:
        codec: name of the codec, such as `turbo4`, `k8v4`, `kivi5/turbo3.5`.
        min_quantize_tokens: sequences of fewer tokens stay in full precision; longer ones are
            encoded, except for the last tokens, fewer than two blocks of 64.
        raw_first_tokens: number of first tokens kept in full precision, rounded up to blocks
            of 64.
        max_size: maximum number of tokens, at least 128; None means unlimited. When full, the
            cache drops the 64 oldest tokens that are neither among the first `keep` nor in full
            precision.
        keep: number of first tokens that are never dropped.
        capacity: number of columns to allocate at first, for the tokens that the request can use.

    Raises:
        SettingError: the codec does not exist.
        TypeError, ValueError: a size is not an integer or out of range.

    >>> cache = TurboQuantKVCache("turbo4", min_quantize_tokens=0)
    >>> k, v = cache.update_and_fetch(mx.zeros((1, 2, 640, 64)), mx.zeros((1, 2, 640, 64)))
    >>> cache.offset, cache.codes.nbytes  # 640 tokens, 2 sides, 2 heads, 64 values of 4.25 bits
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
        if rule.is_raw:
            raise SettingError(f"kv_cache_quantization {codec} is not a codec; use KVCache")
        if max_size is not None and positive("max_size", max_size) < LEAST_WINDOW:
            raise SettingError(f"max_size must be at least {LEAST_WINDOW}, not {max_size}")
        if max_size is not None and whole("keep", keep, 0) >= max_size:
            raise SettingError(f"keep must lie in 0..{max_size - 1}, not {keep}")
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
        """Initialize an empty cache; `first` is lowered to leave room for codes in `max_size`."""
        most_coded, kept = None, 0
        if max_size is not None:
            blocks = max_size // BLOCK_TOKENS - 1  # without the tail's block
            first = min(first, (blocks - 1) * BLOCK_TOKENS)
            most_coded = blocks * BLOCK_TOKENS - first
            kept = min(whole_blocks(max(0, keep - first)), most_coded - BLOCK_TOKENS)
            least = min(least, first + most_coded)
        self.scheme, self.first, self.max_size, self.keep = scheme, first, max_size, keep
        self.least = least
        room = None if capacity is None else max(BLOCK_TOKENS, whole_blocks(capacity - first))
        if room is not None and most_coded is not None:
            room = min(room, most_coded)
        raw = min(first, LayerCache.step if capacity is None else whole_blocks(capacity))
        self.head, self.codes = KVCache(raw or None), Codes(scheme, room, most_coded, kept)
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
        """Return a cache with copies of consecutive parts, without changing their format.

        Returns None if a cache would store the tokens in another format: `first` tokens raw and
        the others encoded, or all raw if there are fewer than `least`.

        Args:
            scheme: codecs of keys and values.
            first: number of first tokens in full precision.
            least: number of tokens from which on a sequence is encoded.
            parts: keys and values, each (1, kv_heads, tokens, dim) or encoded.
            dtypes: dtypes of keys and values in full precision.
            capacity: number of columns to allocate.
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
            mx.zeros((1, col.arrays(side)[0].shape[1], 1, dim_of(side)), dtype)
            for side, dtype in zip(parts[0], dtypes, strict=True)
        )
        cache.tail._make_room(1, 0, (keys, values))
        mx.eval(cache.tail.keys, cache.tail.values)
        cache.offset = cache.size()
        return cache if short or cache.head.offset <= first else None

    @property
    def codec(self) -> str:
        return self.scheme.name

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    @property
    def capacity(self) -> int:
        return sum(store.capacity for store in self._stores)

    @property
    def _stores(self) -> tuple[Growing, ...]:
        return self.head, self.codes, self.tail

    def empty(self) -> bool:
        return self.tail.empty()

    def size(self) -> int:
        return sum(store.offset for store in self._stores)

    def is_trimmable(self) -> bool:
        return self.offset == self.size()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        alone = N == 1 and not self.empty()
        past = self.past(alone=alone)
        if window_size is None or past == self.offset:
            return plain(N, past, window_size, return_array)
        columns, queries = self.positions(N, alone=alone), mx.arange(self.offset, self.offset + N)
        return by_position(columns, queries, 0, self.offset + N, window_size)

    def past(self, *, alone: bool) -> int:
        """Return the number of columns that the next tokens can attend to, besides their own.

        If the next token is a single one (`alone`), a full tail is encoded first, which may drop
        the oldest block.
        """
        limit, tokens = self.codes.max_columns, self.size()
        if limit is None or not alone or self.tail.offset < BLOCK_TOKENS:
            return tokens
        return tokens - max(0, self.codes.offset + BLOCK_TOKENS - limit)

    def positions(self, tokens: int, *, alone: bool) -> mx.array:
        """Return the positions of the cached columns and of `tokens` new tokens."""
        past = self.past(alone=alone)
        kept = min(past, self.first + self.codes.kept)
        behind = mx.arange(self.offset - (past - kept), self.offset + tokens)
        return mx.concatenate([mx.arange(kept), behind])

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all columns, dequantized, (1, kv_heads, columns, dim); not evaluated."""
        dequantized_sides = []
        for sides, tail in zip(self.sides(), col.arrays(*self.tail._held()), strict=True):
            parts = [
                side.dequantize(self._device).astype(tail.dtype)
                if isinstance(side, Coded)
                else side
                for side in sides
            ]
            dequantized_sides.append(mx.concatenate(parts, axis=2))
        return dequantized_sides[0], dequantized_sides[1]

    def sides(self) -> tuple[list[SideData], list[SideData]]:
        """Return keys and values as stored, in order: arrays (1, kv_heads, n, dim) or `Coded`."""
        stored = [store.keys_and_values() for store in self._stores if store.offset]
        return [_one(keys) for keys, _ in stored], [_one(values) for _, values in stored]

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
            raise ValueError(
                f"keys {keys} have {keys[0]} rows; for a batch, merge caches of one row each"
            )

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        self.scheme.token_bits(key_width, value_width, 16)

    def cut(self, start: int, stop: int) -> Layer:
        """Return columns start..stop-1 in their final format.

        Raw columns are returned as views, or concatenated if some are in the tail. Encoded ones are
        copied, and those in the tail encoded. A range must be entirely raw or entirely encoded.

        Raises:
            SettingError: a value in the tail is too large for the codec.
        """
        short = self.head.offset > self.first or self.offset < self.least
        if stop <= self.first or (short and not self.codes.offset):
            keys, values = (col.between(list(parts), start, stop) for parts in self.sides())
            return keys, values
        first, end = self.head.offset, self.codes.offset
        start, stop = start - first, stop - first
        sides = []
        codecs = (self.scheme.keys, self.scheme.values)
        tail_sides = self.tail.keys_and_values()
        for coded, raw, codec in zip(
            (self.codes.keys, self.codes.values), tail_sides, codecs, strict=True
        ):
            parts = []
            if start < end:
                assert coded is not None
                parts.append(col.take(coded, start, min(stop, end)))
            if stop > end:
                (rest,) = col.arrays(col.take(raw, max(0, start - end), stop - end))
                parts.append(encoded(rest, codec, self._device))
            sides.append(col.copied(parts[0]) if len(parts) == 1 else col.join(*parts))
        mx.eval(col.arrays(*sides))
        return sides[0], sides[1]

    def attended(
        self, queries: mx.array, seen: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        heads = queries.shape[1]
        keys, values = (
            [side if isinstance(side, Coded) else side.squeeze(0) for side in sides]
            for sides in self.sides()
        )
        stacked = span_attention.grouped(queries, col.arrays(self.tail.keys)[0].shape[1])
        with self._device.lane(0):
            part = self._device.attend_decode(stacked, keys, values, seen)
        if sinks is not None:
            sinks = (sinks.astype(mx.float32) * span_attention.LOG2_E).reshape(
                *stacked.shape[:2], 1
            )
        mixed = span_attention.ungrouped(span_attention.merged([part], sinks), 1, heads)
        return mixed.astype(queries.dtype)

    # ---- updates

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens, (1, kv_heads, tokens, dim), and return the KV to attend to.

        That is all tokens, the earlier ones dequantized; or only the new token, if it is a single
        one and the model calls `attend`.

        Raises:
            TypeError, ValueError: wrong rank, dtype, heads or dims; the cache is unchanged.
            SettingError: a value is too large for the codec; the cache is unusable afterwards.
            ModelError: the model did not call `attend` for the last token, but did before.
        """
        self._check_read()
        if self._accept(keys, values) == 1 and not self.empty():
            self.write(keys, values)
            return self._give(keys, values)
        fetched = [keys, values]
        if past := self.size():
            fetched = [
                dequantized(
                    [(0, column, side) for column, side in col.spread(0, [*sides, new])],
                    1,
                    past + new.shape[2],
                    new.dtype,
                    self._device,
                )
                for sides, new in zip(self.sides(), fetched, strict=True)
            ]
        self.take_in(keys, values)
        return fetched[0], fetched[1]

    def write(self, keys: mx.array, values: mx.array) -> None:
        if self.tail.offset == BLOCK_TOKENS:
            self._commit(*self._emptied())
        self.tail.update_and_fetch(keys, values)
        self.offset += 1

    def take_in(self, keys: mx.array, values: mx.array) -> None:
        """Append a chunk, encoding its whole blocks; evaluated."""
        self.offset += keys.shape[2]
        mx.eval(keys, values)  # also computes the previous layers, and frees their KV
        if self.tail.offset:
            before = self._emptied()
            keys = mx.concatenate([before[0], keys], axis=2)
            values = mx.concatenate([before[1], values], axis=2)
        self._commit(keys, values)
        mx.eval(self.tail.keys, self.tail.values)

    def trim(self, n: int) -> int:
        """Drop up to `n` of the last tokens; return the number dropped.

        Returns 0 if the window has dropped tokens. If the new end is inside a span of tokens that
        the codec encodes together, the rest of that span is dequantized, and encoded again later.
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
        """Return a batch of copies of the sequences."""
        return BatchTurboQuantKVCache.merge(caches)

    def _emptied(self) -> tuple[mx.array, mx.array]:
        keys, values = (col.arrays(side)[0] for side in self.tail.keys_and_values())
        self.tail.offset = 0
        return keys, values

    def _commit(self, keys: mx.array, values: mx.array) -> None:
        """Move whole blocks to the head and the codes, and the rest to the empty tail."""
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
            self.codes.append(keys[:, :, done:stop], values[:, :, done:stop], self._device)
        if stop < tokens:
            self.tail.update_and_fetch(keys[:, :, stop:], values[:, :, stop:])
        else:
            self.tail._make_room(1, 0, (keys, values))

    def _begin_raw(self) -> None:
        """Allocate a head for a sequence that is too short to be encoded."""
        if self.head.empty():
            room = LayerCache.step if self._asked is None else whole_blocks(self._asked)
            self.head = KVCache(
                max(BLOCK_TOKENS, min(whole_blocks(max(self.first, self.least)), room))
            )

    def _unraw(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Move the columns after the first `first` from the head to the front of the new ones."""
        sides = self.head.keys_and_values()
        rest = [
            mx.concatenate([*col.arrays(col.take(side, self.first, self.head.offset)), new], axis=2)
            for side, new in zip(sides, (keys, values), strict=True)
        ]
        stays = [col.arrays(col.copied(col.take(side, 0, self.first))) for side in sides]
        self.head = KVCache(self.first or None)
        if self.first:
            self.head.update_and_fetch(stays[0][0], stays[1][0])
        mx.eval(rest, col.arrays(self.head.keys, self.head.values))
        return rest[0], rest[1]

    def _cut_codes(self, tokens: int) -> None:
        """Keep the codes of `tokens` tokens; dequantize an incomplete span to the empty tail."""
        span = self.codes.span
        start = tokens // span * span
        if start < tokens:
            dtypes = [part.dtype for part in col.arrays(*self.tail._held())]
            rest = []
            for side, dtype in zip(self.codes.keys_and_values(), dtypes, strict=True):
                piece = col.take(side, start, start + span)
                raw = (
                    piece.dequantize(self._device).astype(dtype)
                    if isinstance(piece, Coded)
                    else piece
                )
                rest.append(col.take(raw, 0, tokens - start))
            self.tail.update_and_fetch(*(col.arrays(*rest)))
        self.codes.offset = start

    def _state(self) -> tuple[Any, ...]:
        """Return format, codec, settings, offset, and the contents of head, codes and tail."""

        def flat(side: Side | None) -> Any:
            return (side.dim, *side.parts) if isinstance(side, Coded) else side

        codes = (flat(self.codes.keys), flat(self.codes.values), self.codes.offset)
        settings = (FORMAT, self.scheme.name, self.first, self.least, self.max_size, self.keep)
        return *settings, self.offset, self.head.state, codes, self.tail.state

    def _restore(self, state: Sequence[Any]) -> None:
        if state[0] != FORMAT:
            raise ValueError(f"the codes have format {state[0]}; this version reads {FORMAT}")
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
    """A batch of sequences, each in its own `TurboQuantKVCache`, without padding in memory.

    Models see a left-padded batch: all rows end in the same column. Prompts of different lengths
    are right-padded and announced by `prepare`; the padding is not stored.
    """

    def __init__(self, rows: Sequence[TurboQuantKVCache]) -> None:
        self.rows = list(rows)
        self._ends: list[int] | None = None

    @property
    def offset(self) -> mx.array:
        return mx.array([row.offset for row in self.rows], mx.int32)

    @property
    def left_padding(self) -> mx.array:
        """Number of padding columns of each row, as models see it, (batch,) int32."""
        return mx.array([self.size() - row.size() for row in self.rows], mx.int32)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def capacity(self) -> int:
        return max(row.capacity for row in self.rows)

    def empty(self) -> bool:
        return all(row.empty() for row in self.rows)

    def size(self) -> int:
        return max(row.size() for row in self.rows)

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        if not self.is_trimmable():
            return 0
        self._check_read()
        return max(row.trim(n) for row in self.rows)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        alone = self._alone(N)
        pasts = [row.past(alone=alone) for row in self.rows]
        pads = [max(pasts) - past for past in pasts]
        if window_size is None:
            return causal(N, max(pasts), None, mx.array(pads))
        columns = [
            mx.concatenate([mx.full((pad,), -1, mx.int32), row.positions(N, alone=alone)])
            for pad, row in zip(pads, self.rows, strict=True)
        ]
        queries = self.offset[:, None, None] + mx.arange(N)
        return by_position(mx.stack(columns)[:, None], queries, 0, _ALL, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a chunk, (batch, kv_heads, tokens, dim), and return the KV to attend to.

        That is all columns, left-padded, or only the new ones; see
        `TurboQuantKVCache.update_and_fetch`.
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
                (i, column, side)
                for i, row in enumerate(self.rows)
                for column, side in col.spread(
                    past - row.size(), [*parts[i][number], new[i : i + 1]]
                )
            ]
            fetched.append(
                dequantized(placed, len(self.rows), past + tokens, new.dtype, self._device)
            )
        for i, row in enumerate(self.rows):
            count = tokens if self._ends is None else min(tokens, self._ends[i] - row.offset)
            if count > 0:
                row.take_in(keys[i : i + 1, :, :count], values[i : i + 1, :, :count])
        return fetched[0], fetched[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all columns, dequantized and left-padded with zeros; not evaluated."""
        count = self.size()
        rows = [row.keys_and_values() for row in self.rows]

        def padded(side: mx.array) -> mx.array:
            return mx.pad(side, [(0, 0), (0, 0), (count - side.shape[2], 0), (0, 0)])

        keys, values = (mx.concatenate([padded(row[i]) for row in rows]) for i in (0, 1))
        return keys, values

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        if left_padding is not None and max(ints(left_padding)) > 0:
            raise ValueError("this batch does not support left padding; pad on the right")
        self._ends = ends_of([row.offset for row in self.rows], lengths, right_padding)

    def finalize(self) -> None:
        self._ends = None

    def filter(self, batch_indices: Any) -> None:
        self.rows = [self.rows[row] for row in chosen_rows(batch_indices, len(self.rows))]
        self._shape = None

    def extend(self, other: BatchTurboQuantKVCache) -> None:
        agree("extend", [*self.rows, *other.rows])
        self.rows = self.rows + [deepcopy(row) for row in other.rows]
        self._shape = None

    def extract(self, idx: int) -> TurboQuantKVCache:
        return deepcopy(self.rows[idx])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        agree("merge", caches)
        return cls([deepcopy(cache) for cache in caches])

    def _alone(self, tokens: int) -> bool:
        """Return whether `tokens` is one token to append to each row, none of them empty."""
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

    def _accept_widths(self, key_width: int, value_width: int) -> None:
        self.rows[0]._accept_widths(key_width, value_width)

    def _state(self) -> tuple[Any, ...]:
        return tuple(row.state for row in self.rows)

    def _restore(self, state: Sequence[Any]) -> None:
        self.rows, self._ends = [TurboQuantKVCache.from_state(row) for row in state], None


def _one(side: Side) -> SideData:
    assert not isinstance(side, tuple)
    return side
