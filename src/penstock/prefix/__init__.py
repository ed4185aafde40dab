"""Prefix cache: index of computed prompts by prefix, without arrays or threads.

    tokens --hash_blocks--> chain of keys --PrefixTree.match--> path of nodes

`block_hashes` hashes blocks, `tree` stores and finds nodes, `policy` values them, and `eviction`
orders them. `prefixes` keeps the tree within a ledger and shares it among sequences, and
`divergence` explains why a prompt matches no further.
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
