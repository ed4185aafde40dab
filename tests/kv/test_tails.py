"""The pool of tails: slots, bytes, and the cost of writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import peak_above
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PoolFull
from penstock.kv.tails import LayerShape, Tails, token_bytes

SHAPES = (LayerShape(2, 8, 4, mx.float32), LayerShape(1, 16, 16, mx.float16))
SLOTS, COLUMNS = 3, 5


@pytest.fixture(autouse=True)
def exact_buffers() -> Iterator[None]:
    """Disable MLX's buffer cache, which may return larger buffers than requested."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def made(
    slots: int = SLOTS, columns: int = COLUMNS, shapes: Sequence[LayerShape] = SHAPES
) -> Tails:
    tails = Tails(slots, columns, shapes)
    tails.ready()
    return tails


def token(layer: int, number: float, rows: int = 1) -> tuple[mx.array, mx.array]:
    """Return keys filled with a number and values with its negative."""
    shape = SHAPES[layer]
    keys = mx.full((rows, shape.kv_heads, 1, shape.key_dim), number, shape.dtype)
    values = mx.full((rows, shape.kv_heads, 1, shape.value_dim), -number, shape.dtype)
    return keys, values


def write_block(tails: Tails, slot: int, column: int, number: float) -> None:
    for layer in range(len(SHAPES)):
        tails.write_block(layer, slot, column, *token(layer, number))
    mx.eval(tails.buffers())


def write_many(tails: Tails, slots: list[int], columns: list[int], first: float) -> None:
    """Write first, first + 1, ... into the slots."""
    for layer in range(len(SHAPES)):
        tokens = [token(layer, first + i) for i in range(len(slots))]
        keys, values = (mx.concatenate(side) for side in zip(*tokens, strict=True))
        tails.write(layer, mx.array(slots), mx.array(columns), keys, values)
    mx.eval(tails.buffers())


def contents(tails: Tails) -> list[list[float]]:
    """Return the number in every column of every slot, equal in all layers and heads."""
    for layer in range(len(SHAPES)):
        for slot in range(tails.slots):
            keys, values = tails.read_block(layer, slot, 1, tails.columns)
            first = keys[:, :1, :, :1]
            assert mx.all(keys == first) and mx.all(values == -first)
    keys = [tails.read_block(1, slot, 1, tails.columns)[0] for slot in range(tails.slots)]
    return [side[0, 0, :, 0].tolist() for side in keys]


# ---- slots


def test_slot_is_exclusive_until_released() -> None:
    tails = made()
    taken = [tails.take_slot() for _ in range(SLOTS)]
    assert sorted(taken) == [0, 1, 2]
    assert tails.free_slots == 0
    with pytest.raises(PoolFull, match="3"):
        tails.take_slot()
    tails.give_back(taken[1])
    assert tails.free_slots == 1
    assert tails.take_slot() == taken[1]


def test_free_slot_cannot_be_released() -> None:
    """Otherwise two sequences would write to it."""
    tails = made()
    slot = tails.take_slot()
    tails.give_back(slot)
    with pytest.raises(ValueError, match=f"slot {slot} is not taken"):
        tails.give_back(slot)
    assert tails.free_slots == SLOTS


# ---- bytes


def test_all_bytes_are_allocated_at_start() -> None:
    a_token = (2 * (8 + 4)) * 4 + (1 * (16 + 16)) * 2
    assert token_bytes(SHAPES) == a_token
    before = mx.get_active_memory()
    tails = made()
    assert tails.nbytes == SLOTS * COLUMNS * a_token == mx.get_active_memory() - before
    for step in range(12):
        write_block(tails, step % SLOTS, step % COLUMNS, step)
        write_many(tails, [2, 0], [1, 3], step)
    assert tails.nbytes == SLOTS * COLUMNS * a_token == mx.get_active_memory() - before


def test_buffers_start_at_zero() -> None:
    assert contents(made()) == [[0.0] * COLUMNS] * SLOTS


# ---- writing

