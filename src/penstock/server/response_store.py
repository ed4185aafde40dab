"""Responses that are kept in memory, so that a client can go on from the id of the last one.

Bounded in bytes: the one that was not asked for the longest goes first. Each belongs to a salt, and
requests of another salt do not see it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from penstock.server.problems import BadRequest, dumps

Item = dict[str, Any]


class ResponseStore:
    """Conversations by salt and the id of their last answer. Any thread may call it.

    Args:
        max_bytes: of the conversations, as JSON; each counts in full, though they share items.
    """

    def __init__(self, max_bytes: int) -> None:
        self.nbytes = 0
        """Of all conversations, as JSON."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[list[Item], int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, salt: str, response_id: str, items: Sequence[Item]) -> None:
        """Keep a conversation, its last answer included, unless it is larger than all may be."""
        size = len(dumps(items))
        if size > self._max_bytes:
            return
        with self._lock:
            self._kept[salt, response_id] = (list(items), size)
            self.nbytes += size
            while self.nbytes > self._max_bytes:
                _, (_, gone) = self._kept.popitem(last=False)
                self.nbytes -= gone

    def get(self, salt: str, response_id: str) -> list[Item]:
        """Return a conversation.

        Raises:
            BadRequest: it is not kept, or not any more.
        """
        with self._lock:
            found = self._kept.get((salt, response_id))
            if found is not None:
                self._kept.move_to_end((salt, response_id))
                return found[0]
        raise BadRequest(
            f"previous_response_id: there is no response {response_id[:80]!r} any more; send the "
            "whole input",
            param="previous_response_id",
            code="previous_response_not_found",
        )

    def items(self, salt: str) -> dict[str, Item]:
        """Return all items of a salt that have an id."""
        with self._lock:
            kept = [items for (owner, _), (items, _) in self._kept.items() if owner == salt]
        return {str(item["id"]): item for items in kept for item in items if item.get("id")}
