"""`penstock bench-kv-cache`: bytes, errors and speed of every codec.

Keys and values are random (normal, with outlier channels, or with a constant rotated by RoPE) or a
model's own. The error of attention is measured with queries that each look for one token: a key of
the sequence plus noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from penstock.attention import devices
from penstock.errors import SettingError
from penstock.kv.codecs.coded import Codec, Coded
from penstock.kv.codecs.names import parse_scheme
from penstock.kv.codecs.scheme import Scheme
from penstock.kv.states import taken_apart
from penstock.models.loading import load
from penstock.models.mlx_lm import encode, plain_caches
from penstock_bench import vllm_mlx
from penstock_bench.recall import dialogue
from penstock_bench.report import environment
from penstock_bench.rivals import QuantizedSides
from penstock_bench.vllm_mlx import DequantizedSides

CODECS = (
    *("raw", "affine8", "kivi8", "rot8", "turbo8", "k8v4", "affine4", "rot4", "kivi4", "turbo4"),
    *("kivi4/turbo4", "kivi5/turbo3.5", "kivi6/turbo2.5", "turbo3.5", "affine3"),
    *("turbo3", "kivi4/turbo3", "kivi4/turbo2", "turbo2.5", "affine2", "kivi2", "turbo2"),
)
RIVALS: dict[str, type[QuantizedSides] | type[DequantizedSides]] = {
    "mlx-lm": QuantizedSides,
    "vllm-mlx": DequantizedSides,
}
"""Rival formats: mlx-lm's `QuantizedKVCache`, and an entry of vllm-mlx's prefix cache."""
RIVAL_BITS = (8, 4)
RIVAL_GROUPS = (64, 32)
"""Group sizes of the rivals: the default, or the next smaller one if it does not divide a head."""
QUERIES = 32
"""Queries per head; each looks for one token."""
LEAST_DIM = 8
"""Smallest head size: the constant of random keys is in four pairs of channels."""
ROPE_BASE = 10_000.0
OUTLIERS = (10.0, 20.0)
"""Scales of the outlier channels, from the first to the last."""
BIAS = (30.0, 100.0)
TEXT_TOKENS = 1_000
"""Length of the dialogue that a model reads, in tokens."""
DATA = ("gauss", "outliers", "biased")
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a cache: layers, heads, head size, tokens, and the raw dtype."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    seq_len: int = 512
    dtype: str = "float16"
    rounds: int = 5

    @property
    def raw_bytes(self) -> int:
        """Bytes of keys and values in the raw dtype."""
        numbers = 2 * self.layers * self.heads * self.head_dim * self.seq_len
        return numbers * int(DTYPES[self.dtype].size)


@dataclass(frozen=True, slots=True)
class Sides:
    """Keys and values of a layer, and queries.

    keys, values: (1, heads, tokens, dim). queries: (heads, QUERIES, dim) float32.
    """

    keys: mx.array
    values: mx.array
    queries: mx.array


@dataclass(frozen=True, slots=True)
class CodecRow:
    """Bytes, errors and times of one cache format.

    Errors are over all layers. Times are medians of one pass over all layers.
    """

    name: str
    nbytes: int
    ratio: float
    """Raw bytes over `nbytes`."""
    bits: float
    """Bits per value, everything included."""
    relative_mse_keys: float
    relative_mse_values: float
    mean_error: float
    """Mean absolute error of keys and values."""
    mean_error_keys: float
    mean_error_values: float
    """Mean absolute error of the values."""
    max_error: float
    kl: float
    """KL divergence of a query's attention weights, in nats."""
    top_1: float
    """Share of the queries whose largest weight is at the same token."""
    output_error: float
    """Mean absolute error of the attention output."""
    quantize_ms: float
    dequantize_ms: float
    attend_ms: float
    """Milliseconds of attention with one query per head."""
    peak_bytes: int
    """Peak bytes while quantizing layer by layer, above the bytes before."""


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of all formats, and the formats left out."""

    shape: CacheShape
    data: str
    rows: tuple[CodecRow, ...]
    refused: dict[str, str]
    """Reasons by name: unsupported head size, or not installed."""

    def as_object(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.shape),
            "data": self.data,
            "baseline": self.shape.dtype,
            "rows": [asdict(row) for row in self.rows],
            "refused": self.refused,
            "environment": environment(self.shape.dtype),
        }


def draw(shape: CacheShape, data: str, layer: int) -> Sides:
    """Draw the keys and values of one layer.

    gauss: normal. outliers: normal, with four channels of the keys scaled by 10 to 20. biased:
        normal,
    with a constant of 30 to 100 in four pairs of channels in the middle of RoPE's frequencies,
    rotated by RoPE. Queries look for the part of a key beyond its constant.

    Raises:
        ValueError: `data` is unknown.
    """
    if data not in DATA:
        raise ValueError(f"{data!r} is none of {', '.join(DATA)}")
    seeds = mx.random.split(mx.random.key(layer), 3)
    size = (1, shape.heads, shape.seq_len, shape.head_dim)
    keys, values = mx.random.normal(size, key=seeds[0]), mx.random.normal(size, key=seeds[1])
    if data == "outliers":
        outliers = [(7 + 31 * i) % shape.head_dim for i in range(4)]
        large = mx.ones((shape.head_dim,))
        for number, channel in enumerate(outliers):
            large[channel] = OUTLIERS[0] + number * (OUTLIERS[1] - OUTLIERS[0]) / 3
        keys = keys * large
    varying = keys[0]
    if data == "biased":
        keys = keys + _turned_bias(shape)
    return _layer(keys, values, varying, seeds[2], DTYPES[shape.dtype])


def _turned_bias(shape: CacheShape) -> mx.array:
    """Return a constant rotated by RoPE to every position, (tokens, dim)."""
    half = shape.head_dim // 2
    pairs = list(range(half // 2 - 2, half // 2 + 2))
    bias = mx.zeros((shape.head_dim,))
    for number, pair in enumerate(pairs):
        size = BIAS[0] + number * (BIAS[1] - BIAS[0]) / (len(pairs) - 1)
        bias[pair] = size * (-1) ** number
    angles = mx.arange(shape.seq_len)[:, None] * ROPE_BASE ** (-mx.arange(half) / half)
    first, second = bias[:half], bias[half:]
    return mx.concatenate(
        [
            first * mx.cos(angles) - second * mx.sin(angles),
            first * mx.sin(angles) + second * mx.cos(angles),
        ],
        axis=-1,
    )


def of_model(model: str | Path, tokens: int, dtype: str) -> tuple[CacheShape, list[Sides]]:
    """Return the keys and values that a model computes for `tokens` tokens of dialogue.

    Queries are drawn as in `draw`.

    Raises:
        SettingError: no layer has plain KV, or the layers differ in shape.
        ModelError: the model cannot be loaded.
    """
    loaded, tokenizer = load(model)
    try:
        return computed(loaded, _text(tokenizer, tokens), dtype)
    except ValueError as error:
        raise SettingError(f"--data {model}: {error}") from None


def computed(model: Any, prompt: Sequence[int], dtype: str) -> tuple[CacheShape, list[Sides]]:
    """Return the keys and values that a model computes for a prompt; see `of_model`.

    Raises:
        ValueError: no layer has plain KV, or the layers differ in shape.
    """
    tokens, caches = len(prompt), plain_caches(model)
    model(mx.array([list(prompt)]), cache=caches)
    kept, _, _ = taken_apart(caches)
    states = [tuple(cache.state)[:2] for cache in kept]
    sides = [both for both in states if len(both) == 2 and all(_is_side(side) for side in both)]
    shapes = {tuple(side.shape[1::2]) for both in sides for side in both}
    if len(shapes) != 1:
        known_shapes = ", ".join(f"{heads} heads of {dim}" for heads, dim in sorted(shapes))
        raise ValueError(
            f"only keys and values of one size can be set side by side; its layers hold "
            f"{known_shapes or 'none of their own'}"
        )
    layers = []
    for number, (keys, values) in enumerate(sides):
        float32_keys = keys[0, :, :tokens].astype(mx.float32)
        varying = float32_keys - mx.mean(float32_keys, axis=1, keepdims=True)
        cut = keys[:, :, :tokens], values[:, :, :tokens]
        layers.append(_layer(*cut, varying, mx.random.key(number), DTYPES[dtype]))
    heads, dim = shapes.pop()
    return CacheShape(len(layers), heads, dim, tokens, dtype), layers


def _is_side(state: Any) -> bool:
    return isinstance(state, mx.array) and state.ndim == 4 and state.shape[0] == 1


def _layer(
    keys: mx.array, values: mx.array, varying: mx.array, seed: mx.array, dtype: mx.Dtype
) -> Sides:
    """Return a layer with random queries, each a key plus noise.

    Args:
        keys: (1, heads, tokens, dim).
        values: the same.
        varying: (heads, tokens, dim), the part of the keys that varies between tokens.
        seed: random key of the queries.
        dtype: raw dtype.
    """
    heads, tokens, _ = varying.shape
    # A channel that is large in all tokens tells none from another.
    scale = mx.sqrt(mx.mean(varying**2, axis=1, keepdims=True)) + 1e-6
    seeds = mx.random.split(seed, 2)
    positions = mx.random.randint(0, tokens, (heads, QUERIES), key=seeds[0])
    sought_keys = mx.take_along_axis(varying, positions[..., None], axis=1)
    queries = sought_keys / scale**2 + mx.random.normal(sought_keys.shape, key=seeds[1]) / scale
    sides = Sides(keys.astype(dtype), values.astype(dtype), queries)
    mx.eval(sides.keys, sides.values, sides.queries)
    return sides


def _text(tokenizer: Any, tokens: int) -> list[int]:
    tokens_read: list[int] = []
    while len(tokens_read) < tokens:
        talk = dialogue(len(tokens_read), tokens=TEXT_TOKENS)
        tokens_read += encode(tokenizer, "\n".join(message["content"] for message in talk.messages))
    return tokens_read[:tokens]


# ---- ways of holding a cache


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One stored layer, with functions to dequantize it and to attend."""

    nbytes: int
    dequantize: Callable[[], tuple[mx.array, mx.array]]
    attend: Callable[[mx.array], mx.array]
    """Takes scaled queries (heads, 1, dim); returns (heads, 1, dim)."""
    arrays: list[mx.array]


