"""The forward pass of BERT, RoBERTa and their relatives, in MLX operations.

The rows of a batch are concatenated without padding. Only attention splits them: adjacent rows of
equal length are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np

from penstock.attention import devices
from penstock.encoders import numpy_steps
from penstock.encoders.encoder_spec import EncoderSpec, Pooling
from penstock.encoders.named_weights import LayerNorm, LinearLayer, NamedWeights, arrays_of

PREFIXES = ("", "bert.", "roberta.")
"""Prefixes of the weights' names, by the transformers class that saved them."""
MARKER = "embeddings.word_embeddings.weight"
PROJECTIONS = ("query", "key", "value")
LEAST_NORM = 1e-12
"""Lower bound of an embedding's norm, against division by zero."""


@dataclass(frozen=True, slots=True)
class EncoderRow:
    """Tokens of a text or a pair of texts, special tokens included."""

    tokens: Sequence[int]
    first: int | None = None
    """Number of tokens before a pair's second text; None for a single text."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Layer:
    projections: LinearLayer
    """Fused projection to queries, keys and values; includes the scale of attention."""
    mixed: LinearLayer
    """Output projection of attention."""
    mixed_norm: LayerNorm
    up: LinearLayer
    down: LinearLayer
    norm: LayerNorm


class Bert:
    """A BERT-like model with its weights: embeds texts, or scores pairs of texts.

    Args:
        weights: arrays by their names in transformers.

    Raises:
        ModelError: a weight is missing, or its shape does not match the spec.
    """

    def __init__(self, spec: EncoderSpec, weights: Mapping[str, mx.array]) -> None:
        self.spec = spec
        self._activate, self._mix = activation_and_mix(spec.activation)
        named = NamedWeights(weights, spec, MARKER, PREFIXES)
        width = spec.width
        self._words = named.array("embeddings.word_embeddings.weight", spec.vocabulary_size, width)
        self._positions = named.array("embeddings.position_embeddings.weight", None, width)
        self._kinds = named.array("embeddings.token_type_embeddings.weight", None, width)
        self._norm = named.norm("embeddings.LayerNorm")
        self._layers = [
            _layer(named, spec, f"encoder.layer.{number}.") for number in range(spec.layers)
        ]
        self._dense: LinearLayer | None = None
        self._scores: LinearLayer | None = None
        if not spec.embeds:
            self._dense, self._scores = _head(named, spec)

    @property
    def arrays(self) -> list[mx.array]:
        parts = (self._norm, *self._layers, self._dense, self._scores)
        return [self._words, self._positions, self._kinds, *arrays_of(parts)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __call__(self, rows: Sequence[EncoderRow]) -> mx.array:
        """Return the embeddings (rows, width) of texts, or the scores (rows, labels) of pairs.

        Rows of equal length must be adjacent.
        """
        groups = list(groups_of(rows))
        x = self._norm(self._embedded(rows))
        for layer in self._layers:
            x = layer.mixed_norm(x + layer.mixed(self._attend(layer.projections(x), groups)))
            x = layer.norm(x + layer.down(self._activate(layer.up(x))))
            mx.eval(x)
        pooling = self.spec.pooling if self.spec.embeds else "cls"
        pooled = mx.concatenate([pooled_states(x, pooling, *group) for group in groups])
        if self._dense is None or self._scores is None:
            return unit(pooled) if self.spec.normalizes else pooled
        return self._scores(mx.tanh(self._dense(pooled)))

    def _embedded(self, rows: Sequence[EncoderRow]) -> mx.array:
        tokens = np.concatenate([np.asarray(row.tokens, np.int32) for row in rows])
        first = self.spec.first_position
        positions = np.concatenate([np.arange(first, first + len(r), dtype=np.int32) for r in rows])
        x = self._words[mx.array(tokens)] + self._positions[mx.array(positions)]
        if len(self._kinds) < 2 or all(row.first is None for row in rows):
            return x + self._kinds[0]
        kinds = np.concatenate([_kinds_of(row) for row in rows])
        return x + self._kinds[mx.array(kinds)]

    def _attend(self, projected: mx.array, groups: Sequence[tuple[int, int, int]]) -> mx.array:
        """Compute attention within each row."""
        heads, width = self.spec.heads, self.spec.width
        mixed = []
        for start, count, length in groups:
            of_group = projected[start : start + count * length]
            parts = of_group.reshape(count, length, 3, heads, width // heads)
            queries, keys, values = parts.transpose(2, 0, 3, 1, 4)
            of_heads = self._mix(queries, keys, values).transpose(0, 2, 1, 3)
            mixed.append(of_heads.reshape(count * length, width))
        return mixed[0] if len(mixed) == 1 else mx.concatenate(mixed)


def pooled_states(x: mx.array, pooling: Pooling, start: int, count: int, length: int) -> mx.array:
    """Return the pooled states (count, width) of adjacent rows of equal length."""
    states = x[start : start + count * length].reshape(count, length, -1)
    match pooling:
        case "cls":
            return states[:, 0]
        case "lasttoken":
            return states[:, -1]
        case "max":
            return states.max(axis=1)
        case _:
            return states.mean(axis=1)


def unit(x: mx.array) -> mx.array:
    """Scale vectors to unit length."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), LEAST_NORM)


