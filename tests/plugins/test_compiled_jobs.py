"""Compiled jobs on two threads: both meet, whether the second one looks for jobs or sleeps."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="jobs are compiled by Numba")

from penstock.plugins.cpu.compiled_jobs import HOT, Team, barrier, table_at, team


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
    table = np.zeros(7, np.int64)
    team.run(job.address, table)
    other = [1 + 3 + 6] * team.threads
    assert table[5 : 5 + team.threads].tolist() == other


def test_threads_of_a_job_meet(exchange: Any) -> None:
    pair = Team()
    for _ in range(2_000):
        run(pair, exchange)


def test_second_thread_sleeps_when_idle_and_is_woken(exchange: Any) -> None:
    pair = Team()
    if pair.threads == 1:
        pytest.skip("needs two processors")
    for _ in range(3):
        run(pair, exchange)
        deadline = time.monotonic() + 20
        while pair._board[HOT] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not pair._board[HOT], "the second thread never slept"
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.1, "an idle team computes"


def test_teams_of_several_threads_are_independent_and_end(exchange: Any) -> None:
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
