"""Retry of requests whose model was evicted before it had sent any of the answer.

    deadlock: a waits for memory of b, b for memory of a
    requests of b fail internally ──> b is evicted ──> they are retried, and b is loaded again

A stream sends nothing but comments before its first token, so its client sees a longer wait.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from penstock.server.problems import Unavailable


@dataclass(slots=True)
class Asking:
    """One attempt to answer a request, on a server of several models."""

    has_sent: bool = False
    """Whether part of the answer was sent, so that the request cannot be retried."""
    fails: bool = False
    """Whether the attempt has failed and the request is retried; its output is dropped."""


ASKING: ContextVar[Asking] = ContextVar("asking")
"""Current attempt of the request; unset on a server of one model, which uses `ALONE`."""
ALONE = Asking(has_sent=True)
"""Attempt that is never retried."""


class GaveWay(Unavailable):
    """The model was evicted for another one before the request ended."""

    def __init__(self) -> None:
        super().__init__(
            "the model was unloaded to free memory for another one; try again",
            code="model_gave_way",
        )
