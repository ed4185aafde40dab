"""Cache objects of layers with latents (MLA) in a decode step, which read them where they lie.

A model's own code receives arrays of the new tokens that stand for all tokens. It hands them to
`scaled_dot_product_attention`; a product with the rotated parts only keeps its queries. A model
that uses them in any other way fails its self-test, and reads contiguous KV instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.choosing_reads import ChoosingReads
from penstock.attention.chosen_tokens import ChosenTokens, read_arrays
from penstock.attention.layer_decode import LayerDecode
from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.attention.span_attention import AttentionWindow, KVData, Partial
from penstock.kv.segment import ColumnRange


class LatentRows(mx.array):
    """Latents of the new tokens, which stand for those of all tokens."""


class RotatedRows(mx.array):
    """Rotated parts of the new tokens' keys, which stand for those of all tokens."""

    def swapaxes(self, axis1: int, axis2: int, *, stream: Any = None) -> mx.array:
        return RotatedColumns(self)


class RotatedColumns(mx.array):
    """Transposed `RotatedRows`; a product with it is computed later, part by part."""

    def __init__(self, rows: RotatedRows) -> None:
        super().__init__(rows)
        self.rows = rows

    def __rmatmul__(self, queries: mx.array) -> Any:
        return RotatedQueries(queries, self.rows)


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Keys or values of all heads that a model would expand the latents to; never computed.

    For a step with several tokens per row, models expand all latents instead of multiplying the
    queries.
    """

    rows: LatentRows
    absorb: Callable[[mx.array], mx.array]
    """Multiplies queries (b, heads, n, dim) by what makes keys of latents: (b, heads, n, rank)."""
    expand: Callable[[mx.array], mx.array]
    """Makes values of mixed latents, (b, heads, n, rank)."""


@dataclass(frozen=True, slots=True)
class RotatedQueries:
    """Scores of rotated parts that are not computed yet; the model hands them over as its mask."""

    queries: mx.array
    """Scaled queries, (b, heads, n, rope)."""
    rows: RotatedRows


class LatentReads(ChoosingReads):
    """Cache of one layer with latents, or of its index keys, in a decode step.

    A layer without an index reads what the last index before it chose.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the new tokens' latents and rotated parts, (b, 1, n, dim), to the tails.

        Returns arrays that stand for those of all tokens.
        """
        self.keys, self.values = self.step.write(self.layer, keys, values)
        self._given = LatentRows(self.keys), RotatedRows(self.values)
        return self._given

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to the latents of all tokens: (b, heads, n, dim) -> (b, heads, n, dim).

        Args:
            queries: queries of all heads; already multiplied, unless the keys are `ExpandedRows`.
            keys: result of `update_and_fetch`, or what the model made of it.
            values: the same.
            mask: scores of the rotated parts; None if these are empty.
        """
        if isinstance(keys, ExpandedRows) and isinstance(values, ExpandedRows):
            rows = keys.rows if keys.rows is values.rows else None
            absorbed = keys.absorb(queries)
            return values.expand(self.attend(absorbed, rows, rows, scale, mask, sinks))
        given = self._given
        if given is None or keys is not given[0] or values is not given[0]:
            raise TypeError("this model changes its latents after they were cached")
        if mask is None and not given[1].shape[-1]:
            rotated = mx.zeros((*queries.shape[:3], 0), queries.dtype)
        elif isinstance(mask, RotatedQueries) and mask.rows is given[1]:
            rotated = mask.queries
        else:
            raise TypeError("this model does not add the scores of its latents' rotated parts")
        if queries.shape[-1] != keys.shape[-1]:
            raise TypeError("this model's queries are not absorbed")
        self.is_read = True
        both = mx.concatenate([queries * scale, rotated], axis=-1)
        decode = LatentDecode(self.step.device, self.step, self.layer, self.attention_window)
        return decode.attend_chosen(both, 1.0, self.chosen, sinks)


def latent_reads(
    step: DecodeStep, attention_windows: Sequence[AttentionWindow]
) -> list[LatentReads]:
    """Return the caches for a decode step, one per layer."""
    chosen: dict[int, ChosenTokens] = {}
    return [
        LatentReads(step, layer, attention_window, chosen)
        for layer, attention_window in enumerate(attention_windows)
    ]


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
    """Decode attention of a layer with latents.

    With one new token, a model multiplies its queries instead of expanding latents ("absorbed"
    attention), so that latents are keys and values of a single KV head. The latents are the keys of
    the cache, and the keys' second parts, with rotary positions, its values.
    """

    def _read(self, pieces: Sequence[ColumnRange]) -> tuple[Sequence[KVData], Sequence[KVData]]:
        latents, rotated = read_arrays(self.step, self.layer, pieces)
        return [LatentKeys(*both) for both in zip(latents, rotated, strict=True)], latents

    def _choice_reader(self) -> ChoiceReader:
        return LatentReader(self.step.selection, self.device, self.device.facts)

    def _of_tails(self, keys: mx.array, values: mx.array) -> tuple[KVData, mx.array]:
        return LatentKeys(keys, values), keys