StoreLayer = Callable[[Sides], StoredLayer]


def ours(scheme: Scheme) -> StoreLayer:
    """Return a function that stores layers with the codecs of a scheme."""

    def store(sides: Sides) -> StoredLayer:
        keys, values = _coded(scheme.keys, sides.keys), _coded(scheme.values, sides.values)
        parts = [part for side in (keys, values) for part in _parts(side)]

        def attend(queries: mx.array) -> mx.array:
            scores = (
                keys.score(queries, devices.current())
                if isinstance(keys, Coded)
                else _products(queries, keys)
            )
            weights = mx.softmax(scores.astype(mx.float32), axis=-1)
            if isinstance(values, Coded):
                return values.mix(weights, devices.current())
            return weights.astype(values.dtype) @ values[0]

        def dequantize() -> tuple[mx.array, mx.array]:
            dequantized = [
                side.dequantize(devices.current()) if isinstance(side, Coded) else side
                for side in (keys, values)
            ]
            return dequantized[0], dequantized[1]

        return StoredLayer(sum(part.nbytes for part in parts), dequantize, attend, parts)

    return store


def rival(name: str, bits: int, group_size: int) -> StoreLayer:
    """Return a function that stores layers in a rival's format, with its attention.

    vllm-mlx attends over dequantized keys and values.
    """

    def store(sides: Sides) -> StoredLayer:
        cache = RIVALS[name](sides.keys, sides.values, bits=bits, group_size=group_size)
        return StoredLayer(cache.nbytes, cache.dequantize, cache.attend, cache.arrays)

    return store


