"""`penstock service`: runs the server as a user service, started at login and after failures."""

from __future__ import annotations

import math
import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.cli.help_groups import ListedCommands
from penstock.config import ServerSettings
from penstock.errors import SettingError

UNIT_NAME = "penstock.service"
AGENT_LABEL = "mlx.penstock.serve"
STOP_RESERVE_SECONDS = 60
"""Seconds from the end of `--drain-timeout` to SIGKILL."""
RESTART_SECONDS = 10
USAGE_CODE = 2
"""Exit code for a wrong flag or model, after which a restart would fail again."""
_PLAIN_WORD = re.compile(r"[\w@+=:,./-]+")


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """How a service runs."""

    command: Sequence[str]
    folder: Path
    """Folder that relative paths of the command refer to."""
    drain_seconds: float = ServerSettings().drain_timeout_seconds
    """Time that open answers get when the service is stopped."""

    @property
    def stop_seconds(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return math.ceil(self.drain_seconds) + STOP_RESERVE_SECONDS


def systemd_unit(run: ServiceRun) -> str:
    """Return a systemd user unit that runs a command, and restarts it after a failure.

    >>> unit = systemd_unit(ServiceRun(["penstock", "serve", "my model"], Path("/models")))
    >>> [line for line in unit.splitlines() if line.startswith(("ExecStart", "Working"))]
    ['ExecStart=penstock serve "my model"', 'WorkingDirectory=/models']
    """
    return f"""\
[Unit]
Description=penstock: language models within a fixed amount of memory
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={" ".join(_systemd_word(word) for word in run.command)}
WorkingDirectory={str(run.folder).replace("%", "%%")}
Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={USAGE_CODE}
TimeoutStopSec={run.stop_seconds}

[Install]
WantedBy=default.target
"""


def launchd_agent(run: ServiceRun, log: Path) -> bytes:
    """Return a launchd property list that runs a command, and restarts it after a failure."""
    agent = {
        "Label": AGENT_LABEL,
        "ProgramArguments": list(run.command),
        "WorkingDirectory": str(run.folder),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": run.stop_seconds,
        "ProcessType": "Interactive",  # background processes get only efficiency cores
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return plistlib.dumps(agent)


def _systemd_word(word: str) -> str:
    """Quote a word of a command line; systemd expands `%` and `$` even within quotes."""
    if _PLAIN_WORD.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped.replace("%", "%%").replace("$", "$$")}"'


STOPPED = 3
"""Exit code of `status` if the service does not run, the same as systemctl's."""

app = typer.Typer(
    cls=ListedCommands,
    help="Run penstock serve in the background, from login on.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Service manager of this system, with the service file and the commands to control it."""

    program: str
    file: Path
    content: bytes
    log: Path | None
    """File of the service's output; None if the manager keeps its own logs."""
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    """Commands to run before the file is removed; they may fail if the service does not run."""
    state: tuple[str, ...]

    def check(self) -> None:
        """Raise SettingError if the manager is not installed on this system."""
        if shutil.which(self.program) is None:
            raise SettingError(
                f"{self.program} is not on this machine, so no service can be started; penstock "
                "service install --print shows the file for systemd or launchd"
            )


class ServeArguments(TyperCommand):
    """Command that passes all arguments but its own options on to `penstock serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {"-h", "--help", "--print"}
        ctx.obj = [word for word in args if word not in own]
        return super().parse_args(ctx, [word for word in args if word in own])


@app.command(cls=ServeArguments, options_metavar="[--print] [MODEL] [FLAGS OF SERVE]...")
def install(
    ctx: typer.Context,
    only_print: Annotated[
        bool,
        typer.Option("--print", help="Print the file of the service, and install nothing."),
    ] = False,
) -> None:
    """Start penstock serve now, at each login, and again after a failure.

    Takes a model and flags like penstock serve, for example penstock service install smollm2
    --memory-limit 4GB. Unknown flags are reported immediately; for other errors see penstock
    service logs. Installing again replaces the service. Put keys into a file: --keys FILE.
    """
    words: list[str] = ctx.obj
    serve = ctx.find_root().command.get_command(ctx, "serve")  # type: ignore[attr-defined]
    # Reports wrong flags now, not at each start.
    with serve.make_context("penstock serve", list(words)) as context:
        drain = context.params["drain_timeout"]
    command = [sys.executable, "-m", "penstock", "serve", *words]
    run = ServiceRun(command, Path.cwd())
    manager = _manager(run if drain is None else replace(run, drain_seconds=float(drain)))
    if only_print:
        print(manager.content.decode(), end="")
        return
    manager.check()
    replaced = manager.file.read_bytes() if manager.file.exists() else None
    if replaced is not None:
        _run_all(manager.stop, may_fail=True)
    manager.file.parent.mkdir(parents=True, exist_ok=True)
    manager.file.touch(mode=0o600)
    manager.file.chmod(0o600)  # a key may be among the flags
    manager.file.write_bytes(manager.content)
    try:
        _run_all(manager.start)
    except SettingError as error:
        _run_all(manager.stop, may_fail=True)
        if replaced is None:
            manager.file.unlink()
        else:
            manager.file.write_bytes(replaced)
            _run_all(manager.start, may_fail=True)
        raise SettingError(
            f"{error}; nothing was installed. Log in as this user, or on Linux run loginctl "
            f"enable-linger; for another service manager see penstock service install --print"
        ) from None
    print(f"installed {manager.file}\nstarted; penstock service logs shows its output")


@app.command()
def status() -> None:
    """Print whether the service is installed and runs; exit code 3 if it does not run."""
    manager = _manager()
    if not manager.file.exists():
        print("not installed")
        raise typer.Exit(STOPPED)
    manager.check()
    runs = subprocess.run(manager.state, capture_output=True).returncode == 0
    print(f"{'running' if runs else 'stopped'}: {manager.file}")
    if not runs:
        raise typer.Exit(STOPPED)


@app.command()
def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of lines to print.", min=1)
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines.")
    ] = False,
) -> None:
    """Print the last lines of the service's output."""
    manager = _manager()
    if manager.log is None:
        command = ["journalctl", "--user", "--unit", UNIT_NAME, "--no-pager"]
    elif manager.log.exists():
        command = ["tail"]
    else:
        raise SettingError(f"there is no {manager.log}: the service has not run yet")
    more = ["-n", str(lines), *(["-f"] if follow else [])]
    if shutil.which(command[0]) is None:
        raise SettingError(f"{command[0]} is not on this machine")
    subprocess.run([*command, *more, *([str(manager.log)] if manager.log else [])])


@app.command()
def uninstall() -> None:
    """Stop the service, and remove its file; models and caches stay."""
    manager = _manager()
    if not manager.file.exists():
        print("not installed")
        return
    if shutil.which(manager.program):
        _run_all(manager.stop, may_fail=True)
    manager.file.unlink()
    print(f"removed {manager.file}")


def _manager(run: ServiceRun | None = None) -> ServiceManager:
    run = run or ServiceRun([], Path.cwd())
    return _launchd(run) if sys.platform == "darwin" else _systemd(run)


def _systemd(run: ServiceRun) -> ServiceManager:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    systemctl = ("systemctl", "--user")
    return ServiceManager(
        program="systemctl",
        file=config / "systemd" / "user" / UNIT_NAME,
        content=systemd_unit(run).encode(),
        log=None,
        start=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", UNIT_NAME)),
        stop=((*systemctl, "disable", "--now", UNIT_NAME),),
        state=(*systemctl, "is-active", "--quiet", UNIT_NAME),
    )


def _launchd(run: ServiceRun) -> ServiceManager:
    library = Path.home() / "Library"
    file = library / "LaunchAgents" / f"{AGENT_LABEL}.plist"
    log = library / "Logs" / "penstock.log"
    domain = f"gui/{os.getuid()}"
    return ServiceManager(
        program="launchctl",
        file=file,
        content=launchd_agent(run, log),
        log=log,
        start=(("launchctl", "bootstrap", domain, str(file)),),
        stop=(("launchctl", "bootout", f"{domain}/{AGENT_LABEL}"),),
        state=("launchctl", "print", f"{domain}/{AGENT_LABEL}"),
    )


def _run_all(commands: Sequence[Sequence[str]], *, may_fail: bool = False) -> None:
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and not may_fail:
            reason = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise SettingError(f"{' '.join(command)} failed: {reason}")
