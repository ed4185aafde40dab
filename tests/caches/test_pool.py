"""The KV pool against lists of arrays, and against MLX's memory."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.caches.pool import KVCacheManager
from penstock.errors import PoolFull, SequenceOverflow, SettingError, UnknownSequence

SLOTS, LAYERS, LENGTH, HEADS, DIM = 3, 2, 12, 2, 4


def make(**changes: Any) -> KVCacheManager:
    sizes = {
        "max_batch_size": SLOTS,
        "num_layers": LAYERS,
        "max_seq_len": LENGTH,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "dtype": mx.float32,
    }
    return KVCacheManager(**{**sizes, **changes})


def numbers(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(HEADS, tokens, DIM)).astype(np.float32)


def append(pool: KVCacheManager, seq_id: int, tokens: int, seed: int = 0) -> None:
    for layer in range(LAYERS):
        data = mx.array(numbers(tokens, seed + layer))
        pool.append_kv(seq_id, layer, data, -data, layout="heads_first")


def snapshot(pool: KVCacheManager) -> Any:
    """Copy everything in a pool that is visible to a caller."""
    seen = {
        seq_id: [
            [np.array(side) for side in pool.get_cache(seq_id, layer, pending=True)]
            for layer in range(LAYERS)
        ]
        for seq_id in pool.active_sequences
    }
    lengths = [pool.get_seq_len(seq_id) for seq_id in pool.active_sequences]
    return seen, lengths, pool.used_memory, pool.free_memory


def assert_same(before: Any, after: Any) -> None:
    np.testing.assert_equal(before, after)


def lying(side: np.ndarray, layout: str | None, rows: bool) -> mx.array:
    """Return (heads, n, dim) with its axes in another order, or with a batch axis."""
    found = side.swapaxes(0, 1) if layout == "tokens_first" else side
    return mx.array(found[None] if rows else found)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
def test_layout_can_be_given_explicitly(layout: Any, rows: bool, tokens: int, heads: int) -> None:
    pool = make(num_layers=1, num_kv_heads=heads)
    seq_id = pool.allocate_sequence()
    data = np.random.default_rng(0).normal(size=(heads, tokens, DIM)).astype(np.float32)
    given = lying(data, layout, rows)
    pool.append_kv(seq_id, 0, given, -given, tokens, layout=layout)
    keys, values = pool.get_cache(seq_id, 0, pending=True)
    np.testing.assert_array_equal(np.array(keys)[0], data)
    np.testing.assert_array_equal(np.array(values)[0], -data)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
def test_ambiguous_layout_is_refused(layout: str, tokens: int, heads: int) -> None:
    pool = make(num_layers=1, num_kv_heads=heads)
    seq_id = pool.allocate_sequence()
    data = np.random.default_rng(0).normal(size=(heads, tokens, DIM)).astype(np.float32)
    given = lying(data, layout, False)
    if tokens == heads > 1:
        with pytest.raises(SettingError, match=f"{heads} heads and {tokens} tokens; say which"):
            pool.append_kv(seq_id, 0, given, given)
        return
    pool.append_kv(seq_id, 0, given, given)
    np.testing.assert_array_equal(np.array(pool.get_cache(seq_id, 0, pending=True)[0])[0], data)


class PoolMachine(RuleBasedStateMachine):
    """Random appends, advances, overwrites and releases against plain NumPy arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make()
        self.visible: dict[int, list[np.ndarray]] = {}
        self.pending: dict[int, dict[int, np.ndarray]] = {}
        self.limit: dict[int, int] = {}
        self.released: set[int] = set()
        self.seed = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.visible)))

    @rule(max_len=st.integers(1, LENGTH))
    def allocate(self, max_len: int) -> None:
        if len(self.visible) == SLOTS:
            with pytest.raises(PoolFull, match=f"all {SLOTS} slots"):
                self.pool.allocate_sequence(max_len)
            return
        seq_id = self.pool.allocate_sequence(max_len)
        assert seq_id not in self.visible
        assert seq_id not in self.released
        self.visible[seq_id] = [np.zeros((HEADS, 0, DIM), np.float32)] * LAYERS
        self.pending[seq_id] = {}
        self.limit[seq_id] = max_len

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), tokens=st.integers(1, 6))
    def append(self, data: st.DataObject, layer: int, tokens: int) -> None:
        seq_id = self.pick(data)
        self.seed += 1
        k = numbers(tokens, self.seed)
        given = mx.array(k if self.seed % 2 else k[None])
        length = self.visible[seq_id][0].shape[1]
        if length + tokens > self.limit[seq_id]:
            with pytest.raises(SequenceOverflow, match=f"holds {length} tokens; {tokens} more"):
                self.pool.append_kv(seq_id, layer, given, -given, layout="heads_first")
            return
        self.pool.append_kv(seq_id, layer, given, -given, layout="heads_first")
        self.pending[seq_id][layer] = k

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), n=st.integers(1, 6))
    def advance(self, data: st.DataObject, n: int) -> None:
        seq_id = self.pick(data)
        pending = self.pending[seq_id]
        if self.visible[seq_id][0].shape[1] + n > self.limit[seq_id]:
            with pytest.raises(SequenceOverflow):
                self.pool.advance_seq_len(seq_id, n)
            return
        if any(layer not in pending or pending[layer].shape[1] < n for layer in range(LAYERS)):
            with pytest.raises(ValueError, match="has appended"):
                self.pool.advance_seq_len(seq_id, n)
            return
        self.pool.advance_seq_len(seq_id, n)
        self.visible[seq_id] = [
            np.concatenate([self.visible[seq_id][layer], pending[layer][:, :n]], axis=1)
            for layer in range(LAYERS)
        ]
        self.pending[seq_id] = {}

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), tokens=st.integers(1, 6))
    def step(self, data: st.DataObject, tokens: int) -> None:
        """Run a whole step in random layer order; the other rules alone seldom do."""
        seq_id = self.pick(data)
        if self.visible[seq_id][0].shape[1] + tokens > self.limit[seq_id]:
            return
        for layer in data.draw(st.permutations(range(LAYERS))):
            self.seed += 1
            k = numbers(tokens, self.seed)
            self.pool.append_kv(seq_id, layer, mx.array(k), -mx.array(k), layout="heads_first")
            self.visible[seq_id] = list(self.visible[seq_id])
            self.visible[seq_id][layer] = np.concatenate([self.visible[seq_id][layer], k], axis=1)
        self.pool.advance_seq_len(seq_id, tokens)
        self.pending[seq_id] = {}

    @precondition(lambda self: self.visible)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        self.pool.release_sequence(seq_id)
        del self.visible[seq_id], self.pending[seq_id], self.limit[seq_id]
        self.released.add(seq_id)

    @invariant()
    def the_pool_shows_the_same(self) -> None:
        self.pool.check()
        assert self.pool.active_sequences == sorted(self.visible)
        assert self.pool.used_memory == len(self.visible) * self.pool.slot_memory
        assert self.pool.used_memory + self.pool.free_memory == self.pool.total_memory
        for seq_id in self.released:
            assert not self.pool.has_sequence(seq_id)
        for seq_id, layers in self.visible.items():
            assert self.pool.get_seq_len(seq_id) == layers[0].shape[1]
            for layer, expected in enumerate(layers):
                k, v = self.pool.get_cache(seq_id, layer)
                np.testing.assert_array_equal(np.array(k)[0], expected)
                np.testing.assert_array_equal(np.array(v)[0], -expected)
                fresh = self.pending[seq_id].get(layer, expected[:, :0])
                k, _ = self.pool.get_cache(seq_id, layer, pending=True)
                np.testing.assert_array_equal(np.array(k)[0, :, expected.shape[1] :], fresh)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_all_memory_is_allocated_at_construction() -> None:
    before = mx.get_active_memory()
    pool = make(max_seq_len=512, head_dim=64)
    taken = mx.get_active_memory() - before
    assert taken == pool.total_memory == 2 * LAYERS * SLOTS * HEADS * 512 * 64 * 4
    token = mx.ones((HEADS, 1, 64))
    mx.eval(token)
    ids = [pool.allocate_sequence() for _ in range(SLOTS)]
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    for _ in range(200):
        for seq_id in ids:
            for layer in range(LAYERS):
                pool.append_kv(seq_id, layer, token, token, layout="heads_first")
                k, v = pool.get_cache(seq_id, layer, pending=True)
                mx.eval((k.sum(), v.sum()))
                del k, v
            pool.advance_seq_len(seq_id, 1)
    # A copied buffer would be 768 KiB; what is left is the sums and the tokens of a step.
    assert mx.get_peak_memory() - held < 64 * 1024
    assert mx.get_active_memory() - before < pool.total_memory + 64 * 1024


