"""Steps that decode several tokens give the tokens of steps that decode one each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from small_models import BASE, PACKED, build

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.core import Core
from penstock.engine.model.runner import Runner
from penstock.engine.request import Request, Sampling, Token
from penstock.engine.run import executor
from penstock.models.weight_packer import pack, weight_packer
from penstock.plugins.cpu.compiled_jobs import OtherLoad
from penstock.plugins.cpu.packed_steps import LayersTogether, _PassTables
from penstock.plugins.cpu.step_choices import StepChoice

pytestmark = pytest.mark.skipif(
    weight_packer() is None, reason="products with packed weights are compiled by Numba"
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    **PACKED,
}
GREEDY, DRAWN = Sampling(), Sampling(temperature=1.0, seed=11)
TOKENS = 90


@cache
def packed(name: str) -> Any:
    mx.random.seed(3)
    config = {**BASE, **MODELS.get(name, {}), "model_type": name, "vocab_size": 211}
    model = build({**config, "num_hidden_layers": 2})
    nn.quantize(model, group_size=32, bits=4)
    pack(model, lambda module: None, exact=False)
    return model


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps last as long as they decode, however slow the machine is."""
    monkeypatch.setattr(executor, "FURTHER_SECONDS", 60.0)


def prompt(seed: int, tokens: int = 150) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 211, tokens).tolist())


class Answers:
    """Tokens and finishes of requests, and how many steps they took."""

    def __init__(
        self,
        name: str,
        requests: list[Request],
        pending: Callable[[], bool] | None = None,
        **settings: Any,
    ) -> None:
        core = Core(packed(name), memory_limit="1GB", max_batch_size=4, max_stall_ms=0, **settings)
        handles = [core.submit(request) for request in requests]
        self.steps = 0
        while core.step(pending=pending):
            self.steps += 1
            core.admission.check()
        events = [handle.events() for handle in handles]
        self.tokens = [[e.token for e in of if isinstance(e, Token)] for of in events]
        self.ends = [(of[-1].reason, of[-1].usage) for of in events]  # type: ignore[union-attr]
        self.decoded = core.stores.counters.decode_steps
        core.close()


def requests(rows: int, sampling: Sampling = GREEDY, **settings: Any) -> list[Request]:
    settings = {"max_tokens": TOKENS, "ignore_eos": True, "sampling": sampling, **settings}
    return [Request(prompt=prompt(seed, 150 - 30 * seed), **settings) for seed in range(rows)]


def nothing_waits() -> bool:
    return False


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_repeated_steps_give_same_tokens(name: str, rows: int, sampling: Sampling) -> None:
    single = Answers(name, requests(rows, sampling))
    repeated = Answers(name, requests(rows, sampling), nothing_waits)
    assert repeated.tokens == single.tokens and repeated.ends == single.ends
    assert repeated.decoded == single.decoded, "as many forward passes"
    assert single.steps > TOKENS > 3 * repeated.steps


def test_tokens_are_independent_of_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Answers("llama", requests(3, DRAWN), nothing_waits, attend_tokens=128)
    loads = cycle([True, True, False, True, False])
    monkeypatch.setattr(OtherLoad, "is_high", lambda *_: next(loads))
    changing = Answers("llama", requests(3, DRAWN), nothing_waits, attend_tokens=128)
    assert changing.tokens == two.tokens


@pytest.mark.parametrize("settings", [{"attend_tokens": 128}, {"max_kv_size": 96}])
@pytest.mark.parametrize("rows", [1, 3])
def test_repeated_steps_select_same_tokens(rows: int, settings: dict[str, Any]) -> None:
    for sampling in (GREEDY, DRAWN):
        single = Answers("llama", requests(rows, sampling), **settings)
        repeated = Answers("llama", requests(rows, sampling), nothing_waits, **settings)
        assert repeated.tokens == single.tokens
        assert 2 * repeated.steps < single.steps


