"""Selective decode steps on long sequences: text is equal however it is served."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import cold_engine
import mlx.core as mx
import pytest
from core_parts import (
    cached_nodes,
    evict_unpinned,
    fixed_bytes_of,
    free_beside_tree,
    layer_shapes,
    weights_bytes_of,
)
from engine_faults import model_of
from tiny_families import build

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.core import Core
from penstock.engine.handle import Choice
from penstock.engine.model.step_costs import StepCosts
from penstock.engine.request import Request, Sampling
from penstock.engine.schedule.sequence import Sequence as EngineSequence
from penstock.errors import SettingError
from penstock.ledger import Kind
from penstock.models.loading import load
from penstock.models.mlx_lm import render
from penstock.plugins.cpu.center_loops import cached_center_loop
from penstock.plugins.cpu.choice_reader import LoopReader
from penstock.recall import MODEL_PATH
from penstock_bench.recall import dialogue
from support.worst_blocks import choose_worst_blocks

SMALL: dict[str, Any] = {
    "memory_limit": "120MB",
    "block_size": 16,
    "prefill_chunk": 64,
    "max_batch_size": 3,
    "max_kv_size": 1_024,
}
LEAST = 128
ACTIVE = {
    "kv_cache_quantization": "turbo8",
    "kv_cache_quantize_when": "active",
    "kv_cache_min_quantize_tokens": 0,
}
AT_REST = {"kv_cache_quantization": "turbo8", "kv_cache_min_quantize_tokens": 0}


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 500) for _ in range(tokens))


LONG, OTHER, SHORT = prompt(260), prompt(200, 1), prompt(40, 2)


@contextmanager
def running(family: str = "llama", **settings: Any) -> Iterator[Core]:
    core = Core(model_of(family), **{**SMALL, **settings})
    try:
        yield core
        core.view.check()
    finally:
        core.close()
        core.view.check()


def answers(core: Core, *prompts: Sequence[int], tokens: int = 12, **more: Any) -> list[list[int]]:
    """Return the answers to concurrent prompts."""
    asked = [Request(prompt=tuple(p), max_tokens=tokens, ignore_eos=True, **more) for p in prompts]
    handles = [core.submit(request) for request in asked]
    while core.step():
        pass
    core.view.check()
    return [list(choice.tokens) for handle in handles for choice in handle.result(0.0)]


def alone(core: Core, *prompts: Sequence[int], tokens: int = 12) -> list[list[int]]:
    return [answers(core, one, tokens=tokens)[0] for one in prompts]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"block_size": 8}),
        ("llama", {"max_kv_size": 160, "keep": 16}),
        ("llama", ACTIVE),
        ("llama", AT_REST),
        ("falcon_h1", {}),
    ],
)
def test_token_budget_above_length_matches_full_attention(
    family: str, more: dict[str, Any]
) -> None:
    prompts = LONG, SHORT
    with running(family, **more) as core:
        expected = answers(core, *prompts)
        again = answers(core, *prompts)
        chosen = core.ledger.by_class()[Kind.KEY_INDEX]
    assert chosen == 0, "off by default"
    with running(family, **more, attend_tokens=512) as core:
        assert answers(core, *prompts) == expected
        assert answers(core, *prompts) == again
        assert core.ledger.by_class()[Kind.KEY_INDEX] > 0
    with running(family, **more, attend_tokens=512, attend_rest=True) as core:
        assert answers(core, *prompts) == expected
    with running(family, **more, attend_tokens=LEAST) as core:
        differs = answers(core, *prompts) != expected
    beyond = "max_kv_size" in more
    assert differs is not beyond, "fewer change the text, but not behind a window"


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"block_size": 24}),
        ("llama", ACTIVE),
        ("falcon_h1", {}),
        ("llama", {"attend_rest": True}),
        ("llama", {**ACTIVE, "attend_rest": True}),
        ("falcon_h1", {"attend_rest": True, "block_size": 24}),
    ],
)
def test_text_is_independent_of_cache_and_batch(family: str, more: dict[str, Any]) -> None:
    prompts = LONG, OTHER, SHORT
    with running(family, **more, attend_tokens=LEAST) as core:
        expected = alone(core, *prompts, tokens=40)
        hit = alone(core, *prompts, tokens=40)
    with running(family, **more, attend_tokens=LEAST) as core:
        together = answers(core, *prompts, tokens=40)
    assert hit == expected
    assert together == expected


@pytest.mark.parametrize("rest", [False, True])
def test_no_loop_is_compiled_during_steps(rest: bool) -> None:
    """Compiling takes a second and 200 MB."""
    pytest.importorskip("numba")
    with running(attend_tokens=LEAST, attend_rest=rest) as core:
        shape = layer_shapes(core)[0]
        sizes = shape.key_dim, shape.value_dim
        reader = core.runner.device.choice_reader(core.runner.selection, *sizes)
        assert isinstance(reader, LoopReader)
        loops = reader.loops
        compiled = loops._choose, loops._locate, loops._attend, cached_center_loop()
        assert all(loop.is_compiled for loop in compiled)
        assert loops._rest.is_compiled if rest else loops._rest is None


@pytest.mark.parametrize("more", [{}, {"speculative_tokens": 4}, ACTIVE, AT_REST])
def test_prompt_logprobs_use_full_attention(more: dict[str, Any]) -> None:
    """Bit-identical, cold and cached, also beside selective rows."""
    asked = {"max_tokens": 2, "ignore_eos": True, "prompt_logprobs": 2}
    told = []
    for attend in ({}, {"attend_tokens": LEAST}):
        with running(**more, **attend) as core:
            for state in ("cold", "cached"):
                if state == "cached":
                    beside = core.submit(Request(prompt=OTHER, max_tokens=60, ignore_eos=True))
                    while core.counters.decode_steps < 8:
                        core.step()
                handle = core.submit(Request(prompt=LONG, **asked))
                while core.step():
                    core.view.check()
                scores = handle.prompt_logprobs
                assert scores is not None and scores.done
                told.append(list(scores))
            assert len(beside.result(0.0)[0].tokens) == 60
    cold, cached = told[:2], told[2:]
    assert cold == cached and len(cold[0]) == len(LONG)


def test_parallel_choices_match_single() -> None:
    with running(attend_tokens=LEAST) as core:
        one = alone(core, LONG)[0]
        assert answers(core, LONG, n=3) == [one] * 3


def test_preempted_sequence_continues_with_same_text() -> None:
    with running(attend_tokens=LEAST) as core:
        expected = alone(core, LONG, OTHER, tokens=40)
    with running(attend_tokens=LEAST, max_batch_size=1) as core:
        asked = [Request(prompt=p, max_tokens=40, ignore_eos=True) for p in (LONG, OTHER)]
        first = core.submit(asked[0])
        while core.counters.generated_tokens < 20:
            core.step()
        second = core.submit(asked[1].model_copy(update={"priority": 1}))
        while core.step():
            core.view.check()
        assert core.counters.preemptions == 1
        found = [list(handle.result(0.0)[0].tokens) for handle in (first, second)]
    assert found == expected


def test_answer_after_eviction_matches_recomputed_prompt() -> None:
    """An answer's KV depends on its selections; recomputed, it is a prompt's KV."""
    with running(attend_tokens=LEAST, max_batch_size=1) as core:
        long = Request(prompt=LONG, max_tokens=60, ignore_eos=True)
        first = core.submit(long)
        while core.counters.generated_tokens < 20:
            core.step()
        core.submit(Request(prompt=SHORT, max_tokens=1, ignore_eos=True, priority=1))
        while core.counters.preemptions < 1:
            core.step()
        said = core.counters.generated_tokens
        assert evict_unpinned(core)
        while core.step():
            core.view.check()
        after = list(first.result(0.0)[0].tokens)
    with running(attend_tokens=LEAST) as core:
        whole = answers(core, LONG, tokens=60)[0]
    with running(attend_tokens=LEAST) as core:
        prompt = (*LONG, *after[:said])
        anew = answers(core, prompt, tokens=60 - said)[0]
    assert after[:said] == whole[:said], "what was said stays"
    assert after[said:] == anew
    assert after != whole, "negative control: the answer's own keys were other ones"


def test_restored_blocks_are_indexed(tmp_path: Path, reads_all: None) -> None:
    settings = {"attend_tokens": LEAST}
    with cold_engine.running(tmp_path, **settings) as core:
        expected = alone(core, LONG)
        cold_engine.settle(core)
    with cold_engine.running(tmp_path, **settings) as core:
        assert alone(core, LONG) == expected
        assert core.counters.restored_tokens >= 192
        indexed = core.ledger.by_class()[Kind.KEY_INDEX]
        held = sum(node.end - node.start for node in cached_nodes(core))
        assert indexed == held * core.view.index_token_bytes


def test_selection_ignores_dropped_window_kv() -> None:
    """Full layers select where the KV of windowed layers was evicted."""
    settings, told = {**SMALL, "attend_tokens": LEAST}, []
    asked = [token % 90 for token in LONG]
    for dropped in (False, True):
        core = Core(build("cohere2"), **settings)
        (answer,) = answers(core, asked)
        if dropped:
            assert free_beside_tree(core, 10**9) > 0
            assert any(node.segment.missing for node in cached_nodes(core))
        told.append(answers(core, [*asked, *answer, 7, 8, 9], tokens=20))
        core.close()
    assert told[0] == told[1]


def scored(core: Core, *prompts: Sequence[int], tokens: int = 2, **more: Any) -> list[Choice]:
    """Return the answers to concurrent prompts, with their log-probabilities."""
    sampling = Sampling(logprobs=True, top_logprobs=5)
    asked = {"max_tokens": tokens, "ignore_eos": True, "sampling": sampling, **more}
    handles = [core.submit(Request(prompt=tuple(p), **asked)) for p in prompts]
    while core.step():
        core.view.check()
    return [choice for handle in handles for choice in handle.result(0.0)]


def differences(found: Choice, expected: Choice) -> list[float]:
    """Return the largest difference of log-probabilities at each token; infinite from the first
    other token on."""
    apart = []
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        mine, theirs = (dict((*t.top, (t.token, t.logprob or 0.0))) for t in (one, other))
        same = one.token == other.token and mine.keys() == theirs.keys()
        apart.append(max(abs(mine[t] - theirs[t]) for t in mine) if same else float("inf"))
    return apart


ROUNDING = 1e-4
"""Difference of log-probabilities that another order of sums can make."""


@pytest.mark.parametrize(
    ("family", "more"), [("llama", {}), ("llama", ACTIVE), ("falcon_h1", {}), ("cohere2", {})]
)
def test_first_token_uses_full_attention(
    family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(**attend: Any) -> Core:
        model = build(family) if family == "cohere2" else model_of(family)
        return Core(model, **{**SMALL, **more, **attend})

    asked = [tuple(token % 90 for token in one) for one in (LONG, OTHER)]
    whole, chooses = made(), made(attend_tokens=LEAST)
    try:
        for state in ("cold", "cached"):
            for one in asked:
                (expected,), (found,) = scored(whole, one), scored(chooses, one)
                first, second = differences(found, expected)
                assert first == 0.0, f"{state}: bit for bit"
                assert second > ROUNDING, "the next one reads a choice"
        both = scored(whole, *asked)
        monkeypatch.setattr(EngineSequence, "follows_prompt", False)
        for found, expected in zip(scored(chooses, *asked), both, strict=True):
            assert differences(found, expected)[0] > ROUNDING, "negative control"
    finally:
        whole.close()
        chooses.close()


def test_first_token_uses_full_attention_in_batch_with_selective_rows() -> None:
    """Rows of one step may read differently, independently of each other."""
    with running() as core:
        expected = [scored(core, one)[0] for one in (LONG, OTHER)]
    with running(attend_tokens=LEAST) as core:
        (alone,) = scored(core, LONG, tokens=20)
        long = core.submit(Request(prompt=LONG, max_tokens=20, ignore_eos=True))
        while core.counters.generated_tokens < 24:
            core.step()
        assert core.admission.sequences, "the first one still chooses"
        (late,) = scored(core, OTHER)
        assert differences(late, expected[1])[0] < ROUNDING
        assert list(long.result(0.0)[0].tokens) == alone.tokens
        for found in scored(core, LONG, n=3):
            assert differences(found, expected[0])[0] < ROUNDING


@pytest.fixture
def proposals_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify the same number of tokens whatever a busy machine measures."""
    monkeypatch.setattr(StepCosts, "ratio", lambda *_: 1.0)


