"""The snapshots of `/v1/live`, read as a client does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from patience import SOON


@contextmanager
def watching(url: str, **query: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Follow the snapshots of a server."""

    def parsed(answer: httpx.Response) -> Iterator[dict[str, Any]]:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    with httpx.stream("GET", f"{url}/v1/live", params=query, timeout=SOON) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield parsed(answer)
