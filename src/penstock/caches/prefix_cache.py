"""`PrefixCache`: KV of prompts, reused by later prompts with a common prefix.

In an mlx-lm loop, call `fetch` before the prefill and `store` after it. Each token's KV is stored
once, in a radix tree of whole blocks, within a hard memory limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from penstock.attention import devices
from penstock.caches.codec import TurboQuantKVCache
from penstock.caches.layer_form import CachesForm, difference
from penstock.caches.layer_source import LayerSource, NodeRun, runs_of, source_of
from penstock.config import MIN_QUANTIZE_TOKENS, RAW_FIRST_TOKENS
from penstock.errors import SettingError
from penstock.kv import columns as col
from penstock.kv.block_format import BlockFormat
from penstock.kv.checks import positive
from penstock.kv.quantization import ALL_RAW, QuantizationRule
from penstock.kv.segment import Layer, Segment
from penstock.kv.states import RecurrentState, States, arrays, copied, put_together, taken_apart
from penstock.kv.states import nbytes as nbytes_of
from penstock.kv.tails import LayerShape, piece_bytes
from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory import parse_bytes
from penstock.prefix import Match, Pin, Prefixes
from penstock.prefix.block_hashes import TokenArray, Tokens, as_tokens
from penstock.prefix.checkpoints import Checkpoints, resume
from penstock.prefix.divergence import explain
from penstock.prefix.explanation import Explanation

PREFILL_TOKENS = 2_048
"""Number of tokens that `prefill` processes at a time, as in mlx-lm."""
ROOM_TOKENS = 256
"""Number of spare columns of a fetched cache, unless `capacity` is given."""


@dataclass(frozen=True, slots=True)
class Stored:
    new_tokens: int
    held_tokens: int
    """Number of the prompt's tokens that are stored now, in whole blocks."""
    refused: str | None = None
    """Reason why nothing could be stored; None on success. The caches are unchanged either way."""


def _limit_bytes(limit: object) -> int:
    """Convert a memory limit, a number or text, to bytes; SettingError if it is invalid."""
    if isinstance(limit, str):
        return parse_bytes(limit)
    try:
        return positive("memory_limit", limit)
    except (TypeError, ValueError):
        raise SettingError(
            f"memory_limit must be a whole number of bytes of at least 1, or a text like '2GB', "
            f"not {limit!r}"
        ) from None