def drafted(family: str) -> dict[str, Any]:
    """Return settings with a draft of the same model, so that most proposals are right."""
    if family == "falcon_h1":  # recurrent layers cannot draft
        return {"speculative_tokens": 4}
    return {"speculative_tokens": 4, "draft_model": (deepcopy(model_of(family)), None)}


REPEATS = prompt(60, 4) * 4
"""Answers to it repeat, too, so that text proposes."""


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attend_rest": True, "block_size": 24}),
        ("llama", {"attend_full_layers": (1,)}),
        ("llama", ACTIVE),
        ("llama", AT_REST),
        ("falcon_h1", {}),
    ],
)
def test_verification_selects_tokens_per_proposed_token(
    family: str, more: dict[str, Any], proposals_pay: None
) -> None:
    begins = prompt(120, 5)  # to choose in its answer
    with running(family, **more, attend_tokens=LEAST) as core:
        expected = alone(core, LONG, SHORT, REPEATS, begins, tokens=24)
        plain = core.counters.decode_steps
    with running(family, **more, **drafted(family), attend_tokens=LEAST) as core:
        together = answers(core, LONG, SHORT, tokens=24)
        assert together + alone(core, REPEATS, begins, tokens=24) == expected
        assert core.counters.accepted_tokens > 3 and core.counters.failed_proposals == 0
        assert core.counters.decode_steps < plain


