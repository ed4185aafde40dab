"""Run coding agents for ten turns and a subagent task, and print the cached share of each.

    PYTHONPATH=tests/support python tests/agents/run_agents.py FOLDER [PROGRAM...]
                                                               (make test-agents)

The programs are installed from npm into FOLDER. Server and program then run in a network namespace
with loopback alone, the program with an empty home, an environment of its own and a made-up key.
The model follows the script of `scenarios.py`; files are checked after every turn. Some programs
then write and edit files while the model writes calls in other families' formats.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from newest_node import npm_install, use_node
from scenarios import (
    AGENTS,
    BEFORE,
    FORMATS,
    LONG,
    NOTES,
    SUBAGENT,
    TEXT,
    TURNS,
    Turn,
    format_script,
    format_turns,
    script_of,
)
from scripted_model import CONTEXT, PAGES, write_model
from written_answers import written_call

from penstock.cli.launch import PROGRAMS, Endpoint, Setup

PORT = 8089
URL = f"http://127.0.0.1:{PORT}"
LEAST_SHARE = 0.9
"""Of every prompt from the second turn on, that must have been cached."""
CONVERSATION_SHARE = 0.9
"""Least size of a conversation's prompts, as a share of the largest: Qwen Code looks for what to
remember by a subagent, whose prompts of other tools and instructions are up to 0.8 as long."""
MODEL_CONTEXT = 100_000
"""Context size that the programs are told of, in tokens."""
BLOCK = 32
"""Tokens of a block of the cache."""
TURN_SECONDS = 300
LONG_CHARACTERS, LINE = 30_000, 100
"""Size of the file that makes a conversation long, and of its lines."""
CROWD, CROWD_TOKENS = 4, 16_000
"""Programs that start at once, and the least tokens of the prompt that they share."""
CROWD_CHARACTERS = 72_000
"""Size of the instructions that make their prompts so long."""
ONCE = 1.25
"""Multiple of that prompt's tokens that may be computed for all of them together."""
ABORT_TOKENS = 40
"""Tokens of an answer after which a program is interrupted."""
SCRIPTS = ("@anthropic-ai/claude-code/install.cjs", "opencode-ai/postinstall.mjs")
"""What the packages run when they are installed, where npm does not."""

Record = Mapping[str, Any]


def main() -> int:
    """Install the agents, enter the namespace and run; the exit code is 0 if all passed."""
    for needed in ("node", "npm", "unshare", "ip"):
        if shutil.which(needed) is None:
            print(f"there is no {needed}; install Node with npm, util-linux and iproute2")
            return 2
    folder, *chosen = (word for word in sys.argv[1:] if word != "--inside")
    if "--inside" not in sys.argv:
        try:
            use_node(Path(folder))
            _install(Path(folder))
        except subprocess.CalledProcessError as error:
            print((error.stderr or str(error)).strip())
            return 2
        command = [sys.executable, *sys.argv, "--inside"]
        return subprocess.run(
            ["unshare", "--net", "--map-root-user", *command], check=False
        ).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    columns = f"{'requests':>10}{'prompt tokens':>15}{'cached':>10}{'least share':>13}"
    print(f"{'agent':<10}{'turn':>5} {'':<15}{columns}", flush=True)
    wrong = [
        line
        for agent in chosen or AGENTS
        for family in (None, *(family for program, family in FORMATS if program == agent))
        for line in Run(agent, Path(folder), family).all()
    ]
    print("\n".join(wrong) or "all files and answers are right")
    return 1 if wrong else 0


def _install(folder: Path) -> None:
    npm_install(folder, *(f"{PROGRAMS[name].package}@latest" for name in AGENTS))
    for script in SCRIPTS:
        path = folder / "node_modules" / script
        subprocess.run(["node", path.name], cwd=path.parent, check=True, stdout=subprocess.DEVNULL)


