"""Rendering of chat templates, which are untrusted programs, in processes with limits.

A template may never end, or use all memory. Therefore `template_child` renders it in a child
process and returns the text.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import penstock.children as children
from penstock.errors import ModelError
from penstock.models import template_child
from penstock.plurals import counted

CPU_SECONDS = 2
"""CPU time limit of one rendering in seconds; real templates take milliseconds."""
WALL_SECONDS = 60.0
"""Timeout of one rendering in seconds, for systems that cannot limit CPU time."""
MEMORY_BYTES = 1 << 30
END_SECONDS = 30.0
"""Seconds to wait for a process to exit after its output has ended."""
WAIT_SECONDS = 0.05
"""Seconds between checks of whether the text is still needed."""
TEXT_SHARE = 16
"""Maximum number of characters of a text per character of its messages."""
LEAST_TEXT = 1_000_000
"""Number of characters that are always allowed."""


class TemplateOverrun(ModelError):
    status = 400


class TemplateRefusal(ModelError):
    """A chat template raised an error."""

    status = 400


class TemplateRenderer:
    """Renderer of chat templates, with one child process per calling thread.

    Thread-safe. A process ends with its thread, with the renderer, or on `close`.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._own = threading.local()
        self._ends: list[weakref.finalize[Any, Any]] = []

    def __enter__(self) -> TemplateRenderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._ends:
            self._ends.pop()()

    def start(self) -> None:
        self.render("", {})

    def render(
        self,
        source: str,
        variables: Mapping[str, Any],
        gone: Callable[[], bool] = lambda: False,
        *,
        program: tuple[str, str] | None = None,
    ) -> str:
        """Render a template and return the text.

        Args:
            source: text of the template.
            variables: variables of the template.
            gone: function that returns whether the text is no longer needed.
            program: file and name of a Python function to call instead of a template.

        Raises:
            TemplateRefusal: the template raises an error.
            TemplateOverrun: the template exceeds its limit of time, memory or output.
        """
        encoded = json.dumps(variables, default=str)
        max_characters = LEAST_TEXT + len(source) + TEXT_SHARE * len(encoded)
        head = json.dumps({"source": source, "program": program, "most_characters": max_characters})
        line = f'{head[:-1]}, "given": {encoded}}}\n'.encode()
        process = self._process()
        answer = self._exchange(process, line, gone)
        if answer:
            outcome = json.loads(answer)
            if "refusal" in outcome:
                raise TemplateRefusal(outcome["refusal"])
            if "text" in outcome:
                return str(outcome["text"])
            characters = counted(outcome["characters"], "character")
            much = f"makes {characters}, more than {max_characters:,},"
        else:
            self._own.process = None
            if _end(process, 0.0 if answer is None else END_SECONDS) == template_child.TOO_LARGE:
                much = f"takes more than {self._memory_bytes >> 20:,} MiB"
            else:
                much = f"does not end within {self._cpu_seconds:g} s"
        raise TemplateOverrun(f"the model's chat template {much} for these messages")

    def _exchange(
        self, process: subprocess.Popen[bytes], line: bytes, gone: Callable[[], bool]
    ) -> bytes | None:
        """Return a request's answer; empty if the process ended, None on timeout or if `gone`."""
        assert process.stdin is not None and process.stdout is not None
        until = time.monotonic() + WALL_SECONDS
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return b""
        while time.monotonic() < until and not gone():
            if select.select([process.stdout], [], [], WAIT_SECONDS)[0]:
                return process.stdout.readline()
        return None

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None or process.poll() is not None:
            process = self._own.process = children.start(
                [
                    *(sys.executable, "-I", template_child.__file__),
                    *(str(self._cpu_seconds), str(self._memory_bytes), "requests"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._ends = [end for end in self._ends if end.alive]
            self._own.thread = thread = _Thread()
            self._ends.append(weakref.finalize(thread, _end, process))
        return process


class _Thread:
    """Thread-local object that is garbage-collected when its thread or the renderer ends."""


def _end(process: subprocess.Popen[bytes], seconds: float = 0.0) -> int:
    """Wait up to `seconds` for a process, then kill it; close its pipes, return its exit code."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    return code
