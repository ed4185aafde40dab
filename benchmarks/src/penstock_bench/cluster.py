"""`penstock bench cluster`: replay of a trace on 1 to 1,000 replicas, by routing policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from penstock.config import RoutingPolicy
from penstock.errors import SettingError
from penstock.memory import format_bytes
from penstock.plurals import counted
from penstock.routing import POLICIES
from penstock_bench.bench_settings import Machine, ReplaySettings
from penstock_bench.cluster_simulation import (
    Cluster,
    Outcome,
    TraceCopies,
    capacity_blocks,
    one_large,
    simulate,
)
from penstock_bench.report import Line, Report
from penstock_bench.trace import Trace, read_trace

CLAIM = "Replicas whose prompts find them keep what one large engine would find"
OURS: RoutingPolicy = "prefix+load"
RIVAL: RoutingPolicy = "round-robin"
KEPT = 0.9
"""Goal: share of the hits of a single engine with all the memory."""


class ClusterLoad(ReplaySettings):
    """Replay size, numbers of replicas, routing policies, and the replicas' speed."""

    replicas: tuple[int, ...] = (1, 3, 10, 30, 100)
    policies: tuple[RoutingPolicy, ...] = POLICIES
    machine: Machine = Machine()


@dataclass(frozen=True, slots=True)
class Runs:
    """Outcomes of all policies for one number of replicas."""

    replicas: int
    seconds: float
    """Duration of the replayed trace, in seconds."""
    one_large_hit_rate: float
    outcomes: dict[RoutingPolicy, Outcome]

    def kept(self, policy: RoutingPolicy) -> float:
        """Return a policy's hits as a share of the single large engine's."""
        large = self.one_large_hit_rate
        return self.outcomes[policy].hit_rate / large if large else 1.0


def policy_of(name: str) -> RoutingPolicy:
    """Return the policy of this name.

    Raises:
        SettingError: the policy is unknown.
    """
    for policy in POLICIES:
        if policy == name:
            return policy
    raise SettingError(f"--policy {name} is none of {', '.join(POLICIES)}")


def measure(file: Path, load: ClusterLoad, progress: Callable[[str, int, int], None]) -> Report:
    """Replay the trace for every number of replicas and every policy.

    Args:
        file: the trace.
        load: size of the replay.
        progress: takes a description, the arrived requests, and their total.

    Raises:
        SettingError: the file is missing, or a line has another format.
    """
    trace = read_trace(file)
    crowd = TraceCopies(trace, load.split)
    return report(trace, load, [_runs(trace, crowd, load, n, progress) for n in load.replicas])


def _runs(
    trace: Trace,
    crowd: TraceCopies,
    load: ClusterLoad,
    replicas: int,
    progress: Callable[[str, int, int], None],
) -> Runs:
    arrivals = crowd.arrivals(replicas, load.requests)
    outcomes: dict[RoutingPolicy, Outcome] = {}
    for policy in load.policies:
        what = f"{replicas} x {policy}"
        outcomes[policy] = simulate(
            trace,
            arrivals,
            Cluster(replicas, policy, load.routers, load.gossip_seconds, load.worth),
            load.machine,
            lambda done, what=what: progress(what, done, len(arrivals)),  # type: ignore[misc]
        )
    large = one_large(trace, arrivals, load.machine, replicas)
    return Runs(replicas, arrivals[-1].seconds, large, outcomes)


def report(trace: Trace, load: ClusterLoad, runs: Sequence[Runs]) -> Report:
    """Compare our policy with the rival, and both with a single engine that has all the memory."""
    ours = OURS if OURS in load.policies else load.policies[0]
    others = [policy for policy in load.policies if policy != ours]
    rival = RIVAL if RIVAL in others else (others or [ours])[0]
    return Report(
        name="cluster",
        claim=CLAIM,
        rival=rival,
        penstock=_figures(runs, ours),
        rival_figures=_figures(runs, rival),
        ratio={
            _name(run): round(run.outcomes[ours].hit_rate / max(1e-9, other.hit_rate), 3)
            for run in runs
            for other in (run.outcomes[rival],)
        },
        goal={"share_of_one_engines_hits": KEPT},
        met=ours != OURS or all(run.kept(OURS) >= KEPT for run in runs),
        lines=[line for run in runs for line in _lines(run, ours, rival)],
        raw={
            "load": load.model_dump(),
            "visits": len(trace.visits),
            "block_tokens": trace.block_tokens,
            "capacity_blocks": capacity_blocks(trace, load.machine),
            "runs": [asdict(run) for run in runs],
        },
        dtype="none",
    )


def _figures(runs: Sequence[Runs], policy: RoutingPolicy) -> dict[str, Any]:
    return {
        "policy": policy,
        "hit_rate": {_name(run): round(run.outcomes[policy].hit_rate, 4) for run in runs},
        "share_of_one_engines_hits": {_name(run): round(run.kept(policy), 4) for run in runs},
        "wait_p95_seconds": {
            _name(run): round(run.outcomes[policy].wait_p95_seconds, 3) for run in runs
        },
    }


def _lines(run: Runs, ours: RoutingPolicy, rival: RoutingPolicy) -> list[Line]:
    of, than = run.outcomes[ours], run.outcomes[rival]
    judged = ours == OURS
    return [
        Line(
            f"{_name(run)}: hits kept of one engine's {100 * run.one_large_hit_rate:.1f} %",
            f"{100 * run.kept(ours):.0f} %",
            f"{100 * run.kept(rival):.0f} %",
            f">= {100 * KEPT:.0f} %" if judged else "",
            run.kept(ours) >= KEPT if judged else None,
        ),
        Line(
            f"{_name(run)}: first token, p95 s",
            f"{of.wait_p95_seconds:.1f}",
            f"{than.wait_p95_seconds:.1f}",
        ),
    ]


def _name(run: Runs) -> str:
    return f"{run.replicas} replica{'s' if run.replicas > 1 else ''}"


def table(report: Report) -> Table:
    """Return a table with a row per number of replicas and policy.

    Columns: hits; hits as a share of a single large engine's; load of the busiest replica over the
    mean; seconds to the first token; bytes of summary changes.
    """
    load = report.raw["load"]
    machine = load["machine"]
    drawn = Table(
        title=(
            f"each replica: KV of {counted(machine['memory_tokens'], 'token')}, reads "
            f"{machine['prefill_rate']:,.0f} tokens/s, writes {machine['decode_rate']:,.0f} "
            f"tokens/s in each of {machine['max_batch_size']} sequences, and has 1/{load['split']} "
            f"of the trace's conversations; {load['routers']} router(s), summaries every "
            f"{load['gossip_seconds']:g} s"
        ),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    headings = ("n", "policy", "hits", "of one's", "max/mean", "p50 s", "p95 s", "gossip/s")
    for heading in headings:
        justify: Literal["left", "right"] = "left" if heading == "policy" else "right"
        drawn.add_column(heading, justify=justify, no_wrap=True)
    for run in report.raw["runs"]:
        for policy, of in run["outcomes"].items():
            kept = of["hit_rate"] / run["one_large_hit_rate"] if run["one_large_hit_rate"] else 1
            drawn.add_row(
                f"{run['replicas']:,}",
                policy,
                f"{100 * of['hit_rate']:.1f} %",
                f"{100 * kept:.0f} %",
                f"{of['imbalance']:.2f}",
                f"{of['wait_p50_seconds']:.1f}",
                f"{of['wait_p95_seconds']:,.1f}",
                format_bytes(int(of["gossip_bytes_per_second"])),
            )
    return drawn
