"""`penstock bench growth`: allocation, copies and step times of a bounded window."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from penstock import caches
from penstock_bench import rivals
from penstock_bench.report import Line, Report

CLAIM = "A bounded window is allocated once: nothing is copied to grow, no step stalls"
RIVAL = "mlx-lm"

TRACK_TOKENS = 64
"""Interval of the tracks in the picture, in tokens."""

MakeCache = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class GrowthShape:
    """Model and load: sizes in tokens, layers and elements."""

    layers: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    window_tokens: int = 4_096
    read_tokens: int = 6_000
    chunk_tokens: int = 512
    rounds: int = 5
    dtype: str = "float16"

    @property
    def window_bytes(self) -> int:
        """Bytes of keys and values of `window_tokens` in all layers, the minimum of a window."""
        itemsize = getattr(mx, self.dtype).size
        return 2 * self.layers * self.kv_heads * self.window_tokens * self.head_dim * int(itemsize)


@dataclass(slots=True)
class GrowthRun:
    """Figures of one pass over `read_tokens`. Bytes are above those before it."""

    growths_per_layer: float
    """Number of times a layer's buffer changed its length after the first update."""
    moves_per_layer: float
    """Number of times a layer's buffer moved to another address in a step."""
    peak_bytes: int
    steady_bytes: int
    peak_over_steady: float
    peak_over_window: float
    """Peak over `GrowthShape.window_bytes`; shows caches that always allocate too much."""
    first_step_ms: float
    median_step_ms: float
    p99_step_ms: float
    worst_step_ms: float
    """Slowest step after the first one, which allocates."""
    step_ms: list[float] = field(repr=False)
    peak_track: list[int] = field(repr=False)
    """Peak bytes in each interval of `TRACK_TOKENS` tokens."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Addresses and lengths of the layers' buffers."""

    columns: tuple[int, ...]
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> _Buffers:
        return cls(
            tuple(cache.keys.shape[2] for cache in caches),
            tuple(_address(cache.keys) for cache in caches),
        )


def _address(array: mx.array) -> int:
    import numpy as np

    return int(np.array(array, copy=False).__array_interface__["data"][0])


