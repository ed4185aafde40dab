"""`penstock bench serve`: our server under load, and mlx-lm's under the same in the same run.

sessions      agents that share a system prompt, turn by turn, each server cold, in turns
arrivals      on demand: requests that come by a Poisson process
connections   many at the same moment, ours alone: not one may fail
overhead      the same prompts through our server and through the engine without one
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from penstock import config
from penstock.models.mlx_lm import load as load_model
from penstock.models.mlx_lm import render
from penstock_bench.bench_settings import ServeSettings
from penstock_bench.engine_runs import OURS, RIVAL, EngineShape, ratio_line, size
from penstock_bench.models import LlamaShape, ModelChoice
from penstock_bench.report import Line, Report
from penstock_bench.serve_client import (
    Client,
    Message,
    Reply,
    Session,
    at_once,
    closed_loop,
    connected,
    open_loop,
    percentile,
)
from penstock_bench.serve_model import (
    ServedFolder,
    lines,
    model_folder,
    poisson_times,
    system_prompt,
)
from penstock_bench.serve_process import (
    Alone,
    Memory,
    RunningServer,
    ServerCommand,
    cpu_seconds,
    ending_cleanly,
    engine_alone,
    free_port,
    high_water_bytes,
    ours,
    rival,
    serving,
    watched,
)

CLAIM = "Over HTTP: agents that share a system prompt, against mlx-lm's server"
GOALS = {"throughput": 3.0, "ttft_p95": 5.0, "peak_memory": 2.0}
GOAL_SHAPE = (8, 5, 4_000)
"""Sessions, turns and tokens of the system prompt that the goals are for."""
OVERHEAD_GOAL = 0.05
PERCENTS = (50, 95, 99)

Sides = Mapping[str, Callable[[ServedFolder, int], ServerCommand]]
SIDES: Sides = {OURS: ours, RIVAL: rival}


class ServeLoad(ServeSettings):
    """Load of the servers, and the model and codec that they have."""

    model: ModelChoice = ModelChoice.RANDOM
    llama: LlamaShape | None = None
    engine: EngineShape = EngineShape()
    """Settings of our engine, of which those of codecs alone count."""
    line_tokens: int = 40
    connection_tokens: int = 16
    overhead_prompt_tokens: int = 200
    overhead_tokens: int = 256

    @property
    def system(self) -> str:
        """What all sessions begin with."""
        return system_prompt(self.system_tokens)

    def talks(self) -> list[Session]:
        """Return what every session says."""
        sessions = []
        for number in range(self.sessions):
            said = lines(number, 2 * self.turns, self.line_tokens)
            first, other = said[: self.turns], said[self.turns :]
            fork = other[2:] if number < self.forks else []
            # Edits begin at the other end, so that few sessions have both.
            edit = other[0] if number >= self.sessions - self.edits else None
            sessions.append(Session(first, fork, edit))
        return sessions


@dataclass(slots=True)
class Phase:
    """One load on one server."""

    seconds: float
    """Seconds from the first request to the last answer."""
    replies: list[Reply]
    memory: Memory
    idle_bytes: int
    """Resident before it, the model loaded."""
    start_seconds: float
    high_water_bytes: int | None
    """The most the process ever had resident, as the system counts it."""
    most_open: int = 0

    @property
    def good(self) -> list[Reply]:
        """The replies without an error."""
        return [reply for reply in self.replies if reply.error is None]

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of all answers together."""
        return sum(reply.completion_tokens for reply in self.good) / self.seconds

    def as_object(self) -> dict[str, Any]:
        """Return everything, for the record; times from the first request."""
        began = min(reply.sent for reply in self.replies)
        return {
            "seconds": self.seconds,
            "start_seconds": self.start_seconds,
            "idle_bytes": self.idle_bytes,
            "peak_bytes": self.memory.peak_bytes,
            "high_water_bytes": self.high_water_bytes,
            "cpu_seconds": self.memory.cpu_seconds,
            "most_open": self.most_open,
            "memory": [[round(at, 2), nbytes] for at, nbytes in self.memory.samples],
            "replies": [_recorded(reply, began) for reply in self.replies],
        }


