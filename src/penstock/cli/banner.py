"""Banner of `penstock serve`: address, limits, and an example request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock import __version__, config, memory
from penstock.cli.whole_words import print_line
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.engine.engine import Engine
    from penstock.engine.ranks.process_group import RankGroup
    from penstock.engine.stats import Stats
    from penstock.engine.view import EngineView
    from penstock.tiers.worker import TierStats

SHOWN_LENGTHS = (1_024, 4_096, 16_384, 65_536)
"""Sequence lengths for which the banner shows how many sequences fit."""
CONTINUED = "A penstock is"
NO_TEMPLATE = (
    "template none: the model continues texts (/v1/completions, and the page); "
    "--chat-template FILE, or chatml, lets it chat"
)
EXAMPLE = "The code of the amber falcon is 4821. What is the code of the amber falcon?"

TRY = "try      "
"""Label of the line that shows an example command."""
LABEL_CELLS = len(TRY)


def print_banner(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        if line.startswith(TRY):  # a command to copy, so no line breaks
            console.print(line, soft_wrap=True)
        else:
            print_line(console, line, indent=LABEL_CELLS)


def url_of(settings: config.ServerSettings, port: int) -> str:
    """Return the server's URL for clients on this machine."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"


def banner(
    engine: Engine,
    name: str,
    settings: config.ServerSettings,
    port: int,
    ranks: RankGroup | None = None,
    weights: str | None = None,
    largest_request: int | None = None,
    *,
    chats: bool = True,
) -> list[str]:
    room = engine.ask(partial(_room, within_context=not settings.ignore_model_context)).result()
    url = url_of(settings, port)
    key = "" if not settings.needs_key else ' -H "Authorization: Bearer $PENSTOCK_API_KEY"'
    path, body = "chat/completions", dict[str, Any](messages=[{"role": "user", "content": EXAMPLE}])
    if not chats:
        path, body = "completions", {"prompt": CONTINUED, "max_tokens": 32}
    return [
        f"penstock {__version__} serves {name} on {url}",
        *([] if ranks is None else [_ranks(ranks)]),
        *([] if weights is None else [f"weights  {weights}"]),
        *room,
        *([] if largest_request is None else [largest_line(largest_request)]),
        *([] if chats else [NO_TEMPLATE]),
        "key      "
        + ("none: programs on this machine only" if not settings.needs_key else "needed"),
        f"page     {url}/   (interfaces: {url}/docs, figures: {url}/metrics)",
        f"{TRY}curl {url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'",
    ]


def largest_line(tokens: int) -> str:
    return f"largest  request: prompt and answer of {counted(tokens, 'token')} together"


def _ranks(ranks: RankGroup) -> str:
    return (
        f"ranks    {', '.join(ranks.names)}: each holds 1/{ranks.size} of all layers; sizes are "
        f"per rank, and the rank with the least memory sets the limit"
    )


def _tiers(stats: Stats, limits: config.EngineSettings) -> list[str]:
    from penstock.engine.offload.tier_kinds import TIER_KINDS

    if not stats.tiers:
        return ["disk     none: prefixes end with the server; --ssd-cache-dir keeps them"]
    return [
        f"{name:<8} {TIER_KINDS[name].address(limits)}{_tier_state(tier)}"
        for name, tier in stats.tiers.items()
    ]


def _tier_state(tier: TierStats) -> str:
    if tier.off is not None:
        return f"; off: {tier.off}"
    used = f"; {format_bytes(tier.held_bytes)} held" if tier.limit_bytes else ""
    return used if tier.full is None else f"{used}; nothing is written: {tier.full}"


def _room(view: EngineView, *, within_context: bool) -> list[str]:
    """Describe the limits and how many sequences fit; runs on the engine's thread."""
    stats, limits = view.stats(), view.limits
    free = stats.limit_bytes - stats.used_bytes

    def fit(length: int) -> int:
        sequence = view.sequence_bytes(length)
        return max(0, free - sequence.shared) // sequence.per_sequence

    context = view.context_tokens if within_context else None
    window = min(limits.max_kv_size, context or limits.max_kv_size)
    lengths = [length for length in SHOWN_LENGTHS if length <= window] or [window]
    fitting = [f"{count:,} of {length:,}" for length in lengths if (count := fit(length))]
    tokens = free * SHOWN_LENGTHS[0] // view.sequence_bytes(SHOWN_LENGTHS[0]).per_sequence
    coded = ""
    if view.codec_name is not None:
        more = round(tokens * view.token_bytes / view.coded_token_bytes)
        coded = f", {more:,} held as {view.codec_name}"
    weights = stats.by_kind.get("weights", 0)
    machine_bytes = memory.read_machine_memory({}).total_bytes
    over = stats.limit_bytes > machine_bytes
    return [
        f"memory   limit {format_bytes(stats.limit_bytes)}: weights {format_bytes(weights)}, "
        f"{format_bytes(free)} free for KV"
        + (
            f"; more than this machine has: {format_bytes(machine_bytes)}; lower --memory-limit"
            if over
            else ""
        ),
        f"fits     about {counted(tokens, 'token')} of KV{coded}; in sequences: "
        + (", ".join(fitting) or f"none of {lengths[0]:,}; raise --memory-limit for longer"),
        *_tiers(stats, limits),
        f"limits   {counted(window, 'token')} a sequence, {limits.max_batch_size} sequences at "
        f"a time, {limits.max_queue} waiting, blocks of {limits.block_size}",
    ]
