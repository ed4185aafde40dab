"""Attention back end for CPUs: two lanes, BLAS, and replacements of MLX's slow kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx
import numpy as np

from penstock.attention import span_attention
from penstock.attention.attention_backend import DecodeStep
from penstock.attention.attention_memory import AttentionMemory, DeviceFacts
from penstock.attention.mlx_backend import MLXBackend
from penstock.attention.piece_reads import PieceReads
from penstock.attention.selection.selected_reads import ChoiceReader
from penstock.attention.selection.selection import Selection
from penstock.attention.span_attention import LOG2_E, MASKED, AttentionWindow, KVData, Partial
from penstock.blas import multiplies_unpacked, one_thread
from penstock.kv.codecs.coded import Codec, Coded
from penstock.kv.codecs.turbo import Turbo
from penstock.kv.numpy_arrays import Booleans, Floats
from penstock.plugins.cpu import cpu_rows, ordered_attention, wide_codes
from penstock.plugins.cpu.attention_tiles import HAS_FLOAT16
from penstock.plugins.cpu.choice_loops import choice_loops
from penstock.plugins.cpu.choice_reader import LoopReader
from penstock.plugins.cpu.cpu_layer_decode import CPULayerDecode, RowsRead, RowTails
from penstock.plugins.cpu.cpu_piece_reads import CPUPieceReads
from penstock.plugins.cpu.cpu_softmax import weigh_in_place
from penstock.plugins.cpu.index_codes import index_codes

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
LANES_FROM = 2**16
"""Minimum number of scores for which two streams are faster than one."""
CODED_LANES_FROM = 2**12
"""The same if most columns are compressed, for which MLX uses one core."""
CODED_LANES_ROWS = 4
"""Maximum number of rows for which MLX multiplies codes; for more, they are converted for BLAS."""
MANY_KEYS = 256
"""Minimum number of keys for which a few queries are faster as the right factor."""
UNPACKED_RESULTS = 1200
"""Maximum number of results for which OpenBLAS avoids copies, if it has such kernels."""
PIECES = (256, 192, 128, 96, 64, 48, 32)
CHUNK_FACTOR = 4
"""Scores computed at once in a chunk, relative to a decode step: 8 MiB in float32."""
CHUNK_BUFFERS = 2
"""Number of float32 arrays in memory at once while a chunk's scores are masked."""
HALF_CHUNK_BUFFERS = 3
"""Number of float32 arrays in memory at once if products and weights are in half precision."""
WEIGHTS_LANES_FROM = 2**20
"""Minimum number of weights for which two streams are faster, each with multi-threaded BLAS."""
ONE_THREAD_LANES_FROM = 2**18
"""Minimum number of weights for which two streams are faster if BLAS uses one thread."""
WIDE_ROW = 8
"""Minimum number of new tokens for which lanes are faster than multi-threaded BLAS for one row."""
LONG_ROW = 4_096
"""Minimum context length for which lanes are faster than multi-threaded BLAS for one row."""
INTEGERS = {2: (mx.int16, mx.uint16), 4: (mx.int32, mx.uint32)}
"""Signed and unsigned integer types, by number of bytes."""

# 2^f for f in -0.5..0.5, the minimax polynomial of degree 5 with 2^0 = 1: relative error 1.1e-7.
_EXP2 = (1.0, 0.69314685, 0.240222347, 0.0555088523, 0.00967192603, 0.00132244622)
_ROUND = 1.5 * 2**23  # adding it leaves the nearest integer in the low bits of a float32


