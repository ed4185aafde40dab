"""The limit on open files, which includes connections."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

ENOUGH = (65_536, 10_240)
"""Limits to try in turn if the hard limit is infinite, or larger than macOS accepts."""


@contextmanager
def unchanged_limit() -> Iterator[None]:
    """Block changes of the limit on open files in a `with` block, then raise it to the maximum.

    When imported, mlx-lm sets the soft limit to 2,048 and the hard limit to 4,096. That raises
    under a lower hard limit, and a higher one could not be restored.
    """
    theirs = resource.setrlimit

    def others_only(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE:
            theirs(kind, limits)

    resource.setrlimit = others_only
    try:
        yield
    finally:
        resource.setrlimit = theirs
    raise_limit()


def raise_limit() -> int:
    """Raise the limit on open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (hard,) if hard != resource.RLIM_INFINITY else ()
    for candidate in (*limits, *ENOUGH):
        if soft == resource.RLIM_INFINITY or candidate <= soft:
            continue
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (candidate, hard))
        except (ValueError, OSError):  # more than the system accepts
            continue
        break
    return limit()


def limit() -> int:
    """Return this process's limit on open files; a large number if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH[0] if soft == resource.RLIM_INFINITY else soft
