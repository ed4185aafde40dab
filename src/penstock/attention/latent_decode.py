"""Attention of one layer with latents (MLA) in a decode step, read where they lie.

Keys and values of all heads are products of one cached row a token, its *latent*. A model with one
new token multiplies its queries instead ("absorbed" attention), and the latents are keys and values
of a single KV head. A second part of the key, with rotary positions, is cached beside them. The
latents are the keys of the cache and the rotated parts its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from penstock.attention.chosen_tokens import read_arrays
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.attention.span_attention import KVData, Partial
from penstock.kv.segment import ColumnRange


class LatentScores:
    """Reader of `LatentKeys`, with the interface of a codec."""

    def transform_query(self, queries: mx.array, /) -> mx.array:
        return queries

    def inverse_transform(self, mixed: mx.array, dim: int, /) -> mx.array:
        return mixed

    def score(self, queries: mx.array, coded: Any, ops: Any, /) -> mx.array:
        """Multiply queries (..., m, rank + rope) with both parts of the keys: (..., m, n)."""
        rank = coded.latents.shape[-1]
        products: list[mx.array] = [ops.multiply_keys(queries[..., :rank], coded.latents)]
        if not coded.rotated.shape[-1]:
            return products[0]
        products.append(ops.multiply_keys(queries[..., rank:], coded.rotated))
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
class LatentDecode(LayerDecode):
    """Decode attention of a layer with latents."""

    def _read(self, pieces: Sequence[ColumnRange]) -> tuple[Sequence[KVData], Sequence[KVData]]:
        latents, rotated = read_arrays(self.step, self.layer, pieces)
        return [LatentKeys(*both) for both in zip(latents, rotated, strict=True)], latents

    def _choice_reader(self) -> ChoiceReader:
        return LatentReader(self.step.selection, self.device, self.device.facts)

    def _of_tails(self, keys: mx.array, values: mx.array) -> tuple[KVData, mx.array]:
        return LatentKeys(keys, values), keys