def batch_bytes(spec: EncoderSpec, lengths: Sequence[int]) -> int:
    """Return an upper bound of the bytes that a forward pass over rows of these lengths takes."""
    tokens = sum(lengths)
    most = spec.most_queries
    scores = spec.heads * sum(length * min(length, most or length) for length in lengths)
    return 4 * (tokens * (14 * spec.width + 5 * spec.hidden) + 3 * scores)


def groups_of(rows: Sequence[EncoderRow]) -> Iterator[tuple[int, int, int]]:
    """Yield start, number of rows and row length of each group of adjacent rows of equal length."""
    start = 0
    for length, same in groupby(rows, key=len):
        count = sum(1 for _ in same)
        yield start, count, length
        start += count * length


def _kinds_of(row: EncoderRow) -> np.ndarray:
    kinds = np.zeros(len(row), np.int32)
    if row.first is not None:
        kinds[row.first :] = 1
    return kinds


def mix(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None
) -> mx.array:
    """Return softmax(queries @ keys^T + mask) @ values."""
    added = None if mask is None else mask.astype(queries.dtype)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=added)


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


def _gelu_new(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "relu": _relu,
}


def _layer(named: NamedWeights, spec: EncoderSpec, name: str) -> _Layer:
    width, hidden = spec.width, spec.hidden
    scale = 1 / math.sqrt(width // spec.heads)
    of = f"{name}attention.self."
    weights = [named.array(f"{of}{part}.weight", width, width) for part in PROJECTIONS]
    biases = [named.array(f"{of}{part}.bias", width) for part in PROJECTIONS]
    weight = mx.concatenate([weights[0] * scale, *weights[1:]])
    bias = mx.concatenate([biases[0] * scale, *biases[1:]])
    mx.eval(weight, bias)
    return _Layer(
        projections=LinearLayer(weight.T, bias),
        mixed=named.linear(f"{name}attention.output.dense", width, width),
        mixed_norm=named.norm(f"{name}attention.output.LayerNorm"),
        up=named.linear(f"{name}intermediate.dense", hidden, width),
        down=named.linear(f"{name}output.dense", width, hidden),
        norm=named.norm(f"{name}output.LayerNorm"),
    )


def _head(named: NamedWeights, spec: EncoderSpec) -> tuple[LinearLayer, LinearLayer]:
    """Return the two linear layers of a pair's classifier, by BERT's or RoBERTa's names."""
    width, labels = spec.width, spec.labels
    if "classifier.out_proj.weight" in named:
        dense = named.linear("classifier.dense", width, width, whole=True)
        return dense, named.linear("classifier.out_proj", labels, width, whole=True)
    dense = named.linear("pooler.dense", width, width)
    return dense, named.linear("classifier", labels, width, whole=True)


def activation_and_mix(name: str) -> tuple[Callable[[mx.array], mx.array], Callable[..., mx.array]]:
    """Return the activation of a name and `mix`, in NumPy where arrays are on the heap."""
    if not devices.current().facts.on_heap:
        return ACTIVATIONS[name], mix
    return numpy_steps.gelu if name == "gelu" else ACTIVATIONS[name], numpy_steps.mix
