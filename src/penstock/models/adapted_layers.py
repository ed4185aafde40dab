"""Layers that apply to each row of a batch its own LoRA or DoRA adapter.

    y = x W + b + s (x A) B                        LoRA
    y = (x W + s (x A) B) m / ||W + s A B|| + b    DoRA; the norm of each output

The matrices of all adapters are stacked, and rows select theirs by number. Number 0 means no
adapter: its matrices are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from penstock.errors import ModelError
from penstock.models.adapter_names import NO_ADAPTERS, AdapterNames
from penstock.models.layer_seams import IS_HEAD, read_rows, row_adapters, skips_logits

Pair: TypeAlias = tuple[mx.array, mx.array, mx.array | None]
"""Matrices A and B, and the magnitudes of DoRA (outputs,).

A linear layer has A (inputs, rank) and B (rank, outputs); an embedding A (vocabulary, rank) and B
(rank, width); experts A (experts, rank, inputs) and B (experts, outputs, rank).
"""


@dataclass(slots=True)
class Adapters:
    """Names of a model's adapters, and the bytes of their matrices."""

    names: AdapterNames = NO_ADAPTERS
    nbytes: int = 0


class AdaptedModule(nn.Module):
    """Base of layers with adapters.

    Args:
        inner: the layer without adapters.
        name: name of the layer in the model, for errors.
        pairs: matrices of each adapter; None if it does not change the layer.
        shapes: shapes of A and B for a rank.

    Raises:
        ModelError: matrices have other shapes than the layer.
    """

    def __init__(
        self,
        inner: nn.Module,
        adapters: Adapters,
        name: str,
        pairs: Sequence[Pair | None],
        scales: Sequence[float],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = inner
        # MLX does not count attributes with an underscore as parameters of the model.
        self._adapters = adapters
        shapes = self.shapes(inner)
        changing = [pair for pair in pairs if pair is not None]
        for a, b, _ in changing:
            fits = [
                array.ndim == len(shape)
                and all(size in (None, of) for size, of in zip(shape, array.shape, strict=True))
                for array, shape in zip((a, b), shapes, strict=True)
            ]
            if not all(fits):
                raise ModelError(
                    f"an adapter's {name} has matrices of {a.shape} and {b.shape}, unlike the "
                    f"model's layer: it is another model's adapter"
                )
        self._a, self._b, self._scales = self._stacked(pairs, scales)
        self._factors: mx.array | None = None
        if any(pair[2] is not None for pair in changing):
            self._factors = self._dora_factors(name, pairs, scales)
        arrays = [self._a, self._b, self._scales]
        arrays += [] if self._factors is None else [self._factors]
        mx.eval(arrays)
        self.adapter_bytes = sum(array.nbytes for array in arrays)

    @staticmethod
    def shapes(inner: Any) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Return the shapes of A and B, with None for the rank."""
        raise NotImplementedError

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    def _extra_repr(self) -> str:
        return f"adapters={len(self._scales) - 1}, dtype={self._a.dtype}"

    def _stacked(
        self, pairs: Sequence[Pair | None], scales: Sequence[float]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return A, B and scales of all adapters, with zeros up to the largest rank."""
        changing = [pair for pair in pairs if pair is not None]
        dtype = mx.result_type(*(side for pair in changing for side in pair[:2]))
        stacks = []
        for side in (0, 1):
            arrays = [None if pair is None else pair[side] for pair in pairs]
            largest = [
                max(sizes)
                for sizes in zip(*(a.shape for a in arrays if a is not None), strict=True)
            ]
            stack = mx.zeros((1 + len(pairs), *largest), dtype)
            for number, array in enumerate(arrays, 1):
                if array is not None:
                    stack[(number, *map(slice, array.shape))] = array
            stacks.append(stack)
        return stacks[0], stacks[1], mx.array([0.0, *scales], dtype)

    def _dora_factors(
        self, name: str, pairs: Sequence[Pair | None], scales: Sequence[float]
    ) -> mx.array:
        """Return the factor of each output (adapters, 1, outputs): m / ||W + s A B||, or 1."""
        weight = dense_weight(self.linear).astype(mx.float32)
        ones = mx.ones(len(weight))
        factors = [ones]
        for pair, scale in zip(pairs, scales, strict=True):
            if pair is None or pair[2] is None:
                factors.append(ones)
                continue
            a, b = pair[0].astype(mx.float32), pair[1].astype(mx.float32)
            norms = mx.linalg.norm(weight + scale * self._product(a, b), axis=1)
            factors.append(pair[2].astype(mx.float32) / norms)
        return mx.stack(factors)[:, None]

    @staticmethod
    def _product(a: mx.array, b: mx.array) -> mx.array:
        """Return A B in the order of the layer's weight."""
        return (a @ b).T

    def _added(self, x: mx.array, a: mx.array, b: mx.array, rows: mx.array | int) -> mx.array:
        """Return s (x A) B for x (rows, tokens, inputs) or, with one adapter for all, any x."""
        if isinstance(rows, int):
            return (x @ a[rows] * self._scales[rows]) @ b[rows]
        lowered = mx.gather_mm(x, a, rhs_indices=rows) * self._scales[rows, None, None]
        return mx.gather_mm(lowered, b, rhs_indices=rows)

    def _changed(
        self, y: mx.array, x: mx.array, a: mx.array, b: mx.array, rows: mx.array | int
    ) -> mx.array:
        """Return a product y of x with the change by each row's adapter."""
        if isinstance(rows, int):
            return self._combined(y, self._added(x, a, b, rows).astype(y.dtype), rows)
        # Some layers get all tokens on one axis, in which those of a row are consecutive.
        added = self._added(x.reshape(rows.size, -1, x.shape[-1]), a, b, rows).astype(y.dtype)
        return self._combined(y.reshape(added.shape), added, rows).reshape(y.shape)

    def _combined(self, y: mx.array, added: mx.array, rows: mx.array | int) -> mx.array:
        if self._factors is None:
            return y + added
        factors = self._factors[rows].astype(y.dtype)
        changed = (y + added) * factors
        bias = self.linear.get("bias")
        return changed if bias is None else changed + bias * (1 - factors)


class AdaptedLinear(AdaptedModule):
    """Linear layer, also as the output layer, with each row's adapter."""

    @staticmethod
    def shapes(inner: Any) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        outputs, inputs = dense_shape(inner)
        return (inputs, None), (None, outputs)

    def __call__(self, x: mx.array) -> mx.array:
        if getattr(self, IS_HEAD, False) and skips_logits():
            return mx.zeros((*x.shape[:-1], self._b.shape[-1]))
        read, rows = read_rows(x, self), row_adapters(x, self)
        y: mx.array = self.linear(read)
        if isinstance(rows, int) and not rows:
            return y
        return self._changed(y, read, self._a, self._b, rows)


class AdaptedEmbedding(AdaptedModule):
    """Embedding, also as the output layer, with each row's adapter."""

    @staticmethod
    def shapes(inner: Any) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        vocabulary, width = dense_shape(inner)
        return (vocabulary, None), (None, width)

    @staticmethod
    def _product(a: mx.array, b: mx.array) -> mx.array:
        return a @ b

    def __call__(self, tokens: mx.array) -> mx.array:
        y: mx.array = self.linear(tokens)
        rows = row_adapters()
        if isinstance(rows, int):
            if not rows:
                return y
            lowered, factors = self._a[rows][tokens], self._of_tokens(rows, tokens)
            added = lowered * self._scales[rows] @ self._b[rows]
        else:
            per_row = tokens.reshape(rows.size, -1)
            lowered = self._a[rows[:, None], per_row] * self._scales[rows, None, None]
            added = mx.gather_mm(lowered, self._b, rhs_indices=rows).reshape(y.shape)
            factors = self._of_tokens(rows[:, None], per_row)
        changed = y + added.astype(y.dtype)
        if factors is None:
            return changed
        return changed * factors.reshape(*tokens.shape, 1).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits (..., vocabulary) of hidden states (..., n)."""
        y: mx.array = self.linear.as_linear(x)
        rows = row_adapters()
        if skips_logits() or (isinstance(rows, int) and not rows):
            return y
        if y.shape[:-1] != x.shape[:-1]:  # the layer has read some of the rows
            x, rows = read_rows(x), row_adapters(x)
        return self._changed(y, x, self._b.swapaxes(1, 2), self._a.swapaxes(1, 2), rows)

    def _of_tokens(self, rows: mx.array | int, tokens: mx.array) -> mx.array | None:
        return None if self._factors is None else self._factors[:, 0][rows, tokens]


class AdaptedSwitch(AdaptedModule):
    """Linear layers of experts. Its indices name an expert and an adapter; see `combined`."""

    def __init__(
        self,
        inner: nn.Module,
        adapters: Adapters,
        name: str,
        pairs: Sequence[Pair | None],
        scales: Sequence[float],
    ) -> None:
        if any(pair is not None and pair[2] is not None for pair in pairs):
            raise ModelError(
                f"a DoRA adapter changes {name}, which are experts; only LoRA is supported there"
            )
        super().__init__(inner, adapters, name, pairs, scales)

    @staticmethod
    def shapes(inner: Any) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        experts = len(inner.weight)
        return (experts, None, inner.input_dims), (experts, inner.output_dims, None)

    def _stacked(
        self, pairs: Sequence[Pair | None], scales: Sequence[float]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return A and B of each expert and adapter in turn, transposed."""
        a, b, factors = super()._stacked(pairs, scales)
        stacks = [
            mx.contiguous(stack.swapaxes(0, 1).reshape(-1, *stack.shape[2:]).swapaxes(1, 2))
            for stack in (a, b)
        ]
        return stacks[0], stacks[1], factors

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        kinds = len(self._scales)
        y: mx.array = self.linear(x, indices // kinds, sorted_indices=sorted_indices)
        rows = row_adapters()
        if isinstance(rows, int) and not rows:
            return y
        scales = self._scales[indices % kinds][..., None, None]
        lowered = mx.gather_mm(x, self._a, rhs_indices=indices, sorted_indices=sorted_indices)
        added = mx.gather_mm(
            lowered * scales, self._b, rhs_indices=indices, sorted_indices=sorted_indices
        )
        return y + added.astype(y.dtype)


class BareSwitch(nn.Module):
    """Linear layers of experts that no adapter changes, beside some that an adapter changes."""

    def __init__(self, inner: nn.Module, kinds: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = inner
        self._kinds = kinds

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y: mx.array = self.linear(x, indices // self._kinds, sorted_indices=sorted_indices)
        return y


def with_combined_indices(experts: nn.Module, kinds: int) -> None:
    """Let experts pass the indices `expert * kinds + adapter` to their linear layers, in place.

    The adapter of a token depends on its row in the batch, which a linear layer cannot tell after
    the tokens have been sorted by expert. `kinds` is the number of adapters, plus 1 for none.
    """
    theirs: Any = type(experts)

    def call(self: Any, x: mx.array, indices: mx.array) -> Any:
        return theirs.__call__(self, x, combined(indices, kinds))

    names = {"__call__": call, "__module__": __name__}
    experts.__class__ = type(theirs.__name__, (theirs,), names)


def combined(indices: mx.array, kinds: int) -> mx.array:
    """Return `expert * kinds + adapter` for experts (..., n) of the tokens of this batch.

    >>> combined(mx.array([[2, 0]]), 3).tolist()
    [[6, 0]]
    """
    rows = row_adapters()
    if isinstance(rows, mx.array):
        tokens = indices.size // indices.shape[-1]
        rows = mx.repeat(rows, tokens // rows.size).reshape(*indices.shape[:-1], 1)
    return (indices * kinds + rows).astype(mx.uint32)


def dense_weight(layer: Any) -> mx.array:
    """Return the weight (outputs, inputs) of a linear layer or an embedding, dequantized."""
    weight: mx.array = layer.weight
    if "scales" not in layer:
        return weight
    return mx.dequantize(
        weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def dense_shape(layer: Any) -> tuple[int, int]:
    """Return the shape of `dense_weight` without computing it."""
    outputs, inputs = layer.weight.shape
    return outputs, inputs * 32 // layer.bits if "scales" in layer else inputs
