"""`penstock launch`: starts a coding agent, and a server for it if none answers.

An agent's settings are environment variables, arguments, and files in a temporary folder. The
user's own configuration is neither read nor written.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
import typer

from penstock import children
from penstock.cli import options
from penstock.config import LOOPBACK_HOSTS
from penstock.errors import PenstockError, SettingError
from penstock.plurals import counted
from penstock.recall import MODEL_PATH

if TYPE_CHECKING:
    import httpx
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from shlex import quote
from urllib.parse import urlsplit

FOLDER = "{folder}"
"""Placeholder for the temporary folder, which is created later."""
KEY_VARIABLE = "PENSTOCK_API_KEY"
MADE_UP_KEY = "none-needed"
"""API key for a server without keys, because the agents require one."""
MOST_OUTPUT = 32_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    """`http://host:port`, without `/v1`."""
    key: str
    model: str
    context_tokens: int

    @property
    def output_tokens(self) -> int:
        return min(MOST_OUTPUT, self.context_tokens // 2)


@dataclass(frozen=True, slots=True)
class Setup:
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Environment variables to unset, because they would select another server."""

    def in_folder(self, folder: str) -> Setup:
        return Setup(
            {name: value.replace(FOLDER, folder) for name, value in self.environment.items()},
            tuple(argument.replace(FOLDER, folder) for argument in self.arguments),
            self.files,
            self.unset,
        )


@dataclass(frozen=True, slots=True)
class Program:
    command: str
    package: str
    setup: Callable[[Endpoint], Setup]


def past_proxies(setup: Setup, target: Endpoint, environment: Mapping[str, str]) -> Setup:
    """Return a setup that bypasses the environment's proxies for a server on this machine.

    >>> at_home = Endpoint("http://127.0.0.1:8080", "none", "m", 100)
    >>> dict(past_proxies(Setup({}), at_home, {"http_proxy": "x", "no_proxy": "a"}).environment)
    {'no_proxy': 'a,127.0.0.1', 'NO_PROXY': 'a,127.0.0.1'}
    """
    host = urlsplit(target.url).hostname
    proxied = any(name.lower().endswith("_proxy") for name in environment)
    if host not in LOOPBACK_HOSTS or not proxied:
        return setup
    left_out = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = f"{left_out},{host}".removeprefix(",")
    return replace(setup, environment={**setup.environment, "no_proxy": hosts, "NO_PROXY": hosts})


