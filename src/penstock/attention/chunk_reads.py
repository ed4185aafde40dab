"""Cache objects passed to the model for a prefill chunk, which attend to spans and keep the new KV.

A chunk has a forward pass of its own, or shares one with other chunks and a decode step.
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
from penstock.kv.codecs.coded import Coded
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
            last: whether the output of the layer's attention is unused, and so never computed.
            most_joined: maximum number of tokens before the chunk to concatenate with it;
                by default unlimited.
            plans: values that compiled attention shares among the layers of the chunk.
            dtype: dtype of the stored keys and values; None for the model's.
            selection: rule of selective attention to the tokens before the chunk.
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
        self.index: Coded | None = None
        """Index of the chunk's keys, if it was needed to read the chunk."""
        self.squares: Squares | None = None
        """Accumulator for channel scales; None outside calibration."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep the chunk's keys and values, (1, kv_heads, n, dim), as `dtype`, and return them."""
        if self.dtype is not None and keys.dtype != self.dtype:
            keys, values = keys.astype(self.dtype), values.astype(self.dtype)
        self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)
        # This also evaluates the previous layers, which frees their concatenated KV.
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
        begin = self._choosing_from(attention_window, self.keys.shape[2])
        if self.choice is None or begin is None:
            return self._attend_all(queries, attention_window, scale, sinks)
        new, tokens = (self.keys, self.values), self.keys.shape[2]
        if self.last:  # a choice is computed at once, and nobody reads it
            return mx.zeros((*queries.shape[:3], new[1].shape[3]), queries.dtype)
        if self.index is None:
            where = *new, self.layer, self.offset, self.device
            self.index = self.choice.selection.index.of(*where)
        cut = max(0, begin - (tokens - queries.shape[2]))
        chosen = self.choice.attend(
            self.device, self.layer, queries[:, :, cut:], new, self.index, scale, sinks
        )
        if not cut:
            return chosen
        first = self._attend_all(queries[:, :, :cut], attention_window, scale, sinks, begin)
        return mx.concatenate([first, chosen], axis=2)

    def _attend_all(
        self,
        queries: mx.array,
        attention_window: AttentionWindow,
        scale: float,
        sinks: mx.array | None,
        tokens: int | None = None,
    ) -> mx.array:
        """Attend to all visible tokens.

        Args:
            tokens: number of the chunk's tokens up to the last query; None for all.
        """
        assert self.keys is not None and self.values is not None
        if self.streams(attention_window, self.keys.shape[2]):
            new = self.keys[:, :, :tokens], self.values[:, :, :tokens]
            queries_base_2 = span_attention.in_base_2(queries, scale)
            sunk = None if sinks is None else sinks * LOG2_E
            result = attend_streamed(queries_base_2, new, self.parts, self.layer, self.device, sunk)
            return result.astype(queries.dtype)
        all_keys, all_values, columns = self.joined(attention_window)
        if tokens is not None:  # they see all before them, without gaps
            end = self.offset + tokens
            all_keys, all_values = all_keys[:, :, :end], all_values[:, :, :end]
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
        """Return whether a chunk of `tokens` tokens uses selective attention."""
        return self._choosing_from(attention_window, tokens) is not None

    def _choosing_from(self, attention_window: AttentionWindow, tokens: int) -> int | None:
        choice = self.choice
        return None if choice is None else choice.begin(self.layer, attention_window, tokens)

    def streams(self, attention_window: AttentionWindow, tokens: int) -> bool:
        """Return whether a chunk of `tokens` tokens reads earlier ones part by part.

        It does if there are too many to concatenate; never if the window excludes some of them.
        """
        if not attention_window.sees_all(self.offset + tokens - 1):
            return False
        return bool(self.parts) and self.parts[-1].end > self.most_joined

    def joined(
        self, attention_window: AttentionWindow
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Concatenate the visible columns with the chunk's.

        Returns:
            Keys and values (1, kv_heads, m, dim), and the positions of the columns, (m,), or None
                if they are 0 .. m - 1.
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
    """Cache of one layer for a mixed pass, in which each token is a row of the batch.

    First come the new tokens of each running sequence, then those of each chunk. Projections and
    norms process all of them together; attention processes each part as in a pass of its own.
    """

    def __init__(
        self,
        parts: Sequence[DecodeReads | ChunkReads],
        sizes: Sequence[tuple[int, int]],
        offset: mx.array,
        plans: dict[Hashable, Any],
    ) -> None:
        """Initialize the cache of a layer.

        Args:
            parts: cache of the running sequences, if any, then of each chunk.
            sizes: number of sequences of each part, and of tokens per sequence.
            offset: positions of all tokens, (n,).
            plans: values that compiled attention shares among the layers of the pass.
        """
        super().__init__(parts[0].layer, parts[0].attention_window)
        self.parts = parts
        self.sizes = sizes
        self.offset = offset
        self.plans = plans
        self._fetched: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the tokens' keys and values, (tokens, kv_heads, 1, dim), and return them."""
        sides = zip(self._divided(keys), self._divided(values), strict=True)
        self._fetched = [
            # Copies, because a view would keep the keys of all tokens alive.
            part.update_and_fetch(*(map(_copied, side) if isinstance(part, ChunkReads) else side))
            for part, side in zip(self.parts, sides, strict=True)
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
        read, chunks = [], sum(isinstance(part, ChunkReads) for part in self.parts)
        for part, own, fetched in zip(
            self.parts, self._divided(queries), self._fetched, strict=True
        ):
            if isinstance(part, ChunkReads) and part.last:
                # Unused; concatenated with the others, it would be computed.
                result = mx.zeros((*own.shape[:3], fetched[1].shape[3]), own.dtype)
            else:
                result = part.attend(own, *fetched, scale, mask, sinks)
                if chunks > 1:  # so that only one part's scores are in memory
                    mx.eval(result)
            read.append(_by_token(result))
        return mx.concatenate(read)

    def _divided(self, by_token: mx.array) -> list[mx.array]:
        """Split (tokens, heads, 1, d) into one (sequences, heads, n, d) array per part."""
        heads, dim = by_token.shape[1], by_token.shape[3]
        divided, start = [], 0
        for rows, width in self.sizes:
            part = by_token[start : start + rows * width]
            divided.append(part.reshape(rows, width, heads, dim).swapaxes(1, 2))
            start += rows * width
        return divided


def _copied(side: mx.array) -> mx.array:
    copy = col.copied(side)
    assert isinstance(copy, mx.array)
    return copy


def _by_token(side: mx.array) -> mx.array:
    """Reshape (b, heads, n, d) to one row per token, (b * n, heads, 1, d)."""
    _, heads, _, dim = side.shape
    return side.swapaxes(1, 2).reshape(-1, heads, 1, dim)


def mixed_reads(
    parts: Sequence[Sequence[DecodeReads] | Sequence[ChunkReads]],
    sizes: Sequence[tuple[int, int]],
    positions: Sequence[int],
) -> list[MixedReads]:
    """Return the caches for a mixed pass, one per layer.

    Args:
        parts: caches of the running sequences, if any, then of each chunk.
        sizes: number of sequences of each part, and of tokens per sequence.
        positions: positions of all new tokens.
    """
    offset, plans = mx.array(list(positions)), dict[Hashable, Any]()
    return [MixedReads(layer, sizes, offset, plans) for layer in zip(*parts, strict=True)]