def test_check_detects_full_attention_in_verification(
    monkeypatch: pytest.MonkeyPatch, proposals_pay: None
) -> None:
    """Negative control."""
    with running(attend_tokens=LEAST) as core:
        expected = alone(core, LONG, tokens=24)
    ahead = DecodeRow.ahead
    monkeypatch.setattr(DecodeRow, "ahead", lambda row, n: replace(ahead(row, n), whole=n > 0))
    with running(**drafted("llama"), attend_tokens=LEAST) as core:
        assert alone(core, LONG, tokens=24) != expected


def test_speculation_with_full_budget_is_unchanged(
    proposals_pay: None,
) -> None:
    with running() as core:
        expected = answers(core, LONG, tokens=20)[0]
    found = []
    for attend in ({}, {"attend_tokens": 512}):
        with running(speculative_tokens=4, **attend) as core:
            found += scored(core, LONG, tokens=20, prediction=tuple(expected))
            assert core.counters.accepted_tokens > 10
    assert differences(*found) == [0.0] * 20, "bit for bit"


def test_layers_can_be_skipped() -> None:
    with running() as core:
        whole = alone(core, LONG)
    with running(attend_tokens=LEAST, attend_full_layers=(0, 1)) as core:
        assert alone(core, LONG) == whole
        assert core.ledger.by_class()[Kind.KEY_INDEX] == 0
    with running(attend_tokens=LEAST, attend_full_layers=(1,)) as core:
        first = alone(core, LONG)
        assert core.view.index_token_bytes == 2 * (2 * 32 // 8 + 2), "16 numbers become 32"
    assert first != whole


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("llama", {"attend_tokens": 127}, "attend_tokens 127: .*greater than or equal to 128"),
        ("llama", {"attend_full_layers": (0,)}, "set both or neither"),
        ("llama", {"attend_rest": True}, "set both or neither"),
        ("llama", {"attend_tokens": 128, "attend_full_layers": (7,)}, r"\[7\]: .* are \[0, 1\]"),
        ("gemma2", {"attend_tokens": 128}, "contiguous keys and values"),
    ],
)
def test_unsupported_settings_are_refused_at_start(
    family: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingError, match=says):
        Core(model_of(family), **SMALL, **settings)


