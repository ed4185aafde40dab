"""`NamedCalls`: a named call format, and its detection by chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.server.parsing.parser import CallFormat


def never(template: str) -> bool:
    """For formats that are named, or that mlx-lm detects."""
    return False


def all_of(*signs: str) -> Callable[[str], bool]:
    """Return a predicate for templates that contain all of these texts.

    >>> all_of("<a>", "</a>")("<a>{{ call }}</a>"), all_of("<a>", "<b>")("<a>")
    (True, False)
    """
    return lambda template: all(sign in template for sign in signs)


class NamedCalls(NamedTuple):
    name: str
    calls: CallFormat
    shown: Callable[[str], bool] = never
    variant: Callable[[str], CallFormat] | None = None
    """Variant that a template writes; None if there is one form."""