class Run:
    """Ten turns of a program on a fresh server.

    Args:
        name: the program's command.
        folder: where it is installed.
        family: format of the model's calls, with files that hold its marks; None is JSON.
    """

    def __init__(self, name: str, folder: Path, family: str | None = None) -> None:
        self.name, self.agent, self._family = name, AGENTS[name], family
        self._program = folder.resolve() / "node_modules" / ".bin" / name
        self._setup = self._setup_for(MODEL_CONTEXT)
        self._seen: set[str] = set()
        self._largest = 0

    def all(self) -> list[str]:
        """Run all turns, print one line per turn, and return the failures."""
        wrong: list[str] = []
        with tempfile.TemporaryDirectory() as name:
            home, model = Path(name) / "home", Path(name) / "scripted"
            work = home / "work"
            work.mkdir(parents=True)
            model.mkdir()
            self._setup = self._setup.in_folder(name)
            for file, text in self._setup.files.items():
                (Path(name) / file).write_text(text)
            (work / NOTES).write_text(TEXT.format(BEFORE))
            (work / LONG).write_text(_pages(LONG_CHARACTERS))
            if self._family is not None:
                return [*self._formatted(self._family, home, model)]
            script = script_of(self.agent.tools, work)
            write_model(model, script)
            with _server(model):
                for number, turn in enumerate(TURNS[: max(script.keys() - {SUBAGENT})], 1):
                    wrong += self._turn(number, turn, home, script[number][-1])
            with _server(model):
                wrong += self._crowd(home)
        return [f"{self.name}: {line}" for line in wrong]

    def _formatted(self, family: str, home: Path, model: Path) -> Iterator[str]:
        """Run the turns in which the model writes calls in another format."""
        script = format_script(self.agent.tools, home / "work", family, written_call)
        write_model(model, script, family=family)
        with _server(model):
            for number, turn in enumerate(format_turns(family), 1):
                for line in self._turn(number, turn, home, script[number][-1]):
                    yield f"{self.name}: {family}: {line}"

    def _turn(self, number: int, turn: Turn, home: Path, last: str) -> Iterator[str]:
        first = number == 1
        arguments = self.agent.first if first else self.agent.later
        setup, prompt = self._setup, turn.prompt
        if turn.compacts and (compact := self.agent.compact) is not None:
            arguments = (*compact.arguments, *arguments)
            prompt = compact.command or prompt
            if compact.context_tokens:
                setup = self._setup_for(compact.context_tokens)
        process = self._start(home / "work", setup, (*arguments, f"{prompt} (task {number})"))
        if turn.aborted:
            self._interrupt(process)
        said = _end(process)
        records = self._new(all_of=turn.compacts)
        if turn.compacts:
            self._largest = 0
        share = self._print(number, turn, records)
        if not first and share < LEAST_SHARE:
            reasons = {one["explanation"]["reason"] for one in records}
            yield f"turn {number}: {share:.1%} cached: {'; '.join(sorted(reasons))}"
        if turn.compacts and self.agent.compact is None:
            return
        quiet = turn.compacts and not _words(said)
        if not turn.aborted and last not in said and not quiet:
            yield f"turn {number}: did not say {last!r} but {said[-300:]!r}"
        if turn.aborted and records[-1]["state"] != "cancelled":
            yield f"turn {number}: its request is {records[-1]['state']}, not cancelled"
        for file, text in turn.files:
            path = home / "work" / file
            content = path.read_bytes() if path.exists() else None
            if content != text.encode():
                yield f"turn {number}: {file} is not {text!r} but {content!r}"

    def _crowd(self, home: Path) -> Iterator[str]:
        """Start several programs at once on one long prompt, which is computed once."""
        work, before = home / "crowd", _computed_tokens()
        work.mkdir()
        for name in ("AGENTS.md", "CLAUDE.md"):
            (work / name).write_text(_pages(CROWD_CHARACTERS))
        self._largest = 0
        words = (*self.agent.first, f"{TURNS[0].prompt} (task 1)")
        ends = [_end(one) for one in [self._start(work, self._setup, words) for _ in range(CROWD)]]
        given, computed = self._new(all_of=True), _computed_tokens() - before
        prompt = max(one["prompt_tokens"] for one in given)
        records = [one for one in given if one["prompt_tokens"] > CONVERSATION_SHARE * prompt]
        others = [one for one in given if one not in records]  # for titles, memories and the like
        computed -= sum(one["prompt_tokens"] - _cached(one) for one in others)
        print(
            f"{self.name:<10}{'':>5} {f'{CROWD} at once':<15}{len(records):>10}{prompt:>15,}",
            end="",
        )
        print(f"{computed:>10,} computed", flush=True)
        if len(records) < CROWD or prompt < CROWD_TOKENS:
            yield f"{len(records)} prompts of {prompt:,} tokens at once; {ends[-1][-300:]!r}"
        if computed > ONCE * prompt:
            yield f"{computed:,} tokens were computed for {CROWD} prompts of {prompt:,}"

    def _setup_for(self, context_tokens: int) -> Setup:
        return PROGRAMS[self.name].setup(Endpoint(URL, "made-up", "scripted", context_tokens))

    def _start(self, work: Path, setup: Setup, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start the program in a folder, as the leader of a group of processes."""
        environment = {
            **{"HOME": str(work.parent), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            **setup.environment,
            **dict(self.agent.environment),
        }
        return subprocess.Popen(
            [str(self._program), *setup.arguments, *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _interrupt(self, process: subprocess.Popen[str]) -> None:
        """Interrupt the program when the model has begun its answer.

        Its whole group, as a terminal does: Qwen Code works in a child of the process started.
        """
        until = time.monotonic() + TURN_SECONDS
        while time.monotonic() < until and process.poll() is None:
            newest = self._whole(self._unseen())
            if any(one["completion_tokens"] >= ABORT_TOKENS for one in newest):
                os.killpg(process.pid, signal.SIGINT)
                return
            time.sleep(0.1)

    def _new(self, *, all_of: bool = False) -> list[Record]:
        """Return the server's records of requests since the last turn."""
        until = time.monotonic() + 10
        while any(one["finish"] is None for one in _records()) and time.monotonic() < until:
            time.sleep(0.1)
        given = self._unseen()
        self._seen |= {one["id"] for one in given}
        return given if all_of else self._whole(given)

    def _unseen(self) -> list[Record]:
        return [one for one in _records() if one["id"] not in self._seen]

    def _whole(self, records: list[Record]) -> list[Record]:
        """Leave out the requests for titles and the like: they are shorter, and offer no tools."""
        self._largest = max([self._largest, *(one["prompt_tokens"] for one in records)])
        return [one for one in records if 2 * one["prompt_tokens"] > self._largest]

    def _print(self, number: int, turn: Turn, records: list[Record]) -> float:
        if not records:
            raise SystemExit(f"{self.name}: turn {number} reached no server")
        by_size = sorted(records, key=lambda one: one["prompt_tokens"])
        shown = by_size[0] if turn.delegated else records[0] if turn.compacts else by_size[-1]
        longest = 0 if turn.renewed else by_size[-1]["prompt_tokens"]
        share = min(_share(one, longest) for one in records)
        figures = f"{len(records):>10}{shown['prompt_tokens']:>15,}{_cached(shown):>10,}"
        print(f"{self.name:<10}{number:>5} {turn.name:<15}{figures}{share:>13.1%}", flush=True)
        return share


def _end(process: subprocess.Popen[str]) -> str:
    """Return the output of a program after it ended."""
    try:
        return process.communicate(timeout=TURN_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]} ... and no end after {TURN_SECONDS} s"