@pytest.mark.parametrize("broken", ["renew", "ahead"])
def test_stale_tables_change_tokens(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"attend_tokens": 128} if broken == "ahead" else {}
    single = Answers("llama", requests(3, DRAWN), **settings)
    if broken == "renew":
        monkeypatch.setattr(_PassTables, broken, lambda *_: None)
    else:
        monkeypatch.setattr(StepChoice, broken, lambda self, _: self.choices.copy())
    repeated = Answers("llama", requests(3, DRAWN), nothing_waits, **settings)
    assert repeated.tokens != single.tokens


def test_step_ends_where_answer_may_end() -> None:
    (tokens,) = Answers("llama", requests(1, DRAWN)).tokens
    stop = tokens[40]
    stopped = requests(1, DRAWN, stop_tokens=(stop,))
    single, repeated = Answers("llama", stopped), Answers("llama", stopped, nothing_waits)
    assert repeated.tokens == single.tokens == [tokens[: tokens.index(stop)]]
    assert repeated.ends == single.ends and repeated.ends[0][0] == "stop"
    assert repeated.decoded == single.decoded, "nothing is decoded after the end"


def test_step_ends_when_something_waits() -> None:
    single = Answers("llama", requests(2))
    assert Answers("llama", requests(2), lambda: True).steps == single.steps
    calls = []

    def every_fourth() -> bool:
        calls.append(True)
        return len(calls) % 4 == 0

    some = Answers("llama", requests(2), every_fourth)
    assert some.tokens == single.tokens and TOKENS / 4 <= some.steps < TOKENS / 2


def test_step_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a single pass takes longer, as of a large model, tokens come one by one."""
    asked = requests(1, max_tokens=20)
    single = Answers("llama", asked)
    monkeypatch.setattr(executor, "FURTHER_SECONDS", 0.05)

    def slowed(original: Any) -> Any:
        def slow(*args: Any, **how: Any) -> Any:
            time.sleep(0.06)
            return original(*args, **how)

        return slow

    with monkeypatch.context() as slowly:
        slowly.setattr(Runner, "decode", slowed(Runner.decode))
        slowly.setattr(Runner, "decode_again", slowed(Runner.decode_again))
        assert Answers("llama", asked, nothing_waits).steps == single.steps


def test_prompts_interrupt_repeated_steps() -> None:
    """A prompt that is admitted is read at once, one chunk a step."""
    long = with_prompt(requests(1)[0], prompt(7, 400))
    both = [*requests(1, max_tokens=60), long]
    single = Answers("llama", both, prefill_chunk=16)
    repeated = Answers("llama", both, nothing_waits, prefill_chunk=16)
    assert repeated.tokens == single.tokens
    assert single.steps > repeated.steps > 400 / 16


def with_prompt(request: Request, tokens: tuple[int, ...]) -> Request:
    return request.model_copy(update={"prompt": tokens})


@pytest.mark.parametrize(
    "changes",
    [{"speculative_tokens": 4}, {"min_tokens": 20}],
    ids=["proposals", "constraint"],
)
def test_answers_whose_tokens_depend_on_more_decode_one_a_step(changes: dict[str, Any]) -> None:
    engine = {k: v for k, v in changes.items() if k == "speculative_tokens"}
    own = {k: v for k, v in changes.items() if k not in engine}
    asked = requests(1, DRAWN, **own)
    single = Answers("llama", asked, **engine)
    repeated = Answers("llama", asked, nothing_waits, **engine)
    assert repeated.tokens == single.tokens and repeated.steps == single.steps


def test_failed_repetition_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    single = Answers("llama", requests(2, DRAWN))
    original, calls = LayersTogether.decode_again, []

    def failing(self: LayersTogether, *args: Any, **how: Any) -> Any:
        calls.append(args)
        if len(calls) % 3 == 0:
            raise RuntimeError("made up")
        logits = original(self, *args, **how)
        return (
            np.full_like(logits, np.nan) if logits is not None and len(calls) % 7 == 0 else logits
        )

    monkeypatch.setattr(LayersTogether, "decode_again", failing)
    monkeypatch.setattr(packed("llama"), "decode_again", failing.__get__(together()))
    repeated = Answers("llama", requests(2, DRAWN), nothing_waits)
    assert len(calls) > 20
    assert repeated.tokens == single.tokens and repeated.ends == single.ends


def together() -> LayersTogether:
    joined, _ = packed("llama").layers[0]._together
    assert isinstance(joined, LayersTogether)
    return joined


@contextmanager
def decoded_row(**settings: Any) -> Iterator[tuple[Core, DecodeRow]]:
    """Decode some tokens, and yield the row of the next step."""
    core = Core(packed("llama"), memory_limit="1GB", max_stall_ms=0, **settings)
    core.submit(requests(1)[0])
    while core.stores.counters.decode_steps < 4:
        core.step()
    (sequence,) = core.admission.sequences.values()
    yield core, sequence.row()
    core.close()


def test_step_of_other_rows_is_not_repeated() -> None:
    """Tables of a step serve only the step after it, of the same rows and tails."""
    model = packed("llama")
    with decoded_row() as (core, row):
        where = core.stores.tails, core.runner.selection
        others = [row.ahead(1), replace(row, slot=row.slot + 1), replace(row, tail=row.tail + 1)]
        assert all(model.decode_again([3], [of], *where) is None for of in others)
        assert model.decode_again([3], [row], *where) is not None


@pytest.mark.parametrize("settings", [{}, {"attend_tokens": 128}], ids=["all", "choice"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_next_step_uses_tables_of_the_step_before(
    sampling: Sampling, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step decodes one token, as others wait; but not where spans have changed."""
    single = Answers("llama", requests(2, sampling), **settings)
    original, calls = Runner.decode, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(Runner, "decode", counted)
    next_ones = Answers("llama", requests(2, sampling), lambda: True, **settings)
    assert next_ones.tokens == single.tokens and next_ones.ends == single.ends
    assert next_ones.steps == single.steps and next_ones.decoded == single.decoded
    assert TOKENS / 16 < len(calls) < TOKENS / 3