class PrefixCache:
    """Prefix cache for mlx-lm loops: KV of prompts, matched in whole blocks.

    A prompt reuses the longest prefix that it has in common with any stored prompt, which may be
    shorter, longer, or diverge partway. The caches that `fetch` returns are copies that may be
    written to. Not thread-safe: use it only in the thread that runs the model.

    Args:
        memory_limit: limit in bytes, or as a text like "2GB", of all memory held: KV, the index,
            and temporary copies when nodes are split.
        block_size: tokens per block, the unit of matching. The incomplete last block is not
            stored. Defaults to 32, rounded up to what the codec requires.
        fingerprint: identity of everything but the tokens that KV depends on, such as the model's
            path and adapter. Part of every key.
        clock: function that returns seconds, used for recency.
        kv_cache_quantization: codec of the stored KV, such as `turbo4` or `k8v4`; None stores KV
            unchanged.
        kv_cache_min_quantize_tokens: prompts of fewer tokens are not encoded; longer ones are
            encoded as a whole.
        kv_cache_raw_first_tokens: number of first tokens of every prompt that are not encoded,
            rounded up to whole blocks.
        kv_cache_skip_layers: indices of layers that are not encoded.

    Raises:
        SettingError: `memory_limit` is not a valid size; the codec does not exist, or does not
            support this block size.

    >>> cache = PrefixCache("1GB", block_size=64)
    >>> cache.fetch(range(200))[0] is None
    True
    """

    def __init__(
        self,
        memory_limit: int | str,
        *,
        block_size: int | None = None,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
        kv_cache_quantization: str | None = None,
        kv_cache_min_quantize_tokens: int = MIN_QUANTIZE_TOKENS,
        kv_cache_raw_first_tokens: int = RAW_FIRST_TOKENS,
        kv_cache_skip_layers: Sequence[int] = (),
    ) -> None:
        if block_size is None:
            block_size = QuantizationRule.block_size(kv_cache_quantization)
        block_size = positive("block_size", block_size)
        self._rule = QuantizationRule.of(
            kv_cache_quantization,
            block_size=block_size,
            first_tokens=kv_cache_raw_first_tokens,
            least_tokens=kv_cache_min_quantize_tokens,
            skip_layers=kv_cache_skip_layers,
        )
        memory_limit = _limit_bytes(memory_limit)
        self.prefixes: Prefixes[Segment] = Prefixes(
            Ledger(memory_limit), block_size=block_size, fingerprint=fingerprint, clock=clock
        )
        self.ledger = self.prefixes.ledger
        self.policy = self.prefixes.policy
        self.tree = self.prefixes.tree
        self.counts = self.prefixes.counts
        self.fingerprint = fingerprint
        self._shapes: dict[str, CachesForm] = {}  # by salt
        self._device = devices.current()

    @property
    def nbytes(self) -> int:
        return self.ledger.used_bytes

    def fetch(
        self,
        tokens: Tokens,
        *,
        salt: str = "",
        capacity: int | None = None,
        dequantize: bool = True,
    ) -> tuple[list[Any] | None, list[int]]:
        """Return caches that hold a prefix of `tokens`, and the remaining tokens, at least one.

        The caches belong to the caller. They have the classes that were stored (a `KVCache` for a
        `TurboQuantKVCache`), and encoded columns are dequantized. Without a match, returns None
        and all tokens.

        Args:
            tokens: the prompt.
            salt: cache salt: only prompts stored with the same salt match.
            capacity: number of tokens, prompt and answer, to allocate buffers for; defaults to 256
                more than the prefix.
            dequantize: if False, return codes unchanged, in a `TurboQuantKVCache` for each
                quantized layer without a window.

        Raises:
            SettingError: `dequantize` is False, but no codec is set.
        """
        if not dequantize and self._rule.is_raw:
            raise SettingError("dequantize=False: no codec is set; set kv_cache_quantization")
        values = as_tokens(tokens)
        keys = self.prefixes.block_hashes(values[:-1], salt)
        match = self.prefixes.match(keys)
        states: States = ()
        if match.tokens and self._shapes[salt].states:
            position, recurrent = resume(match.path, match.tokens)
            states = () if recurrent is None else recurrent.states
            match = self.prefixes.match(keys[: position // self.tree.block_size])
        if match.tokens == 0:
            return None, values.tolist()
        with self.prefixes.pin(match):
            caches = self._revive(match, states, salt, capacity, dequantize=dequantize)
        self.counts.hits += 1
        self.counts.fetched_tokens += match.tokens
        return caches, values[match.tokens :].tolist()

    def store(self, tokens: Tokens, caches: Sequence[Any], *, salt: str = "") -> Stored:
        """Store the KV of the whole blocks of `tokens` that `caches` hold.

        Blocks already stored are neither copied nor encoded again. The least valuable nodes are
        evicted to make room; a prompt that cannot fit is refused, without evictions. The caches
        are not changed, and share no memory with the stored copies.

        States of recurrent layers are valid only at the end of the processed tokens. They are
        stored if their number is a multiple of the block size, so call `store` at such points, as
        `prefill` does.

        Args:
            tokens: the tokens that the caches hold, from the first one on.
            caches: one cache per layer, of penstock or mlx-lm, with one sequence.
            salt: cache salt: only prompts with the same salt match.

        Raises:
            SettingError: the codec does not support the head size, or a layer of
                `kv_cache_skip_layers` does not exist.
        """
        sources, forms = [], []
        kept, states, places = taken_apart(caches)
        shape = self._shapes.get(salt)
        known = [] if shape is None else shape.forms
        for index, cache in enumerate(kept):
            source = source_of(index, cache, self._rule)
            if isinstance(source, str):
                return self._refuse(f"layer {index}{source}")
            sources.append(source)
            same = len(known) == len(kept) and source.takes_the_place_of(known[index])
            forms.append(known[index] if same else source.form)
        if not all(arrays([cache.cache]) for cache in states):
            return self._refuse("a recurrent layer's cache is empty")
        if any(array.shape[0] != 1 for array in arrays(cache.cache for cache in states)):
            return self._refuse("a recurrent layer's cache holds a batch; extract its rows first")
        shape = CachesForm(forms, [type(cache) for cache in states], places)
        if (held_shape := self._shapes.setdefault(salt, shape)) != shape:
            return self._refuse(difference(held_shape, shape))
        values = as_tokens(tokens)
        available = min((source.tokens for source in sources), default=len(values))
        recurrent = tuple(tuple(cache.cache) for cache in states)
        return self._insert(
            values[:available], sources, salt, recurrent if available <= len(values) else ()
        )

    def prefill(
        self,
        model: Any,
        tokens: Tokens,
        make_caches: Callable[[], list[Any]],
        *,
        salt: str = "",
        step_size: int = PREFILL_TOKENS,
        dequantize: bool = True,
    ) -> tuple[list[Any], list[int]]:
        """Fetch a prompt's cached prefix, compute the rest of its whole blocks, and store it.

        States of recurrent layers are stored after the last whole block, and after every
        `step_size` tokens, so that later prompts can continue there.

        Args:
            model: the model, called with tokens (1, n) and `cache=`.
            tokens: the prompt.
            make_caches: function that returns empty caches, one per layer.
            salt: cache salt: only prompts with the same salt match.
            step_size: number of tokens computed at a time, rounded down to whole blocks.
            dequantize: see `fetch`; set it to False if `make_caches` returns
                `TurboQuantKVCache`s, so that fetched caches are of this class, too.

        Returns:
            The caches, and the remaining tokens, at least one.

        Raises:
            SettingError: see `fetch` and `store`.
        """
        values = as_tokens(tokens)
        caches, rest = self.fetch(values, salt=salt, dequantize=dequantize)
        if caches is None:
            caches = make_caches()
        size = self.tree.block_size
        start, end = len(values) - len(rest), (len(values) - 1) // size * size
        step = max(1, step_size // size) * size
        while start < end:
            stop = min(start + step, end)
            model(mx.array(values[None, start:stop]), cache=caches)
            kept, states, _ = taken_apart(caches)
            state_arrays = [arrays(cache.cache for cache in states)]
            mx.eval([cache.state for cache in kept], state_arrays)
            self.store(values[:stop], caches, salt=salt)
            start = stop
        return caches, values[start:].tolist()

    def explain(self, tokens: Tokens, *, salt: str = "") -> Explanation:
        """Explain how long a prefix of `tokens` would match now, and why not a longer one."""
        explanation = explain(self.prefixes, tokens, salt)
        shape = self._shapes.get(salt)
        if shape is None or not shape.states:
            return explanation
        match = self.prefixes.find(as_tokens(tokens)[:-1], salt)
        return replace(explanation, reusable_tokens=resume(match.path, match.tokens)[0])

    def clear(self) -> None:
        self.prefixes.clear()

    def check(self) -> None:
        """Recount all bytes from the arrays; raise AssertionError if the ledger differs."""
        self.prefixes.check()
        self.ledger.check(self.prefixes.recount())

    # ---- interface that mlx_lm.server calls

    def fetch_nearest_cache(
        self, model: Hashable, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """Call `fetch` with the model key of mlx-lm's server as salt."""
        return self.fetch(tokens, salt=repr(model))

    def insert_cache(
        self,
        model: Hashable,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Call `store` with the model key of mlx-lm's server as salt; `cache_type` is ignored."""
        self.store(tokens, prompt_cache, salt=repr(model))

    def __len__(self) -> int:
        return len(self.tree)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict the least valuable nodes to at most `n_sequences` nodes and `n_bytes` bytes."""
        if n_bytes is not None:
            self.prefixes.shrink(self.nbytes - max(0, n_bytes), "limit")
        if n_sequences is not None:
            while len(self) > max(0, n_sequences) and self.prefixes.shrink(1, "limit"):
                pass

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return the number of nodes and their bytes, in the format that mlx-lm's server logs."""
        return {"prefixes": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    def _revive(
        self,
        match: Match[Segment],
        states: States,
        salt: str,
        capacity: int | None,
        *,
        dequantize: bool,
    ) -> list[Any]:
        shape = self._shapes[salt]
        room = max(match.tokens, capacity or match.tokens + ROOM_TOKENS)
        inside = match.blocks_in_last * self.tree.block_size
        runs = [node.segment.layers for node in match.path]

        def parts(layer: int) -> list[Layer]:
            whole = [run[layer] for run in runs]
            keys, values = whole[-1]
            return [*whole[:-1], (col.take(keys, 0, inside), col.take(values, 0, inside))]

        caches = []
        rule = ALL_RAW if dequantize else self._rule
        for i, form in enumerate(shape.forms):
            layer_parts, cache = parts(i), None
            if not rule.is_raw and i not in rule.raw_layers and form.max_size is None:
                scheme, first, least = rule.scheme, rule.first_tokens, rule.least_tokens
                cache = TurboQuantKVCache.holding(
                    scheme, first, least, layer_parts, form.dtypes, room
                )
            if cache is None:
                keys, values = (
                    [keys for keys, _ in layer_parts],
                    [values for _, values in layer_parts],
                )
                cache = form.revive(keys, values, match.tokens, room, self._device)
            caches.append(cache)
        revived = []
        for kind, state in zip(shape.states, copied(states), strict=True):
            cache = kind(len(state))
            cache.cache = list(state)
            revived.append(cache)
        return put_together(shape.places, caches, revived)

    def _insert(
        self, values: TokenArray, sources: list[LayerSource], salt: str, states: States
    ) -> Stored:
        keys = self.prefixes.block_hashes(values, salt)
        self._encode_short(self.prefixes.match(keys), sources, len(values))
        match = self.prefixes.match(keys)
        start, stop = match.tokens, len(keys) * self.tree.block_size
        with self.prefixes.pin(match) as pin:
            if start == stop:
                self._keep_states(pin, len(values), states)
                return Stored(0, stop)
            if not self.prefixes.split(pin, match):
                return self._refuse(self.prefixes.no_room(match.path[-1].segment.nbytes))
            size = self.tree.block_size
            lanes = self._device.lanes
            runs = runs_of(sources, self._rule, start, stop, len(values), lanes)
            nbytes = sum(run.nbytes for run in runs)
            index = sum(self.prefixes.index_bytes((run.stop - run.start) // size) for run in runs)
            needed = nbytes + index + max(run.meanwhile for run in runs)
            if not self.prefixes.make_room(needed):
                return self._refuse(self.prefixes.no_room(needed))
            with self.ledger.reserve(Kind.BUFFERS, nbytes) as paid:
                segments = []
                for run in runs:
                    try:
                        segments.append(self._cut(sources, run, paid, index))
                    except SettingError as error:
                        return self._refuse(str(error))
                for run, segment in zip(runs, segments, strict=True):
                    run_tokens = values[run.start : run.stop]
                    self.prefixes.insert(pin, run.start // size, keys, run_tokens, segment, paid)
            self._keep_states(pin, len(values), states)
        return Stored(stop - start, stop)

    def _encode_short(self, match: Match[Segment], sources: list[LayerSource], tokens: int) -> None:
        """Encode matched nodes that are raw because a shorter prompt stored them.

        A node may stay raw, for lack of memory or because a value is too large for the codec.
        """
        rule = self._rule
        if rule.is_raw or not rule.first_tokens < rule.least_tokens <= tokens:
            return
        shapes = [LayerShape.of(*col.arrays(*source.sample)) for source in sources]
        form = BlockFormat.of(shapes, rule.scheme, rule.raw_layers)
        due = [
            node
            for node in match.path
            if node.start < rule.least_tokens
            and node.end > rule.first_tokens
            and not form.holds(node.segment)
        ]
        if not due:
            return
        token_bits, work = sum(rule.token_bits(shapes)), piece_bytes(shapes, self._device.lanes)
        with self.prefixes.pin(match):
            for node in due:
                blocks = (rule.first_tokens - node.start) // self.tree.block_size
                if blocks > 0 and not self.prefixes.cut(node, blocks):
                    return
                nbytes = len(node.tokens) * token_bits // 8
                if not self.prefixes.make_room(nbytes + work):
                    return
                with self.ledger.reserve(Kind.BUFFERS, work):
                    self.prefixes.exchange(node, partial(rule.encoded, ops=self._device), nbytes)

    def _keep_states(self, pin: Pin[Segment], position: int, states: States) -> None:
        """Store the states as a checkpoint if `position` is a block boundary and memory allows."""
        if states and position and position % self.tree.block_size == 0:
            checkpoints = Checkpoints(
                self.prefixes, nbytes_of(states), spacing_tokens=self.tree.block_size
            )
            checkpoints.capture(pin.path, position, RecurrentState(states), turn_end=True)

    def _cut(
        self, sources: list[LayerSource], run: NodeRun, paid: Reservation, index: int
    ) -> Segment:
        """Extract a run from the caches in its final format.

        A run with values too large for the codec stays raw, and the reservation `paid` is enlarged.

        Raises:
            SettingError: there is not enough memory for that and `index` bytes, or the values are
                in a codec cache.
        """
        with self.ledger.reserve(Kind.BUFFERS, run.meanwhile):
            layers = tuple(source.cut(run.start, run.stop) for source in sources)
            segment = Segment(layers, length=run.stop - run.start)
            if run.rule.is_raw:
                return segment.owned()
            segment = run.rule.encoded(segment, self._device)
        more = segment.nbytes - run.nbytes
        if more > 0:
            if not self.prefixes.make_room(more + index):
                raise SettingError(
                    "values are too large for the codec, and there is no memory to store them raw"
                )
            paid.resize(paid.nbytes + more)
        return segment.owned()

    def _refuse(self, reason: str) -> Stored:
        self.counts.refused += 1
        return Stored(0, 0, reason)