def _piece(rows: int, m: int, n: int) -> int:
    """Return the number of rows of an (m, n) weight matrix multiplied at a time; 0 for all.

    It is the largest of `PIECES` that divides m and that OpenBLAS 0.3.21 multiplies without a copy.
    """
    if rows * m <= UNPACKED_RESULTS:
        return 0
    most = min(UNPACKED_RESULTS // rows, cpu_rows.UNPACKED_PRODUCTS // (rows * n))
    return next((piece for piece in PIECES if piece <= most and m % piece == 0), 0)


class _Lane(threading.local):
    """Second stream and helper thread of each thread; streams cannot be shared by threads."""

    stream: mx.Stream | None = None
    taken = False
    one_thread = False
    """Whether BLAS is currently limited to one thread."""
    thread: cpu_rows.SecondThread | None = None


_second = _Lane()


@dataclass(frozen=True, slots=True)
class CPUMemory(AttentionMemory):
    """Memory that attention on a CPU uses temporarily."""

    codes_at_once: int = 2**18
    """Number of codes converted to floats at a time."""

    @property
    def chunk_scores(self) -> int:
        """See `AttentionMemory`; more than on a GPU, because weights overwrite the scores."""
        return CHUNK_FACTOR * self.scores_at_once

    def chunk_score_bytes(self, dtype: mx.Dtype) -> int:
        return 4 * (CHUNK_BUFFERS if dtype == mx.float32 else HALF_CHUNK_BUFFERS)

    def holds_all_scores(self, key_dim: int, value_dim: int) -> bool:
        """See `AttentionMemory`; False, because a chunk's scores are computed in slices."""
        return False

    def code_bytes(self, numbers: int) -> int:
        at_once = min(numbers, self.codes_at_once)
        return mx.float32.size * self.lanes * wide_codes.BUFFERS * at_once


@dataclass(frozen=True)
class CPUBackend(MLXBackend):
    """Attention on a CPU, with work divided between two cores (lanes)."""

    lanes: int = field(default_factory=lambda: min(2, cpu_rows.cores()))
    facts = DeviceFacts(on_heap=True, slow_half=True, fuses_attention=False)
    scores_at_once: int = MLXBackend.scores_at_once
    codes_at_once: int = 2**18
    """Number of codes converted to floats at a time: 1 MiB."""
    polynomial_from: int = 2**16
    """Minimum number of elements for which `exp2` uses a polynomial."""

    @property
    def memory(self) -> CPUMemory:
        return CPUMemory(self.scores_at_once, self.lanes, self.codes_at_once)

    def prefill(
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
        """See `AttentionBackend`; computes `memory.chunk_scores` scores at a time."""
        heads, n, m = queries.shape[1], queries.shape[2], keys.shape[2]
        if sinks is None and ordered_attention.keeps_order():
            kept = 0 if columns is None else attention_window.keep
            first = start + n - m + kept
            ordered = ordered_attention.attend_buffer(
                queries, keys, values, scale, first=first, kept=kept, window=attention_window
            )
            if ordered is not None:
                return ordered
        queries_in_2 = span_attention.in_base_2(queries, scale)
        step = max(1, self.memory.chunk_scores // (heads * m))
        keys, values = keys.squeeze(0), values.squeeze(0)
        sunk = None if sinks is None else (sinks * LOG2_E).reshape(keys.shape[0], -1, 1, 1)
        done = []
        for first in range(0, n, step):
            count = min(step, n - first)
            # Columns after the last of these queries are seen by none of them.
            reach = m - n + first + count
            part = self._attend_slice(
                queries_in_2[:, :, first : first + count],
                keys[:, :reach],
                values[:, :reach],
                None if columns is None else columns[:reach],
                start + first,
                attention_window,
                eager,
            )
            done.append(span_attention.merged([part], sunk).reshape(1, heads, count, -1))
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
        eager: bool,
    ) -> Partial:
        """Return partial results of queries, (kv_heads, heads / kv_heads, n, ...).

        Queries, (1, heads, n, d), are in base 2 and at positions from `start` on; keys are
        (kv_heads, m, d).
        """
        (_, heads, n, _), (kv_heads, m, _) = queries.shape, keys.shape
        scores = span_attention.score(span_attention.grouped(queries, kv_heads), [keys], self)
        scores = scores.reshape(kv_heads, heads // kv_heads, n, m)
        causal = columns is None and attention_window.sees_all(start + n - 1)
        if causal and not eager:
            own = mx.where(mx.tri(n, n, 0, mx.bool_), scores[..., m - n :], MASKED)
            scores = mx.concatenate([scores[..., : m - n], own], axis=-1) if n < m else own
        elif not causal:
            seen = span_attention.seen_by_chunk(attention_window, start, n, m, columns)
            scores = mx.where(seen, scores, MASKED)
        if eager:
            top, weights, total = weigh_in_place(scores, causal=causal)
        else:
            top, weights, total = span_attention.weigh(scores, self)
        flat = span_attention.mix(
            weights.reshape(kv_heads, -1, m), total.reshape(kv_heads, -1, 1), [values], self
        )
        return Partial(top, total, flat.reshape(*top.shape[:-1], values.shape[-1]))

    def decode(
        self,
        step: DecodeStep,
        layer: int,
        window: AttentionWindow,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `AttentionBackend`; a single row is evaluated while Python builds the next layers.

        Otherwise the CPU would be idle for a third of the step. The caller must limit BLAS to one
        thread first, because lanes use both cores.
        """
        if sinks is None and ordered_attention.keeps_order():
            ordered = ordered_attention.attend_step(step, layer, window, queries, scale)
            if ordered is not None:
                return ordered
        own = CPULayerDecode(self, step, layer, window, self.attend_rows)
        result = own.attend(queries, scale, sinks)
        if not self.reads_together(*step.size):
            mx.async_eval(result)  # type: ignore[no-untyped-call]
        return result

    @contextmanager
    def piece_reads(self, stacked: Sequence[mx.array]) -> Iterator[PieceReads]:
        """See `AttentionBackend`; uses lanes, unless BLAS can use more cores."""
        divided = cpu_rows.cores() <= self.lanes
        with self.one_thread_of_blas() if divided else nullcontext():
            yield CPUPieceReads(self, stacked, divided=divided)

    def attend_decode(
        self,
        stacked: mx.array,
        keys: Sequence[KVData],
        values: Sequence[KVData],
        seen: mx.array | None = None,
        after: mx.array | None = None,
    ) -> Partial:
        """See `AttentionOps`; large reads are divided between lanes by heads."""
        kv_heads, rows, _ = stacked.shape
        count = kv_heads * rows * sum(map(span_attention.columns, keys))
        coded = span_attention.mostly_coded(keys)
        many = count >= (CODED_LANES_FROM if coded else LANES_FROM)
        crowded = coded and rows > CODED_LANES_ROWS
        if kv_heads == 1 or not many or crowded or self.lanes == 1:
            return span_attention.attend(stacked, keys, values, seen, after, self)

        def part(first: int, last: int) -> Partial:
            some_keys = span_attention.of_heads(keys, first, last)
            some_values = span_attention.of_heads(values, first, last)
            return span_attention.attend(
                stacked[first:last], some_keys, some_values, seen, after, self
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

    def attend_rows(
        self,
        queries: mx.array,
        reads: Sequence[RowsRead],
        tails: RowTails,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend with several rows at once, in float32; None for other dtypes.

        Args:
            queries: (rows, heads, width, d), in base 2.
            reads: reads by adjacent rows, which do not overlap for a row.
            tails: tails of the rows.
            sinks: attention sinks, (heads,), in base 2.

        Returns:
            Array (rows, heads, width, value_dim), evaluated.
        """
        if tails.keys.dtype != mx.float32 or queries.dtype != mx.float32:
            return None
        mx.eval(queries, tails.keys, tails.values)
        b, heads, width, dim = queries.shape
        kv_heads = tails.keys.shape[1]
        group = heads // kv_heads
        by_row = np.asarray(queries).reshape(b, kv_heads, group * width, dim)
        own = cpu_rows.sums(by_row, [_of_slots(tails)], _seen_by_row(tails.seen, group))
        into = cpu_rows.Sums(*map(_stacked, (own.top, own.total, own.mixed)))
        parts = [_part(read, group, width) for read in reads]
        cpu_rows.add_parts(into, _stacked(by_row), parts, self._second_thread())
        sunk = None if sinks is None else _sunk(np.asarray(sinks), kv_heads, b, width)
        mixed = into.result(sunk).reshape(kv_heads, b, group * width, -1)
        return mx.array(mixed.swapaxes(0, 1)).reshape(b, heads, width, -1)

    def _second_thread(self) -> cpu_rows.SecondThread | None:
        if self.lanes > 1 and _second.thread is None:
            _second.thread = cpu_rows.SecondThread()
        return _second.thread if self.lanes > 1 else None

    def multiply_keys(self, queries: mx.array, keys: mx.array) -> mx.array:
        """See `AttentionBackend`; for few queries, keys are the left factor.

        BLAS copies one factor, which for few rows takes longer than the product.
        """
        few = queries.shape[-2] <= cpu_rows.FEW_QUERIES and keys.shape[-2] >= MANY_KEYS
        if not few or keys.dtype != mx.float32:
            return MLXBackend.multiply_keys(self, queries, keys)
        products = keys @ mx.contiguous(queries.swapaxes(-1, -2))
        return mx.contiguous(products.swapaxes(-1, -2))

    def multiply_weights(self, x: mx.array, weights: mx.array) -> mx.array:
        """See `AttentionBackend`; few rows take weights in pieces, which BLAS does not copy."""
        (m, n), rows = weights.shape, x.size // x.shape[-1]
        piece = _piece(rows, m, n) if multiplies_unpacked() else 0
        if not piece or x.dtype != mx.float32 or weights.dtype != mx.float32:
            return x @ weights.T
        pieces = weights.reshape(m // piece, piece, n).swapaxes(1, 2)
        return self._in_pieces(x.reshape(rows, n), pieces).reshape(*x.shape[:-1], m)

    def _in_pieces(self, x: mx.array, pieces: mx.array) -> mx.array:
        """Return products (rows, m) with pieces of weights, on both lanes if they are large."""
        least = ONE_THREAD_LANES_FROM if _second.one_thread else WEIGHTS_LANES_FROM
        if pieces.size < least or self.lanes == 1 or len(pieces) == 1:
            return (x @ pieces).swapaxes(0, 1)
        half = len(pieces) // 2
        one = x @ pieces[:half]
        with self.lane(1):
            other = x @ pieces[half:]
        return mx.concatenate([one, other]).swapaxes(0, 1)

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
        """See `CodeOps`; float32 is 60 to 150 times faster than float16 on a CPU (MLX 0.32.4)."""
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
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return wide_codes.dequantize(codes, scales, biases, group_size=group_size, bits=bits)

    def index_codes(self, codec: Codec, side: mx.array) -> Coded:
        """See `AttentionOps`; uses NumPy."""
        assert isinstance(codec, Turbo)
        return index_codes(codec, side)

    def choice_reader(self, selection: Selection, key_dim: int, value_dim: int) -> ChoiceReader:
        """See `AttentionBackend`; uses compiled loops if Numba is available."""
        signs, with_values = selection.index.signs(key_dim), selection.index.with_values
        loops = None
        if selection.compiled:
            loops = choice_loops(signs, key_dim, value_dim, with_values=with_values)
        if loops is None:
            return ChoiceReader(selection, self, self.facts)
        return LoopReader(selection, self, self.facts, loops)

    def exp2(self, x: mx.array) -> mx.array:
        """Compute 2 ** x with a polynomial; see `AttentionBackend`.

        `mx.exp` takes 8.9 ns per element here, `mx.power` 3.1, and the polynomial 1.6 (1 M scores,
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
        """Find extremes by reading floats as integers; see `AttentionBackend`.

        MLX finds extremes of integers four times as fast. Read as integers, positive floats have
        the order of the floats, and negative floats the reverse order; read as unsigned integers,
        all negative floats are larger than all positive ones.
        """
        if groups.dtype.size not in INTEGERS:
            return MLXBackend.extremes(self, groups)
        signed, unsigned = INTEGERS[groups.dtype.size]
        bits = groups.view(signed)
        low, high = bits.min(axis=-1), bits.max(axis=-1)
        furthest = groups.view(unsigned).max(axis=-1).view(signed)
        least, most = mx.where(low < 0, furthest, low), mx.where(high < 0, low, high)
        dtype = groups.dtype
        return least.view(dtype).astype(mx.float32), most.view(dtype).astype(mx.float32)

    def as_float32(self, x: mx.array) -> mx.array:
        """Convert float16 by shifting its bits; see `AttentionBackend`.

        It is three times as fast as MLX on processors without float16. The exponent bias of float32
        is 112 larger than that of float16.
        """
        if x.dtype != mx.float16 or HAS_FLOAT16:
            return x.astype(mx.float32)
        bits = (x.view(mx.int16).astype(mx.int32) << 13) & ~(0b111 << 28)
        return bits.view(mx.float32) * 2.0**112

    @contextmanager
    def lane(self, number: int | None) -> Iterator[None]:
        """See `AttentionBackend`; odd numbers use the second stream. Nested calls do nothing."""
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

    def decoding(self, rows: int, width: int, tokens: int) -> AbstractContextManager[None]:
        """See `AttentionBackend`; limits BLAS to one thread if the step uses lanes."""
        divided = self.reads_together(rows, width, tokens)
        return self.one_thread_of_blas() if divided else nullcontext()

    @contextmanager
    def one_thread_of_blas(self) -> Iterator[None]:
        """Limit BLAS to one thread in a `with` block, so that lanes can use the other cores."""
        before, _second.one_thread = _second.one_thread, True
        try:
            with one_thread():
                yield
        finally:
            _second.one_thread = before

    def reads_together(self, rows: int, width: int, tokens: int) -> bool:
        """Return whether a step has several rows, many new tokens, or a long context.

        Milliseconds per step of SmolLM2 with lanes and with multi-threaded BLAS: 5 new tokens after
        1,500 tokens 88 and 87; 9: 98 and 136; 17: 122 and 197. One new token after 4,096 tokens: 59
        and 59; 6,000: 65 and 71; 8,000: 79 and 100 (OpenBLAS 0.3.21, two cores).
        """
        return rows > 1 or (self.lanes > 1 and (width >= WIDE_ROW or tokens >= LONG_ROW))

    def divide(
        self,
        function: Callable[[_Task], _Result],
        tasks: Sequence[_Task],
        meanwhile: Callable[[], object] | None = None,
    ) -> list[_Result]:
        """See `AttentionBackend`; a helper thread and the calling thread share the tasks."""
        other = self._second_thread()
        if other is None or len(tasks) < (2 if meanwhile is None else 1):
            return MLXBackend.divide(self, function, tasks, meanwhile)
        left, results = iter(list(enumerate(tasks))), dict[int, _Result]()

        def work() -> None:
            while (own := next(left, None)) is not None:
                results[own[0]] = function(own[1])

        later = other.submit(work)
        try:
            if meanwhile is not None:
                meanwhile()
            work()
        finally:
            wait([later])
        later.result()
        return [results[number] for number in range(len(tasks))]


def _of_slots(tails: RowTails) -> cpu_rows.ColumnArrays:
    """Return the rows' tails, (b, kv_heads, columns, dim) each; views if slots are adjacent."""
    first, count = tails.slots[0], len(tails.slots)
    neighbors = list(tails.slots) == list(range(first, first + count))
    rows = slice(first, first + count) if neighbors else list(tails.slots)
    keys, values = np.asarray(tails.keys), np.asarray(tails.values)
    return keys[rows, :, : tails.columns], values[rows, :, : tails.columns]


def _part(read: RowsRead, group: int, width: int) -> cpu_rows.RowsPart:
    stacked = group * width
    pieces = [
        (np.asarray(keys)[0, :, start:stop], np.asarray(values)[0, :, start:stop])
        for keys, values, start, stop in read.pieces
    ]
    seen = _seen_by_row(read.seen, group)
    if seen is not None:
        seen = seen.reshape(1, -1, seen.shape[-1])
    return cpu_rows.RowsPart(slice(read.first * stacked, read.last * stacked), pieces, seen)


def _seen_by_row(seen: mx.array | None, group: int) -> Booleans | None:
    """Convert a mask (b, width, columns) to the stacked queries of each row.

    The result is (b, 1, group * width, columns), where a KV head has `group` query heads.
    """
    if seen is None:
        return None
    return np.tile(np.asarray(seen), (1, group, 1))[:, None]


def _stacked(by_row: Floats) -> Floats:
    """Copy (b, kv_heads, r, d) to the layout of `grouped`: (kv_heads, b * r, d)."""
    b, kv_heads, r, d = by_row.shape
    return np.ascontiguousarray(by_row.swapaxes(0, 1)).reshape(kv_heads, b * r, d)


def _sunk(sinks: Floats, kv_heads: int, b: int, width: int) -> Floats:
    """Repeat the sinks of heads for all stacked queries, (kv_heads, b * r, 1)."""
    by_head = sinks.reshape(kv_heads, 1, -1, 1)
    wide = np.broadcast_to(by_head, (kv_heads, b, by_head.shape[2], width))
    return wide.reshape(kv_heads, -1, 1)
