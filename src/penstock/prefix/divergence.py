"""Explain how far a prompt matches the tree, and where the nearest cached prompt differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.memory.sizes import format_bytes
from penstock.plurals import counted
from penstock.prefix.block_hashes import TokenArray, Tokens, as_tokens, hash_blocks
from penstock.prefix.explanation import CAUSES, Eviction, Explanation
from penstock.prefix.node import Match, S
from penstock.prefix.prefixes import Prefixes


def explain(
    prefixes: Prefixes[S],
    tokens: Tokens,
    salt: str = "",
    block_hashes: Sequence[bytes] | None = None,
) -> Explanation:
    """Explain how far a prompt would match now, why no further, and what to change."""
    values, tenant_root = as_tokens(tokens), prefixes.root(salt)
    if block_hashes is None:
        block_hashes = prefixes.block_hashes(values, salt)
    match = prefixes.match(block_hashes)
    blocks = match.tokens // prefixes.block_size
    gone = prefixes.evictions.find(block_hashes[blocks]) if blocks < len(block_hashes) else None
    common, beyond = _nearest(prefixes, match, values[match.tokens :], tenant_root)
    root = block_hashes[blocks - 1] if blocks else tenant_root
    leaf = prefixes.find_partial(match, root, values[match.tokens : -1])
    index = match.tokens + common
    differs = beyond is not None and index < len(values)
    cached = match.tokens if leaf is None else leaf.end
    ago = None if gone is None else prefixes.clock() - gone.at_seconds
    return Explanation(
        prompt_tokens=len(values),
        held_tokens=cached,
        diverges_at=index if differs else None,
        held_token=beyond if differs else None,
        given_token=int(values[index]) if differs else None,
        reason=_reason(prefixes, cached, len(values), index if differs else None, gone, ago),
        evicted_seconds_ago=ago,
        evicted_for=None if gone is None else gone.why,
    )


def tokens_held_at(
    prefixes: Prefixes[S],
    tokens: Tokens,
    position: int,
    block_hashes: Sequence[bytes],
    salt: str = "",
) -> TokenArray:
    """Return the tokens of the nearest cached prompt from `position`; empty if there is none."""
    match, values = prefixes.match(block_hashes), as_tokens(tokens)
    rest, common = values[match.tokens :], position - match.tokens
    runs = _continuations(prefixes, match, prefixes.root(salt))
    return next((r[common:] for r in runs if _common_tokens(r, rest) == common), values[:0])


def _nearest(
    prefixes: Prefixes[S], match: Match[S], rest: TokenArray, root: bytes
) -> tuple[int, int | None]:
    """Return the number of tokens that the best branch shares with `rest`, and its next token."""
    common, beyond = 0, None
    for run in _continuations(prefixes, match, root):
        same = _common_tokens(run, rest)
        if beyond is None or same > common:
            common = same
            beyond = int(run[same]) if same < len(run) else None
    return common, beyond


def _continuations(prefixes: Prefixes[S], match: Match[S], root: bytes) -> list[TokenArray]:
    """Return the tokens that follow the match in the tree, one array per branch.

    Only branches under `root` are returned: another tenant's tokens are never revealed.
    """
    size = prefixes.block_size
    if match.ends_inside:
        return [match.path[-1].tokens[match.blocks_in_last * size :]]
    if match.path:
        return [child.tokens for child in match.path[-1].children.values()]
    tops = (node for node in prefixes.tree if node.parent is None)
    return [
        node.tokens
        for node in tops
        if hash_blocks(node.tokens[:size], size, root) == [node.block_hashes[0]]
    ]


def _reason(
    prefixes: Prefixes[S],
    cached: int,
    length: int,
    diverges: int | None,
    gone: Eviction | None,
    ago: float | None,
) -> str:
    size = prefixes.block_size
    if gone is not None:
        cause = CAUSES[gone.why].format(limit=format_bytes(prefixes.ledger.limit_bytes))
        return f"the next block was evicted {ago:,.0f} s ago {cause}"
    if cached == 0 and length < size:
        return (
            f"the prompt has {counted(length, 'token')}, and prompts share whole blocks of "
            f"{counted(size, 'token')}: it is too short for one"
        )
    if diverges is not None:
        return (
            f"token {diverges:,} differs from the nearest cached prompt: the part from there "
            f"on is new. To reuse more, put text that changes (a date, a name) at the end"
        )
    if length // size == cached // size:
        return f"all whole blocks of {counted(size, 'token')} are cached"
    if len(prefixes.tree) == 0:
        return "the cache is empty: all of this prompt is new"
    doubt = ", or evicted too long ago to be remembered" if prefixes.evictions.forgets else ""
    missing = length - cached
    return (
        f"this part is new: {counted(missing, 'token')} from token {cached:,} "
        f"on, never cached{doubt}"
    )


def _common_tokens(run: TokenArray, rest: TokenArray) -> int:
    count = min(len(run), len(rest))
    differ = np.nonzero(run[:count] != rest[:count])[0]
    return int(differ[0]) if len(differ) else count
