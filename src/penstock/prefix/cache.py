"""`PrefixCache`: what one prompt has computed, for the next that begins alike.

For anybody's mlx-lm loop: `fetch` before, `store` after. Each token's KV is held once, in a tree
of runs of whole blocks, inside a limit that is never passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kv import columns as col
from penstock.kv.segment import Layer, LayerForm, Segment, bytes_per_token
from penstock.ledger import Kind, Ledger
from penstock.memory import parse_bytes
from penstock.prefix.blocks import TokenArray, Tokens, as_tokens
from penstock.prefix.explanation import Explanation
from penstock.prefix.node import Match
from penstock.prefix.prefixes import Prefixes

ROOM_TOKENS = 256
"""Columns that a fetched cache has beyond its tokens, unless told how many it needs."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What `store` did."""

    new_tokens: int
    """Tokens that were not there before."""
    held_tokens: int
    """Tokens of the prompt that are there now, whole blocks."""
    refused: str | None = None
    """Why nothing was stored, if it was not; the caches are untouched either way."""


class PrefixCache:
    """KV of prompts by their whole-block prefixes, for mlx-lm loops.

    A prompt finds the longest prefix it shares with anything stored: an equal, a shorter, a
    longer or a partly common one. What `fetch` returns is a copy, free to be written to. Not
    thread-safe: one owner, the thread that runs the model.

    Args:
        memory_limit: bytes, or a text like "2GB", for all that is held: KV, the index, and
            what is copied while the tree is cut.
        block_size: tokens of a block, the unit of identity; the unfinished last one is not kept.
        fingerprint: what must be equal for KV to be reusable, besides the tokens: say, the
            model's path and adapter. Part of every key.
        clock: seconds, for recency.

    >>> cache = PrefixCache("1GB", block_size=64)
    >>> cache.fetch(range(200))[0] is None
    True
    """

    def __init__(
        self,
        memory_limit: int | str,
        *,
        block_size: int = 256,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(memory_limit, str):
            memory_limit = parse_bytes(memory_limit)
        self.prefixes: Prefixes[Segment] = Prefixes(
            Ledger(memory_limit), block_size=block_size, fingerprint=fingerprint, clock=clock
        )
        self.ledger = self.prefixes.ledger
        self.policy = self.prefixes.policy
        self.tree = self.prefixes.tree
        self.counts = self.prefixes.counts
        self.fingerprint = fingerprint
        self._forms: dict[str, list[LayerForm]] = {}  # by salt

    @property
    def nbytes(self) -> int:
        """Bytes held, the index included."""
        return self.ledger.used_bytes

    def fetch(
        self, tokens: Tokens, *, salt: str = "", capacity: int | None = None
    ) -> tuple[list[Any] | None, list[int]]:
        """Return caches that hold a prefix of `tokens`, and the tokens still to be read.

        At least one token is left to be read. The caches are of the classes that were stored,
        with buffers for `capacity` tokens (prompt and answer), and the caller's own. Without
        a match the first is None and all tokens are left.

        Args:
            tokens: the prompt.
            salt: the tenant's: prompts stored under another one are not found.
            capacity: tokens that the request can use; 256 more than the prefix by default.
        """
        values = as_tokens(tokens)
        match = self.prefixes.find(values[:-1], salt)
        self.counts.fetches += 1
        self.counts.asked_tokens += len(values)
        if match.tokens == 0:
            return None, values.tolist()
        with self.prefixes.pin(match):
            caches = self._revive(match, self._forms[salt], capacity)
        self.counts.hits += 1
        self.counts.fetched_tokens += match.tokens
        return caches, values[match.tokens :].tolist()

    def store(self, tokens: Tokens, caches: Sequence[Any], *, salt: str = "") -> Stored:
        """Keep the KV of the whole blocks of `tokens`, as far as `caches` hold them.

        What is held already is not copied again. Nodes worth least give way; a prompt that
        cannot fit is refused, and nothing else suffers. The caches are only read.

        Args:
            tokens: what the caches have read, from the first token on.
            caches: one a layer, penstock's or mlx-lm's, of one sequence.
            salt: the tenant's.
        """
        layers, forms = [], []
        for index, cache in enumerate(caches):
            form = LayerForm.of(cache)
            if isinstance(form, str):
                return self._refuse(f"layer {index}: {form}")
            if cache.empty():
                return self._refuse(f"layer {index} is empty")
            forms.append(form)
            layers.append(cache.keys_and_values())
        if self._forms.setdefault(salt, forms) != forms:
            return self._refuse("the caches are of other classes or sizes than those held")
        held = min(col.columns(keys) for keys, _ in layers)
        return self._insert(as_tokens(tokens)[:held], layers, salt)

    def explain(self, tokens: Tokens, *, salt: str = "") -> Explanation:
        """Say how far `tokens` would match now, what stands in the way of more, and what to do."""
        return self.prefixes.explain(tokens, salt)

    def clear(self) -> None:
        """Give up everything that nobody is reading."""
        self.prefixes.clear()

    def check(self) -> None:
        """Recount everything from the arrays, and raise AssertionError if it differs."""
        self.prefixes.check()
        self.ledger.check(self.prefixes.recount())

    # ---- what mlx_lm.server calls

    def fetch_nearest_cache(
        self, model: Hashable, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """`fetch`, for mlx-lm's server, whose key for a model keeps models apart."""
        return self.fetch(tokens, salt=repr(model))

    def insert_cache(
        self,
        model: Hashable,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """`store`, for mlx-lm's server. What is worth keeping is judged by use, not by type."""
        self.store(tokens, prompt_cache, salt=repr(model))

    def __len__(self) -> int:
        """Return how many runs are held."""
        return len(self.tree)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Give up what is worth least until at most so many runs, or bytes, are held."""
        if n_bytes is not None:
            self.prefixes.shrink(self.nbytes - max(0, n_bytes), "limit")
        if n_sequences is not None:
            while len(self) > max(0, n_sequences) and self.prefixes.shrink(1, "limit"):
                pass

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return the two counts that mlx-lm's server logs."""
        return {"prefixes": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    # ---- parts

    def _revive(
        self, match: Match[Segment], forms: list[LayerForm], capacity: int | None
    ) -> list[Any]:
        """Copy the matched path into new caches, a layer at a time."""
        room = max(match.tokens, capacity or match.tokens + ROOM_TOKENS)
        inside = match.blocks_in_last * self.tree.block_size
        runs = [node.segment.layers for node in match.path]

        def parts(layer: int, side: int) -> list[Any]:
            whole = [run[layer][side] for run in runs]
            return [*whole[:-1], col.take(whole[-1], 0, inside)]

        return [
            form.revive(parts(i, 0), parts(i, 1), match.tokens, room)
            for i, form in enumerate(forms)
        ]

    def _insert(self, values: TokenArray, layers: list[Layer], salt: str) -> Stored:
        """Make room, cut the new blocks out of the caches and hang them below the match."""
        keys = self.prefixes.keys(values, salt)
        match = self.prefixes.match(keys)
        start, stop = match.tokens, len(keys) * self.tree.block_size
        with self.prefixes.pin(match) as pin:
            if start == stop:
                return Stored(0, stop)
            if not self.prefixes.split(pin, match):
                return self._refuse(self.prefixes.no_room(match.path[-1].segment.nbytes))
            blocks = start // self.tree.block_size
            nbytes = (stop - start) * bytes_per_token(layers)
            needed = nbytes + self.prefixes.index_bytes(len(keys) - blocks)
            if not self.prefixes.make_room(needed):
                return self._refuse(self.prefixes.no_room(needed))
            with self.ledger.reserve(Kind.BUFFERS, nbytes) as paid:
                segment = Segment.cut(layers, start, stop)
                self.prefixes.insert(pin, blocks, keys, values[start:stop], segment, paid)
        return Stored(stop - start, stop)

    def _refuse(self, reason: str) -> Stored:
        self.counts.refused += 1
        return Stored(0, 0, reason)
