"""The CPU and GPU backends agree, and one module chooses between them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pytest import MonkeyPatch
from rounding import UNIT, attention_error, product_error

import penstock
import penstock_bench
from penstock.attention import devices, span_attention
from penstock.attention.attention_backend import AttentionBackend, DecodeStep
from penstock.attention.attention_plan import DecodeRow, in_order
from penstock.attention.chunk_reads import ChunkReads
from penstock.attention.mlx_backend import GPUBackend
from penstock.attention.reads import decode_reads
from penstock.attention.span_attention import AttentionWindow
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.tails import LayerShape, Tails, piece_bytes
from penstock.plugins.cpu import cpu_backend
from penstock.plugins.cpu.cpu_backend import LONG_ROW, CPUBackend

SOURCES = [Path(package.__file__).parent for package in (penstock, penstock_bench)]
CPU, GPU = CPUBackend(), GPUBackend()
HEADS, KV_HEADS, DIM, VALUE_DIM, SCALE = 8, 2, 64, 32, 0.125
WINDOWS = {
    "everything": AttentionWindow(),
    "window": AttentionWindow(window=90),
    "window of 1": AttentionWindow(window=1),
    "window and kept": AttentionWindow(window=90, keep=8),
}
windows = pytest.mark.parametrize("attention_window", WINDOWS.values(), ids=WINDOWS)
sinks_or_not = pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
SCHEMES = ("affine8", "affine4", "turbo4", "turbo2.5", "kivi4", "raw/8")


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def segment(tokens: int, seed: int, scheme: str | None = None) -> Segment:
    keys, values = (normal(1, KV_HEADS, tokens, DIM, seed=10 * seed + side) for side in (0, 1))
    made = Segment(((keys, values),))
    return made if scheme is None else made.encoded(parse_scheme(scheme), devices.current())


def on_both(compute: Callable[[], mx.array]) -> tuple[mx.array, mx.array]:
    """Return the evaluated result on both back ends, the CPU's first."""
    found = []
    for device in (CPU, GPU):
        with devices.using(device):
            found.append(compute())
            mx.eval(found[-1])
    return found[0], found[1]


def off(found: tuple[mx.array, mx.array]) -> float:
    return float(mx.abs(found[0] - found[1]).max())


# ---- attention


def chunk(
    device: AttentionBackend,
    attention_window: AttentionWindow,
    columns: list[int],
    n: int,
    *,
    with_sinks: bool = False,
    eager: bool = False,
) -> mx.array:
    """Attend with a chunk of n queries at the end of the columns."""
    queries, keys, values = chunk_sides(columns, n)
    return device.prefill(
        queries,
        keys,
        values,
        columns=None if columns == list(range(len(columns))) else mx.array(columns),
        start=columns[-n],
        scale=SCALE,
        attention_window=attention_window,
        sinks=normal(HEADS, seed=4) if with_sinks else None,
        eager=eager,
    )


def chunk_sides(columns: list[int], n: int) -> tuple[mx.array, mx.array, mx.array]:
    m = len(columns)
    return (
        normal(1, HEADS, n, DIM, seed=1),
        normal(1, KV_HEADS, m, DIM, seed=2),
        normal(1, KV_HEADS, m, VALUE_DIM, seed=3),
    )


def chunk_error(columns: list[int], n: int) -> float:
    queries, keys, values = (side.squeeze(0) for side in chunk_sides(columns, n))
    return attention_error(span_attention.grouped(queries[None], KV_HEADS), keys, values, SCALE)


CUTS = {
    "a first chunk": (list(range(70)), 70),
    "behind others": (list(range(300)), 40),
    "one query": (list(range(300)), 1),
    "behind a gap": ([*range(8), *range(400, 560)], 60),
}
cuts = pytest.mark.parametrize(("columns", "n"), CUTS.values(), ids=CUTS)


@cuts
@windows
@sinks_or_not
def test_chunk_attention_agrees_across_devices(
    attention_window: AttentionWindow, columns: list[int], n: int, with_sinks: bool
) -> None:
    slices = CPUBackend(scores_at_once=HEADS * 16 * len(columns))
    found = [
        chunk(device, attention_window, columns, n, with_sinks=with_sinks)
        for device in (slices, GPU)
    ]
    assert found[0].shape == found[1].shape == (1, HEADS, n, VALUE_DIM)
    assert off((found[0], found[1])) < chunk_error(columns, n)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_chunks_keep_dtype(dtype: mx.Dtype) -> None:
    sides = [side.astype(dtype) for side in chunk_sides(list(range(100)), 50)]
    found = [
        device.prefill(
            *sides, columns=None, start=50, scale=SCALE, attention_window=AttentionWindow()
        )
        for device in (CPU, GPU)
    ]
    assert [each.dtype for each in found] == [dtype, dtype]
    # Scores, weights and the result are rounded to the type, by both.
    queries, keys, values = (side.squeeze(0).astype(mx.float32) for side in sides)
    exact = attention_error(span_attention.grouped(queries[None], KV_HEADS), keys, values, SCALE)
    assert off((found[0], found[1])) < exact * float(mx.finfo(dtype).eps) / (2 * UNIT)