acts = st.one_of(
    st.tuples(st.just("one"), st.integers(0, SLOTS - 1), st.integers(0, COLUMNS - 1)),
    st.tuples(
        st.just("many"),
        st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True),
        st.lists(st.integers(0, COLUMNS - 1), min_size=SLOTS, max_size=SLOTS),
    ),
    st.tuples(st.just("wipe"), st.integers(0, SLOTS - 1), st.none()),
    st.tuples(st.just("renew"), st.none(), st.none()),
)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.lists(acts, max_size=10))
def test_write_changes_only_its_columns(script: list[Any]) -> None:
    tails, expected = made(), np.zeros((SLOTS, COLUMNS))
    for number, (what, slot, column) in enumerate(script, start=1):
        if what == "one":
            write_block(tails, slot, column, number)
            expected[slot, column] = number
        elif what == "many":
            columns = column[: len(slot)]
            write_many(tails, slot, columns, number)
            expected[slot, columns] = np.arange(number, number + len(slot))
        elif what == "wipe":
            tails.wipe(slot)
            expected[slot] = 0
        else:
            tails.renew()
            expected[:] = 0
    assert contents(tails) == expected.tolist()
    keys, values = tails.read(0, mx.array([2, 0]), 3)
    assert keys[:, 1, :, 3].tolist() == expected[[2, 0], :3].tolist()
    assert values[:, 1, :, 3].tolist() == (-expected[[2, 0], :3]).tolist()


def test_write_of_whole_buffer_does_not_retain_source() -> None:
    """The write covers the whole buffer and must not retain the token's source array."""
    tails = made(1, 1)
    before = mx.get_active_memory()
    keys, values = mx.ones((1, 2, 2_000, 8)), mx.ones((1, 2, 2_000, 4))
    tails.write_block(0, 0, 0, keys[:, :, 7:8], values[:, :, 7:8])
    mx.eval(tails.buffers())
    del keys, values
    assert mx.get_active_memory() == before
    assert mx.all(tails.read_block(0, 0, 1, 1)[0] == 1)


# ---- what a write costs

WIDE = (LayerShape(2, 64, 64, mx.float32), LayerShape(2, 64, 64, mx.float32))
WIDE_TOKEN = token_bytes(WIDE)


def write_wide(tails: Tails, *, column: int, together: bool) -> None:
    for layer, shape in enumerate(WIDE):
        rows = tails.slots if together else 1
        new = mx.zeros((rows, shape.kv_heads, 1, shape.key_dim))
        if together:
            tails.write(layer, mx.arange(rows), mx.full((rows,), column, mx.int32), new, new)
        else:
            tails.write_block(layer, 1, column, new, new)
    mx.eval(tails.buffers())


@pytest.mark.parametrize("together", [False, True], ids=["one", "many"])
def test_writes_are_in_place(together: bool) -> None:
    tails = made(4, 256, WIDE)
    rows = tails.slots if together else 1
    extra = peak_above(lambda: [write_wide(tails, column=c, together=together) for c in range(20)])
    assert extra <= 2 * rows * WIDE_TOKEN + 1_024, "a write copied the pool"


@pytest.mark.parametrize("together", [False, True], ids=["one", "many"])
def test_write_copies_buffer_if_view_is_alive(together: bool) -> None:
    """Negative control: why nobody may keep the result of `read_one` over a step."""
    tails = made(4, 256, WIDE)
    view = tails.read_block(0, 1, 1, 3)
    mx.eval(view)
    extra = peak_above(lambda: write_wide(tails, column=5, together=together))
    assert extra >= tails.nbytes // len(WIDE)
    del view


def test_reading_row_copies_nothing() -> None:
    tails = made(4, 256, WIDE)
    assert peak_above(lambda: mx.eval(tails.read_block(0, 1, 1, 200))) <= 1_024


def test_buffers_are_allocated_at_first_step() -> None:
    before = mx.get_active_memory()
    tails = Tails(4, 64, WIDE)
    slot = tails.take_slot()
    assert (tails.nbytes, mx.get_active_memory()) == (0, before)
    tails.ready()
    assert tails.nbytes == 4 * 64 * WIDE_TOKEN == mx.get_active_memory() - before
    ones = mx.ones((1, WIDE[0].kv_heads, 1, WIDE[0].key_dim), WIDE[0].dtype)
    tails.write_block(0, slot, 0, ones, ones)
    tails.ready()
    assert mx.any(tails.buffers()[0]).item()
    del ones
    tails.drop()
    tails.give_back(slot)
    assert mx.get_active_memory() == before


# ---- wiping and renewing


def test_wipe_peak_is_at_most_one_slot() -> None:
    tails = made(8, 64, WIDE)
    before = mx.get_active_memory()
    assert peak_above(lambda: tails.wipe(3)) <= tails.nbytes // tails.slots + 1_024
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("slots", [1, 3])
def test_wipe_clears_nan(bad: float, slots: int) -> None:
    tails = made(slots)
    for column in range(COLUMNS):
        write_block(tails, slots - 1, column, bad)
    tails.wipe(slots - 1)
    assert contents(tails) == [[0.0] * COLUMNS] * slots


