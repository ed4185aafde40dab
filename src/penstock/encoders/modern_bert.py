"""The forward pass of ModernBERT, in MLX operations.

As in `bert`, the rows of a batch are concatenated without padding. Every few layers attend to all
tokens of a row; the others attend to the tokens within a window on both sides. Long rows are
attended to by 512 tokens at a time, so that memory grows with a row's length, not its square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from penstock.encoders.bert import (
    ACTIVATIONS,
    EncoderRow,
    activation_and_mix,
    groups_of,
    pooled_states,
    unit,
)
from penstock.encoders.encoder_spec import MODERN_QUERIES as QUERIES
from penstock.encoders.encoder_spec import EncoderSpec
from penstock.encoders.named_weights import LayerNorm, LinearLayer, NamedWeights, arrays_of

PREFIXES = ("", "model.")
MARKER = "embeddings.tok_embeddings.weight"


@dataclass(frozen=True, slots=True)
class _ModernLayer:
    attention_norm: LayerNorm | None
    """Norm before attention; None in the first layer."""
    projections: LinearLayer
    """Fused projection to queries, keys and values; includes the scale of attention."""
    mixed: LinearLayer
    norm: LayerNorm
    up: LinearLayer
    """Projection of the MLP that goes through the activation."""
    gate: LinearLayer
    down: LinearLayer
    window: int | None
    """Number of tokens on each side that a token attends to; None means all."""
    theta: float
    """Base of the rotary position embedding."""


@dataclass(frozen=True, slots=True)
class _ModernHead:
    dense: LinearLayer
    norm: LayerNorm
    scores: LinearLayer


class ModernBert:
    """A ModernBERT model with its weights; see `Bert`.

    Raises:
        ModelError: a weight is missing, or its shape does not match the spec.
    """

    def __init__(self, spec: EncoderSpec, weights: Mapping[str, mx.array]) -> None:
        self.spec = spec
        self._activate, self._mix = activation_and_mix(spec.activation)
        named = NamedWeights(weights, spec, MARKER, PREFIXES)
        self._words = named.array(MARKER, spec.vocabulary_size, spec.width)
        self._norm = named.norm("embeddings.norm", bias=spec.norm_bias)
        self._layers = [_layer(named, spec, number) for number in range(spec.layers)]
        self._final_norm = named.norm("final_norm", bias=spec.norm_bias)
        self._head = None if spec.embeds else _head(named, spec)

    @property
    def arrays(self) -> list[mx.array]:
        parts = (self._words, self._norm, *self._layers, self._final_norm, self._head)
        return list(arrays_of(parts))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __call__(self, rows: Sequence[EncoderRow]) -> mx.array:
        """Return embeddings or scores, as `Bert`; rows of equal length must be adjacent."""
        groups = list(groups_of(rows))
        tokens = np.concatenate([np.asarray(row.tokens, np.int32) for row in rows])
        x = self._norm(self._words[mx.array(tokens)])
        for layer in self._layers:
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            x = x + layer.mixed(self._attend(layer, layer.projections(normed), groups))
            normed = layer.norm(x)
            x = x + layer.down(self._activate(layer.up(normed)) * layer.gate(normed))
            mx.eval(x)
        x = self._final_norm(x)
        pooled = mx.concatenate([pooled_states(x, self.spec.pooling, *group) for group in groups])
        if self._head is None:
            return unit(pooled) if self.spec.normalizes else pooled
        dense = ACTIVATIONS[self.spec.head_activation](self._head.dense(pooled))
        return self._head.scores(self._head.norm(dense))

    def _attend(
        self, layer: _ModernLayer, projected: mx.array, groups: Sequence[tuple[int, int, int]]
    ) -> mx.array:
        """Compute attention within each row."""
        heads, width = self.spec.heads, self.spec.width
        size = width // heads
        mixed = []
        for start, count, length in groups:
            parts = projected[start : start + count * length]
            queries, keys, values = parts.reshape(count, length, 3, heads, size).transpose(
                2, 0, 3, 1, 4
            )
            queries, keys = (
                mx.fast.rope(part, size, traditional=False, base=layer.theta, scale=1.0, offset=0)
                for part in (queries, keys)
            )
            of_heads = self._mixed(queries, keys, values, layer.window)
            mixed.append(of_heads.transpose(0, 2, 1, 3).reshape(count * length, width))
        return mixed[0] if len(mixed) == 1 else mx.concatenate(mixed)

    def _mixed(
        self, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        length, pieces = queries.shape[2], []
        for start in range(0, length, QUERIES):
            end = min(length, start + QUERIES)
            first = 0 if window is None else max(0, start - window)
            last = length if window is None else min(length, end + window)
            mask = None if window is None else _window_mask((start, end), (first, last), window)
            part = slice(first, last)
            piece = self._mix(queries[:, :, start:end], keys[:, :, part], values[:, :, part], mask)
            if length > QUERIES:
                mx.eval(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def _window_mask(queries: tuple[int, int], keys: tuple[int, int], window: int) -> mx.array | None:
    """Return the mask added to scores; None if all keys are within the window."""
    distances = np.abs(np.arange(*queries)[:, None] - np.arange(*keys))
    if distances.max() <= window:
        return None
    return mx.array(np.where(distances <= window, 0.0, -np.inf).astype(np.float32))


def _layer(named: NamedWeights, spec: EncoderSpec, number: int) -> _ModernLayer:
    width, hidden, name = spec.width, spec.hidden, f"layers.{number}."
    projections = named.linear(f"{name}attn.Wqkv", 3 * width, width, bias=spec.attention_bias)
    scales = np.ones(3 * width, np.float32)
    scales[:width] = 1 / math.sqrt(width // spec.heads)
    up = named.linear(f"{name}mlp.Wi", 2 * hidden, width, bias=spec.mlp_bias)
    window = spec.windows[number]
    return _ModernLayer(
        attention_norm=named.norm(f"{name}attn_norm", bias=spec.norm_bias) if number else None,
        projections=_scaled(projections, mx.array(scales)),
        mixed=named.linear(f"{name}attn.Wo", width, width, bias=spec.attention_bias),
        norm=named.norm(f"{name}mlp_norm", bias=spec.norm_bias),
        up=_columns(up, 0, hidden),
        gate=_columns(up, hidden, 2 * hidden),
        down=named.linear(f"{name}mlp.Wo", width, hidden, bias=spec.mlp_bias),
        window=window,
        theta=spec.thetas[number],
    )


def _scaled(linear: LinearLayer, scales: mx.array) -> LinearLayer:
    bias = None if linear.bias is None else linear.bias * scales.astype(linear.bias.dtype)
    return LinearLayer(linear.weight * scales.astype(linear.weight.dtype), bias)


def _columns(linear: LinearLayer, start: int, end: int) -> LinearLayer:
    """Return a linear layer with some of the outputs."""
    bias = None if linear.bias is None else mx.contiguous(linear.bias[start:end])
    return LinearLayer(mx.contiguous(linear.weight.T[start:end]).T, bias)


def _head(named: NamedWeights, spec: EncoderSpec) -> _ModernHead:
    width = spec.width
    return _ModernHead(
        named.linear("head.dense", width, width, whole=True, bias=spec.head_bias),
        named.norm("head.norm", whole=True, bias=spec.norm_bias),
        named.linear("classifier", spec.labels, width, whole=True),
    )
