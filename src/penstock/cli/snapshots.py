"""Snapshots of a running server, and their one-line summaries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import httpx

from penstock.cli.remote import RemoteError, base_url, connected, on_this_machine, refusal
from penstock.memory.sizes import format_bytes

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""Read timeout in seconds; a server sends two snapshots per second."""

Snapshot: TypeAlias = dict[str, Any]
"""One event of `/v1/live`; see `penstock.server.live.Snapshot`."""


def snapshots(url: str, api_key: str | None, model: str | None = None) -> Iterator[Snapshot]:
    """Yield a server's snapshots as it sends them; `model` selects one of several models."""
    address = base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    with (
        connected(address),
        httpx.stream(
            "GET",
            f"{address}/v1/live",
            params={"model": model} if model else {},
            headers=headers,
            timeout=timeout,
            trust_env=not on_this_machine(address),
        ) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise RemoteError(_refusal(address, answer))
        for snapshot in _parsed(address, answer):
            if model and not snapshot.get("models") and snapshot["model"] != model:
                raise RemoteError(f"{address} serves {snapshot['model']}, and not {model}")
            yield snapshot
    raise RemoteError(f"the server at {address} has ended")


def record(snapshot: Snapshot) -> Snapshot:
    return {name: value for name, value in snapshot.items() if name not in ("tree", "history")}


def line(snapshot: Snapshot) -> str:
    stats = snapshot["stats"]
    name = f"{snapshot['model'] or 'no model'}: " if snapshot.get("models") else ""
    return (
        f"{name}{stats['prefilling'] + stats['restoring'] + stats['running']} running, "
        f"{stats['waiting'] + stats['preempted']} waiting; {used_of(stats)}; "
        f"hit rate {snapshot['hit_rate']:.0%}; "
        f"{snapshot['generated_per_second']:,.0f} tokens/s, "
        f"{snapshot['prefilled_per_second']:,.0f} read"
    )


def used_of(stats: dict[str, Any]) -> str:
    share = stats["used_bytes"] / stats["limit_bytes"]
    used, limit = format_bytes(stats["used_bytes"]), format_bytes(stats["limit_bytes"])
    return f"{used} of {limit} ({share:.0%})"


def _parsed(address: str, answer: httpx.Response) -> Iterator[Snapshot]:
    for row in answer.iter_lines():
        if not row.startswith("data:"):
            continue
        try:
            snapshot = json.loads(row.removeprefix("data:"))
            error = snapshot.get("error")
        except (ValueError, AttributeError):
            raise RemoteError(f"{address} does not answer as penstock serve does") from None
        if error:
            raise RemoteError(f"{address} has stopped: {error.get('message', error)}")
        yield snapshot


def _refusal(address: str, answer: httpx.Response) -> str:
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return f"{address} requires a key; set --api-key or PENSTOCK_API_KEY"
    answer.read()
    if answer.status_code == httpx.codes.NOT_FOUND and "model_not_found" not in answer.text:
        return f"{address} is not a penstock server: it has no /v1/live"
    return refusal(answer)
