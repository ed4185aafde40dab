"""Responses that are kept in memory, so that a client can go on from the id of the last one.

Bounded in bytes: the one that was not asked for the longest goes first. Each belongs to a salt, and
requests of another salt do not see it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

from penstock.server.problems import BadRequest, NotFound, dumps

Item = dict[str, Any]


class Kept(NamedTuple):
    """A conversation, and the response that it ends with."""

    items: list[Item]
    nbytes: int
    response: dict[str, Any]


class ResponseStore:
    """Conversations by salt and the id of their last answer. Any thread may call it.

    Args:
        max_bytes: limit of the conversations as JSON; each counts in full, though they share items.
    """

    def __init__(self, max_bytes: int) -> None:
        self.nbytes = 0
        """Bytes of all conversations, as JSON."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(
        self, salt: str, response_id: str, items: Sequence[Item], response: dict[str, Any]
    ) -> None:
        """Keep a conversation, its last answer included, unless it is larger than all may be."""
        size = len(dumps(items)) + len(dumps(response))
        if size > self._max_bytes:
            return
        with self._lock:
            self._kept[salt, response_id] = Kept(list(items), size, response)
            self.nbytes += size
            while self.nbytes > self._max_bytes:
                _, gone = self._kept.popitem(last=False)
                self.nbytes -= gone.nbytes

    def get(self, salt: str, response_id: str) -> list[Item]:
        """Return a conversation.

        Raises:
            BadRequest: it is not kept, or not any more.
        """
        with self._lock:
            kept = self._kept.get((salt, response_id))
            if kept is not None:
                self._kept.move_to_end((salt, response_id))
                return kept.items
        raise BadRequest(
            f"previous_response_id: there is no response {response_id[:80]!r} any more; send the "
            "whole input",
            param="previous_response_id",
            code="previous_response_not_found",
        )

    def response(self, salt: str, response_id: str) -> dict[str, Any]:
        """Return a response.

        Raises:
            NotFound: it is not kept, or not any more.
        """
        return self._whole(salt, response_id).response

    def input_items(self, salt: str, response_id: str) -> list[Item]:
        """Return the conversation in front of a response, oldest first; raises as `response`."""
        kept = self._whole(salt, response_id)
        return kept.items[: len(kept.items) - len(kept.response["output"])]

    def _whole(self, salt: str, response_id: str) -> Kept:
        with self._lock:
            kept = self._kept.get((salt, response_id))
        if kept is None:
            raise _missing(response_id)
        return kept

    def delete(self, salt: str, response_id: str) -> None:
        """Forget a response; raises as `response`."""
        with self._lock:
            kept = self._kept.pop((salt, response_id), None)
            if kept is None:
                raise _missing(response_id)
            self.nbytes -= kept.nbytes

    def items(self, salt: str) -> dict[str, Item]:
        """Return all items of a salt that have an id."""
        with self._lock:
            kept = [kept.items for (owner, _), kept in self._kept.items() if owner == salt]
        return {str(item["id"]): item for items in kept for item in items if item.get("id")}


def _missing(response_id: str) -> NotFound:
    return NotFound(
        f"there is no response {response_id[:80]!r}, or not any more",
        code="response_not_found",
        param="response_id",
    )
