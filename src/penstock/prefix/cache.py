"""`PrefixCache`: what one prompt has computed, for the next that begins alike.

For anybody's mlx-lm loop: `fetch` before, `store` after. Each token's KV is held once, in a tree
of runs of whole blocks, inside a limit that is never passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.kv import columns as col
from penstock.kv.segment import Layer, LayerForm, Segment, bytes_per_token
from penstock.ledger import Kind, Ledger
from penstock.memory import format_bytes, parse_bytes
from penstock.prefix.blocks import TokenArray, Tokens, as_tokens, block_keys, root_key
from penstock.prefix.node import BLOCK_BYTES, NODE_BYTES, Match, Node
from penstock.prefix.policy import REMEMBERED_NODES, HalfLife
from penstock.prefix.tree import PrefixTree

ROOM_TOKENS = 256
"""Columns that a fetched cache has beyond its tokens, unless told how many it needs."""
BYTES_PER_REMEMBERED = 20_000
"""Bytes of the limit for each node remembered after it was given up, which costs 200: 1 %."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What `store` did."""

    new_tokens: int
    """Tokens that were not there before."""
    held_tokens: int
    """Tokens of the prompt that are there now, whole blocks."""
    refused: str | None = None
    """Why nothing was stored, if it was not; the caches are untouched either way."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a prompt would match, and why no further."""

    prompt_tokens: int
    held_tokens: int
    """Tokens of whole blocks that are held."""
    diverges_at: int | None
    """Index of the first token that differs from the nearest prompt that is held."""
    held_token: int | None
    """The token that stands there in what is held."""
    given_token: int | None
    reason: str