@pytest.mark.parametrize("more", [{}, {"attend_rest": True}, {"speculative_tokens": 16}, AT_REST])
def test_bytes_are_reserved_before_allocation(more: dict[str, Any], proposals_pay: None) -> None:
    """MLX's peak above the baseline fits the ledger's account."""
    with running(attend_tokens=LEAST, max_kv_size=2_048, **more) as core:
        handle = core.submit(Request(prompt=prompt(1_200, 3), max_tokens=40, ignore_eos=True))
        core.step()
        mx.clear_cache()
        others = mx.get_active_memory() - (core.ledger.used_bytes - fixed_bytes_of(core))
        while core.step():
            mx.reset_peak_memory()
            fixed = weights_bytes_of(core)
            counted = core.ledger.used_bytes
            assert mx.get_peak_memory() <= others + counted + fixed
            core.view.check()
        assert len(handle.result(0.0)[0].tokens) == 40
        kinds = core.ledger.by_class()
        tokens = sum(node.end - node.start for node in cached_nodes(core))
        assert kinds[Kind.KEY_INDEX] == tokens * core.view.index_token_bytes
        index = sum(node.segment.key_index_nbytes for node in cached_nodes(core))
        assert kinds[Kind.KEY_INDEX] == index


def known(settings: dict[str, Any], tokens: int = 2_000, facts: int = 6) -> int:
    """Return the number of facts of a dialogue that the embedded model recalls."""
    model, tokenizer = load(MODEL_PATH)
    talk = dialogue(3, tokens=tokens, facts=facts)
    core = Core(model, memory_limit="200MB", max_batch_size=1, **settings)
    right = 0
    try:
        for question in talk.questions:
            asked = render(tokenizer, talk.ask(question))
            (said,) = answers(core, asked, tokens=8)
            ends = [n for n, token in enumerate(said) if token in tokenizer.eos_token_ids]
            text = tokenizer.decode(said[: ends[0]] if ends else said)
            right += text.strip() == question.answer
    finally:
        core.close()
    return right


def test_selection_recalls_facts_that_window_loses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert known({"attend_tokens": LEAST}) == 6
    assert known({"max_kv_size": LEAST, "keep": 16}) <= 1
    choose_worst_blocks(monkeypatch)
    assert known({"attend_tokens": LEAST}) > 1, "a first token reads all, and says where to go on"
    monkeypatch.setattr(EngineSequence, "follows_prompt", False)
    assert known({"attend_tokens": LEAST}) <= 1, "it is the choice that finds them"
