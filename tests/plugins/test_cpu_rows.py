"""Several decode rows on the CPU against float64 and plain operations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from penstock.plugins.cpu import cpu_rows
from penstock.plugins.cpu.cpu_backend import CPUBackend
from penstock.plugins.cpu.cpu_layer_decode import RowsRead, RowTails

TOLERANCE = 64 * np.finfo(np.float32).eps
"""Of sums of up to some hundred terms of order one."""


@dataclass
class Drawn:
    """A random step: sizes, parts, masks and slots are drawn independently."""

    queries: mx.array
    reads: list[RowsRead]
    tails: RowTails
    sinks: mx.array | None


def drawn(seed: int) -> Drawn:
    draw, numbers = random.Random(seed), np.random.default_rng(seed)

    def some(*shape: int) -> mx.array:
        return mx.array(numbers.standard_normal(shape).astype(np.float32))

    b, kv_heads, group = draw.randint(2, 5), draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    width, dim, value_dim = draw.choice([1, 1, 3]), draw.choice([4, 8]), draw.choice([4, 6])

    def mask(rows: int, columns: int) -> mx.array | None:
        if draw.random() < 0.5:
            return None
        seen = numbers.random((rows, width, columns)) < 0.6
        seen[..., 0] |= draw.random() < 0.8  # now and then a row sees nothing of a part
        return mx.array(seen)

    reads = []
    for _ in range(draw.randint(0, 5)):
        first = draw.randrange(b)
        last = draw.randint(first + 1, b)
        pieces = []
        for _ in range(draw.randint(1, 3)):
            held = draw.randint(1, 40)
            start = draw.randrange(held)
            stop = draw.randint(start + 1, held)
            keys, values = some(1, kv_heads, held, dim), some(1, kv_heads, held, value_dim)
            pieces.append((keys, values, start, stop))
        columns = sum(stop - start for *_, start, stop in pieces)
        reads.append(RowsRead(first, last, pieces, mask(last - first, columns)))
    slots, held = draw.sample(range(8), b), draw.randint(1, 20)
    if draw.random() < 0.5:
        slots = list(range(slots[0] % (8 - b), slots[0] % (8 - b) + b))
    columns = draw.randint(1, held)
    seen = mask(b, columns)
    if seen is not None:
        seen[..., -1] = True  # its own new token
    own = RowTails(
        some(8, kv_heads, held, dim), some(8, kv_heads, held, value_dim), slots, columns, seen
    )
    sinks = some(kv_heads * group) if draw.random() < 0.4 else None
    return Drawn(some(b, kv_heads * group, width, dim), reads, own, sinks)


def expected(step: Drawn) -> Any:
    """Attend column by column, one row and head at a time, in float64."""
    queries = np.asarray(step.queries).astype(np.float64)
    b, heads, width, _ = queries.shape
    kv_heads = step.tails.keys.shape[1]
    result = np.zeros((b, heads, width, step.tails.values.shape[-1]))
    for row, head, new in np.ndindex(b, heads, width):
        at = head // (heads // kv_heads)
        slot, columns = step.tails.slots[row], step.tails.columns
        keys = [np.asarray(step.tails.keys)[slot, at, :columns]]
        values = [np.asarray(step.tails.values)[slot, at, :columns]]
        seen = [_seen(step.tails.seen, row, new, columns)]
        for read in step.reads:
            if read.first <= row < read.last:
                keys += [np.asarray(k)[0, at, start:stop] for k, _, start, stop in read.pieces]
                values += [np.asarray(v)[0, at, start:stop] for _, v, start, stop in read.pieces]
                count = sum(stop - start for *_, start, stop in read.pieces)
                seen.append(_seen(read.seen, row - read.first, new, count))
        scores = np.concatenate(keys).astype(np.float64) @ queries[row, head, new]
        weights = np.where(np.concatenate(seen), 2.0**scores, 0)
        sunk = 0 if step.sinks is None else 2.0 ** float(step.sinks[head])
        result[row, head, new] = weights @ np.concatenate(values) / (weights.sum() + sunk)
    return result


def _seen(seen: mx.array | None, row: int, new: int, columns: int) -> Any:
    return np.ones(columns, np.bool_) if seen is None else np.asarray(seen)[row, new]


def attended(step: Drawn, lanes: int = 1) -> Any:
    result = CPUBackend(lanes=lanes).attend_rows(step.queries, step.reads, step.tails, step.sinks)
    assert result is not None
    return np.asarray(result)


@pytest.mark.parametrize("divided_from", [1, 200, 1 << 40])
@pytest.mark.parametrize("keys_left", [False, True])
def test_attention_rows_match_float64_reference(
    divided_from: int, keys_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rows, "DIVIDED_FROM", divided_from)
    monkeypatch.setattr(cpu_rows, "multiplies_unpacked", lambda: keys_left)
    monkeypatch.setattr(cpu_rows, "MANY_KEYS", 2)
    monkeypatch.setattr(cpu_rows, "UNPACKED_PRODUCTS", 64)  # some keys at a time, and a rest
    for seed in range(200):
        step = drawn(seed)
        np.testing.assert_allclose(
            attended(step, lanes=2), expected(step), rtol=TOLERANCE, atol=TOLERANCE
        )


def test_two_threads_share_work_evenly() -> None:
    """Small tasks are dealt whole; a large one is split at half of the total."""
    columns = np.zeros((2, 40_000, 4), np.float32)

    def part(count: int) -> cpu_rows.RowsPart:
        return cpu_rows.RowsPart(slice(0, 3), [(columns[:, :count], columns[:, :count])], None)

    for counts in ([1_000] * 8, [8_000] * 3, [40_000], [10, 30_000, 10], [40_000, 40_000, 1_000]):
        parts = [part(count) for count in counts]
        lists = cpu_rows._divided(parts, 2)
        work = [sum(part.columns for part in one) for one in lists]
        assert sum(work) == sum(counts)
        assert max(work) < 0.6 * sum(work)
    few = [part(100), part(100)]
    assert cpu_rows._divided(few, 2) == (few, [])


def test_check_detects_shifted_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    sums = cpu_rows.sums

    def shifted(queries: Any, pieces: Any, seen: Any) -> cpu_rows.Sums:
        return sums(queries, pieces, None if seen is None else np.roll(seen, 1, axis=-1))

    monkeypatch.setattr(cpu_rows, "sums", shifted)
    masked = [step for step in map(drawn, range(40)) if step.tails.seen is not None]
    off = [not np.allclose(attended(step), expected(step), atol=1e-3) for step in masked]
    assert sum(off) > len(off) / 2


def test_half_precision_uses_plain_operations() -> None:
    step = drawn(0)
    tails = RowTails(
        step.tails.keys.astype(mx.float16), step.tails.values.astype(mx.float16), [0, 1], 1, None
    )
    assert CPUBackend().attend_rows(step.queries, [], tails, None) is None


def test_error_in_second_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "DIVIDED_FROM", 1)
    step = next(step for step in map(drawn, range(99)) if step.reads)
    read = step.reads[0]
    keys, values, _, stop = read.pieces[-1]
    broken = (keys, mx.zeros((*values.shape[:3], 99)), 0, stop)
    reads = [RowsRead(read.first, read.last, [*read.pieces, broken], None)]
    with pytest.raises(ValueError, match=r"broadcast|mismatch|operand"):
        CPUBackend(lanes=2).attend_rows(step.queries, reads, step.tails, None)


def test_cpu_attention_does_not_retain_tails() -> None:
    """A retained buffer would be copied on the next write."""
    step = drawn(1)
    buffer = step.tails.keys
    mx.eval(buffer)
    attended(step)
    before = mx.get_active_memory()
    step.tails = None  # type: ignore[assignment]
    buffer[0, 0, 0, 0] = 1.0
    mx.reset_peak_memory()
    mx.eval(buffer)
    assert mx.get_peak_memory() - before < buffer.nbytes
