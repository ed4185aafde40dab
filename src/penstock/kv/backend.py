"""The back end: all that is computed in another way on a CPU than on a GPU, and its bytes.

It is chosen once, from MLX's device, when it is first asked for. No other module asks for the
device. Both back ends run on every device and give the same numbers, to rounding: tests run the
GPU's on a CPU.
"""

from __future__ import annotations

import os
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from penstock.kv import attention, sign_products, wide_codes
from penstock.kv.attention import LOG2_E, MASKED, AttentionWindow, KVData, Partial

SCORE_BUFFERS = 8
"""Arrays of float32 that are alive together while scores become weights: 7.7 at most, measured."""
HALF_SCORE_BUFFERS = 10
"""The same where keys are of half precision, dequantized and narrowed again: 9.5 at most."""
FUSED_DIMS = (64, 80, 128)
"""Sizes of a head for which MLX's attention to a chunk is one kernel on a GPU. For others it
holds all scores (MLX 0.32, Metal)."""
SIGNS_AT_ONCE = 2**18
"""Codes of one bit that become floats together: 1 MiB."""
LANES_FROM = 2**16
"""Scores from which it pays to divide them between two streams."""
CODED_LANES_FROM = 2**12
"""The same where most of what is read is coded: MLX multiplies codes on one core alone."""
CODED_LANES_ROWS = 4
"""Most rows whose codes MLX multiplies; for more rows codes become floats, and BLAS has them."""
INTEGERS = {2: (mx.int16, mx.uint16), 4: (mx.int32, mx.uint32)}
"""Signed and unsigned integer types, by the bytes of a number."""
HAS_FLOAT16 = platform.machine() in ("arm64", "aarch64")
"""Whether MLX computes with it on this processor; on others it takes it for two bytes."""

# 2^f for f in -0.5..0.5, the minimax polynomial of degree 5 with 2^0 = 1: relative error 1.1e-7.
_EXP2 = (1.0, 0.69314685, 0.240222347, 0.0555088523, 0.00967192603, 0.00132244622)
_ROUND = 1.5 * 2**23  # adding it leaves the nearest integer in the low bits of a float32


class Backend(ABC):
    """How keys and values are computed with on one kind of device, and what that takes."""

    lanes: int = 1
    """Streams that work is divided between."""
    on_heap: bool = False
    """Whether arrays lie on the heap of the process, in memory that the system counts as its."""
    own_memory: bool = False
    """Whether the device has memory of its own: to give it up helps no other program."""
    fuses_attention: bool = True
    """Whether MLX's own attention to a chunk can be one kernel, which holds no scores."""
    scores_at_once: int = 2**19
    """Scores that a prefill chunk computes at a time; 2 MiB in float32."""

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
            scale: what the model multiplies its scores by.
            attention_window: which columns are seen.
            sinks: (heads,) as the model has them, in base e.
            eager: what is computed in slices is computed now; left to MLX, the scores of many
                are alive together.

        Returns:
            (1, heads, n, value_dim).
        """

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
            after: what must be computed before codes are read.
        """
        return attention.attend(stacked, keys, values, seen, after, self.exp2)

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

    def dequantize_codes(
        self, codes: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
    ) -> mx.array:
        """Return what codes (..., rows, words) stand for, float32, as `mx.dequantize` does."""
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
        """Return x as float32; what is no finite number may become one."""
        return x.astype(mx.float32)

    def lane(self, number: int | None) -> AbstractContextManager[None]:
        """Put what is computed here on one of the lanes, by its number; None: on neither."""
        return nullcontext()

    def settle(self, number: int) -> None:
        """Wait until all that this thread has put into a lane is computed."""
        with self.lane(number):
            mx.synchronize(default_stream())

    def computes_ahead(self, rows: int) -> bool:
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


