"""`penstock bench switch`: two models in a limit that holds one, and a conversation between them.

    a: conversation ──> b: question ──> a: question ──> b: question ──> a: the conversation goes on

Each step but the first asks a model that is away. mlx-lm's server holds one model, too.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from penstock_bench.comparison import size
from penstock_bench.engine_sides import OURS, RIVAL
from penstock_bench.report import Line, Notify, Report
from penstock_bench.serve_client import Message, Reply, connected
from penstock_bench.serve_model import ServedFolder, real_folder
from penstock_bench.serve_process import (
    RunningServer,
    ServerCommand,
    ServerFailed,
    ending_cleanly,
    free_port,
    high_water_bytes,
    ours,
    rival,
    serving,
)
from penstock_bench.serve_words import Words, words_of

CLAIM = "Two models in a limit that holds one: first tokens behind a switch"
STORED = "penstock, with a disk"
ANSWER_TOKENS = 16
FIGURES = {"switch": "first token behind a switch", "return": "first token of the conversation"}


@dataclass(frozen=True, slots=True)
class SwitchLoad:
    model: str = "smollm2"
    prompt_tokens: int = 1_000
    """Tokens of the conversation's first message."""
    memory_limit: int = 250_000_000
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Switches:
    """Replies of one server, round by round."""

    questions: list[Reply]
    returns: list[Reply]
    peak_bytes: int

    def figures(self) -> dict[str, Any]:
        return {
            "switch": _median(self.questions),
            "return": _median(self.returns),
            "return_prompt_tokens": self.returns[-1].prompt_tokens,
            "return_cached_tokens": self.returns[-1].cached_tokens,
            "peak_bytes": self.peak_bytes,
        }

    def as_object(self) -> dict[str, Any]:
        return {
            "questions": [reply.first_seconds for reply in self.questions],
            "returns": [reply.first_seconds for reply in self.returns],
        }


def measure(load: SwitchLoad, notify: Notify) -> Report:
    """Run the same steps on our server, with and without a disk, and on mlx-lm's.

    Raises:
        ServerFailed: an answer did not come, or our limit holds both models.
    """
    of: dict[str, Switches] = {}
    with ending_cleanly(), real_folder(load.model) as folder, TemporaryDirectory() as place:
        words = words_of(folder.path, ())
        names = _two(folder, Path(place))
        for number, side in enumerate((OURS, STORED, RIVAL)):
            notify(side, number, 3)
            of[side] = _run(load, side, folder, names, words, Path(place) / "tier")
        return _report(load, folder, of)


def _two(folder: ServedFolder, place: Path) -> dict[str, ServedFolder]:
    """Return the model under two names: servers do not know that it is one."""
    names = {}
    for name in ("a", "b"):
        (place / name).symlink_to(folder.path)
        file = None
        if folder.gguf is not None:
            file = place / f"{name}.gguf"
            file.symlink_to(folder.gguf)
        names[name] = replace(folder, path=place / name, name=name, gguf=file)
    return names


def _command(
    load: SwitchLoad, side: str, names: Mapping[str, ServedFolder], port: int, tier: Path
) -> ServerCommand:
    if side == RIVAL:
        return rival(names["a"], port)
    flags = ["--memory-limit", str(load.memory_limit)]
    flags += ["--ssd-cache-dir", str(tier)] if side == STORED else []
    models = [str(folder.gguf or folder.path) for folder in names.values()]
    plain = ours(names["a"], port)
    end = plain.arguments.index("serve") + 1
    return replace(plain, arguments=(*plain.arguments[:end], *models, "--port", str(port), *flags))


def _run(
    load: SwitchLoad,
    side: str,
    folder: ServedFolder,
    names: Mapping[str, ServedFolder],
    words: Words,
    tier: Path,
) -> Switches:
    port = free_port()
    questions, returns = [], []
    with serving(_command(load, side, names, port, tier), port) as server:
        asked = {name: str(of.path) if side == RIVAL else name for name, of in names.items()}
        for number in range(load.rounds):
            (text,) = words.lines(7_000 + number, 1, load.prompt_tokens)
            talk: list[Message] = [{"role": "user", "content": text}]
            first = _ask(server, asked["a"], talk)
            questions += [
                _ask(server, asked[name], [{"role": "user", "content": f"What is {number}?"}])
                for name in ("b", "a", "b")
            ]
            _check_away(side, server)
            talk += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": "Go on."},
            ]
            returns.append(_ask(server, asked["a"], talk))
            _ask(server, asked["b"], [{"role": "user", "content": "Hello!"}])
        peak = high_water_bytes(server.process.pid) or 0
    return Switches(questions, returns, peak)


def _ask(server: RunningServer, model: str, messages: Sequence[Message]) -> Reply:
    async def ask() -> Reply:
        async with connected(server.url, model) as client:
            return await client.ask(messages, ANSWER_TOKENS)

    reply = asyncio.run(ask())
    if reply.error is not None:
        raise ServerFailed(f"{server.name}: an answer did not come: {reply.error}")
    return reply


def _check_away(side: str, server: RunningServer) -> None:
    if side == RIVAL:
        return
    listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    states = {model["id"]: model["state"] for model in listed}
    if states != {"a": "away", "b": "loaded"}:
        raise ServerFailed(f"the limit does not hold one model alone: {states}; see --memory-limit")


def _median(replies: Sequence[Reply]) -> float:
    return round(statistics.median(reply.first_seconds for reply in replies), 4)


def _report(load: SwitchLoad, folder: ServedFolder, of: Mapping[str, Switches]) -> Report:
    figures = {side: switches.figures() for side, switches in of.items()}
    plain, stored, theirs = figures[OURS], figures[STORED], figures[RIVAL]

    def line(side: str, mine: Mapping[str, Any], key: str) -> Line:
        return Line(f"{side}: {FIGURES[key]}", _seconds(mine, key), _seconds(theirs, key))

    return Report(
        name="switch",
        claim=CLAIM,
        rival=RIVAL,
        penstock=plain | {"with_disk": stored},
        rival_figures=theirs,
        ratio={
            "switch": round(theirs["switch"] / plain["switch"], 3),
            "return": round(theirs["return"] / plain["return"], 3),
            "return_with_disk": round(theirs["return"] / stored["return"], 3),
        },
        goal={},
        met=True,
        lines=[
            line("without a disk", plain, "switch"),
            line("without a disk", plain, "return"),
            line("with a disk", stored, "switch"),
            line("with a disk", stored, "return"),
            Line("peak resident", size(plain["peak_bytes"]), size(theirs["peak_bytes"])),
        ],
        raw={
            "load": asdict(load),
            "model": folder.as_object(),
            "runs": {side: switches.as_object() for side, switches in of.items()},
        },
        dtype=folder.dtype,
    )


def _seconds(figures: Mapping[str, Any], key: str) -> str:
    if key == "switch":
        return f"{figures[key]:,.2f} s"
    cached, prompt = figures["return_cached_tokens"], figures["return_prompt_tokens"]
    return f"{figures[key]:,.2f} s ({cached:,} of {prompt:,} cached)"
