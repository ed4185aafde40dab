"""Subprocess for trial compilations of grammars; imports nothing from penstock.

    line of JSON: grammar and limits ──> compiled in a fork with limits ──> line: bytes and time

Only the forks use much memory. The process ends when its input closes, at the latest with the
process that started it (see `grammar_trials`).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

LINE_BYTES = 1_000
"""Maximum length of an error text in bytes, so that writing it to a pipe is atomic."""


class Bytes:
    """Tokenizer with one token per byte."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|special|>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main(lines: Iterable[str]) -> None:
    """Try the grammar of each line, and write a line with the result."""
    from llguidance import LLTokenizer, TokenizerWrapper  # its place is in the arguments

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    for line in lines:
        sys.stdout.write(json.dumps(_forked(tokenizer, **json.loads(line))) + "\n")
        sys.stdout.flush()


def _forked(
    tokenizer: Any, grammar: str, limits: dict[str, Any], seconds: float, nbytes: int
) -> dict[str, Any]:
    """Compile a grammar in a fork; return its error, if any, memory, time and signal."""
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            os.close(reading)
            _error(tokenizer, 'start: "a"', limits)  # warm-up, not counted
            before = _resident_bytes()
            _limit(seconds, nbytes)
            error = _error(tokenizer, grammar, limits)
            result = {"error": error[:LINE_BYTES], "nbytes": _resident_bytes() - before}
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        result = json.loads(answer.read() or b"{}")
    _, status, usage = os.wait4(fork, 0)
    spent = usage.ru_utime + usage.ru_stime
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {**result, "seconds": spent, "signal": ended}


def _limit(seconds: float, nbytes: int) -> None:
    """Limit this process to `seconds` of processor time and `nbytes` more memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # Elsewhere, or if the system does not enforce the limit, the bytes are compared at the end.
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        address_space = pages * resource.getpagesize() + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))


def _error(tokenizer: Any, grammar: str, limits: dict[str, Any]) -> str:
    """Return the reason why a grammar is invalid; empty if it is valid."""
    from llguidance import LLMatcher, LLParserLimits

    bounds = LLParserLimits(**limits)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=bounds)
    if wrong:
        return str(messages[0])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=bounds)
    # These are not the model's tokens; `Grammars` checks those that the model lacks.
    if not matcher.is_error():
        matcher.compute_bitmask()
    return ""


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1_024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.path[:] = json.loads(sys.argv[1])
    main(sys.stdin)