def test_live_view_keeps_old_values_and_costs_one_copy() -> None:
    pool = make(max_seq_len=512, head_dim=64)
    seq_id = pool.allocate_sequence()
    token = mx.ones((HEADS, 1, 64))
    for layer in range(LAYERS):
        pool.append_kv(seq_id, layer, token, token, layout="heads_first")
    pool.advance_seq_len(seq_id, 1)
    view = pool.get_cache(seq_id, 0)
    mx.eval(view)
    held = mx.get_active_memory()
    for layer in range(LAYERS):
        pool.append_kv(seq_id, layer, 2 * token, 2 * token, layout="heads_first")
    pool.advance_seq_len(seq_id, 1)
    one_layer = pool.total_memory // LAYERS
    assert one_layer <= mx.get_active_memory() - held < one_layer + 64 * 1024
    assert mx.array_equal(view[0], mx.ones((1, HEADS, 1, 64)))
    del view
    assert mx.get_active_memory() - held < 64 * 1024


def test_get_cache_allocates_nothing() -> None:
    pool = make(max_seq_len=4096, head_dim=64)
    seq_id = pool.allocate_sequence()
    big = mx.ones((HEADS, 4000, 64))
    for layer in range(LAYERS):
        pool.append_kv(seq_id, layer, big, big, layout="heads_first")
    pool.advance_seq_len(seq_id, 4000)
    del big
    held = mx.get_active_memory()
    views = [pool.get_cache(seq_id, layer) for layer in range(LAYERS)]
    mx.eval(views)
    assert mx.get_active_memory() == held
    assert views[1][1].shape == (1, HEADS, 4000, 64)


