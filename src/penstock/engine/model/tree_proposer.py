"""Proposals from the prefix tree: how other sequences went on behind the very same prefix. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.engine.model.proposals import LONGEST_NGRAM, NOTHING, Proposal
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.kv.segment import Segment
from penstock.prefix.node import Node

CHILDREN_TRIED = 16
"""Children of a node that are looked at, the newest."""


class TreeProposer:
    """Proposes the tokens that another branch of the tree has behind all of a sequence's.

    Args:
        kv: of the sequence, whose path the branches share; another tenant's share none.
    """

    def __init__(self, kv: SequenceKV) -> None:
        self._kv = kv

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Return up to `most` tokens that may follow; the whole text agrees with their place."""
        node = self._kv.node
        if node is None or most < 1:
            return NOTHING
        if node.end <= len(tokens) and not node.children:
            return NOTHING
        for at, end in _branch(node, max(node.start, self._kv.num_cached_tokens), tokens):
            if following := at.tokens[end - at.start :][:most].tolist():
                return Proposal(following, LONGEST_NGRAM + 1)
        return NOTHING


def _branch(
    node: Node[Segment], start: int, tokens: Sequence[int]
) -> Iterator[tuple[Node[Segment], int]]:
    """Yield the nodes that agree with tokens from `start` on, with the end of the agreement.

    The last one holds the end of the tokens, or more; none where no branch has it.
    """
    inside: Node[Segment] | None = node
    while inside is not None:
        end = min(inside.end, len(tokens))
        held = inside.tokens[start - inside.start : end - inside.start]
        if held.tolist() != list(tokens[start:end]):
            return
        if end == len(tokens):
            yield inside, end
        start = end
        inside = _child(inside, tokens[end:])


def _child(node: Node[Segment], rest: Sequence[int]) -> Node[Segment] | None:
    """Return the newest child that goes on with some tokens, as far as both reach."""
    for child in islice(reversed(node.children.values()), CHILDREN_TRIED):
        count = min(len(child.tokens), len(rest))
        if child.tokens[:count].tolist() == list(rest[:count]):
            return child
    return None
