"""A Hypothesis state machine that uses caches as generation does, and in unusual ways."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from cache_kinds import GROUP, WIDTH, Kind, numbers, rule_of
from cache_reference import PADDING, Row, Window, read, seen, sinks, spell
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mlx.utils import tree_flatten

from penstock import caches

MOST_SINGLES, MOST_BATCHES, MOST_ROWS = 4, 2, 5

chunk_sizes = st.one_of(st.just(1), st.integers(2, 6), st.integers(7, 40))
left_paddings = st.lists(st.integers(0, 6), min_size=1, max_size=3)


@dataclass
class Single:
    """A cache of one sequence and its tokens."""

    cache: Any
    row: Row
    fresh: bool = False
    """Whether its buffers are those of its first update: not loaded, cut out, or outgrown."""


@dataclass
class Batch:
    """A batch cache and the tokens of each row."""

    cache: Any
    rows: list[Row]


class CacheMachine(RuleBasedStateMachine):
    """Single and batch caches of one kind under random operations."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.singles: list[Single] = []
        self.batches: list[Batch] = []
        self.last_token = 0
        self.dtype, self.heads = mx.float32, 2

    # ---- making them

    @initialize(data=st.data(), heads=st.integers(1, 3))
    def choose_numbers(self, data: st.DataObject, heads: int) -> None:
        """Draw the dtype of keys and values: mlx-lm's caches accept integers, too."""
        self.dtype, self.heads = data.draw(st.sampled_from(self.kind.dtypes)), heads

    @precondition(lambda self: len(self.singles) < MOST_SINGLES)
    @rule()
    def new_single(self) -> None:
        self.singles.append(Single(self.kind.single(), [], fresh=True))

    @precondition(lambda self: len(self.batches) < MOST_BATCHES)
    @rule(padding=left_paddings, more=st.integers(1, 12))
    def new_batch(self, padding: list[int], more: int) -> None:
        """Start a batch with left padding: one chunk of prompts of several lengths."""
        padding = [p - min(padding) if self.kind.left_padded else 0 for p in padding]
        batch = Batch(self.kind.make_batch(padding), [[] for _ in padding])
        tokens = max(padding) + more
        self._feed_batch(batch, [tokens - p for p in padding], left=padding)
        self.batches.append(batch)

    @precondition(lambda self: self.singles and len(self.batches) < MOST_BATCHES)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        """Merge some sequences; the originals stay unchanged."""
        chosen = data.draw(
            st.lists(st.sampled_from(range(len(self.singles))), unique=True, min_size=1, max_size=3)
        )
        singles = [self.singles[i] for i in chosen]
        merged = singles[0].cache.merge([single.cache for single in singles])
        self.batches.append(Batch(merged, [list(single.row) for single in singles]))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        row = data.draw(st.integers(0, len(batch.rows) - 1))
        taken = Single(batch.cache.extract(row), list(batch.rows[row]))
        self._adopt(taken)

    @precondition(lambda self: self.singles or self.batches)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Copy a cache; original and copy are independent."""
        chosen = data.draw(st.sampled_from([*self.singles, *self.batches]))
        if isinstance(chosen, Single):
            self._adopt(copy.deepcopy(chosen))
        else:
            self.batches = [*self.batches, copy.deepcopy(chosen)][-MOST_BATCHES:]

    def _adopt(self, single: Single) -> None:
        self.singles = [*self.singles, single][-MOST_SINGLES:]

    # ---- reading tokens

    @precondition(lambda self: self.singles)
    @rule(data=st.data(), tokens=chunk_sizes, as_array=st.booleans())
    def read_chunk(self, data: st.DataObject, tokens: int, as_array: bool) -> None:
        single = data.draw(st.sampled_from(self.singles))
        self._feed_single(single, tokens, as_array=as_array)

    @precondition(lambda self: self.singles)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def generate(self, data: st.DataObject, tokens: int) -> None:
        single = data.draw(st.sampled_from(self.singles))
        for _ in range(tokens):
            self._feed_single(single, 1)

    @precondition(lambda self: self.singles and self.kind.window.keep == 0)
    @rule(data=st.data(), tokens=chunk_sizes, window_size=st.integers(1, 12))
    def read_in_window(self, data: st.DataObject, tokens: int, window_size: int) -> None:
        """Read as a layer whose sliding window is smaller than the cache."""
        single = data.draw(st.sampled_from(self.singles))
        window_size = min(window_size, self.kind.window.max_size or window_size)
        self._feed_single(single, tokens, window_size=window_size)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def generate_batch(self, data: st.DataObject, tokens: int) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        for _ in range(tokens):
            self._feed_batch(batch, [1] * len(batch.rows))

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), tokens=chunk_sizes)
    def read_batch_chunk(self, data: st.DataObject, tokens: int) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self._feed_batch(batch, [tokens] * len(batch.rows))

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), step=st.integers(2, 40))
    def read_prompts(self, data: st.DataObject, step: int) -> None:
        """Read prompts of several lengths with right padding, `step` columns at a time."""
        batch = data.draw(st.sampled_from(self.batches))
        count = len(batch.rows)
        lengths = data.draw(st.lists(st.integers(1, 24), min_size=count, max_size=count))
        longest = max(lengths)
        if longest % step == 1:  # a chunk of one column counts as generation, not as a prompt
            step += 1 if longest > step else 0
        if longest % step == 1 or longest == 1:
            return
        padding = [longest - length for length in lengths]
        if max(padding):
            batch.cache.prepare(lengths=lengths, right_padding=padding)
        for start in range(0, longest, step):
            width = min(step, longest - start)
            real = [max(0, min(width, length - start)) for length in lengths]
            self._feed_batch(batch, real, right=[width - n for n in real])
        if max(padding):
            batch.cache.finalize()

    @precondition(lambda self: self.singles or self.batches)
    @rule(data=st.data())
    def read_nothing(self, data: st.DataObject) -> None:
        """Write no tokens: all contents are returned, and nothing changes."""
        chosen = data.draw(st.sampled_from([*self.singles, *self.batches]))
        single = isinstance(chosen, Single)
        rows = [chosen.row] if single else chosen.rows
        keys, values = chosen.cache.update_and_fetch(*self._spell([[] for _ in rows]))
        found = read(*(numbers(chosen.cache, side) for side in (keys, values)))
        for row, tokens in zip(rows, found.tolist(), strict=True):
            expected = sorted(self.kind.window.retained(row))
            got = sorted(token for token in tokens if token in row)
            if not single and self._is_full(row) and len(got) < len(expected):
                # The next token takes the oldest one's place: a batch may have let go of it.
                del expected[self.kind.window.keep]
            assert got == expected, self._differs(0, got, expected)
            assert not single or len(tokens) == len(expected), "columns that are no token's"

    # ---- changing them

    @precondition(lambda self: self.singles)
    @rule(data=st.data(), tokens=st.integers(0, 12))
    def trim(self, data: st.DataObject, tokens: int) -> None:
        single = data.draw(st.sampled_from(self.singles))
        max_size = self.kind.window.max_size
        whole = max_size is None or len(single.row) < max_size
        assert single.cache.is_trimmable() == whole, "is_trimmable"
        if not whole:
            return
        expected = min(tokens, len(single.row))
        assert single.cache.trim(tokens) == expected, "tokens trimmed"
        single.row = single.row[: len(single.row) - expected]

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def trim_batch(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        tokens = data.draw(st.integers(0, min(len(row) for row in batch.rows)))
        if not batch.cache.is_trimmable():
            assert self.kind.window.max_size is not None, "an unbounded batch can be trimmed"
            return
        assert batch.cache.trim(tokens) == tokens, "tokens trimmed"
        batch.rows = [row[: len(row) - tokens] for row in batch.rows]

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), as_list=st.booleans())
    def filter(self, data: st.DataObject, as_list: bool) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        rows = st.sampled_from(range(len(batch.rows)))
        chosen = data.draw(st.lists(rows, unique=True, min_size=1))
        batch.cache.filter(chosen if as_list else mx.array(chosen))
        batch.rows = [batch.rows[i] for i in chosen]

    @precondition(
        lambda self: (
            len(self.batches) == 2 and sum(len(batch.rows) for batch in self.batches) <= MOST_ROWS
        )
    )
    @rule(swap=st.booleans())
    def extend(self, swap: bool) -> None:
        first, second = reversed(self.batches) if swap else self.batches
        first.cache.extend(second.cache)
        first.rows = first.rows + second.rows
        self.batches = [first]

    @precondition(lambda self: self.singles or self.batches)
    @rule(data=st.data())
    def save_and_load(self, data: st.DataObject) -> None:
        """Write a cache to a file and continue with the loaded one."""
        chosen = data.draw(st.sampled_from([*self.singles, *self.batches]))
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "cache.safetensors")
            caches.save_prompt_cache(path, [chosen.cache])
            (loaded,) = caches.load_prompt_cache(path)
        assert type(loaded).__name__ == type(chosen.cache).__name__
        chosen.cache = loaded
        if isinstance(chosen, Single):
            chosen.fresh = False

    @precondition(
        lambda self: (
            self.dtype == mx.float32 and any(hasattr(s.cache, "to_quantized") for s in self.singles)
        )
    )
    @rule(data=st.data(), tokens=st.integers(1, 12), bits=st.sampled_from([4, 8]))
    def quantize_aside(self, data: st.DataObject, tokens: int, bits: int) -> None:
        """Quantize a copy of a sequence and continue with it; the original is unchanged."""
        single = data.draw(st.sampled_from(self.singles))
        quantized = single.cache.to_quantized(group_size=GROUP, bits=bits)
        aside = Single(quantized, list(single.row))
        self._feed_single(aside, 1)
        self._feed_single(aside, tokens)

    @precondition(lambda self: any(single.row for single in self.singles))
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Write a chunk that does not fit; it must be refused without change."""
        single = data.draw(st.sampled_from([s for s in self.singles if s.row]))
        keys, values = self._spell([[PADDING, PADDING]])
        more = mx.concatenate([keys, keys[:, :1]], 1), mx.concatenate([values, values[:, :1]], 1)
        wrong = data.draw(
            st.sampled_from(
                [
                    (keys[0], values[0]),
                    more,
                    (keys, values[:, :, :1]),
                    (keys.astype(mx.float16), values.astype(mx.float16)),
                    (mx.concatenate([keys, keys]), mx.concatenate([values, values])),
                ]
            )
        )
        try:
            single.cache.update_and_fetch(*wrong)
        except (TypeError, ValueError):
            return
        raise AssertionError(f"keys {wrong[0].shape} {wrong[0].dtype} were accepted")

    # ---- what must hold

    @invariant()
    def counts_are_right(self) -> None:
        max_size = self.kind.window.max_size
        for single in self.singles:
            tokens = len(single.row)
            assert single.cache.offset == tokens, "offset"
            assert single.cache.size() == min(tokens, max_size or tokens), "size"
            assert not (tokens and single.cache.empty()), "empty"
            self._check_memory(single.cache)
        for batch in self.batches:
            assert batch.cache.offset.tolist() == [len(row) for row in batch.rows], "offsets"
            self._check_memory(batch.cache)

    def _check_memory(self, cache: Any) -> None:
        """Compare `nbytes` with the existing arrays, and the ring with its bound."""
        _ = cache.state  # read after each chunk; a ring shared by layers lets go of the chunk then
        held = [a for _, a in tree_flatten((cache.keys, cache.values)) if isinstance(a, mx.array)]
        assert cache.nbytes == sum(array.nbytes for array in held), "nbytes"
        max_size = self.kind.window.max_size
        if max_size is not None and held:
            assert {array.shape[2] for array in held} <= set(range(max_size + 1)), "columns held"
            assert cache.growths == 0 or self.kind.capacity is not None, "growths"

    # ---- feeding and looking

    def _tokens(self, count: int) -> Row:
        self.last_token += count
        return list(range(self.last_token - count + 1, self.last_token + 1))

    def _spell(self, tokens: list[Row]) -> tuple[mx.array, mx.array]:
        return spell(tokens, WIDTH, self.dtype, self.heads)

    def _feed_single(
        self, single: Single, count: int, *, window_size: int | None = None, as_array: bool = False
    ) -> None:
        chunk, cache = self._tokens(count), single.cache
        mask = cache.make_mask(count, window_size=window_size, return_array=as_array)
        fetched = cache.update_and_fetch(*self._spell([chunk]))
        found = seen(*(numbers(cache, side) for side in fetched), mask, count)[0]
        window, rule = self.kind.window, rule_of(cache)
        if window_size is not None:
            window, rule = Window(window_size), sinks
        for query in range(count):
            expected = sorted(rule(window, single.row, chunk, query))
            assert found[query] == expected, self._differs(query, found[query], expected)
        single.row = single.row + chunk
        capacity = self.kind.capacity
        if capacity is None:
            if single.fresh or self._is_full(single.row):
                self._check_columns(cache)
            return
        single.fresh = single.fresh and len(single.row) <= capacity
        if single.fresh:
            held = cache.growths, cache.capacity
            assert held == (0, capacity), f"growths, columns: {held}, for {capacity} asked for"

    def _feed_batch(
        self,
        batch: Batch,
        lengths: list[int],
        *,
        left: list[int] | None = None,
        right: list[int] | None = None,
    ) -> None:
        """Read `lengths[i]` tokens in row i, between `left[i]` and `right[i]` of padding."""
        nothing = [0] * len(lengths)
        left, right, cache = left or nothing, right or nothing, batch.cache
        chunks = [self._tokens(length) for length in lengths]
        rotated = getattr(cache, "rotated", False)
        padded = [
            [PADDING] * before + chunk + [PADDING] * after
            for before, chunk, after in zip(left, chunks, right, strict=True)
        ]
        width = len(padded[0])
        mask = cache.make_mask(width)
        fetched = cache.update_and_fetch(*self._spell(padded))
        found = seen(*(numbers(cache, side) for side in fetched), mask, width)
        for row, (before, chunk) in enumerate(zip(batch.rows, chunks, strict=True)):
            for query in range(len(chunk)):
                expected = sorted(sinks(self.kind.window, before, chunk, query))
                got = found[row][left[row] + query]
                if rotated and self._hides_one(before, width) and got == expected[1:]:
                    continue
                assert got == expected, f"row {row}, " + self._differs(query, got, expected)
        batch.rows = [before + chunk for before, chunk in zip(batch.rows, chunks, strict=True)]
        if not any(right) and self.kind.capacity is None and any(map(self._is_full, batch.rows)):
            self._check_columns(cache)

    def _hides_one(self, before: Row, width: int) -> bool:
        """Return whether mlx-lm's batch mask may hide the oldest token, as its test demands.

        It does in a chunk that follows a rotation, in rows with padding still in the ring.
        """
        max_size, keep = self.kind.window.max_size, self.kind.window.keep
        return max_size is not None and keep == 0 and width > 1 and len(before) < max_size

    def _is_full(self, row: Row) -> bool:
        return self.kind.window.max_size is not None and len(row) >= self.kind.window.max_size

    def _check_columns(self, cache: Any) -> None:
        """Check that a ring has exactly its columns.

        So it must from the first update on. A row that was cut out of a batch has the columns
        it uses, until it needs more.
        """
        max_size = self.kind.window.max_size
        if max_size is not None:
            keys = tree_flatten(cache.keys)
            assert {array.shape[2] for _, array in keys} == {max_size}, "columns allocated"

    @staticmethod
    def _differs(query: int, got: Row, expected: Row) -> str:
        lost, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
        return f"query {query} misses tokens {lost}, should not see {extra}; sees {got}"
