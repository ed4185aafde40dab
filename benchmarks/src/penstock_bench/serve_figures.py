"""Figures of the server benchmark, and its goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock import config
from penstock_bench.comparison import ratio_line, size
from penstock_bench.engine_sides import LLAMA, OURS, RIVAL
from penstock_bench.models import ModelChoice
from penstock_bench.report import Line, Report
from penstock_bench.serve_client import (
    percentile,
)
from penstock_bench.serve_load import (
    CLAIM,
    GOAL_SHAPE,
    GOALS,
    OVERHEAD_GOAL,
    PERCENTS,
    REAL_GOALS,
    REAL_SHAPE,
    WAYS,
    Overhead,
    Phase,
    ServeLoad,
    ServerRuns,
)


def figures(phases: Sequence[Phase]) -> dict[str, Any]:
    """Return one side's figures: medians over the rounds, percentiles over all requests."""
    good = [reply for phase in phases for reply in phase.good]
    firsts = [reply.first_seconds for reply in good if reply.text_times]
    gaps = [gap for reply in good for gap in reply.gaps]
    later = [reply.first_seconds for reply in good if reply.text_times and reply.turn]

    def median(values: Sequence[float], digits: int) -> float:
        return round(statistics.median(values), digits)

    return {
        "completion_tokens_per_second": median([p.tokens_per_second for p in phases], 2),
        "requests_per_second": median([len(p.good) / p.seconds for p in phases], 3),
        "seconds": median([p.seconds for p in phases], 2),
        **{f"ttft_p{p}_seconds": round(percentile(firsts, p), 4) for p in PERCENTS if firsts},
        **{f"inter_token_p{p}_ms": round(1e3 * percentile(gaps, p), 2) for p in PERCENTS if gaps},
        **(
            {f"ttft_p{p}_later_seconds": round(percentile(later, p), 4) for p in (50, 95)}
            if later
            else {}
        ),
        **({"later_tokens_per_second": median(_later_speeds(phases), 2)} if later else {}),
        "peak_bytes": round(median([p.memory.peak_bytes for p in phases], 0)),
        "idle_bytes": round(median([p.idle_bytes for p in phases], 0)),
        "peak_above_idle_bytes": round(
            median([p.memory.peak_bytes - p.idle_bytes for p in phases], 0)
        ),
        "prompt_tokens": sum(reply.prompt_tokens for reply in phases[0].good),
        "cached_tokens": sum(reply.cached_tokens for reply in phases[0].good),
        "completion_tokens": sum(reply.completion_tokens for reply in phases[0].good),
        "requests": len(phases[0].replies),
        "errors": sum(reply.error is not None for phase in phases for reply in phase.replies),
        "cpu_seconds": median([p.memory.cpu_seconds for p in phases], 1),
    }


def _later_speeds(phases: Sequence[Phase]) -> list[float]:
    """Return tokens per second after the first turns, with the system prompt cached, by round."""
    speeds = []
    for phase in phases:
        later = [reply for reply in phase.good if reply.turn]
        seconds = max(reply.ended for reply in later) - min(reply.sent for reply in later)
        speeds.append(sum(reply.completion_tokens for reply in later) / seconds)
    return speeds


def ratios(of: Mapping[str, Mapping[str, Any]], other: str = RIVAL) -> dict[str, float | None]:
    """Return how many times better ours is than the other side."""
    mine, theirs = of[OURS], of[other]

    def times(name: str, *, more_is_better: bool = False) -> float | None:
        better, worse = (mine, theirs) if more_is_better else (theirs, mine)
        if not worse.get(name) or name not in better:
            return None
        return round(float(better[name]) / float(worse[name]), 3)

    return {
        "throughput": times("completion_tokens_per_second", more_is_better=True),
        "ttft_p95": times("ttft_p95_seconds"),
        "peak_memory": times("peak_bytes"),
        "peak_memory_above_idle": times("peak_above_idle_bytes"),
        "ttft_p50_later": times("ttft_p50_later_seconds"),
        "ttft_p95_later": times("ttft_p95_later_seconds"),
        "throughput_later": times("later_tokens_per_second", more_is_better=True),
        "ttft_p50": times("ttft_p50_seconds"),
        "inter_token_p50": times("inter_token_p50_ms"),
        "inter_token_p95": times("inter_token_p95_ms"),
        "inter_token_p99": times("inter_token_p99_ms"),
    }


