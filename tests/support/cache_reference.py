"""Which tokens attention must see in a cache, derived from lists of tokens.

Every token of a test has a number of its own, and keys and values that spell it. A `Row` is the
list of numbers a sequence has read; `visible` says which of them a query may see. `Seen` reads
the same from a cache: what `update_and_fetch` returned under the mask that `make_mask` gave
just before, whatever the order in which the columns lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

Row = list[int]
PADDING = -9_999


@dataclass(frozen=True)
class Window:
    """Visibility rule of one kind of cache."""

    max_size: int | None = None
    keep: int = 0

    def retained(self, tokens: Row) -> Row:
        """Return the tokens that the last one sees, including itself."""
        if self.max_size is None or len(tokens) <= self.max_size:
            return list(tokens)
        return tokens[: self.keep] + tokens[len(tokens) - (self.max_size - self.keep) :]


def sinks(window: Window, before: Row, chunk: Row, query: int) -> Row:
    """Return the kept and the most recent tokens, for any chunk: the plain rule."""
    return window.retained(before + chunk[: query + 1])


def columns(window: Window, before: Row, chunk: Row, query: int) -> Row:
    """mlx-lm's rule for one sequence: a chunk slides a window of columns over the kept ones too.

    Row i of a chunk that follows a full window sees the columns i .. of (kept + recent + chunk),
    so that the kept tokens are hidden from all but the first row. A single token sees them all.
    """
    if window.max_size is None or len(chunk) == 1:
        return sinks(window, before, chunk, query)
    past = Window(window.max_size - 1, window.keep).retained(before) if window.max_size > 1 else []
    own = len(past) + query
    return (past + chunk)[max(0, own - window.max_size + 1) : own + 1]


Visible = Callable[[Window, Row, Row, int], Row]


WHOLE = 4
"""By which numbers are multiplied that are to be integers."""


def spell(
    tokens: Sequence[Sequence[int]], width: int, dtype: mx.Dtype = mx.float32, heads: int = 2
) -> tuple[mx.array, mx.array]:
    """Return keys and values (batch, heads, tokens, width) for rows of token numbers.

    Constant along the width, so that a quantizer keeps them; different in each head, and
    different as key and as value, so that neither can stand for the other.
    """
    numbers = np.array(tokens, np.float32)[:, None, :, None]
    head = np.arange(heads, dtype=np.float32)[None, :, None, None] / 4
    keys = np.broadcast_to(numbers + head, (*numbers.shape[:1], heads, numbers.shape[2], width))
    scale = 1 if mx.issubdtype(dtype, mx.floating) else WHOLE
    return mx.array(keys * scale).astype(dtype), mx.array((-keys - 0.5) * scale).astype(dtype)


def read(keys: mx.array, values: mx.array) -> np.ndarray:
    """Return the token numbers (batch, columns) that keys and values spell.

    Raises AssertionError where heads, widths, keys and values do not tell the same story.
    Zeros (a buffer never written) read as number 0.
    """
    scale = 1 if mx.issubdtype(keys.dtype, mx.floating) else WHOLE
    found, paired = (np.array(side.astype(mx.float32)) / scale for side in (keys, values))
    blank = (found == 0).all((1, 3)) & (paired == 0).all((1, 3))
    head = np.arange(keys.shape[1], dtype=np.float32)[None, :, None, None] / 4
    numbers = np.rint(found[:, 0, :, 0])
    expected = numbers[:, None, :, None] + head
    for name, side, want in (("keys", found, expected), ("values", paired, -expected - 0.5)):
        wrong = (np.abs(side - want) > 0.1).any((1, 3)) & ~blank
        assert not wrong.any(), f"{name} in columns {np.argwhere(wrong).tolist()} are not a token's"
    return np.where(blank, 0, numbers).astype(int)


def permitted(mask: Any, batch: int, queries: int, held: int) -> np.ndarray:
    """Return the mask as (batch, queries, columns) of bool, as attention would apply it."""
    if mask is None:
        assert queries == 1, "no mask at all for several queries"
        return np.ones((batch, 1, held), bool)
    if isinstance(mask, str):
        assert mask == "causal", mask
        own = np.arange(held - queries, held)[:, None]
        return np.broadcast_to(np.arange(held)[None, :] <= own, (batch, queries, held))
    allowed = np.array(mask)
    assert allowed.shape[-1] == held, f"mask for {allowed.shape[-1]} columns, {held} are there"
    if allowed.ndim == 4:
        allowed = allowed[:, 0]
    return np.broadcast_to(allowed, (batch, queries, held))


def seen(keys: mx.array, values: mx.array, mask: Any, queries: int) -> list[list[Row]]:
    """Return the sorted tokens that each query of each row sees."""
    numbers = read(keys, values)
    allowed = permitted(mask, *numbers.shape[:1], queries, numbers.shape[1])
    return [
        [sorted(numbers[row][allowed[row, query]].tolist()) for query in range(queries)]
        for row in range(numbers.shape[0])
    ]
