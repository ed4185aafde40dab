"""Service files for `penstock serve` as a user service: systemd unit and launchd agent."""

from __future__ import annotations

import math
import plistlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ServerSettings

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
