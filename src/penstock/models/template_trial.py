"""Test of a model's chat template when it is loaded, because a template may never end."""

from __future__ import annotations

import functools
import subprocess
import sys

import penstock.children as children
from penstock.errors import ModelError
from penstock.models import template_child
from penstock.models.template_renderer import CPU_SECONDS, MEMORY_BYTES, WALL_SECONDS


def check_template(name: str, source: str) -> None:
    """Render a chat template in a child process with limits; ModelError if it exceeds them."""
    if not source:
        return
    code = _exit_code(source, CPU_SECONDS, MEMORY_BYTES)
    if code == template_child.TOO_LARGE:
        much = f"takes more than {MEMORY_BYTES >> 20:,} MiB"
    elif code < 0:
        much = f"does not end within {CPU_SECONDS} s"
    else:
        return
    raise ModelError(f"{name}: its chat template {much} for a message of one word")


@functools.lru_cache(maxsize=64)
def _exit_code(source: str, cpu_seconds: float, memory_bytes: int) -> int:
    """Render a template in a child process; return its exit code, negative if it was killed."""
    try:
        return children.run(
            [sys.executable, "-I", template_child.__file__, str(cpu_seconds), str(memory_bytes)],
            input=source.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WALL_SECONDS,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1