def rivals(head_dim: int) -> tuple[dict[str, StoreLayer], dict[str, str]]:
    """Return the functions of the available rivals, and why others are left out."""
    ways, missing = dict[str, StoreLayer](), {}
    group = next((size for size in RIVAL_GROUPS if head_dim % size == 0), None)
    for name in RIVALS:
        if name == "vllm-mlx" and not vllm_mlx.is_installed():
            missing[name] = f"not installed; {vllm_mlx.INSTALL_HINT}"
        elif group is None:
            missing[name] = f"no group of 32 or 64 numbers divides a head of {head_dim}"
        else:
            behind = "" if group == RIVAL_GROUPS[0] else f"g{group}"
            ways |= {f"{name} {bits}{behind}": rival(name, bits, group) for bits in RIVAL_BITS}
    return ways, missing


def _coded(codec: Codec | None, side: mx.array) -> Coded | mx.array:
    # Evaluated, this is a copy: a cache holds no view of computed arrays.
    return side + 0 if codec is None else codec.encode(side, devices.current())


def _parts(side: Coded | mx.array) -> list[mx.array]:
    return list(side.parts) if isinstance(side, Coded) else [side]


def _products(queries: mx.array, keys: mx.array) -> mx.array:
    return queries.astype(keys.dtype) @ keys[0].swapaxes(-1, -2)


# ---- measuring


