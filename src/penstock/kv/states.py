"""States of recurrent layers: a few arrays per layer that summarize all tokens of a sequence.

A state is valid at a single position. It cannot be split, joined or rolled back, only stored
together with that position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx

LayerState: TypeAlias = "tuple[mx.array | None, ...]"
"""Arrays of one layer, (rows, ...); None for an array that the layer never wrote."""
States: TypeAlias = tuple[LayerState, ...]
"""States of all recurrent layers, in the model's order."""


def arrays(states: Iterable[Iterable[mx.array | None]]) -> list[mx.array]:
    return [array for state in states for array in state if array is not None]


def nbytes(states: Sequence[LayerState]) -> int:
    return sum(array.nbytes for array in arrays(states))


def copied(states: Sequence[LayerState], row: int | None = None) -> States:
    def copied_array(array: mx.array | None) -> mx.array | None:
        if array is None:
            return None
        taken = array if row is None else array[row : row + 1]
        return mx.concatenate([taken, taken[:0]])  # one array alone would be returned uncopied

    copies = tuple(tuple(copied_array(array) for array in state) for state in states)
    mx.eval(arrays(copies))
    return copies


def unpinned(states: Sequence[LayerState]) -> States:
    """Return states whose small arrays are copies, which pin no larger buffers; not evaluated.

    A convolution's state is a view of its last inputs, which keeps the whole input alive. Large
    arrays are results of the step, not views.
    """
    small = nbytes(states) // 4

    def copied_if_small(array: mx.array | None) -> mx.array | None:
        if array is None or array.nbytes > small:
            return array
        return mx.concatenate([array, array[:0]])

    return tuple(tuple(copied_if_small(array) for array in state) for state in states)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    offset: int
    """Number of the segment's tokens before the boundary; at least 1."""
    states: States
    turn_end: bool = False
    """Whether a prompt or an answer ended in the next block, so that its conversation would resume
    here."""

    @property
    def nbytes(self) -> int:
        return nbytes(self.states)

    def moved(self, by: int) -> Checkpoint:
        return Checkpoint(self.offset + by, self.states, self.turn_end)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    states: States
    """States of all rows of the last step, or of one sequence."""
    row: int = 0
    exclusive: bool = False
    """Whether this is the only row, in buffers of exact size."""

    def row_states(self) -> States:
        if self.exclusive:
            return self.states
        return tuple(
            tuple(None if array is None else array[self.row : self.row + 1] for array in state)
            for state in self.states
        )

    def after(self, token: int) -> RecurrentState:
        """Return the states after a token of the last step, evaluated, if they have one for each.

        Their arrays are (rows, tokens, ...).
        """
        states = tuple(
            tuple(
                None if array is None else mx.contiguous(array[self.row, token][None, None])
                for array in state
            )
            for state in self.states
        )
        mx.eval(list(arrays(states)))
        return RecurrentState(states, exclusive=True)

    def owned(self) -> States:
        return self.states if self.exclusive else copied(self.states, self.row)


def stacked(sequences: Sequence[RecurrentState]) -> States:
    """Stack the states of sequences as rows; no copy if they are exactly the last step's rows."""
    first = sequences[0].states
    if all(
        sequence.states is first and sequence.row == row for row, sequence in enumerate(sequences)
    ) and all(array.shape[0] == len(sequences) for array in arrays(first)):
        return first

    def joined(parts: tuple[mx.array | None, ...]) -> mx.array | None:
        columns = [
            part[sequence.row : sequence.row + 1]
            for part, sequence in zip(parts, sequences, strict=True)
            if part is not None
        ]
        if not columns:
            return None
        if len(columns) < len(parts):
            raise ValueError("some sequences have a state and others have none")
        return mx.concatenate(columns)

    layers = zip(*(sequence.states for sequence in sequences), strict=True)
    return tuple(tuple(map(joined, zip(*layer, strict=True))) for layer in layers)


def blank(states: Sequence[LayerState]) -> States:
    """Return states of zeros with the same shapes and dtypes."""
    return tuple(
        tuple(None if array is None else mx.zeros_like(array) for array in state)
        for state in states
    )


def before(checkpoints: Sequence[Checkpoint], position: int) -> Iterator[Checkpoint]:
    """Iterate over the checkpoints up to a position, deepest first."""
    return (checkpoint for checkpoint in reversed(checkpoints) if checkpoint.offset <= position)


def is_finite(states: Sequence[LayerState]) -> bool:
    checks = [mx.isfinite(array).all() for array in arrays(states)]
    return not checks or bool(mx.stack(checks).all())


@dataclass(frozen=True, slots=True)
class StateForm:
    """Shape and dtype of each array of one sequence's states, by name."""

    arrays: tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, states: States) -> StateForm:
        return cls(
            tuple((name, array.shape, array.dtype) for name, array in named(states)),
            tuple(len(state) for state in states),
        )

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * dtype.size for _, shape, dtype in self.arrays)

    def states(self, arrays: dict[str, mx.array]) -> States:
        return tuple(
            tuple(arrays.get(f"{layer}.{place}") for place in range(size))
            for layer, size in enumerate(self.sizes)
        )


NO_STATES = StateForm((), ())
"""Form of the states of a model without recurrent layers."""


def named(states: States) -> Iterator[tuple[str, mx.array]]:
    """Yield names and arrays, such as `3.0` and `3.1` for the fourth recurrent layer."""
    for layer, state in enumerate(states):
        for place, array in enumerate(state):
            if array is not None:
                yield f"{layer}.{place}", array


Place: TypeAlias = "int | tuple[Callable[..., Any], tuple[Place, ...]]"
"""Index of a cache with KV, complement (~) of the index of one with a state, or a function that
combines several caches and their places."""


def keeps_state(cache: Any) -> bool:
    """Return whether a cache (mlx-lm's protocol) has a recurrent state instead of KV."""
    return isinstance(getattr(cache, "cache", None), list)


def taken_apart(caches: Sequence[Any]) -> tuple[list[Any], list[Any], tuple[Place, ...]]:
    """Split caches into those with KV and those with states; `put_together` needs the places."""
    kept: list[Any] = []
    states: list[Any] = []
    return kept, states, tuple(_place(cache, kept, states) for cache in caches)


def put_together(places: Sequence[Place], kept: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    return [_cache(place, kept, states) for place in places]


def _place(cache: Any, kept: list[Any], states: list[Any]) -> Place:
    inner = getattr(cache, "caches", None)
    if isinstance(inner, tuple | list):
        made_by = getattr(cache, "rebuild", type(cache))
        return made_by, tuple(_place(part, kept, states) for part in inner)
    if keeps_state(cache):
        states.append(cache)
        return ~(len(states) - 1)
    kept.append(cache)
    return len(kept) - 1


def _cache(place: Place, kept: Sequence[Any], states: Sequence[Any]) -> Any:
    if isinstance(place, tuple):
        made_by, inner = place
        return made_by(*(_cache(part, kept, states) for part in inner))
    return states[~place] if place < 0 else kept[place]
