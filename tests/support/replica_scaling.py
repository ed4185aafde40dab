"""Script: load on one replica until there are two, then idle until none is left, and again one."""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx
import ray
from ray import serve
from talking_agents import session

from penstock.config import ServerSettings
from penstock.plugins.ray.application import NAME, Fleet, running
from penstock.plugins.ray.replica import Served
from penstock.recall import MODEL_PATH

SECONDS = 150.0


def replicas() -> int:
    """Return the number of running replicas."""
    deployments = serve.status().applications[NAME].deployments
    return sum(
        n for state, n in deployments["replica"].replica_states.items() if state == "RUNNING"
    )


def until(count: int, counts: list[int]) -> None:
    """Wait until this number of replicas runs."""
    end = time.monotonic() + SECONDS
    while counts[-1] != count:
        assert time.monotonic() < end, f"{counts} replicas, not {count}"
        time.sleep(0.2)
        now = replicas()
        if now != counts[-1]:
            counts.append(now)


def main(folder: str, port: int) -> None:
    """Print the observations as one JSON line."""
    served = Served(
        str(MODEL_PATH),
        "recall",
        ServerSettings(port=port, drain_timeout_seconds=20.0),
        {
            "memory_limit": "80MB",
            "block_size": 16,
            "max_batch_size": 2,
            "max_queue": 64,
            "ssd_cache_dir": folder,
        },
    )
    fleet = Fleet(replicas=1, max_replicas=2, cpus=0.25, upscale_seconds=1.0, downscale_seconds=3.0)
    ray.init(include_dashboard=False, log_to_driver=False)
    with running(served, fleet) as url:
        counts = [replicas()]
        left = leave(url)
        stop, failed = threading.Event(), []
        agents = [threading.Thread(target=work, args=(url, i, stop, failed)) for i in range(6)]
        for agent in agents:
            agent.start()
        until(2, counts)
        time.sleep(5)  # both are at work
        stop.set()
        for agent in agents:
            agent.join(SECONDS)
        until(1, counts)
        # What the one that has gone had computed was written, and the other one finds it.
        found = [session(url, number, 2) for number in range(6)]
    ray.shutdown()
    prompt, hit = (sum(one[i] for one in found) for i in (0, 1))
    seen = {"counts": counts, "failed": failed, "running": left, "hit_rate_after": hit / prompt}
    print(json.dumps(seen))


def leave(url: str) -> list[int]:
    """Begin to read a long answer, go away, and return how many ran before and after."""
    body = {
        "prompt": "the amber falcon",
        "max_tokens": 5_000,
        "stream": True,
        "logit_bias": {"2": -100},  # without the end of an answer
    }

    def busy() -> int:
        answer = httpx.get(f"{url}/v1/cache/stats", timeout=60).json()
        return int(answer["stats"]["running"])

    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()  # kept: one that is dropped closes the stream
        next(lines)
        before = busy()
    end = time.monotonic() + 3
    while (after := busy()) and time.monotonic() < end:
        time.sleep(0.1)
    return [before, after]


def work(url: str, number: int, stop: threading.Event, failed: list[str]) -> None:
    while not stop.is_set():
        try:
            session(url, number, 2)
        except Exception as error:  # noqa: BLE001 - counted, and the test fails of it
            failed.append(repr(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