@dataclass(slots=True)
class Counts:
    """What happened since the start."""

    fetches: int = 0
    hits: int = 0
    fetched_tokens: int = 0
    """Tokens whose KV was given out: prefill saved."""
    asked_tokens: int = 0
    stored_tokens: int = 0
    refused: int = 0
    evicted_nodes: int = 0
    evicted_bytes: int = 0


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
        self.ledger = Ledger(memory_limit)
        remembered = min(REMEMBERED_NODES, memory_limit // BYTES_PER_REMEMBERED)
        self.policy = HalfLife(remembered_nodes=remembered)
        self.tree: PrefixTree[Segment] = PrefixTree(block_size, self.policy)
        self.fingerprint = fingerprint
        self.counts = Counts()
        self._clock = clock
        self._nodes = self.ledger.reserve(Kind.NODES, 0)
        self._index = self.ledger.reserve(Kind.INDEX, self.policy.nbytes)
        self._forms: dict[bytes, list[LayerForm]] = {}

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
        root = self._root(salt)
        match = self.tree.match(block_keys(values[:-1], self.tree.block_size, root))
        self.counts.fetches += 1
        self.counts.asked_tokens += len(values)
        if match.tokens == 0:
            return None, values.tolist()
        with self.tree.pin(match.path[-1], self._clock()):
            caches = self._revive(match, self._forms[root], capacity)
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
        root = self._root(salt)
        if self._forms.setdefault(root, forms) != forms:
            return self._refuse("the caches are of other classes or sizes than those held")
        held = min(col.columns(keys) for keys, _ in layers)
        values = as_tokens(tokens)[:held]
        keys = block_keys(values, self.tree.block_size, root)
        match = self.tree.match(keys)
        new_blocks = len(keys) - match.tokens // self.tree.block_size
        if new_blocks == 0:
            if match.path:
                self.tree.pin(match.path[-1], self._clock()).release()
            return Stored(0, match.tokens)
        return self._insert(match, keys, values, layers)

    def explain(self, tokens: Tokens, *, salt: str = "") -> Explanation:
        """Say how far `tokens` would match now, and what stands in the way of more."""
        values = as_tokens(tokens)
        keys = block_keys(values, self.tree.block_size, self._root(salt))
        match = self.tree.match(keys)
        rest = values[match.tokens :]
        common, beyond = 0, None
        for run in self._continuations(match, self._root(salt)):
            same = _common_tokens(run, rest)
            if beyond is None or same > common:
                common = same
                beyond = int(run[same]) if same < len(run) else None
        at = match.tokens + common
        given = int(values[at]) if at < len(values) else None
        diverges = at if given is not None and beyond is not None else None
        return Explanation(
            prompt_tokens=len(values),
            held_tokens=match.tokens,
            diverges_at=diverges,
            held_token=beyond if diverges is not None else None,
            given_token=given if diverges is not None else None,
            reason=self._reason(len(values), match.tokens, diverges),
        )

    def clear(self) -> None:
        """Give up everything that nobody is reading."""
        while (node := self.tree.victim()) is not None:
            self._evict(node)

    def check(self) -> None:
        """Recount everything from the arrays, and raise AssertionError if it differs."""
        self.tree.check()
        self.ledger.check(
            {
                Kind.NODES: sum(node.segment.nbytes for node in self.tree),
                Kind.INDEX: sum(node.index_bytes for node in self.tree) + self.policy.nbytes,
            }
        )

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
        while (
            (n_sequences is not None and len(self) > max(0, n_sequences))
            or (n_bytes is not None and self.nbytes > max(0, n_bytes))
        ) and (node := self.tree.victim()) is not None:
            self._evict(node)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return the two counts that mlx-lm's server logs."""
        return {"prefixes": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    # ---- parts

    def _root(self, salt: str) -> bytes:
        return root_key(self.fingerprint, salt)

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

    def _insert(
        self, match: Match[Segment], keys: list[bytes], values: TokenArray, layers: list[Layer]
    ) -> Stored:
        """Make room, cut the new blocks out of the caches and hang them below the match."""
        size = self.tree.block_size
        start, stop = match.tokens, len(keys) * size
        first = start // size
        needed = (stop - start) * bytes_per_token(layers)
        index = NODE_BYTES + (BLOCK_BYTES + 4 * size) * (len(keys) - first)
        parent = match.path[-1] if match.path else None
        now = self._clock()
        with self.tree.pin(parent, now) as pin:
            if parent is not None and match.ends_inside:
                twice = parent.segment.nbytes + parent.index_bytes + NODE_BYTES
                if not self._room_for(twice, pin.path):
                    return self._refuse_for_room(twice)
                with self.ledger.reserve(Kind.BUFFERS, twice):
                    parent = self.tree.split(parent, match.blocks_in_last)
                self._settle()
            if not self._room_for(needed + index, pin.path):
                return self._refuse_for_room(needed + index)
            self._nodes.resize(self.tree.nbytes + needed)
            self._index.resize(self._index.nbytes + index)
            segment = Segment.cut(layers, start, stop)
            self.tree.insert(parent, keys[first:], values[start:stop], segment, now)
        self._settle()
        self.counts.stored_tokens += stop - start
        return Stored(stop - start, stop)

    def _room_for(self, nbytes: int, path: Sequence[Node[Segment]]) -> bool:
        """Give up nodes until `nbytes` are free; False, and none given up, if that cannot be."""
        pinned = sum(node.segment.nbytes + node.index_bytes for node in path) + self.policy.nbytes
        if nbytes + pinned > self.ledger.limit_bytes:
            return False
        while self.ledger.free_bytes < nbytes:
            node = self.tree.victim()
            if node is None:
                return False
            self._evict(node)
        return True

    def _evict(self, node: Node[Segment]) -> None:
        self.counts.evicted_nodes += 1
        self.counts.evicted_bytes += self.tree.remove(node).nbytes
        self._settle()

    def _settle(self) -> None:
        """Bring the ledger to what the tree holds."""
        self._nodes.resize(self.tree.nbytes)
        self._index.resize(self.tree.index_bytes + self.policy.nbytes)

    def _refuse(self, reason: str) -> Stored:
        self.counts.refused += 1
        return Stored(0, 0, reason)

    def _refuse_for_room(self, nbytes: int) -> Stored:
        limit = self.ledger.limit_bytes
        return self._refuse(
            f"{format_bytes(nbytes)} do not fit in the limit of {format_bytes(limit)} beside the "
            f"prefix they continue; raise memory_limit"
        )

    def _continuations(self, match: Match[Segment], root: bytes) -> list[TokenArray]:
        """Return the tokens that follow the match in what is held, one array a branch.

        Those of this root alone: nobody is shown another tenant's tokens.
        """
        size = self.tree.block_size
        if match.ends_inside:
            return [match.path[-1].tokens[match.blocks_in_last * size :]]
        if match.path:
            return [child.tokens for child in match.path[-1].children.values()]
        tops = (node for node in self.tree if node.parent is None)
        return [
            node.tokens
            for node in tops
            if block_keys(node.tokens[:size], size, root) == [node.keys[0]]
        ]

    def _reason(self, prompt: int, held: int, diverges: int | None) -> str:
        size = self.tree.block_size
        if diverges is not None:
            return (
                f"token {diverges} differs from the nearest prompt that is held; "
                f"keep what changes (a date, a name) behind what does not"
            )
        if held == prompt - prompt % size:
            return f"all whole blocks of {size} tokens are held"
        if len(self.tree) == 0:
            return "nothing is held"
        return "the rest was never stored, or was given up for something worth more"


def _common_tokens(run: TokenArray, rest: TokenArray) -> int:
    """Count the first tokens that two arrays share."""
    count = min(len(run), len(rest))
    differ = np.nonzero(run[:count] != rest[:count])[0]
    return int(differ[0]) if len(differ) else count