def _recorded(reply: Reply, began: float) -> dict[str, Any]:
    stored = asdict(reply)
    del stored["text"]
    stored["text_times"] = [round(at - began, 4) for at in reply.text_times]
    return {**stored, "sent": round(reply.sent - began, 4), "ended": round(reply.ended - began, 4)}


WAYS = ("alone", "streamed", "whole")
"""The engine without a server; over HTTP piece by piece; over HTTP in one JSON object."""


@dataclass(slots=True)
class Overhead:
    """What the same prompts took each way, round by round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Seconds from the first request to the last answer, by way."""
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Processor time of the process with the engine; other programs disturb it less."""
    client_cpu_seconds: dict[str, list[float]] = field(
        default_factory=lambda: {way: [] for way in WAYS}
    )
    """Processor time of the bench, which is the client."""
    tokens: int = 0
    """Tokens of all answers of a round."""

    def share(self, way: str) -> float:
        """Return the median over the rounds of the time over the engine's alone, less 1."""
        return statistics.median(
            over / alone - 1
            for over, alone in zip(self.seconds[way], self.seconds["alone"], strict=True)
        )


@dataclass(slots=True)
class ServerRuns:
    """All that was measured."""

    sessions: dict[str, list[Phase]]
    arrivals: dict[str, Phase]
    connections: Phase | None
    overhead: Overhead | None
    folder: ServedFolder


# ---------------------------------------------------------------- running


def measure(load: ServeLoad, sides: Sides = SIDES) -> Report:
    """Run every part, the sides of each in turn."""
    with ending_cleanly(), model_folder(load.model, load.llama) as plain:
        folder = replace(plain, codec_settings=load.engine.codec_settings)
        runs = ServerRuns(
            sessions=_sessions(load, folder, sides),
            arrivals=_arrivals(load, folder, sides) if load.rate else {},
            connections=None,
            overhead=None,
            folder=folder,
        )
        if load.connections or load.overhead_rounds:
            port = free_port()
            with serving(sides[OURS](folder, port), port) as server:
                if load.overhead_rounds:
                    runs.overhead = _overhead(load, folder, server)
                if load.connections:
                    runs.connections = _connections(load, server)
    return report(load, runs)


Send = Callable[[Client], Awaitable[list[Reply]]]


def talk(server: RunningServer, send: Send) -> tuple[float, list[Reply], int]:
    """Put one load on a server; return its seconds, its replies and how many were open at most."""

    async def run() -> tuple[float, list[Reply], int]:
        async with connected(server.url, server.model) as client:
            began = time.perf_counter()
            replies = await send(client)
            return time.perf_counter() - began, replies, client.most_open

    return asyncio.run(run())


def drive(server: RunningServer, send: Send) -> Phase:
    """Put one load on a server and watch its memory meanwhile."""
    idle_bytes = server.process.memory_info().rss
    with watched(server.process) as memory:
        seconds, replies, most_open = talk(server, send)
    return Phase(
        seconds,
        replies,
        memory,
        idle_bytes,
        server.start_seconds,
        high_water_bytes(server.process.pid),
        most_open,
    )


def _cold(
    folder: ServedFolder,
    make: Callable[[ServedFolder, int], ServerCommand],
    send: Send,
) -> Phase:
    port = free_port()
    with serving(make(folder, port), port) as server:
        return drive(server, send)


def _sessions(load: ServeLoad, folder: ServedFolder, sides: Sides) -> dict[str, list[Phase]]:
    """Give both servers the same sessions, each time in a process of its own.

    Raises:
        AssertionError: the servers read different prompts.
    """
    talks, system = load.talks(), load.system
    phases: dict[str, list[Phase]] = {who: [] for who in sides}
    for turn in range(load.rounds):
        for who in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            phase = _cold(
                folder, sides[who], lambda c: closed_loop(c, system, talks, load.answer_tokens)
            )
            phases[who].append(phase)
    _check_same_prompts(phases)
    return phases


