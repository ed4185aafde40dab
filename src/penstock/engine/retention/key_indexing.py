"""Retention of the key index, from which decode steps select the tokens to attend to."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from penstock.attention.ops import AttentionOps
from penstock.attention.selection.key_index import KeyIndex
from penstock.engine.retention.retention import Path, Retention
from penstock.kv.segment import Segment
from penstock.prefix.prefixes import Prefixes


class KeyIndexing(Retention):
    """Indexes the keys of segments. Not thread-safe: owned by the engine's thread.

    Args:
        token_bytes: index bytes of one token in all layers.

    """

    def __init__(
        self, index: KeyIndex, prefixes: Prefixes[Segment], token_bytes: int, ops: AttentionOps
    ) -> None:
        self._index = index
        self._prefixes = prefixes
        self._token_bytes = token_bytes
        self._ops = ops

    def computed(self, segment: Segment, start: int) -> Segment:
        return self._index.indexed(segment, start, self._ops)

    def committed(self, segment: Segment, start: int) -> Segment:
        return self._index.indexed(segment, start, self._ops)

    def attached(self, path: Path) -> None:
        """Index the keys of nodes without an index, for instance nodes read from a tier."""
        for node in path:
            if self._index.complete(node.segment):
                continue
            nbytes = len(node.tokens) * self._token_bytes
            with suppress(MemoryError, RuntimeError):
                if self._prefixes.make_room(nbytes):
                    indexed = partial(self.computed, start=node.start)
                    self._prefixes.exchange(node, indexed, nbytes)
