"""An engine for fault tests: its requests, expected answers, and exact bytes."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from core_parts import evict_all, weights_bytes_of, wrap_model
from engine_faults import VOCABULARY_TOKENS, Alphabet, Faulty, model_of, spell
from mlx_lm.models.cache import make_prompt_cache

from penstock.engine.core import Core
from penstock.engine.handle import Choice, Handle
from penstock.engine.request import Finish, Request
from penstock.engine.schedule.scheduler import State
from penstock.engine.schedule.sequence import Sequence

BLOCK = 16
CHUNK = 32
SETTINGS: dict[str, Any] = {
    "memory_limit": 40_000_000,
    "block_size": BLOCK,
    "prefill_chunk": CHUNK,
    "max_batch_size": 3,
    "max_kv_size": 1_024,
    "max_queue": 8,
    "max_stall_ms": 0,  # so that a busy machine takes the same steps
}


def prompt_of(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Return random tokens; prompts of different seeds share no prefix."""
    draw = random.Random(f"{tokens} {seed}")
    return tuple(draw.randrange(VOCABULARY_TOKENS) for _ in range(tokens))


@functools.cache
def solo(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the greedy tokens of plain mlx-lm."""
    model = model_of("llama")
    caches = make_prompt_cache(model)
    said: list[int] = []
    read: tuple[int, ...] = prompt
    while len(said) < tokens:
        said.append(int(mx.argmax(model(mx.array([read]), cache=caches)[0, -1])))
        read = (said[-1],)
    return tuple(said)


class Setup:
    """A core of a small model with no tokens that end an answer, and a clock that stands still.

    MLX keeps no freed buffers and the garbage collector rests, so that between two steps what
    MLX says is allocated is what the engine says it holds, to the byte.
    """

    def __init__(self, **settings: Any) -> None:
        gc.collect()
        gc.disable()
        self.now = 0.0
        self.tokenizer = Alphabet()
        self.cache_limit = mx.set_cache_limit(0)
        self.core = Core(
            model_of("llama"), self.tokenizer, clock=lambda: self.now, **{**SETTINGS, **settings}
        )
        mx.set_cache_limit(0)  # the core has set one
        self.model = wrap_model(self.core, Faulty)
        self.others = mx.get_active_memory() - self.core.view.held_bytes
        self.fixed = self.core.ledger.used_bytes
        self.asked: list[Handle] = []

    def ask(self, tokens: int | tuple[int, ...], max_tokens: int = 12, **settings: Any) -> Handle:
        """Submit a prompt, or a random one of this length."""
        prompt = prompt_of(tokens, len(self.asked)) if isinstance(tokens, int) else tokens
        handle = self.core.submit(Request(prompt=prompt, max_tokens=max_tokens, **settings))
        self.asked.append(handle)
        return handle

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()
            self.check()

    def until(self, handle: Handle, state: State) -> None:
        """Run until an answer reaches a state."""
        for _ in range(200):
            if self.state(handle) is state:
                return
            self.step()
        raise AssertionError(f"never {state.value}")

    def drain(self) -> None:
        for _ in range(1_000):
            if not self.core.step():
                break
            self.check()
        assert self.core.view.idle

    def sequence(self, handle: Handle) -> Sequence:
        """Return the engine's sequence of the last answer."""
        return [s for s in self.core.admission.sequences.values() if s.handle is handle][-1]

    def state(self, handle: Handle) -> State:
        if handle.events() or handle.done:
            pass  # read what is there
        if handle.done:
            return State.DONE
        return self.sequence(handle).state

    def check(self) -> None:
        """Check that ledger, arrays and MLX agree to the byte."""
        self.core.view.check()
        assert self.core.ledger.used_bytes <= self.core.ledger.limit_bytes
        until = time.monotonic() + 0.5  # MLX's own threads let go of arrays a moment later
        while time.monotonic() < until:
            if mx.get_active_memory() - self.others == self.core.view.held_bytes:
                return
            time.sleep(0.001)
        assert mx.get_active_memory() - self.others == self.core.view.held_bytes


def end_of(handle: Handle, choice: int = 0) -> Finish:
    """Return the finish event of an ended answer."""
    handle.events()
    finish = handle.choices[choice].finish
    assert finish is not None, "the answer has not ended"
    return finish


def error_of(handle: Handle, choice: int = 0) -> Any:
    finish = end_of(handle, choice)
    assert finish.reason == "error", finish
    return finish.error


def assert_right(handle: Handle, choice: int = 0) -> None:
    """Check that an answer is complete and matches the model alone."""
    finish, found = end_of(handle, choice), handle.choices[choice]
    expected = solo(handle.request.prompt, handle.request.max_tokens)
    assert (finish.reason, finish.error) == ("length", None)
    assert (tuple(found.tokens), found.text) == (expected, spell(expected))


def assert_begins_right(handle: Handle, choice: int = 0) -> None:
    """Check that an answer matches as far as it went."""
    handle.events()
    found: Choice = handle.choices[choice]
    assert tuple(found.tokens) == solo(handle.request.prompt, len(found.tokens))
    assert spell(found.tokens).startswith(found.text)


@contextmanager
def made(**settings: Any) -> Iterator[Setup]:
    """Open an engine; at the end, answer all requests and check that all bytes are released."""
    setup = Setup(**settings)
    core = setup.core
    try:
        yield setup
        setup.drain()
        evict_all(core)
        setup.check()
        assert core.ledger.used_bytes == setup.fixed
    finally:
        gc.enable()
        core.close()
        mx.set_cache_limit(setup.cache_limit)
    assert mx.get_active_memory() - setup.others == weights_bytes_of(core)
