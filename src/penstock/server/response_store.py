"""Responses kept in memory, so that a client can continue from a response id.

Limited in bytes and held in the prompt memory; the least recently used are evicted first. Requests
only see responses with their own salt.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

from penstock.server.access import salt_for
from penstock.server.problems import BadRequest, NotFound, ServerError, dumps
from penstock.server.prompt_memory import PromptMemory

SHARE = 4
"""Divisor of the prompt memory that gives the limit for responses."""
ENTRY_BYTES = 1_000

Item = dict[str, Any]


class Kept(NamedTuple):
    items: bytes
    response: bytes

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + len(self.items) + len(self.response)


class ResponseStore:
    """Store of responses and their conversations, by salt (including the key's) and response id."""

    def __init__(self, memory: PromptMemory, max_bytes: int) -> None:
        self._max_bytes = min(max_bytes, memory.pool_bytes // SHARE)
        self._hold = memory.hold(relieves=False)
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._lock = Lock()
        memory.reliefs.append(self.shrink)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return self._hold.nbytes

    def put(
        self, salt: str, response_id: str, items: Sequence[Item], response: dict[str, Any]
    ) -> None:
        kept = Kept(dumps(items), dumps(response))
        if kept.nbytes > self._max_bytes:
            return
        with self._lock:
            self._forget(self._max_bytes - kept.nbytes)
            while not self._grow(kept.nbytes):
                if not self._kept:
                    return
                self._forget(self.nbytes - 1)
            self._kept[salt_for(salt), response_id] = kept

    def shrink(self, nbytes: int) -> None:
        with self._lock:
            self._forget(max(0, self.nbytes - nbytes))

    def _grow(self, nbytes: int) -> bool:
        """Hold `nbytes` more; return False if they are not free."""
        try:
            self._hold.resize(self.nbytes + nbytes)
        except ServerError:
            return False
        return True

    def _forget(self, most_bytes: int) -> None:
        while self._kept and self.nbytes > most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._hold.resize(self.nbytes - gone.nbytes)

    def get(self, salt: str, response_id: str) -> list[Item]:
        with self._lock:
            kept = self._kept.get((salt_for(salt), response_id))
            if kept is not None:
                self._kept.move_to_end((salt_for(salt), response_id))
                return _items(kept)
        raise BadRequest(
            f"previous_response_id: response {response_id[:80]!r} is not stored any more; send the "
            "whole input",
            param="previous_response_id",
            code="previous_response_not_found",
        )

    def response(self, salt: str, response_id: str) -> dict[str, Any]:
        response: dict[str, Any] = json.loads(self._whole(salt, response_id).response)
        return response

    def input_items(self, salt: str, response_id: str) -> list[Item]:
        kept = self._whole(salt, response_id)
        items, output = _items(kept), json.loads(kept.response)["output"]
        return items[: len(items) - len(output)]

    def _whole(self, salt: str, response_id: str) -> Kept:
        with self._lock:
            kept = self._kept.get((salt_for(salt), response_id))
        if kept is None:
            raise _missing(response_id)
        return kept

    def delete(self, salt: str, response_id: str) -> None:
        with self._lock:
            kept = self._kept.pop((salt_for(salt), response_id), None)
            if kept is None:
                raise _missing(response_id)
            self._hold.resize(self.nbytes - kept.nbytes)

    def items(self, salt: str) -> dict[str, Item]:
        full_salt = salt_for(salt)
        with self._lock:
            kept = [kept for (owner, _), kept in self._kept.items() if owner == full_salt]
        items = [item for conversation in kept for item in _items(conversation)]
        return {str(item["id"]): item for item in items if item.get("id")}


def _items(kept: Kept) -> list[Item]:
    items: list[Item] = json.loads(kept.items)
    return items


def _missing(response_id: str) -> NotFound:
    return NotFound(
        f"there is no stored response {response_id[:80]!r}",
        code="response_not_found",
        param="response_id",
    )