def test_check_detects_extra_column() -> None:
    columns = list(range(300))
    found = [
        chunk(device, AttentionWindow(window=window), columns, 40)
        for device, window in ((CPU, 90), (GPU, 91))
    ]
    assert off((found[0], found[1])) > 10 * chunk_error(columns, 40)


def rows_and_tails(scheme: str | None) -> tuple[list[DecodeRow], Tails]:
    """Return three rows with tails; two share a segment, of which one reads more."""
    shared, own, other = segment(192, 1, scheme), segment(128, 2, scheme), segment(64, 3)
    parts = (
        (KVSpan(shared, 0, 192), KVSpan(own, 192, 128)),
        (KVSpan(shared, 0, 160),),
        (KVSpan(other, 0, 64),),
    )
    tails = Tails(len(parts), 4, [LayerShape(KV_HEADS, DIM, DIM, mx.float32)])
    tails.ready()
    rows = []
    for slot, spans in enumerate(parts):
        for column in range(slot):
            keys, values = (normal(1, KV_HEADS, 1, DIM, seed=50 + slot + i) for i in (0, 9))
            tails.write_block(0, slot, column, keys, values)
        rows.append(DecodeRow(spans, spans[-1].end + slot, slot, slot))
    return [rows[i] for i in in_order(rows)], tails


def decode(
    rows: list[DecodeRow], tails: Tails, attention_window: AttentionWindow, *, sinks: bool
) -> mx.array:
    (reads,) = decode_reads(DecodeStep.of(devices.current(), rows, tails), [attention_window])
    new = [normal(len(rows), KV_HEADS, 1, DIM, seed=seed) for seed in (10, 11)]
    queries = normal(len(rows), HEADS, 1, DIM, seed=12)
    given = reads.update_and_fetch(new[0], new[1])
    mask = reads.make_mask(1)
    return reads.attend(queries, *given, SCALE, mask, normal(HEADS, seed=4) if sinks else None)


def decode_error() -> float:
    """Return the allowed difference of decode steps."""
    queries, sides = normal(3, HEADS, DIM, seed=12), mx.full((HEADS, 322, DIM), 1.0)
    return 5 * attention_error(queries.swapaxes(0, 1), sides, sides, SCALE)


@windows
@sinks_or_not
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
def test_decode_attention_agrees_across_devices(
    attention_window: AttentionWindow, with_sinks: bool, scheme: str | None, alone: bool
) -> None:
    rows, tails = rows_and_tails(scheme)
    chosen = rows[:1] if alone else rows
    found = on_both(lambda: decode(chosen, tails, attention_window, sinks=with_sinks))
    assert off(found) < decode_error()


@windows
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_chunks_after_segments_agree_across_devices(
    attention_window: AttentionWindow, scheme: str | None
) -> None:
    rows, _ = rows_and_tails(scheme)
    row = max(rows, key=lambda row: len(row.parts))
    position, own = row.parts[-1].end, [normal(1, KV_HEADS, 20, DIM, seed=s) for s in (30, 31)]

    def attend() -> mx.array:
        reads = ChunkReads(0, attention_window, row.parts, position, devices.current())
        queries = normal(1, HEADS, 20, DIM, seed=12)
        given = reads.update_and_fetch(own[0], own[1])
        return reads.attend(queries, *given, SCALE, reads.make_mask(20))

    assert off(on_both(attend)) < decode_error()


def test_gpu_chunk_stays_lazy() -> None:
    """A GPU chunk is one lazy operation; the CPU evaluates slices at once."""
    columns, taken = list(range(600)), {}
    for device in (CPUBackend(scores_at_once=2**10), GPU):
        mx.eval(chunk_sides(columns, 200))
        before = mx.get_active_memory()
        result = chunk(device, AttentionWindow(), columns, 200, eager=True)
        taken[device] = mx.get_active_memory() - before
        del result
    least = HEADS * 200 * VALUE_DIM * 4
    assert [nbytes >= least for nbytes in taken.values()] == [True, False]


