"""Server threads: clients take turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context

import pytest

from penstock.models.mlx_lm import load_tokenizer
from penstock.recall import MODEL_PATH
from penstock.server.access import CLIENT
from penstock.server.prompt_memory import HOLD, PromptMemory
from penstock.server.prompts import Prompts
from penstock.server.workers import LONG_BYTES, FairThread, Workers

SHORT, MIDDLE, LONG = 100, LONG_BYTES - 1_000, 4 * LONG_BYTES
"""Bytes of bodies: two for the thread of short prompts, one for that of long ones."""


def task_of(client: str, nbytes: int, call: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Start a call for a client whose request has a body of this size."""
    hold = PromptMemory(100_000_000).hold()
    hold.body_bytes = nbytes

    def start() -> asyncio.Task[None]:
        CLIENT.set(client)
        HOLD.set(hold)
        return asyncio.ensure_future(call())

    return copy_context().run(start)


@pytest.mark.parametrize(
    ("theirs", "own"), [(MIDDLE, SHORT), (LONG, LONG_BYTES), (LONG, SHORT)], ids=str
)
def test_client_with_many_long_prompts_does_not_block_others(theirs: int, own: int) -> None:
    """At most two of its prompts are tokenized before the other client's."""
    prompts = Prompts(load_tokenizer(MODEL_PATH))
    ends: list[str] = []

    async def both() -> None:
        workers = Workers(64)

        def reading(client: str, nbytes: int) -> asyncio.Task[None]:
            text = ("The quiet dolphin knows the code.\n" * (nbytes // 34 + 1))[:nbytes]
            talk = [{"role": "user", "content": text}]

            async def read() -> None:
                await workers.read(prompts.render, talk)
                ends.append(client)

            return task_of(client, nbytes, read)

        many = [reading("many", theirs) for _ in range(12)]
        await asyncio.sleep(0.05)
        ends.append("asks")
        await reading("one", own)
        await asyncio.gather(*many)
        workers.close()

    asyncio.run(both())
    assert len(ends) == 14 and ends.index("one") - ends.index("asks") <= 3, ends


def test_clients_take_turns_in_order() -> None:
    order: list[str] = []

    async def all_of_them() -> None:
        thread, gate = FairThread("some"), threading.Event()
        first = asyncio.ensure_future(thread.run("a", gate.wait))
        await asyncio.sleep(0)
        waiting = "aaabbca"
        rest = [
            asyncio.ensure_future(thread.run(name, lambda name=name: order.append(name)))  # type: ignore[misc]
            for name in waiting
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *rest)
        thread.close()

    asyncio.run(all_of_them())
    assert "".join(order) == "bcabaaa"


def test_cancelled_call_gives_turn_to_next() -> None:
    order: list[str] = []

    async def some() -> None:
        thread, gate = FairThread("some"), threading.Event()
        first = asyncio.ensure_future(thread.run("a", gate.wait))
        await asyncio.sleep(0)
        gone, last = (
            asyncio.ensure_future(thread.run(name, lambda name=name: order.append(name)))  # type: ignore[misc]
            for name in "bc"
        )
        await asyncio.sleep(0)
        gone.cancel()
        first.cancel()  # its call goes on in the thread, which others wait for
        await asyncio.sleep(0.05)
        assert not order and not last.done()
        gate.set()
        await asyncio.wait_for(last, 60)
        assert thread._busy is False or await thread.run("d", lambda: True)
        thread.close()

    asyncio.run(some())
    assert order == ["c"]


def test_turn_granted_during_cancellation_goes_to_next() -> None:
    async def some() -> None:
        thread, gate = FairThread("some"), threading.Event()
        first = asyncio.ensure_future(thread.run("a", gate.wait))
        await asyncio.sleep(0)
        gone = asyncio.ensure_future(thread.run("b", time.monotonic))
        last = asyncio.ensure_future(thread.run("c", time.monotonic))
        await asyncio.sleep(0)
        gate.set()
        while "b" not in thread._turns:
            await asyncio.sleep(0)
        gone.cancel()  # its turn is given, and it has not begun
        await first
        assert await asyncio.wait_for(last, 60) > 0
        thread.close()

    asyncio.run(some())
