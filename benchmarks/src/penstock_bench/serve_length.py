"""One client that asks a server prompts of several lengths: first token, decode speed, memory.

Both servers run, and are asked in turn. Each prompt is new, so nothing of it is cached.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SettingError
from penstock.plurals import counted
from penstock_bench.engine_sides import LLAMA, OURS, RIVAL
from penstock_bench.report import Line, Notify, Report
from penstock_bench.serve_client import Reply, connected
from penstock_bench.serve_load import ServeLoad, sides_of
from penstock_bench.serve_model import ServedFolder
from penstock_bench.serve_process import (
    RunningServer,
    ServerFailed,
    ending_cleanly,
    free_port,
    high_water_bytes,
    serving,
)
from penstock_bench.serve_runs import served_folder
from penstock_bench.serve_words import FactWords, Words, words_of

CLAIM = "One client alone, prompts of several lengths over HTTP"
GOALS = {"decode": 1.2, "first_token": 2.0, "memory": 1.0}
FIRST_TOKEN_FROM = 500
"""Shortest prompt, in tokens, whose first token has a goal."""
ROUNDS = 5
ANSWER_TOKENS = 64


@dataclass(slots=True)
class LengthRun:
    """Answers of one server."""

    idle_bytes: int
    replies: dict[int, list[Reply]] = field(default_factory=dict)
    """Answers by length of the prompt."""
    resident_bytes: int = 0
    """Resident bytes after all answers."""
    high_water_bytes: int | None = None

    def figures(self) -> dict[str, Any]:
        """Return the figures of a record; medians over the answers that have a text.

        Raises:
            SettingError: the model answered nothing to all prompts of a length.
        """
        lengths = {
            str(length): {
                "prompt_tokens": round(statistics.median(x.prompt_tokens for x in replies)),
                "first_token_seconds": round(
                    statistics.median(x.first_seconds for x in replies), 4
                ),
                "tokens_per_second": round(statistics.median(map(_speed, replies)), 2),
            }
            for length, replies in ((n, _with_text(n, of)) for n, of in self.replies.items())
        }
        return {
            "idle_bytes": self.idle_bytes,
            "resident_bytes": self.resident_bytes,
            "high_water_bytes": self.high_water_bytes,
            "lengths": lengths,
        }


def _with_text(length: int, replies: Sequence[Reply]) -> list[Reply]:
    """Return the answers of several pieces of text; others ended at once, and show no speed."""
    answers = [reply for reply in replies if len(reply.text_times) > 1]
    if not answers:
        raise SettingError(
            f"the model ends its answers to prompts of {counted(length, 'token')} at once; take "
            f"one that was trained to chat"
        )
    return answers


def measure(load: ServeLoad, lengths: Sequence[int], notify: Notify | None = None) -> Report:
    """Ask our server and another one, llama.cpp's if the load has it, else mlx-lm's."""
    sides = sides_of(load)
    theirs = LLAMA if LLAMA in sides else RIVAL
    notify = notify or (lambda *_: None)
    with ending_cleanly(), served_folder(load) as folder, ExitStack() as servers:
        words = words_of(folder.path, load.texts) if load.is_real else FactWords()
        running, runs = {}, {}
        for side in (OURS, theirs):
            port = free_port()
            running[side] = servers.enter_context(serving(sides[side](folder, port), port))
            runs[side] = LengthRun(running[side].process.memory_info().rss)
        total, done = len(lengths) * ROUNDS * 2, 0
        for length in lengths:
            for number in range(ROUNDS):
                for side in (OURS, theirs) if number % 2 == 0 else (theirs, OURS):
                    reply = asyncio.run(_ask(running[side], words, length, number))
                    runs[side].replies.setdefault(length, []).append(reply)
                    done += 1
                    notify(f"{length} tokens", done, total)
        for side, run in runs.items():
            run.resident_bytes = running[side].process.memory_info().rss
            run.high_water_bytes = high_water_bytes(running[side].process.pid)
        return _report(load, folder, theirs, runs)


async def _ask(server: RunningServer, words: Words, length: int, number: int) -> Reply:
    """Send a prompt that has not been sent before, and check its answer.

    Raises:
        ServerFailed: the server does not answer, or the answer is too short to be timed.
    """
    (line,) = words.lines(1_000 * length + number, 1, length)
    async with connected(server.url, server.model) as client:
        message = {"role": "user", "content": f"{number} {line}"}
        reply = await client.ask([message], ANSWER_TOKENS)
    if reply.error is not None:
        raise ServerFailed(f"{server.name}: no answer behind {length} tokens: {reply.error}")
    return reply


def _speed(reply: Reply) -> float:
    """Return the tokens per second behind the first one."""
    seconds = reply.text_times[-1] - reply.text_times[0]
    return (reply.completion_tokens - 1) / seconds if seconds > 0 else 0.0


def _report(
    load: ServeLoad, folder: ServedFolder, theirs: str, runs: dict[str, LengthRun]
) -> Report:
    ours, others = runs[OURS].figures(), runs[theirs].figures()
    lines: list[Line] = []
    ratio: dict[str, float | None] = {}

    def add(name: str, mine: float, other: float, text: str, goal: str, of: float) -> None:
        ratio[name] = round(of, 3)
        wanted = f"{GOALS[goal]:g}x" if goal else ""
        met = None if not goal else of >= GOALS[goal]
        lines.append(Line(name, text.format(mine), text.format(other), wanted, met))

    for length, mine in ours["lengths"].items():
        other = others["lengths"][length]
        key = "tokens_per_second"
        add(f"{length} tokens: decode, tokens/s", mine[key], other[key], "{:.1f}", "decode",
            mine[key] / other[key])  # fmt: skip
        key = "first_token_seconds"
        goal = "first_token" if int(length) >= FIRST_TOKEN_FROM else ""
        add(f"{length} tokens: first token, s", mine[key], other[key], "{:.3f}", goal,
            other[key] / mine[key])  # fmt: skip
    for key, what in (("idle_bytes", "idle"), ("resident_bytes", "after all answers")):
        add(f"resident {what}, MB", ours[key] / 1e6, others[key] / 1e6, "{:.0f}", "memory",
            others[key] / ours[key])  # fmt: skip
    return Report(
        name="serve-length",
        claim=CLAIM,
        rival=theirs,
        penstock=ours,
        rival_figures=others,
        ratio=ratio,
        goal=GOALS,
        met=all(line.met is not False for line in lines),
        lines=lines,
        raw={
            "load": load.model_dump(mode="json"),
            "model": folder.as_object(),
            "replies": {
                side: {
                    str(length): [
                        {
                            "prompt_tokens": reply.prompt_tokens,
                            "cached_tokens": reply.cached_tokens,
                            "completion_tokens": reply.completion_tokens,
                            "text_times": [round(t - reply.sent, 4) for t in reply.text_times],
                        }
                        for reply in replies
                    ]
                    for length, replies in run.replies.items()
                }
                for side, run in runs.items()
            },
        },
        dtype=folder.dtype,
    )
