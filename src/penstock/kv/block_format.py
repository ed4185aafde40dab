"""Storage format of a sequence's blocks: the first ones raw, later ones quantized.

It is known in advance, so that files can be read directly into buffers of the right format.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from penstock.kv.block_spans import Spans, record_blocks
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.codecs.spilled import is_spilled
from penstock.kv.columns import Side
from penstock.kv.quantization import ALL_RAW, QuantizationRule
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    heads: int
    dim: int
    dtype: mx.Dtype
    codec: Codec | None

    @property
    def token_bits(self) -> int:
        if self.codec is None:
            return self.heads * self.dim * self.dtype.size * 8
        return self.heads * self.codec.token_bits(self.dim)

    def arrays(self, tokens: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Return the shapes and dtypes of arrays for `tokens` tokens, a multiple of the span."""
        if self.codec is None:
            return [((1, self.heads, tokens, self.dim), self.dtype)]
        span = self.codec.span
        # Not evaluated; only the shapes and dtypes are used.
        parts = self.codec.encode(
            mx.zeros((1, self.heads, span, self.dim), self.dtype), CodeOps()
        ).parts
        return [((1, self.heads, tokens // span, *part.shape[3:]), part.dtype) for part in parts]

    def side(self, arrays: Sequence[mx.array]) -> Side:
        if self.codec is None:
            (array,) = arrays
            return array
        return Coded(self.codec, tuple(arrays), self.dim)

    def holds(self, side: Side) -> bool:
        return (side.codec.form if isinstance(side, Coded) else None) == self.codec

    def decoded(self, side: Side, ops: CodeOps) -> Side:
        """Return a side, dequantized to the model's dtype if it is encoded."""
        return side.dequantize(ops).astype(self.dtype) if isinstance(side, Coded) else side


@dataclass(frozen=True, slots=True)
class BlockFormat:
    layers: tuple[tuple[ArrayFormat, ArrayFormat], ...]

    @classmethod
    def of(
        cls,
        shapes: Sequence[LayerShape],
        scheme: Scheme | None = None,
        raw_layers: Collection[int] = (),
    ) -> BlockFormat:
        """Return the format of a model's layers; raw without a scheme, and for `raw_layers`."""

        def layer(number: int, shape: LayerShape) -> tuple[ArrayFormat, ArrayFormat]:
            keys, values = None, None
            if scheme is not None and number not in raw_layers:
                codecs = scheme.of_layer(number)
                keys, values = codecs.keys, codecs.values
            return (
                ArrayFormat(shape.kv_heads, shape.key_dim, shape.dtype, keys),
                ArrayFormat(shape.kv_heads, shape.value_dim, shape.dtype, values),
            )

        return cls(tuple(layer(number, shape) for number, shape in enumerate(shapes)))

    def nbytes(self, tokens: int) -> int:
        return tokens * sum(side.token_bits for layer in self.layers for side in layer) // 8

    def blank(self, tokens: int) -> Segment:
        def side(form: ArrayFormat) -> Side:
            return form.side([mx.zeros(shape, dtype) for shape, dtype in form.arrays(tokens)])

        layers = tuple((side(keys), side(values)) for keys, values in self.layers)
        return Segment(layers, length=tokens)

    def decoded(self, segment: Segment, ops: CodeOps) -> Segment:
        layers = (
            (keys_of.decoded(keys, ops), values_of.decoded(values, ops))
            for (keys_of, values_of), (keys, values) in zip(
                self.layers, segment.layers, strict=True
            )
        )
        return replace(segment, layers=tuple(layers))

    def holds(self, segment: Segment) -> bool:
        return all(
            form.holds(side)
            for forms, layer in zip(self.layers, segment.layers, strict=True)
            for form, side in zip(forms, layer, strict=True)
        )


class BlockFormats:
    """Format of each block of a sequence, by index; without a rule all blocks are raw."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        block_size: int,
        rule: QuantizationRule = ALL_RAW,
        ops: CodeOps | None = None,
        *,
        decodes: bool = False,
    ) -> None:
        self.block_size = block_size
        self.rule = rule
        self._ops = CodeOps() if ops is None else ops
        self._decodes = decodes
        self._raw = BlockFormat.of(shapes)
        self._coded = self._raw
        self._first = 0
        """Number of leading raw blocks."""
        if not rule.is_raw:
            self._coded = BlockFormat.of(shapes, rule.scheme, rule.raw_layers)
            self._first = rule.first_tokens // block_size
        self.least_blocks = -(-rule.least_tokens // block_size)

    @property
    def coded(self) -> BlockFormat:
        return self._coded

    def of(self, block: int) -> BlockFormat:
        return self._raw if block < self._first else self._coded

    def nbytes(self, first: int, stop: int) -> int:
        raw = max(0, min(stop, self._first) - first)
        return self._raw.nbytes(raw * self.block_size) + self._coded.nbytes(
            (stop - first - raw) * self.block_size
        )

    @property
    def spans(self) -> Spans:
        """Division of a chain into cold-tier records, whose blocks have the same format."""
        return Spans(record_blocks(self.block_size), self._first)

    @property
    def most_record_bytes(self) -> int:
        tokens = self.spans.blocks * self.block_size
        return max(form.nbytes(tokens) for form in (self._raw, self._coded))

    @property
    def converted_record_bytes(self) -> int:
        """KV bytes of a record after conversion; 0 if records are never converted."""
        tokens = self.spans.blocks * self.block_size
        return 0 if self.rule.is_raw and not self._decodes else self._coded.nbytes(tokens)

    def converted(self, segment: Segment, block: int) -> Segment | None:
        """Convert a block to its format; None if that is impossible.

        That is the case if its KV is incomplete or spilled, or a value is too large for float16.
        """
        sides = [side for layer in segment.layers for side in layer]
        if segment.missing or any(map(is_spilled, sides)):
            return None
        form = self.of(block)
        if self._decodes and not form.holds(segment):
            segment = form.decoded(segment, self._ops)
        if not form.holds(segment) and form is self._coded and not self.rule.is_raw:
            segment = self.rule.encoded(segment, self._ops)
        return segment if form.holds(segment) else None
