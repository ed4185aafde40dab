"""A bounded window in which decoded tokens attend to tokens selected by an index of the keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import ref

import mlx.core as mx
import numpy as np

from penstock.attention import devices
from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.attention_plan import DecodeRow
from penstock.attention.selection import selected_reads
from penstock.attention.selection.key_centers import KeyCenters
from penstock.attention.selection.key_index import KeyIndex
from penstock.attention.selection.selection import LEAST_TOKENS, Selection
from penstock.caches.sinks import SinkRotatingKVCache
from penstock.config import KERNELS_VARIABLE
from penstock.errors import ModelError
from penstock.kv import columns as col
from penstock.kv.checks import whole
from penstock.kv.codecs.coded import Coded
from penstock.kv.columns import Side
from penstock.kv.segment import KVSpan, Segment


class SelectiveKVCache(SinkRotatingKVCache):
    """A `SinkRotatingKVCache` in which decoded tokens attend to `attend` selected tokens.

    Tokens are selected as with the server's `--attend-tokens`. Attention is full for chunks,
    batches, sequences of up to `attend` tokens, and windows that have dropped tokens. The model
    must be passed to `penstock.attach` first.

    Args:
        max_size: see `RotatingKVCache`.
        keep: see `RotatingKVCache`.
        capacity: see `RotatingKVCache`.
        attend: number of tokens that each KV head attends to, at least 128.
        rest: whether to also read the other tokens, in two bits per value.
    """

    attend_tokens: int
    attend_rest: bool
    _index: Coded | None = None
    """Key index of the first tokens; extended as needed."""
    centers: KeyCenters | None = None
    """Centers subtracted from keys before indexing, which make the index more precise. Set them
    only while the cache is empty."""
    _given: tuple[ref[mx.array], ref[mx.array]] | None = None
    """Weak references to the keys and values that the model must pass to `attend`."""

    def __init__(
        self,
        max_size: int,
        keep: int = 0,
        capacity: int | None = None,
        *,
        attend: int,
        rest: bool = False,
    ) -> None:
        super().__init__(max_size, keep, capacity)
        self.attend_tokens = whole("attend", attend, LEAST_TOKENS)
        self.attend_rest = rest

    @property
    def nbytes(self) -> int:
        return super().nbytes + col.nbytes(self._index)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """Write tokens and return the visible columns.

        Raises:
            ModelError: the model did not call `attend` for the last token.
        """
        if self._given is not None:
            self._given = None
            raise ModelError(
                "the last token did not use penstock's attention: call penstock.attach(model) "
                "first, or make the caches without attend"
            )
        fetched = super().update_and_fetch(keys, values)
        all_keys, all_values = fetched
        assert isinstance(all_keys, mx.array) and isinstance(all_values, mx.array)
        if keys.shape[:3:2] == (1, 1) and self.attend_tokens < self.offset <= self.max_size:
            self._given = ref(all_keys), ref(all_values)
        return fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: object,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """Attend to selected tokens: (1, heads, 1, d) -> (1, heads, 1, dim).

        Returns None if the model must attend to all `keys` and `values` itself.
        """
        expected, self._given = self._given, None
        if (
            expected is None
            or keys is not expected[0]()
            or values is not expected[1]()
            or mask is not None
        ):
            return None
        compiled = os.environ.get(KERNELS_VARIABLE) != "off"
        selection = Selection(self.attend_tokens, self._rule, compiled)
        position = self.offset - 1
        self._index_to(selection.recent_start(position))
        held = self._held()
        assert isinstance(held[0], mx.array) and isinstance(held[1], mx.array)
        segment = Segment((held,), index=(self._index,))
        row = DecodeRow((KVSpan(segment, 0, position),), position, 0, 0)
        tail = held[0][:, :, position : self.offset], held[1][:, :, position : self.offset]
        sizes = [side.shape[-1] for side in tail]
        reader = self._device.choice_reader(selection, *sizes)
        return selected_reads.attend_alone(reader, row, queries, scale, tail, sinks)

    def trim(self, n: int) -> int:
        trimmed = super().trim(n)
        self._given = None
        if self._index is not None and self._index.tokens > self.offset:
            self._index = self._index.take(0, self.offset) if self.offset else None
        return trimmed

    def _index_to(self, stop: int) -> None:
        start = 0 if self._index is None else self._index.tokens
        if start >= stop:
            return
        mx.eval(self._held())
        keys, values = (col.take(side, start, stop) for side in self._held())
        more = self._rule.of(keys, values, 0, start, self._device)
        self._index = more if self._index is None else self._index.join(more)
        mx.eval(self._index.parts)

    @property
    def _device(self) -> AttentionBackend:
        return devices.current()

    @property
    def _rule(self) -> KeyIndex:
        centers = {} if self.centers is None else {0: self.centers}
        return KeyIndex(frozenset({0}), self.attend_rest, centers)

    def _state(self) -> tuple[Any, ...]:
        self._given = None
        known = None if self.centers is None else mx.array(self.centers.table)
        return *super()._state(), self.attend_tokens, self.attend_rest, known

    def _restore(self, state: Sequence[Any]) -> None:
        *others, self.attend_tokens, self.attend_rest, known = state
        self.centers = None if known is None else KeyCenters.of_table(np.array(known))
        self._index = self._given = None
        super()._restore(others)
