"""Expensive grammars: refused, counted, evicted, and ended within an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import penstock
from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.handle import Choice, Handle
from penstock.engine.model import constraint, grammar_trials
from penstock.engine.model.constraint import Grammars, json_schema_grammar
from penstock.engine.model.grammar_trials import GrammarTrials, grammar_limits
from penstock.engine.request import Request
from penstock.errors import GrammarFailed, LedgerFull, NeverFits, SettingError
from penstock.ledger import Kind
from penstock.models.mlx_lm import encode
from penstock.recall import MODEL_PATH

AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | "aa" | "b" | /[a-z]/'
WORD = 'start: "%s" /[a-z]{2,9}/'

HOSTILE: dict[str, dict[str, Any] | str] = {
    "a large prime": {"type": "integer", "multipleOf": 1_000_003},
    "many primes": {
        "allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]
    },
    "many multiples": {
        "type": "object",
        "properties": {f"p{n}": {"type": "integer", "multipleOf": n} for n in range(1000, 1200)},
        "required": [f"p{n}" for n in range(1000, 1200)],
    },
    "patterns that may overlap": {
        "type": "object",
        "patternProperties": {f"^x{i:04}": {"type": "string"} for i in range(1_000)},
    },
    "a prime in Lark": 'start: a\na: %json {"type": "integer", "multipleOf": 1000003}',
    "patterns that all hold": "start: T\nT: "
    + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(3, 14)),
    "a prime behind a special token": 'start: <[7]> a\na: %json {"multipleOf": 1000003}',
}
"""Grammars whose compilation takes seconds to hours, or hundreds of megabytes."""

LEGITIMATE: dict[str, dict[str, Any] | str] = {
    "a thousand values": {"enum": [f"value {i}" for i in range(1_000)]},
    "a hundred properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 200} for i in range(100)},
        "required": [f"p{i}" for i in range(100)],
    },
    "an edit of several files": {
        "type": "object",
        "properties": {
            "edits": {
                "type": "array",
                "minItems": 1,
                "maxItems": 100,
                "items": {
                    "type": "object",
                    "properties": {
                        "file_path": {"type": "string"},
                        "old_string": {"type": "string"},
                        "new_string": {"type": "string"},
                        "replace_all": {"type": "boolean", "default": False},
                    },
                    "required": ["file_path", "old_string", "new_string"],
                },
            },
            "timeout": {"type": "integer", "minimum": 0, "maximum": 600_000},
        },
        "required": ["edits"],
    },
    "formats": {
        "type": "object",
        "properties": {
            name: {"type": "string", "format": name}
            for name in ("date-time", "uri", "ipv6", "email", "uuid", "hostname", "duration")
        },
    },
    "money": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 100_000},
    "a step": {"type": "integer", "multipleOf": 1_000},
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "left": {"$ref": "#/$defs/node"},
                    "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
            }
        },
        "$ref": "#/$defs/node",
    },
    "a long text": {"type": "string", "maxLength": 10_000},
    "a regular expression": "start: /[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\\.[a-zA-Z]{2,}/",
    "arithmetic": 'start: e\ne: t (("+" | "-") t)*\nt: f (("*" | "/") f)*\nf: /[0-9]+/ | "(" e ")"',
}


def text_of(grammar: dict[str, Any] | str) -> str:
    return grammar if isinstance(grammar, str) else json_schema_grammar(grammar)


@pytest.fixture(scope="module")
def embedded() -> Any:
    return penstock.load(MODEL_PATH)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarTrials]:
    """Return trials in a separate process, limited to a fifth of a second."""
    made = GrammarTrials()
    monkeypatch.setattr(grammar_trials, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(constraint, "grammar_trials", made)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


# ---- trials


@pytest.mark.parametrize("name", HOSTILE)
def test_expensive_grammar_is_refused(trials: GrammarTrials, embedded: Any, name: str) -> None:
    before = resident_bytes()
    with pytest.raises(SettingError, match=r"compiling it takes more than .* Ask for smaller"):
        Grammars(embedded[1], 3_025).constraint(text_of(HOSTILE[name]))
    assert resident_bytes() - before < 16_000_000
    assert trials._process is not None
    wait_until(lambda: not psutil.Process(trials._process.pid).children())


@pytest.mark.parametrize("name", LEGITIMATE)
def test_ordinary_grammar_compiles_within_limits(embedded: Any, name: str) -> None:
    """Negative control, with the default limits."""
    grammars = Grammars(embedded[1], 3_025)
    first = grammars.constraint(text_of(LEGITIMATE[name]))
    assert first.allowed(3_025).any()
    assert 0 < grammars.nbytes < grammar_trials.COMPILE_BYTES


def test_expensive_grammar_compiles_without_limits(
    trials: GrammarTrials, embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "COMPILE_BYTES", 1_000_000)
    grammar = 'start: a\na: %json {"type": "integer", "multipleOf": 10007}'
    with pytest.raises(SettingError, match=r"more than 1\.00 MB of memory"):
        Grammars(embedded[1], 3_025).constraint(grammar)
    monkeypatch.undo()
    assert Grammars(embedded[1], 3_025).constraint(grammar).allowed(3_025).any()


def test_grammar_trial_result_is_cached(trials: GrammarTrials) -> None:
    grammar = text_of(HOSTILE["a prime in Lark"])
    first = trials.verdict(grammar)
    trials.close()
    assert trials.verdict(grammar) is first
    assert trials._process is None
    assert trials.verdict('start: "a"').error == ""
    assert trials._process is not None


def test_killed_trial_process_is_restarted(trials: GrammarTrials) -> None:
    assert trials.verdict('start: "a"').error == ""
    assert trials._process is not None
    ended = trials._process.pid
    os.kill(ended, signal.SIGKILL)
    wait_until(lambda: psutil.Process(ended).status() == psutil.STATUS_ZOMBIE)
    assert trials.verdict('start: "b"').error == ""
    assert trials._process.pid != ended


def test_trial_process_ends_with_parent() -> None:
    code = (
        "from penstock.engine.model.grammar_trials import grammar_trials as trials\n"
        "trials.verdict('start: \"a\"'); print(trials._process.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert psutil.pid_exists(pid)
        starter.kill()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_lexer_state_limit_grows_with_repeat_counts() -> None:
    few = grammar_limits('start: "1970" /[a-z]{2,9}/')["max_lexer_states"]
    assert grammar_limits("start: /[a-z]{2,9000}/")["max_lexer_states"] == few - 9 + 9_000
    assert grammar_limits('{"maxLength": 9000}')["max_lexer_states"] == few - 9 + 9_000
    most = grammar_limits('{"maxLength": 900000}')["max_lexer_states"]
    assert most == grammar_trials.LEAST_STATES + grammar_trials.COUNTED_STATES


# ---- memory


def test_compiled_grammars_are_in_ledger_until_evicted(embedded: Any) -> None:
    core = Core(*embedded, memory_limit="100MB", block_size=16)
    grammars = core.intake.grammars
    assert grammars is not None
    handle = core.submit(Request(prompt=(1, 2), max_tokens=2, grammar=WORD % "a"))
    held = core.ledger.by_class()[Kind.GRAMMARS]
    assert held == grammars.nbytes > 0
    core.view.check()
    while core.step():
        pass
    handle.events()
    core.submit(Request(prompt=(1, 2), max_tokens=2, grammar=WORD % "b"))
    assert core.ledger.by_class()[Kind.GRAMMARS] == grammars.nbytes > held
    # Memory that a sequence needs is taken of those that no answer follows.
    room = core.ledger.reserve(Kind.PROMPTS, core.ledger.free_bytes)
    assert core.budget._make_room(held)
    assert list(grammars._compiled) == []
    assert core.ledger.by_class()[Kind.GRAMMARS] == grammars.nbytes > 0
    room.release()
    core.view.check()
    core.close()
    assert core.ledger.by_class()[Kind.GRAMMARS] == 0


def test_lru_grammars_are_evicted_and_running_answers_keep_theirs(embedded: Any) -> None:
    trial = Grammars(embedded[1], 3_025)
    trial.constraint(WORD % "a")
    grammars = Grammars(embedded[1], 3_025, int(2.5 * trial.nbytes))
    followed = grammars.constraint(WORD % "a")
    grammars.constraint(WORD % "b")
    grammars.constraint(WORD % "c")  # "a" is the oldest, and still followed
    assert list(grammars._compiled) == [WORD % "c"]
    assert grammars.nbytes <= grammars.pool_bytes
    also = grammars.constraint(WORD % "d")
    with pytest.raises(LedgerFull, match="answers follow the others; try again later"):
        grammars.constraint(WORD % "e")
    assert grammars.nbytes <= grammars.pool_bytes
    del followed, also
    assert grammars.constraint(WORD % "e").allowed(3_025).any()
    with pytest.raises(NeverFits, match="for all grammars"):
        Grammars(embedded[1], 3_025, 1_000).constraint(WORD % "a")


def test_grammar_larger_than_free_memory_is_refused(embedded: Any) -> None:
    with Engine(*embedded, memory_limit="100MB", block_size=16) as engine:
        ledger = engine._core.ledger
        full = engine._wait(
            engine._later(lambda core: ledger.reserve(Kind.PROMPTS, ledger.free_bytes))
        )
        with pytest.raises(LedgerFull, match="grammars need"):
            engine.open(Request(prompt=(1, 2), grammar=WORD % "a"))
        engine._wait(engine._later(lambda core: full.release()))
        engine.open(Request(prompt=(1, 2), grammar=WORD % "a"))
        engine.check()


# ---- time of a step


def answers(core: Core, *handles: Handle) -> list[Choice]:
    while core.step():
        pass
    for handle in handles:
        handle.events()
    return [handle.choices[0] for handle in handles]


def submit(core: Core, grammar: str | None, max_tokens: int = 400) -> Handle:
    prompt = tuple(encode(core.tokenizer, "The code of the amber falcon is 4821."))
    settings: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "grammar": grammar}
    return core.submit(Request(prompt=prompt, **settings))


def test_slow_constrained_answer_fails_alone(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "STEP_SECONDS", 0.0005)
    monkeypatch.setattr(constraint, "BURST_SECONDS", 0.05)
    core = Core(*embedded, memory_limit="100MB", block_size=16, max_batch_size=4)
    slow, free = submit(core, AMBIGUOUS), submit(core, None, 40)
    quick = submit(core, WORD % "a", 40)
    failed, *others = answers(core, slow, free, quick)
    assert failed.finish is not None
    assert isinstance(failed.finish.error, GrammarFailed) and failed.finish.error.status == 400
    assert "Make it less ambiguous" in str(failed.finish.error)
    assert 0 < len(failed.tokens) < 400
    for other in others:
        assert other.finish is not None and other.finish.error is None
    core.view.check()
    core.close()


def test_slow_constrained_answer_finishes_with_larger_time_limit(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(constraint, "BURST_SECONDS", 1e6)
    core = Core(*embedded, memory_limit="100MB", block_size=16)
    (found,) = answers(core, submit(core, AMBIGUOUS, 60))
    assert found.finish is not None and found.finish.error is None
    assert len(found.tokens) == 60
    core.close()


def test_answers_share_time_limit_for_masks(embedded: Any) -> None:
    grammars = Grammars(embedded[1], 3_025)
    alone = grammars.constraint(WORD % "a")
    alone.allowed(3_025)
    spent = next(iter(grammars._shares))
    assert spent._parts == 1
    others = [alone.copy() for _ in range(3)]  # they look ahead, or go on: one answer's time
    assert len(grammars._shares) == 1
    others += [grammars.constraint(WORD % "a") for _ in range(31)]
    assert spent._parts == 1  # they have not begun
    for other in others:
        other.allowed(3_025)
    assert spent._parts == 32 / constraint.FULL_SHARES
    del others, other
    assert spent._parts == 1


def test_grammar_with_exhausted_lexer_is_recompiled(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "LEAST_STATES", 40)
    core = Core(*embedded, memory_limit="100MB", block_size=16)
    grammar = "start: /([ab]{1,9}c){1,9}([de]f){1,9}[a-z ]*/"
    (failed,) = answers(core, submit(core, grammar, 100))
    assert failed.finish is not None
    assert "too many states" in str(failed.finish.error)
    (again,) = answers(core, submit(core, grammar, 3))
    assert again.finish is not None and again.finish.error is None
    core.close()
