"""Service files for `penstock serve` as a user service: systemd unit and launchd agent."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Sequence
from pathlib import Path

UNIT_NAME = "penstock.service"
AGENT_LABEL = "mlx.penstock.serve"
STOP_SECONDS = 90
"""Seconds from SIGTERM to SIGKILL; must exceed `--drain-timeout`, which is 30 by default."""
RESTART_SECONDS = 10
USAGE_CODE = 2
"""Exit code for a wrong flag or model, after which a restart would fail again."""
_PLAIN_WORD = re.compile(r"[\w@+=:,./-]+")


def systemd_unit(command: Sequence[str]) -> str:
    """Return a systemd user unit that runs a command, and restarts it after a failure.

    >>> [line for line in systemd_unit(["penstock", "serve", "my model"]).splitlines()
    ...  if line.startswith("ExecStart")]
    ['ExecStart=penstock serve "my model"']
    """
    return f"""\
[Unit]
Description=penstock: language models within a fixed amount of memory
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={" ".join(_systemd_word(word) for word in command)}
Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={USAGE_CODE}
TimeoutStopSec={STOP_SECONDS}

[Install]
WantedBy=default.target
"""


def launchd_agent(command: Sequence[str], log: Path) -> bytes:
    """Return a launchd property list that runs a command, and restarts it after a failure."""
    agent = {
        "Label": AGENT_LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": STOP_SECONDS,
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