@dataclass(frozen=True)
class GPUBackend(Backend):
    """Metal and CUDA: MLX's own kernels, which fuse attention and read codes as they lie."""

    own_memory: bool = False
    kernel_language: str | None = None
    """Language of kernels on this device, "metal" or "cuda"; None where none are compiled."""
    call_kernel: Callable[..., Any] | None = None
    """Takes calls of our own kernels in place of the GPU, in tests."""

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
        """See `Backend`; nothing is computed yet."""
        n, m = queries.shape[2], keys.shape[2]
        mask: mx.array | str = "causal"
        if columns is not None or not attention_window.sees_all(start + n - 1):
            mask = attention.seen_by_chunk(attention_window, start, n, m, columns)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

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
        """See `Backend`: in the precision of x."""
        return mx.quantized_matmul(
            x,
            codes,
            scales.astype(x.dtype),
            biases.astype(x.dtype),
            transpose=transpose,
            group_size=group_size,
            bits=bits,
        )

    def holds_all_scores(self, key_dim: int, value_dim: int) -> bool:
        """See `Backend`: if there is no kernel for it."""
        return key_dim != value_dim or key_dim not in FUSED_DIMS

    def code_bytes(self, numbers: int) -> int:
        """See `Backend`: a scale and an offset in float32 for each group, of 32 at least."""
        return 2 * mx.float32.size * -(-numbers // 32)


class _Lane(threading.local):
    """A thread's second stream; streams cannot be shared between threads."""

    stream: mx.Stream | None = None
    taken = False


_second = _Lane()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class CPUBackend(Backend):
    """MLX's CPU back end on two cores, the lanes: BLAS does what its own kernels do slowly."""

    lanes: int = field(default_factory=lambda: min(2, _cores()))
    on_heap = True
    fuses_attention = False
    scores_at_once: int = Backend.scores_at_once
    codes_at_once: int = 2**18
    """Codes that become floats together: 1 MiB."""
    polynomial_from: int = 2**16
    """Elements from which 14 quick passes beat a slow one."""

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
        """See `Backend`: in slices of as many queries as have `scores_at_once`."""
        heads, n, m = queries.shape[1], queries.shape[2], keys.shape[2]
        queries_in_2 = attention.in_base_2(queries, scale)
        step = max(1, self.scores_at_once // (heads * m))
        keys, values = keys.squeeze(0), values.squeeze(0)
        sunk = None if sinks is None else (sinks * LOG2_E).reshape(keys.shape[0], -1, 1, 1)
        done = []
        for first in range(0, n, step):
            count = min(step, n - first)
            # Columns behind the last query of these are seen by none of them.
            reach = m - n + first + count
            part = self._attend_slice(
                queries_in_2[:, :, first : first + count],
                keys[:, :reach],
                values[:, :reach],
                None if columns is None else columns[:reach],
                start + first,
                attention_window,
            )
            done.append(attention.merged([part], sunk).reshape(1, heads, count, -1))
            if eager and step < n:
                mx.eval(done[-1])
        result = done[0] if len(done) == 1 else mx.concatenate(done, axis=2)
        return result.astype(queries.dtype)

    def _attend_slice(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        columns: mx.array | None,
        start: int,
        attention_window: AttentionWindow,
    ) -> Partial:
        """Return partial results (kv_heads, heads / kv_heads, n, ...) of queries over keys.

        Queries: in base 2, (1, heads, n, d), from `start` on. Keys: (kv_heads, m, d).
        """
        (_, heads, n, _), (kv_heads, m, _) = queries.shape, keys.shape
        scores = attention.score(attention.grouped(queries, kv_heads), [keys])
        scores = scores.reshape(kv_heads, heads // kv_heads, n, m)
        if columns is None and attention_window.sees_all(start + n - 1):
            own = mx.where(mx.tri(n, n, 0, mx.bool_), scores[..., m - n :], MASKED)
            scores = mx.concatenate([scores[..., : m - n], own], axis=-1) if n < m else own
        else:
            seen = attention.seen_by_chunk(attention_window, start, n, m, columns)
            scores = mx.where(seen, scores, MASKED)
        top, weights, total = attention.weigh(scores, self.exp2)
        flat = attention.mix(
            weights.reshape(kv_heads, -1, m), total.reshape(kv_heads, -1, 1), [values]
        )
        return Partial(top, total, flat.reshape(*top.shape[:-1], values.shape[-1]))

    def attend_decode(
        self,
        stacked: mx.array,
        keys: Sequence[KVData],
        values: Sequence[KVData],
        seen: mx.array | None = None,
        after: mx.array | None = None,
    ) -> Partial:
        """See `Backend`: much work is divided between the lanes, by heads."""
        kv_heads, rows, _ = stacked.shape
        count = kv_heads * rows * sum(map(attention.columns, keys))
        coded = attention.mostly_coded(keys)
        many = count >= (CODED_LANES_FROM if coded else LANES_FROM)
        crowded = coded and rows > CODED_LANES_ROWS
        if kv_heads == 1 or not many or crowded or self.lanes == 1:
            return attention.attend(stacked, keys, values, seen, after, self.exp2)

        def part(first: int, last: int) -> Partial:
            some_keys = attention.of_heads(keys, first, last)
            some_values = attention.of_heads(values, first, last)
            return attention.attend(
                stacked[first:last], some_keys, some_values, seen, after, self.exp2
            )

        half = kv_heads // 2
        one = part(0, half)
        with self.lane(1):
            other = part(half, kv_heads)
        return Partial(
            mx.concatenate([one.top, other.top]),
            mx.concatenate([one.total, other.total]),
            mx.concatenate([one.mixed, other.mixed]),
        )

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
        """See `Backend`: in float32, 60 to 150 times quicker than float16 here (MLX 0.32.4)."""
        x, scales, biases = (part.astype(mx.float32) for part in (x, scales, biases))
        if wide_codes.is_quicker(x.shape[-2], bits, transpose=transpose):
            parts = x, codes, scales, biases
            at_once = self.codes_at_once
            return wide_codes.multiply(*parts, transpose=transpose, bits=bits, at_once=at_once)
        return mx.quantized_matmul(
            x, codes, scales, biases, transpose=transpose, group_size=group_size, bits=bits
        )

    def dequantize_codes(
        self, codes: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
    ) -> mx.array:
        """See `Backend`."""
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return wide_codes.dequantize(codes, scales, biases, group_size=group_size, bits=bits)

    def multiply_signs(self, x: mx.array, codes: mx.array, levels: mx.array) -> mx.array:
        """See `Backend`: from tables of all 256 sums of eight numbers; computed at once."""
        return sign_products.by_tables(x, codes, levels)

    def exp2(self, x: mx.array) -> mx.array:
        """Compute 2 ** x by a polynomial; see `Backend`.

        `mx.exp` takes 8.9 ns an element here, `mx.power` 3.1, and the polynomial 1.6 (1 M scores,
        MLX 0.32.4, one core).
        """
        if x.size < self.polynomial_from or x.dtype != mx.float32:
            return mx.power(2.0, x)
        x = mx.maximum(x, -126.0)
        rounded = x + _ROUND
        f = x - (rounded - _ROUND)
        power = f * _EXP2[5] + _EXP2[4]
        for coefficient in _EXP2[3::-1]:
            power = power * f + coefficient
        exponent = mx.left_shift(rounded.view(mx.int32), mx.array(23, mx.int32))
        return (power.view(mx.int32) + exponent).view(mx.float32)

    def extremes(self, groups: mx.array) -> tuple[mx.array, mx.array]:
        """Find extremes by the bits, read as integers; see `Backend`.

        MLX finds the extremes of integers four times as quickly. They are in the order of the
        numbers as long as those are positive, and in the opposite one if they are negative, behind
        all others where no sign is looked at.
        """
        if groups.dtype.size not in INTEGERS:
            return Backend.extremes(self, groups)
        signed, unsigned = INTEGERS[groups.dtype.size]
        bits = groups.view(signed)
        low, high = bits.min(axis=-1), bits.max(axis=-1)
        furthest = groups.view(unsigned).max(axis=-1).view(signed)
        least, most = mx.where(low < 0, furthest, low), mx.where(high < 0, low, high)
        dtype = groups.dtype
        return least.view(dtype).astype(mx.float32), most.view(dtype).astype(mx.float32)

    def as_float32(self, x: mx.array) -> mx.array:
        """Convert float16 by its bits; see `Backend`.

        A processor without float16 does so three times as quickly as MLX. Sign and exponent move
        to where float32 has them, which counts exponents from 112 more.
        """
        if x.dtype != mx.float16 or HAS_FLOAT16:
            return x.astype(mx.float32)
        bits = (x.view(mx.int16).astype(mx.int32) << 13) & ~(0b111 << 28)
        return bits.view(mx.float32) * 2.0**112

    @contextmanager
    def lane(self, number: int | None) -> Iterator[None]:
        """See `Backend`: by the number's parity. A lane within a lane stays in it."""
        if number is None or _second.taken or self.lanes == 1:
            yield
            return
        _second.taken = True
        try:
            if number % 2 == 0:
                yield
            else:
                if _second.stream is None:
                    _second.stream = mx.new_stream(mx.cpu)
                with mx.stream(_second.stream):
                    yield
        finally:
            _second.taken = False

    def computes_ahead(self, rows: int) -> bool:
        """See `Backend`: several rows run in lanes.

        One row would wait for Python in a third of its step. Several rows keep both cores busy;
        BLAS must be on one thread first.
        """
        return rows == 1

    def code_bytes(self, numbers: int) -> int:
        """See `Backend`."""
        at_once = min(numbers, self.codes_at_once)
        return mx.float32.size * self.lanes * wide_codes.BUFFERS * at_once


_chosen: Backend | None = None


def current() -> Backend:
    """Return the back end of this process: that of MLX's device when it is first asked for."""
    global _chosen
    if _chosen is None:
        language = "metal" if mx.metal.is_available() else "cuda"
        gpu = GPUBackend(language == "cuda", language)
        _chosen = CPUBackend() if mx.default_device() == mx.cpu else gpu
    return _chosen


@contextmanager
def using(backend: Backend) -> Iterator[Backend]:
    """Let the process compute with this back end meanwhile, whatever its device is."""
    global _chosen
    before, _chosen = _chosen, backend
    try:
        yield backend
    finally:
        _chosen = before


def default_stream() -> mx.Stream:
    """Return the stream that MLX computes on here, of its device."""
    return mx.default_stream(mx.default_device())
