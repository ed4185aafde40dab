"""The state machine on the prefix tree, and on broken trees."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tree_machine import TreeMachine

from penstock.prefix import HalfLife, Node, PrefixTree
from penstock.prefix import tree as tree_module


def run(
    tree: type[PrefixTree] = PrefixTree,
    policy: type[HalfLife] = HalfLife,
    how: settings | None = None,
) -> None:
    machine = type("Machine", (TreeMachine,), {"make": tree, "policy": policy})
    run_state_machine_as_test(machine, settings=how)


def test_tree_matches_dict_of_prefixes() -> None:
    """At least as long as the hunts below, so that their defects are not found here."""
    given = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
    run(how=settings(given, max_examples=max(150, given.max_examples), stateful_step_count=40))


# ---- negative controls: each class below is wrong in one way


class ForgetsTheTouch(PrefixTree):
    """Counts a read, but does not update the eviction order."""

    def pin(self, node: Node | None, now_seconds: float) -> Any:
        before = {} if node is None else {each.id: each.heat for each in node.path()}
        pin = super().pin(node, now_seconds)
        for each in pin.path:
            each.heat = before[each.id]
        return pin


class TouchesOnlyLastNode(PrefixTree):
    """Updates only the last node of a path."""

    def pin(self, node: Node | None, now_seconds: float) -> Any:
        before = {} if node is None else {each.id: each.heat for each in node.path()[:-1]}
        pin = super().pin(node, now_seconds)
        for each in pin.path[:-1]:
            each.heat = before[each.id]
        return pin


class KeepsBytesOfRemoved(PrefixTree):
    """Does not subtract the bytes of a removed node."""

    def remove(self, node: Node) -> Any:
        before = self.totals.nbytes
        segment = super().remove(node)
        self.totals.nbytes = before
        return segment


class DoesNotRemove(PrefixTree):
    """Counts a node as removed without removing it."""

    def remove(self, node: Node) -> Any:
        self._uncount(node)
        return node.segment


class KeepsWhatItRemoved(PrefixTree):
    """Retains the segment of an evicted node."""

    def remove(self, node: Node) -> Any:
        self.__dict__.setdefault("kept", []).append(node.segment)
        return super().remove(node)


class EvictsThePinned(PrefixTree):
    """Ignores pins."""

    def victim(self) -> Any:
        leaves = (node for node in self if not node.children)
        return min(leaves, key=self.order.worth, default=None)


class EvictsTheFirst(PrefixTree):
    """Evicts an arbitrary leaf."""

    def victim(self) -> Any:
        return next((one for one in self if not one.children and not one.pins), None)


class DropsPinsInSplit(PrefixTree):
    """Loses pins when it splits a node."""

    def split(self, node: Node, blocks: int) -> Any:
        head = super().split(node, blocks)
        head.pins = 0
        return head


class MergesWherePinsEnd(PrefixTree):
    """Merges nodes at which a pin ends."""

    def can_merge(self, node: Node, last: Node | None = None) -> bool:
        run = self._run(node, last)
        pins = [each.pins for each in run]
        for each in run:
            each.pins = run[-1].pins
        try:
            return super().can_merge(node, last)
        finally:
            for each, before in zip(run, pins, strict=True):
                each.pins = before


class DoesNotUnpin(PrefixTree):
    """Keeps pins on nodes that a sequence no longer reads."""

    def withdraw(self, pin: Any, node: Node | None) -> None:
        pin.node = node


class DoesNotCountAdoptedReads(PrefixTree):
    """Follows without counting a use."""

    def extend(self, pin: Any, child: Node, now_seconds: float | None) -> None:
        super().extend(pin, child, None)


class LosesPinnedBytes(PrefixTree):
    """Does not count pinned bytes."""

    def pin(self, node: Node | None, now_seconds: float) -> Any:
        before = self.totals.pinned_bytes
        pin = super().pin(node, now_seconds)
        self.totals.pinned_bytes = before
        return pin


class MergesOneMore(PrefixTree):
    """Is off by a block at the merge limit."""

    def can_merge(self, node: Node, last: Node | None = None) -> bool:
        self.max_merge_tokens += self.block_size
        try:
            return super().can_merge(node, last)
        finally:
            self.max_merge_tokens -= self.block_size


class ForgetsTheParent(PrefixTree):
    """Never offers a node that became a leaf for eviction."""

    def remove(self, node: Node) -> Any:
        segment = super().remove(node)
        if node.parent is not None:
            self.order.drop(node.parent)
        return segment


class RemembersNothing(HalfLife):
    def recall(self, key: bytes) -> float:
        super().recall(key)
        return -float("inf")


class RemembersTooLong(HalfLife):
    def forget(self, key: bytes, heat: float, last_used_seconds: float) -> None:
        self.remembered_nodes += 1
        super().forget(key, heat, last_used_seconds)


class DecaysTwice(HalfLife):
    def used(self, heat: float, now_seconds: float) -> float:
        return super().used(heat - 1, now_seconds)


HUNT = settings(
    settings.get_profile("default"),
    max_examples=1_500,  # stops at the first that is noticed
    stateful_step_count=40,
    phases=[Phase.generate],
)
TREES = [each for each in PrefixTree.__subclasses__() if each.__module__ == __name__]
POLICIES = [each for each in HalfLife.__subclasses__() if each.__module__ == __name__]


@pytest.mark.parametrize("broken", TREES)
def test_state_machine_detects_broken_trees(broken: type[PrefixTree]) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run(tree=broken, how=HUNT)


@pytest.mark.parametrize("broken", POLICIES)
def test_state_machine_detects_broken_policies(broken: type[HalfLife]) -> None:
    with pytest.raises(AssertionError):
        run(policy=broken, how=HUNT)


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_state_machine_detects_wrong_match_ends(
    monkeypatch: pytest.MonkeyPatch, wrong_by: int
) -> None:
    right = tree_module._common

    def wrong(own: Any, keys: Any, start: int) -> int:
        found = right(own, keys, start)
        return min(max(1, found + wrong_by), len(own)) if found < len(own) else found

    monkeypatch.setattr(tree_module, "_common", wrong)
    with pytest.raises((AssertionError, ValueError)):
        run(how=HUNT)