def _check_same_prompts(sessions: Mapping[str, Sequence[Phase]]) -> None:
    """Raise AssertionError unless all first turns had the same lengths, in tokens."""
    lengths = {
        who: {tuple(sorted(r.prompt_tokens for r in phase.good if r.turn == 0)) for phase in phases}
        for who, phases in sessions.items()
        if all(reply.error is None for phase in phases for reply in phase.replies)
    }
    if len(set().union(*lengths.values())) > 1:
        raise AssertionError(f"the servers read different prompts: {lengths}")


def _arrivals(load: ServeLoad, folder: ServedFolder, sides: Sides) -> dict[str, Phase]:
    times = poisson_times(load.rate, load.arrivals)
    said = lines(500, load.arrivals, load.line_tokens)
    system = load.system
    return {
        who: _cold(folder, make, lambda c: open_loop(c, system, said, times, load.answer_tokens))
        for who, make in sides.items()
    }


def _connections(load: ServeLoad, server: RunningServer) -> Phase:
    system = {"role": "system", "content": system_prompt(load.overhead_prompt_tokens)}
    said = lines(900, load.connections, load.line_tokens)
    asked = [[system, {"role": "user", "content": line}] for line in said]
    return drive(server, lambda client: at_once(client, asked, load.connection_tokens))


def _overhead(load: ServeLoad, folder: ServedFolder, server: RunningServer) -> Overhead:
    """Time a full batch three ways in turn, with new prompts each time: nothing is known.

    Raises:
        AssertionError: the ways did not generate the same number of tokens.
    """
    _, tokenizer = load_model(folder.path)
    overhead = Overhead()

    def asked(seed: int) -> list[list[Message]]:
        texts = lines(2_000 + seed, config.MAX_BATCH_SIZE, load.overhead_prompt_tokens)
        return [[{"role": "user", "content": text}] for text in texts]

    def over_http(seed: int, *, stream: bool) -> tuple[float, int]:
        seconds, replies, _ = talk(
            server,
            lambda client: at_once(client, asked(seed), load.overhead_tokens, stream=stream),
        )
        return seconds, sum(reply.completion_tokens for reply in replies if reply.error is None)

    def run(way: str, turn: int, alone: Alone) -> tuple[float, int]:
        # The same prompts alone and streamed; for answers in one piece the server needs others,
        # as it would know those.
        if way == "alone":
            prompts = [render(tokenizer, messages) for messages in asked(2 * turn)]
            return alone.run(prompts, load.overhead_tokens)
        if way == "streamed":
            return over_http(2 * turn, stream=True)
        return over_http(2 * turn + 1, stream=False)

    client = psutil.Process()
    with engine_alone(folder) as alone:
        for turn in range(load.overhead_rounds):
            counts = {}
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                process = alone.process if way == "alone" else server.process
                before = cpu_seconds(process), cpu_seconds(client)
                seconds, counts[way] = run(way, turn, alone)
                overhead.seconds[way].append(seconds)
                overhead.cpu_seconds[way].append(cpu_seconds(process) - before[0])
                overhead.client_cpu_seconds[way].append(cpu_seconds(client) - before[1])
            if load.model is ModelChoice.RANDOM and len(set(counts.values())) > 1:
                raise AssertionError(f"the ways generated different numbers of tokens: {counts}")
            overhead.tokens = counts["alone"]
    return overhead


# ---------------------------------------------------------------- figures


def figures(phases: Sequence[Phase]) -> dict[str, Any]:
    """Return one side's figures: medians over the rounds; percentiles over all requests."""
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
        **({"ttft_p95_later_seconds": round(percentile(later, 95), 4)} if later else {}),
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
    """Return each round's tokens a second after the first turns: the system prompt is known."""
    speeds = []
    for phase in phases:
        later = [reply for reply in phase.good if reply.turn]
        seconds = max(reply.ended for reply in later) - min(reply.sent for reply in later)
        speeds.append(sum(reply.completion_tokens for reply in later) / seconds)
    return speeds


