"""No thread outlives the test file that started it, and none keeps pytest from exiting.

A test that fails may leave an engine that is still running, or a thread that waits for one. Python
waits at its end for every thread that is not a daemon, so that a run with all its results would
never end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

GRACE_SECONDS = 10.0
"""Longest wait for threads that are about to end, and for engines to close."""


def open_threads() -> set[threading.Thread]:
    """Return the other threads that Python joins at exit, and those of engines."""
    return {
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
        and thread is not threading.main_thread()
        and (not thread.daemon or thread.name == "penstock-engine")
    }


def end(threads: set[threading.Thread], seconds: float) -> set[threading.Thread]:
    """Close the engines among the threads, and return those still running after some seconds."""
    for thread in threads:
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        close = getattr(owner, "close", None)
        if close is not None:  # it may wait for its thread for minutes
            threading.Thread(target=close, name="close", daemon=True).start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


def described(threads: set[threading.Thread]) -> str:
    """Return names and stack positions of threads, for a message."""
    frames = sys._current_frames()
    lines = []
    for thread in sorted(threads, key=lambda thread: thread.name):
        stack = traceback.extract_stack(frames.get(thread.ident or 0))
        places = "".join(f"\n    {of.filename}:{of.lineno} {of.name}" for of in stack[-6:])
        lines.append(f"{thread.name}{' (daemon)' if thread.daemon else ''}{places}")
    return "\n".join(lines)


@pytest.fixture(scope="module", autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a file whose tests leave threads, and close the engines they left open."""
    before = open_threads()
    yield
    left = open_threads() - before
    until = time.monotonic() + 1.0  # one that was told to stop is no failure
    while left and time.monotonic() < until:
        time.sleep(0.01)
        left = {thread for thread in left if thread.is_alive()}
    if left:
        text = described(left)
        end(left, GRACE_SECONDS)
        pytest.fail(f"threads that this file left running:\n{text}", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit without joining the threads that are still running."""
    session = config.stash.get(SESSION, None)
    if session is None:
        return
    left = end(open_threads() - config.stash[BEFORE], GRACE_SECONDS)
    if left:
        print(f"these threads would not end:\n{described(left)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(session.exitstatus) or 1)


SESSION = pytest.StashKey[pytest.Session]()
BEFORE = pytest.StashKey[set[threading.Thread]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record the threads of pytest and its plugins."""
    session.config.stash[SESSION] = session
    session.config.stash[BEFORE] = open_threads()
