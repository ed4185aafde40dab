"""Load of the server benchmark, and results of its servers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import field_serializer

from penstock_bench.bench_settings import ServeSettings
from penstock_bench.engine_sides import LLAMA, OURS, RIVAL, EngineShape
from penstock_bench.models import LlamaShape, ModelChoice
from penstock_bench.serve_client import (
    Reply,
    Session,
)
from penstock_bench.serve_model import ServedFolder
from penstock_bench.serve_process import (
    Memory,
    ServerCommand,
    llama_cpp,
    ours,
    rival,
)
from penstock_bench.serve_words import Words

CLAIM = "Over HTTP: agents that share a system prompt, against the server of {}"
GOALS = {"throughput": 3.0, "ttft_p95": 5.0, "peak_memory": 2.0}
GOAL_SHAPE = (8, 5, 4_000)
"""Sessions, turns and system prompt tokens of the goals."""
REAL_GOALS = {"throughput": 4.0, "ttft_p95": 5.0, "peak_memory": 3.0}
REAL_SHAPE = (8, 5, 3_000)
"""Sessions, turns and system prompt tokens of the goals for real weights."""
OVERHEAD_GOAL = 0.05
PERCENTS = (50, 95, 99)

Sides = Mapping[str, Callable[[ServedFolder, int], ServerCommand]]
SIDES: Sides = {OURS: ours, RIVAL: rival}


class ServeLoad(ServeSettings):
    """Load of the servers, with their model and codec."""

    model: ModelChoice | str = ModelChoice.RANDOM
    """Random or embedded, or a model with real weights: a folder, a GGUF file or a name."""
    texts: tuple[str, ...] = ()
    """Text files for a real model; empty for sources of Python's library."""
    llama_server: str | None = None
    """Command of llama.cpp's server, as a third side on a GGUF file."""
    mlx_lm: bool = True
    """Whether mlx-lm's server is a side; without it llama.cpp's is the rival."""
    llama: LlamaShape | None = None
    engine: EngineShape = EngineShape()
    """Settings of our engine; only codec settings are used."""
    line_tokens: int = 40
    connection_tokens: int = 16
    overhead_prompt_tokens: int = 200
    overhead_tokens: int = 256

    @field_serializer("llama_server")
    def _without_folder(self, command: str | None) -> str | None:
        """Strip the program's folder, which does not belong in records."""
        if command is None:
            return None
        program, *settings = command.split(" ")
        return " ".join([Path(program).name, *settings])

    @property
    def is_real(self) -> bool:
        """Whether the weights are real."""
        return not isinstance(self.model, ModelChoice)

    def talks(self, words: Words) -> list[Session]:
        """Return the lines of all sessions."""
        sessions = []
        for number in range(self.sessions):
            said = words.lines(number, 2 * self.turns, self.line_tokens)
            first, other = said[: self.turns], said[self.turns :]
            fork = other[2:] if number < self.forks else []
            # Edits begin at the other end, so that few sessions have both.
            edit = other[0] if number >= self.sessions - self.edits else None
            sessions.append(Session(first, fork, edit))
        return sessions


def sides_of(load: ServeLoad) -> Sides:
    """Return the servers of a load."""
    sides: Sides = {**SIDES, OURS: partial(ours, memory_limit=load.memory_limit)}
    if load.llama_server is None:
        return sides
    command = load.llama_server
    sides = {**sides, LLAMA: lambda folder, port: llama_cpp(command, folder, port)}
    return sides if load.mlx_lm else {side: make for side, make in sides.items() if side != RIVAL}


@dataclass(slots=True)
class Phase:
    """One load on one server."""

    seconds: float
    """Seconds from the first request to the last answer."""
    replies: list[Reply]
    memory: Memory
    idle_bytes: int
    """Resident bytes before the load, with the model loaded."""
    start_seconds: float
    high_water_bytes: int | None
    """Peak resident bytes of the process since its start, as reported by the system."""
    most_open: int = 0

    @property
    def good(self) -> list[Reply]:
        """Replies without an error."""
        return [reply for reply in self.replies if reply.error is None]

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second of all answers."""
        return sum(reply.completion_tokens for reply in self.good) / self.seconds

    def as_object(self) -> dict[str, Any]:
        """Return everything for the record; times from the first request."""
        began = min(reply.sent for reply in self.replies)
        return {
            "seconds": self.seconds,
            "start_seconds": self.start_seconds,
            "idle_bytes": self.idle_bytes,
            "peak_bytes": self.memory.peak_bytes,
            "high_water_bytes": self.high_water_bytes,
            "cpu_seconds": self.memory.cpu_seconds,
            "most_open": self.most_open,
            "memory": [[round(seconds, 2), nbytes] for seconds, nbytes in self.memory.samples],
            "replies": [_recorded(reply, began) for reply in self.replies],
        }


def _recorded(reply: Reply, began: float) -> dict[str, Any]:
    stored = asdict(reply)
    del stored["text"]
    stored["text_times"] = [round(received - began, 4) for received in reply.text_times]
    return {**stored, "sent": round(reply.sent - began, 4), "ended": round(reply.ended - began, 4)}


WAYS = ("alone", "streamed", "whole")
"""Engine without a server; HTTP with streaming; HTTP with a single JSON response."""


@dataclass(slots=True)
class Overhead:
    """Times of the same prompts in each way, round by round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Seconds from the first request to the last answer, by way."""
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """Processor time of the engine's process, which is less affected by other programs."""
    client_cpu_seconds: dict[str, list[float]] = field(
        default_factory=lambda: {way: [] for way in WAYS}
    )
    """Processor time of the benchmark as client."""
    tokens: int = 0
    """Tokens of all answers of a round."""

    def share(self, way: str) -> float:
        """Return the median over the rounds of the time added to the engine's alone, as a share."""
        return statistics.median(
            over / alone - 1
            for over, alone in zip(self.seconds[way], self.seconds["alone"], strict=True)
        )


@dataclass(slots=True)
class ServerRuns:
    """All results of the servers."""

    sessions: dict[str, list[Phase]]
    arrivals: dict[str, Phase]
    connections: Phase | None
    overhead: Overhead | None
    folder: ServedFolder
    same_first_answers: dict[str, int] = field(default_factory=dict)
    """Answers of first turns with the same text as ours, by side."""
