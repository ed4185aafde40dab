"""Compiled jobs on two threads synchronize, whether the second thread polls or sleeps."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="jobs are compiled by Numba")

from penstock.plugins.cpu import compiled_jobs
from penstock.plugins.cpu.compiled_jobs import (
    DONE,
    HOT,
    TICKET,
    OtherLoad,
    Team,
    barrier,
    table_at,
    team,
)
from penstock.plugins.cpu.cpu_rows import cores


@pytest.fixture(scope="module")
def exchange() -> Any:
    """Return a job in which each thread writes a number, waits, and reads the other's."""
    from numba import cfunc, types

    wait, table_of = barrier(), table_at()

    @cfunc(types.void(types.int64, types.int64))
    def job(thread: Any, address: Any) -> None:
        table = table_of(address, 7)
        waited = 0
        for number in range(3):
            table[3 + thread] = table[3 + thread] + 1 + number
            waited = wait(address, table[0], waited)
            table[5 + thread] += table[3 + (table[0] - 1 - thread)]
            waited = wait(address, table[0], waited)

    return job


def run(team: Team, job: Any) -> None:
    table, active = np.zeros(7, np.int64), team.active
    team.run(job.address, table)
    assert table[5 : 5 + active].tolist() == [1 + 3 + 6] * active


def test_threads_of_a_job_synchronize(exchange: Any) -> None:
    pair = Team(OtherLoad(None, 2))
    for _ in range(2_000):
        run(pair, exchange)


def test_busy_machine_leaves_jobs_to_one_thread(
    exchange: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cores() == 1:
        pytest.skip("needs two processors")
    monkeypatch.setattr(compiled_jobs, "LOAD_SECONDS", 0.0)
    path, processors = tmp_path / "loadavg", 4
    with path.open("w+b", buffering=0) as file:

        def set_runnable(count: int) -> None:
            file.seek(0)
            file.write(f"0.50 1.25 0.99 {count:3}/180 4711\n".encode())

        set_runnable(2)
        pair = Team(OtherLoad(file.fileno(), processors))
        active = []
        for runnable in [2] * 100 + [7] * 100 + [2] * 200:
            set_runnable(runnable)
            active.append(pair.active)
            run(pair, exchange)
    assert set(active[:101]) == {2}, "only its own threads run"
    alone = active.index(1)
    assert 105 < alone < 140, "not after a moment of load"
    again = active.index(2, alone)
    assert 200 < again < 260 and set(active[again:]) == {2}


def test_unreadable_load_counts_as_low(tmp_path: Path) -> None:
    path = tmp_path / "loadavg"
    for text in ("", "0.50 1.25", "0.50 1.25 0.99 many/180 4711"):
        path.write_text(text)
        with path.open("rb") as file:
            assert not OtherLoad(file.fileno(), 1).is_high(1)


def test_load_of_this_machine_is_read(exchange: Any) -> None:
    if not Path("/proc/loadavg").exists() or cores() == 1:
        pytest.skip("needs Linux and two processors")
    pair, until = Team(), time.monotonic() + 30
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores())]
    try:
        while pair.active == 2 and time.monotonic() < until:
            run(pair, exchange)
        assert pair.active == 1
        run(pair, exchange)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_idle_second_thread_sleeps_until_woken(exchange: Any) -> None:
    pair = Team(OtherLoad(None, 2))
    if pair.threads == 1:
        pytest.skip("needs two processors")
    for _ in range(3):
        run(pair, exchange)
        sleep_again(pair)
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.1, "an idle team computes"


def test_thread_teams_are_independent_and_end(exchange: Any) -> None:
    def helpers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "penstock-layers"}

    before, failures = helpers(), []

    def work() -> None:
        try:
            for _ in range(300):
                run(team(), exchange)
        except AssertionError as error:  # pragma: no cover - the test fails then
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    del threads, thread
    deadline = time.monotonic() + 20
    while helpers() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not helpers() - before


def test_interrupted_job_is_completed(exchange: Any) -> None:
    """A signal handler of Python raises at any of its instructions, with a sleeping thread."""
    pair = Team(OtherLoad(None, 2))
    if pair.threads == 1:
        pytest.skip("needs two processors")
    interrupted = 0
    for number in range(200):
        sleep_again(pair)
        if raised_at(number, pair, exchange):
            interrupted += 1
            assert pair._board[TICKET] == pair._board[DONE], f"at instruction {number}"
            run(pair, exchange)
        else:
            break
    assert interrupted > 20


def sleep_again(pair: Team) -> None:
    deadline = time.monotonic() + 20
    while pair._board[HOT] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not pair._board[HOT], "the second thread never slept"


def raised_at(number: int, pair: Team, job: Any) -> bool:
    """Interrupt a job at an instruction of `Team.run`; return whether it was reached."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not Team.run.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    table = np.zeros(7, np.int64)
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        pair.run(job.address, table)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


FORKS = """
import os, signal
import numpy as np
from numba import cfunc, types
from penstock.plugins.cpu.compiled_jobs import Team, barrier, table_at, team

wait, table_of = barrier(), table_at()

@cfunc(types.void(types.int64, types.int64))
def job(thread, address):
    table = table_of(address, 5)
    wait(address, table[0], 0)
    table[3 + thread] = 1 + thread

def run(team):
    table = np.zeros(5, np.int64)
    team.run(job.address, table)
    return team.threads, table[3:].tolist()

other = Team()
expected = run(team()), run(other)
files = len(os.listdir("/proc/self/fd"))
child = os.fork()
if not child:
    signal.alarm(10)  # a job whose second thread is missing does not end
    assert run(other)[1][0] == 1
    assert len(os.listdir("/proc/self/fd")) < files or team().threads == 1
    assert run(team()) == expected[0]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (run(team()), run(other)) == expected
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_forked_process_starts_its_own_threads() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=60)
