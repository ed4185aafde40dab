"""Memory of a decode step, as a share of the KV that it reads."""

from __future__ import annotations

import mlx.core as mx
from asking import ask, drain
from tiny_families import prompt_of

from penstock.engine.core import Core


def step_bytes(core: Core, tokens: int) -> float:
    """Return the peak of a decode step behind `tokens` tokens, as a share of a sequence's KV."""
    prompt = prompt_of(tokens)
    for _ in range(2):
        ask(core, prompt, 1)
        drain(core)
    ask(core, prompt, 6)
    steps = core.view.stats().decode.count + 2
    while core.view.stats().decode.count < steps:
        core.step()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    drain(core)
    return (mx.get_peak_memory() - before) / (tokens * core.view.token_bytes)
