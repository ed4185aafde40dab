"""Radix tree of computed prefixes.

A path from the root represents a prompt. Block hashes are chained (see `block_hashes`): two paths
that agree in one block hash agree in all blocks before it. So a lookup compares one hash per node,
and bisects the last node to find where the prompt diverges. Hashing is linear in the length of the
prompt, and the lookup in the number of nodes visited.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Generic

import numpy as np

from penstock.prefix.block_hashes import TokenArray, Tokens, as_tokens, hash_blocks, partial_hash
from penstock.prefix.eviction import EvictionOrder
from penstock.prefix.node import Match, Node, NodeView, S, upwards, view
from penstock.prefix.pin import Pin
from penstock.prefix.policy import COLD, HalfLife, Policy
from penstock.prefix.tree_totals import TreeTotals

LONGER = 4
"""Default factor on `max_merge_tokens` for nodes with few bytes."""


class PrefixTree(Generic[S]):
    """Radix tree of segments. Not thread-safe: owned by the thread that owns the arrays.

    The tree counts bytes but has no limit: the caller of `insert` makes room first by removing
    `victim()` repeatedly.

    Args:
        block_size: number of tokens per block.
        policy: orders evictions, a `HalfLife` by default; not shared between trees.
        max_merge_tokens: maximum number of tokens of a merged node.
        max_merge_bytes: maximum bytes, excluding checkpoints, of a merged node with more tokens.
        longer: maximum number of tokens of such a node, in multiples of `max_merge_tokens`.
        grows: returns whether a node with such a segment may have more than `max_merge_tokens`
            tokens; None allows all.
    """

    def __init__(
        self,
        block_size: int,
        policy: Policy | None = None,
        *,
        max_merge_tokens: int = 2_048,
        max_merge_bytes: int = 0,
        longer: int = LONGER,
        grows: Callable[[S], bool] | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.policy: Policy = policy or HalfLife()
        self.max_merge_tokens = max_merge_tokens
        self.max_merge_bytes = max_merge_bytes
        self.longer = longer
        self.grows = grows
        self._tops: dict[bytes, Node[S]] = {}
        self._nodes: dict[int, Node[S]] = {}
        self._pins: set[Pin[S]] = set()
        self.order: EvictionOrder[S] = EvictionOrder(self.policy, self._nodes)
        self.totals = TreeTotals()
        self._next_id = 0
        self.version = 0
        """Number of changes so far; a match is valid while the version is unchanged."""

    # ---- questions

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node[S]]:
        return iter(self._nodes.values())

    def __contains__(self, node: Node[S]) -> bool:
        return self._nodes.get(node.id) is node

    @property
    def tokens(self) -> int:
        return self.totals.tokens

    @property
    def nbytes(self) -> int:
        return self.totals.nbytes

    @property
    def checkpoint_bytes(self) -> int:
        return self.totals.checkpoint_bytes

    @property
    def index_bytes(self) -> int:
        return self.totals.index_bytes

    @property
    def pinned_bytes(self) -> int:
        return self.totals.pinned_bytes

    @property
    def pins(self) -> int:
        return len(self._pins)

    def match(self, block_hashes: Sequence[bytes]) -> Match[S]:
        path: list[Node[S]] = []
        siblings = self._tops
        done = inside = 0
        while done < len(block_hashes) and (node := siblings.get(block_hashes[done])) is not None:
            path.append(node)
            inside = _common(node.block_hashes, block_hashes, done)
            done += inside
            if inside < len(node.block_hashes):
                break
            siblings = node.children
        return Match(tuple(path), done * self.block_size, inside)

    def match_partial(self, parent: Node[S] | None, root: bytes, tokens: Tokens) -> Node[S] | None:
        siblings = self._tops if parent is None else parent.children
        values = as_tokens(tokens[: self.block_size - 1])
        for size in sorted(self.totals.partial_sizes, reverse=True) if siblings else ():
            node = siblings.get(partial_hash(values[:size], root)) if size <= len(values) else None
            if node is not None:
                return node
        return None

    def victim(self) -> Node[S] | None:
        return self.order.first()

    def views(self, now_seconds: float) -> list[NodeView]:
        views = []
        waiting = list(self._tops.values())
        while waiting:
            node = waiting.pop()
            views.append(view(node, now_seconds))
            waiting.extend(node.children.values())
        return views

    def can_merge(self, node: Node[S], last: Node[S] | None = None) -> bool:
        """Return whether the nodes from `node` to `last` can be merged: small and pinned alike."""
        run = self._run(node, last)
        return len(run) > 1 and self._is_small(run) and all(map(_inseparable, run, run[1:]))

    def _is_small(self, run: Sequence[Node[S]]) -> bool:
        tokens, limit = run[-1].end - run[0].start, self.max_merge_tokens
        if tokens <= limit or not self.max_merge_bytes or tokens > self.longer * limit:
            return tokens <= limit
        if self.grows is not None and not self.grows(run[-1].segment):
            return False
        sizes = (node.segment.nbytes - node.segment.checkpoint_nbytes for node in run)
        return sum(sizes) <= self.max_merge_bytes

    # ---- acts

    def pin(self, node: Node[S] | None, now_seconds: float) -> Pin[S]:
        """Pin the path to `node`, None for an empty path; counts a use of each of its nodes."""
        if node is not None:
            self._check_known(node)
        for above in upwards(node):
            self._claim(above, 1)
            self._use(above, now_seconds)
        pin = Pin(self, node)
        self._pins.add(pin)
        return pin

    def insert(
        self,
        parent: Node[S] | None,
        block_hashes: Sequence[bytes],
        tokens: Tokens,
        segment: S,
        now_seconds: float,
    ) -> Node[S]:
        """Add a node below `parent` (None is the root) and return it; the tokens are copied."""
        siblings = self._children(parent)
        values = as_tokens(tokens).copy()
        count = len(block_hashes) * self.block_size
        if not block_hashes or len(values) != count or segment.tokens != count:
            raise ValueError(
                f"{len(block_hashes)} blocks of {self.block_size}, {len(values)} tokens and "
                f"a segment of {segment.tokens} do not make a node"
            )
        if block_hashes[0] in siblings:
            raise ValueError(
                f"block {block_hashes[0].hex()} already exists; match before inserting"
            )
        return self._insert(parent, tuple(block_hashes), values, segment, now_seconds)

    def insert_partial(
        self, parent: Node[S] | None, root: bytes, tokens: Tokens, segment: S, now_seconds: float
    ) -> Node[S]:
        """Add a partial block as a leaf below `parent`, whose last block has the hash `root`."""
        values, key = as_tokens(tokens).copy(), partial_hash(tokens, root)
        if not 0 < len(values) == segment.tokens < self.block_size or key in self._children(parent):
            raise ValueError(f"{len(values)} tokens do not make a new partial block")
        return self._insert(parent, (key,), values, segment, now_seconds, partial=True)

    def split(self, node: Node[S], blocks: int) -> Node[S]:
        """Split `node` after its first `blocks` blocks, and return the new node with these."""
        self._check_known(node)
        if not 0 < blocks < len(node.block_hashes):
            raise ValueError(f"cannot split {len(node.block_hashes)} blocks after block {blocks}")
        split_tokens = blocks * self.block_size
        first, rest = node.segment.split(split_tokens)
        self._uncount(node)
        head = self._add(
            node.parent, node.block_hashes[:blocks], node.tokens[:split_tokens].copy(), first
        )
        head.hits, head.heat = node.hits, node.heat
        head.last_used_seconds = node.last_used_seconds
        if node.held_until_seconds is not None:
            self.hold(head, node.held_until_seconds)
        node.block_hashes, node.tokens, node.segment = (
            node.block_hashes[blocks:],
            node.tokens[split_tokens:].copy(),
            rest,
        )
        node.start, node.parent = head.end, head
        head.children[node.block_hashes[0]] = node
        self._claim(head, node.pins)
        self._count(node)
        self.order.offer(node)
        return head

    def merge(self, node: Node[S], last: Node[S] | None = None) -> Node[S]:
        """Merge `node` and its descendants down to `last`, and return the remaining node."""
        self._check_known(node)
        if not self.can_merge(node, last):
            raise ValueError(
                f"{node} cannot be merged: branching, a leaf, too large, or a pin ends in it"
            )
        run = self._run(node, last)
        *above, last = run
        segment = node.segment.join(*(part.segment for part in run[1:]))
        nbytes = last.segment.nbytes
        self._uncount(last)
        for part in reversed(above):
            last.heat = self.policy.joined(last.heat, nbytes, part.heat, part.segment.nbytes)
            nbytes += part.segment.nbytes
            last.hits = max(last.hits, part.hits)
            last.last_used_seconds = max(last.last_used_seconds, part.last_used_seconds)
            if part.held_until_seconds is not None:
                self.hold(last, part.held_until_seconds)
            self._uncount(part)
            self._forget(part)
        last.block_hashes, last.segment = (
            tuple(key for part in run for key in part.block_hashes),
            segment,
        )
        last.tokens = np.concatenate([part.tokens for part in run])
        last.start, last.parent = node.start, node.parent
        self._children(last.parent)[last.block_hashes[0]] = last
        self._count(last)
        self.order.offer(last)
        return last

    def exchange(self, node: Node[S], segment: S) -> None:
        self._check_known(node)
        if segment.tokens != len(node.tokens):
            raise ValueError(f"{node} cannot hold {segment.tokens} tokens")
        self._uncount(node)
        node.segment = segment
        self._count(node)
        self.order.offer(node)

    def remove(self, node: Node[S]) -> S:
        self._check_known(node)
        if node.pins or node.children:
            raise ValueError(f"{node} is pinned or has children")
        self.policy.forget(node.block_hashes[0], node.heat, node.last_used_seconds)
        self._uncount(node)
        self._forget(node)
        if node.parent is not None:
            self.order.offer(node.parent)
        return node.segment

    def hold(self, node: Node[S], until_seconds: float) -> None:
        self._check_known(node)
        self.order.hold(node, until_seconds)

    def check(self) -> None:
        reached = check_shape(self._tops, self.block_size)
        if reached != set(self._nodes):
            raise AssertionError(f"nodes reached {reached}, known {set(self._nodes)}")
        self.totals.check(self)
        pinned = Counter(node.id for pin in self._pins for node in pin.path)
        for node in self:
            if node.pins != pinned[node.id]:
                raise AssertionError(f"{node} has {pinned[node.id]} pins")
            self.order.check(node)
            if not node.last_used_seconds > -inf < node.heat:
                raise AssertionError(f"{node} was never used")

    # ---- parts of acts

    def _run(self, node: Node[S], last: Node[S] | None) -> list[Node[S]]:
        """Return the nodes from `node` down to `last`, by default to its only child."""
        if last is None:
            last = next(iter(node.children.values())) if len(node.children) == 1 else node
        run = []
        for member in upwards(last):
            run.append(member)
            if member is node:
                return run[::-1]
        return [node]

    def _children(self, parent: Node[S] | None) -> dict[bytes, Node[S]]:
        if parent is None:
            return self._tops
        self._check_known(parent)
        return parent.children

    def _check_known(self, node: Node[S]) -> None:
        if node not in self:
            raise ValueError(f"{node} is not in the tree")

    def _insert(
        self,
        parent: Node[S] | None,
        block_hashes: tuple[bytes, ...],
        tokens: TokenArray,
        segment: S,
        now_seconds: float,
        *,
        partial: bool = False,
    ) -> Node[S]:
        node = self._add(parent, block_hashes, tokens, segment, partial=partial)
        node.last_used_seconds = now_seconds
        node.heat = self.policy.used(self.policy.recall(block_hashes[0]), now_seconds)
        self.order.offer(node)
        return node

    def _add(
        self,
        parent: Node[S] | None,
        block_hashes: tuple[bytes, ...],
        tokens: TokenArray,
        segment: S,
        *,
        partial: bool = False,
    ) -> Node[S]:
        node = Node(
            id=self._next_id,
            parent=parent,
            block_hashes=block_hashes,
            tokens=tokens,
            segment=segment,
            start=0 if parent is None else parent.end,
            last_used_seconds=0.0,
            heat=COLD,
            partial=partial,
        )
        if partial:
            self.totals.partial_sizes[len(tokens)] += 1
        self._next_id += 1
        self._nodes[node.id] = node
        self._children(parent)[block_hashes[0]] = node
        self._count(node)
        return node

    def _forget(self, node: Node[S]) -> None:
        if node.partial:
            self.totals.partial_sizes -= Counter([len(node.tokens)])
        del self._nodes[node.id]
        del self._children(node.parent)[node.block_hashes[0]]
        self.order.drop(node)

    def _count(self, node: Node[S], sign: int = 1) -> None:
        self.version += 1
        self.totals.count(node, sign)

    def _uncount(self, node: Node[S]) -> None:
        self._count(node, -1)

    def _use(self, node: Node[S], now_seconds: float) -> None:
        node.hits += 1
        node.last_used_seconds = now_seconds
        node.heat = self.policy.used(node.heat, now_seconds)

    def _claim(self, node: Node[S], pins: int) -> None:
        self.totals.claim(node, pins)
        self.order.offer(node)

    def extend(self, pin: Pin[S], child: Node[S], now_seconds: float | None) -> None:
        if pin not in self._pins or child not in self or child.parent is not pin.node:
            raise ValueError(f"{child} is not a child of a pinned {pin.node}")
        self._claim(child, 1)
        if now_seconds is not None:
            self._use(child, now_seconds)
        pin.node = child

    def withdraw(self, pin: Pin[S], node: Node[S] | None) -> None:
        if pin not in self._pins or not (node is None or node in pin.path):
            raise ValueError(f"{node} is not on the path of a pinned {pin.node}")
        while pin.node is not node and pin.node is not None:
            below, pin.node = pin.node, pin.node.parent
            self._claim(below, -1)

    def unpin(self, pin: Pin[S]) -> None:
        if pin in self._pins:
            self.withdraw(pin, None)
            self._pins.remove(pin)


def _common(node_hashes: Sequence[bytes], block_hashes: Sequence[bytes], start: int) -> int:
    """Return the number of a node's hashes that match the chain from `start` on; at least 1."""
    limit = min(len(node_hashes), len(block_hashes) - start)
    if node_hashes[limit - 1] == block_hashes[start + limit - 1]:
        return limit
    return bisect_left(range(limit), True, key=lambda i: node_hashes[i] != block_hashes[start + i])


