"""Child processes that end with their parent: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from penstock import children

SOON = 30.0
WAYS = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(not children.KERNEL_WATCHES, reason="Linux alone has it"),
        id="kernel",
    ),
    pytest.param(False, id="pipe"),
]
PARENT = """
import signal, subprocess, sys, time
from penstock import children
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
children.KERNEL_WATCHES = {kernel}
start = {start}
child = start([sys.executable, "-c", "import time; print('there', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def family(kernel: bool, start: str = "children.start") -> Iterator[tuple[int, int]]:
    """Start a process that has started a child; yield both ids."""
    text = PARENT.format(kernel=kernel, start=start)
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        yield parent.pid, child
    finally:
        parent.kill()
        parent.communicate()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def ends(process: int, seconds: float = SOON) -> bool:
    """Return whether a process ends in time."""
    until = time.monotonic() + seconds
    while psutil.pid_exists(process):
        if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("kernel", WAYS)
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_child_ends_with_parent(kernel: bool, sig: signal.Signals) -> None:
    with family(kernel) as (parent, child):
        os.kill(parent, sig)
        assert ends(child)


def test_popen_child_outlives_parent() -> None:
    """The control."""
    with family(kernel=True, start="subprocess.Popen") as (parent, child):
        os.kill(parent, signal.SIGKILL)
        assert ends(parent) and not ends(child, 1.0)


def test_child_ends_when_parent_exits_early() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    command = [sys.executable, "-I", "-S", children.__file__, gone.stdout.strip(), "-1"]
    done = subprocess.run([*command, "echo", "on"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("kernel", WAYS)
def test_run_matches_subprocess(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "KERNEL_WATCHES", kernel)
    code = "import sys; print(sys.stdin.read() + sys.argv[1]); sys.exit(3)"
    command = [sys.executable, "-c", code, "two words"]
    done = children.run(command, input=b"given ", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, b"given two words\n")
    with pytest.raises(subprocess.TimeoutExpired):
        children.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.2)
    missing = children.run(["no-such-program"], stderr=subprocess.PIPE)
    assert missing.returncode == 1 and missing.stderr.startswith(b"no-such-program: No such file")


@pytest.mark.parametrize("kernel", WAYS)
def test_unresponsive_process_is_killed(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "KERNEL_WATCHES", kernel)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    process = children.start(
        [sys.executable, "-c", f"{code}; time.sleep(600)"], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stdout.readline()
        children.end(process, seconds=0.1)
        assert process.returncode == -signal.SIGKILL
