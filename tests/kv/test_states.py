"""States of recurrent layers: what is copied, and what a copy retains."""

from __future__ import annotations

import mlx.core as mx
import pytest

from penstock.kv import states as st
from penstock.kv.states import LayerState, arrays, copied, nbytes, unpinned

TOKENS, KEPT, WIDTH = 4_096, 3, 64
SMALL_BYTES = 4 * KEPT * WIDTH
WHOLE_BYTES = 4 * TOKENS * WIDTH


@pytest.fixture(autouse=True)
def exact() -> object:
    """Disable MLX's buffer cache, so that allocated bytes are exact."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def whole(number: float = 1.0) -> mx.array:
    made = mx.full((1, TOKENS, WIDTH), number)
    mx.eval(made)
    return made


def convolution_state_view() -> mx.array:
    """Return a view of the last inputs, as a convolution layer leaves it."""
    inputs = whole()
    view = inputs[:, -KEPT:]
    mx.eval(view)
    return view


def state() -> mx.array:
    made = mx.ones((1, 8 * KEPT, WIDTH))
    mx.eval(made)
    return made


def test_check_detects_view_retaining_source() -> None:
    """Negative control of the next two."""
    before = mx.get_active_memory()
    view = convolution_state_view()
    assert mx.get_active_memory() - before == WHOLE_BYTES
    del view


def test_small_arrays_are_copied_and_retain_nothing() -> None:
    before = mx.get_active_memory()
    states: tuple[LayerState, ...] = ((convolution_state_view(), state()), (None, state()))
    states = unpinned(states)
    mx.eval(arrays(states))
    assert mx.get_active_memory() - before == nbytes(states) == SMALL_BYTES + 2 * 8 * SMALL_BYTES
    assert [[array is None for array in each] for each in states] == [[0, 0], [1, 0]]


def test_large_arrays_are_not_copied() -> None:
    large = state()
    ((small, same),) = unpinned(((convolution_state_view(), large),))
    assert same is large
    assert mx.array_equal(small, mx.ones((1, KEPT, WIDTH)))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [None, 0])
def test_copies_have_exact_size(row: int | None) -> None:
    before = mx.get_active_memory()
    made = copied(((convolution_state_view(), None), (state(),)), row)
    assert mx.get_active_memory() - before == nbytes(made) == 9 * SMALL_BYTES
    assert made[0][1] is None


def test_copy_of_single_row_has_its_values() -> None:
    rows = mx.arange(3.0).reshape(3, 1, 1) * mx.ones((3, KEPT, WIDTH))
    mx.eval(rows)
    ((alone,),) = copied(((rows,),), 1)
    assert mx.array_equal(alone, rows[1:2])  # type: ignore[arg-type]


def lives(*numbers: float) -> list[st.RecurrentState]:
    """Return states of sequences from different steps, with a layer without state."""
    return [
        st.RecurrentState(((mx.full((1, 3), number), None),), exclusive=True) for number in numbers
    ]


def test_states_are_stacked_in_row_order() -> None:
    ((rows, absent),) = st.stacked(lives(1, 2, 3))
    assert absent is None
    assert isinstance(rows, mx.array)
    assert rows.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_states_of_same_step_are_stacked_without_copy() -> None:
    whole: st.States = ((mx.arange(6).reshape(3, 2),),)
    rows = [st.RecurrentState(whole, row) for row in range(3)]
    assert st.stacked(rows) is whole
    for chosen in ([1, 0, 2], [0, 1], [2], [0, 0, 0]):
        ((array,),) = st.stacked([rows[row] for row in chosen])
        assert array is not None
        assert array.tolist() == [[2 * row, 2 * row + 1] for row in chosen]


def test_stacking_with_missing_state_is_refused() -> None:
    one, other = lives(1, 2)
    without = st.RecurrentState(((None, None),), exclusive=True)
    with pytest.raises(ValueError, match="some sequences have a state and others have none"):
        st.stacked([one, without, other])
