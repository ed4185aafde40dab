"""Attention of one layer with latents (MLA) in a decode step, read where they lie.

Keys and values of all heads are products of one cached row a token, its *latent*. A model with one
new token multiplies its queries instead ("absorbed" attention), and the latents are keys and values
of a single KV head. A second part of the key, with rotary positions, is cached beside them. The
latents are the keys of the cache and the rotated parts its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_plan import DecodeRow, plan_attention
from penstock.attention.joined_reads import read_sides
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.attention.span_attention import KVData, Partial
from penstock.kv.codecs.coded import Coded
from penstock.kv.segment import ColumnRange

LAZY_PARTS = 4
"""Maximum number of parts that chosen tokens are copied from without evaluating the choice: each
part then gives as many rows as there are chosen tokens."""


class LatentScores:
    """Reader of `LatentKeys`, with the interface of a codec."""

    def transform_query(self, queries: mx.array, /) -> mx.array:
        return queries

    def inverse_transform(self, mixed: mx.array, dim: int, /) -> mx.array:
        return mixed

    def score(self, queries: mx.array, coded: Any, ops: Any, /) -> mx.array:
        """Multiply queries (..., m, rank + rope) with both parts of the keys: (..., m, n)."""
        rank = coded.latents.shape[-1]
        products: list[mx.array] = [
            ops.multiply_keys(queries[..., :rank], coded.latents),
            ops.multiply_keys(queries[..., rank:], coded.rotated),
        ]
        # The sum of two products in half precision is not rounded again.
        return products[0].astype(mx.float32) + products[1].astype(mx.float32)

    def mix(self, weights: mx.array, coded: Any, ops: Any, /) -> mx.array:
        raise NotImplementedError("the values of latent attention are its latents")


_SCORES = LatentScores()


@dataclass(frozen=True, slots=True, eq=False)
class LatentKeys:
    """Keys of latent attention in two parts, which are not copied together."""

    latents: mx.array
    """Shape (..., n, rank)."""
    rotated: mx.array
    """Shape (..., n, rope)."""

    @property
    def codec(self) -> LatentScores:
        return _SCORES

    @property
    def dim(self) -> int:
        return int(self.latents.shape[-1] + self.rotated.shape[-1])

    @property
    def tokens(self) -> int:
        return int(self.latents.shape[-2])

    def of_heads(self, start: int, stop: int) -> LatentKeys:
        return self  # there is one KV head

    def after(self, earlier: mx.array) -> LatentKeys:
        return self  # nothing is decoded


class LatentReader(ChoiceReader):
    """Reader of the blocks that rows choose by the index of their latents."""

    def _exactly(self, stacked: mx.array, keys: mx.array, values: mx.array) -> Partial:
        return self.ops.attend_decode(stacked, [LatentKeys(keys, values)], [keys])


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Tokens that a row reads in a layer, chosen by an index of the model's own."""

    columns: mx.array
    """Their columns, ascending, among all that the row sees: its spans', then its tail's."""
    seen: mx.array | None
    """Mask of the visible ones, (1, n) bool; None if all are."""


@dataclass(frozen=True, slots=True)
class LatentDecode(LayerDecode):
    """Decode attention of a layer with latents."""

    def attend_chosen(
        self, queries: mx.array, scale: float, chosen: Mapping[int, ChosenTokens]
    ) -> mx.array:
        """Attend like `attend`; the new tokens in `chosen` read these tokens only."""
        if not chosen:
            return self.attend(queries, scale, None)
        in_base_2 = span_attention.in_base_2(queries, scale)
        mx.async_eval([choice.columns for choice in chosen.values()])  # type: ignore[no-untyped-call]
        outputs, rows = dict[int, mx.array](), self.step.new_tokens
        for number, choice in chosen.items():
            row, token = divmod(number, self.step.width)
            own = in_base_2[row : row + 1, :, token : token + 1]
            outputs[number] = self._attend_to(own, rows[number], choice)
        result = self._by_row(in_base_2, outputs, None)
        return result if result.dtype == queries.dtype else result.astype(queries.dtype)

    def _attend_to(self, queries: mx.array, row: DecodeRow, choice: ChosenTokens) -> mx.array:
        """Attend to the chosen tokens of a row, which are copied together."""
        tail = self.step.tails.read_block(self.layer, row.slot, 1, row.tail + 1)
        before = self._arrays(visible_pieces(self, row))
        latents, rotated = (
            gathered([*part, own.squeeze(0)], choice.columns)
            for part, own in zip(before, tail, strict=True)
        )
        stacked = span_attention.grouped(queries, 1)
        part = self.device.attend_decode(
            stacked, [LatentKeys(latents, rotated)], [latents], choice.seen
        )
        return span_attention.ungrouped(span_attention.merged([part]), 1, queries.shape[1])

    def _arrays(self, pieces: Sequence[ColumnRange]) -> tuple[list[mx.array], list[mx.array]]:
        """Return the latents and rotated parts of column ranges, (1, columns, dim) each."""
        dtype = self.step.tails.shapes[self.layer].dtype
        latents, rotated = (
            [
                side.dequantize(self.device).squeeze(0).astype(dtype)
                if isinstance(side, Coded)
                else side.astype(dtype)
                for side in sides
            ]
            for sides in read_sides(pieces, self.layer, self.device)
        )
        return latents, rotated

    def _read(self, pieces: Sequence[ColumnRange]) -> tuple[Sequence[KVData], Sequence[KVData]]:
        latents, rotated = self._arrays(pieces)
        return [LatentKeys(*both) for both in zip(latents, rotated, strict=True)], latents

    def _choice_reader(self) -> ChoiceReader:
        return LatentReader(self.step.selection, self.device, self.device.facts)

    def _of_tails(self, keys: mx.array, values: mx.array) -> tuple[KVData, mx.array]:
        return LatentKeys(keys, values), keys


def visible_pieces(decode: LayerDecode, row: DecodeRow) -> list[ColumnRange]:
    """Return the columns of a row's spans that its new token sees, in order."""
    levels = plan_attention([row], decode.window).levels
    return [piece for level in levels for shared in level for piece in shared.pieces]


def gathered(parts: Sequence[mx.array], columns: mx.array) -> mx.array:
    """Copy ascending columns (k,) of consecutive parts, (1, n_i, dim) each: (1, k, dim)."""
    starts = [0, *np.cumsum([part.shape[1] for part in parts]).tolist()]
    if len(parts) > LAZY_PARTS:
        numbers = np.asarray(columns).astype(np.int64)
        cuts = np.searchsorted(numbers, starts)
        taken = [
            mx.take(part, mx.array(numbers[first:last] - start), axis=1)
            for part, start, (first, last) in zip(parts, starts, pairwise(cuts), strict=False)
            if first < last
        ]
        return taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=1)
    result: mx.array | None = None
    for part, start in zip(parts, starts, strict=False):
        places = columns.astype(mx.int32) - start
        rows = mx.take(part, mx.clip(places, 0, part.shape[1] - 1), axis=1)
        if result is not None:
            rows = mx.where((places >= 0)[None, :, None], rows, result)
        result = rows
    assert result is not None
    return result
