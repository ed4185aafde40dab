"""Error of each layer's attention by a codec, with queries of a real text on quantized keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from penstock.attention import devices
from penstock.attention.chunk_reads import ChunkReads
from penstock.engine.model.runner import Runner
from penstock.kv.codecs.coded import Codec
from penstock.kv.codecs.scheme import Scheme

QUERY_TOKENS = 64
"""Tokens whose queries are recorded, after the tokens whose keys and values are quantized."""


@dataclass(frozen=True, slots=True)
class WatchedLayer:
    """Queries, keys and values of one layer on a text, float32.

    `queries`: (kv_heads, m, key_dim), already scaled, of the tokens behind the keys. `keys`: (1,
    kv_heads, n, key_dim). `values`: (1, kv_heads, n, value_dim).
    """

    queries: mx.array
    keys: mx.array
    values: mx.array


@dataclass(frozen=True, slots=True)
class LayerError:
    """Error of one layer's attention on quantized keys and values."""

    kl: float
    """Mean KL divergence of the attention weights from those on raw keys, in nats."""
    output: float
    """Relative root mean square error of the output."""


class WatchingReads(ChunkReads):
    """Layer of a single prefill that records its queries, keys and values."""

    seen: WatchedLayer | None = None

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend as `ChunkReads` does, and record queries, keys and values."""
        coded = keys.shape[2] - QUERY_TOKENS
        last = (queries[0, :, coded:] * scale).astype(mx.float32)
        grouped = last.reshape(keys.shape[1], -1, last.shape[-1])
        kept = [mx.contiguous(x[:, :, :coded].astype(mx.float32)) for x in (keys, values)]
        mx.eval(grouped, *kept)
        self.seen = WatchedLayer(grouped, *kept)
        return super().attend(queries, keys, values, scale, mask, sinks)


def watch(runner: Runner, tokens: Sequence[int], span: int) -> list[WatchedLayer | None]:
    """Prefill a text in one pass; return the queries, keys and values of each layer.

    Args:
        runner: runner of the model.
        tokens: tokens of the text.
        span: the number of quantized tokens is a multiple of this.

    Returns:
        One entry per layer; None for layers without full attention. An empty list if the text is
        too short, or the model implements attention itself.
    """
    coded = (len(tokens) - QUERY_TOKENS) // span * span
    if coded <= 0 or runner.fitness.way != "shared":
        return []
    windows = runner.layout.attention_windows
    reads = [
        WatchingReads(number, window, (), 0, runner.device) for number, window in enumerate(windows)
    ]
    caches, _ = runner.layout.caches(reads, None)
    logits = runner.model(mx.array([list(tokens[: coded + QUERY_TOKENS])]), cache=caches)
    mx.eval(logits[:, -1])
    length = coded + QUERY_TOKENS
    return [
        read.seen if window.window is None or window.window >= length else None
        for read, window in zip(reads, windows, strict=True)
    ]


def layer_errors(layers: Sequence[WatchedLayer | None], scheme: Scheme) -> list[LayerError | None]:
    """Return the error of a codec in each layer; None for layers that were not recorded."""
    return [
        None if layer is None else _error(layer, scheme.of_layer(number))
        for number, layer in enumerate(layers)
    ]


def mean_errors(texts: Sequence[Sequence[LayerError | None]]) -> list[LayerError | None]:
    """Return the mean over texts for each layer; None if one of the texts lacks it."""
    means: list[LayerError | None] = []
    for layer in zip(*filter(None, texts), strict=True):
        errors = [error for error in layer if error is not None]
        whole = len(errors) == len(layer)
        means.append(_mean(errors) if whole else None)
    return means


def _mean(errors: Sequence[LayerError]) -> LayerError:
    n = len(errors)
    return LayerError(
        sum(error.kl for error in errors) / n, sum(error.output for error in errors) / n
    )


def _error(layer: WatchedLayer, scheme: Scheme) -> LayerError:
    raw = _log_weights(layer.queries, layer.keys)
    coded = _log_weights(layer.queries, _held(scheme.keys, layer.keys))
    kl = (mx.exp(raw) * (raw - coded)).sum(axis=-1).mean()
    output = mx.exp(raw) @ layer.values[0]
    change = mx.exp(coded) @ _held(scheme.values, layer.values)[0] - output
    relative = mx.sqrt((change * change).mean() / (output * output).mean())
    return LayerError(max(0.0, float(kl)), float(relative))


def _log_weights(queries: mx.array, keys: mx.array) -> mx.array:
    """Return log attention weights, (kv_heads, m, n)."""
    scores = queries @ keys[0].swapaxes(1, 2)
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def _held(codec: Codec | None, x: mx.array) -> mx.array:
    """Encode and dequantize `x`, in float32."""
    return x if codec is None else codec.encode(x, devices.current()).dequantize(devices.current())
