"""Retentions on a plain prefix tree, without an engine or a model."""

from __future__ import annotations

import mlx.core as mx
import pytest

from penstock.attention.mlx_backend import MLXBackend
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.span_attention import AttentionWindow
from penstock.engine.retention.compressed_rows import CompressedRows
from penstock.engine.retention.key_indexing import KeyIndexing
from penstock.engine.retention.recurrent import RecurrentStates
from penstock.engine.retention.retention import Retention
from penstock.engine.retention.windows import Windows, windows_of
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState
from penstock.kv.tails import LayerShape
from penstock.ledger import Kind, Ledger
from penstock.prefix.node import Node
from penstock.prefix.pin import Pin
from penstock.prefix.prefixes import Prefixes

BLOCK, HEADS, DIM = 32, 2, 32
SHAPES = (LayerShape(HEADS, DIM, DIM, mx.float32),) * 2
TOKENS = list(range(6 * BLOCK))
TOKEN_BYTES = 2 * HEADS * DIM * 4
"""Bytes of a token in one layer."""
WINDOWED = 1
"""Number of the layer with a window."""


def tree(limit_bytes: int = 10_000_000) -> Prefixes[Segment]:
    return Prefixes(Ledger(limit_bytes), block_size=BLOCK, span_tokens=BLOCK)


def computed(tokens: int = len(TOKENS)) -> Segment:
    keys = mx.random.normal((2, 1, HEADS, tokens, DIM), key=mx.random.key(3))
    layers = tuple((mx.contiguous(side), mx.contiguous(side + 1)) for side in keys)
    mx.eval(layers)
    return Segment(layers, length=tokens)


def inserted(prefixes: Prefixes[Segment], segment: Segment) -> Pin[Segment]:
    pin = prefixes.pin(prefixes.find(TOKENS))
    paid = prefixes.ledger.reserve(Kind.TAILS, segment.nbytes)
    hashes = prefixes.block_hashes(TOKENS)
    prefixes.insert(pin, 0, hashes, TOKENS, segment, paid)
    paid.release()
    return pin


def state(value: float = 1.0) -> RecurrentState:
    return RecurrentState(((mx.full((1, 4), value),),))


def kv_tokens(node: Node[Segment], layer: int) -> int:
    return node.segment.layers[layer][0].shape[2]


# ---- windows


def test_only_windows_shorter_than_context_are_retained_separately() -> None:
    layers = [AttentionWindow(), AttentionWindow(40), AttentionWindow(200), AttentionWindow(40, 4)]
    assert windows_of(layers, 100) == {1: 40}


def windowed(prefixes: Prefixes[Segment]) -> Windows:
    return Windows(prefixes, {WINDOWED: BLOCK + 1}, SHAPES)


def test_relieve_drops_only_tokens_before_last_window() -> None:
    prefixes = tree()
    windows = windowed(prefixes)
    with inserted(prefixes, computed()) as pin:
        freed = windows.relieve(10**9, [])
        kept = [sum(kv_tokens(node, layer) for node in pin.path) for layer in (0, WINDOWED)]
        assert kept == [len(TOKENS), 2 * BLOCK]
        assert freed == 4 * BLOCK * TOKEN_BYTES
        assert windows.relieve(10**9, []) == 0
    windows.release()


def test_relieve_keeps_window_of_running_sequence() -> None:
    prefixes = tree()
    windows = windowed(prefixes)
    with inserted(prefixes, computed()) as pin:
        reader = pin.path, 2 * BLOCK
        windows.relieve(10**9, [reader])
        windows.check(pin.path, 2 * BLOCK, 2 * BLOCK)
        assert sum(kv_tokens(node, WINDOWED) for node in pin.path) == len(TOKENS)


def test_path_with_dropped_tokens_resumes_only_at_its_end() -> None:
    prefixes = tree()
    windows = windowed(prefixes)
    with inserted(prefixes, computed()) as pin:
        assert windows.resume(pin.path, 3 * BLOCK) == 3 * BLOCK
        windows.relieve(10**9, [])
        assert windows.resume(pin.path, len(TOKENS)) == len(TOKENS)
        assert windows.resume(pin.path, 3 * BLOCK) == 0
        with pytest.raises(AssertionError, match="lacks"):
            windows.check(pin.path, 2 * BLOCK, 2 * BLOCK)


def test_recomputed_chunk_fills_dropped_tokens() -> None:
    prefixes = tree()
    windows, whole = windowed(prefixes), computed()
    with inserted(prefixes, whole) as pin:
        windows.relieve(10**9, [])
        assert windows.fill(pin, prefixes.block_hashes(TOKENS), whole, 0)
        assert windows.resume(pin.path, 3 * BLOCK) == 3 * BLOCK
        keys = [node.segment.layers[WINDOWED][0] for node in pin.path]
        assert mx.array_equal(mx.concatenate(keys, axis=2), whole.layers[WINDOWED][0])


