"""`penstock bench store`: storing and fetching in an 8-bit prefix cache, against vllm-mlx."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import mlx.core as mx

from penstock.caches.prefix_cache import PrefixCache
from penstock_bench import rivals
from penstock_bench.comparison import size
from penstock_bench.report import Line, Report
from penstock_bench.vllm_mlx import INSTALL_HINT, MemoryAwareCache, is_installed

CLAIM = "A prompt goes into a prefix cache in codes, and out of it, at little cost and no peak"
OURS = "penstock"
RIVAL = "vllm-mlx"
TIMES = 3.0
"""Goal: speedup over the rival."""
PEAK = 1.1
"""Goal: peak bytes of storing and of fetching, over the resulting bytes."""


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """KV of one prompt. The defaults are 64 MiB in float16."""

    layers: int = 16
    heads: int = 8
    head_dim: int = 64
    tokens: int = 2_048
    bits: int = 8
    dtype: str = "float16"
    rounds: int = 9

    @property
    def raw_bytes(self) -> int:
        """Bytes of the KV in full precision."""
        numbers = 2 * self.layers * self.heads * self.head_dim * self.tokens
        return numbers * int(getattr(mx, self.dtype).size)


class StoreSide(Protocol):
    """Prefix cache under test."""

    def store(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
        """Store the KV of the caches."""

    def fetch(self, tokens: Sequence[int]) -> Sequence[Any] | None:
        """Return caches in full precision."""


class StoreOurs:
    """Penstock's prefix cache, in the rival's codec."""

    def __init__(self, load: StoreLoad) -> None:
        self._cache = PrefixCache(
            4 * load.raw_bytes,
            kv_cache_quantization=f"affine{load.bits}",
            kv_cache_min_quantize_tokens=0,
        )

    def store(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
        return self._cache.store(tokens, caches)

    def fetch(self, tokens: Sequence[int]) -> Sequence[Any] | None:
        return self._cache.fetch(tokens)[0]


@dataclass(frozen=True, slots=True)
class StoreRun:
    """Figures of storing and fetching one prompt. Peaks are above the bytes before."""

    store_seconds: float
    store_peak_bytes: int
    stored_bytes: int
    fetch_seconds: float
    fetch_peak_bytes: int
    fetched_bytes: int


def measure(load: StoreLoad) -> Report:
    """Store and fetch on both sides in turn, each time in a new cache."""
    caches = _caches(load)
    makers: dict[str, Callable[[], StoreSide]] = {OURS: lambda: StoreOurs(load)}
    if is_installed():
        makers[RIVAL] = lambda: MemoryAwareCache(bits=load.bits, limit_bytes=4 * load.raw_bytes)
    runs: dict[str, list[StoreRun]] = {side: [] for side in makers}
    for turn in range(load.rounds + 1):
        for side in list(makers) if turn % 2 == 0 else list(makers)[::-1]:
            run = run_side(makers[side], load.tokens, caches)
            if turn:  # the first warms up
                runs[side].append(run)
    return report(load, runs)


def _caches(load: StoreLoad) -> list[Any]:
    """Fill mlx-lm's caches with random values."""
    size = (1, load.heads, load.tokens, load.head_dim)
    caches = []
    for number in range(load.layers):
        cache = rivals.KVCache()
        sides = [mx.random.normal(size, key=mx.random.key(2 * number + i)) for i in (0, 1)]
        cache.update_and_fetch(*(side.astype(getattr(mx, load.dtype)) for side in sides))
        mx.eval(cache.state)
        caches.append(cache)
    return caches


def run_side(make: Callable[[], StoreSide], tokens: int, caches: Sequence[Any]) -> StoreRun:
    """Store one prompt and fetch it.

    Raises:
        AssertionError: the prompt is not found afterwards.
    """
    side, prompt = make(), list(range(tokens))
    before = _rested()
    began = time.perf_counter()
    side.store(prompt, caches)
    store_seconds = time.perf_counter() - began
    store_peak = mx.get_peak_memory() - before
    stored_bytes = _rested()
    began = time.perf_counter()
    fetched = side.fetch([*prompt, 0])
    if fetched is None or any(cache.offset != tokens for cache in fetched):
        raise AssertionError("what was stored is not found")
    mx.eval([cache.state for cache in fetched])
    fetch_seconds = time.perf_counter() - began
    return StoreRun(
        store_seconds,
        store_peak,
        stored_bytes - before,
        fetch_seconds,
        mx.get_peak_memory() - stored_bytes,
        mx.get_active_memory() - stored_bytes,
    )


def _rested() -> int:
    """Drop freed buffers, reset the peak, and return the bytes in use."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def report(load: StoreLoad, runs: Mapping[str, Sequence[StoreRun]]) -> Report:
    """Compare both sides with each other and with the goals."""
    figures = {side: _figures(of) for side, of in runs.items()}
    ours, theirs = figures[OURS], figures.get(RIVAL)
    ratio: dict[str, float | None] = {}
    lines = []
    for act in ("store", "fetch"):
        times = None
        if theirs is not None:
            times = round(theirs[f"{act}_ms"] / ours[f"{act}_ms"], 2)
        ratio[f"{act}_speed"] = times
        lines.append(
            Line(
                f"{act}, ms" + ("" if times is None else f" ({times:.2f}x)"),
                f"{ours[f'{act}_ms']:.0f}",
                f"not installed: {INSTALL_HINT}"
                if theirs is None
                else f"{theirs[f'{act}_ms']:.0f}",
                f">= {TIMES:g}x",
                None if times is None else times >= TIMES,
            )
        )
        lines.append(
            Line(
                f"{act}, peak over what it makes",
                _peak(ours, act),
                "" if theirs is None else _peak(theirs, act),
                f"<= {PEAK:g}",
                ours[f"{act}_peak"] <= PEAK,
            )
        )
    return Report(
        name="store",
        claim=f"{CLAIM}: {load.bits} bits, {size(load.raw_bytes)} of {load.dtype}",
        rival=RIVAL,
        penstock=ours,
        rival_figures=theirs or {},
        ratio=ratio,
        goal={"store_speed": TIMES, "fetch_speed": TIMES, "peak": PEAK},
        met=all(line.met for line in lines if line.met is not None),
        lines=lines,
        raw={
            "load": asdict(load),
            "runs": {side: [asdict(run) for run in of] for side, of in runs.items()},
        },
        dtype=load.dtype,
    )


def _figures(runs: Sequence[StoreRun]) -> dict[str, Any]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs))

    figures: dict[str, Any] = {"stored_bytes": round(median("stored_bytes"))}
    for act, makes in (("store", "stored_bytes"), ("fetch", "fetched_bytes")):
        figures[f"{act}_ms"] = round(1e3 * median(f"{act}_seconds"), 1)
        figures[f"{act}_peak_bytes"] = round(median(f"{act}_peak_bytes"))
        figures[f"{act}_peak"] = round(figures[f"{act}_peak_bytes"] / median(makes), 3)
    return figures


def _peak(figures: Mapping[str, Any], act: str) -> str:
    return f"{figures[f'{act}_peak']:.2f} ({size(figures[f'{act}_peak_bytes'])})"
