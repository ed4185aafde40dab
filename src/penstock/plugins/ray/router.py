"""Request router for Ray Serve, based on `penstock.routing.Router`."""

# Ray sends this class to every process with a handle by value, so it needs only importable names.
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import ActorDiedError, RayError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.config import WORTH, RoutingPolicy
from penstock.plugins.ray.fleet_state import BEAT_SECONDS, SILENT_SECONDS, fleet_state
from penstock.prefix.block_hashes import HASH_BYTES
from penstock.routing import RoutedPrompt, Router, Summary

logger = logging.getLogger(__name__)

BLOCKS = "penstock_blocks"
METRICS = "penstock_metrics"
LEAST_BLOCKS = 1.0
"""Minimum load of an open request, in blocks; even with a cached prompt, decoding takes time."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray ships no types we could follow
    """Request router that prefers the replica chosen by `penstock.routing.Router`.

    A replica that does not answer for `SILENT_SECONDS` is ejected until it answers again. The load
    of a replica is the number of uncached blocks of open requests sent by this router; requests of
    other doors count by Ray's queue lengths.
    """

    def initialize_state(
        self, policy: RoutingPolicy = "prefix+load", worth: float = WORTH, **_: Any
    ) -> None:
        self._ours = Router(policy, worth=worth)
        self._said: dict[str, bytes] = {}
        self._open: dict[tuple[str, str], float] = {}
        self._there: dict[str, RunningReplica] = {}
        self._heard: dict[str, float] = {}
        """Time of each replica's last answer, from `time.monotonic`."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._beating: asyncio.Task[None] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        there = {_name(replica.replica_id): replica for replica in replicas}
        for name in set(self._there) - set(there):
            self._leave(name)
            self._heard.pop(name, None)
        self._there = there
        texts = {name: replica.routing_stats.get(METRICS, b"") for name, replica in there.items()}
        fleet_state().there({name: bytes(text).decode() for name, text in texts.items()})
        for name in there:
            self._heard.setdefault(name, time.monotonic())
            if not fleet_state().is_ejected(name):
                self._join(name)
        if self._beating is None:
            self._beating = self._event_loop.create_task(self._beat())
        super().update_replicas(replicas)

    def _join(self, name: str) -> None:
        self._ours.join(name)
        blocks = self._there[name].routing_stats.get(BLOCKS)
        if blocks is not None and blocks != self._said.get(name):
            self._said[name] = blocks
            self._ours.update(name, Summary.from_bytes(blocks))

    def _leave(self, name: str) -> None:
        self._ours.leave(name)
        self._said.pop(name, None)

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            for name, replica in self._there.items():
                if name not in self._asking:
                    asking = self._event_loop.create_task(self._ask(name, replica))
                    self._asking[name] = asking
                    asking.add_done_callback(lambda _, name=name: self._asking.pop(name, None))
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            for name in self._there:
                # Do not count delays of this process itself.
                self._heard[name] += max(0.0, now - began - BEAT_SECONDS)
                if now - self._heard[name] > SILENT_SECONDS:
                    self._eject(name, f"has not answered for {SILENT_SECONDS:.0f} s")

    async def _ask(self, name: str, replica: RunningReplica) -> None:
        try:
            await replica.get_queue_len(deadline_s=SILENT_SECONDS)
        except ActorDiedError:
            return self._eject(name, "has died")
        except RayError:  # not reachable now; ejected if that continues
            return None
        if name in self._heard:
            self._heard[name] = time.monotonic()
        if fleet_state().is_ejected(name):
            logger.warning("replica %s is responding again, and receives requests", name)
            fleet_state().readmit(name)
            if name in self._there:
                self._join(name)
        return None

    def _eject(self, name: str, why: str) -> None:
        if not fleet_state().is_ejected(name):
            logger.warning("replica %s %s; sending it no more requests", name, why)
            self._leave(name)
            fleet_state().eject(name)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas by rank: the router's choice, then all others."""
        named = {_name(replica.replica_id): replica for replica in candidate_replicas}
        there = {name: named[name] for name in named if not fleet_state().is_ejected(name)}
        if not there:
            return []  # Ray calls again
        for name in set(there) - set(self._ours.replicas):
            self._ours.join(name)
        routed = self._ours.choose(prompt_of(pending_request), self._loads())
        chosen = there.get(routed.replica)
        others = [replica for replica in there.values() if replica is not chosen]
        return [[chosen], others] if chosen is not None else [others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        name, block_hashes = _name(replica_id), prompt_of(pending_request).block_hashes
        known_blocks = self._ours.known(block_hashes).get(name, 0)
        attempt = pending_request.kwargs.get("attempt", "")
        fleet_state().routed(attempt, name, len(block_hashes), known_blocks)
        if name not in self._ours.replicas:
            return
        missing = len(block_hashes) - known_blocks
        request_id = pending_request.metadata.internal_request_id
        self._open[name, request_id] = LEAST_BLOCKS + missing
        self._ours.sent(name, block_hashes)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.pop((_name(replica_id), internal_request_id), None)

    def _loads(self) -> dict[str, float]:
        loads: dict[str, float] = {}
        for (name, _), blocks in tuple(self._open.items()):
            loads[name] = loads.get(name, 0.0) + blocks
        return loads


def prompt_of(pending: PendingRequest | None) -> RoutedPrompt:
    arguments = {} if pending is None else pending.kwargs
    return RoutedPrompt(split_keys(arguments.get("block_hashes", b"")), arguments.get("cache_key"))


def split_keys(joined: bytes) -> Sequence[bytes]:
    """Split concatenated block hashes.

    >>> split_keys(bytes(32)) == [bytes(16)] * 2
    True
    """
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
