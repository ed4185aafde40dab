"""Trial compilation of grammars in a subprocess, with limits on time and memory.

llguidance does not bound the work of all rules: a multiple of a large prime, or patterns that must
not overlap, take minutes or gigabytes. Its calls cannot be interrupted, but a process can be.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from penstock.errors import SettingError
from penstock.memory.sizes import format_bytes

COMPILE_SECONDS = 1.0
"""Maximum processor time to compile a grammar, in seconds. Tools and schemas need a hundredth."""
COMPILE_BYTES = 16_000_000
"""Maximum memory to compile a grammar, in bytes. Tools and schemas need 1 to 3 MB."""
REQUEST_SECONDS = 2.0
"""Processor time after which no further trial of the same request starts, in seconds."""
WAIT_SECONDS = 30.0
"""Timeout of a trial on an overloaded machine, in seconds."""
KEPT_VERDICTS = 512
"""Size of the LRU cache of verdicts."""
LEAST_STATES = 4_000
"""Minimum number of lexer states of a grammar. Tools and schemas need up to 3,000."""
COUNTED_STATES = 20_000
"""Maximum lexer states for repetition counts such as `maxLength`, which need a state each."""
STATE_BYTES = 512
"""Bytes assumed per lexer state; 250 to 800 were measured."""
STEP_FUEL = 200_000
"""Maximum lexer work per step, in llguidance's unit: about 15 ms."""
STEP_ITEMS = 50_000

_SPECIAL = re.compile(r"<\[[^\]]*\]>|(?<!\?)(?<!\?P)<[^<>\s\"]+>")
"""Special tokens in Lark, by number or name."""
_COUNT = re.compile(r'(?:[{,]|Length"\s*:)\s*(\d{1,9})(?=\s*[,}])')
"""Counts of repetitions and text lengths."""


_SPENT: ContextVar[list[float]] = ContextVar("spent")
"""Processor time spent on trials of the current request."""


@contextmanager
def one_request() -> Iterator[None]:
    """Limit the total time of a request's trials, in a `with` block."""
    token = _SPENT.set([0.0])
    try:
        yield
    finally:
        _SPENT.reset(token)


class Verdict(NamedTuple):
    error: str
    """Reason for rejecting the grammar; empty if it is accepted."""
    nbytes: int
    """Memory of the compiled grammar, including future lexer states."""


def grammar_limits(grammar: str) -> dict[str, Any]:
    """Return llguidance's limits for a grammar, as fields of `LLParserLimits`.

    >>> grammar_limits('start: /[a-z]{12000}/')["max_lexer_states"]
    16000
    """
    largest = max(map(int, _COUNT.findall(grammar)), default=0)
    return {
        "max_lexer_states": LEAST_STATES + min(largest, COUNTED_STATES),
        "step_lexer_fuel": STEP_FUEL,
        "step_max_items": STEP_ITEMS,
        "precompute_large_lexemes": False,  # no limit covers its time
        "verbose_errors": False,
    }


class GrammarTrials:
    """Runs trials one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # most recently used last
        self._lock = Lock()

    def verdict(self, grammar: str) -> Verdict:
        """Return the verdict on a grammar, from the cache or a trial."""
        key = blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                spent = _SPENT.get([0.0])
                if spent[0] > REQUEST_SECONDS:
                    return Verdict(
                        f"compiling all grammars of the request takes more than "
                        f"{REQUEST_SECONDS:g} s. {_SIMPLER}",
                        0,
                    )
                verdict = self._verdicts[key] = self._try(grammar, spent)
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _try(self, grammar: str, spent: list[float]) -> Verdict:
        limits = grammar_limits(grammar)
        trial = {
            # Special tokens differ by model, but not in cost.
            "grammar": _SPECIAL.sub("<[256]>", grammar),
            "limits": limits,
            "seconds": COMPILE_SECONDS,
            "nbytes": COMPILE_BYTES,
        }
        result = self._answer(json.dumps(trial))
        spent[0] += COMPILE_SECONDS if result is None else result["seconds"]
        if result is None or result["signal"] == signal.SIGPROF:
            return Verdict(f"compiling it takes more than {COMPILE_SECONDS:g} s. {_SIMPLER}", 0)
        if result["signal"] or result["nbytes"] > COMPILE_BYTES:
            limit = format_bytes(COMPILE_BYTES)
            return Verdict(f"compiling it takes more than {limit} of memory. {_SIMPLER}", 0)
        states_bytes = STATE_BYTES * int(limits["max_lexer_states"])
        return Verdict(result["error"], max(0, result["nbytes"]) + states_bytes)

    def _answer(self, line: str) -> dict[str, Any] | None:
        """Return the subprocess's answer; None on timeout."""
        for _ in range(2):  # the process may have been killed since the last trial
            process = self._process = self._process or _started()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                if not select.select([process.stdout], [], [], WAIT_SECONDS)[0]:
                    self.close()
                    return None
                if answer := process.stdout.readline():
                    result: dict[str, Any] = json.loads(answer)
                    return result
            except BrokenPipeError:
                pass
            self.close()
        raise SettingError("grammars cannot be compiled: the trial process exits at once")


def _started() -> subprocess.Popen[str]:
    """Start the subprocess in a new session, so that Ctrl-C does not reach it."""
    file = Path(__file__).with_name("trial_process.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(file), json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


_SIMPLER = "Ask for smaller counts and multiples, or for fewer patterns and alternatives"

grammar_trials = GrammarTrials()
"""Shared instance of this process, since grammars are checked before an engine gets them."""
atexit.register(grammar_trials.close)
