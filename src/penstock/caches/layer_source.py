"""KV in the caches of a model, to be cut into runs that become nodes of a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.caches.codec import TurboQuantKVCache
from penstock.caches.growing import KVCache
from penstock.caches.layer_form import LayerForm
from penstock.kv import columns as col
from penstock.kv.quantization import QuantizationRule, piece_bytes
from penstock.kv.segment import Layer, bytes_per_token
from penstock.kv.tails import LayerShape


@dataclass(frozen=True, slots=True)
class LayerSource:
    """KV in the cache of one layer."""

    form: LayerForm
    sample: Layer
    """Keys and values of some columns."""
    tokens: int
    cut: Callable[[int, int], Layer]
    """Returns columns start..stop-1: views, or copies of coded columns; raises SettingError
    if a codec cannot hold the columns that are still raw."""
    coded: bool = False
    viewed: int = 0
    """First coded tokens that are cut as views; later ones that stay raw are joined."""
    encoded: bool = False
    """Whether some are encoded already, so that all behind the first ones are cut so."""

    def takes_the_place_of(self, form: LayerForm) -> bool:
        """Tell whether it holds codes in the place of a growing cache of this form."""
        alike = form.dtypes == self.form.dtypes and form.heads == self.form.heads
        return self.coded and form.max_size is None and alike


@dataclass(frozen=True, slots=True)
class NodeRun:
    """Consecutive tokens that become one node."""

    start: int
    stop: int
    nbytes: int
    """Bytes of their KV in its final format."""
    meanwhile: int = 0
    """Bytes that are taken besides while they are encoded."""
    rule: QuantizationRule | None = None
    """Rule of the codec that holds them; None if they are held as they are."""


def source_of(number: int, cache: Any, rule: QuantizationRule | None) -> LayerSource | str:
    """Return the source of a layer's KV, or why it cannot be stored.

    Args:
        number: the layer's, among those with keys and values.
        cache: the layer's.
        rule: form in which the KV is to be held; None holds it as it is.
    """
    if isinstance(cache, TurboQuantKVCache):
        return _coded_source(number, cache, rule)
    form = LayerForm.of(cache)
    if isinstance(form, str):
        return f": {form}"
    if cache.empty():
        return " is empty"
    if rule is not None and len(form.dtypes) != 2:
        return (
            f": {type(cache).__name__} holds codes of its own; store caches of full "
            f"precision, or leave out kv_cache_quantization"
        )
    keys, values = cache.keys_and_values()

    def cut(start: int, stop: int) -> Layer:
        return col.take(keys, start, stop), col.take(values, start, stop)

    return LayerSource(form, (keys, values), col.columns(keys), cut)


def _coded_source(
    number: int, cache: TurboQuantKVCache, rule: QuantizationRule | None
) -> LayerSource | str:
    """Do as `source_of` for a cache that holds codes."""
    if cache.max_size is not None:
        return ": a TurboQuantKVCache with a window drops tokens that are to be stored"
    held = None if rule is None else (rule.scheme, rule.first_tokens, rule.least_tokens)
    if (cache.scheme, cache.first, cache.least) != held:
        return (
            f": TurboQuantKVCache holds {cache.codec} behind {cache.first:,} tokens, from "
            f"{cache.least:,} tokens on, and this cache from another length on"
        )
    if rule is not None and number in rule.raw_layers:
        return (
            ": TurboQuantKVCache holds codes where kv_cache_skip_layers leaves numbers as "
            "they are; make a KVCache for this layer"
        )
    if cache.empty():
        return " is empty"
    own = cache.tail._held()
    grown = LayerForm(KVCache, (), None, *LayerForm.parts(*own))
    coded = cache.codes.offset > 0
    return LayerSource(grown, own, cache.size(), cache.cut, True, cache.head.offset, coded)


def runs_of(
    sources: list[LayerSource],
    rule: QuantizationRule | None,
    start: int,
    stop: int,
    tokens: int,
) -> list[NodeRun]:
    """Return the token runs that become a node each, with their bytes: raw ones, then coded.

    A prompt of fewer tokens than the rule quantizes stays raw.

    Args:
        sources: one a layer.
        rule: form in which the KV is to be held; None holds it as it is.
        start: first token.
        stop: the token behind the last one.
        tokens: length of the prompt.
    """
    layers = [source.sample for source in sources]
    short = rule is not None and tokens < rule.least_tokens
    if rule is None or (short and not any(source.encoded for source in sources)):
        first = stop
    else:
        first = min(max(rule.first_tokens, start), stop)
    runs = []
    if start < first:
        nbytes = (first - start) * bytes_per_token(layers)
        joined = any(source.coded and source.viewed < first for source in sources)
        runs.append(NodeRun(start, first, nbytes, nbytes if joined else 0))
    if rule is not None and first < stop:
        shapes = [LayerShape.of(*col.arrays(*layer)) for layer in layers]
        nbytes = (stop - first) * sum(rule.token_bits(shapes)) // 8
        joined = any(source.coded and not source.encoded for source in sources)
        wide = (stop - first) * bytes_per_token(layers) if joined else 0
        runs.append(NodeRun(first, stop, nbytes, piece_bytes(shapes) + wide, rule))
    return runs
