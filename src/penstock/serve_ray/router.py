"""Ray Serve's request router around ours, the one that `penstock bench cluster` simulates."""

# Ray sends this class to every holder of a handle, by value: it names all that it needs by import.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.config import WORTH, RoutingPolicy
from penstock.prefix.block_hashes import HASH_BYTES
from penstock.routing import RoutedPrompt, Router, Summary

BLOCKS = "penstock_blocks"
"""Name of the summary among a replica's routing stats."""
LEAST_BLOCKS = 1.0
"""Blocks that an open request counts at least, though its prompt is cached: its answer takes time,
too."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray ships no types we could follow
    """Ray request router that asks penstock's `Router` for the replica, and has a second choice.

    If that replica takes no more requests, another one gets the request.

    Loads are blocks of the requests that were sent from here and have not ended. Requests of other
    doors count by Ray's queue lengths: a replica with `max_ongoing_requests` is passed over.
    """

    def initialize_state(
        self, policy: RoutingPolicy = "prefix+load", worth: float = WORTH, **_: Any
    ) -> None:
        """Begin without replicas."""
        self._ours = Router(policy, worth=worth)
        self._said: dict[str, bytes] = {}
        self._open: dict[tuple[str, str], float] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the list of replicas, and of the blocks they hold."""
        there = {_name(replica.replica_id): replica for replica in replicas}
        for name in set(self._ours.replicas) - set(there):
            self._ours.leave(name)
            self._said.pop(name, None)
        for name, replica in there.items():
            self._ours.join(name)
            blocks = replica.routing_stats.get(BLOCKS)
            if blocks is not None and blocks != self._said.get(name):
                self._said[name] = blocks
                self._ours.update(name, Summary.from_bytes(blocks))
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas: ours first, then the others."""
        there = {_name(replica.replica_id): replica for replica in candidate_replicas}
        for name in set(there) - set(self._ours.replicas):
            self._ours.join(name)
        routed = self._ours.choose(prompt_of(pending_request), self._loads())
        chosen = there.get(routed.replica)
        others = [replica for replica in candidate_replicas if replica is not chosen]
        return [[chosen], others] if chosen is not None else [others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Expect the prompt in that replica's cache, and add its blocks to the load."""
        name, block_hashes = _name(replica_id), prompt_of(pending_request).block_hashes
        if name not in self._ours.replicas:
            return
        missing = len(block_hashes) - self._ours.known(block_hashes).get(name, 0)
        request_id = pending_request.metadata.internal_request_id
        self._open[name, request_id] = LEAST_BLOCKS + missing
        self._ours.sent(name, block_hashes)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take the request's blocks off the load."""
        self._open.pop((_name(replica_id), internal_request_id), None)

    def _loads(self) -> dict[str, float]:
        loads: dict[str, float] = {}
        for (name, _), blocks in tuple(self._open.items()):
            loads[name] = loads.get(name, 0.0) + blocks
        return loads


def prompt_of(pending: PendingRequest | None) -> RoutedPrompt:
    """Return the prompt that the door has put into a request."""
    given = {} if pending is None else pending.kwargs
    return RoutedPrompt(split_keys(given.get("block_hashes", b"")), given.get("cache_key"))


def split_keys(joined: bytes) -> Sequence[bytes]:
    """Return the keys that were joined.

    >>> split_keys(bytes(32)) == [bytes(16)] * 2
    True
    """
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
