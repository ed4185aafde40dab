"""`NamedCalls`: a named call format, and its detection in chat templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.server.parsing.parser import CallFormat


def never(template: str) -> bool:
    """Return False, for formats that are selected by name or detected by mlx-lm."""
    return False


def all_of(*signs: str) -> Callable[[str], bool]:
    """Return a predicate that tests whether a template contains all of `signs`.

    >>> all_of("<a>", "</a>")("<a>{{ call }}</a>"), all_of("<a>", "<b>")("<a>")
    (True, False)
    """
    return lambda template: all(sign in template for sign in signs)


class NamedCalls(NamedTuple):
    name: str
    calls: CallFormat
    shown: Callable[[str], bool] = never
    variant: Callable[[str], CallFormat] | None = None
    """Function that selects the template's variant; None if there is only one."""
