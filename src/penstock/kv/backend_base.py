"""The interface of a back end: products and attention over keys and values, and their bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from penstock.kv import attention, wide_codes
from penstock.kv.attention import AttentionWindow, KVData, Partial
from penstock.kv.piece_reads import PieceReads
from penstock.kv.sign_products import Floats

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
SCORE_BUFFERS = 8
"""Arrays of float32 that are alive together while scores become weights: 7.7 at most, measured."""
HALF_SCORE_BUFFERS = 10
"""The same where keys are of half precision, dequantized and narrowed again: 9.5 at most."""
SIGNS_AT_ONCE = 2**18
"""Codes of one bit that become floats together: 1 MiB."""


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Columns that the rows first..last-1 of a decode step read together."""

    first: int
    last: int
    pieces: Sequence[tuple[mx.array, mx.array, int, int]]
    """Keys and values (1, kv_heads, n, dim) of segments, and the columns start..stop-1 of them."""
    seen: mx.array | None
    """(rows, width, columns) booleans; None if every row sees all of it."""


@dataclass(frozen=True, slots=True)
class RowTails:
    """Tails of the rows of a decode step, in the buffers of all slots."""

    keys: mx.array
    """(slots, kv_heads, columns, dim)."""
    values: mx.array
    slots: Sequence[int]
    """Slots of the rows."""
    columns: int
    """Columns of the longest, the new tokens among them."""
    seen: mx.array | None
    """(rows, width, columns) booleans; None if every row sees all of it."""


class KernelCaller(Protocol):
    """Takes calls of our own kernels in place of a GPU."""

    @property
    def target(self) -> str:
        """Language of the kernels' text that it takes."""

    def __call__(self, call: Any, /) -> Sequence[mx.array]:
        """Compute one `kernels.attend.KernelCall`."""


