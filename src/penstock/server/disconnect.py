"""Detection of clients that disconnect while their request is processed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from penstock.server.problems import ClientGone

T = TypeVar("T")


async def until_gone(http: HttpRequest, doing: Awaitable[T]) -> T:
    """Await `doing`; if the client disconnects first, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(doing)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has closed the connection")
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
