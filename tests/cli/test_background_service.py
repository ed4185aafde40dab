"""`penstock service`: a script in place of each service manager records what it is asked."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_command import Call

from penstock.cli.background_service import ServiceRun, launchd_agent, systemd_unit

COMMAND = ["/opt/a b/python", "-m", "penstock", "serve", "50%", '$HOME "x" \\', "--port", "0"]
RECORDER = '#!/bin/sh\necho "$(basename "$0") $*" >> {log}\nexit {code}\n'


@pytest.fixture
def managers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose systemctl, launchctl, journalctl and tail write their words into a file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    log = tmp_path / "asked"
    log.touch()
    for name in ("systemctl", "launchctl", "journalctl", "tail"):
        write_recorder(programs / name, log, 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return log


def write_recorder(program: Path, log: Path, code: int) -> None:
    program.write_text(RECORDER.format(log=shlex.quote(str(log)), code=code))
    program.chmod(0o755)


def test_systemd_unit_is_installed_and_removed(managers: Path, call: Call) -> None:
    done = call("service", "install", "smollm2", "--memory-limit", "4GB")
    assert done.returncode == 0, done.stderr
    unit = managers.parent / ".config" / "systemd" / "user" / "penstock.service"
    assert f"ExecStart={sys.executable} -m penstock serve smollm2 --memory-limit 4GB\n" in (
        unit.read_text()
    )
    assert unit.stat().st_mode & 0o777 == 0o600
    assert call("service", "status").stdout == f"running: {unit}\n"
    assert call("service", "logs", "-n", "3", "--follow").returncode == 0
    assert call("service", "uninstall").stdout == f"removed {unit}\n"
    assert not unit.exists()
    assert managers.read_text().splitlines() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now penstock.service",
        "systemctl --user is-active --quiet penstock.service",
        "journalctl --user --unit penstock.service --no-pager -n 3 -f",
        "systemctl --user disable --now penstock.service",
    ]


def test_launchd_agent_is_installed_and_removed(
    managers: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for _ in range(2):  # the second replaces the first
        assert call("service", "install").returncode == 0
    library = managers.parent / "Library"
    agent = library / "LaunchAgents" / "mlx.penstock.serve.plist"
    assert plistlib.loads(agent.read_bytes())["ProgramArguments"][-2:] == ["penstock", "serve"]
    assert call("service", "logs").returncode == 2, "it has written nothing yet"
    (library / "Logs").mkdir()
    (library / "Logs" / "penstock.log").touch()
    assert call("service", "logs").returncode == 0
    assert call("service", "uninstall").returncode == 0
    asked = [re.sub(r"gui/\d+", "gui/U", line) for line in managers.read_text().splitlines()]
    assert asked == [
        f"launchctl bootstrap gui/U {agent}",
        "launchctl bootout gui/U/mlx.penstock.serve",
        f"launchctl bootstrap gui/U {agent}",
        f"tail -n 50 {library}/Logs/penstock.log",
        "launchctl bootout gui/U/mlx.penstock.serve",
    ]


def test_install_refuses_invalid_serve_flags(managers: Path, call: Call) -> None:
    for words in (["--port", "much"], ["--no-such-flag"]):
        done = call("service", "install", *words)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
    assert managers.read_text() == ""


def test_status_of_missing_or_stopped_service_exits_with_3(managers: Path, call: Call) -> None:
    assert call("service", "status").returncode == 3
    assert call("service", "uninstall").stdout == "not installed\n"
    assert call("service", "install").returncode == 0
    write_recorder(managers.parent / "bin" / "systemctl", managers, 3)
    done = call("service", "status")
    assert (done.returncode, done.stdout[:8]) == (3, "stopped:")
    done = call("service", "install")
    assert done.stderr.startswith("penstock: systemctl --user daemon-reload failed: exit code 3;")
    assert done.stderr.count("\n") == 1


def test_failing_install_leaves_what_was_there(managers: Path, call: Call) -> None:
    unit = managers.parent / ".config" / "systemd" / "user" / "penstock.service"
    systemctl = managers.parent / "bin" / "systemctl"
    write_recorder(systemctl, managers, 1)
    assert call("service", "install", "first").returncode == 2
    assert not unit.exists()
    write_recorder(systemctl, managers, 0)
    assert call("service", "install", "first").returncode == 0
    write_recorder(systemctl, managers, 1)
    managers.write_text("")
    assert call("service", "install", "second").returncode == 2
    assert unit.read_text().count(" serve first\n") == 1
    assert managers.read_text().splitlines() == [
        "systemctl --user disable --now penstock.service",
        "systemctl --user daemon-reload",
        "systemctl --user disable --now penstock.service",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now penstock.service",
    ]


def test_missing_service_manager_gives_one_line_error(
    managers: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(managers.parent))
    done = call("service", "install")
    assert done.returncode == 2
    assert "systemctl is not on this machine" in done.stderr
    assert call("service", "install", "--print").stdout == systemd_unit(
        ServiceRun([sys.executable, "-m", "penstock", "serve"], Path.cwd())
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_analyze_accepts_unit(tmp_path: Path) -> None:
    unit = tmp_path / "penstock.service"
    unit.write_text(systemd_unit(ServiceRun([sys.executable, *COMMAND[1:]], tmp_path)))
    verify = ["systemd-analyze", "verify", "--user", "--recursive-errors=no", str(unit)]
    user = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(verify, capture_output=True, text=True, env=user)
    assert "penstock.service" not in done.stderr
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=sometimes"))
    done = subprocess.run(verify, capture_output=True, text=True, env=user)
    assert "penstock.service" in done.stderr, "the check sees nothing"


def test_systemd_command_line_is_quoted() -> None:
    unit = systemd_unit(ServiceRun(COMMAND, Path("/my models/50%")))
    lines = [line for line in unit.splitlines() if line.startswith(("ExecStart=", "Working"))]
    assert lines == [
        'ExecStart="/opt/a b/python" -m penstock serve "50%%" "$$HOME \\"x\\" \\\\" --port 0',
        "WorkingDirectory=/my models/50%%",
    ]


def test_service_gets_folder_and_time_to_drain(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("service", "install", "--print", "m.gguf", "--drain-timeout", "300")
    unit = call(*words).stdout
    assert f"\nWorkingDirectory={Path.cwd()}\n" in unit
    assert "\nTimeoutStopSec=360\n" in unit
    monkeypatch.setattr(sys, "platform", "darwin")
    agent = plistlib.loads(call(*words).stdout.encode())
    assert (agent["WorkingDirectory"], agent["ExitTimeOut"]) == (str(Path.cwd()), 360)


def test_launchd_agent_restarts_after_failure_only(tmp_path: Path) -> None:
    agent = plistlib.loads(launchd_agent(ServiceRun(COMMAND, tmp_path), tmp_path / "log"))
    assert agent["ProgramArguments"] == COMMAND
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["RunAtLoad"] is True
