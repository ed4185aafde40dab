"""`penstock bench trace`: hit rate of eviction policies on replayed conversations."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.prefix import HalfLife, Policy, hash_blocks, root_hash
from penstock_bench.blank import BlankPrefixes
from penstock_bench.report import Line, Report

CLAIM = "What a bounded cache keeps is worth more than what was used last"
RIVAL = "lru"
MOONCAKE_CONVERSATION = (12_031, 182_790)
"""Requests and unique blocks of the trace with goals."""
GOALS = {0.02: 0.120, 0.10: 0.294, 0.25: 0.360}
"""Goals by share of the blocks: the better hit rate of LRU and GDSF. Other traces: LRU's."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a trace: time, lengths, and block ids."""

    seconds: float
    input_tokens: int
    blocks: tuple[int, ...]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order."""

    visits: Sequence[Visit]
    block_tokens: int
    unique_blocks: int
    input_tokens: int

    def tokens_of(self, visit: Visit, blocks: int) -> int:
        """Return the tokens of the visit's first blocks; its last block may be partly filled."""
        return min(blocks * self.block_tokens, visit.input_tokens)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Capacities of a replay, and the node size."""

    shares: Sequence[float] = (0.01, 0.02, 0.05, 0.10, 0.25, 0.50)
    """Capacities, as shares of the trace's unique blocks."""
    node_blocks: int = 4
    """Maximum blocks of a node; nodes are evicted whole."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Figures of one pass over a trace."""

    hit_tokens: int
    hit_rate: float
    """Share of all input tokens that were cached."""
    evictions: int
    nodes_at_end: int
    requests_per_second: float
    """Requests per second of the index: hashing, match, pin, evictions, inserts."""


class LeastRecent:
    """Plain least-recently-used policy, for comparison."""

    def __init__(self) -> None:
        self._uses = 0

    @property
    def nbytes(self) -> int:
        return 0

    def used(self, heat: float, now_seconds: float) -> float:
        self._uses += 1
        return self._uses

    def joined(self, heat: float, nbytes: int, other: float, other_nbytes: int) -> float:
        return max(heat, other)

    def worth(self, heat: float, start: int, end: int, nbytes: int) -> float:
        return heat

    def forget(self, key: bytes, heat: float, last_used_seconds: float) -> None:
        """Remember nothing."""

    def recall(self, key: bytes) -> float:
        return -inf