def test_short_sequence_takes_whole_slot() -> None:
    pool = make()
    pool.allocate_sequence(1)
    assert pool.used_memory == pool.slot_memory == 2 * LAYERS * HEADS * LENGTH * DIM * 4
    assert pool.free_memory == (SLOTS - 1) * pool.slot_memory


def test_append_is_invisible_until_advance() -> None:
    pool = make()
    seq_id = pool.allocate_sequence()
    append(pool, seq_id, 3, seed=1)
    assert pool.get_seq_len(seq_id) == 0
    assert pool.get_cache(seq_id, 0)[0].shape == (1, HEADS, 0, DIM)
    append(pool, seq_id, 2, seed=5)
    pool.advance_seq_len(seq_id, 2)
    np.testing.assert_array_equal(np.array(pool.get_cache(seq_id, 1)[0])[0], numbers(2, 6))


def test_previous_slot_contents_are_never_visible() -> None:
    pool = make(max_batch_size=1)
    first = pool.allocate_sequence()
    append(pool, first, 5)
    pool.advance_seq_len(first, 5)
    pool.release_sequence(first)
    second = pool.allocate_sequence()
    pool.append_kv(
        second, 0, mx.zeros((HEADS, 2, DIM)), mx.zeros((HEADS, 2, DIM)), layout="heads_first"
    )
    with pytest.raises(ValueError, match="layer 1 of sequence 1 has appended 0"):
        pool.advance_seq_len(second, 2)
    assert pool.get_seq_len(second) == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda p, s: p.append_kv(s, 0, *numbers_of(LENGTH), layout="heads_first"),
            SequenceOverflow,
            "holds 1 tokens",
        ),
        (lambda p, s: p.advance_seq_len(s, LENGTH), SequenceOverflow, f"fit in its {LENGTH}"),
        (lambda p, s: p.advance_seq_len(s, 0), ValueError, "n must be at least 1"),
        (lambda p, s: p.advance_seq_len(s, 1), ValueError, "has appended"),
        (lambda p, s: p.allocate_sequence(LENGTH + 1), SettingError, f"max_len {LENGTH + 1}"),
        (lambda p, s: p.allocate_sequence(0), ValueError, "max_len"),
        (lambda p, s: p.allocate_sequence(2.0), TypeError, "max_len"),
        (
            lambda p, s: p.append_kv(s, LAYERS, *numbers_of(1), layout="heads_first"),
            ValueError,
            "layer_idx",
        ),
        (
            lambda p, s: p.append_kv(s, -1, *numbers_of(1), layout="heads_first"),
            ValueError,
            "layer_idx",
        ),
        (
            lambda p, s: p.append_kv(s, "0", *numbers_of(1), layout="heads_first"),
            TypeError,
            "layer_idx",
        ),
        (
            lambda p, s: p.append_kv(s, 0, [[1.0]], [[1.0]], layout="heads_first"),
            TypeError,
            "k must be an mx.array",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *numbers_of(1, mx.float16), layout="heads_first"),
            TypeError,
            "k is .*float16",
        ),
        (
            lambda p, s: p.append_kv(s, 0, numbers_of(1)[0], mx.ones((1,)), layout="heads_first"),
            ValueError,
            "v must have",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *shaped(HEADS, DIM), layout="heads_first"),
            ValueError,
            "k must have shape",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *shaped(2, HEADS, 1, DIM), layout="heads_first"),
            ValueError,
            "k has 2 rows",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *shaped(HEADS + 1, 1, DIM), layout="heads_first"),
            ValueError,
            "k has 3 heads",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *shaped(HEADS, 1, DIM + 1), layout="heads_first"),
            ValueError,
            "numbers a head",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *shaped(HEADS, 0, DIM), layout="heads_first"),
            ValueError,
            "k has no tokens",
        ),
        (lambda p, s: p.append_kv(s, 0, *numbers_of(3), 2), ValueError, "num_tokens is 2, but k"),
        (
            lambda p, s: p.append_kv(s, 0, *numbers_of(3), layout="nhd"),
            SettingError,
            "layout must be 'heads_first' or 'tokens_first', not 'nhd'",
        ),
        (
            lambda p, s: p.append_kv(s, 0, *numbers_of(3), layout="tokens_first"),
            ValueError,
            "k has 3 heads",
        ),
        (
            lambda p, s: p.append_kv(
                s, 0, numbers_of(2)[0], numbers_of(1)[0], layout="heads_first"
            ),
            ValueError,
            "v has 1 token, k has 2",
        ),
        (lambda p, s: p.release_sequence(99), UnknownSequence, "99 is not one of the 1 active"),
        (lambda p, s: p.get_seq_len(99), UnknownSequence, "99"),
        (lambda p, s: p.get_cache(99, 0), UnknownSequence, "99"),
        (lambda p, s: p.get_cache(s, LAYERS), ValueError, "layer_idx"),
        (
            lambda p, s: p.append_kv(99, 0, *numbers_of(1), layout="heads_first"),
            UnknownSequence,
            "99",
        ),
        (lambda p, s: p.advance_seq_len(99, 1), UnknownSequence, "99"),
    ],
)
def test_refused_call_states_reason_and_changes_nothing(call: Any, error: Any, words: str) -> None:
    pool = make()
    seq_id = pool.allocate_sequence()
    append(pool, seq_id, 1)
    pool.advance_seq_len(seq_id, 1)
    before = snapshot(pool)
    with pytest.raises(error, match=words):
        call(pool, seq_id)
    assert_same(before, snapshot(pool))
    pool.check()