def report(load: ServeLoad, runs: ServerRuns) -> Report:
    """Compare all sides with each other and with the goals."""
    of = {side: figures(phases) for side, phases in runs.sessions.items()}
    other = RIVAL if RIVAL in of else LLAMA
    ratio = ratios(of, other)
    drawn = [*_session_lines(load, of, ratio, other), *_same_lines(load, runs)]
    mine: dict[str, Any] = {"sessions": of[OURS]}
    theirs: dict[str, Any] = {"sessions": of[other]}
    if LLAMA in of and other != LLAMA:
        theirs[LLAMA] = of[LLAMA]
        beside = ratios(of, LLAMA)
        ratio |= {f"{LLAMA}: {name}": value for name, value in beside.items()}
        drawn += _comparison(f"beside {LLAMA}", of, beside, {}, LLAMA)
    if runs.arrivals:
        late = {side: figures([phase]) for side, phase in runs.arrivals.items()}
        mine["arrivals"], theirs["arrivals"] = late[OURS], late[other]
        ratio |= {f"arrivals: {name}": value for name, value in ratios(late, other).items()}
        drawn += _comparison("arrivals", late, ratios(late, other), {}, other)
    if runs.connections is not None:
        crowd = {**figures([runs.connections]), "most_open": runs.connections.most_open}
        mine["connections"] = crowd
        drawn += _crowd_lines(load, crowd)
    if runs.overhead is not None:
        mine["overhead"] = _overhead_figures(runs.overhead)
        drawn += _overhead_lines(mine["overhead"])
    return Report(
        name="serve",
        claim=CLAIM.format(other),
        rival=other,
        heading=" or ".join(side for side in of if side != OURS),
        penstock=mine,
        rival_figures=theirs,
        ratio=ratio,
        goal={
            **(REAL_GOALS if load.is_real else GOALS),
            "for": dict(
                zip(
                    ("sessions", "turns", "system_tokens"),
                    REAL_SHAPE if load.is_real else GOAL_SHAPE,
                    strict=True,
                )
            ),
            "errors": 0,
            "http_overhead": OVERHEAD_GOAL,
        },
        met=all(line.met for line in drawn if line.met is not None),
        lines=drawn,
        raw={
            "load": load.model_dump(mode="json"),
            "model": runs.folder.as_object(),
            "sessions": {
                side: [phase.as_object() for phase in phases]
                for side, phases in runs.sessions.items()
            },
            "arrivals": {side: phase.as_object() for side, phase in runs.arrivals.items()},
            "connections": runs.connections.as_object() if runs.connections else None,
            "overhead": asdict(runs.overhead) if runs.overhead else None,
            "same_first_answers": runs.same_first_answers,
        },
        dtype=runs.folder.dtype,
    )


def _session_lines(
    load: ServeLoad,
    of: Mapping[str, Mapping[str, Any]],
    ratio: Mapping[str, float | None],
    other: str,
) -> list[Line]:
    shape = load.sessions, load.turns, load.system_tokens
    goals = GOALS if shape == GOAL_SHAPE and load.model is ModelChoice.RANDOM else {}
    if load.is_real and shape == REAL_SHAPE and other == RIVAL:
        goals = REAL_GOALS
    compared = _comparison(f"{load.sessions} x {load.turns}", of, ratio, goals, other)
    errors = of[OURS]["errors"]
    return [*compared, Line("errors", str(errors), str(of[other]["errors"]), "0", errors == 0)]


def _same_lines(load: ServeLoad, runs: ServerRuns) -> list[Line]:
    """Return the line with the number of first answers equal to ours, by side."""
    if not load.is_real:
        return []
    others = ", ".join(
        f"{side} {count}" for side, count in runs.same_first_answers.items() if side != OURS
    )
    return [Line("first answers with the same text", str(load.sessions), others)]


