"""Progress of startup, shown if it takes longer than a second."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.status import Status

QUIET_SECONDS = 1.0
REPEAT_SECONDS = 10.0
LOGGER = logging.getLogger("penstock")


class StartProgress(logging.Handler):
    """Log handler that shows startup steps, with a spinner on a terminal or lines on stderr."""

    def __init__(
        self,
        console: Console,
        message: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__(logging.INFO)
        self.addFilter(lambda record: record.levelno == logging.INFO)
        self._clock = clock
        self._stream = stream
        self._began = clock()
        self._message = message
        self._quiet = quiet
        # A dumb terminal cannot draw a spinner, so it gets lines.
        shown = console.is_interactive and not quiet
        self._status: Status | None = console.status(message) if shown else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._level = LOGGER.level

    def __enter__(self) -> StartProgress:
        LOGGER.addHandler(self)
        LOGGER.setLevel(logging.INFO)
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._status is not None:
            self._status.stop()
        LOGGER.setLevel(self._level)
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a step, except during the first second."""
        self._message = record.getMessage()
        if self._clock() - self._began >= QUIET_SECONDS:
            self._show()

    def _repeat(self) -> None:
        wait = QUIET_SECONDS
        while not self._ended.wait(wait):
            self._show()
            wait = REPEAT_SECONDS

    def _show(self) -> None:
        line = f"{self._message} ({self._clock() - self._began:.0f} s)"
        if self._status is not None:
            self._status.update(line)
        elif not self._quiet:
            print(f"penstock: {line}", file=self._stream or sys.stderr, flush=True)
