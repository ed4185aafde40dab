"""Primitive operations of attention: the reference in MLX's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

from penstock.attention import span_attention
from penstock.attention.span_attention import KVData, Partial
from penstock.kv.codecs.code_ops import CodeOps
from penstock.kv.codecs.coded import Codec, Coded

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class AttentionOps(CodeOps):
    """Primitive operations of attention, in MLX's operations; devices may override them."""

    def attend_decode(
        self,
        stacked: mx.array,
        keys: Sequence[KVData],
        values: Sequence[KVData],
        seen: mx.array | None = None,
        after: mx.array | None = None,
    ) -> Partial:
        """Let stacked queries (kv_heads, m, d) attend to consecutive parts under one softmax.

        Args:
            stacked: queries, see `span_attention.grouped`.
            keys: keys of the parts, (kv_heads, n_i, d) each, or coded.
            values: values of the parts, (kv_heads, n_i, value_dim) each, or coded.
            seen: mask that broadcasts to (kv_heads, m, sum n_i); None sees all columns.
            after: array that must be evaluated before codes are read.
        """
        return span_attention.attend(stacked, keys, values, seen, after, self)

    def multiply_keys(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Return the products (..., m, n) of queries (..., m, d) with keys (..., n, d)."""
        return queries @ keys.swapaxes(-1, -2)

    def exp2(self, x: mx.array) -> mx.array:
        """Return 2^x for x <= 0; below -126 the result is approximately 0."""
        return mx.power(2.0, x)

    def index_codes(self, codec: Codec, side: mx.array) -> Coded:
        """Encode keys or values (batch, heads, tokens, dim) for the index."""
        return codec.encode(side, self)

    def divide(
        self,
        function: Callable[[_Task], _Result],
        tasks: Sequence[_Task],
        meanwhile: Callable[[], object] | None = None,
    ) -> list[_Result]:
        """Return the results of a function for each task, computed by one thread per lane.

        Args:
            function: must not use MLX if there are several lanes, as it runs in other threads.
            tasks: arguments of the calls.
            meanwhile: callback to run once in this thread while the others start.
        """
        if meanwhile is not None:
            meanwhile()
        return [function(task) for task in tasks]