def claude(target: Endpoint) -> Setup:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    window = str(target.context_tokens)
    # Claude Code raises smaller values to this size, with a warning, but not MAX_CONTEXT_TOKENS.
    long = target.context_tokens >= 100_000
    return Setup(
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            **{f"ANTHROPIC_{name}": target.model for name in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": window,
            **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": window} if long else {}),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output_tokens),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def codex(target: Endpoint) -> Setup:
    values = {
        "model": target.model,
        "model_provider": "penstock",
        "model_context_window": target.context_tokens,
        "model_providers.penstock.name": "penstock",
        "model_providers.penstock.base_url": f"{target.url}/v1",
        "model_providers.penstock.wire_api": "responses",
        "model_providers.penstock.env_key": KEY_VARIABLE,
    }
    # JSON strings and numbers are also valid TOML.
    pairs = (("-c", f"{name}={json.dumps(value)}") for name, value in values.items())
    return Setup({KEY_VARIABLE: target.key}, tuple(word for pair in pairs for word in pair))


def opencode(target: Endpoint) -> Setup:
    limit = {"context": target.context_tokens, "output": target.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "penstock",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    name = f"penstock/{target.model}"
    content = {"model": name, "small_model": name, "provider": {"penstock": provider}}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def pi(target: Endpoint) -> Setup:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": target.context_tokens,
        "maxTokens": target.output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "name": "penstock",
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": KEY_VARIABLE,
        "models": [model],
    }
    extension = (
        f'export default (pi) => pi.registerProvider("penstock", {json.dumps(provider, indent=2)});'
    )
    return Setup(
        {KEY_VARIABLE: target.key},
        ("-e", f"{FOLDER}/penstock.js", "--provider", "penstock", "--model", target.model),
        {"penstock.js": f"{extension}\n"},
    )


def qwen(target: Endpoint) -> Setup:
    model = {
        "id": target.model,
        "name": target.model,
        "envKey": KEY_VARIABLE,
        "baseUrl": f"{target.url}/v1",
        "generationConfig": {"contextWindowSize": target.context_tokens},
    }
    settings = {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return Setup(
        {
            KEY_VARIABLE: target.key,
            "OPENAI_API_KEY": target.key,
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_MODEL": target.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{FOLDER}/settings.json",
        },
        ("--auth-type", "openai", "--model", target.model),
        {"settings.json": f"{json.dumps(settings, indent=2)}\n"},
    )


PROGRAMS = {
    program.command: program
    for program in (
        Program("claude", "@anthropic-ai/claude-code", claude),
        Program("codex", "@openai/codex", codex),
        Program("opencode", "opencode-ai", opencode),
        Program("pi", "@mariozechner/pi-coding-agent", pi),
        Program("qwen", "@qwen-code/qwen-code", qwen),
    )
}


def shell_lines(
    command: tuple[str, ...], setup: Setup, arguments: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield POSIX shell commands that do the same as `penstock launch`."""
    if setup.files:
        yield "PENSTOCK_FOLDER=$(mktemp -d)"
    for name, text in setup.files.items():
        yield f"printf %s {quote(text)} > {_shell_word(f'{FOLDER}/{name}')}"
    for name in setup.unset:
        yield f"unset {name}"
    for name, value in setup.environment.items():
        yield f"export {name}={_shell_word(value)}"
    yield " ".join(map(_shell_word, (*command, *setup.arguments, *arguments)))


def _shell_word(text: str) -> str:
    """Quote a word for a POSIX shell; the temporary folder becomes a variable.

    >>> print(_shell_word("a b"), _shell_word("{folder}/x"))
    'a b' "$PENSTOCK_FOLDER"/x
    """
    parts = [quote(part) if part else "" for part in text.split(FOLDER)]
    return '"$PENSTOCK_FOLDER"'.join(parts) or "''"


START_SECONDS = 1_800.0
"""Maximum seconds to wait for a server to load its model, including a download."""
SILENT_SECONDS = 60.0
"""Maximum seconds to wait without an answer, output or CPU time of a starting server."""
ANSWER_SECONDS = 2.0
"""Timeout in seconds of one probe of a starting server."""
LOOK_SECONDS = 0.2
NO_CONTEXT = 32_768
"""Context size in tokens to assume if the server does not report it."""


class LaunchFailed(PenstockError):
    status = 502


def launch(
    program: Annotated[
        str, typer.Argument(help=f"Coding agent: {', '.join(PROGRAMS)}.", metavar="PROGRAM")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for the agent, after --.", metavar="[-- ARGS]"),
    ] = None,
    url: options.ServerURL = options.SERVER_URL,
    api_key: options.ServerKey = None,
    model: options.Model = str(MODEL_PATH),
    only_print: Annotated[
        bool,
        typer.Option("--print", help="Print the shell commands instead of starting the agent."),
    ] = False,
) -> None:
    """Start a coding agent that uses a model on this machine.

    Address, key, model and context size are set for this run only, with environment variables,
    arguments and a temporary folder. The agent's own configuration is not changed. An agent that is
    not installed is run with npx. If no server answers at --url, one is started there, with
    settings from the environment, such as PENSTOCK_MEMORY_LIMIT; it ends with the agent.
    """
    from penstock.cli.remote import base_url  # httpx takes a moment to import

    agent = _program(program)
    user_arguments = tuple(arguments or ())
    server = _server(base_url(url), api_key, model, may_start=not only_print)
    with _ended_by_signals(), server as target:
        setup = past_proxies(agent.setup(target), target, os.environ)
        command = _command(agent)
        if only_print:
            for line in shell_lines(command, setup, user_arguments):
                print(line)
            return
        with tempfile.TemporaryDirectory(prefix="penstock-launch-") as folder:
            placed = setup.in_folder(folder)
            for name, text in setup.files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            _print_setup(agent, target, placed)
            code = _run((*command, *placed.arguments, *user_arguments), placed)
    raise typer.Exit(code)


def _program(name: str) -> Program:
    if name not in PROGRAMS:
        raise SettingError(f"{name} is not supported; choose one of {', '.join(PROGRAMS)}")
    return PROGRAMS[name]


def _command(program: Program) -> tuple[str, ...]:
    if shutil.which(program.command):
        return (program.command,)
    if shutil.which("npx"):
        return ("npx", "--yes", program.package)
    raise SettingError(
        f"{program.command} is not installed, and there is no npx to run it; install Node.js, or "
        f"npm install -g {program.package}"
    )


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that processes started in the context end."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {sig: signal.signal(sig, leave) for sig in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


# ---- the server


@contextmanager
def _server(url: str, key: str | None, model: str, *, may_start: bool) -> Iterator[Endpoint]:
    import httpx

    from penstock.cli.remote import on_this_machine

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    proxied = not on_this_machine(url)
    with httpx.Client(base_url=url, headers=headers, timeout=30.0, trust_env=proxied) as http:
        if _answers(http, SILENT_SECONDS):
            yield _target(http, url, key)
            return
        if not may_start:
            raise SettingError(f"no server answers at {url}; start one: penstock serve")
        with _started(http, url, key, model):
            yield _target(http, url, key)


def _answers(http: httpx.Client, seconds: float) -> bool:
    import httpx

    try:
        http.get("/health", timeout=httpx.Timeout(seconds, connect=10.0))
    except httpx.ReadTimeout:
        raise LaunchFailed(
            f"the server at {http.base_url} has not answered for {seconds:.0f} s; it may be "
            f"loading its model, or hang: try again later, or use another with --url"
        ) from None
    except httpx.TransportError:
        return False
    return True


def _target(http: httpx.Client, url: str, key: str | None) -> Endpoint:
    response = http.get("/v1/models")
    if response.status_code == 401:
        raise LaunchFailed(f"{url} requires a key: --api-key, or PENSTOCK_API_KEY")
    try:
        listed = response.json()["data"][0]
        context = int(listed.get("max_model_len") or NO_CONTEXT)
        return Endpoint(url, key or MADE_UP_KEY, str(listed["id"]), context)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LaunchFailed(f"{url} does not list its models; is it another server?") from error


@contextmanager
def _started(http: httpx.Client, url: str, key: str | None, model: str) -> Iterator[None]:
    """Run a server within the context, with its output in a temporary file."""
    host, port = http.base_url.host, http.base_url.port or 80
    if host not in LOOPBACK_HOSTS:
        raise SettingError(
            f"no server answers at {url}, and none can be started there from here; start "
            f"penstock serve on that machine, or remove --url"
        )
    print(f"penstock: no server answers at {url}; starting one", file=sys.stderr)
    command = [sys.executable, "-m", "penstock", "serve", model]
    command += ["--host", host, "--port", str(port)]
    environment = {**os.environ, **({"PENSTOCK_API_KEY": key} if key else {})}
    with tempfile.TemporaryFile() as output:
        server = children.start(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the agent
        )
        try:
            _wait(server, http, output)
            yield
        finally:
            children.end(server)


def _wait(server: subprocess.Popen[bytes], http: httpx.Client, output: IO[bytes]) -> None:
    """Wait until a server answers; raise LaunchFailed if it ends, or shows no activity."""
    began = heard = time.monotonic()
    signs = _signs(server, output)
    while server.poll() is None:
        with suppress(LaunchFailed):  # it listens, but is loading its model
            if _answers(http, ANSWER_SECONDS):
                return
        time.sleep(LOOK_SECONDS)
        now, seen = time.monotonic(), _signs(server, output)
        if seen != signs:
            signs, heard = seen, now
        if now - heard > SILENT_SECONDS or now - began > START_SECONDS:
            raise LaunchFailed(
                f"the server has not answered for {now - began:.0f} s, and used no CPU time for "
                f"{now - heard:.0f} s; try penstock serve by itself"
            )
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines() or ["no output"]
    raise LaunchFailed(f"the server did not start: {lines[-1].removeprefix('penstock: ')}")


def _signs(server: subprocess.Popen[bytes], output: IO[bytes]) -> tuple[float, ...]:
    written = os.fstat(output.fileno()).st_size
    with suppress(psutil.Error):
        times = psutil.Process(server.pid).cpu_times()
        return written, round(times.user + times.system, 1)
    return (written,)


# ---- the program


def _print_setup(program: Program, target: Endpoint, setup: Setup) -> None:

    def shown(text: str) -> str:
        return text if target.key == MADE_UP_KEY else text.replace(target.key, "(the key)")

    lines = [
        f"penstock: {program.command} uses {target.model} at {target.url}, "
        f"{counted(target.context_tokens, 'token')} of context; settings for this run:",
        *(f"  {name}={shown(value)}" for name, value in setup.environment.items()),
        *(f"  without {name}" for name in setup.unset if name in os.environ),
    ]
    if setup.arguments:
        lines.append(f"  {' '.join(setup.arguments)}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _run(command: Sequence[str], setup: Setup) -> int:
    environment: dict[str, Any] = {**os.environ, **setup.environment}
    for name in setup.unset:
        environment.pop(name, None)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent
    try:
        process = children.start(command, env=environment, preexec_fn=_default_interrupt)
        try:
            return process.wait()
        finally:
            children.end(process)
    finally:
        signal.signal(signal.SIGINT, before)


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
