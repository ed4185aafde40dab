"""Formatting of counts with nouns."""

from __future__ import annotations


def counted(count: float, noun: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "block"), counted(1_200, "block"), counted(2, "entry"), counted(0, "hash")
    ('1 block', '1,200 blocks', '2 entries', '0 hashes')
    """
    if count == 1:
        return f"{count:,} {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'sh', 'ch')) else 's'}"
