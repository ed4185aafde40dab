"""Memory of a server with many cached conversations, and the first token of the next turn.

All conversations share a system prompt. Then the oldest and the newest continue. The newest
continues again after a restart of the server; ours has a disk tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from penstock_bench.comparison import size
from penstock_bench.engine_sides import LLAMA, OURS, RIVAL
from penstock_bench.report import Line, Notify, Report
from penstock_bench.serve_client import Client, Message, Reply
from penstock_bench.serve_load import Phase, ServeLoad, Sides, sides_of
from penstock_bench.serve_model import ServedFolder
from penstock_bench.serve_process import (
    ServerCommand,
    ServerFailed,
    ending_cleanly,
    free_port,
    serving,
)
from penstock_bench.serve_runs import drive, served_folder
from penstock_bench.serve_time import ServeProgress, expected_seconds, measured_gflops
from penstock_bench.serve_words import FactWords, Words, words_of

CLAIM = "Conversations that a server holds, and goes on with"
SYSTEM_TOKENS, LINE_TOKENS, ANSWER_TOKENS = 500, 484, 16
"""Tokens of a conversation, 1,000 in total."""
LATER_TOKENS = 40
"""Tokens of the message that continues a conversation."""


@dataclass(slots=True)
class HeldRun:
    """Run of one server with a number of conversations."""

    first_answers: Phase
    """First answers of all conversations, submitted at once."""
    resident_bytes: int
    """Resident bytes of the process after all answers."""
    later: Phase
    """Next answers of the oldest, then of the newest conversation."""
    restarted: Phase
    """Next answer of the newest conversation, after a restart."""

    def figures(self) -> dict[str, Any]:
        """Return the figures of a record."""
        oldest, newest = self.later.replies
        firsts = {"oldest": oldest, "newest": newest, "restarted": self.restarted.replies[0]}
        return {
            "resident_bytes": self.resident_bytes,
            "above_idle_bytes": self.resident_bytes - self.first_answers.idle_bytes,
            **{f"{name}_ttft_seconds": round(r.first_seconds, 4) for name, r in firsts.items()},
            **{f"{name}_prompt_tokens": reply.prompt_tokens for name, reply in firsts.items()},
            **{f"{name}_cached_tokens": reply.cached_tokens for name, reply in firsts.items()},
        }

    def as_object(self) -> dict[str, Any]:
        parts = {
            "first_answers": self.first_answers,
            "later": self.later,
            "restarted": self.restarted,
        }
        return {**self.figures(), **{name: phase.as_object() for name, phase in parts.items()}}


def measure(load: ServeLoad, counts: Sequence[int], notify: Notify | None = None) -> Report:
    """Run every side with each number of conversations, and continue some.

    The other side is llama.cpp's server if the load has one, else mlx-lm's.
    """
    sides = sides_of(load)
    theirs = LLAMA if LLAMA in sides else RIVAL
    sides = {OURS: sides[OURS], theirs: sides[theirs]}
    with ending_cleanly(), served_folder(load) as plain:
        folder = replace(plain, codec_settings=load.engine.codec_settings)
        words = words_of(folder.path, load.texts) if load.is_real else FactWords()
        runs = _runs(load, folder, sides, words, counts, notify or (lambda *_: None))
        return _report(load, folder, theirs, runs)


def _runs(
    load: ServeLoad,
    folder: ServedFolder,
    sides: Sides,
    words: Words,
    counts: Sequence[int],
    notify: Notify,
) -> dict[str, dict[int, HeldRun]]:
    gflops = measured_gflops()
    sizes = {"system_tokens": SYSTEM_TOKENS, "line_tokens": LINE_TOKENS}
    sizes |= {"answer_tokens": ANSWER_TOKENS, "turns": 1}
    seconds = {
        f"{side}, {count} conversations": expected_seconds(
            load.model_copy(update={**sizes, "sessions": count}), folder, side, gflops
        )
        for side in sides
        for count in counts
    }
    progress = ServeProgress(notify, seconds)

    def held(side: str, count: int) -> HeldRun:
        def command(port: int, tier: str) -> ServerCommand:
            plain = sides[side](folder, port)
            flags = ("--ssd-cache-dir", tier) if side == OURS else ()
            return replace(plain, arguments=(*plain.arguments, *flags))

        return _held(command, words, count, progress, f"{side}, {count} conversations")

    return {side: {count: held(side, count) for count in counts} for side in sides}


def _held(
    command: Callable[[int, str], ServerCommand],
    words: Words,
    count: int,
    progress: ServeProgress,
    step: str,
) -> HeldRun:
    """Start a server, run conversations and continue some, and start it again.

    Args:
        command: returns the server's command for a port and the folder of a cold tier.
        words: source of the messages.
        count: number of conversations.
        progress: counts the first answers.
        step: name of this run in the progress.

    Raises:
        ServerFailed: an answer is missing.
    """
    system = {"role": "system", "content": words.system(SYSTEM_TOKENS)}
    talks = [[system, _said(words, seed, LINE_TOKENS)] for seed in range(count)]

    async def begin(client: Client) -> list[Reply]:
        return await asyncio.gather(*(client.ask(talk, ANSWER_TOKENS) for talk in talks))

    async def go_on(client: Client) -> list[Reply]:
        return [await client.ask(talk, ANSWER_TOKENS, turn=1) for talk in (talks[0], talks[-1])]

    async def go_on_again(client: Client) -> list[Reply]:
        return [await client.ask(talks[-1], ANSWER_TOKENS, turn=2)]

    with TemporaryDirectory(prefix="penstock-bench-tier-") as tier:
        port = free_port()
        with serving(command(port, tier), port) as server:
            first_answers = drive(server, progress.counted(step, begin, count))
            resident_bytes = server.process.memory_info().rss
            for talk, reply in zip(talks, first_answers.replies, strict=True):
                talk += [_answer(reply), _said(words, count + len(talk), LATER_TOKENS)]
            later = drive(server, go_on)
            talks[-1] += [_answer(later.replies[1]), _said(words, 2 * count, LATER_TOKENS)]
        port = free_port()
        with serving(command(port, tier), port) as server:
            restarted = drive(server, go_on_again)
    _check(step, first_answers, later, restarted)
    return HeldRun(first_answers, resident_bytes, later, restarted)


def _check(step: str, *phases: Phase) -> None:
    """Raise ServerFailed unless all answers arrived."""
    errors = [reply.error for phase in phases for reply in phase.replies if reply.error]
    if errors:
        raise ServerFailed(f"{step}: {len(errors)} answers did not come: {errors[0]}")


def _said(words: Words, seed: int, tokens: int) -> Message:
    return {"role": "user", "content": words.lines(seed, 1, tokens)[0]}


def _answer(reply: Reply) -> Message:
    return {"role": "assistant", "content": reply.text}


# ---------------------------------------------------------------- figures


def _report(
    load: ServeLoad,
    folder: ServedFolder,
    theirs: str,
    runs: Mapping[str, Mapping[int, HeldRun]],
) -> Report:
    """Compare both sides, a group of lines for each number of conversations."""
    of = {
        side: {str(count): run.figures() for count, run in by_count.items()}
        for side, by_count in runs.items()
    }
    return Report(
        name="serve-held",
        claim=CLAIM,
        rival=theirs,
        penstock=of[OURS],
        rival_figures=of[theirs],
        ratio={
            f"{count} conversations: above idle": round(
                of[theirs][count]["above_idle_bytes"] / max(1, mine["above_idle_bytes"]), 3
            )
            for count, mine in of[OURS].items()
        },
        goal={},
        met=True,
        lines=[
            line
            for count, mine in of[OURS].items()
            for line in _lines(f"{count} conversations", mine, of[theirs][count])
        ],
        raw={
            "load": load.model_dump(mode="json"),
            "model": folder.as_object(),
            "conversation_tokens": [SYSTEM_TOKENS, LINE_TOKENS, ANSWER_TOKENS],
            "runs": {
                side: {str(count): run.as_object() for count, run in by_count.items()}
                for side, by_count in runs.items()
            },
        },
        dtype=folder.dtype,
    )


def _lines(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Line]:
    def sizes(what: str, key: str) -> Line:
        return Line(f"{name}: {what}", size(mine[key]), size(theirs[key]))

    def later(what: str, key: str) -> Line:
        return Line(f"{name}: {what}", _first_token(mine, key), _first_token(theirs, key))

    return [
        sizes("resident", "resident_bytes"),
        sizes("above idle", "above_idle_bytes"),
        later("first token, oldest goes on (cached)", "oldest"),
        later("first token, newest goes on (cached)", "newest"),
        later("first token behind a restart (cached)", "restarted"),
    ]


def _first_token(side: Mapping[str, Any], key: str) -> str:
    cached, prompt = side[f"{key}_cached_tokens"], side[f"{key}_prompt_tokens"]
    return f"{side[f'{key}_ttft_seconds']:,.2f} s ({cached:,} of {prompt:,})"