def measure(
    shape: CacheShape,
    data: str,
    codecs: Sequence[str],
    layers: Sequence[Sides] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Table:
    """Measure all formats on the same keys and values, one after the other.

    Args:
        shape: shape of the cache.
        data: kind of random data, or the name of the model.
        codecs: names; see `parse_scheme`.
        layers: the model's own keys and values.
        rounds: number of timed rounds.
        progress: takes the name of the next format.

    Raises:
        ValueError: a codec or kind of data is unknown.
        SettingError: the number of tokens does not fit a codec, or the head size is odd.
    """
    schemes = [parse_scheme(name) for name in codecs]
    if shape.head_dim % 2 or shape.head_dim < LEAST_DIM:
        raise SettingError(
            f"heads of {shape.head_dim} numbers: an even number of {LEAST_DIM} or more is needed"
        )
    refused, ways = {}, dict[str, StoreLayer]()
    for scheme in schemes:
        try:
            scheme.token_bits(shape.head_dim, shape.head_dim, 16)
        except ValueError as error:
            refused[scheme.name] = str(error)
        else:
            ways[scheme.name] = ours(scheme)
    spans = [codec.span for s in schemes for codec in (s.keys, s.values) if codec is not None]
    if layers is None:
        layers = [draw(shape, data, layer) for layer in range(shape.layers)]
    whole = math.lcm(*spans, 1)
    if shape.seq_len % whole:
        raise SettingError(
            f"{shape.seq_len} tokens are not a multiple of {whole}, which one of these codecs "
            f"encodes together"
        )
    theirs, missing = rivals(shape.head_dim)
    ways, refused = ways | theirs, refused | missing
    rows = []
    for name, store in ways.items():
        progress(name)
        rows.append(_row(name, store, shape, layers))
    return Table(shape, data, tuple(rows), refused)


def _row(name: str, store: StoreLayer, shape: CacheShape, layers: Sequence[Sides]) -> CodecRow:
    stored, peak, quantize = _filled(store, layers, shape.rounds)
    nbytes = sum(layer.nbytes for layer in stored)
    numbers = 2 * len(layers) * layers[0].keys.size
    errors = [_errors(layer, sides) for layer, sides in zip(stored, layers, strict=True)]

    def mean(key: str) -> float:
        return statistics.fmean(error[key] for error in errors)

    scaled = [sides.queries[:, :1] / math.sqrt(shape.head_dim) for sides in layers]
    mx.eval(scaled)
    return CodecRow(
        name=name,
        nbytes=nbytes,
        ratio=round(numbers * DTYPES[shape.dtype].size / nbytes, 3),
        bits=round(8 * nbytes / numbers, 3),
        relative_mse_keys=mean("mse_keys"),
        relative_mse_values=mean("mse_values"),
        mean_error=(mean("mean_keys") + mean("mean_values")) / 2,
        mean_error_keys=mean("mean_keys"),
        mean_error_values=mean("mean_values"),
        max_error=max(error["max"] for error in errors),
        kl=mean("kl"),
        top_1=mean("top_1"),
        output_error=mean("output"),
        quantize_ms=quantize,
        dequantize_ms=_median_ms([layer.dequantize for layer in stored], shape.rounds),
        attend_ms=_median_ms(
            [partial(layer.attend, q) for layer, q in zip(stored, scaled, strict=True)],
            shape.rounds,
        ),
        peak_bytes=peak,
    )


def _filled(
    store: StoreLayer, layers: Sequence[Sides], rounds: int
) -> tuple[list[StoredLayer], int, float]:
    """Store all layers; return them, the peak bytes above those before, and milliseconds."""
    seconds, stored, peak = [], list[StoredLayer](), 0
    for _ in range(rounds):
        stored.clear()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        began = time.perf_counter()
        for sides in layers:
            stored.append(store(sides))
            mx.eval(stored[-1].arrays)
        seconds.append(time.perf_counter() - began)
        peak = mx.get_peak_memory() - before
    return stored, peak, 1e3 * statistics.median(seconds)


def _median_ms(layers: Sequence[Callable[[], Any]], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for layer in layers:
            mx.eval(layer())
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[1:])


def _errors(stored: StoredLayer, sides: Sides) -> dict[str, float]:
    exact = [side.astype(mx.float32) for side in (sides.keys, sides.values)]
    read = [side.astype(mx.float32) for side in stored.dequantize()]
    lost = [mx.abs(a - b) for a, b in zip(exact, read, strict=True)]
    queries = sides.queries / math.sqrt(sides.queries.shape[-1])
    right, coded = (
        mx.softmax(queries @ keys[0].swapaxes(-1, -2), axis=-1) for keys in (exact[0], read[0])
    )
    logs = [mx.log(mx.maximum(weights, 1e-30)) for weights in (right, coded)]
    outputs = right @ exact[1][0] - coded @ read[1][0]
    figures = {
        "mse_keys": (lost[0] ** 2).sum() / (exact[0] ** 2).sum(),
        "mse_values": (lost[1] ** 2).sum() / (exact[1] ** 2).sum(),
        "mean_keys": lost[0].mean(),
        "mean_values": lost[1].mean(),
        "max": mx.maximum(lost[0].max(), lost[1].max()),
        "kl": (right * (logs[0] - logs[1])).sum(axis=-1).mean(),
        "top_1": (mx.argmax(right, axis=-1) == mx.argmax(coded, axis=-1)).mean(),
        "output": mx.abs(outputs).mean(),
    }
    return {name: float(figure) for name, figure in figures.items()}