def _words(said: str) -> str:
    """Return the output of a program without its `[program:kind] ...` notes."""
    notes = ("[claude-code:",)
    return "".join(line for line in said.splitlines() if not line.startswith(notes)).strip()


def _pages(characters: int) -> str:
    """Return text of our own pages of the requested length, in short lines."""
    text = "".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    words = " ".join(text.split())[:characters]
    return "\n".join(textwrap.wrap(words, LINE)) + "\n"


@contextmanager
def _server(model: Path) -> Iterator[None]:
    options = ("--port", str(PORT), "--memory-limit", "2GB", "--max-kv-size", str(CONTEXT))
    command = [sys.executable, "-m", "penstock", "serve", str(model), *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait(server)
        yield
    finally:
        server.terminate()
        server.wait(120)


def _wait(server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{URL}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def _records() -> list[Record]:
    """Return the server's last requests in order of arrival."""
    with httpx.stream("GET", f"{URL}/v1/live") as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                recent: list[Record] = json.loads(line.removeprefix("data: "))["requests"]
                return sorted(recent, key=lambda one: one["started"])
    return []


def _computed_tokens() -> int:
    """Return the number of prompt tokens that the engine has computed."""
    for line in httpx.get(f"{URL}/metrics").text.splitlines():
        if line.startswith("penstock_prefilled_tokens_total "):
            return int(float(line.split()[1]))
    raise SystemExit("the server does not count the tokens that it computes")


def _share(record: Record, longest: int) -> float:
    """Return the cached share of a prompt, where the longest of its conversation has `longest`.

    Of another's, and where `longest` is 0, it is the share of what the prompt has in common with
    the nearest one before: all of it where that is less than a block, the least that is shared.
    """
    size, explanation = int(record["prompt_tokens"]), record["explanation"]
    if longest and size > CONVERSATION_SHARE * longest:
        return _cached(record) / size
    differs_at = explanation["diverges_at"]
    if differs_at is None:  # the nearest one ends where this one goes on
        return _cached(record) / int(explanation["held_tokens"] or size)
    return _cached(record) / int(differs_at) if differs_at >= BLOCK else 1.0


def _cached(record: Record) -> int:
    """Return the cached tokens of a prompt; of one that was cancelled, as it was on arrival."""
    if record["state"] == "cancelled":
        arrived = record["explanation"]
        return int(arrived["reusable_tokens"] or arrived["held_tokens"])
    return int(record["cached_tokens"])


if __name__ == "__main__":
    sys.exit(main())
