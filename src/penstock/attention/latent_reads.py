"""Cache objects of layers with latents (MLA) in a decode step, which read them where they lie.

A model's own code receives arrays of the new tokens that stand for all tokens. It hands them to
`scaled_dot_product_attention`; a product with the rotated parts only keeps its queries. A model
that uses them in any other way fails its self-test, and reads contiguous KV instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.joined_reads import read_sides
from penstock.attention.latent_decode import ChosenTokens, LatentDecode, visible_pieces
from penstock.attention.reads import Reads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.codecs.coded import Coded


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


class OwnIndex(Protocol):
    """Index of a model's own for one decode step, by which a layer chooses tokens to read."""

    @property
    def budget(self) -> int:
        """Maximum number of tokens that a row reads."""

    def scores(self, row: int, token: int, keys: mx.array) -> mx.array:
        """Return the scores (n,) of consecutive tokens for a new token.

        Args:
            row: index of the row in the step.
            token: index of the new token in the row.
            keys: index keys of a part of the row's tokens, (1, n, dim).
        """


class LatentReads(Reads):
    """Cache of one layer with latents, or with index keys for the layer before it."""

    values: mx.array | None = None

    def __init__(
        self,
        step: DecodeStep,
        layer: int,
        attention_window: AttentionWindow,
        chooses_for: LatentReads | None,
    ) -> None:
        """Initialize the cache; `chooses_for` is that of the layer before, None for the first."""
        super().__init__(layer, attention_window)
        self.step = step
        self.offset = step.offset
        self.chooses_for = chooses_for
        self.chosen: dict[int, ChosenTokens] = {}
        """Tokens that an index chose for new tokens, by index in `DecodeStep.new_tokens`."""
        self.is_read = False
        """Whether attention, or a known index, has read this cache."""

    def make_mask(  # type: ignore[override]
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Return None, because attention hides what is not visible; TypeError for windows."""
        if window_size is not None:
            raise TypeError("this model asks for window masks; it needs joined latents")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the new tokens' latents and rotated parts, (b, 1, n, dim), to the tails.

        Returns arrays that stand for those of all tokens.
        """
        keys, values = self._write(keys, values)
        self._given = LatentRows(keys), RotatedRows(values)
        return self._given

    def _write(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self.step.write(self.layer, keys, values)
        self.keys, self.values = keys, values
        return keys, values

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
            mask: scores of the rotated parts.
        """
        if isinstance(keys, ExpandedRows) and isinstance(values, ExpandedRows):
            rows = keys.rows if keys.rows is values.rows else None
            absorbed = keys.absorb(queries)
            return values.expand(self.attend(absorbed, rows, rows, scale, mask, sinks))
        given = self._given
        if given is None or keys is not given[0] or values is not given[0] or sinks is not None:
            raise TypeError("this model changes its latents after they were cached")
        if not isinstance(mask, RotatedQueries) or mask.rows is not given[1]:
            raise TypeError("this model does not add the scores of its latents' rotated parts")
        if queries.shape[-1] != keys.shape[-1]:
            raise TypeError("this model's queries are not absorbed")
        self.is_read = True
        both = mx.concatenate([queries * scale, mask.queries], axis=-1)
        decode = LatentDecode(self.step.device, self.step, self.layer, self.attention_window)
        return decode.attend_chosen(both, 1.0, self.chosen)

    def choose(self, index: OwnIndex, keys: mx.array) -> None:
        """Append index keys of the new tokens, (b, 1, n, dim), and choose tokens for each of them.

        A token that sees no more than `index.budget` tokens reads all. Nothing is evaluated.
        """
        assert self.chooses_for is not None
        self.is_read = True
        value_dim = self.step.tails.shapes[self.layer].value_dim
        keys, _ = self._write(keys, mx.zeros((*keys.shape[:3], value_dim), keys.dtype))
        decode = LatentDecode(self.step.device, self.step, self.layer, self.attention_window)
        for number, row in enumerate(self.step.new_tokens):
            choice = self._choice(decode, index, number, row)
            if choice is not None:
                self.chooses_for.chosen[number] = choice

    def _choice(
        self, decode: LatentDecode, index: OwnIndex, number: int, row: DecodeRow
    ) -> ChosenTokens | None:
        step = self.step
        pieces = visible_pieces(decode, row)
        count = sum(stop - start for _, start, stop in pieces) + row.tail + 1
        if count <= index.budget:
            return None
        tail, _ = step.tails.read_block(self.layer, row.slot, 1, row.tail + 1)
        dtype = step.tails.shapes[self.layer].dtype
        parts = [
            side.dequantize(step.device).squeeze(0) if isinstance(side, Coded) else side
            for side in read_sides(pieces, self.layer, step.device)[0]
        ]
        scores = mx.concatenate(
            [
                index.scores(*divmod(number, step.width), part.astype(dtype))
                for part in (*parts, tail.squeeze(0))
            ]
        )
        seen = self._seen(row, count)
        if seen is not None:
            scores = mx.where(seen, scores, -mx.inf)
        columns = mx.argpartition(scores, kth=-index.budget)[-index.budget :]
        columns = mx.sort(columns)
        return ChosenTokens(columns, None if seen is None else seen[columns][None])

    def _seen(self, row: DecodeRow, count: int) -> mx.array | None:
        """Return which of the columns a row sees, (count,) bool; None if it sees all."""
        window, begins = self.attention_window, row.position - row.tail
        if window.starts_at(row.position) <= max(begins, window.keep):
            return None
        own = mx.arange(begins, row.position + 1)
        seen = window.mask(mx.array([row.position]), own)[0]
        return mx.concatenate([mx.ones(count - row.tail - 1, mx.bool_), seen])


def check_read(reads: Sequence[Reads]) -> None:
    """Raise TypeError if neither attention nor a known index has read a cache.

    An unknown index takes stand-ins for all tokens. With few tokens it chooses nothing, so that a
    short test would not show it.
    """
    latents = (cache for cache in reads if isinstance(cache, LatentReads))
    unread = [str(cache.layer) for cache in latents if not cache.is_read]
    if unread:
        raise TypeError(f"this model has an index of its own, in cache {', '.join(unread)}")


def latent_reads(
    step: DecodeStep, attention_windows: Sequence[AttentionWindow]
) -> list[LatentReads]:
    """Return the caches for a decode step, one per layer."""
    reads: list[LatentReads] = []
    for layer, attention_window in enumerate(attention_windows):
        before = reads[-1] if reads else None
        reads.append(LatentReads(step, layer, attention_window, before))
    return reads
