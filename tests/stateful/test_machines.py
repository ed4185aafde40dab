"""The state machine on every cache class, and on broken ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from cache_kinds import GROUP, KINDS, Kind, growing, ring
from cache_machine import CacheMachine
from cache_reference import Window, columns, sinks
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from penstock import caches as kv_caches
from penstock.caches.base import LayerCache


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers grow by 16 columns instead of 256, so that short tests grow often."""
    monkeypatch.setattr(LayerCache, "step", 16)


def run(kind: Kind, how: settings | None = None) -> None:
    run_state_machine_as_test(partial(CacheMachine, kind), settings=how)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_cache_matches_token_list(kind: Kind) -> None:
    run(kind)


def test_reference_implementations_agree_without_keep() -> None:
    window = Window(5)
    for past in range(12):
        before = list(range(past))
        for count in range(1, 9):
            chunk = list(range(past, past + count))
            for query in range(count):
                assert columns(window, before, chunk, query) == sinks(window, before, chunk, query)


# ---- negative controls: each class below is wrong in one way


def with_parent_name(cls: type) -> type:
    """Give a broken class its base's name, which is the name in files."""
    cls.__name__ = cls.__mro__[1].__name__
    return cls


@with_parent_name
class WrongSlot(kv_caches.RotatingKVCache):
    """Is off by one when the ring wraps around."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        if self.offset == self.max_size:
            *front, index = self.state
            self.state = (*front, index - 1)
        return super().update_and_fetch(keys, values)


@with_parent_name
class ForgetsKeepInMerge(kv_caches.SinkRotatingKVCache):
    """Merges without kept tokens."""

    def merge(self, caches: list[Any]) -> Any:
        plain = [kv_caches.RotatingKVCache(cache.max_size) for cache in caches]
        for new, cache in zip(plain, caches, strict=True):
            keys, values, offset, _, size, index = cache.state
            new.state = (keys, values, offset, 0, size, index)
        return plain[0].merge(plain)


@with_parent_name
class DoesNotTrim(kv_caches.KVCache):
    """Returns the number of trimmed tokens without trimming."""

    def trim(self, n: int) -> int:
        return min(n, self.offset)


@with_parent_name
class CopyIsSelf(kv_caches.KVCache):
    """Returns itself as a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@with_parent_name
class MasksOneTooMany(kv_caches.RotatingKVCache):
    """Hides the oldest token of the window from a chunk."""

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1 and window_size is None:
            window_size = self.max_size - 1
        return super().make_mask(N, window_size, return_array)


@with_parent_name
class ExtendsUnpadded(kv_caches.BatchKVCache):
    """Ignores the padding of joining rows."""

    def extend(self, other: Any) -> None:
        super().extend(other)
        keys, values, offset, left_padding, index = self.state
        self.state = keys, values, offset, left_padding * 0, index


@with_parent_name
class FiltersOffsetsOnly(kv_caches.BatchKVCache):
    """Keeps the first rows' KV whichever rows are selected."""

    def filter(self, batch_indices: Any) -> None:
        held = self.keys, self.values
        super().filter(batch_indices)
        count, columns_used = len(self.offset), self._idx
        self.keys, self.values = (side[:count, :, :columns_used] for side in held)


@with_parent_name
class KeysForValues(kv_caches.QuantizedKVCache):
    """Writes keys as values."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return super().update_and_fetch(keys, keys)


RING = ring("", kv_caches.RotatingKVCache, 8, 0)
SINK_RING = ring("", kv_caches.SinkRotatingKVCache, 9, 3)
GROWING = growing("")
BROKEN = [
    replace(RING, name="wrong slot", single=partial(WrongSlot, 8)),
    replace(RING, name="masks one too many", single=partial(MasksOneTooMany, 8)),
    replace(SINK_RING, name="forgets keep in merge", single=partial(ForgetsKeepInMerge, 9, 3)),
    replace(GROWING, name="trims in name only", single=DoesNotTrim),
    replace(GROWING, name="shares its copy", single=CopyIsSelf),
    replace(GROWING, name="extends unpadded", batch=ExtendsUnpadded),
    replace(GROWING, name="filters offsets only", batch=FiltersOffsetsOnly),
    replace(
        GROWING,
        name="keys for values",
        single=partial(KeysForValues, GROUP, 8),
        dtypes=(mx.float32,),
    ),
]


def causes(error: BaseException) -> list[BaseException]:
    """List the errors in a group."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes(inner)]
    return [error]


@pytest.mark.parametrize("kind", BROKEN, ids=[kind.name for kind in BROKEN])
def test_state_machine_detects_broken_caches(kind: Kind) -> None:
    how = settings(phases=[Phase.generate], max_examples=200, print_blob=False)
    with pytest.raises((AssertionError, BaseExceptionGroup)) as caught:
        run(kind, how)
    assert {type(cause) for cause in causes(caught.value)} == {AssertionError}
