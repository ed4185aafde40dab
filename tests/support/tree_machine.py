"""A Hypothesis state machine that reads, splits, pins, merges and evicts as sequences do."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tree_reference import (
    BLOCK,
    BYTES_A_TOKEN,
    HALF_LIFE,
    MOST_MERGED,
    PAIR_COST,
    REMEMBERED,
    Prefix,
    Reference,
    Text,
    table,
    wanted,
)

from penstock.prefix import HalfLife, Node, Pin, PrefillCost, PrefixTree, hash_blocks, root_hash

ROOT = root_hash("model", "tenant")

# Few kinds of blocks, so that prompts meet; a few tokens over, which have no block.
blocks = st.lists(st.sampled_from([(0, 0), (0, 1), (2, 0)]), max_size=7)
prompts = st.builds(
    lambda chosen, over: (*[t for block in chosen for t in block], *over),
    blocks,
    st.sampled_from([(), (9,)]),
)


class TreeMachine(RuleBasedStateMachine):
    """The tree and the reference; `check()` after every step."""

    make: ClassVar[type[PrefixTree]] = PrefixTree
    policy: ClassVar[type[HalfLife]] = HalfLife

    def __init__(self) -> None:
        super().__init__()
        policy = self.policy(HALF_LIFE, cost=PrefillCost(1, PAIR_COST), remembered_nodes=REMEMBERED)
        self.tree: PrefixTree[Text] = self.make(BLOCK, policy, max_merge_tokens=MOST_MERGED)
        self.reference = Reference()
        self.held: list[Pin[Text]] = []

    def node(self, end: Prefix) -> Node[Text]:
        node = self.tree.match(hash_blocks(end, BLOCK, ROOT)).path[-1]
        assert node.end == len(end)
        return node

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.reference.now += seconds

    @rule(prompt=prompts)
    def look(self, prompt: Prefix) -> None:
        """Match prompts, and check that matching changes nothing."""
        before = table(self.tree)
        match = self.tree.match(hash_blocks(prompt, BLOCK, ROOT))
        assert match.tokens == self.reference.known(prompt)
        spelled = tuple(t for node in match.path for t in node.segment.content)
        assert spelled[: match.tokens] == prompt[: match.tokens]
        assert match.ends_inside == (match.tokens < len(spelled))
        assert self.tree.match(hash_blocks(prompt, BLOCK, root_hash("model", "other"))).tokens == 0
        assert table(self.tree) == before

    @rule(prompt=prompts, chunk=st.integers(1, 4), stay=st.booleans())
    def read(self, prompt: Prefix, chunk: int, stay: bool) -> None:
        """Pin the cached part of a prompt and commit the rest in chunks, as prefill does."""
        pin, at = self._pin(prompt)
        whole = len(prompt) - len(prompt) % BLOCK
        while at < whole:
            end = min(whole, at + chunk * BLOCK)
            keys = hash_blocks(prompt[:end], BLOCK, ROOT)[at // BLOCK :]
            new = prompt[at:end]
            node = self.tree.insert(pin.node, keys, new, Text(new), self.reference.now)
            self.reference.insert(prompt[:end], at)
            pin.extend(node)
            self.reference.pins[-1] = prompt[:end]
            at = end
        if stay:
            self.held.append(pin)
        else:
            pin.release()
            pin.release()
            self.reference.pins.pop()

    @rule(prompt=prompts)
    def resume(self, prompt: Prefix) -> None:
        """Pin the cached part of a prompt only."""
        self.held.append(self._pin(prompt)[0])

    def _pin(self, prompt: Prefix) -> tuple[Pin[Text], int]:
        match = self.tree.match(hash_blocks(prompt, BLOCK, ROOT))
        last = match.path[-1] if match.path else None
        if last is not None and match.ends_inside:
            (end,) = [e for e, r in self.reference.runs.items() if self.node(e) is last]
            self.reference.split(end, match.tokens)
            last = self.tree.split(last, match.blocks_in_last)
        self.reference.pin(prompt[: match.tokens])
        return self.tree.pin(last, self.reference.now), match.tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), stay=st.booleans())
    def leave(self, data: st.DataObject, stay: bool) -> None:
        """Release a pin, or the end of its path."""
        at = data.draw(st.integers(0, len(self.held) - 1))
        if stay:
            self._follow(at, data)
        else:
            self.held.pop(at).release()
            self.reference.pins.pop(at)

    def _follow(self, at: int, data: st.DataObject) -> None:
        """Release the end of a path, and continue in nodes committed by others."""
        end = data.draw(st.sampled_from([(), *self.reference.path(self.reference.pins[at])]))
        self.held[at].withdraw(self.node(end) if end else None)
        for child in sorted(self.reference.children(end))[:1]:
            self.held[at].extend(self.node(child), self.reference.now)
            self.reference.read(child)
            end = child
        self.reference.pins[at] = end

    @precondition(lambda self: self.reference.runs)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        end = data.draw(st.sampled_from(sorted(self.reference.runs)))
        node = self.node(end)
        if len(node.block_hashes) < 2:
            return
        at = data.draw(st.integers(1, len(node.block_hashes) - 1))
        head = self.tree.split(node, at)
        self.reference.split(end, head.end)

    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        possible = [end for end in sorted(self.reference.runs) if self.reference.can_merge(end)]
        if not possible:
            return
        last = data.draw(st.sampled_from(possible))
        first = self.node(last)
        for _ in range(data.draw(st.integers(1, 3))):
            if self.reference.can_merge(last):
                (below,) = self.reference.children(last)
                self.reference.merge(last)
                last = below
        self.tree.merge(first, self.node(last))

    @rule(times=st.integers(1, 4))
    def evict(self, times: int) -> None:
        """Evict nodes."""
        for _ in range(times):
            self._evict()

    def _evict(self) -> None:
        """Evict the least valuable node, and check that its segment is freed."""
        victim = self.tree.victim()
        candidates = self.reference.evictable()
        assert (victim is None) == (not candidates)
        if victim is None:
            return
        (end,) = [each for each in candidates if self.node(each) is victim]
        least = min(map(self.reference.worth, candidates))
        assert self.reference.worth(end) <= least * (1 + 1e-9)
        held = weakref.ref(victim.segment)
        before = self.tree.nbytes
        assert self.tree.remove(victim) is held()
        assert victim not in self.tree
        assert self.tree.nbytes == before - BYTES_A_TOKEN * len(victim.tokens)
        del victim
        gc.collect(0)
        assert held() is None, "the segment of a removed node is still held"
        self.reference.remove(end)

    @invariant()
    def agree(self) -> None:
        self.tree.check()
        assert table(self.tree) == wanted(self.reference)
        assert self.tree.nbytes == BYTES_A_TOKEN * self.tree.tokens
        assert self.tree.tokens == sum(len(e) - r.start for e, r in self.reference.runs.items())
        assert self.tree.pins == len(self.held)
        leaves = {e for e in self.reference.runs if not self.reference.children(e)}
        assert {id(self.node(end)) for end in leaves} == {
            id(node) for node in self.tree if not node.children
        }
        for end in self.reference.runs:
            assert self.tree.can_merge(self.node(end)) == self.reference.can_merge(end)
        for pin, end in zip(self.held, self.reference.pins, strict=True):
            assert tuple(t for node in pin.path for t in node.segment.content) == end

    def teardown(self) -> None:
        """Release everything and check that all bytes are freed."""
        while self.held:
            self.held.pop().release()
            self.reference.pins.pop()
        while self.reference.runs:
            self._evict()
        self.agree()
        assert (len(self.tree), self.tree.nbytes, self.tree.index_bytes) == (0, 0, 0)