def test_window_at_prompt_end_is_retained_until_next_prompt() -> None:
    prefixes = tree()
    windows = windowed(prefixes)
    with inserted(prefixes, computed()) as pin:
        windows.end_prompt(pin.path, 3 * BLOCK)
        windows.relieve(1, [])
        assert sum(kv_tokens(node, WINDOWED) for node in pin.path) == len(TOKENS) - BLOCK
        assert windows.resume(pin.path, 3 * BLOCK) == 3 * BLOCK
        windows.end_prompt(pin.path, len(TOKENS))
        windows.relieve(1, [])
        assert windows.resume(pin.path, 3 * BLOCK) == 0


# ---- recurrent states


def test_sequence_resumes_at_last_captured_state() -> None:
    prefixes = tree()
    recurrent = RecurrentStates(prefixes, 16, spacing_tokens=BLOCK)
    with inserted(prefixes, computed()) as pin:
        assert recurrent.resume(pin.path, len(TOKENS)) == 0
        for block in (1, 3):
            recurrent.capture(pin.path, block * BLOCK, state(block), turn_end=False)
        assert recurrent.resume(pin.path, len(TOKENS)) == 3 * BLOCK
        assert recurrent.resume(pin.path, 3 * BLOCK - 1) == BLOCK
        resumed = recurrent.state(pin.path, BLOCK)
        assert resumed is not None and resumed.states[0][0][0, 0] == 1.0
        assert recurrent.end_turn(pin.path, 2 * BLOCK) == BLOCK


def test_non_finite_states_are_not_captured() -> None:
    prefixes = tree()
    recurrent = RecurrentStates(prefixes, 16, spacing_tokens=BLOCK)
    with inserted(prefixes, computed()) as pin:
        recurrent.capture(pin.path, BLOCK, state(float("nan")), turn_end=False)
        assert recurrent.resume(pin.path, len(TOKENS)) == 0
    assert recurrent.ended(computed(5), state(float("inf"))) is None
    assert recurrent.ended(computed(5), None) is None
    ended = recurrent.ended(computed(5), state())
    assert ended is not None and [mark.offset for mark in ended.checkpoints] == [5]


def test_states_are_not_captured_without_memory() -> None:
    prefixes = tree()
    recurrent = RecurrentStates(prefixes, 16, spacing_tokens=BLOCK)
    with inserted(prefixes, computed()) as pin:
        rest = prefixes.ledger.reserve(Kind.BUFFERS, prefixes.ledger.free_bytes)
        recurrent.capture(pin.path, BLOCK, state(), turn_end=False)
        assert recurrent.resume(pin.path, len(TOKENS)) == 0
        rest.release()


# ---- key index


def test_unindexed_nodes_are_indexed_when_attached() -> None:
    prefixes, index = tree(), KeyIndex(frozenset({0}))
    indexing = KeyIndexing(index, prefixes, 100, MLXBackend())
    with inserted(prefixes, computed()) as pin:
        assert not any(node.segment.key_index_nbytes for node in pin.path)
        indexing.attached(pin.path)
        assert all(index.complete(node.segment) for node in pin.path)
        held = sum(node.segment.key_index_nbytes for node in pin.path)
        assert prefixes.ledger.by_class()[Kind.KEY_INDEX] == held > 0


def test_nodes_stay_unindexed_if_memory_is_full() -> None:
    prefixes, index = tree(), KeyIndex(frozenset({0}))
    indexing = KeyIndexing(index, prefixes, 100, MLXBackend())
    with inserted(prefixes, computed()) as pin:
        rest = prefixes.ledger.reserve(Kind.BUFFERS, prefixes.ledger.free_bytes)
        indexing.attached(pin.path)
        assert not any(node.segment.key_index_nbytes for node in pin.path)
        rest.release()


# ---- what an engine asks of each kind


@pytest.mark.parametrize(
    ("retention", "ends_blocks", "resumes_inside"),
    [
        (Retention(), False, True),
        (RecurrentStates(tree(), 16, spacing_tokens=BLOCK), True, True),
        (CompressedRows({}), True, False),
    ],
)
def test_retentions_declare_block_boundary_rules(
    retention: Retention, ends_blocks: bool, resumes_inside: bool
) -> None:
    assert (retention.ends_blocks, retention.resumes_inside) == (ends_blocks, resumes_inside)
