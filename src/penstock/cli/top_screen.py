"""Screen of `penstock top`: one snapshot, laid out for the terminal's size."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.snapshots import Snapshot, used_of
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted

BAR_CELLS = 48
LABEL_CELLS = 9
ROOMY_LINES = 20
"""Minimum terminal height at which blank lines and the legend are shown."""
ROOMY_CELLS = 76
"""Minimum terminal width at which all columns of requests are shown."""

COLORS = {
    "weights": "bright_black",
    "draft": "bright_blue",
    "buffers": "magenta",
    "prompts": "red",
    "grammars": "bright_red",
    "index": "bright_magenta",
    "checkpoints": "green",
    "tails": "yellow",
    "key_index": "blue",
    "nodes": "cyan",
}
"""Colors of the memory bar by kind of memory, from permanent to short-lived."""
STATES = {"done": "green", "running": "cyan", "waiting": "yellow", "failed": "red"}


def drawn(snapshot: Snapshot, url: str, width: int, height: int) -> RenderableType:
    """Lay out a snapshot; the last requests fill the remaining lines."""
    rows = _rows(snapshot, width - LABEL_CELLS, height >= ROOMY_LINES)
    figures = Table.grid(padding=(0, 2, 0, 0))
    figures.add_column(style="bright_black", width=LABEL_CELLS - 2)
    figures.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in rows:
        figures.add_row(name, value)
    blank = [Text()] if height >= ROOMY_LINES else []
    # Lines besides the rows: title, blank lines, table header, cursor.
    left = height - len(rows) - 3 - 2 * len(blank)
    requests = snapshot["requests"][::-1][: max(1, left)]
    table = _requests(requests, all_columns=width >= ROOMY_CELLS)
    return Group(_title(snapshot, url, width), *blank, figures, *blank, table)


def _title(snapshot: Snapshot, url: str, width: int) -> Text:
    end = "q: quit"
    version, model = snapshot["version"], snapshot["model"] or "no model is loaded"
    room = width - len(end) - 2
    rest = _fitting(
        room,
        f"penstock {version}  {model}  {url}",
        f"penstock  {model}  {url}",
        f"penstock  {url}",
        "penstock",
    )
    title = Text(rest)
    title.stylize("bold", 0, len("penstock"))
    if rest.endswith(url):
        title.stylize("bright_black", len(rest) - len(url))
    title.pad_right(max(2, width - title.cell_len - len(end)))
    return title.append(end, "bright_black")


def _rows(snapshot: Snapshot, cells: int, roomy: bool) -> list[tuple[str, RenderableType]]:
    stats = snapshot["stats"]
    used = used_of(stats)
    bar_cells = min(BAR_CELLS, cells - len(used) - 3)
    memory = _bar(stats, max(8, bar_cells)).append(f" {used}")
    rows: list[tuple[str, RenderableType]] = [("memory", memory)]
    if roomy:
        rows += [("", line) for line in _legend(stats["by_kind"], cells)]
    if models := snapshot.get("models"):
        rows += [("models", _fitting(cells, *_models(models)))]
    rows += [
        ("cache", _fitting(cells, *_cache(snapshot))),
        *((name, _tier(tier)) for name, tier in stats["tiers"].items()),
        *([("spilled", _fitting(cells, *_spilled(stats)))] if stats.get("spilling") else []),
        ("speed", _fitting(cells, *_speeds(snapshot))),
        ("queue", _fitting(cells, *_queue(snapshot))),
    ]
    return rows


def _fitting(cells: int, *texts: str) -> str:
    """Return the first text of at most `cells` characters, or the last text.

    >>> _fitting(8, "3 answers wait", "3 wait")
    '3 wait'
    """
    return next((text for text in texts if len(text) <= cells), texts[-1])


def _models(models: list[dict[str, Any]]) -> tuple[str, ...]:
    sizes = {model["name"]: f" {format_bytes(model['size'])}" for model in models if model["size"]}
    pins = {model["name"]: " pinned" for model in models if model["pinned"]}
    states = [(model["name"], model["state"]) for model in models]
    return (
        ", ".join(
            f"{name} {state}{sizes.get(name, '')}{pins.get(name, '')}" for name, state in states
        ),
        ", ".join(f"{name} {state}" for name, state in states),
        f"{sum(state == 'loaded' for _, state in states)} of {len(states)} loaded",
    )


def _cache(snapshot: Snapshot) -> tuple[str, ...]:
    stats = snapshot["stats"]
    hits = f"{stats['hit_tokens']:,} of {stats['prompt_tokens']:,} prompt tokens"
    rate = f"hit rate {snapshot['hit_rate']:.0%}"
    cached = f"{counted(stats['held_tokens'], 'token')} cached"
    evicted = f"{format_bytes(stats['evicted_bytes'])} evicted"
    return (
        f"{rate}: {hits}, {stats['restored_tokens']:,} restored; {cached}, {evicted}",
        f"{rate}: {hits}; {cached}",
        f"{rate}: {hits}",
        rate,
    )


def _speeds(snapshot: Snapshot) -> tuple[str, ...]:
    generated, read = snapshot["generated_per_second"], snapshot["prefilled_per_second"]
    return (
        f"{generated:,.0f} tokens/s generated, {read:,.0f} tokens/s of prompts read",
        f"{generated:,.0f} tokens/s, {read:,.0f} of prompts read",
        f"{generated:,.0f} tokens/s",
    )


def _queue(snapshot: Snapshot) -> tuple[str, ...]:
    stats = snapshot["stats"]
    reading = stats["prefilling"] + stats["restoring"]
    preempted = f"{stats['preempted']} preempted"
    return (
        f"{stats['running']} running, {stats['prefilling']} reading, "
        f"{stats['restoring']} restoring, {stats['waiting']} waiting, "
        f"{preempted}; at most {snapshot['max_batch_size']} at once",
        f"{stats['running']} running, {reading} reading, {stats['waiting']} waiting, {preempted}",
        f"{stats['running'] + reading} running, {stats['waiting']} waiting",
    )


def _spilled(stats: dict[str, Any]) -> tuple[str, ...]:
    spilling = stats["spilling"]
    cached, read = (spilling["counts"][name] for name in ("cached_blocks", "read_blocks"))
    tokens = f"{counted(spilling['spilled_tokens'], 'token')} in the tier"
    here = f"{spilling['active_tokens']:,} in memory"
    step = f"{read / max(1, stats['decode']['count']):,.0f} blocks read a step"
    rate = f"{cached / max(1, cached + read):.0%} found in memory"
    return f"{tokens}, {here}; {step}, {rate}", f"{tokens}; {step}, {rate}", tokens


def _tier(tier: dict[str, Any]) -> str:
    if tier["off"] is not None:
        return f"off: {tier['off']}"
    counts = tier["counts"]
    parts = [
        f"{counted(counts['read_blocks'], 'block')} read ({format_bytes(counts['read_bytes'])}), "
        f"{counts['written_blocks']:,} written ({format_bytes(counts['written_bytes'])})"
    ]
    if tier["limit_bytes"]:
        parts.insert(
            0, f"{format_bytes(tier['held_bytes'])} of {format_bytes(tier['limit_bytes'])}"
        )
    if tier["full"] is not None:
        parts.insert(0, f"nothing is written now: {tier['full']}")
    return "; ".join(parts)


def _bar(stats: dict[str, Any], cells: int) -> Text:
    bar = Text()
    filled = total = 0
    for kind, color in COLORS.items():
        total += stats["by_kind"].get(kind, 0)
        reached = min(cells, round(cells * total / stats["limit_bytes"]))
        bar.append("█" * (reached - filled), color)
        filled = reached
    return bar.append("░" * (cells - filled), "bright_black").append("▏", "red")


def _legend(by_kind: dict[str, int], cells: int) -> list[Text]:
    lines: list[Text] = []
    for kind, color in COLORS.items():
        if nbytes := by_kind.get(kind, 0):
            entry = Text.assemble(("■ ", color), f"{kind} {format_bytes(nbytes)}")
            if lines and lines[-1].cell_len + 2 + entry.cell_len <= cells:
                lines[-1].append("  ").append_text(entry)
            else:
                lines.append(entry)
    return lines


def _requests(requests: list[dict[str, Any]], *, all_columns: bool) -> RenderableType:
    if not requests:
        return Text("no requests yet", "bright_black")
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    table.add_column("request", no_wrap=True)
    right = ("prompt", "cached", "answer", "first", "tokens/s") if all_columns else ("cached", "of")
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for request in requests:
        prompt, cached = f"{request['prompt_tokens']:,}", f"{request['cached_tokens']:,}"
        answer = f"{request['completion_tokens']:,}"
        first, speed = request["first_token_seconds"], request["tokens_per_second"]
        table.add_row(
            request["label"],
            *(
                (prompt, cached, answer, _seconds(first), _speed(speed))
                if all_columns
                else (cached, prompt)
            ),
            Text(request["finish"] or request["state"], STATES.get(request["state"], "")),
        )
    return table


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _speed(speed: float | None) -> str:
    return "" if speed is None else f"{speed:,.0f}"
