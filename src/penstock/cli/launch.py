"""`penstock launch`: start a coding agent on a server here, and the server if none answers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.launch_setups import (
    MADE_UP_KEY,
    PROGRAMS,
    Endpoint,
    Program,
    Setup,
    shell_lines,
)
from penstock.config import LOOPBACK_HOSTS
from penstock.errors import PenstockError, SettingError
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    import httpx

START_SECONDS = 1_800.0
"""Longest wait for a server to load its model: it may be fetched first."""
LOADING_SECONDS = 300.0
"""Longest wait for a server that listens and does not answer yet, because it loads its model."""
LOOK_SECONDS = 0.2
STOP_SECONDS = 15.0
NO_CONTEXT = 32_768
"""Context size where a server does not say its own, in tokens."""


class LaunchFailed(PenstockError):
    """The server does not start, refuses the key, or is of another kind."""

    status = 502


def launch(
    program: Annotated[
        str, typer.Argument(help=f"Coding agent: {', '.join(PROGRAMS)}.", metavar="PROGRAM")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for it, behind --.", metavar="[-- ARGS]"),
    ] = None,
    url: options.ServerURL = options.SERVER_URL,
    api_key: options.ServerKey = None,
    model: options.Model = str(MODEL_PATH),
    only_print: Annotated[
        bool,
        typer.Option("--print", help="Print the lines for a shell, and start no program."),
    ] = False,
) -> None:
    """Start a coding agent that works with this machine's model.

    Address, key, model and context size are set for this start alone: in the environment of the
    program, its arguments and a temporary folder. Its own configuration stays as it is. A program
    that is not installed runs through npx. If no server answers at --url, one is started there. It
    ends with the program; its settings come from the environment, as PENSTOCK_MEMORY_LIMIT.
    """
    from penstock.cli.remote import base_url  # httpx takes a moment to import

    agent = _program(program)
    own = tuple(arguments or ())
    with _server(base_url(url), api_key, model, may_start=not only_print) as target:
        setup = agent.setup(target)
        command = _command(agent)
        if only_print:
            for line in shell_lines(command, setup, own):
                print(line)
            return
        with tempfile.TemporaryDirectory(prefix="penstock-launch-") as folder:
            placed = setup.in_folder(folder)
            for name, text in setup.files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            _print_setup(agent, target, placed)
            code = _run((*command, *placed.arguments, *own), placed)
    raise typer.Exit(code)


def _program(name: str) -> Program:
    """Return a program by its command.

    Raises:
        SettingError: there are no settings for it; names those that there are.
    """
    if name not in PROGRAMS:
        raise SettingError(f"{name} is not known; choose one of {', '.join(PROGRAMS)}")
    return PROGRAMS[name]


def _command(program: Program) -> tuple[str, ...]:
    """Return the command of a program: its own if it is installed, or npx with its package.

    Raises:
        SettingError: there is neither.
    """
    if shutil.which(program.command):
        return (program.command,)
    if shutil.which("npx"):
        return ("npx", "--yes", program.package)
    raise SettingError(
        f"{program.command} is not installed, and there is no npx to run it; install Node.js, or "
        f"npm install -g {program.package}"
    )


# ---- the server


@contextmanager
def _server(url: str, key: str | None, model: str, *, may_start: bool) -> Iterator[Endpoint]:
    """Find the server at an address, or start one for as long as the context lasts."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=30.0) as http:
        if _answers(http):
            yield _target(http, url, key)
            return
        if not may_start:
            raise SettingError(f"no server answers at {url}; start one: penstock serve")
        with _started(http, url, key, model):
            yield _target(http, url, key)


def _answers(http: httpx.Client) -> bool:
    """Tell whether something answers at the address."""
    import httpx

    try:
        http.get("/health", timeout=httpx.Timeout(LOADING_SECONDS, connect=10.0))
    except httpx.TransportError:
        return False
    return True


def _target(http: httpx.Client, url: str, key: str | None) -> Endpoint:
    """Ask a server for its model.

    Raises:
        LaunchFailed: it refuses, or is no server of models.
    """
    response = http.get("/v1/models")
    if response.status_code == 401:
        raise LaunchFailed(f"{url} wants a key: --api-key, or PENSTOCK_API_KEY")
    try:
        listed = response.json()["data"][0]
        context = int(listed.get("max_model_len") or NO_CONTEXT)
        return Endpoint(url, key or MADE_UP_KEY, str(listed["id"]), context)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LaunchFailed(f"{url} does not list its models; is it another server?") from error


@contextmanager
def _started(http: httpx.Client, url: str, key: str | None, model: str) -> Iterator[None]:
    """Start a server for as long as the context lasts; its output goes to a file.

    Raises:
        SettingError: the address is not this machine's.
        LaunchFailed: the server ends before it answers.
    """
    host, port = http.base_url.host, http.base_url.port or 80
    if host not in LOOPBACK_HOSTS:
        raise SettingError(
            f"no server answers at {url}, and none can be started there from here; start "
            f"penstock serve on that machine, or leave --url out"
        )
    print(f"penstock: no server answers at {url}; starting one", file=sys.stderr)
    command = [sys.executable, "-m", "penstock", "serve", model]
    command += ["--host", host, "--port", str(port)]
    environment = {**os.environ, **({"PENSTOCK_API_KEY": key} if key else {})}
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is the program's
        )
        try:
            _wait(server, http, output)
            yield
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(server: subprocess.Popen[bytes], http: httpx.Client, output: IO[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < until:
        if _answers(http):
            return
        time.sleep(LOOK_SECONDS)
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    raise LaunchFailed(f"the server did not start: {lines[-1].removeprefix('penstock: ')}")


# ---- the program


def _print_setup(program: Program, target: Endpoint, setup: Setup) -> None:
    """Say on standard error where the program is pointed, and all that is set for it."""

    def shown(text: str) -> str:
        return text if target.key == MADE_UP_KEY else text.replace(target.key, "(the key)")

    lines = [
        f"penstock: {program.command} works with {target.model} at {target.url}, "
        f"{target.context_tokens:,} tokens of context; set for this start alone:",
        *(f"  {name}={shown(value)}" for name, value in setup.environment.items()),
        *(f"  without {name}" for name in setup.unset if name in os.environ),
    ]
    if setup.arguments:
        lines.append(f"  {' '.join(setup.arguments)}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _run(command: Sequence[str], setup: Setup) -> int:
    """Run the program in this terminal, and return its exit code."""
    environment: dict[str, Any] = {**os.environ, **setup.environment}
    for name in setup.unset:
        environment.pop(name, None)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's
    try:
        return subprocess.run(
            command, env=environment, preexec_fn=_default_interrupt, check=False
        ).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _default_interrupt() -> None:
    """Give the program back the signal that its parent leaves to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
