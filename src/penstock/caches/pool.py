"""Pool of keys and values, allocated at the start, with one slot per sequence.

Each layer has one keys buffer and one values buffer, (slots, heads, max_seq_len, head_dim). The
layout was chosen by measurement (8 slots x 8 heads x 1,024 x 128 in float32, 32 MiB per buffer;
MLX 0.32 on two CPU cores):

    property                                 slots in one buffer     a buffer per slot
    append one token, every slot                0.04 ms, 0 MiB         0.07 ms, 0 MiB
    attention of all slots together              5.7 ms, 0 MiB         9.1 ms, 40 MiB
    append while a view of it is alive          14.3 ms, 32 MiB        0.2 ms, 4 MiB

A step over all slots reads the buffers in place; with one buffer per slot it would have to stack
them. The disadvantage is in the last row: while a view of a layer is alive, the first append to
that layer copies its buffer, and the old buffer stays until the view is dropped. Use the views of
`get_cache` only in the current step, and drop them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import mlx.core as mx

from penstock.errors import SequenceOverflow, SettingError, UnknownSequence
from penstock.kv.checks import positive
from penstock.kv.tails import LayerShape, Tails, token_bytes
from penstock.plurals import counted

Layout: TypeAlias = Literal["heads_first", "tokens_first"]
"""Order of the heads and tokens axes of keys and values."""


@dataclass(slots=True)
class _Sequence:
    slot: int
    max_len: int
    length: int = 0
    pending: dict[int, int] = field(default_factory=dict)  # layer -> tokens after the visible end


class KVCacheManager:
    """Pre-allocated keys and values of up to `max_batch_size` sequences.

    A step appends to every layer, in any order, and then advances once: `append_kv` writes after
    the visible end, `advance_seq_len` moves the end. An abandoned step leaves the sequence
    unchanged.

    Every slot has room for `max_seq_len` tokens, even if the sequence's `max_len` is less, so
    `used_memory` counts whole slots. Ids are never reused. Not thread-safe: use it only in the
    thread that runs the model.

    >>> pool = KVCacheManager(2, 1, 8, num_kv_heads=1, head_dim=2, dtype=mx.float32)
    >>> seq = pool.allocate_sequence(4)
    >>> pool.append_kv(seq, 0, mx.ones((1, 3, 2)), mx.ones((1, 3, 2)))
    >>> pool.advance_seq_len(seq, 3)
    >>> pool.get_cache(seq, 0)[0].shape
    (1, 1, 3, 2)
    """

    def __init__(
        self,
        max_batch_size: int,
        num_layers: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype = mx.float16,
    ) -> None:
        """Allocate the memory: 2 x layers x slots x heads x max_seq_len x head_dim numbers.

        Raises:
            TypeError: a size is not an integer, or the dtype is not a floating MLX dtype.
            ValueError: a size is below 1.
        """
        self.max_batch_size = positive("max_batch_size", max_batch_size)
        self.num_layers = positive("num_layers", num_layers)
        self.max_seq_len = positive("max_seq_len", max_seq_len)
        self.num_kv_heads = positive("num_kv_heads", num_kv_heads)
        self.head_dim = positive("head_dim", head_dim)
        if not isinstance(dtype, mx.Dtype) or not mx.issubdtype(dtype, mx.floating):
            raise TypeError(f"dtype must be a floating dtype of MLX, not {dtype!r}")
        self.dtype = dtype
        layer = LayerShape(num_kv_heads, head_dim, head_dim, dtype)
        self._slots = Tails(max_batch_size, max_seq_len, [layer] * num_layers)
        self._slots.ready()
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    def allocate_sequence(self, max_len: int | None = None) -> int:
        """Take a slot for a sequence of up to `max_len` tokens, and return the sequence's id.

        `max_len` defaults to `max_seq_len`. No memory is allocated.

        Raises:
            PoolFull: all slots are taken.
            SettingError: `max_len` is greater than `max_seq_len`.
        """
        length = self.max_seq_len if max_len is None else positive("max_len", max_len)
        if length > self.max_seq_len:
            raise SettingError(
                f"max_len {length} is longer than the pool's slots of "
                f"{counted(self.max_seq_len, 'token')}; "
                "construct the pool with a larger max_seq_len"
            )
        slot = self._slots.take_slot()
        seq_id = self._next_id
        self._next_id += 1
        self._sequences[seq_id] = _Sequence(slot, length)
        return seq_id

    def release_sequence(self, seq_id: int) -> None:
        """Free the sequence's slot; the id becomes invalid."""
        self._slots.give_back(self._find(seq_id).slot)
        del self._sequences[seq_id]

    def append_kv(
        self,
        seq_id: int,
        layer_idx: int,
        k: mx.array,
        v: mx.array,
        num_tokens: int | None = None,
        *,
        layout: Layout | None = None,
    ) -> None:
        """Write keys and values after the visible end of one layer, without moving the end.

        A second call for the same layer before `advance_seq_len` overwrites the first one's tokens.

        Args:
            seq_id: id of the sequence.
            layer_idx: index of the layer.
            k: keys in the pool's dtype, with three axes in the order of `layout`, or four with a
                first axis of length 1.
            v: values, in the same form as `k`.
            num_tokens: expected number of tokens n; None accepts any number.
            layout: `heads_first` is (num_kv_heads, n, head_dim), `tokens_first` is (n,
                num_kv_heads, head_dim). None uses the one that fits; it is an error if both fit
                an array of three axes, because n is num_kv_heads. Arrays of four axes are then
                (1, num_kv_heads, n, head_dim), as in mlx-lm.

        Raises:
            UnknownSequence: the sequence does not exist.
            SequenceOverflow: the sequence would exceed its `max_len`.
            SettingError: `layout` is unknown or required.
            TypeError, ValueError: an argument does not fit the pool.
        """
        sequence = self._find(seq_id)
        self._check_layer(layer_idx)
        k, v = (self._fit(name, side, layout) for name, side in (("k", k), ("v", v)))
        added = k.shape[2]
        if num_tokens is not None and positive("num_tokens", num_tokens) != added:
            raise ValueError(
                f"num_tokens is {num_tokens}, but k has {counted(added, 'token')}: {k.shape}"
            )
        if v.shape[2] != added:
            raise ValueError(f"v has {counted(v.shape[2], 'token')}, k has {added:,}")
        self._check_room(seq_id, sequence, added)
        self._slots.write_block(layer_idx, sequence.slot, sequence.length, k, v)
        sequence.pending[layer_idx] = added

    def advance_seq_len(self, seq_id: int, n: int) -> None:
        """Make the `n` tokens that every layer has appended visible.

        Raises:
            UnknownSequence: the sequence does not exist.
            SequenceOverflow: the sequence would exceed its `max_len`.
            ValueError: fewer than `n` tokens were appended to a layer; the rest could be data of
                an earlier sequence.
        """
        sequence = self._find(seq_id)
        self._check_room(seq_id, sequence, positive("n", n))
        for layer_idx in range(self.num_layers):
            written = sequence.pending.get(layer_idx, 0)
            if written < n:
                raise ValueError(
                    f"n is {n}, but layer {layer_idx} of sequence {seq_id} has appended "
                    f"{counted(written, 'token')} since the last advance"
                )
        # Evaluated before the end moves, so that a failing step changes nothing
        # and no step's inputs stay alive. Not async_eval: appending to a buffer that is not yet
        # computed copies it (8 slots, 2 layers: 415 ms per step instead of 0.3 ms).
        mx.eval(self._slots.buffers())
        sequence.length += n
        sequence.pending.clear()

    def get_cache(
        self, seq_id: int, layer_idx: int, *, pending: bool = False
    ) -> tuple[mx.array, mx.array]:
        """Return views of one layer's keys and values, (1, num_kv_heads, n, head_dim).

        n is the visible length; with `pending` it includes the tokens appended in the current
        step, for that step's attention. The contents of a view never change, so the next append to
        the layer copies its buffer if a view is still alive.
        """
        sequence = self._find(seq_id)
        self._check_layer(layer_idx)
        end = sequence.length + (sequence.pending.get(layer_idx, 0) if pending else 0)
        return self._slots.read_block(layer_idx, sequence.slot, 1, end)

    def get_seq_len(self, seq_id: int) -> int:
        return self._find(seq_id).length

    def has_sequence(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    @property
    def active_sequences(self) -> list[int]:
        return list(self._sequences)

    @property
    def slot_memory(self) -> int:
        return self.max_seq_len * token_bytes(self._slots.shapes)

    @property
    def total_memory(self) -> int:
        return self.max_batch_size * self.slot_memory

    @property
    def used_memory(self) -> int:
        """Bytes of the slots in use, including their unused columns."""
        return len(self._sequences) * self.slot_memory

    @property
    def free_memory(self) -> int:
        return self.total_memory - self.used_memory

    def check(self) -> None:
        """Raise AssertionError if a slot is lost or used twice, or a length is out of range."""
        self._slots.check(sequence.slot for sequence in self._sequences.values())
        for seq_id, sequence in self._sequences.items():
            furthest = sequence.length + max(sequence.pending.values(), default=0)
            if not 0 <= sequence.length <= furthest <= sequence.max_len <= self.max_seq_len:
                raise AssertionError(f"sequence {seq_id} is out of its bounds: {sequence}")
            if seq_id >= self._next_id:
                raise AssertionError(f"sequence {seq_id} was never given out")

    def _find(self, seq_id: int) -> _Sequence:
        sequence = self._sequences.get(seq_id) if type(seq_id) is int else None
        if sequence is None:
            raise UnknownSequence(seq_id, len(self._sequences))
        return sequence

    def _check_layer(self, layer_idx: int) -> None:
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int):
            raise TypeError(f"layer_idx must be an integer, not {layer_idx!r}")
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx must lie in 0..{self.num_layers - 1}, not {layer_idx}")

    def _check_room(self, seq_id: int, sequence: _Sequence, added: int) -> None:
        if sequence.length + added > sequence.max_len:
            raise SequenceOverflow(seq_id, sequence.length, added, sequence.max_len)

    def _fit(self, name: str, array: object, layout: Layout | None) -> mx.array:
        """Return the array as (1, heads, n, head_dim), or raise TypeError or ValueError."""
        if not isinstance(array, mx.array):
            raise TypeError(f"{name} must be an mx.array, not {type(array).__name__}")
        if array.dtype != self.dtype:
            raise TypeError(f"{name} is {array.dtype}, the pool holds {self.dtype}")
        if array.ndim not in (3, 4):
            raise ValueError(
                f"{name} must have shape (num_kv_heads, n, head_dim) or "
                f"(1, num_kv_heads, n, head_dim), or with n before num_kv_heads, "
                f"not {array.shape}"
            )
        if self._layout(name, array.shape, layout) == "tokens_first":
            array = array.swapaxes(-3, -2)
        if array.ndim == 3:
            array = array[None]
        batch, heads, tokens, dim = array.shape
        for what, got, expected in (
            ("rows", batch, 1),
            ("heads", heads, self.num_kv_heads),
            ("numbers a head", dim, self.head_dim),
        ):
            if got != expected:
                raise ValueError(
                    f"{name} has {got} {what}, the pool takes {expected}: {array.shape}"
                )
        if tokens == 0:
            raise ValueError(f"{name} has no tokens")
        return array

    def _layout(self, name: str, shape: tuple[int, ...], layout: Layout | None) -> Layout:
        if layout is not None:
            if layout not in get_args(Layout):
                raise SettingError(
                    f"layout must be {' or '.join(map(repr, get_args(Layout)))}, not {layout!r}"
                )
            return layout
        first, second, heads = shape[-3], shape[-2], self.num_kv_heads
        if len(shape) == 3 and first == second == heads > 1:
            raise SettingError(
                f"{name} {shape} may be (num_kv_heads, n, head_dim) or (n, num_kv_heads, "
                f"head_dim), with {heads} heads and {heads} tokens; say which: "
                f"layout='heads_first' or layout='tokens_first'"
            )
        fits_tokens_first = len(shape) == 3 and second == heads != first
        return "tokens_first" if fits_tokens_first else "heads_first"
