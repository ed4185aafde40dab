"""Benchmarks of the prefix tree and of routing, in pure Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

from penstock.cli import options
from penstock.cli.settings_options import Fields, with_settings
from penstock_bench.bench_settings import Machine, ReplaySettings
from penstock_bench.cli.bench_options import Plot, Save, TraceFile, finish, progress_bar

if TYPE_CHECKING:
    from penstock_bench.cluster import ClusterLoad

Replicas: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help="Number of replicas; may be given several times.",
        metavar="NUMBER",
        show_default="1, 3, 10, 30 and 100",
        min=1,
    ),
]
Policies: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Policy of the router: round-robin, hash, prefix or prefix+load; may be given "
        "several times.",
        metavar="NAME",
        show_default="all four",
    ),
]


def lookup(
    tokens: Annotated[
        int, typer.Option(help="Length of a prompt.", metavar="TOKENS", min=2_048)
    ] = 131_072,
    rounds: Annotated[
        int,
        typer.Option(help="Number of times that each look-up is timed; mlx-lm's only once.", min=1),
    ] = 15,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Time the look-up of a prompt in the prefix tree.

    The tree has several shapes. The other side is mlx-lm's prompt cache. Exits with 1 if a goal is
    not met.
    """
    from penstock_bench.lookup import LookupLoad, measure

    finish(measure(LookupLoad(prompt_tokens=tokens, rounds=rounds)), as_json=as_json, save=save)


def trace(
    file: TraceFile,
    node_blocks: Annotated[
        int, typer.Option(help="Maximum number of blocks per eviction.", min=1)
    ] = 4,
    as_json: options.Json = False,
    save: Save = None,
) -> None:
    """Replay a trace and count the hits of bounded caches.

    The other sides are plain LRU and the optimal policy. Exits with 1 if a goal is not met.
    """
    from penstock_bench.trace import TraceLoad, measure

    finish(measure(file, TraceLoad(node_blocks=node_blocks)), as_json=as_json, save=save)


@with_settings
def cluster(
    file: TraceFile,
    replicas: Replicas = None,
    policy: Policies = None,
    *,
    replay: Annotated[dict[str, Any], Fields(ReplaySettings, variables=False)],
    machine: Annotated[dict[str, Any], Fields(Machine, variables=False)],
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Replay a trace on many replicas in simulated time.

    Uses real prefix trees and the router of penstock serve --ray. Missing tokens are prefilled at
    --prefill, answers decoded at --decode. Exits with 1 if a goal is not met.
    """
    from penstock_bench.cluster import measure, table
    from penstock_bench.cluster_picture import draw

    load = _replay(replicas, policy, {**replay, "machine": Machine(**machine)})
    with progress_bar("reading") as progress:
        report = measure(file, load, progress)
    if not as_json:
        Console(highlight=False).print(table(report))
    finish(report, as_json=as_json, save=save, plot=plot, draw=draw)


def _replay(
    replicas: list[int] | None, policies: list[str] | None, settings: dict[str, Any]
) -> ClusterLoad:
    """Return the load of a replay, with defaults for lists that are not given."""
    from penstock_bench.cluster import ClusterLoad, policy_of

    if replicas:
        settings["replicas"] = tuple(replicas)
    if policies:
        settings["policies"] = tuple(map(policy_of, policies))
    return ClusterLoad(**settings)
