"""Responses that are kept in memory, so that a client can go on from the id of the last one.

Bounded in bytes, which stand in the ledger with the prompts: the one that was not asked for the
longest goes first. Each belongs to a salt, and requests of another salt do not see it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

from penstock.server.problems import BadRequest, NotFound, ServerError, dumps
from penstock.server.prompt_memory import PromptMemory

SHARE = 4
"""Divisor of the memory for prompts that gives the most that responses take of it."""
ENTRY_BYTES = 1_000
"""Python overhead of a conversation, at most, in bytes."""

Item = dict[str, Any]


class Kept(NamedTuple):
    """A conversation, and the response that it ends with, as JSON."""

    items: bytes
    response: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, at most."""
        return ENTRY_BYTES + len(self.items) + len(self.response)


class ResponseStore:
    """Conversations by salt and the id of their last answer. Any thread may call it.

    They take at most a share of the memory for prompts, and less when open requests need it: the
    bytes of each are held before it is kept.

    Args:
        memory: the server's for prompts, which counts them, and takes them when it is short.
        max_bytes: limit of the conversations; each counts in full, though they share items.
    """

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
        """Bytes of all conversations, held in the memory for prompts."""
        return self._hold.nbytes

    def put(
        self, salt: str, response_id: str, items: Sequence[Item], response: dict[str, Any]
    ) -> None:
        """Keep a conversation, its last answer included, if there is memory for it.

        Older ones go first; one that is larger than all may be is not kept.
        """
        kept = Kept(dumps(items), dumps(response))
        if kept.nbytes > self._max_bytes:
            return
        with self._lock:
            self._forget(self._max_bytes - kept.nbytes)
            while not self._grow(kept.nbytes):
                if not self._kept:
                    return
                self._forget(self.nbytes - 1)
            self._kept[salt, response_id] = kept

    def shrink(self, nbytes: int) -> None:
        """Forget conversations until so many bytes are free, or none is left."""
        with self._lock:
            self._forget(max(0, self.nbytes - nbytes))

    def _grow(self, nbytes: int) -> bool:
        """Hold more bytes; False if open requests have them."""
        try:
            self._hold.resize(self.nbytes + nbytes)
        except ServerError:
            return False
        return True

    def _forget(self, most_bytes: int) -> None:
        """Forget the oldest until no more bytes are held."""
        while self._kept and self.nbytes > most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._hold.resize(self.nbytes - gone.nbytes)

    def get(self, salt: str, response_id: str) -> list[Item]:
        """Return a conversation.

        Raises:
            BadRequest: it is not kept, or not any more.
        """
        with self._lock:
            kept = self._kept.get((salt, response_id))
            if kept is not None:
                self._kept.move_to_end((salt, response_id))
                return _items(kept)
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
        response: dict[str, Any] = json.loads(self._whole(salt, response_id).response)
        return response

    def input_items(self, salt: str, response_id: str) -> list[Item]:
        """Return the conversation in front of a response, oldest first; raises as `response`."""
        kept = self._whole(salt, response_id)
        items, output = _items(kept), json.loads(kept.response)["output"]
        return items[: len(items) - len(output)]

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
            self._hold.resize(self.nbytes - kept.nbytes)

    def items(self, salt: str) -> dict[str, Item]:
        """Return all items of a salt that have an id."""
        with self._lock:
            kept = [kept for (owner, _), kept in self._kept.items() if owner == salt]
        return {str(item["id"]): item for one in kept for item in _items(one) if item.get("id")}


def _items(kept: Kept) -> list[Item]:
    items: list[Item] = json.loads(kept.items)
    return items


def _missing(response_id: str) -> NotFound:
    return NotFound(
        f"there is no response {response_id[:80]!r}, or not any more",
        code="response_not_found",
        param="response_id",
    )
