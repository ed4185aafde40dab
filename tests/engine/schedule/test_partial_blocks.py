"""Conversations resume at their last token: a turn computes only new tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
from core_parts import cached_nodes, evict_all, sequences_in, shrink
from small_cores import ask, core_of, run
from tiny_families import prompt_of

from penstock.engine.core import Core
from penstock.engine.request import Request
from penstock.engine.schedule.scheduler import State
from penstock.ledger import Kind
from penstock.prefix import tree as tree_module

KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "mamba2", "recurrent_gemma")
"""Full attention; windows, with sinks; states in some layers, in all, alone, and with windows."""
FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "active": {"kv_cache_quantization": "turbo8", "kv_cache_quantize_when": "active"},
    "at-rest": {"kv_cache_quantization": "turbo8", "kv_cache_quantize_when": "at-rest"},
}


def computed(core: Core, act: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call, and the number of prompt tokens computed for it."""
    before = core.view.stats().prefilled_tokens
    return act(), core.view.stats().prefilled_tokens - before


def partial_blocks(core: Core) -> list[int]:
    return sorted(len(node.tokens) for node in cached_nodes(core) if node.partial)


@pytest.mark.parametrize("kind", KINDS)
def test_next_turn_computes_only_new_tokens(kind: str) -> None:
    # Windows of a test model are shorter than 16 tokens; those of real ones hold many blocks.
    block_size = 8 if kind == "recurrent_gemma" else 16
    core, cold = (core_of(kind, block_size=block_size) for _ in range(2))
    try:
        talk = tuple(prompt_of(39))
        for turn, new in enumerate((39, 5, 20, 1, 40)):
            said, count = computed(core, lambda talk=talk: ask(core, talk))
            # The last token of an answer was never read, and that of a prompt decodes.
            assert count == (new - 1 if turn == 0 else new)
            read = (*talk, *said)
            explained = core.view.explain((*read, 5))
            assert explained.held_tokens == len(read) - 1
            assert explained.reusable_tokens in (None, len(read) - 1)
            cold.clear()
            assert said == ask(cold, talk)
            talk = (*talk, *said, *prompt_of((5, 20, 1, 40, 2)[turn], turn))
        core.clear()
        assert core.ledger.by_class()[Kind.NODES] == core.ledger.by_class()[Kind.CHECKPOINTS] == 0
        core.view.check()
    finally:
        core.close()
        cold.close()


@pytest.mark.parametrize("form", ["active", "at-rest"])
def test_next_turn_computes_only_new_tokens_with_codec(form: str) -> None:
    settings = {**FORMS[form], "kv_cache_min_quantize_tokens": 0}
    with_codes = core_of("llama", **settings)
    try:
        talk = tuple(prompt_of(39))
        for new in (39, 5, 20):
            said, count = computed(with_codes, lambda talk=talk: ask(with_codes, talk))
            assert count == (38 if new == 39 else new)
            talk = (*talk, *said, *prompt_of(5 if new == 39 else 20, new))
        whole = [node for node in with_codes.prefixes.tree if not node.partial]
        assert any(
            type(side).__name__ == "Coded" for node in whole for side in node.segment.layers[0]
        )
        for node in with_codes.prefixes.tree:
            if node.partial:
                sides = node.segment.layers[0]
                assert all(type(side).__name__ != "Coded" for side in sides)
    finally:
        with_codes.close()


@pytest.fixture
def core() -> Any:
    made = core_of("llama", max_batch_size=4)
    yield made
    made.close()


def test_partial_block_is_replaced_by_longer_one(core: Core) -> None:
    """The next end replaces the last one; whole blocks replace both."""
    talk = tuple(prompt_of(33))
    talk += ask(core, talk, 4)
    assert partial_blocks(core) == [4]  # 36 tokens were read
    talk += (7, *ask(core, (*talk, 7), 4))
    assert partial_blocks(core) == [9]
    ask(core, (*talk, *prompt_of(20)), 8)
    assert partial_blocks(core) == [(len(talk) + 27) % 16]


def test_partial_block_extends_branch_inside_longer_node(core: Core) -> None:
    ask(core, tuple(prompt_of(81)), 1)
    (node,) = [node for node in cached_nodes(core) if not node.partial]
    assert len(node.tokens) == 80
    talk = (*prompt_of(81)[:32], *prompt_of(5, 9))
    talk += ask(core, talk, 4)
    core.view.check()
    assert computed(core, lambda: ask(core, (*talk, 5), 1))[1] == 1


def test_evicted_partial_block_frees_memory(core: Core) -> None:
    """A sequence that resumed there holds its own KV by then."""
    talk = tuple(prompt_of(33))
    talk += ask(core, talk, 4)
    leaf = ref(next(node for node in cached_nodes(core) if node.partial))
    handle = core.submit(Request(prompt=(*talk, 7, 8), max_tokens=4, ignore_eos=True))
    while sequences_in(core, State.WAITING) or not core.view.stats().running:
        core.step()
    assert handle.progress is not None and handle.progress.cached_tokens == 36
    evict_all(core)
    assert partial_blocks(core) == []
    assert leaf() is None, "a node outside the tree and the ledger"
    run(core, handle)


