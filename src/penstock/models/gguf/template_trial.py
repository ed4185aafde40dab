"""Trial of a file's chat template: a program of its maker's, which may never end."""

from __future__ import annotations

import subprocess
import sys

from penstock.errors import ModelError
from penstock.models.gguf import template_child
from penstock.models.gguf.header import Header

CPU_SECONDS = 2
"""Processor time of a trial; real templates take milliseconds."""
WALL_SECONDS = 60.0
"""Seconds after which a trial counts as hung, where processor time cannot be bounded."""
MEMORY_BYTES = 1 << 30


def check_template(header: Header, cpu_seconds: int = CPU_SECONDS) -> None:
    """Render a file's chat template in a process of its own.

    Raises:
        ModelError: it does not end in time, or takes too much memory.
    """
    source = header.get("tokenizer.chat_template", str)
    if not source:
        return
    code = _exit_code(source, cpu_seconds)
    if code == template_child.TOO_LARGE:
        much = f"takes more than {MEMORY_BYTES >> 20:,} MiB"
    elif code < 0:
        much = f"does not end within {cpu_seconds} s"
    else:
        return
    raise ModelError(f"{header.name}: its chat template {much} for a message of one word")


def _exit_code(source: str, cpu_seconds: int) -> int:
    """Return how the process that renders a template ends; below zero if it was killed."""
    limits = (str(cpu_seconds), str(MEMORY_BYTES))
    try:
        return subprocess.run(
            [sys.executable, "-I", template_child.__file__, *limits],
            input=source.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WALL_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1