def _comparison(
    name: str,
    of: Mapping[str, Mapping[str, Any]],
    ratio: Mapping[str, float | None],
    goals: Mapping[str, float],
    other: str,
) -> list[Line]:
    mine, theirs = of[OURS], of[other]

    def line(figure: str, key: str, ratio_name: str, write: Callable[[float], str]) -> Line:
        both = [write(side[key]) if key in side else "none" for side in (mine, theirs)]
        times = ratio.get(ratio_name)
        if times is None:
            return Line(f"{name}: {figure}", both[0], both[1])
        return ratio_line(f"{name}: {figure}", (both[0], both[1]), times, goals.get(ratio_name))

    tokens = "completion_tokens_per_second"
    return [
        line("completion tokens/s", tokens, "throughput", lambda x: f"{x:,.1f}"),
        line("requests/s", "requests_per_second", "", lambda x: f"{x:,.2f}"),
        *(
            line(f"first token p{p}", f"ttft_p{p}_seconds", f"ttft_p{p}", lambda x: f"{x:,.2f} s")
            for p in PERCENTS
        ),
        *(
            line(
                f"between tokens p{p}",
                f"inter_token_p{p}_ms",
                f"inter_token_p{p}",
                lambda x: f"{x:,.1f} ms",
            )
            for p in PERCENTS
        ),
        *(
            [
                *(
                    line(
                        f"first token p{p}, later turns",
                        f"ttft_p{p}_later_seconds",
                        f"ttft_p{p}_later",
                        lambda x: f"{x:,.2f} s",
                    )
                    for p in (50, 95)
                ),
                line(
                    "tokens/s, later turns",
                    "later_tokens_per_second",
                    "throughput_later",
                    lambda x: f"{x:,.1f}",
                ),
            ]
            if "ttft_p95_later_seconds" in mine
            else []
        ),
        line("peak resident", "peak_bytes", "peak_memory", size),
        line("idle, model loaded", "idle_bytes", "", size),
        line("peak above idle", "peak_above_idle_bytes", "peak_memory_above_idle", size),
        line("prompt tokens", "prompt_tokens", "", lambda x: f"{x:,.0f}"),
        line("of them cached", "cached_tokens", "", lambda x: f"{x:,.0f}"),
    ]


def _crowd_lines(load: ServeLoad, crowd: Mapping[str, Any]) -> list[Line]:
    name = f"{load.connections} connections"
    errors, most_open = crowd["errors"], crowd["most_open"]
    return [
        Line(f"{name}: errors", str(errors), "", "0", errors == 0),
        Line(f"{name}: open at once", str(most_open), "", str(load.connections), None),
        Line(f"{name}: last first token", f"{crowd.get('ttft_p99_seconds', 0):,.2f} s", ""),
        Line(f"{name}: peak resident", size(crowd["peak_bytes"]), ""),
    ]


def _overhead_figures(overhead: Overhead) -> dict[str, Any]:
    def median(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {way: round(statistics.median(of), 3) for way, of in values.items()}

    return {
        "batch_size": config.MAX_BATCH_SIZE,
        "tokens_per_second": {
            way: round(overhead.tokens / statistics.median(of), 1)
            for way, of in overhead.seconds.items()
        },
        "streamed_overhead": round(overhead.share("streamed"), 4),
        "whole_overhead": round(overhead.share("whole"), 4),
        "cpu_seconds": median(overhead.cpu_seconds),
        "client_cpu_seconds": median(overhead.client_cpu_seconds),
    }


def _overhead_lines(of: Mapping[str, Any]) -> list[Line]:
    batch = f"batch {of['batch_size']}"
    goal = f"< {OVERHEAD_GOAL:.0%}"
    speeds, cpu, client = of["tokens_per_second"], of["cpu_seconds"], of["client_cpu_seconds"]
    return [
        Line(f"{batch}: engine alone, tokens/s", f"{speeds['alone']:,.1f}", ""),
        *(
            Line(
                f"{batch}: {way} over HTTP, time added",
                f"{of[f'{way}_overhead']:+.1%}",
                "",
                goal,
                of[f"{way}_overhead"] < OVERHEAD_GOAL,
            )
            for way in WAYS[1:]
        ),
        *(
            Line(
                f"{batch}: {way}, processor seconds (and the client's)",
                f"{cpu[way]:,.2f} ({client[way]:,.2f})",
                "",
            )
            for way in WAYS
        ),
    ]