def test_explain_reports_new_tokens_after_partial_block(core: Core) -> None:
    talk = tuple(prompt_of(33))
    ask(core, talk, 1)
    explained = core.view.explain((*talk, 5, 6, *prompt_of(18, 2)))
    assert explained.held_tokens == 33
    assert "20 tokens from token 33 on" in explained.reason


def test_branches_share_partial_block(core: Core) -> None:
    talk = tuple(prompt_of(33))
    talk += ask(core, talk, 8)
    branches = [(*talk, *prompt_of(30, seed)) for seed in range(3)]
    requests = [Request(prompt=branch, max_tokens=4, ignore_eos=True) for branch in branches]
    said, count = computed(core, lambda: run(core, *map(core.submit, requests)))
    assert count == 3 * 30
    core.clear()
    assert [tuple(answer) for answer in said] == [ask(core, branch, 4) for branch in branches]


def test_concurrent_equal_turns_are_computed_once(core: Core) -> None:
    talk = tuple(prompt_of(33))
    talk += ask(core, talk, 8)
    request = Request(prompt=(*talk, *prompt_of(60)), max_tokens=4, ignore_eos=True)
    said, count = computed(core, lambda: run(core, *(core.submit(request) for _ in range(3))))
    assert said[0] == said[1] == said[2]
    assert count < 60 + 2 * 16


def test_other_tenant_misses_partial_block(core: Core) -> None:
    talk = tuple(prompt_of(5))
    talk += ask(core, talk, 4, salt="one")
    for salt, count in (("two", 9), ("one", 1)):
        assert computed(core, lambda s=salt: ask(core, (*talk, 3), 1, salt=s))[1] == count


def test_preempted_sequence_recomputes_nothing(core: Core) -> None:
    expected = ask(core, tuple(prompt_of(37)), 30)
    core.clear()
    request = Request(prompt=tuple(prompt_of(37)), max_tokens=30, ignore_eos=True)
    handle = core.submit(request)
    while not _ran(core):
        core.step()
    (sequence,) = core.admission.sequences.values()
    core.admission.preempt(sequence)
    core.view.check()
    assert sequence.kv.pin is None
    said, count = computed(core, lambda: run(core, handle))
    assert (tuple(said[0]), count) == (expected, 0)


def _ran(core: Core) -> bool:
    return any(s.generated_tokens >= 9 for s in sequences_in(core, State.RUNNING))


def test_cancelled_sequence_leaves_partial_block(core: Core) -> None:
    handle = core.submit(Request(prompt=tuple(prompt_of(37)), max_tokens=30, ignore_eos=True))
    while not _ran(core):
        core.step()
    (sequence,) = core.admission.sequences.values()
    tokens = tuple(sequence.tokens)
    core.cancel(handle)
    core.view.check()
    assert computed(core, lambda: ask(core, (*tokens, 5), 1))[1] == 1


def test_partial_block_is_evictable(core: Core) -> None:
    ask(core, tuple(prompt_of(37)), 8)
    assert partial_blocks(core)
    victim = core.prefixes.tree.victim()
    assert victim is not None and victim.partial
    shrink(core, 10**9)
    assert partial_blocks(core) == [] and core.ledger.by_class()[Kind.NODES] == 0
    core.view.check()


def test_check_detects_partial_block_matched_by_length(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an end of other tokens changes the text."""
    first, other = tuple(prompt_of(46)), (*prompt_of(46)[:32], *prompt_of(30, 9))
    expected = ask(core, other)
    core.clear()
    real = tree_module.partial_hash
    monkeypatch.setattr(tree_module, "partial_hash", lambda t, root: real([0] * len(t), root))
    ask(core, first, 1)
    assert partial_blocks(core) == [14]
    assert ask(core, other) != expected
    core.clear()


@pytest.mark.parametrize("form", ["active", "at-rest"])
def test_uncommitted_block_is_committed_at_end_of_answer(form: str) -> None:
    """Whole blocks are coded, the tail after them is not."""
    core = core_of("llama", **FORMS[form], kv_cache_min_quantize_tokens=0)
    try:
        handle = core.submit(Request(prompt=tuple(prompt_of(8)), max_tokens=40, ignore_eos=True))
        core.step()
        free = core.ledger.limit_bytes - core.ledger.used_bytes
        (sequence,) = core.admission.sequences.values()
        with core.ledger.reserve(Kind.BUFFERS, free):
            while sequence.kv.position < 21:
                core.step()
            assert [(span.start, span.end) for span in sequence.kv.own_spans] == [(0, 16)]
        handle.cancel()
        run(core, handle)
        ends = [(node.start, node.end, node.partial) for node in cached_nodes(core)]
        assert ends == [(0, 16, False), (16, 21, True)]
    finally:
        core.close()
