"""What it takes to compile a grammar, tried in a process of its own before it is compiled here.

llguidance counts the work of most rules, and not of all: a multiple of a large prime, or patterns
that must not overlap, take minutes or gigabytes. Its calls cannot be stopped. A process can.
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
"""Most processor time to compile a grammar. Those of tools and schemas take a hundredth of it."""
COMPILE_BYTES = 16_000_000
"""Most memory to compile a grammar. Those of tools and schemas take 1 to 3 MB."""
REQUEST_SECONDS = 2.0
"""Processor time of trials after which no other one of the same request begins."""
WAIT_SECONDS = 30.0
"""Time after which a trial is given up on a machine that has no processor time for it."""
KEPT_VERDICTS = 512
"""Verdicts that are remembered, those used last."""
LEAST_STATES = 4_000
"""States of a lexer that a grammar has at least. Those of tools and schemas reach 3,000."""
COUNTED_STATES = 20_000
"""Most states for a count in a grammar, such as `maxLength`: a state for each of its steps."""
STATE_BYTES = 512
"""Bytes that are counted for each state; 250 to 800 were measured."""
STEP_FUEL = 200_000
"""Most work of the lexer in a step, in llguidance's unit: about 15 ms."""
STEP_ITEMS = 50_000
"""Most items of the parser in a step."""

_SPECIAL = re.compile(r"<\[[^\]]*\]>|(?<!\?)(?<!\?P)<[^<>\s\"]+>")
"""Special tokens, by number or name, in Lark."""
_COUNT = re.compile(r'(?:[{,]|Length"\s*:)\s*(\d{1,9})(?=\s*[,}])')
"""Numbers of a repetition, or of a text's length."""


_SPENT: ContextVar[list[float]] = ContextVar("spent")
"""Processor time of the trials of one request."""


@contextmanager
def one_request() -> Iterator[None]:
    """Bound the time of all trials in a block of code, which are those of one request."""
    token = _SPENT.set([0.0])
    try:
        yield
    finally:
        _SPENT.reset(token)


class Verdict(NamedTuple):
    """Result of a trial."""

    error: str
    """Why the grammar is not compiled; empty if it is."""
    nbytes: int
    """Memory that it takes, with that of its lexer's states to come."""


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
        "precompute_large_lexemes": False,  # it takes time that no limit counts
        "verbose_errors": False,
    }


class GrammarTrials:
    """Tries grammars out, one after the other. Any thread may call it.

    The process starts with the first trial, and ends with this one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # the latest last
        self._lock = Lock()

    def verdict(self, grammar: str) -> Verdict:
        """Return what a grammar takes, or why it is refused; a trial takes `COMPILE_SECONDS`."""
        key = blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                spent = _SPENT.get([0.0])
                if spent[0] > REQUEST_SECONDS:
                    return Verdict(
                        f"to compile all grammars of the request takes more than "
                        f"{REQUEST_SECONDS:g} s. {_SIMPLER}",
                        0,
                    )
                verdict = self._verdicts[key] = self._try(grammar, spent)
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _try(self, grammar: str, spent: list[float]) -> Verdict:
        limits = grammar_limits(grammar)
        asked = {
            # Numbers and names of special tokens are the model's; what they cost is not.
            "grammar": _SPECIAL.sub("<[256]>", grammar),
            "limits": limits,
            "seconds": COMPILE_SECONDS,
            "nbytes": COMPILE_BYTES,
        }
        result = self._answer(json.dumps(asked))
        spent[0] += COMPILE_SECONDS if result is None else result["seconds"]
        if result is None or result["signal"] == signal.SIGPROF:
            return Verdict(f"to compile it takes more than {COMPILE_SECONDS:g} s. {_SIMPLER}", 0)
        if result["signal"] or result["nbytes"] > COMPILE_BYTES:
            most = format_bytes(COMPILE_BYTES)
            return Verdict(f"to compile it takes more than {most} of memory. {_SIMPLER}", 0)
        states_bytes = STATE_BYTES * int(limits["max_lexer_states"])
        return Verdict(result["error"], max(0, result["nbytes"]) + states_bytes)

    def _answer(self, line: str) -> dict[str, Any] | None:
        """Return the process's answer; None if there was none in time."""
        for _ in range(2):  # it may have been ended from outside since the last trial
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
        raise SettingError("grammars cannot be compiled: their process ends at once")


def _started() -> subprocess.Popen[str]:
    """Start the process, in a session of its own: Ctrl-C is not for it."""
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
"""The process's one; grammars are checked before any engine has them."""
atexit.register(grammar_trials.close)
