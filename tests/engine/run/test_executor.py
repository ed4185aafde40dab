"""`ModelExecutor` with a real model, pool and tree, without an engine."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import pytest
from admission_places import Places
from mlx_lm.models.cache import make_prompt_cache
from small_models import BASE, build

from penstock.attention import devices
from penstock.engine.draft.draft import NoDraft
from penstock.engine.model.runner import Runner
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.run.executor import DecodePass, ModelExecutor, PrefillPass
from penstock.engine.run.speculator import Speculator
from penstock.engine.schedule.scheduler import PrefillChunk, State, StepPlan
from penstock.engine.schedule.sequence import Sequence

PROMPTS = [tuple(number * seed % 97 + 1 for number in range(100)) for seed in (3, 5)]


@functools.cache
def llama() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = {"model_type": "llama", "vocab_size": 100, "torch_dtype": "float32"}
    mx.random.seed(5)
    return build({**BASE, **config, **heads, "num_hidden_layers": 1})


def greedy(prompt: Items[int], count: int) -> list[int]:
    """Return the greedy tokens with mlx-lm's own cache."""
    cache, tokens, new = make_prompt_cache(llama()), list[int](), list(prompt)
    for _ in range(count):
        new = [int(llama()(mx.array([new]), cache=cache)[0, -1].argmax())]
        tokens += new
    return tokens


class Steps:
    """Executes plans over admitted sequences and counts the passes."""

    def __init__(self, *prompts: tuple[int, ...]) -> None:
        self.places = Places(10_000_000)
        self.runner = Runner(llama(), devices.current(), max_kv_size=4_096, keep=0)
        stores = self.places.stores
        self.executor = ModelExecutor(
            self.runner,
            stores,
            ProcessGroup(time.monotonic),
            Speculator(stores, 0, NoDraft()),
            logits_tokens=64,
            mixed_tokens=64,
        )
        self.sequences = [self.places.add(n, prompt=prompt) for n, prompt in enumerate(prompts)]
        self.places.admission.admit()

    def read(self, sequence: Sequence, *chunks: int) -> list[PrefillPass]:
        """Prefill chunks of a prompt in one step."""
        plan = StepPlan((), tuple(PrefillChunk(sequence, tokens) for tokens in chunks))
        passes = []
        for computed in self.executor.run(plan, lambda: None):
            assert isinstance(computed, PrefillPass)
            passes.append(computed)
            if computed.error is not None:
                break
            sequence.kv.append_chunk(computed.take().segment)
            self.places.admission.advance(sequence)
        return passes

    def decode(self, *sequences: Sequence) -> DecodePass:
        (computed,) = self.executor.run(StepPlan(sequences, ()), lambda: None)
        assert isinstance(computed, DecodePass)
        if computed.error is None:
            for sequence, choice in zip(computed.sequences, computed.choices, strict=True):
                assert not isinstance(choice, Exception)
                (token,) = choice
                sequence.kv.append_tokens(1, accepted=1)
                sequence.emit(token)
        return computed


def test_batched_answers_match_mlx_lm() -> None:
    steps = Steps(*PROMPTS)
    first, second = steps.sequences
    passes = steps.read(first, 32, 32, 35)
    assert [(of.tokens, of.captures) for of in passes] == [(32, True), (32, True), (35, True)]
    assert first.state is State.RUNNING and second.state is State.PREFILLING
    steps.decode(first)
    steps.read(second, 99)
    for _ in range(5):
        steps.decode(first, second)
    steps.decode(second)
    for sequence, prompt in zip(steps.sequences, PROMPTS, strict=True):
        assert list(sequence.generated) == greedy(prompt, 6)
    steps.places.admission.check()
    assert steps.places.stores.counters.decode_steps == 7


def test_meanwhile_callback_runs_only_during_decode_passes() -> None:
    steps = Steps(*PROMPTS)
    first, second = steps.sequences
    steps.read(first, 99)
    calls: list[str] = []
    plan = StepPlan((first,), (PrefillChunk(second, 16),))
    output = steps.executor.run(plan, lambda: calls.append("meanwhile"))
    assert calls == [], "a pass is computed when it is taken"
    assert isinstance(next(output), DecodePass) and calls == ["meanwhile"]
    assert isinstance(next(output), PrefillPass) and calls == ["meanwhile"]


def test_failed_pass_leaves_sequence_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(PROMPTS[0])
    (sequence,) = steps.sequences
    steps.read(sequence, 99)
    position = sequence.position

    def broken(*given: Any, **more: Any) -> Any:
        raise ZeroDivisionError("a model's code")

    with monkeypatch.context() as patch:
        patch.setattr(type(llama()), "__call__", broken)
        computed = steps.decode(sequence)
    assert isinstance(computed.error, ZeroDivisionError) and computed.choices == []
    assert sequence.position == position and not sequence.generated
    for _ in range(3):
        steps.decode(sequence)
    assert list(sequence.generated) == greedy(PROMPTS[0], 3)


@pytest.mark.parametrize(("times", "fails"), [(1, False), (2, True)])
def test_chunk_is_retried_after_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, times: int, fails: bool
) -> None:
    steps = Steps(PROMPTS[0])
    (sequence,) = steps.sequences
    prefill, left = Runner.prefill, [times]

    def short(runner: Runner, *given: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError("[malloc] unable to allocate")
        return prefill(runner, *given, **more)

    monkeypatch.setattr(Runner, "prefill", short)
    (computed,) = steps.read(sequence, 32)
    assert isinstance(computed.error, MemoryError) is fails
    assert sequence.position == (0 if fails else 32)
    assert left == [0]
