"""Consistency check: nodes form a tree, with matching positions, tokens, hashes and segments."""

from __future__ import annotations

from penstock.prefix.block_hashes import hash_blocks, partial_hash
from penstock.prefix.node import Node, S


def check_shape(tops: dict[bytes, Node[S]], block_size: int) -> set[int]:
    """Check every reachable node, and return their ids; `tops` are the nodes below the root."""
    reached: set[int] = set()
    families: list[tuple[Node[S] | None, dict[bytes, Node[S]]]] = [(None, tops)]
    while families:
        parent, siblings = families.pop()
        for key, node in siblings.items():
            if node.parent is not parent or key != node.block_hashes[0] or node.id in reached:
                raise AssertionError(f"{node} hangs below {parent} as {key.hex()}")
            _check_node(node, block_size)
            reached.add(node.id)
            families.append((node, node.children))
    return reached


def _check_node(node: Node[S], block_size: int) -> None:
    parent = node.parent
    count = len(node.tokens) if node.partial else len(node.block_hashes) * block_size
    if node.partial and (count >= block_size or node.children):
        raise AssertionError(f"{node} is no partial block, or has children")
    if node.start != (parent.end if parent else 0):
        raise AssertionError(f"{node} does not begin where {parent} ends")
    if not len(node.tokens) == node.segment.tokens == count > 0:
        raise AssertionError(f"{node}: {len(node.tokens)} tokens, {node.segment.tokens} held")
    if node.tokens.base is not None:
        raise AssertionError(f"{node} keeps a larger array of tokens alive")
    # The chain's root is not known here, so the first block of all is taken on trust.
    root, known = (parent.block_hashes[-1], 0) if parent else (node.block_hashes[0], 1)
    tokens = node.tokens[known * block_size :]
    if node.partial:
        if parent and node.block_hashes != (partial_hash(tokens, root),):
            raise AssertionError(f"the hash of {node} does not name its tokens")
    elif tuple(hash_blocks(tokens, block_size, root)) != node.block_hashes[known:]:
        raise AssertionError(f"the block hashes of {node} do not name its tokens")
