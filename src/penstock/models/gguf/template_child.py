"""Render a chat template from standard input in a process with little memory and little time.

`template_trial` runs this file by its path; it imports nothing of penstock's, so it starts at once.
It ends with `TOO_LARGE` where memory runs out, by a signal where time does, and else with 0. An
error of the template itself is for the user that sends it messages.
"""

from __future__ import annotations

import sys
from contextlib import suppress

TOO_LARGE = 3
USER = {"role": "user", "content": "Hello"}
TALKS = (
    [USER],
    [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Hi"},
        USER,
    ],
)


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Bound the process; a system without such limits has the parent's clock."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def render(source: str) -> None:
    """Render every talk as transformers does; errors of a template count as an end."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    for talk in TALKS:
        try:
            environment.from_string(source).render(messages=talk, add_generation_prompt=True)
        except MemoryError:
            sys.exit(TOO_LARGE)
        except Exception:  # noqa: BLE001 - a template raises anything
            continue


if __name__ == "__main__":
    limit(int(sys.argv[1]), int(sys.argv[2]))
    render(sys.stdin.buffer.read().decode("utf-8", "replace"))
