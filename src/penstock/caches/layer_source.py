"""Extraction of KV from a model's caches, to be stored as nodes of a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.caches.codec import TurboQuantKVCache
from penstock.caches.growing import KVCache
from penstock.caches.layer_form import LayerForm
from penstock.kv import columns as col
from penstock.kv.quantization import ALL_RAW, QuantizationRule
from penstock.kv.segment import Layer, bytes_per_token
from penstock.kv.tails import LayerShape, piece_bytes
from penstock.plurals import counted


@dataclass(frozen=True, slots=True)
class LayerSource:
    form: LayerForm
    sample: Layer
    tokens: int
    cut: Callable[[int, int], Layer]
    """Function that returns columns start..stop-1: views of raw ones, copies of encoded ones.
    Raises SettingError if the codec cannot encode columns that are still raw."""
    coded: bool = False
    viewed: int = 0
    """Number of first tokens that `cut` returns as views; later raw ones are concatenated."""
    encoded: bool = False
    """Whether any tokens are encoded yet; if so, `cut` encodes all but the first ones."""

    def takes_the_place_of(self, form: LayerForm) -> bool:
        """Return whether this is a codec cache with the shapes of an unbounded cache of `form`."""
        alike = form.dtypes == self.form.dtypes and form.heads == self.form.heads
        return self.coded and form.max_size is None and alike


@dataclass(frozen=True, slots=True)
class NodeRun:
    start: int
    stop: int
    nbytes: int
    meanwhile: int = 0
    rule: QuantizationRule = ALL_RAW


def source_of(number: int, cache: Any, rule: QuantizationRule) -> LayerSource | str:
    """Return a source for the KV of layer `number`, or the end of an error message."""
    if isinstance(cache, TurboQuantKVCache):
        return _coded_source(number, cache, rule)
    form = LayerForm.of(cache)
    if isinstance(form, str):
        return f": {form}"
    if cache.empty():
        return " is empty"
    if not rule.is_raw and len(form.dtypes) != 2:
        return (
            f": {type(cache).__name__} is quantized already; store caches in full precision, or "
            f"do not set kv_cache_quantization"
        )
    keys, values = cache.keys_and_values()

    def cut(start: int, stop: int) -> Layer:
        return col.take(keys, start, stop), col.take(values, start, stop)

    return LayerSource(form, (keys, values), col.columns(keys), cut)


def _coded_source(
    number: int, cache: TurboQuantKVCache, rule: QuantizationRule
) -> LayerSource | str:
    if cache.max_size is not None:
        return ": a TurboQuantKVCache with a window drops tokens that are to be stored"
    expected = None if rule.is_raw else (rule.scheme, rule.first_tokens, rule.least_tokens)
    if (cache.scheme, cache.first, cache.least) != expected:
        return (
            f": TurboQuantKVCache holds {cache.codec} after {counted(cache.first, 'token')}, from "
            f"{counted(cache.least, 'token')} on, which differs from the prefix cache's settings"
        )
    if number in rule.raw_layers:
        return (
            ": it is a TurboQuantKVCache, but kv_cache_skip_layers requires full precision; use a "
            "KVCache for this layer"
        )
    if cache.empty():
        return " is empty"
    tail = cache.tail._held()
    grown = LayerForm(KVCache, (), None, *LayerForm.parts(*tail))
    coded = cache.codes.offset > 0
    return LayerSource(grown, tail, cache.size(), cache.cut, True, cache.head.offset, coded)


def runs_of(
    sources: list[LayerSource],
    rule: QuantizationRule,
    start: int,
    stop: int,
    tokens: int,
    lanes: int,
) -> list[NodeRun]:
    """Split tokens start..stop-1 into the runs to store as one node each: raw, then encoded.

    `lanes` is the backend's number of pieces that are encoded at a time.
    """
    layers = [source.sample for source in sources]
    short = tokens < rule.least_tokens
    if rule.is_raw or (short and not any(source.encoded for source in sources)):
        first = stop
    else:
        first = min(max(rule.first_tokens, start), stop)
    runs = []
    if start < first:
        nbytes = (first - start) * bytes_per_token(layers)
        joined = any(source.coded and source.viewed < first for source in sources)
        runs.append(NodeRun(start, first, nbytes, nbytes if joined else 0))
    if not rule.is_raw and first < stop:
        shapes = [LayerShape.of(*col.arrays(*layer)) for layer in layers]
        nbytes = (stop - first) * sum(rule.token_bits(shapes)) // 8
        joined = any(source.coded and not source.encoded for source in sources)
        raw_bytes = (stop - first) * bytes_per_token(layers) if joined else 0
        work = piece_bytes(shapes, lanes)
        runs.append(NodeRun(first, stop, nbytes, work + raw_bytes, rule))
    return runs
