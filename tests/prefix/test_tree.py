"""The prefix tree, operation by operation. tests/stateful has its state machine."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.prefix import HalfLife, Node, PrefixTree, hash_blocks, root_hash
from penstock_bench.blank import Blank

ROOT = root_hash("model")
SIZE = 4


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    return hash_blocks(tokens, SIZE, ROOT)


def put(tree: PrefixTree[Blank], tokens: Sequence[int], now: float = 0.0) -> Node[Blank]:
    """Insert a prompt as one more node."""
    match = tree.match(block_hashes(tokens))
    parent = match.path[-1] if match.path else None
    if parent is not None and match.ends_inside:
        parent = tree.split(parent, match.blocks_in_last)
    own = list(tokens[match.tokens : len(tokens) - len(tokens) % SIZE])
    return tree.insert(
        parent, block_hashes(tokens)[match.tokens // SIZE :], own, Blank(len(own)), now
    )


@pytest.fixture
def tree() -> PrefixTree[Blank]:
    return PrefixTree(SIZE)


def test_empty_tree_matches_nothing(tree: PrefixTree[Blank]) -> None:
    match = tree.match(block_hashes(range(8)))
    assert (match.path, match.tokens, match.blocks_in_last, match.ends_inside) == ((), 0, 0, False)
    assert tree.victim() is None
    assert (len(tree), tree.tokens, tree.nbytes, tree.index_bytes, tree.pins) == (0,) * 5
    tree.check()


@pytest.mark.parametrize(
    ("prompt", "tokens", "inside"),
    [
        (range(12), 12, False),
        (range(14), 12, False),
        (range(20), 12, False),
        (range(11), 8, True),
        (range(8), 8, True),
        (range(3), 0, False),
        ([*range(5), 99, 6, 7], 4, True),
        ([99, *range(1, 12)], 0, False),
    ],
)
def test_match_is_longest_prefix_of_whole_blocks(
    tree: PrefixTree[Blank], prompt: Sequence[int], tokens: int, inside: bool
) -> None:
    put(tree, range(12))
    match = tree.match(block_hashes(prompt))
    assert (match.tokens, match.ends_inside) == (tokens, inside)
    assert match.blocks_in_last == tokens // SIZE


def test_match_ends_at_any_block_inside_node(tree: PrefixTree[Blank]) -> None:
    """Bisection over even and odd numbers of blocks."""
    for blocks in (7, 8):
        tokens = list(range(1000 * blocks, 1000 * blocks + blocks * SIZE))
        put(tree, tokens)
        for common in range(1, blocks + 1):
            other = [*tokens[: common * SIZE], *range(5 * SIZE)]
            assert tree.match(block_hashes(other)).tokens == common * SIZE


def test_second_branch_splits_node(tree: PrefixTree[Blank]) -> None:
    first = put(tree, range(12))
    second = put(tree, [*range(8), *range(50, 58)])
    (head,) = (node for node in tree if node.children)
    assert (head.start, head.end) == (0, 8)
    assert first.parent is second.parent is head
    assert (first.start, first.end, first.segment.tokens) == (8, 12, 4)
    assert first.tokens.tolist() == [8, 9, 10, 11]
    assert tree.tokens == tree.nbytes == 20
    assert second.path() == (head, second)
    tree.check()


def test_other_salts_share_nothing(tree: PrefixTree[Blank]) -> None:
    put(tree, range(12))
    assert tree.match(hash_blocks(range(12), SIZE, root_hash("model", "other"))).tokens == 0


def test_inserted_tokens_are_copied(tree: PrefixTree[Blank]) -> None:
    mine = np.arange(1_000, dtype=np.uint32)
    node = tree.insert(None, block_hashes(range(8)), mine[:8], Blank(8), 0.0)
    mine[:] = 0
    assert node.tokens.tolist() == list(range(8))
    tree.check()


def test_inconsistent_inserts_are_refused(tree: PrefixTree[Blank]) -> None:
    node = put(tree, range(8))
    good = block_hashes(range(100, 108))
    for own, tokens, segment in [
        (good, list(range(100, 107)), Blank(8)),
        (good, list(range(100, 108)), Blank(7)),
        (good[:1], list(range(100, 108)), Blank(8)),
        ([], [], Blank(0)),
    ]:
        with pytest.raises(ValueError, match="do not make a node"):
            tree.insert(None, own, tokens, segment, 0.0)
    with pytest.raises(ValueError, match="already exists"):
        tree.insert(None, block_hashes(range(8)), list(range(8)), Blank(8), 0.0)
    tree.remove(node)
    with pytest.raises(ValueError, match="not in the tree"):
        tree.insert(node, good, list(range(100, 108)), Blank(8), 0.0)
    tree.check()
    assert len(tree) == 0


def test_pin_keeps_path_through_splits_and_merges(tree: PrefixTree[Blank]) -> None:
    node = put(tree, range(12))
    with tree.pin(node, 1.0) as pin:
        put(tree, [*range(4), *range(50, 54)])
        assert [each.end for each in pin.path] == [4, 12]
        assert [each.pins for each in pin.path] == [1, 1]
        with pytest.raises(ValueError, match="pinned or has children"):
            tree.remove(node)
        victim = tree.victim()
        assert victim is not None
        assert victim is not node
        tree.remove(victim)
        assert tree.victim() is None
        tree.check()
    assert (tree.pins, tree.pinned_bytes) == (0, 0)
    assert tree.victim() is node


def test_node_merges_if_all_its_pins_extend_to_child(tree: PrefixTree[Blank]) -> None:
    top, node = put(tree, range(4)), put(tree, range(12))
    with tree.pin(node, 1.0) as pin, tree.pin(node, 2.0) as other:
        other.withdraw(top)
        assert not tree.can_merge(top)
        with pytest.raises(ValueError, match="a pin ends in it"):
            tree.merge(top)
        tree.check()
        other.extend(node)
        assert tree.merge(top) is node
        assert pin.path == other.path == (node,)
        tree.check()
        other.withdraw(None)
        assert (other.path, node.pins) == ((), 1)
        assert tree.pinned_bytes == 12 + node.index_bytes
    assert tree.pinned_bytes == 0
    tree.check()


def test_node_withdrawn_from_pin_is_evictable(tree: PrefixTree[Blank]) -> None:
    put(tree, range(4))
    node = put(tree, range(8))
    top = node.path()[0]
    with tree.pin(node, 1.0) as pin:
        pin.withdraw(top)
        assert (pin.node, tree.victim()) == (top, node)
        with pytest.raises(ValueError, match="not on the path"):
            pin.withdraw(node)
        tree.remove(node)
        assert tree.victim() is None
    with pytest.raises(ValueError, match="not on the path"):
        pin.withdraw(None)


def test_nodes_added_to_pin_count_as_used(tree: PrefixTree[Blank]) -> None:
    node = put(tree, range(4), 1.0)
    with tree.pin(None, 2.0) as pin:
        pin.extend(node, 3.0)
        assert (node.hits, node.last_used_seconds) == (1, 3.0)


def test_pin_is_released_once(tree: PrefixTree[Blank]) -> None:
    node = put(tree, range(8))
    first, second = tree.pin(node, 1.0), tree.pin(node, 2.0)
    first.release()
    first.release()
    assert (node.pins, tree.pins) == (1, 1)
    tree.check()
    with pytest.raises(ValueError, match="not a child"):
        first.extend(put(tree, range(12)))
    second.release()
    assert node.pins == 0


def test_exception_releases_pin(tree: PrefixTree[Blank]) -> None:
    with pytest.raises(KeyError), tree.pin(put(tree, range(8)), 1.0):
        raise KeyError
    assert tree.pins == 0


def test_pin_at_root_extends_with_committed_blocks(tree: PrefixTree[Blank]) -> None:
    with tree.pin(None, 1.0) as pin:
        assert pin.path == ()
        for end in (4, 8, 12):
            pin.extend(put(tree, range(end), 1.0))
        assert [node.end for node in pin.path] == [4, 8, 12]
        assert [node.hits for node in pin.path] == [0, 0, 0]
        with pytest.raises(ValueError, match="not a child"):
            pin.extend(put(tree, range(90, 94)))
        tree.check()
    assert [node.pins for node in tree] == [0] * 4


def test_pin_updates_hits_and_time_of_whole_path(tree: PrefixTree[Blank]) -> None:
    put(tree, range(4), 1.0)
    node = put(tree, range(8), 2.0)
    tree.pin(node, 5.0).release()
    assert [each.hits for each in node.path()] == [1, 1]
    assert [each.last_used_seconds for each in node.path()] == [5.0, 5.0]


def test_pinning_defers_eviction(tree: PrefixTree[Blank]) -> None:
    """Eviction follows the last reads, not the inserts."""
    a, b, c = (put(tree, range(start, start + 4), start / 100) for start in (100, 200, 300))
    tree.pin(a, 400.0).release()
    gone = []
    while (victim := tree.victim()) is not None:
        gone.append(victim)
        tree.remove(victim)
    assert gone == [b, c, a]


class EndsHeavily(Blank):
    """A segment whose last token holds most of its bytes."""

    @property
    def nbytes(self) -> int:
        return self.tokens + 1_000

    def split(self, at_tokens: int) -> tuple[Blank, EndsHeavily]:  # type: ignore[override]
        return Blank(at_tokens), EndsHeavily(self.tokens - at_tokens)


def test_split_updates_eviction_order(tree: PrefixTree[Blank]) -> None:
    heavy = tree.insert(None, block_hashes(range(40)), list(range(40)), EndsHeavily(40), 0.0)
    other = tree.insert(None, block_hashes(range(50, 58)), list(range(50, 58)), Blank(8), 0.0)
    other.segment = EndsHeavily(300)  # between the heavy node and its end
    tree.order.offer(other)
    assert tree.order.worth(other) < tree.order.worth(heavy)
    assert tree.victim() is other
    tree.split(heavy, 9)
    assert tree.order.worth(heavy) < tree.order.worth(other)
    assert tree.victim() is heavy


def test_leaves_are_evicted_before_parents(tree: PrefixTree[Blank]) -> None:
    put(tree, range(4), 1.0)
    leaf = put(tree, range(8), 900.0)
    assert tree.victim() is leaf
    with pytest.raises(ValueError, match="has children"):
        tree.remove(leaf.path()[0])


def test_merge_keeps_children(tree: PrefixTree[Blank]) -> None:
    put(tree, range(4), 1.0)
    middle = put(tree, range(8), 2.0)
    leaf = put(tree, range(16), 3.0)
    top = middle.path()[0]
    assert tree.merge(top) is middle
    assert top not in tree
    assert (middle.start, middle.end, middle.parent) == (0, 8, None)
    assert middle.last_used_seconds == 2.0
    assert leaf.path() == (middle, leaf)
    tree.check()
    assert tree.match(block_hashes(range(16))).tokens == 16
    assert tree.merge(middle) is leaf
    assert len(tree) == 1
    tree.check()


def test_nodes_are_merged_up_to_limit() -> None:
    tree: PrefixTree[Blank] = PrefixTree(SIZE, max_merge_tokens=12)
    put(tree, range(4))
    node = put(tree, range(12))
    assert tree.can_merge(node.path()[0])
    tree.max_merge_tokens = 11
    assert not tree.can_merge(node.path()[0])
    tree.max_merge_bytes = sum(each.segment.nbytes for each in node.path())
    assert tree.can_merge(node.path()[0])
    tree.max_merge_bytes -= 1
    assert not tree.can_merge(node.path()[0])


def test_only_some_segments_grow_above_limit() -> None:
    growing = set[int]()
    tree: PrefixTree[Blank] = PrefixTree(
        SIZE, max_merge_tokens=8, max_merge_bytes=10**6, grows=lambda of: id(of) in growing
    )
    put(tree, range(4))
    put(tree, range(8))
    node = put(tree, range(12))
    first, middle, last = node.path()
    assert tree.can_merge(first, middle) and not tree.can_merge(first, last)
    growing.add(id(last.segment))
    assert tree.can_merge(first, last)


def test_merging_small_nodes_is_bounded_by_tokens() -> None:
    """As for purely recurrent models, which have no keys."""

    class Empty(Blank):
        nbytes = 0

    for nbytes, longest in ((0, 8), (1, 32)):
        tree: PrefixTree[Blank] = PrefixTree(SIZE, max_merge_tokens=8, max_merge_bytes=nbytes)
        node = None
        for end in range(SIZE, 65, SIZE):
            new = block_hashes(range(end))[end // SIZE - 1 :]
            node = tree.insert(node, new, range(end - SIZE, end), Empty(SIZE), 0.0)
            if node.parent is not None and tree.can_merge(node.parent):
                node = tree.merge(node.parent)
        assert max(len(each.tokens) for each in tree) == longest


def test_recency_score_of_merged_node_is_weighted_by_bytes() -> None:
    """A cold tail does not keep a hot head for ever, nor the reverse."""
    tree: PrefixTree[Blank] = PrefixTree(SIZE, HalfLife(10))
    put(tree, range(4), 0.0)
    node = put(tree, range(16), 0.0)
    top = node.path()[0]
    top.heat, node.heat = 3.0, 1.0
    tree.merge(top)
    assert 2**node.heat == pytest.approx((4 * 2**3 + 12 * 2**1) / 16)


def test_branching_node_or_leaf_is_not_merged(tree: PrefixTree[Blank]) -> None:
    leaf = put(tree, range(8))
    put(tree, [*range(4), 9, 9, 9, 9])
    for node in (leaf, leaf.path()[0]):
        assert not tree.can_merge(node)
        with pytest.raises(ValueError, match="cannot be merged"):
            tree.merge(node)


@pytest.mark.parametrize("blocks", [0, 3, 4, -1])
def test_split_into_empty_node_is_refused(tree: PrefixTree[Blank], blocks: int) -> None:
    node = put(tree, range(12))
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(node, blocks)
    tree.check()


def test_removed_node_is_refused(tree: PrefixTree[Blank]) -> None:
    node = put(tree, range(8))
    tree.remove(node)
    for act in (
        lambda: tree.remove(node),
        lambda: tree.pin(node, 1.0),
        lambda: tree.split(node, 1),
        lambda: tree.merge(node),
    ):
        with pytest.raises(ValueError, match="not in the tree"):
            act()
    assert tree.match(block_hashes(range(8))).tokens == 0


class BreaksApart(Blank):
    """A segment that raises out of memory when it is cut or joined."""

    def split(self, at_tokens: int) -> tuple[BreaksApart, BreaksApart]:
        raise MemoryError

    def join(self, *others: Blank) -> BreaksApart:
        raise MemoryError


def test_failed_operation_changes_nothing() -> None:
    tree: PrefixTree[Blank] = PrefixTree(SIZE)
    tree.insert(None, block_hashes(range(8)), list(range(8)), BreaksApart(8), 0.0)
    node = put(tree, range(12))
    for act in (lambda: tree.split(node.path()[0], 1), lambda: tree.merge(node.path()[0])):
        with pytest.raises(MemoryError):
            act()
        tree.check()
        assert (len(tree), tree.tokens) == (2, 12)


def test_check_detects_corruption(tree: PrefixTree[Blank]) -> None:
    put(tree, range(8))
    node = put(tree, range(16))
    for name, wrong in [
        ("pins", 1),
        ("start", 4),
        ("block_hashes", block_hashes(range(8))),
        ("tokens", np.arange(9, 17, dtype=np.uint32)),
        ("tokens", np.arange(20, dtype=np.uint32)[8:16]),
        ("segment", Blank(4)),
        ("parent", None),
        ("heat", float("-inf")),
        ("children", {block_hashes(range(8))[0]: node}),
    ]:
        right = getattr(node, name)
        setattr(node, name, wrong)
        with pytest.raises(AssertionError):
            tree.check()
        setattr(node, name, right)
        tree.check()
    node.held_until_seconds = 1.0  # and nobody will look when it ends
    with pytest.raises(AssertionError, match="held forever"):
        tree.check()
    node.held_until_seconds = None
    tree.hold(node, 1.0)
    tree.order._queue.drop(node.id)
    tree.order.offer(node)
    node.held_until_seconds = None  # and its place in the queue is still a held one's
    with pytest.raises(AssertionError, match="too late"):
        tree.check()
    tree.order.offer(node)
    tree.check()
    tree._nodes[99] = node
    with pytest.raises(AssertionError):
        tree.check()


def test_check_detects_partial_block_that_is_full_or_has_children(
    tree: PrefixTree[Blank],
) -> None:
    leaf = tree.insert_partial(None, ROOT, range(SIZE - 1), Blank(SIZE - 1), 0.0)
    tree.check()
    leaf.children = {b"": leaf}
    with pytest.raises(AssertionError, match="is not a partial block"):
        tree.check()
    leaf.children = {}
    leaf.tokens, leaf.segment = np.arange(SIZE, dtype=np.uint32), Blank(SIZE)
    with pytest.raises(AssertionError, match="is not a partial block"):
        tree.check()


@pytest.mark.parametrize("held", [False, True])
def test_index_bytes_match_measured_memory(held: bool) -> None:
    for blocks in (1, 16):
        gc.collect()
        tracemalloc.start()
        tree: PrefixTree[Blank] = PrefixTree(SIZE)
        parent = None
        for i in range(500):
            tokens = np.full(blocks * SIZE, i, np.uint32)
            own = hash_blocks(tokens, SIZE, parent.block_hashes[-1] if parent else ROOT)
            parent = tree.insert(parent, own, tokens, Blank(len(tokens)), i + 0.5)
            if held:
                tree.hold(parent, i + 100.5)
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert measured <= 1.1 * tree.index_bytes <= 1.4 * measured


def test_lookup_time_is_linear() -> None:
    """Allows ten times the goal; `penstock bench lookup` measures it."""
    tree: PrefixTree[Blank] = PrefixTree(64)
    prompt = np.random.default_rng(0).integers(0, 150_000, 131_072).tolist()
    names = hash_blocks(prompt, 64, ROOT)
    node = None
    for i in range(0, len(names), 2):
        own = prompt[64 * i : 64 * (i + 2)]
        node = tree.insert(node, names[i : i + 2], own, Blank(128), 0.0)
    seconds = []
    for _ in range(5):
        began = time.thread_time()  # whatever else the machine does
        assert tree.match(hash_blocks(prompt, 64, ROOT)).tokens == len(prompt)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.1


def test_inconsistent_partial_block_is_refused(tree: PrefixTree[Blank]) -> None:
    tree.insert_partial(None, ROOT, range(SIZE - 1), Blank(SIZE - 1), 0.0)
    for tokens, segment in ((SIZE - 1, SIZE - 1), (SIZE, SIZE), (SIZE - 2, SIZE - 1), (0, 0)):
        with pytest.raises(ValueError, match="do not make a new partial block"):
            tree.insert_partial(None, ROOT, range(tokens), Blank(segment), 0.0)
