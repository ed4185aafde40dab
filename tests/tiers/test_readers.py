"""Reader threads: concurrent reads, and no process waits for a hung disk."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import wait

import pytest
from patience import SOON

from penstock.tiers import readers as module
from penstock.tiers.readers import Readers


class Room:
    """The destination of a read."""


def test_results_and_errors_are_returned() -> None:
    readers = Readers(2, "test")
    good, bad = readers.submit(divmod, 7, 2), readers.submit(divmod, 7, 0)
    assert good.result(SOON) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        bad.result(SOON)
    assert readers.submit(divmod, 9, 2).result(SOON) == (4, 1), "an error ends no thread"
    readers.close(SOON)
    readers.close(SOON)


def test_two_reads_run_concurrently() -> None:
    readers, both = Readers(2, "test"), threading.Barrier(2)
    calls = [readers.submit(both.wait, SOON) for _ in range(2)]
    assert sorted(call.result(SOON) for call in calls) == [0, 1]
    readers.close(SOON)


def test_threads_start_with_first_call_and_end() -> None:
    def mine() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("mine")]

    readers = Readers(2, "mine")
    assert mine() == []
    readers.submit(len, "").result(SOON)
    assert sorted(mine()) == ["mine-0", "mine-1"]
    readers.close(SOON)
    assert mine() == []


def test_finished_call_is_not_retained() -> None:
    readers, room = Readers(1, "test"), Room()
    kept = weakref.ref(room)
    wait([readers.submit(id, room)], SOON)
    readers.submit(id, 0).result(SOON)  # the thread is behind the first one
    del room
    gc.collect()
    assert kept() is None
    readers.close(SOON)


def test_failed_read_releases_buffers() -> None:
    def fails(_: Room) -> None:
        try:
            raise KeyError("what it is about")
        except KeyError as error:  # its frames know who has called them
            raise OSError("gone") from error

    readers, room = Readers(1, "test"), Room()
    kept = weakref.ref(room)
    gc.disable()
    try:
        wait([readers.submit(fails, room)], SOON)
        readers.submit(id, 0).result(SOON)
        del room
        assert kept() is None
    finally:
        gc.enable()
    readers.close(SOON)


HANGS = """
import threading
from penstock.tiers import readers as module
from penstock.tiers.readers import Readers
Readers(2, "test").submit(threading.Event().wait)
"""


def test_process_exits_while_disk_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=SOON)


def test_only_slow_calls_run_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers, here = Readers(2, "test"), threading.current_thread().name
    numbers = [(number,) for number in range(5)]

    def named(number: int) -> tuple[str, int]:
        if number == 3:
            raise ValueError("the third")
        return threading.current_thread().name, number

    def mapped() -> list[str]:
        answers = readers.map(named, numbers)
        assert isinstance(answers.pop(3).exception(0.0), ValueError)
        names, given = zip(*(answer.result(0.0) for answer in answers), strict=True)
        assert given == (0, 1, 2, 4)
        return list(names)

    assert readers.map(named, []) == []
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.0)
    names = mapped()
    assert len(set(names[:3])) == 1 and here not in names, "the first share is one thread's"
    assert here not in mapped()
    monkeypatch.setattr(module, "QUICK_SECONDS", SOON)
    assert here not in mapped(), "it is not known yet"
    assert mapped() == [here] * 4
    readers.close(SOON)
