"""`penstock plan MODEL MODEL ...`: memory of several models within one limit. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.whole_words import print_line
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMember:
    """Memory of one of several models if only it and the pinned models are loaded."""

    name: str
    pinned: bool
    weight_bytes: int | None
    bytes_per_token: int
    largest_tokens: int | None
    """Tokens of the model's largest request; None if unlimited."""
    missing_bytes: int
    """Bytes by which the model's weights exceed the memory that the pinned models leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTogether:
    memory_bytes: int
    models: tuple[PlannedMember, ...]
    weight_bytes: int
    """Bytes of the weights of all models."""
    free_bytes: int
    """Bytes left for KV if all models are loaded; negative if they cannot be."""
    fits: bool
    """Whether each model fits together with the pinned ones."""


def together(models: Sequence[PlannedMember], memory_bytes: int) -> PlannedTogether:
    weights = sum(model.weight_bytes or 0 for model in models)
    return PlannedTogether(
        memory_bytes=memory_bytes,
        models=tuple(models),
        weight_bytes=weights,
        free_bytes=memory_bytes - weights,
        fits=not any(model.missing_bytes for model in models),
    )


def beside_pinned(weights: Sequence[int], pins: Sequence[bool], memory_bytes: int) -> list[int]:
    """Return the bytes available to each model: those that the other pinned models leave.

    >>> beside_pinned([5, 2, 1], [False, True, True], 10)
    [7, 9, 8]
    """
    pinned = sum(nbytes for nbytes, pin in zip(weights, pins, strict=True) if pin)
    return [
        memory_bytes - pinned + (nbytes if pin else 0)
        for nbytes, pin in zip(weights, pins, strict=True)
    ]


def show_together(plan: PlannedTogether, *, as_json: bool) -> None:
    """Print a plan, and exit with 1 if a model does not fit."""
    if as_json:
        print(json.dumps(asdict(plan)))
    else:
        _show(plan, Console(highlight=False, markup=False))
    if not plan.fits:
        raise typer.Exit(1)


def _show(plan: PlannedTogether, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model", overflow="fold")
    for title in ("weights", "a token", "largest request"):
        table.add_column(title, justify="right", no_wrap=True)
    for model in plan.models:
        table.add_row(
            f"{model.name} (pinned)" if model.pinned else model.name,
            "unknown" if model.weight_bytes is None else format_bytes(model.weight_bytes),
            format_bytes(model.bytes_per_token),
            _request(model),
        )
    console.print(table)
    for line in _lines(plan):
        print_line(console, line, indent=9)


def _request(model: PlannedMember) -> str:
    if model.missing_bytes:
        return "does not fit"
    return "any" if model.largest_tokens is None else counted(model.largest_tokens, "token")


def _lines(plan: PlannedTogether) -> list[str]:
    limit, weights = format_bytes(plan.memory_bytes), format_bytes(plan.weight_bytes)
    pins = any(model.pinned for model in plan.models)
    room = "the memory that pinned models leave" if pins else "the limit"
    lines = [
        f"{model.name} exceeds {room} by {format_bytes(model.missing_bytes)}"
        for model in plan.models
        if model.missing_bytes
    ]
    if plan.free_bytes > 0:
        free = format_bytes(plan.free_bytes)
        return [*lines, f"together {weights} of {limit}: all stay loaded, {free} for caches"]
    return [*lines, f"together {weights} of {limit}: models make room for each other"]