def run_once(make: MakeCache, shape: GrowthShape, tokens_per_step: int) -> GrowthRun:
    """Update all layers with `read_tokens` tokens, `tokens_per_step` at a time, as a model would.

    Each layer's keys depend on the fetched keys of the previous layer. Each step is evaluated once
    for all layers, as in generation. Instead of attention only one number in 64 columns is read, so
    the cost of a step is that of the cache.
    """
    gc.collect()
    mx.clear_cache()
    dtype = getattr(mx, shape.dtype)
    full = mx.zeros((1, shape.kv_heads, tokens_per_step, shape.head_dim), dtype) + 1
    mx.eval(full)
    base_bytes = mx.get_active_memory()
    caches = [make() for _ in range(shape.layers)]
    step_ms: list[float] = []
    peak_track = [0] * -(-shape.read_tokens // TRACK_TOKENS)
    grown = moved = 0
    before: _Buffers | None = None
    for start in range(0, shape.read_tokens, tokens_per_step):
        count = min(tokens_per_step, shape.read_tokens - start)
        new = full if count == tokens_per_step else full[:, :, :count]
        mx.reset_peak_memory()
        began = time.perf_counter()
        _step(caches, new)
        step_ms.append(1e3 * (time.perf_counter() - began))
        peak = mx.get_peak_memory() - base_bytes
        for stretch in range(start // TRACK_TOKENS, (start + count - 1) // TRACK_TOKENS + 1):
            peak_track[stretch] = max(peak_track[stretch], peak)
        after = _Buffers.of(caches)
        if before is not None:
            grown += sum(map(int.__ne__, before.columns, after.columns))
            moved += sum(map(int.__ne__, before.addresses, after.addresses))
        before = after
    peak_bytes = max(peak_track)
    gc.collect()
    steady_bytes = mx.get_active_memory() - base_bytes
    later = sorted(step_ms[1:])
    return GrowthRun(
        growths_per_layer=grown / shape.layers,
        moves_per_layer=moved / shape.layers,
        peak_bytes=peak_bytes,
        steady_bytes=steady_bytes,
        peak_over_steady=peak_bytes / steady_bytes,
        peak_over_window=peak_bytes / shape.window_bytes,
        first_step_ms=step_ms[0],
        median_step_ms=statistics.median(later),
        p99_step_ms=later[int(0.99 * len(later))],
        worst_step_ms=later[-1],
        step_ms=[round(ms, 3) for ms in step_ms],
        peak_track=peak_track,
    )


def _step(caches: Sequence[Any], new: mx.array) -> None:
    """Pass one chunk through all layers and evaluate."""
    hidden = mx.zeros((1, 1, 1, 1), new.dtype)
    for cache in caches:
        hidden = _layer(cache, new, hidden)
    mx.eval(hidden, [cache.state for cache in caches])


def _layer(cache: Any, new: mx.array, hidden: mx.array) -> mx.array:
    """Update one layer's cache. Fetched arrays are freed on return, as in a model."""
    cache.make_mask(new.shape[2])
    keys, values = cache.update_and_fetch(new + hidden, new - hidden)
    seen = keys[:, :, ::64, :1].sum() + values[:, :, ::64, :1].sum()
    link: mx.array = (seen * 0).reshape(1, 1, 1, 1)
    return link


def measure(shape: GrowthShape) -> Report:
    """Run both sides in turn, and compare the medians over the rounds."""
    theirs = rivals.RotatingKVCache
    makers: dict[str, MakeCache] = {
        "penstock": lambda: caches.RotatingKVCache(shape.window_tokens),
        RIVAL: lambda: theirs(shape.window_tokens),
    }
    loads = {"decode": 1, "prefill": shape.chunk_tokens}
    runs: dict[str, dict[str, list[GrowthRun]]] = {
        load: {side: [] for side in makers} for load in loads
    }
    for turn in range(shape.rounds):
        for load, tokens in loads.items():
            order = list(makers) if turn % 2 == 0 else list(makers)[::-1]
            for side in order:
                runs[load][side].append(run_once(makers[side], shape, tokens))
    return report(shape, runs)


def report(shape: GrowthShape, runs: dict[str, dict[str, list[GrowthRun]]]) -> Report:
    """Compare the medians of all rounds with each other and with the goal."""
    medians = {
        side: {load: _medians(of_load[side]) for load, of_load in runs.items()}
        for side in ("penstock", RIVAL)
    }
    ours, theirs = medians["penstock"], medians[RIVAL]
    ratio = {
        f"{load}_{name}": _ratio(theirs[load][name], ours[load][name])
        for load in runs
        for name in ("peak_over_steady", "peak_over_window", "median_step_ms", "worst_step_ms")
    }
    goal = {
        "growth_copies": 0,
        "decode_peak_over_steady": 1.02,
        "prefill_peak_over_steady": 1.10,
        "decode_median_step_ratio": 1.0,
        "decode_worst_step_ratio": 10.0,
    }
    lines = [*_lines("decode", ours, theirs, goal), *_lines("prefill", ours, theirs, goal)]
    return Report(
        name="growth",
        claim=CLAIM,
        rival=RIVAL,
        penstock=ours,
        rival_figures=theirs,
        ratio=ratio,
        goal=goal,
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "shape": asdict(shape),
            "runs": {
                load: {side: [asdict(run) for run in of_side] for side, of_side in of_load.items()}
                for load, of_load in runs.items()
            },
        },
        dtype=shape.dtype,
    )


def _medians(runs: Sequence[GrowthRun]) -> dict[str, float]:
    """Return the median of every figure over the rounds."""
    names = [name for name in GrowthRun.__slots__ if name not in ("step_ms", "peak_track")]
    return {name: round(statistics.median(getattr(run, name) for run in runs), 4) for name in names}


def _ratio(rival: float, ours: float) -> float | None:
    return round(rival / ours, 3) if ours else None


def _lines(
    load: str, ours: dict[str, Any], theirs: dict[str, Any], goal: dict[str, float]
) -> list[Line]:
    """Format one load: decode is judged on all figures, prefill only on memory."""
    mine, rival = ours[load], theirs[load]
    growths = mine["growths_per_layer"]
    max_ratio = goal[f"{load}_peak_over_steady"]
    judged = load == "decode"
    slower, stall = rival["median_step_ms"], rival["worst_step_ms"] / mine["worst_step_ms"]
    return [
        Line(
            f"{load}: growth copies a layer",
            f"{growths:g}",
            f"{rival['growths_per_layer']:g}",
            "0",
            growths == 0,
        ),
        Line(
            f"{load}: buffers moved a layer",
            f"{mine['moves_per_layer']:g}",
            f"{rival['moves_per_layer']:g}",
        ),
        Line(
            f"{load}: peak / steady bytes",
            f"{mine['peak_over_steady']:.3f}",
            f"{rival['peak_over_steady']:.3f}",
            f"<= {max_ratio:.2f}",
            mine["peak_over_steady"] <= max_ratio,
        ),
        Line(
            f"{load}: peak / bytes of the window",
            f"{mine['peak_over_window']:.3f}",
            f"{rival['peak_over_window']:.3f}",
            f"<= {max_ratio:.2f}",
            mine["peak_over_window"] <= max_ratio,
        ),
        Line(
            f"{load}: first step, ms",
            f"{mine['first_step_ms']:.2f}",
            f"{rival['first_step_ms']:.2f}",
        ),
        Line(
            f"{load}: median step, ms",
            f"{mine['median_step_ms']:.2f}",
            f"{rival['median_step_ms']:.2f}",
            "no slower" if judged else "",
            mine["median_step_ms"] <= slower if judged else None,
        ),
        Line(
            f"{load}: worst later step, ms",
            f"{mine['worst_step_ms']:.2f}",
            f"{rival['worst_step_ms']:.2f}",
            ">= 10x better" if judged else "",
            stall >= goal["decode_worst_step_ratio"] if judged else None,
        ),
    ]