def numbers_of(tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return shaped(HEADS, tokens, DIM, dtype=dtype)


def shaped(*shape: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return mx.ones(shape, dtype), mx.ones(shape, dtype)


def test_released_sequence_id_stays_invalid_after_slot_reuse() -> None:
    pool = make(max_batch_size=1)
    first = pool.allocate_sequence()
    with pytest.raises(PoolFull, match="all 1 slots"):
        pool.allocate_sequence()
    pool.release_sequence(first)
    assert pool.allocate_sequence() != first
    for call in (pool.release_sequence, pool.get_seq_len):
        with pytest.raises(UnknownSequence):
            call(first)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("max_batch_size", 0, ValueError),
        ("num_layers", -1, ValueError),
        ("max_seq_len", 1.5, TypeError),
        ("num_kv_heads", True, TypeError),
        ("head_dim", "4", TypeError),
        ("dtype", "float32", TypeError),
        ("dtype", mx.int32, TypeError),
    ],
)
def test_invalid_argument_is_named_in_error(argument: str, value: Any, error: Any) -> None:
    with pytest.raises(error, match=argument):
        make(**{argument: value})


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p._slots._free.append(0),
        lambda p: p._slots._free.pop(),
        lambda p: setattr(p._sequences[0], "length", LENGTH + 1),
        lambda p: p._sequences[0].pending.update({0: LENGTH}),
        lambda p: setattr(p, "_next_id", 0),
        lambda p: p._slots._keys.pop(),
        lambda p: p._slots._values.__setitem__(0, mx.zeros((1, 1, 1, 1))),
    ],
)
def test_check_detects_corruption(harm: Any) -> None:
    pool = make()
    append(pool, pool.allocate_sequence(), 2)
    pool.advance_seq_len(0, 2)
    pool.check()
    harm(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_half_precision_pool_takes_half_the_memory() -> None:
    assert make(dtype=mx.bfloat16).total_memory * 2 == make().total_memory


def test_filling_only_slot_does_not_retain_callers_array() -> None:
    """MLX would replace the pool's buffer with the array that the chunk is a view of."""
    pool = make(max_batch_size=1, num_layers=1, max_seq_len=64, head_dim=64)
    seq_id = pool.allocate_sequence()

    def fill() -> None:
        wide = mx.zeros((1, HEADS, 4_096, 64))
        mx.eval(wide)
        pool.append_kv(seq_id, 0, wide[:, :, :64], wide[:, :, :64], layout="heads_first")
        pool.advance_seq_len(seq_id, 64)

    before = mx.get_active_memory()
    fill()
    assert mx.get_active_memory() - before < pool.total_memory
    pool.check()
