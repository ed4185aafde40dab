"""Running a test whose evaluations fail outside of the main thread, which it would leave unusable.

See benchmarks/notes/structure.md, "An evaluation that hangs".
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec

import mlx.core as mx

from penstock.attention.devices import claim_main_thread

Arguments = ParamSpec("Arguments")


def in_other_thread(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate a test to run in a thread of its own, with a stream of its own."""

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            with mx.stream(mx.new_thread_local_stream(mx.default_device())):
                test(*args, **kwargs)
        finally:
            mx.clear_streams()

    @wraps(test)
    def decorated(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        claim_main_thread()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(run, *args, **kwargs).result()

    return decorated
