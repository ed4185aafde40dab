"""`penstock bench serve`: our server and mlx-lm's under the same load in the same run.

sessions      agents that share a system prompt, turn by turn; cold servers, in turn
arrivals      optional: requests that arrive by a Poisson process
connections   many at the same moment, ours only: none may fail
overhead      the same prompts through our server and through the engine alone
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import psutil

from penstock import config
from penstock.models.loading import load as load_model
from penstock.models.mlx_lm import render
from penstock_bench.engine_sides import OURS
from penstock_bench.models import ModelChoice
from penstock_bench.report import Notify, Report
from penstock_bench.serve_client import (
    Client,
    Message,
    Reply,
    Send,
    at_once,
    closed_loop,
    connected,
    open_loop,
)
from penstock_bench.serve_figures import report
from penstock_bench.serve_load import (
    WAYS,
    Overhead,
    Phase,
    ServeLoad,
    ServerRuns,
    Sides,
    sides_of,
)
from penstock_bench.serve_model import ServedFolder, model_folder, poisson_times, real_folder
from penstock_bench.serve_process import (
    EngineProcess,
    RunningServer,
    ServerCommand,
    cpu_seconds,
    ending_cleanly,
    engine_alone,
    free_port,
    high_water_bytes,
    serving,
    watched,
)
from penstock_bench.serve_time import ServeProgress, expected_seconds, measured_gflops
from penstock_bench.serve_words import FactWords, Words, words_of


def measure(load: ServeLoad, sides: Sides | None = None, notify: Notify | None = None) -> Report:
    """Run every part, with the sides of each in turn."""
    sides = sides_of(load) if sides is None else sides
    with ending_cleanly(), served_folder(load) as plain:
        folder = replace(plain, codec_settings=load.engine.codec_settings)
        words = words_of(folder.path, load.texts) if load.is_real else FactWords()
        sessions = _sessions(load, folder, sides, words, notify or (lambda *_: None))
        runs = ServerRuns(
            sessions=sessions,
            arrivals=_arrivals(load, folder, sides, words) if load.rate else {},
            connections=None,
            overhead=None,
            folder=folder,
            same_first_answers=_same_first_answers(sessions),
        )
        if load.connections or load.overhead_rounds:
            port = free_port()
            with serving(sides[OURS](folder, port), port) as server:
                if load.overhead_rounds:
                    runs.overhead = _overhead(load, folder, server, words)
                if load.connections:
                    runs.connections = _connections(load, server, words)
    return report(load, runs)


def served_folder(load: ServeLoad) -> AbstractContextManager[ServedFolder]:
    """Return a context manager of the model folder of a load."""
    if isinstance(load.model, ModelChoice):
        return model_folder(load.model, load.llama)
    return real_folder(load.model)


def _same_first_answers(sessions: Mapping[str, Sequence[Phase]]) -> dict[str, int]:
    """Count the first answers equal to ours; first turns have the same prompts.

    mlx-lm's server replaces an incomplete character by U+FFFD, ours omits it.
    """
    firsts = {
        side: Counter(reply.text.rstrip("\ufffd") for reply in phases[0].good if reply.turn == 0)
        for side, phases in sessions.items()
    }
    return {side: (texts & firsts[OURS]).total() for side, texts in firsts.items()}


def talk(server: RunningServer, send: Send) -> tuple[float, list[Reply], int]:
    """Put one load on a server; return seconds, replies and maximum concurrent requests."""

    async def run() -> tuple[float, list[Reply], int]:
        async with connected(server.url, server.model) as client:
            began = time.perf_counter()
            replies = await send(client)
            return time.perf_counter() - began, replies, client.most_open

    return asyncio.run(run())


def drive(server: RunningServer, send: Send) -> Phase:
    """Put one load on a server and track its memory."""
    idle_bytes = server.process.memory_info().rss
    with watched(server.process) as memory:
        seconds, replies, most_open = talk(server, send)
    return Phase(
        seconds,
        replies,
        memory,
        idle_bytes,
        server.start_seconds,
        high_water_bytes(server.process.pid),
        most_open,
    )


def _cold(
    folder: ServedFolder,
    make: Callable[[ServedFolder, int], ServerCommand],
    send: Send,
) -> Phase:
    port = free_port()
    with serving(make(folder, port), port) as server:
        return drive(server, send)


def _sessions(
    load: ServeLoad, folder: ServedFolder, sides: Sides, words: Words, notify: Notify
) -> dict[str, list[Phase]]:
    """Run the same sessions on both servers, each time in a new process.

    Raises:
        AssertionError: the servers tokenized prompts differently.
    """
    talks, system = load.talks(words), words.system(load.system_tokens)
    phases: dict[str, list[Phase]] = {side: [] for side in sides}
    gflops = measured_gflops()
    seconds = {side: expected_seconds(load, folder, side, gflops) for side in sides}
    progress = ServeProgress(notify, seconds, load.rounds)

    def send(client: Client) -> Awaitable[list[Reply]]:
        return closed_loop(client, system, talks, load.answer_tokens)

    for turn in range(load.rounds):
        for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            counted = progress.counted(side, send, sum(map(len, talks)))
            phases[side].append(_cold(folder, sides[side], counted))
    _check_same_prompts(phases)
    return phases


def _check_same_prompts(sessions: Mapping[str, Sequence[Phase]]) -> None:
    """Raise AssertionError unless all first turns had the same lengths, in tokens."""
    lengths = {
        side: {
            tuple(sorted(r.prompt_tokens for r in phase.good if r.turn == 0)) for phase in phases
        }
        for side, phases in sessions.items()
        if all(reply.error is None for phase in phases for reply in phase.replies)
    }
    if len(set().union(*lengths.values())) > 1:
        raise AssertionError(f"the servers read different prompts: {lengths}")


def _arrivals(
    load: ServeLoad, folder: ServedFolder, sides: Sides, words: Words
) -> dict[str, Phase]:
    times = poisson_times(load.rate, load.arrivals)
    said = words.lines(500, load.arrivals, load.line_tokens)
    system = words.system(load.system_tokens)
    return {
        side: _cold(folder, make, lambda c: open_loop(c, system, said, times, load.answer_tokens))
        for side, make in sides.items()
    }


def _connections(load: ServeLoad, server: RunningServer, words: Words) -> Phase:
    system = {"role": "system", "content": words.system(load.overhead_prompt_tokens)}
    said = words.lines(900, load.connections, load.line_tokens)
    conversations = [[system, {"role": "user", "content": line}] for line in said]
    return drive(server, lambda client: at_once(client, conversations, load.connection_tokens))


def _overhead(
    load: ServeLoad, folder: ServedFolder, server: RunningServer, words: Words
) -> Overhead:
    """Time a full batch in three ways in turn, with new prompts each time.

    Raises:
        AssertionError: the ways generated different numbers of tokens.
    """
    _, tokenizer = load_model(folder.path)
    overhead = Overhead()

    def asked(seed: int) -> list[list[Message]]:
        texts = words.lines(2_000 + seed, config.MAX_BATCH_SIZE, load.overhead_prompt_tokens)
        return [[{"role": "user", "content": text}] for text in texts]

    def over_http(seed: int, *, stream: bool) -> tuple[float, int]:
        seconds, replies, _ = talk(
            server,
            lambda client: at_once(client, asked(seed), load.overhead_tokens, stream=stream),
        )
        return seconds, sum(reply.completion_tokens for reply in replies if reply.error is None)

    def run(way: str, turn: int, engine: EngineProcess) -> tuple[float, int]:
        # The same prompts alone and streamed; for answers in one piece the server needs others,
        # as it would know those.
        if way == "alone":
            prompts = [render(tokenizer, messages) for messages in asked(2 * turn)]
            return engine.run(prompts, load.overhead_tokens)
        if way == "streamed":
            return over_http(2 * turn, stream=True)
        return over_http(2 * turn + 1, stream=False)

    client = psutil.Process()
    with engine_alone(folder) as engine:
        for turn in range(load.overhead_rounds):
            counts = {}
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                process = engine.process if way == "alone" else server.process
                before = cpu_seconds(process), cpu_seconds(client)
                seconds, counts[way] = run(way, turn, engine)
                overhead.seconds[way].append(seconds)
                overhead.cpu_seconds[way].append(cpu_seconds(process) - before[0])
                overhead.client_cpu_seconds[way].append(cpu_seconds(client) - before[1])
            if load.model is ModelChoice.RANDOM and len(set(counts.values())) > 1:
                raise AssertionError(f"the ways generated different numbers of tokens: {counts}")
            overhead.tokens = counts["alone"]
    return overhead