def test_renew_zeroes_without_second_allocation() -> None:
    tails = made(4, 64, WIDE)
    slot = tails.take_slot()
    before = mx.get_active_memory()
    write_wide(tails, column=0, together=True)
    assert peak_above(tails.renew) <= 1_024
    assert mx.get_active_memory() == before
    assert not any(mx.any(buffer).item() for buffer in tails.buffers())
    assert slot not in {tails.take_slot() for _ in range(3)}, "a taken slot was given out"


def test_renew_discards_unevaluated_write() -> None:
    tails = made()
    write_block(tails, 1, 1, 7.0)
    tails.write_block(0, 0, 0, *token(0, 3.0))  # never evaluated
    tails.renew()
    assert contents(tails) == [[0.0] * COLUMNS] * SLOTS


def test_dropped_pool_frees_its_memory() -> None:
    before = mx.get_active_memory()
    tails = made()
    tails.drop()
    assert (tails.nbytes, mx.get_active_memory()) == (0, before)


# ---- cutting


@pytest.mark.parametrize("stop", [1, 3, COLUMNS])
def test_cut_copies_first_columns_of_slot(stop: int) -> None:
    tails = made()
    for column in range(COLUMNS):
        write_block(tails, 1, column, column + 1.0)
    segment = tails.cut(1, stop)
    assert (segment.tokens, segment.nbytes) == (stop, stop * token_bytes(SHAPES))
    for column in range(COLUMNS):
        write_block(tails, 1, column, 100.0)
    for keys, values in segment.layers:
        assert isinstance(keys, mx.array) and isinstance(values, mx.array)
        for head in range(keys.shape[1]):
            assert keys[0, head, :, 0].tolist() == [c + 1.0 for c in range(stop)]
            assert values[0, head, :, -1].tolist() == [-c - 1.0 for c in range(stop)]


def test_cut_is_appended_to_previous_cut() -> None:
    tails = made()
    for column in range(COLUMNS):
        write_block(tails, 2, column, column + 1.0)
    before = tails.cut(2, 2)
    grown = tails.cut(2, 4, before)
    assert grown.tokens == 6
    assert grown.nbytes == 6 * token_bytes(SHAPES)
    for keys, _ in grown.layers:
        assert isinstance(keys, mx.array)
        assert keys[0, 0, :, 0].tolist() == [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]
    assert before.tokens == 2


@pytest.mark.parametrize("slots", [1, 2, 64])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind"])
def test_cut_retains_only_its_own_bytes(slots: int, kv_heads: int, behind: bool) -> None:
    """A view would keep the pool alive and force the next write to copy."""
    before = mx.get_active_memory()
    tails = made(slots, 8, [LayerShape(kv_heads, 64, 64, mx.float32)])
    segment = tails.cut(0, 8, tails.cut(0, 8) if behind else None)
    del tails
    assert mx.get_active_memory() - before == segment.nbytes


def test_write_after_cut_is_in_place() -> None:
    tails = made(2, 8, WIDE)
    segment = tails.cut(1, 8)
    assert peak_above(lambda: write_wide(tails, column=0, together=False)) <= 2 * WIDE_TOKEN
    assert segment.tokens == 8


def test_derived_values_are_computed_again_after_each_change() -> None:
    """Addresses of buffers are cached, which every write may move."""
    tails = made()
    computed: list[int] = []

    def address(of: Tails) -> int:
        computed.append(int(np.asarray(of.layer(0)[0]).__array_interface__["data"][0]))
        return computed[-1]

    assert tails.derived(address) == tails.derived(address) and len(computed) == 1
    keys, values = token(0, 1)
    changes: list[Callable[[], object]] = [
        lambda: tails.write(0, mx.array([1]), mx.array([2]), keys, values),
        lambda: tails.write_block(0, 0, 1, keys, values),
        lambda: tails.wipe(1),
        lambda: tails.renew(),
    ]
    for count, change in enumerate(changes, start=2):
        change()
        mx.eval(tails.buffers())
        assert tails.derived(address) == computed[-1] and len(computed) == count
        now = int(np.asarray(tails.layer(0)[0]).__array_interface__["data"][0])
        assert tails.derived(address) == now