def test_step_of_replaced_spans_is_not_repeated() -> None:
    """Nodes may be merged, quantized or spilled between two steps."""
    model = packed("llama")
    with decoded_row() as (core, row):
        where = core.stores.tails, core.runner.selection
        moved = replace(row.parts[0], segment=row.parts[0].segment.owned())
        other = replace(row, parts=(moved, *row.parts[1:])).ahead(1)
        assert model.decode_again([3], [replace(row, whole=True)], *where, new_step=True) is None
        assert model.decode_again([3], [row], *where, new_step=True) is not None
        assert model.decode_again([4], [other], *where, new_step=True) is None
        assert model.decode_again([4], [other], *where) is not None, "as it is not asked"


def test_selection_does_not_move_to_tokens_without_index() -> None:
    """An index that memory had no room for is missing until a later step makes it."""
    with decoded_row(attend_tokens=128) as (core, _):
        tables = together()._latest
        assert tables is not None
        choice = next(choice for choice in tables.choices if choice is not None)
        position = int(choice.choices[0, 3]) - 1
        moved = choice.ahead([position + 16])
        assert choice.moves and moved is not None
        assert moved[0, 0] == choice.choices[0, 0] + 1
        still = replace(choice, moves=False)
        assert still.ahead([position + 16]) is None
        assert still.ahead([int(choice.choices[0, 3]) - 1]) is not None
        (sequence,) = core.admission.sequences.values()
        (*parts, last), row = sequence.row().parts, sequence.row()
        bare = replace(last, segment=replace(last.segment, index=()))
        assert core.runner.selection.indexes(row.parts, row.position)
        assert not core.runner.selection.indexes((*parts, bare), row.position)
