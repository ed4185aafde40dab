"""Index of computed prompts by prefix, without arrays or threads.

    tokens --hash_blocks--> chain of keys --PrefixTree.match--> path of nodes

`block_hashes` names, `tree` holds and finds, `policy` gives worth, `eviction` finds the least.
`prefixes` keeps the tree inside a ledger and shares it among sequences, `divergence` explains
why a prompt is not found further.
"""

from penstock.prefix.block_hashes import as_tokens, hash_blocks, root_hash
from penstock.prefix.explanation import Explanation
from penstock.prefix.node import Match, Node, NodeView, TreeSegment
from penstock.prefix.pin import Pin
from penstock.prefix.policy import HalfLife, Policy, PrefillCost
from penstock.prefix.prefixes import InsertResult, PrefixCounts, Prefixes
from penstock.prefix.tree import PrefixTree

__all__ = [
    "Explanation",
    "HalfLife",
    "InsertResult",
    "Match",
    "Node",
    "NodeView",
    "Pin",
    "Policy",
    "PrefillCost",
    "PrefixCounts",
    "PrefixTree",
    "Prefixes",
    "TreeSegment",
    "as_tokens",
    "hash_blocks",
    "root_hash",
]
