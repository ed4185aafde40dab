"""Expected time of the server benchmark, from recorded runs, and its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from penstock_bench.engine_sides import LLAMA, OURS, RIVAL
from penstock_bench.report import Notify
from penstock_bench.serve_client import Client, Reply, Send
from penstock_bench.serve_load import ServeLoad
from penstock_bench.serve_model import ServedFolder

EXPECTED = "expected"
"""Description of the first call of a `Notify`, before anything is done."""
KV_SECONDS = {OURS: 1e-10, RIVAL: 2.5e-10, LLAMA: 5e-11}
"""Seconds per byte of preceding KV and token, from runs on two cores of `RECORDED_GFLOPS`."""
WEIGHT_SECONDS = 4e-11
"""Seconds per weight and token, from the same runs."""
START_SECONDS = 10.0
"""Seconds until a server has loaded its model and answered once."""
RECORDED_GFLOPS = 200.0
PROBE_SIZE, PROBES = 1_024, 5


def measured_gflops() -> float:
    """Return the best speed of a few square float32 products on this machine, in GFLOPS."""
    matrix = mx.random.normal((PROBE_SIZE, PROBE_SIZE))
    best = float("inf")
    for _ in range(PROBES):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        best = min(best, time.perf_counter() - began)
    return 2 * PROBE_SIZE**3 / best / 1e9


def expected_seconds(load: ServeLoad, folder: ServedFolder, side: str, gflops: float) -> float:
    """Return the expected seconds of one run of a side's sessions, within about 50 percent.

    Our engine prefills the system prompt once, the others once per session.
    """
    turn_tokens = load.line_tokens + load.answer_tokens
    read = load.system_tokens * (1 if side == OURS else load.sessions)
    turn_text_tokens = load.sessions * load.turns * turn_tokens
    in_front = read * load.system_tokens / 2
    in_front += turn_text_tokens * (load.system_tokens + load.turns * turn_tokens / 2)
    kv_seconds = in_front * folder.kv_bytes_per_token * KV_SECONDS[side]
    weight_seconds = (read + turn_text_tokens) * folder.parameters * WEIGHT_SECONDS
    return START_SECONDS + (kv_seconds + weight_seconds) * RECORDED_GFLOPS / gflops


@dataclass(slots=True)
class ServeProgress:
    """Progress of the sessions in expected seconds, advanced by each reply."""

    notify: Notify
    side_seconds: Mapping[str, float]
    """Expected seconds of one run of each side's sessions."""
    rounds: int = 1
    done_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.notify(EXPECTED, 0, round(self.all_seconds))

    @property
    def all_seconds(self) -> float:
        """Seconds of all sides and rounds."""
        return self.rounds * sum(self.side_seconds.values())

    def counted(self, side: str, send: Send, replies: int) -> Send:
        """Wrap a load of `replies` replies, so that each advances the progress."""
        seconds = self.side_seconds[side] / replies

        async def run(client: Client) -> list[Reply]:
            client.on_reply = lambda: self._add(side, seconds)
            return await send(client)

        self._add(side, 0.0)
        return run

    def _add(self, side: str, seconds: float) -> None:
        self.done_seconds += seconds
        self.notify(side, round(self.done_seconds), round(self.all_seconds))