def ratios(of: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return how many times better ours is."""
    mine, theirs = of[OURS], of[RIVAL]

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
        "ttft_p95_later": times("ttft_p95_later_seconds"),
        "throughput_later": times("later_tokens_per_second", more_is_better=True),
        "ttft_p50": times("ttft_p50_seconds"),
        "inter_token_p50": times("inter_token_p50_ms"),
        "inter_token_p95": times("inter_token_p95_ms"),
        "inter_token_p99": times("inter_token_p99_ms"),
    }


def report(load: ServeLoad, runs: ServerRuns) -> Report:
    """Set both sides against each other and against the goals."""
    of = {who: figures(phases) for who, phases in runs.sessions.items()}
    ratio = ratios(of)
    drawn = [*_session_lines(load, of, ratio)]
    mine: dict[str, Any] = {"sessions": of[OURS]}
    theirs: dict[str, Any] = {"sessions": of[RIVAL]}
    if runs.arrivals:
        late = {who: figures([phase]) for who, phase in runs.arrivals.items()}
        mine["arrivals"], theirs["arrivals"] = late[OURS], late[RIVAL]
        ratio |= {f"arrivals: {name}": value for name, value in ratios(late).items()}
        drawn += _comparison("arrivals", late, ratios(late), {})
    if runs.connections is not None:
        crowd = {**figures([runs.connections]), "most_open": runs.connections.most_open}
        mine["connections"] = crowd
        drawn += _crowd_lines(load, crowd)
    if runs.overhead is not None:
        mine["overhead"] = _overhead_figures(runs.overhead)
        drawn += _overhead_lines(mine["overhead"])
    return Report(
        name="serve",
        claim=CLAIM,
        rival=RIVAL,
        penstock=mine,
        rival_figures=theirs,
        ratio=ratio,
        goal={
            **GOALS,
            "for": dict(zip(("sessions", "turns", "system_tokens"), GOAL_SHAPE, strict=True)),
            "errors": 0,
            "http_overhead": OVERHEAD_GOAL,
        },
        met=all(line.met for line in drawn if line.met is not None),
        lines=drawn,
        raw={
            "load": load.model_dump(mode="json"),
            "model": runs.folder.as_object(),
            "sessions": {
                who: [phase.as_object() for phase in phases]
                for who, phases in runs.sessions.items()
            },
            "arrivals": {who: phase.as_object() for who, phase in runs.arrivals.items()},
            "connections": runs.connections.as_object() if runs.connections else None,
            "overhead": asdict(runs.overhead) if runs.overhead else None,
        },
        dtype=runs.folder.dtype,
    )


def _session_lines(
    load: ServeLoad, of: Mapping[str, Mapping[str, Any]], ratio: Mapping[str, float | None]
) -> list[Line]:
    meant = (load.sessions, load.turns, load.system_tokens) == GOAL_SHAPE
    goals = GOALS if meant and load.model is ModelChoice.RANDOM else {}
    compared = _comparison(f"{load.sessions} x {load.turns}", of, ratio, goals)
    errors = of[OURS]["errors"]
    return [*compared, Line("errors", str(errors), str(of[RIVAL]["errors"]), "0", errors == 0)]


def _comparison(
    name: str,
    of: Mapping[str, Mapping[str, Any]],
    ratio: Mapping[str, float | None],
    goals: Mapping[str, float],
) -> list[Line]:
    mine, theirs = of[OURS], of[RIVAL]

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
                line(
                    "first token p95, later turns",
                    "ttft_p95_later_seconds",
                    "ttft_p95_later",
                    lambda x: f"{x:,.2f} s",
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
    errors, most = crowd["errors"], crowd["most_open"]
    return [
        Line(f"{name}: errors", str(errors), "", "0", errors == 0),
        Line(f"{name}: open at once", str(most), "", str(load.connections), None),
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
