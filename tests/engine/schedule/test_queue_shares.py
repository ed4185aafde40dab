"""Queue shares by client: one that fills the queue makes room for others."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fault_setup import assert_right, error_of, made, prompt_of
from test_scheduler import Item, item, make

from penstock.engine.engine import _enqueue
from penstock.engine.handle import Handle
from penstock.engine.request import Request
from penstock.engine.schedule.queue_shares import BEYOND
from penstock.engine.schedule.scheduler import Scheduler, State
from penstock.errors import Displaced, QueueFull


def fill(scheduler: Scheduler[Item], client: str, count: int, n: int = 1) -> list[Item]:
    """Queue requests of a client with `n` answers each."""
    first = len(scheduler)
    jobs = [
        item(1_000 + first + number, left=10, client=client, group=1_000 + (first + number) // n)
        for number in range(count)
    ]
    for start in range(0, count, n):
        scheduler.add(*jobs[start : start + n])
    return jobs


def arrive(scheduler: Scheduler[Item], new: Item) -> list[Item]:
    """Submit a request; return the requests that it displaced."""
    displaced = scheduler.to_displace(new.owners, 1)
    for job in displaced:
        scheduler.act(job, "finish")
    scheduler.add(new)
    scheduler.check()
    return displaced


def test_single_client_may_fill_queue() -> None:
    scheduler = make(max_queue=8)
    fill(scheduler, "a", 8)
    with pytest.raises(QueueFull, match="8 waiting, 1 more requested, max_queue 8"):
        arrive(scheduler, item(1, client="a"))


def test_second_client_displaces_latest_requests_up_to_half() -> None:
    scheduler = make(max_queue=8)
    jobs = fill(scheduler, "a", 8)
    for number in range(4):
        assert arrive(scheduler, item(number, client="b")) == [jobs[7 - number]]
    for client in "ab":
        with pytest.raises(QueueFull):
            arrive(scheduler, item(9, client=client))
    assert scheduler.waiting_by_client == {"a": 4, "b": 4}


def test_clients_have_equal_queue_shares() -> None:
    scheduler = make(max_queue=12)
    fill(scheduler, "a", 12)
    numbers = iter(range(100))
    for client in "bcd":
        try:
            while True:
                arrive(scheduler, item(next(numbers), client=client))
        except QueueFull:
            pass
    assert scheduler.waiting_by_client == {"a": 3, "b": 3, "c": 3, "d": 3}


def test_only_whole_unstarted_requests_are_displaced() -> None:
    scheduler = make(max_queue=8)
    jobs = fill(scheduler, "a", 8, n=2)
    scheduler.act(jobs[6], "admit")
    assert arrive(scheduler, item(0, client="b")) == []
    assert arrive(scheduler, item(1, client="b")) == jobs[4:6]
    assert scheduler.waiting_by_client == {"a": 5, "b": 2}


def test_clients_may_queue_beyond_started_requests() -> None:
    scheduler = make(max_queue=8)
    jobs = fill(scheduler, "a", 8, n=8)
    scheduler.act(jobs[0], "admit")
    assert arrive(scheduler, item(0, client="b")) == []
    for number in range(1, 4):
        assert arrive(scheduler, item(number, client="b")) == []
    for client in "ab":
        with pytest.raises(QueueFull):
            arrive(scheduler, item(4, client=client))
    assert scheduler.waiting_by_client == {"a": 7, "b": 4}


@pytest.mark.parametrize("seed", range(10))
def test_queue_is_bounded_and_shared_for_random_arrivals(seed: int) -> None:
    draw = random.Random(seed)
    scheduler, open_jobs = make(3, max_queue=draw.randrange(1, 9)), dict[int, Item]()
    for number in range(300):
        client, n = draw.choice("aaaabc"), draw.choice([1, 1, 2, 4])
        waiting = Counter(scheduler.waiting_by_client)
        new = [item(1_000 * number + k, client=client, group=number) for k in range(n)]
        try:
            displaced = scheduler.to_displace(new[0].owners, n)
        except QueueFull:
            share = scheduler.max_queue // len({*waiting, client})
            assert waiting.total() + n > scheduler.max_queue
            full = waiting.total() + n > BEYOND * scheduler.max_queue
            assert waiting[client] + n > share or full, "its share was free"
            displaced, new = [], []
        for job in displaced:
            assert job.client != client
            assert job.state is State.WAITING
            del open_jobs[job.id]
            scheduler.act(job, "finish")
        if displaced:
            now = scheduler.waiting_by_client
            assert all(now[job.client] >= waiting[client] + n for job in displaced)
        scheduler.add(*new)
        open_jobs.update((job.id, job) for job in new)
        if (following := scheduler.next_in_line()) is not None and scheduler.free_places:
            scheduler.act(following, "admit")
        if open_jobs and draw.random() < 0.4:
            ended = open_jobs.pop(draw.choice(list(open_jobs)))
            scheduler.act(ended, "finish")
        scheduler.check()
        assert sum(scheduler.waiting_by_client.values()) <= BEYOND * scheduler.max_queue


def test_displaced_request_fails_and_others_continue() -> None:
    with made(max_batch_size=1, max_queue=4) as setup:
        first = setup.ask(20, 4, client="a")
        setup.step()
        waiting = [setup.ask(20, 4, client="a") for _ in range(4)]
        with pytest.raises(QueueFull):
            setup.ask(20, 4, client="a")
        other = setup.ask(20, 4, client="b")
        error = error_of(waiting[-1])
        assert isinstance(error, Displaced)
        assert (error.status, "removed for another client" in str(error)) == (429, True)
        setup.drain()
        for handle in (first, other, *waiting[:-1]):
            assert_right(handle)
        stats = setup.core.view.stats()
        assert (stats.waiting, stats.waiting_clients, stats.most_waiting) == (0, 0, 0)


def test_multi_prompt_call_is_queued_whole_or_refused() -> None:
    with made(max_batch_size=1, max_queue=4) as setup:
        setup.ask(20, 4, client="a")
        setup.step()
        for _ in range(4):
            setup.ask(20, 4, client="a")
        request = Request(prompt=prompt_of(20), max_tokens=4, client="b", group="call")
        for answers in (3, 2):
            handles = [Handle(request, setup.core.cancel) for _ in range(answers)]
            if answers == 3:
                with pytest.raises(QueueFull):
                    _enqueue(setup.core, handles)
            else:
                _enqueue(setup.core, handles)
            displaced = sum(setup.state(handle) is State.DONE for handle in setup.asked)
            assert displaced == {3: 0, 2: 2}[answers]


def test_check_detects_fifo_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    scheduler = make(max_queue=2)
    monkeypatch.setattr(scheduler, "to_displace", lambda owners, added: [])
    fill(scheduler, "a", 2)
    scheduler.add(item(1, client="b"))
    scheduler.add(item(2, client="b"), item(3, client="b"))
    with pytest.raises(AssertionError, match="5 sequences in a queue of 2"):
        scheduler.check()
