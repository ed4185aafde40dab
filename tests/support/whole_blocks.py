"""Drop partial blocks from a tree, for tests that count whole blocks."""

from __future__ import annotations

from core_parts import cached_nodes

from penstock.engine.core import Core


def drop_partial_blocks(core: Core) -> None:
    """Drop partial blocks, so that only whole blocks are left."""
    for node in cached_nodes(core):
        if node.partial:
            node.hits = 0
            core.prefixes.drop_partial(node)