def test_gpu_lanes_use_default_stream() -> None:
    stream = devices.default_stream()
    for number in (None, 0, 1):
        with GPU.lane(number):
            assert devices.default_stream() == stream
        GPU.settle(number or 0)
    with CPUBackend(lanes=2).lane(1):
        assert devices.default_stream() != stream
    shapes = [LayerShape(KV_HEADS, DIM, DIM, mx.float32)]
    with devices.using(GPU):
        one = piece_bytes(shapes, devices.current().lanes)
    with devices.using(CPUBackend(lanes=2)):
        assert piece_bytes(shapes, devices.current().lanes) == 2 * one


# ---- codes


@pytest.mark.parametrize("scheme", [*SCHEMES, "affine2", "rot8", "kivi8", "turbo3.5"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_encoded_blocks_are_bit_identical_across_devices(scheme: str, dtype: mx.Dtype) -> None:
    """Blocks encoded on one device are found by hash and read on another."""
    sides = [normal(1, KV_HEADS, 320, DIM, seed=seed).astype(dtype) for seed in (1, 2)]
    made = []
    for device in (CPU, GPU):
        with devices.using(device):
            made.append(
                Segment(((sides[0], sides[1]),)).encoded(parse_scheme(scheme), devices.current())
            )
    for one, other in zip(made[0].layers[0], made[1].layers[0], strict=True):
        assert type(one) is type(other)
        if isinstance(one, Coded) and isinstance(other, Coded):
            assert all(map(mx.array_equal, one.parts, other.parts))
            found = on_both(lambda one=one: one.dequantize(devices.current()))  # type: ignore[misc]
            assert mx.array_equal(*found)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 255, 256, 1000])
@pytest.mark.parametrize("rows", [1, 4, 32, 33])
def test_query_key_products_agree_across_devices(rows: int, columns: int, dtype: mx.Dtype) -> None:
    queries, keys = (
        normal(2, count, 64, seed=seed).astype(dtype) for seed, count in ((1, rows), (2, columns))
    )
    # A slice of heads and of columns, as attention reads them.
    wide = mx.pad(keys, ((1, 1), (3, 5), (0, 0)))[1:3, 3 : 3 + columns]
    found = on_both(lambda: devices.current().multiply_keys(queries, wide))
    assert found[0].shape == (2, rows, columns) and found[0].dtype == dtype
    exact = np.array(queries, np.float64) @ np.array(keys, np.float64).swapaxes(-1, -2)
    rounded = 2 * float(mx.finfo(dtype).eps) * float(np.abs(exact).max())
    bound = product_error(queries, keys.swapaxes(-1, -2)) + rounded
    for products in found:
        assert np.abs(np.array(products, np.float64) - exact).max() < bound


@pytest.mark.parametrize("unpacked", [True, False])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("outputs", [3, 640, 1001, 1536, 6144])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (16, 1), (1, 40)], ids=str)
def test_linear_products_match_matmul(
    shape: tuple[int, int], outputs: int, lanes: int, unpacked: bool, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "multiplies_unpacked", lambda: unpacked)
    x, weights = normal(*shape, 192, seed=1), normal(outputs, 192, seed=2)
    device = CPUBackend(lanes=lanes)
    threads = device.decoding(*shape, 0)
    with devices.using(device), threads:
        products = device.multiply_weights(x, weights)
        mx.eval(products)
    assert products.shape == (*shape, outputs)
    assert float(mx.abs(products - x @ weights.T).max()) < product_error(x, weights.T)


@pytest.mark.parametrize(
    ("rows", "m", "n", "piece"),
    [
        (1, 1200, 64, 0),  # is a small product as it is
        (1, 1536, 576, 256),
        (8, 1536, 576, 128),
        (8, 1536, 4096, 0),  # fewer than 32 would be multiplied at a time
        (1, 32_003, 576, 0),
        (16, 49_152, 576, 64),
    ],
)
def test_weight_products_are_tiled(rows: int, m: int, n: int, piece: int) -> None:
    assert cpu_backend._piece(rows, m, n) == piece
    assert not piece or (rows * piece <= 1200 and rows * piece * n <= 10**6 and m % piece == 0)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("transpose", [True, False], ids=["along", "across"])
