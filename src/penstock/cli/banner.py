"""Banner of `penstock serve`: its address, its limits, and a request to try."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock import __version__, config, memory
from penstock.memory import format_bytes

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.ranks.process_group import RankGroup
    from penstock.engine.stats import Stats
    from penstock.engine.view import EngineView
    from penstock.tiers.worker import TierStats

SHOWN_LENGTHS = (1_024, 4_096, 16_384, 65_536)
"""Tokens of the sequences that the banner counts."""
EXAMPLE = "The code of the amber falcon is 4821. What is the code of the amber falcon?"


def banner(
    engine: Engine,
    name: str,
    settings: config.ServerSettings,
    port: int,
    ranks: RankGroup | None = None,
    weights: str | None = None,
    largest_request: int | None = None,
) -> list[str]:
    """Return the lines of the banner: model, address, limits, and a request to try.

    Args:
        engine: the engine that answers.
        name: of the model.
        settings: of the server.
        port: that it listens on.
        ranks: the machines of the model; None for one.
        weights: line about the dtype of the weights; None for none.
        largest_request: most tokens of a prompt and its answer together; None leaves it out.
    """
    room = engine.ask(_room).result()
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $PENSTOCK_API_KEY"'
    body = {"messages": [{"role": "user", "content": EXAMPLE}]}
    return [
        f"penstock {__version__} serves {name} on {url}",
        *([] if ranks is None else [_ranks(ranks)]),
        *([] if weights is None else [f"weights  {weights}"]),
        *room,
        *([] if largest_request is None else [largest_line(largest_request)]),
        "key      "
        + ("none: programs on this machine only" if settings.api_key is None else "needed"),
        f"page     {url}/   (interfaces: {url}/docs, figures: {url}/metrics)",
        f"try      curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'",
    ]


def largest_line(tokens: int) -> str:
    """Write the size of the largest request."""
    return f"largest  request: prompt and answer of {tokens:,} tokens together"


def _ranks(ranks: RankGroup) -> str:
    """Print the ranks that compute the model, and the scope of the figures below."""
    return (
        f"ranks    {', '.join(ranks.names)}: each holds 1/{ranks.size} of all layers; bytes are "
        f"of one rank, and the one with the least room decides"
    )


def _tiers(stats: Stats, limits: config.EngineSettings) -> list[str]:
    """Return a line for each cold tier, or one that says that there is none."""
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
    held = f"; {format_bytes(tier.held_bytes)} held" if tier.limit_bytes else ""
    return held if tier.full is None else f"{held}; nothing is written: {tier.full}"


def _room(view: EngineView) -> list[str]:
    """Describe the limits and the requests that fit; runs on the engine's thread."""
    stats, limits = view.stats(), view.limits
    free = stats.limit_bytes - stats.used_bytes

    def fit(length: int) -> int:
        sequence = view.sequence_bytes(length)
        return max(0, free - sequence.shared) // sequence.own

    window = limits.max_kv_size
    lengths = [length for length in SHOWN_LENGTHS if length <= window] or [window]
    fitting = [f"{count:,} of {length:,}" for length in lengths if (count := fit(length))]
    tokens = free * SHOWN_LENGTHS[0] // view.sequence_bytes(SHOWN_LENGTHS[0]).own
    held = ""
    if view.codec_name is not None:
        more = round(tokens * view.token_bytes / view.coded_token_bytes)
        held = f", {more:,} held as {view.codec_name}"
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
        f"fits     about {tokens:,} tokens of KV{held}; in sequences: "
        + (", ".join(fitting) or f"none of {lengths[0]:,}; raise --memory-limit for longer"),
        *_tiers(stats, limits),
        f"limits   {limits.max_kv_size:,} tokens a sequence, {limits.max_batch_size} sequences at "
        f"a time, {limits.max_queue} waiting, blocks of {limits.block_size}",
    ]
