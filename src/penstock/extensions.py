"""Plug-ins: optional components, discovered through entry points.

`pyproject.toml` lists the plug-ins of this package; other packages may provide more.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "penstock.plugins"


@cache
def extension(name: str) -> Any | None:
    """Return the object that a plug-in's entry point names; None if it is not installed."""
    objects = (_loaded(entry) for entry in entry_points(group=GROUP, name=name))
    return next((loaded for loaded in objects if loaded is not None), None)


@cache
def extensions(group: str) -> tuple[Any, ...]:
    """Return the objects of all entry points of a group whose plug-ins are installed."""
    objects = (_loaded(entry) for entry in entry_points(group=group))
    return tuple(loaded for loaded in objects if loaded is not None)


def _loaded(entry: EntryPoint) -> Any | None:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name is None or not entry.module.startswith(error.name):
            raise  # a dependency is missing, not the plug-in itself
    return None