def _inseparable(node: Node[S], child: Node[S]) -> bool:
    """Return whether a node and its child have equal pins, holds and formats."""
    if child.partial:
        return False
    node_held, child_held = (member.held_until_seconds is not None for member in (node, child))
    alike = node_held == child_held and node.pins == child.pins
    return len(node.children) == 1 and alike and node.segment.joins(child.segment)


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
        raise AssertionError(f"{node} is not a partial block, or has children")
    if node.start != (parent.end if parent else 0):
        raise AssertionError(f"{node} does not begin where {parent} ends")
    if not len(node.tokens) == node.segment.tokens == count > 0:
        raise AssertionError(f"{node}: {len(node.tokens)} tokens, {node.segment.tokens} held")
    if node.tokens.base is not None:
        raise AssertionError(f"{node} keeps a larger array of tokens alive")
    # The chain's root is not known here, so the hash of the first block is not checked.
    root, known = (parent.block_hashes[-1], 0) if parent else (node.block_hashes[0], 1)
    tokens = node.tokens[known * block_size :]
    if node.partial:
        if parent and node.block_hashes != (partial_hash(tokens, root),):
            raise AssertionError(f"the hash of {node} does not name its tokens")
    elif tuple(hash_blocks(tokens, block_size, root)) != node.block_hashes[known:]:
        raise AssertionError(f"the block hashes of {node} do not name its tokens")