class Backend(ABC):
    """Operations on keys and values on one kind of device, and the bytes that they need."""

    lanes: int = 1
    """Streams that work is divided between."""
    on_heap: bool = False
    """Whether arrays lie on the heap of the process, in memory that the system counts as its."""
    uses_numpy: bool = False
    """Whether NumPy reads arrays where they lie, and computes some things quicker than MLX."""
    slow_half: bool = False
    """Whether MLX multiplies codes and half-precision weights slowly, so that float32 pays."""
    independent_products: bool = False
    """Whether `best_by_block` gives queries that are stacked the same bits as each alone."""
    own_memory: bool = False
    """Whether the device has memory of its own: to give it up helps no other program."""
    fuses_attention: bool = True
    """Whether MLX's own attention to a chunk can be one kernel, which holds no scores."""
    kernel_language: str | None = None
    """Language of kernels on this device, "metal" or "cuda"; None where none are compiled."""
    call_kernel: KernelCaller | None = None
    """Takes calls of our own kernels in place of the GPU, in tests."""
    scores_at_once: int = 2**19
    """Scores that are computed at a time, at most; 2 MiB in float32."""

    @property
    def chunk_scores(self) -> int:
        """Scores that a prefill chunk computes at a time, at most."""
        return self.scores_at_once

    def chunk_score_bytes(self, dtype: mx.Dtype) -> int:
        """Return the working memory of one of those, in bytes, for keys of this type."""
        return self.score_bytes(dtype)

    @abstractmethod
    def attend_prefill(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        columns: mx.array | None,
        start: int,
        scale: float,
        attention_window: AttentionWindow,
        sinks: mx.array | None = None,
        eager: bool = False,
    ) -> mx.array:
        """Let a prefill chunk read contiguous keys, its own at the end.

        Args:
            queries: (1, heads, n, d), at the positions start .. start + n - 1.
            keys: (1, kv_heads, m, d); the last n are the chunk's own.
            values: (1, kv_heads, m, value_dim).
            columns: (m,) positions of the keys if they are not 0 .. m - 1.
            start: position of the first query.
            scale: factor of the model's scores.
            attention_window: which columns are seen.
            sinks: (heads,) as the model has them, in base e.
            eager: slices are computed now; left to MLX, the scores of many are alive together.

        Returns:
            (1, heads, n, value_dim).
        """

    def piece_reads(self, stacked: Sequence[mx.array]) -> AbstractContextManager[PieceReads]:
        """Let groups of queries read pieces of keys and values in this context.

        Args:
            stacked: see `PieceReads`.
        """
        return nullcontext(PieceReads(self, stacked))

    def attend_decode(
        self,
        stacked: mx.array,
        keys: Sequence[KVData],
        values: Sequence[KVData],
        seen: mx.array | None = None,
        after: mx.array | None = None,
    ) -> Partial:
        """Let stacked queries (kv_heads, m, d) read consecutive parts, under one softmax.

        Args:
            stacked: see `attention.grouped`.
            keys: (kv_heads, n_i, d) each, or coded.
            values: (kv_heads, n_i, value_dim) each, or coded.
            seen: booleans that broadcast to (kv_heads, m, sum n_i); None sees everything.
            after: array that must be computed before codes are read.
        """
        return attention.attend(stacked, keys, values, seen, after, self)

    def attend_rows(
        self,
        queries: mx.array,
        reads: Sequence[RowsRead],
        tails: RowTails,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Let several rows read parts and tails at once; None: by `attend_decode`, part by part.

        Args:
            queries: (rows, heads, width, d), in base 2.
            reads: no two of them have a column of one row in common.
            tails: of the rows.
            sinks: (heads,), in base 2.

        Returns:
            (rows, heads, width, value_dim), computed.
        """
        return None

    def multiply_keys(self, queries: mx.array, keys: mx.array) -> mx.array:
        """Return the products (..., m, n) of queries (..., m, d) with keys (..., n, d)."""
        return queries @ keys.swapaxes(-1, -2)

    def multiply_weights(self, x: mx.array, weights: mx.array) -> mx.array:
        """Return the products (..., m) of rows (..., n) with weights (m, n)."""
        return x @ weights.T

    @abstractmethod
    def multiply_codes(
        self,
        x: mx.array,
        codes: mx.array,
        scales: mx.array,
        biases: mx.array,
        *,
        transpose: bool,
        group_size: int,
        bits: int,
    ) -> mx.array:
        """Multiply by codes as `mx.quantized_matmul` does, in a precision that is quick."""

    def multiply_signs(self, x: mx.array, codes: mx.array, levels: mx.array) -> mx.array:
        """Multiply by signs, of which each row has a size of its own; MLX has no kernel for them.

        Args:
            x: (heads, m, n).
            codes: (heads, rows, n / 32), a bit a number; 1 is plus.
            levels: (heads, rows), float32.

        Returns:
            (heads, m, rows), float32.
        """
        steps, x = 2 * mx.expand_dims(levels, -1), x.astype(mx.float32)
        parts = x, codes, steps, -steps / 2
        return wide_codes.multiply(*parts, transpose=True, bits=1, at_once=SIGNS_AT_ONCE)

    def best_by_block(self, x: Floats, codes: mx.array, sizes: mx.array, block: int) -> Floats:
        """Return the largest product of each block of rows with signs, see `multiply_signs`.

        A back end may round each row's size by up to 6 %.

        Args:
            x: (heads, m, n).
            codes: (heads, rows, n / 32), whole blocks.
            sizes: (heads, rows), float16.
            block: rows of a block.

        Returns:
            (heads, m, rows / block); not finite where a size of the block is not.
        """
        products = self.multiply_signs(mx.array(x), codes, sizes.astype(mx.float32))
        return np.array(products.reshape(*products.shape[:2], -1, block).max(axis=-1))

    def dequantize_codes(
        self, codes: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
    ) -> mx.array:
        """Return the numbers of codes (..., rows, words), float32, as `mx.dequantize` does."""
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)

    def exp2(self, x: mx.array) -> mx.array:
        """Return 2^x for x <= 0; below -126 it is about 0."""
        return mx.power(2.0, x)

    def extremes(self, groups: mx.array) -> tuple[mx.array, mx.array]:
        """Return the minimum and maximum over the last axis, (...) float32.

        Both are NaN where an element is NaN.
        """
        return groups.min(axis=-1).astype(mx.float32), groups.max(axis=-1).astype(mx.float32)

    def as_float32(self, x: mx.array) -> mx.array:
        """Return x as float32; numbers that are not finite may become finite."""
        return x.astype(mx.float32)

    def lane(self, number: int | None) -> AbstractContextManager[None]:
        """Put computations in this context on one of the lanes, by its number; None: on neither."""
        return nullcontext()

    def settle(self, number: int) -> None:
        """Wait until all that this thread has put into a lane is computed."""
        with self.lane(number):
            mx.synchronize()

    def one_thread_of_blas(self) -> AbstractContextManager[None]:
        """Let BLAS multiply on one thread in this context, where lanes share the cores with it."""
        return nullcontext()

    def divides(self, rows: int, width: int, tokens: int) -> bool:
        """Tell whether lanes share a decode step of `rows`, each with `width` new tokens.

        If not, one row is read in one product, by all threads of BLAS.

        Args:
            rows: of the step.
            width: new tokens of each.
            tokens: that the first row's parts have.
        """
        return rows > 1

    def divide(
        self,
        function: Callable[[_Task], _Result],
        tasks: Sequence[_Task],
        meanwhile: Callable[[], object] | None = None,
    ) -> list[_Result]:
        """Call a function for each of some tasks, on as many threads as there are lanes.

        Args:
            function: may run in another thread, and must not use MLX then.
            tasks: what it is called with.
            meanwhile: called once in this thread, while others begin.
        """
        if meanwhile is not None:
            meanwhile()
        return [function(task) for task in tasks]

    def computes_ahead(self, rows: int, width: int, tokens: int) -> bool:
        """Tell whether a layer of a decode step is computed while Python still builds the next."""
        return False

    # ---- the bytes of it

    @property
    def sign_bytes(self) -> int:
        """Bytes that `multiply_signs` takes beside its result, at most."""
        return mx.float32.size * self.lanes * wide_codes.BUFFERS * SIGNS_AT_ONCE

    def score_bytes(self, dtype: mx.Dtype) -> int:
        """Return the working memory of one score, in bytes, for keys of this type."""
        return 4 * (SCORE_BUFFERS if dtype == mx.float32 else HALF_SCORE_BUFFERS)

    def holds_all_scores(self, key_dim: int, value_dim: int) -> bool:
        """Tell whether a prefill chunk materializes all its scores, for heads of this size."""
        return False

    @abstractmethod
    def code_bytes(self, numbers: int) -> int:
        """Return an upper bound of the bytes `multiply_codes` takes beside its result.

        Counts all lanes together, for runs of up to so many codes, one run after the other.
        """
