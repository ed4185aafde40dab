"""Cache objects passed to the model for a prefill chunk: attend to spans, keep the new KV.

A chunk has a pass of its own, or one together with a decode step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.joined_reads import join_parts
from penstock.attention.reads import DecodeReads, Reads
from penstock.attention.selection.chunk_choice import ChunkChoice
from penstock.attention.selection.selection import READ_ALL, Selection
from penstock.attention.span_attention import LOG2_E, AttentionWindow
from penstock.attention.streamed_reads import attend_streamed
from penstock.kv import columns as col
from penstock.kv.codecs.scales import Squares
from penstock.kv.segment import KVSpan


class ChunkReads(Reads):
    """Cache of one layer for a prefill chunk of one sequence.

    Keeps the chunk's keys and values in buffers of exact size, which become a segment after the
    step.
    """

    def __init__(
        self,
        layer: int,
        attention_window: AttentionWindow,
        parts: Sequence[KVSpan],
        position: int,
        device: AttentionBackend,
        *,
        last: bool = False,
        most_joined: int = span_attention.ALL_TOKENS,
        plans: dict[Hashable, Any] | None = None,
        dtype: mx.Dtype | None = None,
        selection: Selection = READ_ALL,
    ) -> None:
        """Initialize the cache of a layer.

        Args:
            position: position of the chunk's first token.
            last: whether the output of the layer's attention is never read, so never computed.
            most_joined: maximum number of tokens before the chunk to concatenate with it;
                by default any number.
            plans: what compiled attention shares among the layers of the chunk.
            dtype: dtype of the stored keys and values; None for the model's own.
            selection: choice of the tokens before the chunk that it reads.
        """
        super().__init__(layer, attention_window)
        self.device = device
        self.parts = parts
        self.last = last
        self.most_joined = most_joined
        self.plans = {} if plans is None else plans
        self.dtype = dtype
        self.choice: ChunkChoice | None = None
        if selection.layers:
            row = DecodeRow(tuple(parts), position, 0, 0)
            self.choice = self.plans.setdefault(ChunkChoice, ChunkChoice(selection, row))
        self.offset: int = position
        self.values: mx.array | None = None
        self.squares: Squares | None = None
        """Accumulator for channel scales; None outside calibration."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep the chunk's keys and values, (1, kv_heads, n, dim), rounded; and return them."""
        if self.dtype is not None and keys.dtype != self.dtype:
            keys, values = keys.astype(self.dtype), values.astype(self.dtype)
        self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)
        # All of the layers before is computed with them: what they had joined is let go.
        mx.eval(self.keys, self.values)
        self._given = keys, values
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as the model's own attention does: (1, heads, n, d) -> (1, heads, n, dim)."""
        attention_window = self.check_given(keys, values, mask)
        if self.squares is not None:
            self.squares.add(keys, queries)
        assert self.keys is not None and self.values is not None
        if self.choice is not None and self.chooses(attention_window, self.keys.shape[2]):
            new = self.keys, self.values
            return self.choice.attend(self.device, self.layer, queries, new, scale, sinks)
        if self.streams(attention_window, self.keys.shape[2]):
            new = self.keys, self.values
            queries_base_2 = span_attention.in_base_2(queries, scale)
            sunk = None if sinks is None else sinks * LOG2_E
            result = attend_streamed(queries_base_2, new, self.parts, self.layer, self.device, sunk)
            return result.astype(queries.dtype)
        all_keys, all_values, columns = self.joined(attention_window)
        return self.device.prefill(
            queries,
            all_keys,
            all_values,
            columns=columns,
            start=self.offset,
            scale=scale,
            attention_window=attention_window,
            sinks=sinks,
            eager=not self.last,
        )

    def chooses(self, attention_window: AttentionWindow, tokens: int) -> bool:
        """Return whether the queries of a chunk of `tokens` tokens select what they read."""
        choice = self.choice
        return choice is not None and choice.applies(self.layer, attention_window, tokens)

    def streams(self, attention_window: AttentionWindow, tokens: int) -> bool:
        """Return whether too many tokens are before a chunk of `tokens` to join them with it."""
        if not attention_window.sees_all(self.offset + tokens - 1):
            return False
        return bool(self.parts) and self.parts[-1].end > self.most_joined

    def joined(
        self, attention_window: AttentionWindow
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Concatenate the visible columns with the chunk's.

        Returns:
            Keys and values (1, kv_heads, m, dim), and the positions of the columns, (m,), None if
                they are 0 .. m - 1.
        """
        assert self.keys is not None and self.values is not None
        new = self.keys, self.values
        return join_parts(
            self.parts,
            self.layer,
            attention_window,
            self.offset,
            new,
            self.device,
            lazily=self.last,
        )


class MixedReads(Reads):
    """Cache of one layer, in which each token is a row of the batch with a position of its own.

    First come the new tokens of each running sequence, then those of the chunk. Products and norms
    take all of them together; attention reads each part as in a pass of its own.
    """

    def __init__(
        self,
        decode: DecodeReads,
        chunk: ChunkReads,
        offset: mx.array,
        plans: dict[Hashable, Any],
    ) -> None:
        """Initialize the cache of a layer.

        Args:
            decode: cache of the running sequences.
            chunk: cache of the chunk.
            offset: positions of all tokens, (rows x width + n,).
            plans: what compiled attention shares among the layers of the pass.
        """
        super().__init__(decode.layer, decode.attention_window)
        self.decode = decode
        self.chunk = chunk
        self.offset = offset
        self.plans = plans
        self._fetched: list[tuple[mx.array, mx.array]] = []

    @property
    def decoded_tokens(self) -> int:
        """Number of new tokens of the running sequences."""
        rows, width, _ = self.decode.step.size
        return rows * width

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write and keep the tokens' keys and values, (tokens, kv_heads, 1, dim); return them."""
        of_rows, of_chunk = zip(self._parts(keys), self._parts(values), strict=True)
        self._fetched = [
            self.decode.update_and_fetch(*of_rows),
            # Copies: a view would keep the keys of all tokens.
            self.chunk.update_and_fetch(*map(_copied, of_chunk)),
        ]
        self._given = keys, values
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as the model's own attention does: (tokens, heads, 1, d) -> (..., value_dim)."""
        self.check_given(keys, values, mask)
        (of_rows, of_chunk), (rows, chunk) = self._parts(queries), self._fetched
        mixed = self.decode.attend(of_rows, *rows, scale, mask, sinks)
        read = self.chunk.attend(of_chunk, *chunk, scale, mask, sinks)
        return mx.concatenate([_by_token(part) for part in (mixed, read)])

    def _parts(self, by_token: mx.array) -> tuple[mx.array, mx.array]:
        """Divide (tokens, heads, 1, d) into (rows, heads, width, d) and (1, heads, n, d)."""
        rows, width, _ = self.decode.step.size
        heads, dim = by_token.shape[1], by_token.shape[3]
        first, rest = by_token[: rows * width], by_token[rows * width :]
        of_rows = first.reshape(rows, width, heads, dim).swapaxes(1, 2)
        return of_rows, rest.reshape(1, -1, heads, dim).swapaxes(1, 2)


def _copied(side: mx.array) -> mx.array:
    copy = col.copied(side)
    assert isinstance(copy, mx.array)
    return copy


def _by_token(side: mx.array) -> mx.array:
    """Return (b, heads, n, d) with a row for each token, (b x n, heads, 1, d)."""
    _, heads, _, dim = side.shape
    return side.swapaxes(1, 2).reshape(-1, heads, 1, dim)


def mixed_reads(
    decode: Sequence[DecodeReads], chunk: Sequence[ChunkReads], positions: Sequence[int]
) -> list[MixedReads]:
    """Return the caches for a pass, one per layer.

    Args:
        decode: caches of the running sequences.
        chunk: caches of the chunk.
        positions: positions of all new tokens.
    """
    offset, plans = mx.array(list(positions)), dict[Hashable, Any]()
    pairs = zip(decode, chunk, strict=True)
    return [MixedReads(of_rows, of_chunk, offset, plans) for of_rows, of_chunk in pairs]