def test_quantized_products_agree_across_devices(bits: int, rows: int, transpose: bool) -> None:
    form = {"group_size": 64, "bits": bits}
    codes, scales, offsets = mx.quantize(normal(2, 100, 128, seed=1), **form)
    halves = scales.astype(mx.float16), offsets.astype(mx.float16)
    x = normal(2, rows, 128 if transpose else 100, seed=2)
    found = on_both(
        lambda: devices.current().multiply_codes(x, codes, *halves, transpose=transpose, **form)
    )
    wide = mx.dequantize(codes, *(half.astype(mx.float32) for half in halves), **form)
    # The offset is taken off what is multiplied, or not: sums are of numbers twice as large.
    bound = mx.abs(wide) + 2 ** (bits - 1) * float(mx.abs(scales).max())
    assert off(found) < product_error(x, bound.swapaxes(-1, -2) if transpose else bound)


def test_exp2_agrees_across_devices() -> None:
    x = mx.array(np.linspace(-126, 0, 2**17, dtype=np.float32))
    one, other = on_both(lambda: devices.current().exp2(x))
    assert float(mx.abs(one / other - 1).max()) < 6e-7  # either is off by half as much


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_extremes_and_float32_casts_are_bit_identical(dtype: mx.Dtype) -> None:
    every = mx.arange(2**16).astype(mx.uint16).view(mx.float16)
    finite = mx.where(mx.isfinite(every), every, mx.array(0, mx.float16))
    numbers = finite.astype(dtype).reshape(-1, 32)
    groups = mx.concatenate([numbers, -numbers, normal(64, 32, seed=1).astype(dtype)])
    for number in (0, 1):
        assert mx.array_equal(*on_both(lambda n=number: devices.current().extremes(groups)[n]))  # type: ignore[misc]
    assert mx.array_equal(*on_both(lambda: devices.current().as_float32(groups)))


def test_only_cpu_backend_limits_blas_threads(monkeypatch: MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        entered.append("one thread")
        yield

    monkeypatch.setattr(cpu_backend, "one_thread", noted)
    with GPU.decoding(2, 1, 0):
        assert entered == []
    with CPU.decoding(1, 1, 0):
        assert entered == []
    with CPU.decoding(2, 1, 0):
        assert entered == ["one thread"]


def test_lanes_are_used_for_several_wide_or_long_rows() -> None:
    for device in (CPU, CPUBackend(lanes=1), GPU):
        wide = device is CPU
        assert [device.reads_together(1, width, 0) for width in (1, 7, 8)] == [False, False, wide]
        long = [device.reads_together(1, 1, tokens) for tokens in (LONG_ROW - 1, LONG_ROW)]
        assert long == [False, wide]
        assert [device.reads_together(2, width, 0) for width in (1, 8)] == [True, True]


# ---- the choice


def test_backend_is_chosen_once_and_can_be_overridden() -> None:
    chosen = devices.current()
    assert isinstance(chosen, CPUBackend) == (mx.default_device() == mx.cpu)
    assert devices.current() is chosen
    with devices.using(GPU), pytest.raises(KeyError):
        assert devices.current() is GPU
        with devices.using(CPU):
            assert devices.current() is CPU
        raise KeyError
    assert devices.current() is chosen


ASKS = {
    "default_device",
    "set_default_device",
    "device_info",
    "cpu",
    "gpu",
    "metal",
    "cuda",
    "Device",
}
"""Names of MLX's module by which code learns, or says, where it computes."""
MAY_ASK = {"attention/devices.py", "plugins/cpu/cpu_backend.py"}
MAY_REPORT = {"cli/doctor.py", "report.py"}
"""Say in words what the device is, and decide nothing by it."""


def asked(source: str) -> Iterator[str]:
    """Yield the names by which a module queries MLX for its device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            if ast.unparse(node.value) in ("mx", "mlx.core", "core") and node.attr in ASKS:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "mlx.core":
            yield from (alias.name for alias in node.names if alias.name in ASKS)


def test_no_other_module_queries_the_device() -> None:
    asking = {
        file.relative_to(source).as_posix()
        for source in SOURCES
        for file in source.rglob("*.py")
        if set(asked(file.read_text()))
    }
    assert asking == MAY_ASK | MAY_REPORT


@pytest.mark.parametrize(
    "source",
    [
        "import mlx.core as mx\nif mx.default_device() != mx.cpu: pass",
        "import mlx.core\nfast = mlx.core.metal.is_available()",
        "from mlx.core import default_device",
        "import mlx.core as mx\nlimit = mx.device_info()['total_memory']",
        "def late():\n    return mx.new_stream(mx.gpu)",
    ],
)
def test_source_scan_detects_device_queries(source: str) -> None:
    assert list(asked(source))
