"""Two streams of MLX's CPU back end, which run on two cores: for work that falls into parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx

LANES = 2


class _Lane(threading.local):
    """A thread's second stream; streams cannot be shared between threads."""

    stream: mx.Stream | None = None
    taken = False


_second = _Lane()


@contextmanager
def lane(number: int | None) -> Iterator[None]:
    """Put what is computed here on one of two streams, by its number's parity; None: neither.

    Two streams of the CPU back end run on two cores. A lane within a lane stays in it.
    """
    if number is None or _second.taken or not has_lanes():
        yield
        return
    _second.taken = True
    try:
        if number % 2 == 0:
            yield
        else:
            if _second.stream is None:
                _second.stream = mx.new_stream(mx.cpu)
            with mx.stream(_second.stream):
                yield
    finally:
        _second.taken = False


def settle(number: int) -> None:
    """Wait until all that this thread has put into a lane, see `lane`, is computed."""
    with lane(number):
        mx.synchronize(mx.default_stream(mx.default_device()))


@cache
def has_lanes() -> bool:
    """Tell whether there are two: on a CPU of more than one core."""
    return bool(mx.default_device() == mx.cpu) and len(os.sched_getaffinity(0)) > 1