def read_trace(file: Path) -> Trace:
    """Read JSON lines with `timestamp` (ms), `input_length` and `hash_ids`, as in Mooncake.

    Raises:
        SettingError: the file is missing, or a line has another format.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read the trace {file}: {error}") from None
    visits: list[Visit] = []
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            blocks = tuple(int(block) for block in raw["hash_ids"])
            seconds = float(raw["timestamp"]) / 1e3
            if visits:  # one after the other, also where the clock says at once
                seconds = max(seconds, visits[-1].seconds + 1e-6)
            output_tokens = int(raw.get("output_length", 0))
            visits.append(Visit(seconds, int(raw["input_length"]), blocks, output_tokens))
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(f"{file}, line {number} is not a request: {error!r}") from None
    fullest = max(visits, key=lambda visit: len(visit.blocks), default=None)
    if fullest is None or not fullest.blocks:
        raise SettingError(f"{file} holds no request")
    return Trace(
        visits,
        _block_tokens(visits),
        len({block for visit in visits for block in visit.blocks}),
        sum(visit.input_tokens for visit in visits),
    )


def _block_tokens(visits: Sequence[Visit]) -> int:
    """Return the smallest power of two that fits every visit's blocks: 512 in Mooncake's traces."""
    largest = max(visit.input_tokens / len(visit.blocks) for visit in visits if visit.blocks)
    size = 1
    while size < largest:
        size *= 2
    return size


def replay(trace: Trace, capacity_blocks: int, policy: Policy, node_blocks: int) -> Replay:
    """Send every request through a tree of at most `capacity_blocks` blocks.

    Block ids of the trace are hashed as tokens are.
    """
    prefixes = BlankPrefixes(capacity_blocks, policy, node_blocks)
    root = root_hash("trace")
    hit_tokens = 0
    began = time.perf_counter()
    for visit in trace.visits:
        matched = prefixes.serve(visit.blocks, hash_blocks(visit.blocks, 1, root), visit.seconds)
        hit_tokens += trace.tokens_of(visit, matched)
    seconds = time.perf_counter() - began
    prefixes.check()
    return Replay(
        hit_tokens,
        hit_tokens / trace.input_tokens,
        prefixes.evictions,
        len(prefixes.tree),
        len(trace.visits) / seconds,
    )


def optimum(trace: Trace, capacity_blocks: int) -> float:
    """Return the hit rate of the optimal policy, which evicts the block needed last.

    Blocks never needed again are not kept at all. A block's parent is needed no later than the
    block itself, so the kept blocks make whole paths where it matters.
    """
    never = len(trace.visits)
    next_visits: list[list[int]] = []
    coming: dict[int, int] = {}
    for number in range(never - 1, -1, -1):
        blocks = trace.visits[number].blocks
        next_visits.append([coming.get(block, never) for block in blocks])
        coming.update(dict.fromkeys(blocks, number))
    next_visits.reverse()
    kept: dict[int, int] = {}
    latest_first: list[tuple[int, int, int]] = []
    hit_tokens = 0
    for visit, needed_next in zip(trace.visits, next_visits, strict=True):
        matched = next((i for i, b in enumerate(visit.blocks) if b not in kept), len(visit.blocks))
        hit_tokens += trace.tokens_of(visit, matched)
        for depth, (block, needed) in enumerate(zip(visit.blocks, needed_next, strict=True)):
            kept.pop(block, None)
            if needed < never:
                kept[block] = needed
                heapq.heappush(latest_first, (-needed, -depth, block))
        while len(kept) > capacity_blocks:
            needed, _, block = heapq.heappop(latest_first)
            if kept.get(block) == -needed:
                del kept[block]
    return hit_tokens / trace.input_tokens


POLICIES: dict[str, Callable[[], Policy]] = {"penstock": HalfLife, RIVAL: LeastRecent}


def measure(file: Path, load: TraceLoad) -> Report:
    """Replay the trace at every capacity, with our policy and with plain LRU."""
    trace = read_trace(file)
    replays: dict[float, dict[str, Replay]] = {}
    optima: dict[float, float] = {}
    for share in load.shares:
        blocks = max(1, int(share * trace.unique_blocks))
        optima[share] = optimum(trace, blocks)
        replays[share] = {
            side: replay(trace, blocks, make(), load.node_blocks) for side, make in POLICIES.items()
        }
    return report(trace, load, replays, optima)


def report(
    trace: Trace,
    load: TraceLoad,
    replays: dict[float, dict[str, Replay]],
    optima: dict[float, float],
) -> Report:
    """Compare the hit rates; ours must never be below LRU's."""
    known = (len(trace.visits), trace.unique_blocks) == MOONCAKE_CONVERSATION
    goals = {share: GOALS.get(share, 0.0) if known else 0.0 for share in load.shares}
    return Report(
        name="trace",
        claim=CLAIM,
        rival=RIVAL,
        penstock=_figures(replays, "penstock"),
        rival_figures=_figures(replays, RIVAL),
        ratio={
            # Above 1 is better for us, so hits are ours over theirs.
            _name(share): round(of["penstock"].hit_tokens / max(1, of[RIVAL].hit_tokens), 3)
            for share, of in replays.items()
        },
        goal={
            "not_below_lru": True,
            "hit_rate": {_name(share): goal for share, goal in goals.items() if goal},
            "optimum_hit_rate": {_name(share): round(best, 4) for share, best in optima.items()},
        },
        met=all(_met(of, goals[share]) for share, of in replays.items()),
        lines=[
            *(_line(share, of, optima[share], goals[share]) for share, of in replays.items()),
            _speed_line(replays),
        ],
        raw={
            "load": asdict(load),
            "visits": len(trace.visits),
            "unique_blocks": trace.unique_blocks,
            "input_tokens": trace.input_tokens,
            "replays": {
                _name(share): {side: asdict(replay) for side, replay in of.items()}
                for share, of in replays.items()
            },
        },
        dtype="none",
    )


def _figures(replays: dict[float, dict[str, Replay]], side: str) -> dict[str, Any]:
    return {
        "hit_rate": {_name(share): round(of[side].hit_rate, 4) for share, of in replays.items()},
        "requests_per_second": round(_slowest(replays, side)),
    }


def _slowest(replays: dict[float, dict[str, Replay]], side: str) -> float:
    return min(of[side].requests_per_second for of in replays.values())


def _speed_line(replays: dict[float, dict[str, Replay]]) -> Line:
    ours, theirs = (f"{_slowest(replays, side):,.0f}" for side in ("penstock", RIVAL))
    return Line("requests/s of the index, least of all", ours, theirs)


def _met(of: dict[str, Replay], goal: float) -> bool:
    ours, theirs = of["penstock"], of[RIVAL]
    return ours.hit_tokens >= theirs.hit_tokens and ours.hit_rate >= goal


def _line(share: float, of: dict[str, Replay], best: float, goal: float) -> Line:
    bound = max(goal, of[RIVAL].hit_rate)
    return Line(
        f"hits at {_name(share)} of the blocks, of {100 * best:.1f} %",
        f"{100 * of['penstock'].hit_rate:.2f} %",
        f"{100 * of[RIVAL].hit_rate:.2f} %",
        f">= {100 * bound:.2f} %",
        _met(of, goal),
    )


def _name(share: float) -> str:
    return f"{100 * share:g}%"
