"""The snapshots of a running server as they come, and what a terminal shows of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.remote import RemoteError
from penstock.errors import SettingError
from penstock.memory import format_bytes

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""Seconds without a snapshot after which a server is taken for lost; it sends two a second."""
BAR_CELLS = 48
FRAME_LINES = 12
"""Lines of a drawing that are not a request's."""

Snapshot: TypeAlias = dict[str, Any]
"""Body of `/v1/live`; see `penstock.server.live.Snapshot`."""

COLORS = {
    "weights": "bright_black",
    "buffers": "magenta",
    "prompts": "red",
    "index": "bright_magenta",
    "checkpoints": "green",
    "tails": "yellow",
    "nodes": "cyan",
}
"""Colors of the memory bar, from the most lasting kind of memory to the least."""
STATES = {"done": "green", "running": "cyan", "waiting": "yellow", "failed": "red"}


def snapshots(url: str, api_key: str | None) -> Iterator[Snapshot]:
    """Yield what the server tells, twice a second, for as long as it does.

    Raises:
        SettingError: `url` is not one of HTTP.
        RemoteError: there is no server, it wants a key, or it is gone.
    """
    address = _address(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    try:
        with httpx.stream("GET", f"{address}/v1/live", headers=headers, timeout=timeout) as answer:
            if answer.status_code != httpx.codes.OK:
                raise RemoteError(_refusal(address, answer))
            yield from _parsed(address, answer)
    except httpx.ConnectError:
        raise RemoteError(
            f"no server answers at {address}; start one with penstock serve, or name it with --url"
        ) from None
    except httpx.HTTPError as error:
        raise RemoteError(f"{address} is lost: {str(error) or type(error).__name__}") from error
    raise RemoteError(f"{address} has stopped")


def record(snapshot: Snapshot) -> Snapshot:
    """Return the figures alone: the tree has its own address, and the past its own lines."""
    return {name: value for name, value in snapshot.items() if name not in ("tree", "history")}


def line(snapshot: Snapshot) -> str:
    """Say a snapshot in one line."""
    stats = snapshot["stats"]
    return (
        f"{stats['prefilling'] + stats['restoring'] + stats['running']} running, "
        f"{stats['waiting'] + stats['preempted']} waiting; {_used(stats)}; "
        f"hit rate {snapshot['hit_rate']:.0%}; "
        f"{snapshot['generated_per_second']:,.0f} tokens/s, "
        f"{snapshot['prefilled_per_second']:,.0f} read"
    )


def drawn(snapshot: Snapshot, url: str, height: int) -> RenderableType:
    """Draw a snapshot.

    Args:
        snapshot: what the server has told.
        url: where it is, for the title.
        height: lines of the terminal; as many requests are shown as fit.
    """
    title = Text.assemble(
        ("penstock ", "bold"),
        f"{snapshot['version']}  {snapshot['model']}  ",
        (url, "bright_black"),
    )
    requests = snapshot["requests"][::-1][: max(1, height - FRAME_LINES)]
    return Group(title, Text(), _figures(snapshot), Text(), _requests(requests))


def _figures(snapshot: Snapshot) -> Table:
    stats = snapshot["stats"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black")
    table.add_column()
    table.add_row("memory", _bar(stats))
    table.add_row("", _used(stats))
    table.add_row("", _legend(stats["by_kind"]))
    table.add_row(
        "cache",
        f"hit rate {snapshot['hit_rate']:.0%}: {stats['hit_tokens']:,} of "
        f"{stats['prompt_tokens']:,} prompt tokens, {stats['restored_tokens']:,} restored; "
        f"{stats['held_tokens']:,} tokens held, "
        f"{format_bytes(stats['evicted_bytes'])} evicted",
    )
    for name, tier in stats["tiers"].items():
        table.add_row(name, _tier(tier))
    table.add_row(
        "speed",
        f"{snapshot['generated_per_second']:,.0f} tokens/s generated, "
        f"{snapshot['prefilled_per_second']:,.0f} tokens/s of prompts read",
    )
    table.add_row(
        "queue",
        f"{stats['running']} running, {stats['prefilling']} reading, "
        f"{stats['restoring']} restoring, {stats['waiting']} waiting, "
        f"{stats['preempted']} preempted; at most {snapshot['max_batch_size']} at once",
    )
    return table


def _tier(tier: dict[str, Any]) -> str:
    """Return the figures of a cold tier in one line."""
    if tier["off"] is not None:
        return f"off: {tier['off']}"
    counts = tier["counts"]
    parts = [
        f"{counts['read_blocks']:,} blocks read ({format_bytes(counts['read_bytes'])}), "
        f"{counts['written_blocks']:,} written ({format_bytes(counts['written_bytes'])})"
    ]
    if tier["limit_bytes"]:
        parts.insert(
            0, f"{format_bytes(tier['held_bytes'])} of {format_bytes(tier['limit_bytes'])}"
        )
    if tier["full"] is not None:
        parts.append(f"nothing is written now: {tier['full']}")
    return "; ".join(parts)


def _bar(stats: dict[str, Any]) -> Text:
    """Draw the ledger against its limit, a color for each kind."""
    bar = Text()
    filled = total = 0
    for kind, color in COLORS.items():
        total += stats["by_kind"].get(kind, 0)
        cells = min(BAR_CELLS, round(BAR_CELLS * total / stats["limit_bytes"]))
        bar.append("█" * (cells - filled), color)
        filled = cells
    return bar.append("░" * (BAR_CELLS - filled), "bright_black").append("▏", "red")


def _legend(by_kind: dict[str, int]) -> Text:
    legend = Text()
    for kind, color in COLORS.items():
        if nbytes := by_kind.get(kind, 0):
            legend.append("■ ", color).append(f"{kind} {format_bytes(nbytes)}  ")
    return legend


def _used(stats: dict[str, Any]) -> str:
    share = stats["used_bytes"] / stats["limit_bytes"]
    used, limit = format_bytes(stats["used_bytes"]), format_bytes(stats["limit_bytes"])
    return f"{used} of {limit} ({share:.0%})"


def _requests(requests: list[dict[str, Any]]) -> RenderableType:
    if not requests:
        return Text("no requests yet", "bright_black")
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    table.add_column("request", no_wrap=True)
    for title in ("prompt", "cached", "answer", "first", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for request in requests:
        state = request["state"]
        table.add_row(
            request["label"],
            f"{request['prompt_tokens']:,}",
            f"{request['cached_tokens']:,}",
            f"{request['completion_tokens']:,}",
            _seconds(request["first_token_seconds"]),
            _speed(request["tokens_per_second"]),
            Text(request["finish"] or state, STATES.get(state, "")),
        )
    return table


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"{speed:,.0f}"


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


def _address(url: str) -> str:
    """Return the URL without a slash or `/v1` at its end."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SettingError(f"--url {url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SettingError(f"--url {url} is not a URL like http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")


def _refusal(address: str, answer: httpx.Response) -> str:
    """Say in one line why there are no snapshots."""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return f"{address} wants another key; give it with --api-key or PENSTOCK_API_KEY"
    if answer.status_code == httpx.codes.NOT_FOUND:
        return f"{address} is no penstock server: it has no /v1/live"
    answer.read()
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = answer.reason_phrase
    return f"{address} answers {answer.status_code}: {said}"
