"""Descriptions of `penstock serve` as a service of the user: a systemd unit, a launchd agent."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Sequence
from pathlib import Path

UNIT_NAME = "penstock.service"
AGENT_LABEL = "mlx.penstock.serve"
STOP_SECONDS = 90
"""Seconds from SIGTERM to SIGKILL; `--drain-timeout` is 30 by default."""
RESTART_SECONDS = 10
USAGE_CODE = 2
"""Exit code of a wrong flag or model, after which a restart is useless."""
_PLAIN_WORD = re.compile(r"[\w@+=:,./-]+")


def systemd_unit(command: Sequence[str]) -> str:
    """Return the text of a user unit that runs a command, and restarts it after a failure.

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
    """Return the property list of an agent that runs a command, and restarts it after a failure."""
    agent = {
        "Label": AGENT_LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": STOP_SECONDS,
        "ProcessType": "Interactive",  # a background process gets the slow cores
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return plistlib.dumps(agent)


def _systemd_word(word: str) -> str:
    """Quote a word of a command line: systemd expands `%` and `$`, also within quotes."""
    if _PLAIN_WORD.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped.replace("%", "%%").replace("$", "$$")}"'
