"""What was computed before: an index of prompts by prefix, without arrays, threads or clocks.

    tokens --block_keys--> chain of keys --PrefixTree.match--> path of nodes

`blocks` names, `tree` holds and finds, `policy` says what goes first, `eviction` finds it.
"""

from penstock.prefix.blocks import as_tokens, block_keys, root_key
from penstock.prefix.policy import HalfLife, Policy, PrefillCost
from penstock.prefix.tree import Match, Node, Pin, PrefixTree, Segment

__all__ = [
    "HalfLife",
    "Match",
    "Node",
    "Pin",
    "Policy",
    "PrefillCost",
    "PrefixTree",
    "Segment",
    "as_tokens",
    "block_keys",
    "root_key",
]
